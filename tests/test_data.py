"""Files between peers: chunks from several holders, hot files, lies, losses; what is held and why.

In the simulator: the product's swarm, catalog and cache on a virtual clock.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from sim.disk import Platter
from sim.files import SimBlobs
from sim.loop import run
from sim.network import Faults, Network, SimPeer, cluster
from valence.protocols.data.cache import Cache, QuotaFull, Reservation
from valence.protocols.data.chunk_manifest import (
    CHUNK_BYTES_MIN,
    ChunkManifest,
    Chunks,
    chunk_bytes,
    count,
    span,
)
from valence.protocols.data.transfer import Transfer, Unavailable
from valence.protocols.wire.messages import File

MIB = 1 << 20


def data_of(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


class Site:
    """Peers that hold and fetch files."""

    def __init__(self, network: Network, peers: list[SimPeer]) -> None:
        self.network = network
        self.peers = peers
        self.blobs = [SimBlobs(Platter()) for _ in peers]
        self.transfers = [
            Transfer(p.rpc, b, p.members, p.records, lambda: 1.0, random.Random(n))  # type: ignore[arg-type]
            for n, (p, b) in enumerate(zip(peers, self.blobs, strict=True))
        ]

    def ids(self, *numbers: int) -> tuple[bytes, ...]:
        return tuple(self.peers[n].contact.id for n in numbers)

    async def close(self) -> None:
        for transfer in self.transfers:
            await transfer.close()
        for peer in self.peers:
            await peer.close()


def at(count: int, scenario: Callable[[Site], Awaitable[None]], seed: int = 5) -> None:
    async def play() -> None:
        network = Network(seed)
        peers = await cluster(network, count)
        for _ in range(300):
            if all(len(p.members.here()) == count for p in peers):
                break
            await asyncio.sleep(0.1)
        site = Site(network, peers)
        try:
            await scenario(site)
        finally:
            await site.close()

    run(play())


# --------------------------------------------------------------------------- chunk_manifest and chunks


def test_chunks_are_the_same_everywhere_and_never_too_many() -> None:
    for size in (0, 1, MIB, MIB + 1, 65536 * MIB, 65536 * MIB + 1, 2**40):
        step = chunk_bytes(size)
        assert step >= CHUNK_BYTES_MIN
        assert count(size) <= 65536
        assert sum(span(size, i)[1] for i in range(count(size))) == size or size > 2**37
    assert Chunks(9, b"\xff\xff").held == 9
    assert Chunks.all(9).full
    some = Chunks(9, b"\x05")
    assert [i for i in range(9) if i in some] == [0, 2]
    with pytest.raises(ValueError):
        ChunkManifest(3 * MIB, b"short")


# --------------------------------------------------------------------------- the cache


def test_the_quota_is_never_exceeded_and_what_is_needed_never_goes() -> None:
    rng = random.Random(7)
    for _ in range(200):
        cache = Cache(1000, 1000)
        gone: list[bytes] = []
        cache.on_evict = gone.append
        rooms: list[Reservation] = []
        pins: list[bytes] = []
        for step in range(60):
            hash = bytes([step])
            what = rng.random()
            if what < 0.5:
                room = Reservation()
                size = rng.randint(1, 400)
                try:
                    cache.take(size, room)
                except QuotaFull:
                    assert cache.free_bytes() < size, "there was room, and it was refused"
                    continue
                if rng.random() < 0.7:
                    cache.add(hash, size, rng.choice(("", "", "a", "b")), room)
                    cache.give_back(room)
                else:
                    rooms.append(room)
            elif what < 0.6 and rooms:
                cache.give_back(rooms.pop())
            elif what < 0.75 and len(cache):
                pins.append(rng.choice(list(cache)))
                cache.pin([pins[-1]])
            elif what < 0.85 and pins:
                cache.unpin([pins.pop()])
            elif len(cache):
                cache.release(rng.choice(list(cache)), "a")
            sizes = sum(cache.size(h) or 0 for h in cache)
            assert cache.used_bytes == sizes + sum(room.size for room in rooms)
            assert cache.used_bytes <= 1000
            assert all(pin in cache for pin in pins)
            assert all(h in cache for found in cache.held_for().values() for h in found)


# --------------------------------------------------------------------------- the swarm


def test_a_hot_file_leaves_its_holder_about_once() -> None:
    data = data_of(12 * MIB)

    async def scenario(site: Site) -> None:
        hash = await site.blobs[0].put(data)
        file = File("hot", hash, len(data), site.ids(0))
        await asyncio.gather(*(t.fetch(file) for t in site.transfers[1:]))
        assert all(hash in blobs for blobs in site.blobs)
        served = [t.swarm.counts["bytes_served"] for t in site.transfers]
        assert served[0] <= 2 * len(data), served[0] / len(data)
        assert sum(served) >= 15 * len(data)
        assert max(served[1:]) < 6 * len(data), "nobody has to carry all the others"

    at(16, scenario)


@pytest.mark.parametrize("seed", range(4))
def test_with_losses_and_a_dead_holder_it_still_comes(seed: int) -> None:
    data = data_of(6 * MIB, seed)

    async def scenario(site: Site) -> None:
        hash = await site.blobs[0].put(data)
        await site.blobs[1].put(data)
        file = File("f", hash, len(data), site.ids(0, 1))
        site.network.faults = Faults(loss=0.05, duplication=0.05, jitter_s=0.02)
        work = [asyncio.ensure_future(t.fetch(file)) for t in site.transfers[2:]]
        await asyncio.sleep(0.05)
        site.network.cut_links |= {
            pair
            for p in site.peers
            for pair in ((p.contact.id, site.ids(0)[0]), (site.ids(0)[0], p.contact.id))
        }
        await asyncio.gather(*work)
        assert all(hash in blobs for blobs in site.blobs[1:])

    at(7, scenario, seed)


def test_a_wrong_chunk_is_found_out_counted_and_fetched_elsewhere() -> None:
    data = data_of(5 * MIB)

    async def scenario(site: Site) -> None:
        hash = await site.blobs[0].put(data)
        await site.blobs[1].put(data)
        await site.blobs[0].manifest(hash)
        bad = bytearray(data)
        bad[3 * MIB + 7] ^= 1
        site.blobs[0]._held[hash] = bytes(bad)
        file = File("f", hash, len(data), site.ids(0, 1))
        for transfer, blobs in zip(site.transfers[2:], site.blobs[2:], strict=True):
            await transfer.fetch(file)
            assert hashlib.sha256(blobs._held[hash]).digest() == hash
        assert sum(t.swarm.counts["corrupt"] for t in site.transfers) >= 1

    at(8, scenario)


def test_a_sheet_that_lies_is_thrown_away_with_its_teller() -> None:
    data, other = data_of(3 * MIB), data_of(3 * MIB, 2)

    async def scenario(site: Site) -> None:
        hash = await site.blobs[0].put(data)
        await site.blobs[1].put(data)
        site.blobs[0]._held[hash] = other  # and its manifest is made of that
        file = File("f", hash, len(data), site.ids(0))
        await site.transfers[1].announce(hash)
        await site.transfers[2].fetch(file)
        assert site.blobs[2]._held[hash] == data
        assert site.transfers[2].swarm.counts["corrupt_sheets"] == 1

    at(4, scenario)


def test_what_nobody_has_is_said_to_be_gone_and_what_is_out_of_reach_is_not() -> None:
    async def scenario(site: Site) -> None:
        hash = hashlib.sha256(b"never").digest()
        file = File("f", hash, 2 * MIB, site.ids(0, 1))
        with pytest.raises(Unavailable) as gone:
            await site.transfers[2].fetch(file)
        assert gone.value.gone
        site.network.cut_links |= {
            (site.ids(2)[0], site.ids(0)[0]),
            (site.ids(0)[0], site.ids(2)[0]),
        }
        with pytest.raises(Unavailable) as away:
            await site.transfers[2].fetch(file)
        assert not away.value.gone, "it may be at the one that did not answer"

    at(3, scenario)


def test_a_transfer_takes_its_room_first_and_gives_it_back() -> None:
    data = data_of(2 * MIB)

    async def scenario(site: Site) -> None:
        hash = await site.blobs[0].put(data)
        site.blobs[1].cache.quota_bytes = MIB
        file = File("f", hash, len(data), site.ids(0))
        with pytest.raises(QuotaFull):
            await site.transfers[1].fetch(file)
        assert site.blobs[1].cache.used_bytes == 0
        assert site.transfers[0].swarm.counts["bytes_served"] == 0
        site.blobs[1].cache.quota_bytes = 3 * MIB
        task = asyncio.ensure_future(site.transfers[1].fetch(file))
        await asyncio.sleep(0.001)
        task.cancel()  # who asked for it is gone: it comes all the same, and its room is right
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(5)
        assert site.blobs[1].cache.used_bytes == len(data)

    at(2, scenario)


def test_bytes_are_counted_by_where_they_were() -> None:
    async def scenario(site: Site) -> None:
        files = []
        for number in range(3):
            data = data_of(100_000, number)
            hash = await site.blobs[0].put(data)
            files.append(File(f"f{number}", hash, len(data), site.ids(0)))
        await site.transfers[1].fetch(files[0])
        found = await site.transfers[1].fetch_all(files)
        assert found.moved == (100_000, 200_000, 0)

        async def from_origin(file: File, hold: str, room: Reservation) -> None:
            site.blobs[1].keep(file.hash, b"o" * 500, hold, room)

        site.transfers[1].from_origin = from_origin
        lost = File("o", hashlib.sha256(b"o" * 500).digest(), 500, (), "http://origin/o")
        assert (await site.transfers[1].fetch_all([lost])).moved == (0, 0, 500)

    at(2, scenario)


def test_a_peer_that_does_not_know_the_holder_yet_leaves_the_origin_in_peace() -> None:
    """It has just joined; its home has given it work before it has heard of all others."""
    data = data_of(200_000)

    async def scenario(site: Site) -> None:
        hash = await site.blobs[0].put(data)
        late = SimPeer(site.network, 9)
        blobs = SimBlobs(Platter())
        transfer = Transfer(
            late.rpc, blobs, late.members, late.records, lambda: 1.0, random.Random(9)
        )  # type: ignore[arg-type]
        asked: list[str] = []
        other = data_of(500, 4)

        async def from_origin(file: File, hold: str, room: Reservation) -> None:
            asked.append(file.url)
            blobs.keep(file.hash, other, hold, room)

        transfer.from_origin = from_origin
        fetching = asyncio.ensure_future(
            transfer.fetch_all([File("f", hash, len(data), site.ids(0), "http://origin/f")])
        )
        await asyncio.sleep(0.2)
        await late.join(site.peers[1])
        assert (await fetching).moved == (0, len(data), 0)
        # what another cluster holds is fetched at once from where the queue says it is
        away = File("o", hashlib.sha256(other).digest(), 500, (b"?" * 20,), "queue:/v1/blobs/x")
        began = asyncio.get_running_loop().time()
        assert (await transfer.fetch_all([away])).moved == (0, 0, 500)
        assert asyncio.get_running_loop().time() - began < 0.5
        assert asked == ["queue:/v1/blobs/x"]
        await transfer.close()
        await late.close()

    at(2, scenario)


def test_the_catalog_names_holders_until_the_file_goes() -> None:
    async def scenario(site: Site) -> None:
        data = data_of(200_000)
        hash = await site.blobs[1].put(data, hold="")
        catalogs = [asyncio.ensure_future(t.run()) for t in site.transfers]
        site.transfers[1].held(hash)
        await asyncio.sleep(1)
        assert await site.transfers[0].find(hash) == list(site.ids(1))
        await site.transfers[2].fetch(File("f", hash, len(data), ()))
        await asyncio.sleep(1)
        assert set(await site.transfers[0].find(hash)) == set(site.ids(1, 2)), "appended"
        site.blobs[1].cache._evict(10**9)
        await asyncio.sleep(1)
        assert await site.transfers[0].find(hash) == list(site.ids(2))
        for task in catalogs:
            task.cancel()

    at(5, scenario)


# --------------------------------------------------------------------------- live


@pytest.mark.slow
def test_live_a_hot_file_a_killed_source_and_a_bad_disk() -> None:
    """As `make data` measures it, in small."""
    found = {}
    command = [sys.executable, "-m", "bench.data", "hot", "killed", "corrupt", "--mib", "24"]
    done = subprocess.run([*command, "--peers", "5"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        row = json.loads(line)
        found[row["work"]] = row
    assert found["hot"]["origin sent, times the file"] == 1.0
    assert found["hot"]["most that one peer sent, times the file"] <= 3.0
    assert found["killed"]["state"] == "succeeded"
    assert found["corrupt"]["state"] == "succeeded"
    assert found["corrupt"]["corrupt chunks that were found"] >= 1
