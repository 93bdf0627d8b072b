"""Codec, seal, admission, probe: each rule of theirs."""

from __future__ import annotations

import asyncio
import random
import stat
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from sim.loop import run
from sim.network import Faults, Network, SimPeer, cluster
from valence.peer.identity import Identity, tls_contexts
from valence.peer.seal import NOBODY, SKEW_S_MAX, Dropped, Seal
from valence.peer.settings import SettingsError, load
from valence.protocols.capacity import matching
from valence.protocols.capacity.admission import Admission
from valence.protocols.capacity.door import Door, Guest
from valence.protocols.config import LAN
from valence.protocols.membership.members import Members, State, briefs
from valence.protocols.strategies.base import Placed, Unit
from valence.protocols.strategies.probe.probe import Probe
from valence.protocols.wire.codec import (
    VERSION,
    FrameKind,
    Malformed,
    decode,
    encode,
    pack_member,
    read_member,
)
from valence.protocols.wire.messages import (
    BY_NUMBER,
    AttemptKey,
    Capacity,
    Contact,
    Hello,
    Member,
    Message,
    Needs,
    Ping,
    Reserve,
    Room,
    Traits,
    Vacancy,
    numbered,
)


def contact(number: int) -> Contact:
    return Contact(random.Random(number).randbytes(20), f"host{number}", 7000)


# --------------------------------------------------------------------------- codec


def test_messages_come_back_as_they_were() -> None:
    ask = Reserve(asks=(Room(needs=Needs(capacity=Capacity(millicores=500)), count=3),))
    found = decode(encode(FrameKind.REQUEST, 7, ask))
    assert (found.kind, found.id, found.message) == (FrameKind.REQUEST, 7, ask)


def test_numbers_are_unique_and_kept() -> None:
    assert BY_NUMBER[4] is Ping
    assert BY_NUMBER[20] is Reserve
    assert len(BY_NUMBER) == len(set(BY_NUMBER.values()))
    with pytest.raises(ValueError, match="is already Ping"):
        numbered(4)(Ping)
    taken = type("Taken", (Message,), {"__module__": "valence.protocols.strategies.probe.messages"})
    with pytest.raises(ValueError, match="may not use it"):
        numbered(110)(taken)
    foreign = type("Foreign", (Message,), {"__module__": "elsewhere.messages"})
    with pytest.raises(ValueError, match="may not use it"):
        numbered(99)(foreign)


def test_fields_of_a_newer_version_are_passed_over() -> None:
    data = encode(FrameKind.TELL, 0, Vacancy(free=Capacity(millicores=1)))

    row = msgpack.unpackb(data)
    assert decode(msgpack.packb([*row, "new field"])).message == Vacancy(
        free=Capacity(millicores=1)
    )


def test_values_that_a_newer_version_has_made_longer_are_read_as_far_as_known() -> None:
    contact = (b"1" * 20, "host", 7000, "news")
    member = (contact, "http://h", (1000, 2, 3, 4, "news"), ("x86_64",), 1, 2, 0, "9.9", "news", 5)
    known = Member(
        Contact(b"1" * 20, "host", 7000), "http://h", Capacity(1000, 2, 3, 4), Traits("x86_64"),
        1, 2, 0, "9.9",
    )  # fmt: skip
    assert read_member(msgpack.packb(member)) == known
    hello = decode(msgpack.packb([VERSION, 0, 7, Hello.number, member, "chord", "news"])).message
    assert hello == Hello(member=known, overlay="chord")
    wrong = (contact, 5, *member[2:])
    with pytest.raises(Malformed):
        read_member(msgpack.packb(wrong))
    with pytest.raises(Malformed):
        decode(msgpack.packb([VERSION, 0, 7, Hello.number, wrong]))


def test_what_is_no_member_is_counted_and_passed_over() -> None:
    me, other = (Member(contact(n), f"http://{n}") for n in (1, 2))
    members = Members(me, LAN)
    members.hear((b"", b"\xc1", msgpack.packb([1, 2]), pack_member(other), b"\x90" * 50), 0.0)
    assert members.malformed == 4
    assert members.get(other.contact.id) == other


