"""The swarm's rules, one by one, over the wire: who is given a chunk, who is sent on to another
reader, who insists, and what a source that fails, lies or falls silent costs.

Whole transfers, with many readers, are in `tests/test_data.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable

import pytest

from sim.disk import Platter
from sim.files import SimBlobs
from sim.loop import run_out
from sim.network import Network, SimPeer, cluster
from valence.protocols.data import swarm as module
from valence.protocols.data.cache import Reservation
from valence.protocols.data.chunk_manifest import CHUNK_BYTES_MIN, ChunkManifest, count, span
from valence.protocols.data.swarm import Swarm, Unavailable
from valence.protocols.wire.messages import Chunk, Contact, File, OpenBlob, OpenedBlob, ReadChunk
from valence.protocols.wire.rpc import Refused

SIZE = 4 * CHUNK_BYTES_MIN
DATA = random.Random(1).randbytes(SIZE)
HASH = hashlib.sha256(DATA).digest()


class Stage:
    """A holder of one file, and peers that read it; each has a swarm."""

    def __init__(self, peers: list[SimPeer]) -> None:
        self.peers = peers
        self.blobs = [SimBlobs(Platter()) for _ in peers]
        self.swarms = [
            Swarm(peer.rpc, blobs, peer.members, random.Random(n))  # type: ignore[arg-type]
            for n, (peer, blobs) in enumerate(zip(peers, self.blobs, strict=True))
        ]

    async def begin(self, *holders: int) -> Stage:
        for n in holders:
            await self.blobs[n].put(DATA)
        return self

    def id(self, n: int) -> bytes:
        return self.peers[n].contact.id

    def file(self, *holders: int) -> File:
        return File("f", HASH, SIZE, tuple(map(self.id, holders)))

    async def read(self, reader: int, index: int, at: int = 0, insist: bool = False) -> Chunk:
        message = ReadChunk(hash=HASH, index=index, insist=insist)
        return await self.peers[reader].rpc.call(self.peers[at].contact, message, Chunk, 20.0)

    async def fetch(self, n: int, *holders: int, others: tuple[int, ...] = ()) -> None:
        """`others`: holders that the catalog knows, besides those that the file names."""

        async def find(digest: bytes) -> list[bytes]:
            return list(map(self.id, others))

        await self.swarms[n].fetch(self.file(*holders), "", Reservation(), find)
        assert self.blobs[n]._held[HASH] == DATA


def stage(peers: int, scenario: Callable[[Stage], Awaitable[None]], holders: int = 1) -> None:
    async def run() -> None:
        made = Stage(await cluster(Network(1), peers))
        while any(peer.members.count < peers for peer in made.peers):
            await asyncio.sleep(0.1)
        await scenario(await made.begin(*range(holders)))

    run_out(run())


def chunk(index: int) -> bytes:
    start, length = span(SIZE, index)
    return DATA[start : start + length]


def test_a_chunk_is_given_away_once_and_the_next_reader_is_sent_to_the_first() -> None:
    async def scenario(s: Stage) -> None:
        assert (await s.read(1, 2)).data == chunk(2)
        sent_on = await s.read(2, 2)
        assert sent_on.data == b""
        assert sent_on.ask == (s.id(1),)
        assert (await s.read(2, 3)).data == chunk(3), "another chunk is another matter"
        assert (await s.read(1, 2)).data == chunk(2), "whoever has had it may ask again"

    stage(4, scenario)


def test_a_reader_that_insists_is_given_the_chunk() -> None:
    async def scenario(s: Stage) -> None:
        await s.read(1, 0)
        assert (await s.read(2, 0)).ask
        assert (await s.read(3, 0, insist=True)).data == chunk(0)

    stage(4, scenario)


def test_nobody_is_sent_on_to_a_dead_reader() -> None:
    async def scenario(s: Stage) -> None:
        await s.read(1, 0)
        await s.peers[1].crash()
        while s.peers[0].members.is_here(s.id(1)):
            await asyncio.sleep(0.5)
        assert (await s.read(2, 0)).data == chunk(0)

    stage(4, scenario)


def test_a_crowd_disperses() -> None:
    async def scenario(s: Stage) -> None:
        await s.read(1, 0)
        await asyncio.sleep(module.CROWD_S + 1)
        assert (await s.read(2, 0)).data == chunk(0)

    stage(4, scenario)


def test_a_second_copy_gives_a_chunk_away_a_few_times() -> None:
    async def scenario(s: Stage) -> None:
        s.swarms[0].is_copy = lambda digest: True
        given = [bool((await s.read(n, 0)).data) for n in range(1, 6)]
        assert given == [True] * module.COPIES_GIVE + [False] * (5 - module.COPIES_GIVE)

    stage(6, scenario)


def test_what_a_peer_does_not_hold_and_what_no_file_has_is_refused() -> None:
    async def scenario(s: Stage) -> None:
        with pytest.raises(Refused, match="does not hold"):
            await s.read(0, 0, at=1)
        for index in (count(SIZE), 10**6):
            with pytest.raises(Refused, match="has no chunk"):
                await s.read(1, index)
        message = OpenBlob(hash=bytes(32))
        with pytest.raises(Refused, match="does not hold"):
            await s.peers[1].rpc.call(s.peers[0].contact, message, OpenedBlob)

    stage(3, scenario)


def test_a_busy_peer_refuses_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SERVED_MAX", 2)

    async def scenario(s: Stage) -> None:
        hung = asyncio.Event()

        async def read(digest: bytes, offset: int, length: int) -> bytes:
            await hung.wait()
            return DATA[offset : offset + length]

        s.blobs[0].read = read  # type: ignore[method-assign]
        waiting = [asyncio.ensure_future(s.read(1, index)) for index in range(2)]
        await asyncio.sleep(1.0)
        with pytest.raises(Refused, match="too many"):
            await s.read(2, 3)
        hung.set()
        assert [(await one).data for one in waiting] == [chunk(0), chunk(1)]

    stage(3, scenario)


def test_readers_serve_each_other_and_the_holder_sends_the_file_about_once() -> None:
    async def scenario(s: Stage) -> None:
        await asyncio.gather(*(s.fetch(n, 0) for n in range(1, 9)))
        assert s.swarms[0].counts["bytes_served"] <= 2 * SIZE
        assert sum(swarm.counts["bytes_fetched"] for swarm in s.swarms) == 8 * SIZE

    stage(9, scenario)


def test_a_holder_that_dies_in_the_middle_costs_what_was_on_the_way() -> None:
    async def scenario(s: Stage) -> None:
        s.peers[0].network.faults.latency_s = 0.2
        fetching = asyncio.ensure_future(s.fetch(3, 0, 1, 2))
        await asyncio.sleep(0.7)
        await s.peers[0].crash()
        await fetching
        assert s.swarms[3].counts["bytes_fetched"] == SIZE

    stage(4, scenario, holders=3)


def test_a_manifest_that_lies_is_thrown_away_and_its_teller_is_not_asked_again() -> None:
    async def scenario(s: Stage) -> None:
        lie = random.Random(2).randbytes(SIZE)
        s.blobs[0]._held[HASH] = lie
        s.blobs[0]._manifests[HASH] = ChunkManifest.of(
            SIZE, (lie[at : at + n] for at, n in (span(SIZE, i) for i in range(count(SIZE))))
        )
        asked: list[int] = []
        opened = s.swarms[0]._open

        def note(sender: Contact, message: OpenBlob) -> Awaitable[OpenedBlob]:
            asked.append(1)
            return opened(sender, message)

        s.peers[0].rpc.on(OpenBlob, note)
        await s.fetch(2, 0, others=(0, 1))
        assert s.swarms[2].counts["corrupt_sheets"] == 1
        assert len(asked) == 1

    stage(3, scenario, holders=2)


def test_a_file_that_all_holders_have_lost_is_gone_and_one_out_of_reach_is_not() -> None:
    async def scenario(s: Stage) -> None:
        with pytest.raises(Unavailable) as nowhere:
            await s.fetch(1, 0, 2)  # both answer that they do not have it
        assert nowhere.value.gone
        s.peers[0].network.cut_links |= {(s.id(0), s.id(1)), (s.id(1), s.id(0))}
        with pytest.raises(Unavailable) as silent:
            await s.fetch(1, 0)
        assert not silent.value.gone

    stage(4, scenario, holders=0)
