"""The targets of fuzzing: each takes bytes, and whatever it raises is a defect."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator

import msgpack

from valence.peer.link import Link
from valence.peer.seal import Dropped, Seal
from valence.protocols.chemistry.notation import ChemistryError
from valence.protocols.config import LAN
from valence.protocols.engine.policies import SHIPPED, Policies
from valence.protocols.engine.work import read_document
from valence.protocols.strategies.chemical import messages as chemical
from valence.protocols.strategies.pilots import messages as pilots
from valence.protocols.strategies.tickets.messages import (
    Claim,
    Offer,
    PostClaims,
    PostTicket,
    Redeem,
    Redemption,
    Shortfall,
)
from valence.protocols.wire import messages
from valence.protocols.wire.codec import FrameKind, Malformed, decode, encode, pack_member
from valence.protocols.wire.messages import (
    AttemptKey,
    Capacity,
    Commit,
    Contact,
    Grant,
    Hello,
    Member,
    Needs,
    Offers,
    Outcome,
    Ping,
    Report,
    Reserve,
    Room,
    Sync,
    Ticket,
    Traits,
    Value,
    Work,
)
from valence.workflow.problems import DocumentError

_KEY = "a cluster key for fuzzing"
_ME, _OTHER = bytes([1]) * 20, bytes([2]) * 20


def _clock() -> float:
    return 1_700_000_000.0


def message(data: bytes) -> None:
    """A decrypted datagram or frame: an envelope, which can be encoded again, or `Malformed`."""
    try:
        envelope = decode(data)
    except Malformed:
        return
    again = decode(encode(envelope.kind, envelope.id, envelope.message))
    assert again == envelope


def datagram(data: bytes) -> None:
    """A datagram from anybody; and one with any content from a sender who has the key."""
    mine = Seal(_ME, _KEY, _clock)
    try:
        mine.open(data)
    except Dropped:
        pass
    other = Seal(_OTHER, _KEY, _clock)
    sender, payload, addressed = mine.open(other.seal(_ME, data))
    assert (sender, payload, addressed) == (_OTHER, data, True)
    message(payload)


def stream(data: bytes) -> None:
    """The frames of a peer's connection, cut off anywhere."""
    link = Link(Seal(_ME, _KEY, _clock), None, _ME, LAN)  # type: ignore[arg-type]
    link.receive = lambda sender, payload: message(payload)

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        try:
            await link._read(Contact(_OTHER, "h", 1), reader)
        except asyncio.IncompleteReadError:
            pass

    asyncio.run(read())


def document(data: bytes) -> None:
    """A workflow document: it makes a workflow, or problems that name their places."""
    try:
        made = len(read_document(data, {}).tasks)
    except DocumentError as error:
        made = len(error.problems)
    assert made


def policy(data: bytes) -> None:
    """A rule of a workflow: it is refused with its place, or acts within its limits."""
    text = data.decode("utf-8", "replace")
    try:
        policies = Policies((text,))
    except ChemistryError:
        return
    for number in range(1, 4):
        policies.ended("t", number, "memory", 2**20)
        policies.slow("t", number, 4.0, 1.0)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "message": message,
    "datagram": datagram,
    "stream": stream,
    "document": document,
    "policy": policy,
}


# --------------------------------------------------------------------------- seeds


