"""Calls, overlay, members and records on the simulated network, with faults. Seeds replay."""

from __future__ import annotations

import asyncio
import heapq
import random
from dataclasses import replace

import pytest

from sim.disk import Platter
from sim.files import SimBlobs
from sim.loop import run
from sim.network import Faults, Network, SimPeer, cluster
from valence.protocols.config import LAN, OVERLAYS, Config
from valence.protocols.data.transfer import Transfer
from valence.protocols.membership.members import State
from valence.protocols.overlay.chord import NEAR, SIZE, Circle, Ring, RingLookup, clockwise
from valence.protocols.overlay.lookup import Lookup
from valence.protocols.overlay.overlays import MADE_BY, far
from valence.protocols.overlay.table import Table, distance
from valence.protocols.records import RecordStore, key_of
from valence.protocols.wire.messages import (
    Contact,
    Done,
    File,
    Leave,
    Member,
    Ping,
    Record,
    Refusal,
    Vacancy,
)
from valence.protocols.wire.rpc import PeerUnreachable, Refused, Rpc


def contact(number: int) -> Contact:
    id = random.Random(number).randbytes(20)
    return Contact(id=id, host=f"10.1.{number // 250}.{number % 250}", port=7000)


async def until(condition, within_s: float) -> float:
    """Wait in virtual time; how long it took."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() - start < within_s, f"not true within {within_s} s"
        await asyncio.sleep(0.05)
    return loop.time() - start


# --------------------------------------------------------------------------- the table


@pytest.mark.parametrize("seed", range(20))
def test_closest_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    table = Table(rng.randbytes(20), 16)
    for number in range(200):
        table.saw(contact(seed * 1000 + number))
    target = rng.randbytes(20)
    everyone = table.contacts()
    best = heapq.nsmallest(8, everyone, key=lambda c: distance(c.id, target))
    assert table.closest(target, 8) == best


def test_a_word_from_a_peer_moves_it_to_the_end_and_takes_over_its_address() -> None:
    table = Table(bytes(20), 16)
    first = contact(1)
    table.saw(first)
    moved = first._replace(port=7001)
    table.saw(moved)
    assert table.closest(first.id, 1)[0].port == 7001


def test_one_lost_reply_evicts_nobody_but_several_do() -> None:
    table = Table(bytes(20), 16)
    table.saw(contact(1))
    table.missed(contact(1).id)
    assert contact(1).id in table
    table.missed(contact(1).id)
    table.missed(contact(1).id)
    assert contact(1).id not in table


def test_a_full_bucket_names_its_oldest_to_be_checked() -> None:
    table = Table(bytes(20), 2)
    far = [Contact(id=bytes([255, n]) + bytes(18), host="h", port=1) for n in range(60)]
    doubtful = [c for c in map(table.saw, far) if c is not None]
    assert doubtful
    assert len(table) < 60


# --------------------------------------------------------------------------- the lookup


def test_a_lookup_ends_when_the_few_closest_have_answered() -> None:
    world = sorted((contact(n) for n in range(300)), key=lambda c: distance(c.id, bytes(20)))
    lookup = Lookup(bytes(20), [world[200], world[250]], wanted=3, width=3, calls_max=60)
    asked = 0
    while not lookup.over:
        for peer in lookup.next():
            asked += 1
            lookup.answered(
                peer.id, random.Random(asked).sample(world[: 100 // asked], 8 // asked + 3)
            )
    assert asked < 40
    assert len(lookup.result()) == 3


def test_a_failed_peer_is_never_returned_nor_asked_again() -> None:
    peers = [contact(n) for n in range(5)]
    lookup = Lookup(bytes(20), peers, wanted=5, width=5, calls_max=60)
    first = lookup.next()
    lookup.failed(first[0].id)
    for peer in first[1:]:
        lookup.answered(peer.id, peers)
    assert lookup.over
    assert first[0] not in lookup.result()


# --------------------------------------------------------------------------- the ring


@pytest.mark.parametrize("seed", range(3))
def test_a_circle_knows_its_successors_and_predecessors_and_the_first_of_each_doubling(
    seed: int,
) -> None:
    me = contact(5000 + seed).id
    world = [contact(seed * 1000 + number) for number in range(500)]
    circle = Circle(me)
    for other in world:
        circle.saw(other)
    ahead = sorted(world, key=lambda c: clockwise(me, c.id))
    assert circle.successors() == ahead[:NEAR]
    assert circle.closest(me, NEAR) == ahead[:NEAR]
    assert circle.preceding(me, NEAR) == ahead[: -NEAR - 1 : -1]
    assert len(circle) < 100
    for bit in range(150, 160):
        first = next((c for c in ahead if clockwise(me, c.id) >= 1 << bit), None)
        assert first is None or first.id in circle, f"the finger at 2^{bit}"
    circle.remove(ahead[0].id)
    assert circle.successors()[0] == ahead[1]


def test_every_overlay_has_its_name() -> None:
    assert tuple(MADE_BY) == OVERLAYS


def test_who_stands_on_a_key_follows_it() -> None:
    circle = Circle(bytes(20))
    peers = [contact(n) for n in range(30)]
    for peer in peers:
        circle.saw(peer)
    for peer in peers:
        assert circle.closest(peer.id, 1) == [peer]
        assert circle.preceding(peer.id, 1) != [peer]
        assert circle.is_among_closest(peer.id, peer.id, 1)


@pytest.mark.parametrize("count", [10, 100, 1000])
def test_a_way_around_the_ring_is_short_and_ends_at_the_owners(count: int) -> None:
    """With tables as stabilisation leaves them; no network: each step asks whom it names."""
    world = [contact(n) for n in range(count)]
    order = sorted(world, key=lambda c: c.id)
    circles = {}
    for peer in world:
        circle = circles[peer.id] = Circle(peer.id)
        for other in world:
            circle.saw(other)
    rng = random.Random(count)
    asked = 0
    for _ in range(50):
        start, target = rng.choice(world), rng.randbytes(20)
        circle = circles[start.id]
        known = [*circle.preceding(target, 3), *circle.closest(target, 3)]
        lookup = RingLookup(target, known, wanted=3, width=3, calls_max=60)
        while not lookup.over:
            for peer in lookup.next():
                asked += 1
                there = circles[peer.id]
                lookup.answered(
                    peer.id, [*there.preceding(target, 3), *there.closest(target, NEAR - 3)]
                )
        owners = heapq.nsmallest(3, (c for c in order), key=lambda c: clockwise(target, c.id))
        found = {c.id for c in [*lookup.result(), start]}
        assert {c.id for c in owners} <= found
    assert asked / 50 < 6 + 2.0 * count.bit_length()


def test_a_ring_of_peers_that_know_few_becomes_whole() -> None:
    """By stabilisation alone: no list of members tells them of each other."""

    async def scenario() -> None:
        network = Network(3, Faults(loss=0.02))
        rng = random.Random(3)
        rings = []
        for number in range(40):
            wire = network.wire(contact(number))
            rpc = wire.rpc = Rpc(contact(number), wire, rng, LAN)
            rings.append(Ring(rpc, rng, replace(LAN, refresh_s=20.0, stabilise_s=2.0)))
            rpc.on_heard = rings[-1].saw
            if number:
                rings[-1].saw(contact(rng.randrange(number)))
        tasks = [asyncio.ensure_future(ring.refresh()) for ring in rings]
        order = sorted((contact(n) for n in range(40)), key=lambda c: c.id)

        def whole() -> bool:
            right = 0
            for number, ring in enumerate(rings):
                at = order.index(contact(number))
                right += ring.circle.successors()[:2] == [
                    order[(at + 1) % 40],
                    order[(at + 2) % 40],
                ]
            return right == 40

        await until(whole, 300)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())


def test_the_way_round_is_the_whole_ring() -> None:
    a, b = contact(1).id, contact(2).id
    assert clockwise(a, b) + clockwise(b, a) == SIZE
    assert clockwise(a, a) == 0


# --------------------------------------------------------------------------- calls


class Counter:
    def __init__(self, rpc: Rpc) -> None:
        self.runs = 0
        rpc.on(Leave, self.serve)

    async def serve(self, sender: Contact, message: Leave) -> Done:
        self.runs += 1
        await asyncio.sleep(0.3)
        return Done()


@pytest.mark.parametrize("seed", range(10))
def test_a_call_runs_at_most_once_however_often_it_is_repeated(seed: int) -> None:
    async def scenario() -> tuple[int, int, int]:
        network = Network(seed, Faults(loss=0.3, duplication=0.3, jitter_s=0.4))
        a, b = SimPeer(network, 0), SimPeer(network, 1)
        counter = Counter(b.rpc)
        answered = 0
        for _ in range(20):
            try:
                await a.rpc.call(b.contact, Leave(member=a.members.me), Done, 6.0)
                answered += 1
            except PeerUnreachable:
                pass
        repeats = a.rpc.counts.repeats
        await a.close()
        await b.close()
        return counter.runs, answered, repeats

    runs, answered, repeats = run(scenario())
    assert answered <= runs <= 20
    assert answered >= 18
    assert repeats > 5


def test_a_call_to_nobody_fails_in_its_time_and_leaks_nothing() -> None:
    async def scenario() -> None:
        a = SimPeer(Network(1), 0)
        with pytest.raises(PeerUnreachable):
            await a.rpc.call(contact(9), Ping(digest=0), Done, 2.0)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)
        task = asyncio.ensure_future(a.rpc.call(contact(9), Ping(digest=0), Done, 2.0))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not a.rpc.calls_pending
        await a.close()

    run(scenario())


def test_an_error_in_a_handler_is_told_and_recorded() -> None:
    async def scenario() -> None:
        a, b = await cluster(Network(1), 2)

        def broken(sender: Contact, message: Vacancy) -> Done:
            raise KeyError("oops")

        b.rpc.on(Vacancy, broken)
        with pytest.raises(Refused, match="error"):
            await a.rpc.call(b.contact, Vacancy(free=a.capacity), Done)
        assert isinstance(b.errors[0], KeyError)
        with pytest.raises(Refused, match="unsupported"):
            await a.rpc.call(b.contact, Refusal(code="x"), Done)
        await a.close()
        await b.close()

    run(scenario())


def test_garbage_is_counted_and_never_raised() -> None:
    async def scenario() -> None:
        a = SimPeer(Network(1), 0)
        rng = random.Random(7)
        for size in range(300):
            a.rpc.received(contact(1), rng.randbytes(size))
        assert a.rpc.counts.malformed == 300
        await a.close()

    run(scenario())


# --------------------------------------------------------------------------- members


#: news by gossip, as among few; and by waves, as among many
SPREAD = pytest.mark.parametrize("config", [LAN, replace(LAN, wave_min=4, wave_width=2)])


@SPREAD
@pytest.mark.parametrize("seed", range(4))
def test_everybody_knows_everybody_soon(seed: int, config: Config) -> None:
    async def scenario() -> float:
        network = Network(seed, Faults(loss=0.05, duplication=0.05))
        peers = await cluster(network, 40, config)
        took = await until(lambda: all(len(p.members.here()) == 40 for p in peers), 30)
        for peer in peers:
            assert not peer.errors
            await peer.close()
        return took

    assert run(scenario()) < 15


@SPREAD
@pytest.mark.parametrize("seed", range(4))
def test_a_dead_peer_is_known_dead_within_seconds_and_a_lossy_one_is_not(
    seed: int, config: Config
) -> None:
    async def scenario() -> float:
        network = Network(seed, Faults(loss=0.1))
        peers = await cluster(network, 12, config)
        await until(lambda: all(len(p.members.here()) == 12 for p in peers), 30)
        victim = peers.pop(5)
        await victim.crash()
        took = await until(lambda: all(not p.members.is_here(victim.contact.id) for p in peers), 30)
        await asyncio.sleep(60)
        assert all(len(p.members.here()) == 11 for p in peers), "a living peer was condemned"
        for peer in peers:
            await peer.close()
        return took

    assert run(scenario()) < 9


def test_a_process_that_ended_is_known_dead_without_waiting() -> None:
    async def scenario() -> tuple[float, float]:
        network = Network(7)
        peers = await cluster(network, 12)
        await until(lambda: all(len(p.members.here()) == 12 for p in peers), 30)
        victim = peers.pop(5)
        peers[0].rpc.line(victim.contact)
        await victim.close()
        network.close(victim.contact.id)  # its host is there, and says that nobody listens
        gone = [lambda p=p: not p.members.is_here(victim.contact.id) for p in peers]
        first = await until(gone[0], 30)
        return first, first + await until(lambda: all(g() for g in gone), 30)

    with_a_stream, all_know = run(scenario())
    assert with_a_stream < 0.6
    assert all_know < 3


def test_a_wave_reaches_everybody_once_and_passes_the_dead_over() -> None:
    """Of 100 peers five fall at one time, the speaker among them, and nobody knows it yet."""

    async def scenario() -> None:
        network = Network(9)
        peers = await cluster(network, 100, replace(LAN, wave_min=4))
        await until(lambda: all(len(p.members.here()) == 100 for p in peers), 60)
        await asyncio.sleep(20)
        peers.sort(key=lambda p: p.contact.id)
        assert {p.members.speaker for p in peers} == {peers[0].contact.id}
        told = {peer.contact.id: 0 for peer in peers}
        for peer in peers:
            hear = peer.members.hear

            def counted(rumours, now, news=True, hear=hear, me=peer.contact.id):
                told[me] += not news
                hear(rumours, now, news)

            peer.members.hear = counted  # type: ignore[method-assign]
        await peers[50].liveness.leave()
        left = peers.pop(50)
        await asyncio.sleep(5)
        assert all(told[p.contact.id] == 1 for p in peers[1:]), "each is told once"
        await left.close()
        for index in (0, 12, 13, 40, 70):  # who speaks, and some that pass waves on
            await peers[index].crash()
        dead = [peers[index] for index in (0, 12, 13, 40, 70)]
        there = [p for p in peers if p not in dead]
        for peer in dead:
            gone = peer.contact.id
            await until(lambda gone=gone: all(not p.members.is_here(gone) for p in there), 30)
        assert {p.members.speaker for p in there} == {there[0].contact.id}
        for peer in there:
            assert not peer.errors
            await peer.close()

    run(scenario())


def test_one_that_is_refused_by_one_peer_alone_is_not_dead() -> None:
    async def scenario() -> None:
        network = Network(8)
        peers = await cluster(network, 6)
        await until(lambda: all(len(p.members.here()) == 6 for p in peers), 30)
        a, b = peers[1], peers[2]

        async def refused(to: Contact) -> bool:  # a firewall between these two
            return to.id == b.contact.id

        a.rpc.knock = refused  # type: ignore[method-assign]
        network.cut_links |= {(a.contact.id, b.contact.id), (b.contact.id, a.contact.id)}
        for _ in range(60):
            await asyncio.sleep(1)
            assert all(p.members.is_here(b.contact.id) for p in peers)
        for peer in peers:
            await peer.close()

    run(scenario())


def test_small_files_come_together_and_what_is_wrong_is_not_kept() -> None:
    async def scenario() -> None:
        network = Network(9)
        peers = await cluster(network, 3)
        await until(lambda: all(len(p.members.here()) == 3 for p in peers), 30)
        blobs = [SimBlobs(Platter()) for _ in peers]
        transfers = [
            Transfer(p.rpc, b, p.members, p.records, lambda: 1.0, random.Random(1))
            for p, b in zip(peers, blobs, strict=True)
        ]
        files = []
        for number in range(300):
            data = b"%d" % number
            holders = (peers[1].contact.id, peers[2].contact.id)
            hash = await blobs[1].put(data)
            await blobs[2].put(data)
            files.append(File(f"f{number}", hash, len(data), holders))
        lied = files[7].hash
        blobs[1]._held[lied] = b"something else"
        before = transfers[0]._rpc.counts.calls
        assert (await transfers[0].fetch_all(files)).errors == []
        assert all(file.hash in blobs[0] for file in files)
        assert blobs[0]._held[lied] == b"7"  # from the other holder
        assert transfers[0].counts["corrupt"] >= 1
        assert transfers[0]._rpc.counts.calls - before < 10
        gone = File("gone", b"x" * 32, 3, (peers[1].contact.id,))
        ((file, error),) = (await transfers[0].fetch_all([gone, files[0]])).errors
        assert file is gone
        assert "no holder could give it" in str(error)
        for peer in peers:
            await peer.close()

    run(scenario())


def test_one_cut_link_kills_nobody() -> None:
    async def scenario() -> None:
        network = Network(3)
        peers = await cluster(network, 6)
        await until(lambda: all(len(p.members.here()) == 6 for p in peers), 30)
        a, b = peers[1].contact.id, peers[2].contact.id
        network.cut_links |= {(a, b), (b, a)}
        for _ in range(60):
            await asyncio.sleep(1)
            assert peers[1].members.is_here(b)
            assert peers[2].members.is_here(a)
        for peer in peers:
            await peer.close()

    run(scenario())


@SPREAD
def test_a_healed_partition_grows_together_again(config: Config) -> None:
    async def scenario() -> None:
        network = Network(4)
        peers = await cluster(network, 8, config)
        await until(lambda: all(len(p.members.here()) == 8 for p in peers), 30)
        left, right = peers[:3], peers[3:]
        cut = {(a.contact.id, b.contact.id) for a in left for b in right}
        network.cut_links |= cut | {(b, a) for a, b in cut}
        await until(lambda: all(len(p.members.here()) == 3 for p in left), 60)
        await until(lambda: all(len(p.members.here()) == 5 for p in right), 60)
        network.cut_links.clear()
        await until(lambda: all(len(p.members.here()) == 8 for p in peers), 120)
        for peer in peers:
            await peer.close()

    run(scenario())


def test_a_goodbye_is_heard_at_once() -> None:
    async def scenario() -> float:
        peers = await cluster(Network(5), 10)
        await until(lambda: all(len(p.members.here()) == 10 for p in peers), 30)
        gone = peers.pop()
        await gone.liveness.leave()
        took = await until(lambda: all(not p.members.is_here(gone.contact.id) for p in peers), 5)
        states = {p.members.get(gone.contact.id).state for p in peers}
        assert states == {State.LEFT}
        for peer in [*peers, gone]:
            await peer.close()
        return took

    assert run(scenario()) < 0.2


def test_a_restarted_peer_is_alive_again_under_a_new_boot() -> None:
    async def scenario() -> None:
        network = Network(6)
        peers = await cluster(network, 5)
        await until(lambda: all(len(p.members.here()) == 5 for p in peers), 30)
        await peers[4].crash()
        await until(lambda: not peers[0].members.is_here(peers[4].contact.id), 30)
        network.cut.clear()
        again = SimPeer(network, 4, boot=2)
        await again.join(peers[1])
        await until(lambda: all(p.members.is_here(again.contact.id) for p in peers[:4]), 30)
        assert peers[0].members.get(again.contact.id).boot == 2
        for peer in [*peers[:4], again]:
            await peer.close()

    run(scenario())


def test_who_missed_a_death_long_ago_hears_of_it_by_an_exchange() -> None:
    async def scenario() -> None:
        network = Network(3)
        a, b = peers = await cluster(network, 2)
        lost = Member(contact(70), "http://70")
        b.members.apply(lost, 0.0)
        b.members.judge(lost.contact.id, State.DEAD, 0.0)
        await asyncio.sleep(LAN.news_s + 10)
        a.members.apply(lost, asyncio.get_running_loop().time())
        await a.liveness.sync(b.contact)
        assert not a.members.is_here(lost.contact.id)
        for peer in peers:
            await peer.close()

    run(scenario())


# --------------------------------------------------------------------------- lookups and records


#: the same is to be true of each
BOTH = pytest.mark.parametrize("name", OVERLAYS)


@BOTH
def test_lookups_find_the_closest_with_loss_and_dead_peers(name: str) -> None:
    async def scenario(seed: int) -> tuple[float, float, float]:
        network = Network(seed, Faults(loss=0.03))
        peers = await cluster(network, 60, replace(LAN, overlay=name))
        await until(lambda: all(len(p.members.here()) == 60 for p in peers), 60)
        for victim in peers[40:]:
            await victim.crash()
        living = peers[:40]
        right = total = 0
        start, sent = asyncio.get_running_loop().time(), network.sent
        for _ in range(30):
            target = network.rng.randbytes(20)
            found = await network.rng.choice(living).overlay.find(target)
            best = heapq.nsmallest(3, living, key=lambda p: far(name)(p.contact.id, target))
            right += len({c.id for c in found} & {p.contact.id for p in best})
            total += 3
            assert not {c.id for c in found} & {p.contact.id for p in peers[40:]}
        took = (asyncio.get_running_loop().time() - start) / 30
        messages = (network.sent - sent) / 30
        for peer in living:
            await peer.close()
        return right / total, took, messages

    shares, times, _ = zip(*(run(scenario(seed)) for seed in range(6)), strict=True)
    assert sum(shares) / len(shares) > 0.97
    assert max(times) < 3.0


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_records_survive_the_loss_of_holders_and_move_to_newcomers(seed: int, name: str) -> None:
    async def scenario() -> None:
        network = Network(seed, Faults(loss=0.02))
        config = replace(LAN, overlay=name)
        peers = await cluster(network, 20, config)
        await until(lambda: all(len(p.members.here()) == 20 for p in peers), 60)
        key = key_of("home", "w1")
        await peers[1].records.publish({key: b"one"}, version=1)
        await peers[2].records.publish({key: b"two"}, version=1)
        found = await peers[9].records.fetch(key)
        assert sorted(r.value for r in found) == [b"one", b"two"]
        holders = [p for p in peers[3:] if p.records.store.get(key, 0)]
        for holder in holders[:2]:
            peers.remove(holder)
            await holder.crash()
        found = await peers[8].records.fetch(key)
        assert sorted(r.value for r in found) == [b"one", b"two"]
        for index in range(20, 30):
            newcomer = SimPeer(network, index, config)
            await newcomer.join(peers[0])
            peers.append(newcomer)
        await until(lambda: all(len(p.members.here()) >= 28 for p in peers), 60)
        await asyncio.sleep(LAN.republish_s * 1.3)
        await peers[1].records.publish({key: b"newer"}, version=2)
        found = await peers[-1].records.fetch(key)
        assert sorted(r.value for r in found) == [b"newer", b"two"]
        await peers[2].records.withdraw([key], version=3)
        found = await peers[-1].records.fetch(key)
        assert [r.value for r in found] == [b"newer"]
        for peer in peers:
            assert not peer.errors
            await peer.close()

    run(scenario())


@BOTH
def test_a_leaving_holder_hands_its_records_on(name: str) -> None:
    async def scenario() -> None:
        peers = await cluster(Network(2), 12, replace(LAN, overlay=name))
        await until(lambda: all(len(p.members.here()) == 12 for p in peers), 60)
        key = key_of("blob", "x")
        await peers[1].records.publish({key: b"v"}, version=1)
        holders = [p for p in peers if p.records.store.get(key, 0) and p is not peers[1]]
        for holder in holders:  # one after the other, all three
            peers.remove(holder)
            await holder.records.hand_on()
            await holder.liveness.leave()
            await holder.close()
        asker = peers[0] if peers[0] is not peers[1] else peers[2]
        assert [r.value for r in await asker.records.fetch(key)] == [b"v"]
        for peer in peers:
            await peer.close()

    run(scenario())


def record(version: int, value: bytes, ttl_s: float = 100.0, owner: int = 1) -> Record:
    return Record(
        key=bytes(20), owner=bytes([owner] * 20), version=version, ttl_s=ttl_s, value=value
    )


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store = RecordStore(LAN)
    store.put(record(2, b"new"), 0.0)
    store.put(record(1, b"old", ttl_s=500), 1.0)
    assert [r.value for r in store.get(bytes(20), 2.0)] == [b"new"]
    store.put(record(2, b"new", ttl_s=300), 3.0)
    assert store.get(bytes(20), 250.0), "an equal version lengthens the life"
    assert not store.get(bytes(20), 400.0)


def test_records_are_bounded() -> None:
    store = RecordStore(LAN)
    for owner in range(256):
        key_owner = owner.to_bytes(20, "big")
        row = Record(key=bytes(20), owner=key_owner, version=1, ttl_s=10, value=b"")
        assert store.put(row, 0.0)
    row = Record(key=bytes(20), owner=bytes([9] * 20), version=1, ttl_s=10, value=b"")
    assert not store.put(row, 0.0)
    assert store.count == 256
    store.expire(11.0)
    assert store.count == 0


def test_what_a_peer_publishes_is_bounded() -> None:
    async def scenario() -> None:
        (peer,) = await cluster(Network(1), 1, replace(LAN, published_max=5))
        for number in range(9):
            await peer.records.publish({key_of("home", str(number)): b"x"}, version=1)
        kept = [n for n in range(9) if key_of("home", str(n)) in peer.records._published]
        assert kept == [4, 5, 6, 7, 8]
        await peer.close()

    run(scenario())


def test_the_same_seed_gives_the_same_run() -> None:
    async def scenario() -> tuple[int, float]:
        network = Network(11, Faults(loss=0.1, duplication=0.1))
        peers = await cluster(network, 15)
        took = await until(lambda: all(len(p.members.here()) == 15 for p in peers), 60)
        for peer in peers:
            await peer.close()
        return network.sent, took

    assert run(scenario()) == run(scenario())