def test_two_views_compare_by_digests_and_exchange_only_what_differs() -> None:
    everybody = [Member(contact(n), f"http://{n}") for n in range(300)]
    views = [Members(everybody[i], LAN) for i in range(2)]
    for view, known in zip(views, (everybody[:290], everybody[10:]), strict=True):
        for member in known:
            view.apply(member, 0.0)
    views[1].judge(everybody[100].contact.id, State.DEAD, 1.0)
    digests = views[0].digests()
    parts, brief, full = views[1].differing(digests, 1.0)
    assert 0 < len(brief) + len(full) < 120, "most of what both know is not told"
    views[0].hear(full, 1.0)
    lacks, wanted = views[0].compare(parts, len(digests) // 4, [*brief, *briefs(full)])
    views[1].hear(lacks, 1.0)
    views[0].hear([found for p in wanted if (found := views[1].packed(p))], 1.0)
    assert views[0].digest == views[1].digest
    assert views[0].count == views[1].count == 299
    assert views[1].differing(views[0].digests(), 1.0) == ((), (), ())
    for bad in (b"12345", b"1" * 12, b"1" * 8192):
        with pytest.raises(ValueError, match="digests"):
            views[1].differing(bad, 1.0)


def test_helpers_are_found_though_nearly_all_that_are_known_are_dead() -> None:
    members = Members(Member(contact(0), "http://0"), LAN)
    for n in range(1, 600):
        members.apply(Member(contact(n), f"http://{n}", state=0 if n < 4 else 2), 0.0)
    rng = random.Random(1)
    for _ in range(50):
        drawn = members.draw(rng, 2, without=(contact(0).id,))
        assert len({m.contact.id for m in drawn}) == 2
        assert all(m.state == State.ALIVE for m in drawn)


def test_an_objection_is_news_also_where_it_comes_of_a_crowd_of_rumours() -> None:
    me = Member(contact(0), "http://0")
    members = Members(me, LAN)
    others = [pack_member(Member(contact(n), f"http://{n}")) for n in range(1, 200)]
    members.hear([pack_member(me._replace(state=1)), *others], 0.0)
    assert members.me.incarnation == 1
    assert members.rumours(5) == (pack_member(members.me),)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_crash_the_decoder(data: bytes) -> None:
    try:
        decode(data)
    except Malformed:
        pass


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_wellformed_msgpack_crashes_the_decoder(data: st.DataObject) -> None:

    leaf = (
        st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=25) | st.text(max_size=5)
    )
    tree = st.recursive(leaf, lambda inner: st.lists(inner, max_size=5), max_leaves=20)
    row = [VERSION, data.draw(st.integers(0, 3)), 1, data.draw(st.sampled_from(sorted(BY_NUMBER)))]
    row += data.draw(st.lists(tree, max_size=6))
    try:
        decode(msgpack.packb(row))
    except Malformed:
        pass


# --------------------------------------------------------------------------- seal


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def pair(key: str = "k" * 20, other: str = "k" * 20) -> tuple[Seal, Seal, Clock]:
    clock = Clock()
    return Seal(b"a" * 20, key, clock), Seal(b"b" * 20, other, clock), clock


def why(seal: Seal, datagram: bytes) -> str:
    with pytest.raises(Dropped) as error:
        seal.open(datagram)
    return str(error.value)


def test_a_sealed_datagram_is_opened_once() -> None:
    a, b, _ = pair()
    datagram = a.seal(b"b" * 20, b"hello")
    assert b.open(datagram) == (b"a" * 20, b"hello", True)
    assert why(b, datagram) == "replay"


def test_datagrams_may_come_in_any_order() -> None:
    a, b, _ = pair()
    sent = [a.seal(b"b" * 20, bytes([n])) for n in range(200)]
    random.Random(1).shuffle(sent)
    assert sorted(b.open(d)[1][0] for d in sent) == list(range(200))
    assert all(why(b, d) == "replay" for d in sent)