def _sample_messages() -> Iterator[messages.Message]:
    contact = Contact(_ME, "127.0.0.1", 7000)
    member = Member(contact, "http://h", Capacity(2000, 1 << 30), Traits("x86_64", "linux"))
    key = AttemptKey("w1", "task[1]", 1)
    needs = Needs(Capacity(1000))
    work = Work(key, 1, needs, command=("sh", "-c", "true"), env=(("A", "b"),), outputs=("o",))
    ended = Outcome(key, "ok", value=Value("json", b"1"), started_at=1.0, ended_at=2.0)
    yield Hello(member=member)
    yield Ping(digest=7, rumours=(pack_member(member),))
    yield Sync(digests=bytes(64))
    claim = Claim(1, _ME, needs, 10, 2, 3.0, avoid=(_ME,))
    ticket = Ticket(Capacity(1000), 0.5, 10)
    yield PostClaims(claims=(claim,))
    yield PostTicket(cells=(_ME,), ticket=ticket, short=((_ME, _ME, 1, 1),))
    yield Redeem(redemptions=(Redemption(_ME, 1, _ME, needs, 2),), wanted_s=5.0, waits=False)
    meta = chemical.Meta(_ME, 14.5, 1, Capacity(1000), True)
    yield chemical.Publish(metas=(meta,), gone=((_ME, 1),), scale=1)
    scale, metas = chemical.Scale(2, (0.5, 1.0)), ((meta, 2),)
    yield chemical.Range(
        home=_ME, id=7, low=0.0, high=1000.0, kind=needs, needs=needs, count=3, each=1, queue=True,
        wait_s=5.0, scale=1, top=1000.0, leg=1, nodes=9, empty=2, rows=metas,
    )  # fmt: skip
    yield chemical.Ranged(id=7, part=0, last=True, rows=metas, scale=scale)
    yield chemical.Unwished(needs=needs)
    yield chemical.InUse(scale=scale, kinds=((needs, 5.0),))
    yield messages.Chunk(data=b"x" * 40, have=b"\x05", ask=(_ME,))
    yield messages.OpenedBlob(size=3 << 20, sheet=b"s" * 48, have=b"\x07")
    wanting = pilots.Wanting(3, messages.Needs(), 5, 1, reads=((b"8" * 8, 70_000),))
    yield pilots.PostUnits(units=(wanting,), lines=1, anew=True)
    line = pilots.Line(9, messages.Needs(), reads=((b"8" * 8, 70_000),), rank="local - remote")
    yield pilots.TaskList(
        master=_ME, round=1, base=0, version=4, came=(line,), went=(3,), low=_ME, high=_ME,
        young=(9,),
    )  # fmt: skip
    ticket = messages.Ticket(messages.Capacity(1000))
    yield pilots.Bids(master=_ME, round=1, bids=(pilots.Bid(_ME, ticket, ((9, 1.5),)),))
    landing = pilots.Landing(_ME, _ME, 3, messages.Needs(), 2, rank=1.5)
    yield pilots.Assign(master=_ME, round=1, landings=(landing,))
    key = messages.AttemptKey("q1", "t", 1)
    ended = messages.Outcome(key, "ok", moved=messages.Moved(1, 2, 3), missing=(b"h" * 32,))
    yield messages.PullTasks(site="s", token=1, request=2, outcomes=((_ME, ended),), held=(key,))
    yield messages.PulledTasks(works=(messages.Work(key, 0, messages.Needs()),), kept=(key,))
    yield messages.Wave(members=(pack_member(member),), end=_ME, digest=7, about=b"x")
    yield Shortfall(claim=1, cell=_ME, promised=2)
    yield Offer(claim=1, cell=_ME, leases=(1, 2))
    yield Reserve(asks=(Room(needs, 3, 0.5),))
    yield Offers(grants=(Grant((1, 2), 1, 0.1),), free=Capacity(1000), ttl_s=5.0)
    yield Commit(works=(work, work._replace(command=None, call="m:f", arguments=b"\x92\x90\x80")))
    yield Report(outcomes=(ended,), free=Capacity())


_DOCUMENTS = (
    "name: a\ntasks:\n  t: {command: [echo, x], outputs: [o]}\n"
    "  u: {call: 'm:f', args: [{result: t}]}\n",
    "name: b\ninputs: {i: {text: x}}\ntasks:\n  t: {foreach: [a, b], command: 'x {item}', "
    "inputs: [i], outputs: ['{item}'], needs: {cpus: 1, memory: 1GiB}, timeout: 5s}\n",
    "name: c\ndeadline: 10m\ntasks: {t: {foreach: {x: [1], y: [2]}, command: [a], after: [s]}, "
    "s: {foreach: 3, command: [b], retries: 2}}\n",
    "a: &x [1]\nb: *x\nname: d\ntasks: {}\n",
    json.dumps({"name": "e", "schemaVersion": "1.5", "workflow": {"specification": {"tasks": []}}}),
)


_POLICIES = (
    *SHIPPED.values(),
    "replace-one <x::int, ?w>, A:b:(-1.5) by <?w, x * 2>, min(x, 3) if not (x > 1 or x = 0)",
    'replace ENDED:t:n:"exit":75, BUDGET:k by system.again(t), BUDGET:(k - 1) if k > 0 // so',
)


def seeds(target: str) -> list[bytes]:
    if target == "policy":
        return [text.encode() for text in _POLICIES]
    if target == "document":
        return [text.encode() for text in _DOCUMENTS]
    encoded = [encode(FrameKind.REQUEST, 5, m) for m in _sample_messages()]
    encoded += [encode(FrameKind.WORKING, 5, None), msgpack.packb([1, 0, 1, 2])]
    if target == "stream":
        return [len(data).to_bytes(4, "big") + data for data in encoded]
    if target == "datagram":
        return encoded + [Seal(_OTHER, _KEY, _clock).seal(_ME, data) for data in encoded]
    return encoded


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, removed, repeated or inserted, for a short run without guidance."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif kind == 1:
            del changed[at : at + rng.randrange(1, 8)]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randrange(1, 8))
        elif kind == 3:
            changed[at:at] = changed[: rng.randrange(1, 30)]
        elif at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)
