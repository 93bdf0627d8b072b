"""Blobs, the nursery and the database, on a real disk with real processes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from valence.peer import nursery
from valence.peer.blobs import DiskBlobs, QuotaFull, TooLarge, WrongHash
from valence.peer.database import Database
from valence.peer.processes import LocalProcesses, StartFailed
from valence.peer.removal import remove_tree
from valence.protocols.ports import DatabaseError, NurseryGone


def store(path: Path, quota: int = 1_000_000) -> DiskBlobs:
    blobs = DiskBlobs(path, quota, 500_000)
    blobs.room_s = 0.1
    return blobs


async def stream(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# --------------------------------------------------------------------------- blobs


async def test_a_blob_is_there_after_a_restart(tmp_path: Path) -> None:
    blobs = store(tmp_path)
    hash = await blobs.put(b"content")
    again = store(tmp_path)
    assert again.size(hash) == 7
    assert again.used_bytes == 7
    assert await again.read(hash, 2, 3) == b"nte"


async def test_bad_uploads_leave_nothing(tmp_path: Path) -> None:
    blobs = store(tmp_path)
    with pytest.raises(WrongHash):
        await blobs.receive(stream(b"abc"), sha(b"abd"), None)
    with pytest.raises(TooLarge):
        await blobs.receive(stream(b"x" * 300_000, b"x" * 300_000), sha(b""), None)
    with pytest.raises(TooLarge):
        await blobs.receive(stream(b""), sha(b""), 600_000)

    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise ConnectionResetError

    with pytest.raises((ConnectionResetError, QuotaFull)):
        await blobs.receive(broken(), sha(b"half"), 100)
    assert blobs.used_bytes == 0
    assert not len(blobs)
    assert not list((tmp_path / "parts").iterdir())


async def test_the_quota_counts_what_is_being_written_and_evicts_copies_only(
    tmp_path: Path,
) -> None:
    blobs = store(tmp_path)
    own = await blobs.put(b"o" * 400_000)
    copy = await blobs.put(b"c" * 400_000, hold="")
    async with blobs.make_room(300_000):
        assert copy not in blobs, "a copy makes room"
        with pytest.raises(QuotaFull):
            await blobs.put(b"d" * 400_000)
        assert own in blobs
    assert blobs.used_bytes == 400_000
    task = asyncio.ensure_future(blobs.put(b"e" * 100_000))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert blobs.used_bytes in (400_000, 500_000)
    assert blobs.used_bytes == sum(blobs.size(h) or 0 for h in list(blobs.cache))


async def test_a_pinned_copy_stays(tmp_path: Path) -> None:
    blobs = store(tmp_path)
    copy = await blobs.put(b"c" * 400_000, hold="")
    with blobs.pinned([copy]), pytest.raises(QuotaFull):
        await asyncio.gather(*(blobs.put(bytes([n]) * 400_000) for n in range(3)))
    assert copy in blobs


async def test_own_content_that_came_as_a_copy_is_kept_as_own(tmp_path: Path) -> None:
    blobs = store(tmp_path)
    await blobs.put(b"same", hold="")
    path = tmp_path / "made"
    path.write_bytes(b"same")
    hash, _ = await blobs.adopt(path)
    assert blobs.used_bytes == 4
    blobs.cache._evict(1_000_000)
    assert hash in blobs
    again = store(tmp_path)
    assert again.used_bytes == 4


async def test_what_a_blob_is_held_for_is_known_after_a_restart(tmp_path: Path) -> None:
    blobs = store(tmp_path)
    hash = await blobs.put(b"result", hold="one")
    await blobs.put(b"result", hold="two")
    blobs.release("one", [hash])
    again = store(tmp_path)
    assert again.cache.held_for() == {"two": [hash]}
    again.release("two", [hash])
    assert not store(tmp_path).cache.held_for()
    again.cache._evict(1_000_000)
    assert hash not in again
    assert not [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]


async def test_a_crash_between_a_blobs_two_names_loses_nothing(tmp_path: Path) -> None:
    blobs = store(tmp_path)
    hash = await blobs.put(b"result", hold="one")
    blobs.path(hash).unlink()
    again = store(tmp_path)
    assert await again.read(hash, 0, 6) == b"result"
    assert again.used_bytes == 6


async def test_a_result_that_is_wanted_stays_until_its_home_lets_go_of_it(tmp_path: Path) -> None:
    blobs = store(tmp_path)
    result = await blobs.put(b"r" * 400_000, hold="wf")
    with pytest.raises(QuotaFull):
        await asyncio.gather(*(blobs.put(bytes([n]) * 400_000, hold="wf") for n in range(2)))
    assert result in blobs

    async def ask() -> None:
        blobs.release("wf", [result])

    blobs.on_pressure = ask
    gone: list[bytes] = []
    blobs.on_gone = gone.append
    await blobs.put(b"n" * 400_000, hold="wf")
    assert gone == [result]
    assert blobs.used_bytes <= blobs.quota_bytes


async def test_who_waits_for_room_gets_it_when_another_is_done(tmp_path: Path) -> None:
    blobs = store(tmp_path)
    blobs.room_s = 5.0
    async with blobs.make_room(400_000), blobs.make_room(400_000):
        waiting = asyncio.ensure_future(blobs.put(b"w" * 400_000))
        await asyncio.sleep(0.05)
        assert not waiting.done()
    assert await waiting in blobs


async def test_what_never_fits_is_refused_at_once(tmp_path: Path) -> None:
    blobs = DiskBlobs(tmp_path, 1000, 500_000)
    blobs.room_s = 3600.0  # so long it would wait for what may come free
    with pytest.raises(QuotaFull, match="can be freed"):
        async with blobs.make_room(1001):
            pass


async def test_age_counts_from_the_day_it_came(tmp_path: Path) -> None:
    blobs = store(tmp_path)
    path = tmp_path / "old"
    path.write_bytes(b"from 2001")
    os.utime(path, (1_000_000_000, 1_000_000_000))
    hash, _ = await blobs.adopt(path)
    assert blobs.drop_older_than(time.time() - 3600) == 0
    assert hash in blobs
    assert blobs.drop_older_than(time.time() + 10) == 1


def test_trees_that_resist_are_removed_and_nothing_outside_is_touched(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("x")
    outside.chmod(0o644)
    root = tmp_path / "work"
    (root / "closed" / "deep").mkdir(parents=True)
    (root / "closed" / "link").symlink_to(outside)
    (root / "closed" / "deep").chmod(0)
    (root / "closed").chmod(0o555)
    remove_tree(root)
    assert not root.exists()
    assert outside.stat().st_mode & 0o777 == 0o644


# --------------------------------------------------------------------------- the nursery


async def processes(tmp_path: Path) -> tuple[LocalProcesses, int]:
    channel, pid = nursery.start()
    return LocalProcesses(channel, tmp_path), pid


def spawn(found: LocalProcesses, tmp_path: Path, *argv: str):
    environment = {"PATH": os.environ["PATH"]}
    log = tmp_path / f"log-{found.spawned}"
    return found.spawn(argv, str(tmp_path), False, environment, str(log), 1000, 10**9)


async def test_many_short_commands_and_the_nursery_lives(tmp_path: Path) -> None:
    found, pid = await processes(tmp_path)
    for _ in range(30):
        exits = await asyncio.gather(*(spawn(found, tmp_path, "true")[1] for _ in range(8)))
        assert {e.code for e in exits} == {0}
    with pytest.raises(StartFailed, match="command not found"):
        await spawn(found, tmp_path, "no-such-program")[1]
    os.kill(pid, 0)
    await found.close()
    os.waitpid(pid, 0)


async def test_a_command_hears_sigterm(tmp_path: Path) -> None:
    found, pid = await processes(tmp_path)
    command = "trap 'echo heard; exit 7' TERM; touch ready; while :; do sleep 0.05; done"
    id, exit = spawn(found, tmp_path, "sh", "-c", command)
    while not (tmp_path / "ready").exists():
        await asyncio.sleep(0.02)
    await found.end(id, exit)
    assert exit.result().code == 7
    assert b"heard" in exit.result().log
    await found.close()
    os.waitpid(pid, 0)


async def test_a_killed_nursery_is_replaced_and_its_tasks_end(tmp_path: Path) -> None:
    nursery.adopt_orphans()
    found, pid = await processes(tmp_path)
    mark = f"45.{os.getpid()}"
    _, exit = spawn(found, tmp_path, "sh", "-c", f"sleep {mark}; true")
    while not _sleeping(mark):
        await asyncio.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(NurseryGone):
        await exit
    while _sleeping(mark):
        await asyncio.sleep(0.02)
    assert (await spawn(found, tmp_path, "true")[1]).code == 0
    await found.close()
    os.waitpid(pid, 0)


def _sleeping(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if line == f"sleep\0{mark}\0".encode():
            found.append(path.parent.name)
    return found


# --------------------------------------------------------------------------- the database


async def test_writes_that_wait_together_share_a_sync(tmp_path: Path) -> None:
    database = Database(tmp_path / "peer.db")
    rows = [[("insert into meta values (?, ?)", (f"k{n}", n))] for n in range(500)]
    before = database.syncs
    await asyncio.gather(*(database.write(row) for row in rows))
    assert database.syncs - before < 100
    assert len(database.read("select * from meta")) == 500
    await database.close()


async def test_one_bad_write_fails_alone(tmp_path: Path) -> None:
    database = Database(tmp_path / "peer.db")
    await database.write([("insert into meta values ('a', 1)", ())])
    results = await asyncio.gather(
        database.write([("insert into meta values ('b', 1)", ())]),
        database.write([("insert into meta values ('a', 2)", ())]),
        database.write([("insert into nowhere values (1)", ())]),
        database.write([("insert into meta values ('c', 1)", ())]),
        return_exceptions=True,
    )
    assert [type(r) for r in results] == [
        type(None),
        DatabaseError,
        DatabaseError,
        type(None),
    ]
    assert [k for (k,) in database.read("select key from meta order by key")] == ["a", "b", "c"]
    await database.close()