def test_wrong_key_garbage_and_somebody_elses_are_dropped() -> None:
    a, b, _ = pair(other="x" * 20)
    datagram = a.seal(b"b" * 20, b"hello")
    assert why(b, datagram) == "key"
    a, b, _ = pair()
    assert why(b, a.seal(b"c" * 20, b"for another")) == "key"
    datagram = bytearray(a.seal(b"b" * 20, b"hello"))
    datagram[-1] ^= 1
    assert why(b, bytes(datagram)) == "key"
    assert why(b, b"") == "garbage"
    assert why(b, random.Random(1).randbytes(500)) in ("garbage", "key")
    assert not b._sessions, "who has no key makes no memory grow"


def test_old_datagrams_are_dropped_and_hello_needs_no_id() -> None:
    a, b, clock = pair()
    old = a.seal(b"b" * 20, b"old")
    clock.now += SKEW_S_MAX + 1
    assert why(b, old) == "clock"
    assert b.open(a.seal(NOBODY, b"who is there?"))[2] is False


def test_secret_files_are_for_their_owner_only(tmp_path: Path) -> None:
    identity = Identity.load(tmp_path)
    tls_contexts(identity, "k" * 20, tmp_path)
    assert Identity.load(tmp_path).id == identity.id
    for name in ("identity.pem", "tls.pem"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


# --------------------------------------------------------------------------- settings


def test_flags_come_before_variables_before_the_file(tmp_path: Path) -> None:
    secrets = {"VALENCE_CLUSTER_KEY": "k" * 20, "VALENCE_TOKEN": "t" * 20}
    (tmp_path / "peer.toml").write_text('site = "file"\nlabels = ["x"]\ncpus = 3\n')
    flags = {"data": str(tmp_path), "cpus": "1"}
    found = load(flags, {**secrets, "VALENCE_SITE": "variable"})
    assert (found.cpus, found.site, found.labels) == (1.0, "variable", ("x",))
    (tmp_path / "token").write_text("from-a-file-from-a-file\n")
    del secrets["VALENCE_TOKEN"]
    secrets["VALENCE_TOKEN_FILE"] = str(tmp_path / "token")
    assert load(flags, secrets).token == "from-a-file-from-a-file"


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ({}, {}, "VALENCE_CLUSTER_KEY_FILE"),
        ({}, {"VALENCE_CLUSTER_KEY": "short", "VALENCE_TOKEN": "t" * 20}, "shorter than 16"),
        ({"cpus": "many"}, {}, "--cpus"),
        ({}, {"VALENCE_PORT": "99999"}, "VALENCE_PORT"),
        ({"config": "/no/such/file"}, {}, "/no/such/file"),
    ],
)
def test_a_wrong_setting_is_named(
    flags: dict[str, str], environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        load({"data": str(tmp_path), **flags}, environment)


# --------------------------------------------------------------------------- matching


def test_the_need_that_nobody_meets_is_named() -> None:
    here = [
        TypeAdapter(Member).validate_python(
            ((bytes([n] * 20), "h", 1), "u", (2000, 1 << 30), ("x86_64", "linux"))
        )
        for n in range(4)
    ]
    need = Needs(capacity=Capacity(millicores=1000, gpus=1))
    assert matching.explain(here, need) == "needs 1 GPU, but none of the 4 peers has one"
    need = Needs(capacity=Capacity(millicores=1000), arch="arm64", labels=("ssd",))
    assert "arch arm64 and label ssd" in str(matching.explain(here, need))
    assert matching.explain(here, Needs(capacity=Capacity(millicores=2000))) is None


# --------------------------------------------------------------------------- admission

HOME = b"h" * 20


def admission(millicores: int = 4000) -> Admission:
    return Admission(Capacity(millicores=millicores, memory_bytes=1 << 30), Traits(), LAN)


def room(millicores: int = 1000, count: int = 1, **more: object) -> Room:
    return Room(needs=Needs(capacity=Capacity(millicores=millicores)), count=count, **more)


def test_never_more_than_there_is() -> None:
    peer = admission()
    grant = peer.reserve(HOME, room(count=9), 0.0)
    assert len(grant.leases) == 4
    assert "no capacity for more" in grant.refusal
    assert "busy" in peer.reserve(b"x" * 20, room(), 0.0).refusal
    assert not peer.reserve(b"x" * 20, room(), 0.0).leases
    peer.sanity_check()


def test_a_lease_expires_and_can_not_be_committed_after() -> None:
    peer = admission()
    (lease,) = peer.reserve(HOME, room(4000), 0.0).leases
    later = LAN.lease_ttl_s + 0.1
    assert peer.commit(HOME, lease, "unit", later) == "the lease has expired"
    assert peer.free == peer.capacity
    (lease,) = peer.reserve(HOME, room(4000), later).leases
    assert peer.commit(b"x" * 20, lease, "unit", later) == "the lease has expired"
    assert peer.commit(HOME, lease, "unit", later) == "run"
    peer.release("unit")
    assert peer.free == peer.capacity


def test_leases_fall_with_their_home() -> None:
    peer = admission()
    (lease,) = peer.reserve(HOME, room(4000), 0.0).leases
    peer.forsake(b"x" * 20)
    assert peer.free != peer.capacity
    peer.forsake(HOME)
    assert peer.free == peer.capacity
    assert peer.commit(HOME, lease, "unit", 0.1) == "the lease has expired"
    peer.sanity_check()


def test_the_queue_is_earliest_deadline_first() -> None:
    peer = admission(1000)
    (first,) = peer.reserve(HOME, room(runtime_s=0.1), 0.0).leases
    assert peer.commit(HOME, first, "first", 0.0) == "run"
    late = peer.reserve(HOME, room(runtime_s=0.1, queue=True), 0.0)
    soon = peer.reserve(HOME, room(runtime_s=0.1, queue=True, deadline_in_s=5.0), 0.0)
    assert (late.queued, soon.queued) == (1, 1)
    assert peer.commit(HOME, late.leases[0], "late", 0.0) == "wait"
    assert peer.commit(HOME, soon.leases[0], "soon", 0.0) == "wait"
    peer.release("first")
    assert peer.starts(0.1) == ["soon"]
    peer.release("soon")
    assert peer.starts(0.2) == ["late"]


def test_the_queue_is_short_in_time() -> None:
    peer = admission(1000)
    grant = peer.reserve(HOME, room(count=1000, runtime_s=0.01, queue=True), 0.0)
    assert len(grant.leases) == 1 + 50
    assert not peer.reserve(HOME, room(runtime_s=0.1, queue=True), 0.0).leases
    assert not peer.reserve(HOME, room(queue=True), 0.0).leases, "unknown run times do not queue"


def test_nobody_queues_behind_work_of_unknown_or_great_length() -> None:
    for runtime_s in (None, 3600.0):
        peer = admission(1000)
        (first,) = peer.reserve(HOME, room(runtime_s=runtime_s), 0.0).leases
        peer.commit(HOME, first, "long", 0.0)
        assert not peer.reserve(HOME, room(runtime_s=0.01, queue=True), 0.0).leases
        peer = admission(1000)
        assert peer.reserve(HOME, room(runtime_s=runtime_s), 0.0).leases
        behind = peer.reserve(HOME, room(runtime_s=0.01, queue=True), 0.0)
        assert not behind.leases, "nor behind a lease for such work"


def test_a_large_unit_is_not_kept_waiting_by_small_ones() -> None:
    peer = admission(4000)
    small = peer.reserve(HOME, room(1000, 4), 0.0).leases
    for lease in small:
        peer.commit(HOME, lease, lease, 0.0)
    (hold,) = peer.reserve(HOME, room(4000, hold=True), 0.0).leases
    assert peer.commit(HOME, hold, "large", 0.0) == "wait"
    peer.release(small[0])
    assert peer.reserve(HOME, room(1000), 1.0).leases, "it may be overtaken for a moment"
    now = LAN.backfill_s_max + LAN.lease_ttl_s + 2
    assert not peer.reserve(HOME, room(1000), now).leases, "then the peer drains"
    for lease in small[1:]:
        peer.release(lease)
    assert peer.starts(now) == ["large"]


def test_a_queued_unit_that_waits_too_long_is_handed_back() -> None:
    peer = admission(1000)
    (first,) = peer.reserve(HOME, room(runtime_s=0.1), 0.0).leases
    peer.commit(HOME, first, "endless", 0.0)
    (lease,) = peer.reserve(HOME, room(runtime_s=0.1, queue=True), 0.0).leases
    peer.commit(HOME, lease, "waiting", 0.0)
    assert peer.overdue(LAN.patience_s - 0.1) == []
    assert peer.overdue(LAN.patience_s + 0.1) == ["waiting"]


def test_who_was_refused_hears_of_room_in_turn() -> None:
    peer = admission(1000)
    (lease,) = peer.reserve(HOME, room(), 0.0).leases
    peer.commit(HOME, lease, "unit", 0.0)
    peer.reserve(b"1" * 20, room(), 0.0)
    peer.reserve(b"2" * 20, room(), 0.0)
    assert peer.take_wish(1.0) is None, "there is no room yet"
    peer.release("unit")
    assert [peer.take_wish(1.0), peer.take_wish(1.0), peer.take_wish(1.0)] == [
        b"1" * 20,
        b"2" * 20,
        None,
    ]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_no_sequence_of_steps_over_books_or_leaks(seed: int) -> None:
    rng = random.Random(seed)
    peer = admission(4000)
    now = 0.0
    leases: list[int] = []
    units: list[object] = []
    for step in range(120):
        now += rng.random() * rng.choice([0.01, 1.0, 3.0])
        match rng.randrange(6):
            case 0 | 1:
                ask = room(
                    rng.choice([100, 1000, 4000]),
                    rng.randint(1, 6),
                    runtime_s=rng.choice([None, 0.01, 0.2]),
                    queue=rng.random() < 0.5,
                    hold=rng.random() < 0.2,
                    deadline_in_s=rng.choice([None, 1.0, 60.0]),
                )
                leases.extend(peer.reserve(HOME, ask, now).leases)
            case 2 if leases:
                lease = leases.pop(rng.randrange(len(leases)))
                if peer.commit(HOME, lease, step, now) in ("run", "wait"):
                    units.append(step)
            case 3 if leases:
                peer.give_back(HOME, (leases.pop(),))
            case 4 if units:
                peer.release(units.pop(rng.randrange(len(units))))
            case _:
                peer.starts(now)
        peer.sanity_check()
    for unit in units:
        peer.release(unit)
    peer.expire(now + 100)
    assert peer.free == peer.capacity


# --------------------------------------------------------------------------- probe


class Site(Guest):
    """A simulated peer that can be asked for room; what comes is begun and ended by the test."""

    def __init__(self, peer: SimPeer) -> None:
        self.admission = Admission(peer.capacity, peer.traits, peer.config)
        self.door = Door(peer.rpc, peer.members, self.admission, 5.0)
        self.door.open(self)
        self.asked = 0
        self.door.looked_at.append(self._look)

    def _look(self, sender, message):
        self.asked += isinstance(message, Reserve)

    def start(self, unit):
        raise AssertionError("the tests begin what they want themselves")


def unit(number: int, **more: object) -> Unit:
    needs = more.pop("needs", Needs(capacity=Capacity(millicores=1000)))
    return Unit(AttemptKey(workflow="w", task=f"t{number}", number=1), needs, **more)


class Bench:
    """A home with `probe`, and the doors of all peers."""

    def __init__(self, peers: list[SimPeer]) -> None:
        self.doors = {p.contact.id: Site(p) for p in peers}
        self.placed: list[Placed] = []
        me = peers[0]
        self.probe = Probe(me.rpc, me.members, me.rng, me.config, self.placed.extend)
        self.task = asyncio.ensure_future(self.probe.run())
        self.peers = peers

    async def until_placed(self, count: int, within_s: float) -> float:
        start = asyncio.get_running_loop().time()
        while len(self.placed) < count:
            passed = asyncio.get_running_loop().time() - start
            assert passed < within_s, f"{len(self.placed)} of {count} placed"
            await asyncio.sleep(0.01)
        return asyncio.get_running_loop().time() - start

    def begin(self, one: Placed) -> None:
        now = asyncio.get_running_loop().time()
        door = self.doors[one.peer.id].admission
        verdict = door.commit(self.peers[0].contact.id, one.lease, one.unit.key, now)
        assert verdict in ("run", "wait"), verdict

    def end(self, one: Placed) -> None:
        door = self.doors[one.peer.id].admission
        door.release(one.unit.key)
        self.probe.vacancy(one.peer.id, door.free)

    async def close(self) -> None:
        self.task.cancel()
        for door in self.doors.values():
            door.admission.sanity_check()
        for peer in self.peers:
            await peer.close()


async def bench(count: int, seed: int = 1, faults: Faults | None = None) -> Bench:
    network = Network(seed, faults)
    peers = await cluster(network, count)
    while not all(len(p.members.here()) == count for p in peers):
        await asyncio.sleep(0.1)
    return Bench(peers)


def test_a_batch_is_spread_over_many_peers_in_few_messages() -> None:
    async def scenario() -> None:
        found = await bench(20)
        found.probe.add(unit(n) for n in range(40))
        await found.until_placed(40, 2.0)
        assert len({p.peer.id for p in found.placed}) == 20
        asked = sum(door.asked for door in found.doors.values())
        assert asked <= 60, "messages are counted per batch, not per unit"
        record = found.placed[0].placement
        assert record.matching == 20
        assert record.asked
        assert "most free" in record.why
        await found.close()

    run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_every_unit_is_placed_once_whatever_is_lost(seed: int) -> None:
    async def scenario() -> None:
        found = await bench(8, seed, Faults(loss=0.15, duplication=0.1, jitter_s=0.05))
        found.probe.add(unit(n) for n in range(60))
        done: list[Placed] = []
        for _ in range(2000):
            await asyncio.sleep(0.05)
            for one in found.placed[len(done) :]:
                found.begin(one)
                done.append(one)
                asyncio.get_running_loop().call_later(0.2, found.end, one)
            if len(done) == 60:
                break
        assert sorted(p.unit.key.task for p in done) == sorted(f"t{n}" for n in range(60))
        await asyncio.sleep(10)
        for door in found.doors.values():
            door.admission.expire(asyncio.get_running_loop().time())
            assert door.admission.free == door.admission.capacity, "room leaked"
        await found.close()

    run(scenario())


def test_unmet_needs_are_told_and_met_when_a_peer_comes() -> None:
    async def scenario() -> None:
        found = await bench(4)
        need = Needs(capacity=Capacity(millicores=1000, gpus=1))
        found.probe.add([unit(1, needs=need)])
        await asyncio.sleep(3)
        reason = found.probe.waiting_for(unit(1).key)
        assert reason == "needs 1 GPU, but none of the 4 peers has one"
        more = SimPeer(found.peers[0].network, 9, capacity=Capacity(millicores=1000, gpus=1))
        found.peers.append(more)
        found.doors[more.contact.id] = Site(more)
        await more.join(found.peers[1])
        await found.until_placed(1, 10)
        assert found.placed[0].peer.id == more.contact.id
        assert found.probe.waiting_for(unit(1).key) is None
        await found.close()

    run(scenario())


def test_a_large_unit_gets_its_turn_among_a_stream_of_small_ones() -> None:
    async def scenario() -> None:
        found = await bench(3)
        loop = asyncio.get_running_loop()
        whole = Needs(capacity=Capacity(millicores=2000))
        taken = 0
        number = 100
        found.probe.add(unit(n, runtime_s=0.3) for n in range(12))
        found.probe.add([unit(99, needs=whole)])
        start = loop.time()
        while not any(p.unit.key.task == "t99" for p in found.placed):
            assert loop.time() - start < 60, "it starves"
            await asyncio.sleep(0.02)
            for one in found.placed[taken:]:
                found.begin(one)
                loop.call_later(0.3, _finish, found, one)
                found.probe.add([unit(number, runtime_s=0.3)])  # never fewer small ones
                number += 1
            taken = len(found.placed)
        await found.close()

    def _finish(found: Bench, one: Placed) -> None:
        found.end(one)
        for unit_ in found.doors[one.peer.id].admission.starts(asyncio.get_running_loop().time()):
            placed = next(p for p in found.placed if p.unit.key == unit_)
            asyncio.get_running_loop().call_later(0.3, _finish, found, placed)

    run(scenario())


def test_withdrawn_units_are_forgotten() -> None:
    async def scenario() -> None:
        found = await bench(2)
        found.probe.add(unit(n) for n in range(90, 92))  # the home itself is full
        await found.until_placed(2, 2)
        found.probe.add([unit(1), unit(2)])
        found.probe.withdraw([unit(1).key])
        await found.until_placed(3, 2)
        await asyncio.sleep(2)
        assert [p.unit.key.task for p in found.placed[2:]] == ["t2"]
        await found.close()

    run(scenario())


def test_a_few_units_stay_where_they_were_submitted_and_ask_nobody() -> None:
    async def scenario() -> None:
        found = await bench(5)
        found.probe.add([unit(1), unit(2)])
        assert [p.peer.id for p in found.placed] == [found.peers[0].contact.id] * 2
        assert "it was submitted to had free capacity" in found.placed[0].placement.why
        assert sum(door.asked for door in found.doors.values()) == 1
        found.probe.add([unit(3, avoid=frozenset({found.peers[0].contact.id}))])
        await found.until_placed(3, 2)
        assert found.placed[2].peer.id != found.peers[0].contact.id
        await found.close()

    run(scenario())


def test_busy_peers_are_not_asked_in_circles_and_their_queues_are_used() -> None:
    async def scenario() -> None:
        found = await bench(6)
        loop = asyncio.get_running_loop()
        found.probe.add(unit(n, runtime_s=0.2) for n in range(12))
        await found.until_placed(12, 5)
        for one in found.placed:
            found.begin(one)
        before = sum(door.asked for door in found.doors.values())
        found.probe.add(unit(n, runtime_s=0.2) for n in range(100, 103))
        start = loop.time()
        await found.until_placed(15, 5)
        assert sum(door.asked for door in found.doors.values()) - before < 40
        assert loop.time() - start < 2
        assert "queue" in found.placed[-1].placement.why
        await found.close()

    run(scenario())


def test_a_unit_added_while_its_group_empties_is_not_forgotten() -> None:
    async def scenario() -> None:
        found = await bench(3, faults=Faults(latency_s=0.05))
        found.probe.add(unit(n) for n in range(90, 92))  # the home itself is full
        await found.until_placed(2, 5)
        found.probe.add([unit(1)])
        await asyncio.sleep(0.02)  # the question is on its way
        found.probe.withdraw([unit(1).key])
        found.probe.add([unit(2)])
        await found.until_placed(3, 5)
        assert found.placed[2].unit.key.task == "t2"
        await found.close()

    run(scenario())


def test_hopeless_groups_do_not_stand_in_the_way() -> None:
    async def scenario() -> None:
        found = await bench(2)
        for n in range(40):
            needs = Needs(capacity=Capacity(millicores=1, memory_bytes=2**40 + n))
            found.probe.add([unit(n, needs=needs)])
        await asyncio.sleep(1)
        found.probe.add([unit(99)])
        await found.until_placed(1, 5)
        await found.close()

    run(scenario())


def test_run_times_that_become_known_make_batches_of_what_waits() -> None:
    async def scenario() -> None:
        found = await bench(2)
        known: list[float] = []
        found.probe._estimate = lambda unit: known[0] if known else None
        found.probe.add(unit(n) for n in range(200))
        await found.until_placed(4, 2)
        for one in found.placed:
            found.begin(one)
        await asyncio.sleep(1)
        assert len(found.placed) == 4, "nothing queues behind what nobody knows the length of"
        before = sum(door.asked for door in found.doors.values())
        known.append(0.001)
        for one in found.placed[:4]:
            found.end(one)
        await found.until_placed(200, 5)
        assert sum(door.asked for door in found.doors.values()) - before < 20
        await found.close()

    run(scenario())
