"""Strangers: documents, names, files and replies that mean it ill, and owners beside each other."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import logging
import os
import random
import re
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos import owners
from sim.loop import run_out
from sim.plan import Plan
from sim.world import World
from tests.conftest import Cluster
from valence.display import Display
from valence.peer import nursery
from valence.peer.attempt import Limits, LocalAttempt, TaskFailed, Unseen, usage_below
from valence.peer.blobs import DiskBlobs, is_plain, open_plain
from valence.peer.database import Database
from valence.peer.journal_storage import SqliteJournalStorage
from valence.peer.main import _Plain as plain_log
from valence.peer.processes import LocalProcesses, read_reply
from valence.peer.removal import remove_tree
from valence.peer.tokens import PILOT, BadToken, PilotToken, Tokens, make
from valence.peer.users import NoUsers, Users
from valence.peer.worker import Imported, read_sources
from valence.protocols.capacity.admission import Admission
from valence.protocols.config import LAN
from valence.protocols.consensus.lines import History, holds
from valence.protocols.consensus.placement import (
    Where,
    crowding,
    risk,
    spread,
    without_one,
    would_part,
)
from valence.protocols.consensus.replica import (
    Replica,
    begins_era,
    forced,
    forced_epoch,
    in_era,
    next_epoch,
)
from valence.protocols.consensus.storage import Write
from valence.protocols.data.cache import Cache, QuotaFull
from valence.protocols.engine.answers import ApiError
from valence.protocols.engine.policies import STEPS_IN_ALL_MAX, STEPS_MAX, Policies, policy_problem
from valence.protocols.engine.reception import Reception
from valence.protocols.engine.run import Run
from valence.protocols.engine.runs import Runs
from valence.protocols.engine.work import is_much, read_document
from valence.protocols.strategies.base import Unit
from valence.protocols.strategies.pilots.ranking import problem, ranking
from valence.protocols.strategies.shares import Shares
from valence.protocols.strategies.tickets.market import Market
from valence.protocols.strategies.tickets.messages import Claim
from valence.protocols.strategies.waiting import Waiting
from valence.protocols.wire.entries import HomeForced, Submitted
from valence.protocols.wire.messages import (
    AttemptKey,
    Candidacy,
    Capacity,
    Contact,
    Entry,
    Member,
    Needs,
    Outcome,
    Report,
    Room,
    Slice,
    Ticket,
    Traits,
)
from valence.workflow import tree, wfformat
from valence.workflow.problems import DocumentError, Problems

# --------------------------------------------------------------------------- documents


@pytest.mark.parametrize(
    "document",
    [
        # a tree of a few bytes that has a million values, copied for each of two thousand tasks
        "name: x\ntasks:\n  t:\n    foreach: 2000\n    call: builtins:len\n    args: ['{item}', "
        + "&a [0,0,0,0,0,0,0,0,0,0], &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a], "
        + "&c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b], &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]]\n",
        # a long item in many places
        json.dumps(
            {
                "name": "x",
                "tasks": {"t": {"foreach": ["a" * 9000] * 9, "command": ["{item}" * 9000]}},
            }
        ),
        json.dumps({"name": "x", "tasks": {"t": {"command": ["x"], "retries": 10**400}}}),
    ],
)
def test_a_short_document_does_not_become_a_huge_one(document: str) -> None:
    with pytest.raises(DocumentError):
        read_document(document.encode(), {})


def test_a_mistake_that_thousands_of_tasks_make_is_not_looked_up_thousands_of_times() -> None:
    """Counted, not timed: what was meant is looked for a few times only."""
    task = {"foreach": 5000, "command": ["x"], "inputs": ["in{item}.datx"], "outputs": ["o{item}"]}
    with pytest.raises(DocumentError) as told:
        read_document(json.dumps({"name": "x", "tasks": {"t": task}}).encode(), {})
    assert sum("did you mean" in p.message for p in told.value.problems) <= 20


def test_no_expression_of_a_user_raises_where_all_tasks_are_ranked() -> None:
    rank = 'part((1:"a"), min(1, floor(waited - 1)))'
    assert problem(rank) is None
    assert ranking(rank)(0, 0, 1, 1.5, 0) == 1.0
    assert ranking(rank)(0, 0, 1, 5.0, 0) == 0.0, "a text is no rank"
    for other in ("floor(1e308 * 10)", "1 / 0", "len(waited)", "part(1, 2)", "((", "9" * 199):
        assert ranking(other)(1, 1, 1, 1, 1) in (0.0, float("9" * 18)) or problem(other)


@pytest.mark.parametrize(
    "rules",
    [
        ("replace ENDED:t:f:c:v by A:1", "replace A:x by A:(x:x)"),
        ("replace ENDED:t:f:c:v by A:1", "replace A:x by A:(x:1)"),
        ("replace ENDED:t:f:c:v by A:<1, 2>", "replace A:<?w> by A:<?w, ?w>"),
    ],
)
def test_policies_that_grow_are_left_alone_and_say_so(rules: tuple[str, ...]) -> None:
    policies = Policies(rules)
    for number in range(50):
        policies.ended(f"t{number}", 1, "exit", 1)
    assert policies._steps_left > 0
    assert policies.trouble or policies._reactor.troubles


@pytest.mark.parametrize("count", [101, 500, 5000])
@pytest.mark.parametrize("operator", ["+", "*", " and ", " or "])
def test_a_long_expression_is_refused_before_it_is_built(count: int, operator: str) -> None:
    long = operator.join(["1"] * count)
    for rule in (
        f"replace ENDED:t:f:c:v by A if {long}",
        f"replace ENDED:t:f:c:v by A:1 if {'(' * 30 + long + ')' * 30} > 1",
    ):
        assert "steps in a row" in (policy_problem(rule) or "")
    if operator in "+*":
        assert "steps in a row" in (policy_problem(f"replace E:t by A:{long}, <{long}>") or "")


@pytest.mark.parametrize("url", ["http://[::1/x", "http://h:99999999/x", "http://h:abc/x"])
def test_what_only_begins_like_a_url_is_refused_before_anybody_opens_it(url: str) -> None:
    reads = {"command": ["x"], "inputs": ["o"], "outputs": ["p"]}
    made = {"name": "n", "tasks": {"a": reads}, "inputs": {"o": {"text": "x"}}}
    for more in ({"inputs": {"o": {"url": url}}}, {"deliver": {"p": url}}):
        with pytest.raises(DocumentError, match="write http"):
            read_document(json.dumps({**made, **more}).encode(), {})


def test_recorded_names_that_are_no_files_become_files() -> None:
    files = ["https://h.org/x/in.fq?a=1", "/data/a b/../c.txt", "s3://b/k:1"]
    value = {
        "name": "x",
        "schemaVersion": "1.6",
        "workflow": {
            "specification": {
                "files": [{"id": name, "sizeInBytes": 1} for name in files],
                "tasks": [
                    {"id": "a", "parents": [], "inputFiles": files[:2], "outputFiles": files[2:]},
                    {"id": "b", "parents": ["a"], "inputFiles": files[2:], "outputFiles": []},
                ],
            },
            "execution": {"tasks": [{"id": "a", "runtimeInSeconds": 1, "avgCPU": None}]},
        },
    }
    found = wfformat.parse(value)
    assert found.tasks["a"].outputs == found.tasks["b"].inputs
    assert len({*found.tasks["a"].inputs, *found.tasks["b"].inputs}) == 3
    assert not any(".." in name or ":" in name for name in found.inputs)


def test_recorded_tasks_and_files_of_any_name_stay_apart() -> None:
    """As in rnaseq of WfInstances; and names that would meet in a task's directory."""
    first, second = "NF:RNASEQ:GUNZIP__a.fa.gz__ID2", "NF:RNASEQ:GUNZIP__rsem/a.fa__ID5"
    files = ["/data/a", "data/a", "data", "-o", "out:5"]
    tasks = [
        {"id": first, "parents": [], "inputFiles": files[:4], "outputFiles": files[4:]},
        {"id": second, "parents": [first], "inputFiles": files[4:], "outputFiles": []},
    ]
    listed = [{"id": name, "sizeInBytes": 1} for name in files]
    value = {
        "name": "x",
        "schemaVersion": "1.5",
        "workflow": {"specification": {"files": listed, "tasks": tasks}},
    }
    found = wfformat.parse(value)
    one, two = found.tasks.values()
    assert len(set(one.inputs)) == 4
    assert not any(a.startswith(f"{b}/") for a in one.inputs for b in one.inputs)
    assert found.parents[two.id] == (one.id,)
    assert "--read=-o" in one.command


# --------------------------------------------------------------------------- what tasks leave


def test_directories_deeper_than_any_path_are_removed(tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    here = os.open(root, os.O_RDONLY)
    for _ in range(1900):
        os.mkdir("ddddddddd", dir_fd=here)
        inner = os.open("ddddddddd", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    (root / "file").write_text("x")
    for number in range(3):  # names that the removal itself once gave
        (root / f".removed-{number}" / "a" / "b").mkdir(parents=True)
    assert remove_tree(root)
    assert not root.exists()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert is_plain(tmp_path / "file")
    for name in ("pipe", "link", "nothing"):
        assert not is_plain(tmp_path / name)
        with pytest.raises(OSError, match=r".*"):
            open_plain(tmp_path / name)
    os.link(tmp_path / "file", tmp_path / "second")
    assert not is_plain(tmp_path / "file"), "somebody else may have it open"


def test_what_a_task_has_on_disk_is_counted_no_further_than_its_limits(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / str(number)).write_bytes(b"x" * 10_000)
    size, files = usage_below(str(tmp_path), 2**40, 1000)
    assert files == 50
    assert size >= 500_000
    assert usage_below(str(tmp_path), 2**40, 10)[1] == 11
    assert Limits().processes < 10_000


def test_what_can_not_be_looked_at_is_not_taken_for_nothing(tmp_path: Path) -> None:
    """30 MB below a path longer than paths may be counted as none."""
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(30):
            os.mkdir("d" * 200)
            os.chdir("d" * 200)
        Path("large").write_bytes(b"x" * 100_000)
    finally:
        os.chdir(here)
    with pytest.raises(Unseen, match="nested deeper"):
        usage_below(str(tmp_path), 2**40, 1000)
    assert remove_tree(tmp_path / ("d" * 200))


async def test_a_blob_is_what_it_was_hashed_as_whoever_goes_on_writing(tmp_path: Path) -> None:
    """A call kept its value open, and wrote to it when it was another owner's input."""
    blobs = DiskBlobs(tmp_path / "blobs", 2**30, 2**30)
    path = tmp_path / "value"
    with path.open("wb") as kept:
        kept.write(b"good")
        kept.flush()
        hash, _ = await blobs.adopt(path)
        kept.seek(0)
        kept.write(b"EVIL")
        kept.flush()
        assert blobs.path(hash).read_bytes() == b"good"
    alone = tmp_path / "alone"
    alone.write_bytes(b"nobody else's")
    number = alone.stat().st_ino
    hash, _ = await blobs.adopt(alone)
    assert blobs.path(hash).stat().st_ino == number, "it is not copied where nobody has it open"
    second = tmp_path / "second"
    second.write_bytes(b"two names")
    os.link(second, tmp_path / "its other name")
    hash, _ = await blobs.adopt(second)
    other = (tmp_path / "its other name").stat().st_ino
    assert blobs.path(hash).stat().st_ino != other


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\xc1",
        {"ok": "yes"},
        {"ok": True},
        {"ok": True, "encoding": "json", "data": b"not json"},
        {"ok": True, "encoding": "json", "data": b"[" * 60_000},
        {"ok": True, "encoding": "exec", "data": b""},
        {"ok": True, "encoding": "pickle", "data": "text"},
        {"ok": True, "encoding": "pickle", "data": b"x" * 100_000},
    ],
)
def test_a_reply_that_lies_is_the_calls_failure(reply: Any) -> None:
    import msgpack

    packed = reply if isinstance(reply, bytes) else msgpack.packb(reply)
    found = read_reply(packed)
    assert found["ok"] is False
    assert found["lie"] is True


# --------------------------------------------------------------------------- whose processes


def processes(tmp_path: Path, **more: Any) -> LocalProcesses:
    channel, _ = nursery.start()
    return LocalProcesses(channel, tmp_path, **more)


async def test_no_two_owners_share_a_worker(tmp_path: Path) -> None:
    found = processes(tmp_path)
    try:
        ada = await found.worker("ada")
        found.give_back(ada)
        bob = await found.worker("bob")
        assert bob.pid != ada.pid
        found.give_back(bob)
        assert (await found.worker("ada")).pid == ada.pid
        ada.close()
        bob.close()
        await asyncio.sleep(0)
    finally:
        await found.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
async def test_a_task_runs_under_its_owners_own_user(tmp_path: Path) -> None:
    users = Users(tmp_path, 2_000_000, 100_000)
    assert users("ada") != users("bob")
    found = processes(tmp_path, users=users)
    secret = tmp_path / "secret"
    secret.write_text("the cluster's token")
    secret.chmod(0o600)
    work = tmp_path / "work"
    try:
        for path in (*tmp_path.parents, tmp_path):
            if path.stat().st_uid == 0 and stat.S_IMODE(path.stat().st_mode) & 0o001 == 0:
                path.chmod(0o711)
        command = f"id -u; id -G; cat {secret}; echo $?"
        env = {"PATH": "/usr/bin:/bin"}
        log = str(tmp_path / "log")
        argv = ("sh", "-c", command)
        _, exit = found.spawn(argv, str(work), True, env, log, 10_000, 2**30, "ada")
        ended = await asyncio.wait_for(exit, 20)
        lines = (ended.log or b"").decode().split("\n")
        assert lines[0] == str(users("ada")[0])
        assert lines[1] == str(users("ada")[1])
        assert "Permission denied" in lines[2]
        assert os.geteuid() == 0
    finally:
        await found.close()


def test_no_two_owners_ever_have_one_user(tmp_path: Path) -> None:
    """By the hash of their names two of four hundred owners probably had."""
    users = Users(tmp_path, 2_000_000, 40_000)
    names = ["jan.bauer", "dora.nagel", *map(str, range(997))]
    with ThreadPoolExecutor(4) as threads:  # as directories are laid out
        given = dict(zip(names, (found for found, _ in threads.map(users, names)), strict=True))
    assert len(set(given.values())) == 999
    users("the last")
    with pytest.raises(NoUsers):
        users("one more")
    assert stat.S_IMODE((tmp_path / "users.json").stat().st_mode) == 0o600
    again = Users(tmp_path, 2_000_000, 40_000)
    assert again("dora.nagel")[0] == given["dora.nagel"], "also after a restart"


SCAN = """
import hashlib, re

def secrets_seen(digest):
    'What this process has in memory, if it has that digest.'
    found = set()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, rights, *_ = line.split()
            if rights[:2] == "rw":
                first, last = (int(n, 16) for n in span.split("-"))
                try:
                    memory.seek(first)
                    data = memory.read(last - first)
                except (OSError, OverflowError):
                    continue
                found |= set(re.findall(rb"hidden-[0-9a-f]{32}", data))
    return sum(hashlib.sha256(one).hexdigest() == digest for one in found)
"""


@pytest.mark.parametrize("apart", [True, False])
async def test_a_workers_memory_has_nothing_of_the_daemons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """It was a fork of a fork of it, cluster key, token and all. (Where tasks have the daemon's own
    user, it still is: that shows that the scan would find something.)"""
    secret = f"hidden-{os.urandom(16).hex()}"
    monkeypatch.setenv("VALENCE_TOKEN", secret)
    (tmp_path / "scan.py").write_text(SCAN)
    monkeypatch.syspath_prepend(str(tmp_path))
    channel, _ = nursery.start(apart)
    found = LocalProcesses(channel, tmp_path)
    worker = await found.worker("ada")
    digest = hashlib.sha256(secret.encode()).hexdigest()
    request = {
        "call": "scan:secrets_seen",
        "arguments": msgpack.packb([[digest], {}]),
        "references": [],
        "cwd": "",
        "env": {},
        "workflow": "w1",
        "value_path": f"{worker.place}/value",
        "log_bytes_max": 1000,
    }
    try:
        answer = await asyncio.wait_for(worker.call(request), 30)
        assert answer["ok"], answer
        assert answer["data"] == (b"0" if apart else b"1")
    finally:
        worker.close()
        await found.close()


async def test_what_a_task_hides_counts_as_well(tmp_path: Path) -> None:
    """Files without a name, and processes that fled into a session of their own."""
    found = processes(tmp_path)
    code = (
        "import os, subprocess, sys, time\n"
        "file = open('big', 'wb'); os.unlink('big'); file.write(b'x' * 5_000_000); file.flush()\n"
        "if sys.argv[1:]:\n"
        "    subprocess.Popen([sys.executable, __file__], start_new_session=True)\n"
        "    sys.stdout.write('ready'); sys.stdout.flush()\n"
        "    os._exit(0) if os.fork() else time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "hide.py").write_text(code)
    env = {"PATH": "/usr/bin:/bin", nursery.MARKER: "mine"}
    argv = ("sh", "-c", f"{sys.executable} {tmp_path}/hide.py on; sleep 60")
    id, exit = found.spawn(argv, str(tmp_path / "w"), True, env, str(tmp_path / "l"), 1000, 2**30)
    try:
        async with asyncio.timeout(30):
            while (used := await found.usage(id)).nameless_bytes < 10_000_000:
                await asyncio.sleep(0.05)
        assert used.processes >= 4, "the shell, its sleep, and two that fled"
    finally:
        await found.end(id, exit)
        await found.close()


def test_an_edited_module_is_noticed_and_its_source_is_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: what it changes about imports is for workers only."""
    code = f"""
import importlib, os, sys, time
sys.path[:0] = [{str(tmp_path)!r}, {os.getcwd()!r}]
from valence.peer.worker import Imported, read_sources, resolve
path = {str(tmp_path / "edited.py")!r}
open(path, "w").write("def which(): return 1\\n")
import py_compile; py_compile.compile(path)   # as the user's own run leaves it
imported = Imported()
read_sources(imported)
sys.meta_path.insert(0, imported)
assert resolve("edited:which")() == 1
assert not imported.changed("w1") and not imported.changed("w1")
at = os.stat(path).st_mtime
open(path, "w").write("def which(): return 2\\n")   # the same length, perhaps the same second
os.utime(path, ns=(int(at * 1e9), int(at // 1 * 1e9) + 7))
assert imported.changed("w2"), "another workflow: looked at anew"
del sys.modules["edited"]; importlib.invalidate_caches()
assert resolve("edited:which")() == 2, "not what was compiled from the old one"
late = os.path.join(os.path.dirname(path), "late.py")
code = "open(__file__, 'w').write('def which(): return 2')\\ndef which(): return 1\\n"
open(late, "w").write(code)
assert not Imported().changed("w3")
assert resolve("late:which")() == 1, "edited while it was being imported"
assert imported.changed("w4"), "what was read is not what is there now"
"""
    import subprocess
    import sys

    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert Imported
    assert read_sources


@pytest.mark.slow
def test_code_edited_under_a_running_cluster_is_what_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owners, "CALLS", (30, 30, 60))
    monkeypatch.setattr(owners, "PEERS", 2)
    with tempfile.TemporaryDirectory() as home:
        found = owners.edited(argparse.Namespace(), Path(home))
    assert found["right"], found
    assert found["workers_shared"] == 0


# --------------------------------------------------------------------------- owners beside each other

NEEDS = Needs(Capacity(millicores=1000))


def unit(owner: str, number: int, **more: Any) -> Unit:
    return Unit(AttemptKey(f"w{owner}", f"t{number}", 1), NEEDS, owner=owner, **more)


def test_owners_who_wait_take_turns_whoever_came_first() -> None:
    waiting = Waiting(lambda unit: 1.0)
    waiting.add([unit("ada", n) for n in range(400)], now=0.0)
    [group] = waiting.groups.values()
    assert [waiting.pop(group).owner for _ in range(5)] == ["ada"] * 5  # type: ignore[union-attr]
    waiting.add([unit("bob", n) for n in range(400)], now=2.0)
    waiting.add([unit("eve", n) for n in range(10)], now=3.0)
    got = Counter(waiting.pop(group).owner for _ in range(30))  # type: ignore[union-attr]
    assert got == {"ada": 10, "bob": 10, "eve": 10}
    reason = waiting.reason(AttemptKey("wbob", "t300", 1))
    assert reason is not None
    assert "2 owners" in reason or "3 owners" in reason
    while waiting:
        assert waiting.pop(group) is not None
    assert not waiting.shares.contended


def test_what_is_taken_back_leaves_every_owner_with_what_is_still_waiting() -> None:
    """Beside another owner it was looked for among all units, for each that was taken back."""
    waiting = Waiting(lambda unit: 1.0)
    mine = [unit("ada", n) for n in range(5000)]
    waiting.add(mine, now=0.0)
    waiting.add([unit("bob", 1)], now=0.0)
    waiting.withdraw(one.key for one in mine[:-1])
    assert len(waiting) == 2
    assert waiting.shares.contended
    waiting.withdraw([mine[-1].key])
    assert not waiting.shares.contended
    [group] = waiting.groups.values()
    assert waiting.pop(group).owner == "bob"  # type: ignore[union-attr]


def test_of_one_owner_what_is_due_first_goes_first() -> None:
    waiting = Waiting(lambda unit: 1.0)
    waiting.add([unit("ada", n) for n in range(60)], now=0.0)
    waiting.add([unit("ada", n, deadline_at=104.0) for n in range(100, 104)], now=100.0)
    waiting.add([unit("ada", 200, deadline_at=102.0)], now=100.0)
    [group] = waiting.groups.values()
    first = [waiting.pop(group).key.task for _ in range(6)]  # type: ignore[union-attr]
    assert first == ["t200", "t100", "t101", "t102", "t103", "t0"]


def test_who_comes_late_is_owed_nothing_and_who_idles_saves_nothing() -> None:
    shares = Shares()
    shares.waits("ada")
    for _ in range(100):
        shares.give("ada", 1.0)
    shares.waits("bob")
    turns = []
    for _ in range(10):
        owner = shares.next(["ada", "bob"])
        turns.append(owner)
        shares.give(owner, 1.0)
    assert Counter(turns) == {"ada": 5, "bob": 5}


def test_one_owners_uploads_leave_room_for_others_and_for_tasks() -> None:
    cache = Cache(1000, 1000)
    cache.check_upload("own-a", 400)
    cache.add(b"a" * 32, 400, "own-a")
    with pytest.raises(QuotaFull, match="your uploads"):
        cache.check_upload("own-a", 1)
    cache.check_upload("own-b", 300)
    cache.add(b"b" * 32, 300, "own-b")
    with pytest.raises(QuotaFull, match="all uploads"):
        cache.check_upload("own-c", 100)
    assert cache.own_bytes() == 700
    assert not cache.held_for(), "no home is asked about them"
    cache.release(b"a" * 32, "own-a")
    cache.remove(b"b" * 32)
    assert cache.own_bytes() == 0
    cache.check_upload("own-a", 400)
    cache.check_upload("own-b", 400)


def test_an_upload_that_says_nothing_of_its_size_counts_as_it_comes() -> None:
    """Without a Content-Length, and several at once, one owner filled the disk."""
    cache = Cache(1000, 1000)
    with cache.uploading("own-a", 0) as first, cache.uploading("own-a", 100) as second:
        first(200)
        second(200)
        with pytest.raises(QuotaFull, match="your uploads"):
            first(201)
        with pytest.raises(QuotaFull, match="all uploads"), cache.uploading("own-b", 301):
            pass
    with cache.uploading("own-a", 400):
        pass


# --------------------------------------------------------------------------- who may read what


def test_a_pilots_token_exchanges_work_and_reads_blobs_and_nothing_else() -> None:
    tokens = Tokens("root" * 5, (), time.time)
    pilot = tokens.check(str(PilotToken("root" * 5, time.time)))
    assert pilot.scope == PILOT
    assert pilot.may(PILOT)
    assert pilot.may("read", pilots=True)
    assert not any(pilot.may(scope) for scope in ("read", "submit", "admin"))
    ada = tokens.check(make("root" * 5, "ada", "submit", time.time() + 60)[0])
    assert not ada.may(PILOT)
    with pytest.raises(BadToken, match="expired"):
        tokens.check(make("root" * 5, "ada", "submit", time.time() - 60)[0])


def test_what_others_wrote_does_not_reach_a_terminal_as_a_command() -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    display = Display(out)
    display.coloured = True
    hostile = "evil\x1b]0;title\x07\x1b[2J\x9b31m\r"
    display.say(display.colour(f"task {hostile}", "failed"))
    display.table(("NAME",), [(hostile,)])
    text = out.getvalue()
    assert "\x1b[31m" in text, "our own colour"
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    assert "\x9b" not in text
    assert "\\x1b]0;title\\x07" in text
    record = logging.LogRecord("valence", logging.ERROR, "", 0, "can't read %s", (hostile,), None)
    assert plain_log("%(message)s").format(record).isprintable()


# --------------------------------------------------------------------------- keepers


def test_keepers_are_on_machines_and_sites_of_their_own_where_there_are_such() -> None:
    me = Where(b"\1" * 20, "h1", "here")
    same = [Where(bytes([n]) * 20, "h1", "here") for n in (2, 3)]
    near = Where(b"\4" * 20, "h2", "here")
    far = Where(b"\5" * 20, "h3", "there")
    assert set(spread("w1", [me], [*same, near, far], 2, "kademlia")) == {near.id, far.id}
    assert len(spread("w1", [me], same, 2, "kademlia")) == 2, "where there are none"
    assert crowding([me, *same]) == (2, 2)
    assert would_part(me.id, [me, *same], near)
    assert without_one(me.id, [me, *same, near]) == [me, same[0], near]
    assert would_part(me.id, [me, *same], Where(b"\6" * 20, "h1", "there"))
    assert not would_part(me.id, [me, *same], Where(b"\6" * 20, "h1", "here"))
    assert "all 3 copies" in risk([me, *same])
    assert "stands still" in risk([me, same[0], far])
    assert "at one site" in risk([me, near, Where(b"\7" * 20, "h4", "here")])
    assert risk([me, near, far]) == ""


def test_of_two_lines_both_sides_choose_the_same() -> None:
    kinds = [(False, False), (True, False), (True, True)]
    lines = [History(over, era, void) for over, void in kinds for era in (0, 3, 7)]
    for a in lines:
        for b in lines:
            if a.era != b.era:
                assert holds(a, b) != holds(b, a)
    assert holds(History(True, 0), History(False, 7)), "an agreed end holds against a forced home"
    assert holds(History(True, 0), History(True, 7))
    assert holds(History(False, 7), History(False, 0))
    for other in (History(False, 0), History(True, 3)):
        assert holds(other, History(True, 7, void=True)), (
            "what nobody was told of holds against none"
        )


def test_half_a_submission_goes_on_nowhere_and_makes_way() -> None:
    """A keeper that was cut off with a part of it, forced itself, and ended as void what the others
    had acknowledged."""
    first = next_epoch(0, b"a" * 20)
    keepers = msgpack.packb({"keepers": (b"a" * 20, b"b" * 20, b"c" * 20)})
    submitted = Submitted(
        name="", owner="", tasks=1, options="", parts=3, zipped=False, document=b""
    )
    body = msgpack.packb({})
    part = Replica("w")
    part.add(Entry(0, first, 0.0, "keepers", keepers))
    part.add(Entry(1, first, 0.0, "submitted", submitted.packed()))
    part.add(Entry(2, first, 0.0, "document", body))
    assert not part.whole
    part.add(Entry(3, first, 0.0, "document", body))
    assert part.whole
    part.cut(3)
    later = next_epoch(first, b"b" * 20)
    part.add(Entry(3, later, 0.0, "home", body))
    part.cut(3)  # that home was never agreed on
    part.add(Entry(3, first, 0.0, "document", body))
    assert part.whole
    part.cut(3)
    for seq in range(3, 9):
        part.add(Entry(seq, later, 0.0, "home", body))
    assert not part.whole, "entries of another home are no part of it"
    part.add(Entry(9, later, 0.0, "ended", body))
    part.committed = 10
    assert part.void


def test_who_made_way_for_a_namesake_never_votes_for_what_broke_off(tmp_path: Path) -> None:
    """Seed 960126 with small slices: a keeper forgot how far a void journal was, as another one of
    its name has no use for that, and elected a copy that lacked its end."""

    async def scenario() -> None:
        database = Database(tmp_path / "peer.db")
        storage = SqliteJournalStorage(database, time.time)
        birth, other = next_epoch(0, b"a" * 20), next_epoch(0, b"b" * 20)
        await storage.write([Write("w", birth, forget=True, voided=birth)])
        left = storage.remains("w")
        asked = Candidacy("w", next_epoch(birth, b"c" * 20), 5, birth, False, birth)
        assert "broke off" in left.why_not(asked)
        namesake = Candidacy("w", next_epoch(birth, b"c" * 20), 2, other, False, other)
        assert left.why_not(namesake) == ""
        await database.close()

    asyncio.run(scenario())


def test_the_simulated_half_of_an_acknowledged_submission_never_wins() -> None:
    assert run_out(_half_a_submission()) == ["running"] * 3


async def _half_a_submission() -> list[str]:
    """Cut off with a part of the submission, and left alone for longer than the limit."""
    world = World(Plan(5, peers=3, faults=(), majority_lost_s=10.0, slice_bytes=1))
    hosts = [world.add_host() for _ in range(3)]
    await world._until(world._all_know_all, 60.0, "they never found each other")
    tasks = {f"t{i}": {"command": ["work", "600"], "env": {"X": f"x{i}" * 200}} for i in range(20)}
    text = json.dumps({"name": "w", "tasks": tasks}).encode()
    replicas = hosts[2].enactment.keeping.replicas

    async def cut() -> None:
        while not any(r.count > 0 and not r.whole for r in replicas.values()):
            await asyncio.sleep(0.0002)
        world.network.island = {hosts[2].id}

    cutting = asyncio.ensure_future(cut())
    id, _ = await hosts[0].do(hosts[0].enactment.gateway.submit(text, {}, "me", False), 20.0)
    assert cutting.done()
    assert not replicas[id].whole
    await asyncio.sleep(40)
    assert not hosts[2].enactment.keeping.leads, "it went on with a part"
    world.network.island = set()
    await asyncio.sleep(60)
    asked = [h.do(h.enactment.gateway.ask("", id, "workflow"), 30.0) for h in hosts]
    return [(await one)["state"] for one in asked]


def test_nobody_leads_in_an_era_that_its_log_is_not_in() -> None:
    first = next_epoch(0, b"a" * 20)
    era = forced_epoch(first, b"b" * 20)
    assert era is not None
    assert begins_era(era)
    assert in_era(era, first), "who begins it"
    later = next_epoch(era, b"c" * 20)
    assert not in_era(later, first)
    assert in_era(later, era)
    assert not begins_era(later)


def test_a_line_that_ended_is_of_the_era_in_which_its_end_was_agreed_on() -> None:
    first = next_epoch(0, b"a" * 20)
    era = forced_epoch(first, b"b" * 20)
    assert era is not None

    def copy(committed: int) -> Replica:
        made = Replica("w")
        made.add(Entry(0, first, 0.0, "keepers", msgpack.packb({"keepers": [b"a" * 20]})))
        made.add(Entry(1, first, 0.0, "ended", b""))
        forced = HomeForced(
            home=b"b" * 20, epoch=1, why="", keepers=(b"b" * 20,), committed=committed
        )
        made.add(Entry(2, era, 0.0, forced.kind, forced.packed()))
        made.committed = 3
        return made

    assert copy(committed=2).line == 0, "it was over before, and is only copied"
    assert copy(committed=1).line == forced(era), "its keepers of before may have gone another way"
    same = Slice(
        "w", era, 0, 0, 3, (Entry(0, first, 0.0, "x", b""), Entry(1, first, 0.0, "x", b""))
    )
    other = Slice("w", era, 0, 0, 3, (Entry(0, first, 0.0, "x", b""), Entry(1, era, 0.0, "x", b"")))
    assert copy(2).shows_end(same)
    assert not copy(2).shows_end(other)
    assert not copy(2).shows_end(same._replace(entries=same.entries[:1])), "it does not say"
    assert copy(2).shows_end(Slice("w", era, 2, first, 3))


async def test_who_gives_up_a_forced_line_remembers_what_it_had_before(tmp_path: Path) -> None:
    """With less it could vote for a home that has not what counts."""
    first, era = next_epoch(0, b"a" * 20), forced_epoch(0, b"b" * 20)
    assert era is not None
    database = Database(tmp_path / "peer.db")
    storage = SqliteJournalStorage(database, time.time)
    try:
        entries = tuple(Entry(seq, first, 0.0, "x", b"") for seq in range(5))
        await storage.write([Write("w", first, None, entries)])
        later = (Entry(2, era, 0.0, "forced", b""),)
        await storage.write([Write("w", era, 2, later)])
        assert storage.remains("w").promised == era
        await storage.write([Write("w", era, forget=True, position=(era, 3), back_to=0)])
        found = storage.remains("w")
        assert (found.promised, found.floor) == (first, (first, 5))
        await storage.write([Write("v", era, None, later)])
        await storage.write([Write("v", era, forget=True, position=(era, 1), back_to=0)])
        assert (storage.remains("v").promised, storage.remains("v").floor) == (0, (0, 0))
    finally:
        await database.close()


def test_a_call_that_takes_all_memory_is_ended_and_the_peer_goes_on(
    own_cluster: Callable[..., Cluster],
) -> None:
    """Nobody asked for memory: what the peer has is the limit, in warm workers as elsewhere."""
    cluster = own_cluster(1, "--memory", "200MiB")
    greedy = {"call": "operator:mul", "args": [[0], 60_000_000]}  # 480 MB, and seconds to look at
    files = {**greedy, "outputs": ["never-made"]}  # not on the short way
    fine = {"name": "f", "tasks": {"a": {"call": "operator:add", "args": [1, 2]}}}
    assert cluster.client().submit(fine).wait() == "succeeded", "there is a warm worker"
    workflow = cluster.client().submit({"name": "g", "tasks": {"short": greedy, "long": files}})
    assert workflow.wait() == "failed"
    for task in workflow.tasks():
        assert "of memory, more than the 200 MiB that this peer has" in task["reason"], task
    assert cluster.client().submit(fine).wait() == "succeeded"


def test_places_of_a_document_are_no_more_than_a_few_times_its_text() -> None:
    """150 kB with a long key above many values took 2.4 GB."""
    text = "? " + "k" * 50_000 + "\n: [" + "0," * 20_000 + "0]\n"
    value, lines = tree.read(text)
    assert len(value) == 1
    assert sum(map(len, lines)) < 2 * tree.LINES_CHARS_MAX
    problems = Problems()
    problems.add(("k" * 50_000, 1), "m" * 50_000)
    with pytest.raises(DocumentError) as found:
        problems.check()
    assert len(str(found.value)) < 10_000


def test_what_may_take_long_is_known_by_its_text() -> None:
    small = b'{"name": "x", "tasks": {"t": {"command": ["true"]}}}'
    assert not is_much(small)
    for much in (b"foreach: 1744", b"peers: 256", b"a: &x 1", b" " * 5000):
        assert is_much(small + much)


# --------------------------------------------------------------------------- what terms cost


def test_the_rest_of_a_solution_is_not_made_of_one_molecule() -> None:
    """It was an assertion in the middle of the home's part, and kept all others' results waiting."""
    assert "not for a rest" in str(policy_problem("replace ENDED:t:f:c:v by A:<?t>"))
    assert "not for a rest" in str(policy_problem("replace ENDED:t:f:c:v by A if len(<?t>) > 1"))
    assert "not for a rest" in str(problem("len(<?local>)"))
    assert ranking("len(<?local>)")(1.0, 1.0, 1.0, 1.0, 1.0) == 0.0
    assert policy_problem("replace S:w::solution by T:<?w>") is None


@pytest.mark.parametrize(
    "rule",
    [
        "replace S:<?w> by T:<{}>".format(", ".join(["?w"] * 480)),
        "replace S:<x, ?w> by T:<{}>".format(", ".join(["?w"] * 480)),
        "replace S:<x, y, ?w> by T if has(<?w>, X)",
    ],
)
def test_what_a_term_stands_for_is_counted_before_it_is_made(rule: str) -> None:
    """A rule of some kilobytes made 230,000 molecules, for 17 s, before it was found too large."""
    numbers = ", ".join(map(str, range(480)))
    policies = Policies((f"replace ENDED:t:f:c:v by S:<{numbers}>", rule))
    assert policies.ended("task", 1, "exit", 1) is None
    assert "still reacting" in policies.trouble
    assert policies._steps_left >= STEPS_IN_ALL_MAX - 2 * STEPS_MAX


async def test_an_error_in_one_workflows_outcome_keeps_no_other_from_being_taken() -> None:
    """Outcomes of several workflows come in one message."""
    taken: list[str] = []
    told: list[str] = []

    class Faulty:
        def take(self, run: Run, peer: bytes, outcomes: list[Outcome]) -> None:
            if run.id == "bad":
                raise AssertionError("an error of ours")
            taken.append(run.id)

        def heard_of_room(self, peer: bytes, free: Capacity) -> None:
            pass

    async def kept(id: str) -> None:
        told.append(id)

    journal: Any = SimpleNamespace(kept=kept, is_kept=lambda id: False)
    counts: Counter[str] = Counter()
    runs = Runs(journal)
    document = json.dumps({"name": "x", "tasks": {"t": {"command": ["true"]}}}).encode()
    for id in ("bad", "good"):
        runs.begin(Run(id, read_document(document, {}), 0.0, b"home"))
    nothing: Any = SimpleNamespace(drop=lambda *_: None)
    reception = Reception(
        home=Faulty(), runs=runs, journal=journal, blobs=nothing, outstanding=nothing, company=nothing,
        replication=nothing, counts=counts,
    )  # fmt: skip
    outcomes = tuple(
        Outcome(key=AttemptKey(id, "t", 1), kind="ok", queued_at=0.0, started_at=0.0, ended_at=0.0)
        for id in ("bad", "good")
    )
    sender = Contact(b"p" * 20, "127.0.0.1", 1)
    answer = await reception.report(sender, Report(outcomes=outcomes, free=Capacity()))
    assert taken == ["good"]
    assert told == ["good"]
    assert [key.workflow for key in answer.kept] == ["good"]
    assert counts["errors"] == 1


# --------------------------------------------------------------------------- keepers that move


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=4, max_size=8))
def test_keepers_move_a_bounded_number_of_times(placed: list[tuple[int, int]]) -> None:
    """Whoever is where: each change leaves fewer that fall together, so there is a last one. (Two
    hosts and two sites were enough for 120 changes in half a minute.)"""
    all_of_them = [Where(bytes([n]) * 20, f"h{h}", f"s{s}") for n, (h, s) in enumerate(placed)]
    me, keepers, changes = all_of_them[0].id, all_of_them[:3], 0
    while True:
        rest = [w for w in all_of_them if w not in keepers and would_part(me, keepers, w)]
        if not rest:
            break
        [new] = spread("w1", keepers, rest, 1, "kademlia")
        before = crowding(keepers)
        keepers = without_one(me, [*keepers, next(w for w in rest if w.id == new)])
        assert crowding(keepers) < before
        assert len(keepers) == 3
        assert me in [w.id for w in keepers]
        changes += 1
    assert changes <= 4


# --------------------------------------------------------------------------- one user beside another


async def _two_workflows(
    strategy: str, first: dict[str, Any], second: dict[str, Any], owners: tuple[str, str]
) -> list[Any]:
    """The second comes a little later, through the same peer; how both went."""
    world = World(Plan(11, peers=4, faults=(), strategy=strategy))
    for _ in range(4):
        world.add_host()
    await world._until(world._all_know_all, 60.0, "they never found each other")
    ids = []
    host = world.hosts[0]
    for document, owner in zip((first, second), owners, strict=True):
        text = json.dumps({"name": "w", "strategy": strategy, **document}).encode()
        done = host.do(host.enactment.gateway.submit(text, {}, owner, False), 20.0)
        ids.append(((await done)[0], host))
        await asyncio.sleep(12.0)
    found = []
    for id, host in ids:
        home = host.enactment.home
        await world._until(lambda home=home, id=id: home.remembered(id).over, 600.0, "no end")
        found.append(home.remembered(id))
    return found


@pytest.mark.parametrize("strategy", ["probe", "tickets", "chemical", "pilots"])
def test_what_has_a_deadline_goes_first_in_every_strategy(strategy: str) -> None:
    many = {"tasks": {"m": {"foreach": 400, "command": ["work", "5"]}}}
    few = {"deadline": "30s", "tasks": {"f": {"foreach": 4, "command": ["work", "5"]}}}
    long, short = run_out(_two_workflows(strategy, many, few, ("ada", "ada")))
    assert short.state == "succeeded"
    left_s = long.ended_at - short.submitted_at
    assert left_s > 20, "there was much to wait for"
    assert short.ended_at - short.submitted_at < left_s / 2


@pytest.mark.parametrize(
    "greedy",
    [
        {"rank": "1e15", "tasks": {"m": {"foreach": 200, "command": ["work", "5"]}}},
        {
            "rank": "",
            "tasks": {f"m{n}": {"command": ["work", "5"], "runtime": "1ms"} for n in range(200)},
        },
    ],
)
@pytest.mark.parametrize("strategy", ["probe", "tickets", "chemical", "pilots"])
def test_who_ranks_high_or_says_little_has_no_more_slots(
    strategy: str, greedy: dict[str, Any]
) -> None:
    honest = {"tasks": {"h": {"foreach": 80, "command": ["work", "5"]}}}
    theirs, ours = run_out(_two_workflows(strategy, greedy, honest, ("mallory", "bob")))
    until = min(theirs.ended_at, ours.ended_at)
    begun = ours.submitted_at + 10
    counts = [
        sum(
            a.outcome.started_at < until and a.outcome.started_at > begun
            for task in run.tasks.values()
            for a in task.attempts
            if a.outcome is not None
        )
        for run in (theirs, ours)
    ]
    share = counts[1] / sum(counts)
    assert share > 0.35, (share, counts)


# --------------------------------------------------------------------------- a majority is away


@pytest.mark.parametrize("after_s", [0.2, 2.0, 12.0])  # the first two: nobody knows it yet
@pytest.mark.parametrize("home_dies", [False, True])
def test_while_its_keepers_are_away_every_peer_says_so_within_two_seconds(
    home_dies: bool, after_s: float
) -> None:
    async def scenario() -> None:
        world = World(Plan(5, peers=6, faults=()))
        hosts = [world.add_host() for _ in range(6)]
        await world._until(world._all_know_all, 60.0, "they never found each other")
        home, loop = hosts[0], asyncio.get_running_loop()
        text = json.dumps({"name": "w", "tasks": {"t": {"command": ["work", "300"]}}}).encode()
        id, _ = await home.do(home.enactment.gateway.submit(text, {}, "me", False), 20.0)
        keepers = home.enactment.keeping.replicas[id].keepers
        others = [h for h in hosts if h.id in keepers and h is not home]
        for host in [home, others[0]] if home_dies else others:
            host.kill()
        await asyncio.sleep(after_s)
        for host in [h for h in hosts if h.life is not None]:
            for question in ("workflow", "cancel"):
                if question == "workflow" and after_s < 12.0 and not home_dies:
                    continue  # the home answers, and does not know either
                start = loop.time()
                try:
                    answer = host.enactment.gateway.ask("", id, question)
                    view = await host.do(answer, 30.0)
                    said = view["blocked"]
                    assert question == "workflow", "a cancel that can't count is not acknowledged"
                except ApiError as problem:
                    said = problem.detail
                    assert problem.status == 503
                assert re.search("2 of the 3 peers that keep its journal (are|do not)", said), said
                assert loop.time() - start < 2.0

    run_out(scenario())


@pytest.mark.parametrize("homes", [1, 3])
@pytest.mark.parametrize("strategy", ["probe", "tickets", "chemical", "pilots"])
def test_two_owners_share_the_slots_evenly_however_many_peers_one_asks(
    strategy: str, homes: int
) -> None:
    """Sampled from three seconds after the second one came, as in `make chaos` (fair)."""

    async def scenario() -> tuple[float, float]:
        world = World(Plan(11, peers=6, faults=(), strategy=strategy))
        hosts = [world.add_host() for _ in range(6)]
        await world._until(world._all_know_all, 60.0, "they never found each other")

        async def submit(host: Any, owner: str, count: int) -> None:
            tasks = {"m": {"foreach": count, "command": ["work", "3"]}}
            text = json.dumps({"name": "w", "strategy": strategy, "tasks": tasks}).encode()
            await host.do(host.enactment.gateway.submit(text, {}, owner, False), 20.0)

        for host in hosts[1 : 1 + homes]:
            await submit(host, "mallory", 600 // homes)
        await asyncio.sleep(2.0)
        await submit(hosts[0], "bob", 200)
        await asyncio.sleep(3.0)
        running: Counter[str] = Counter()
        for _ in range(30):
            await asyncio.sleep(0.5)
            for host in hosts:
                running.update(work.owner for work in host.enactment.executor.running())
        slots = sum(host.slots for host in hosts)
        return running["bob"] / running.total(), running.total() / 30 / slots

    share, used = run_out(scenario())
    assert 0.40 < share < 0.60
    assert used > 0.95, "and no slot is idle for it"


# --------------------------------------------------------------------------- turns at the door


def ask(owner: str, count: int, capacity: Capacity, **more: Any) -> Room:
    return Room(Needs(capacity), count, owner=owner, **more)


def test_nothing_is_kept_for_who_could_not_use_it() -> None:
    """One owner waited for a GPU, and 61 of 64 cores stood idle beside it."""
    door = Admission(Capacity(64_000, 2**40, gpus=1), Traits(), LAN)
    gpu = Capacity(1000, 0, gpus=1)
    assert len(door.reserve(b"a", ask("ada", 10, gpu), 0.0).leases) == 1
    assert len(door.reserve(b"b", ask("bob", 100, Capacity(1000)), 0.1).leases) == 63


def test_owners_who_are_refused_hold_equal_parts_and_large_units_get_a_place() -> None:
    door = Admission(Capacity(8000, 2**40), Traits(), LAN)
    one = Capacity(1000)
    first = door.reserve(b"a", ask("ada", 20, one), 0.0)
    assert len(first.leases) == 8
    assert door.reserve(b"b", ask("bob", 20, one), 0.1).leases == ()
    door.give_back(b"a", first.leases[:4])
    assert door.reserve(b"a", ask("ada", 20, one), 0.2).leases == ()
    assert door.passed_over
    assert door.take_wish(0.2) == b"b"
    assert len(door.reserve(b"b", ask("bob", 20, one), 0.25).leases) == 4
    held = door.reserve(b"c", ask("cy", 1, Capacity(8000), hold=True), 0.3)
    assert held.queued == 1, "it waits in the queue, whosever turn it is"
    door.sanity_check()


def test_a_claim_that_is_posted_again_keeps_its_owners_account() -> None:
    """Each post began the account anew, and the higher rank had all tickets."""
    market = Market(b"c" * 20, LAN, random.Random(1))
    needs, got = Needs(Capacity(1000)), Counter[bytes]()
    peer = Member(Contact(b"p" * 20, "127.0.0.1", 1), capacity=Capacity(1000, 2**34))
    for at in range(100):
        for home, owner, rank_s in ((b"a" * 20, "ada", 100.0), (b"b" * 20, "bob", 0.0)):
            if owner == "ada" or not at:
                claim = Claim(1, b"c" * 20, needs, 400, got[home], rank_s, owner=owner)
                market.post(home, claim, float(at))
        for row in market.ticket(peer, Ticket(Capacity(1000, 2**34)), at + 0.5):
            got[row.home] += row.count
    assert 40 <= got[b"a" * 20] <= 60


def test_an_output_is_the_tasks_own_also_if_a_link_takes_its_place(tmp_path: Path) -> None:
    """Between the look at it and the taking, something that the task left running may act."""
    (tmp_path / "task" / "out").mkdir(parents=True)
    (tmp_path / "task" / "out" / "f").write_text("mine")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "f").write_text("the peer's")
    attempt = LocalAttempt.__new__(LocalAttempt)
    attempt._place = str(tmp_path / "task")
    attempt._blobs = DiskBlobs(tmp_path / "blobs", 2**30, 2**30)
    assert attempt._checked("out/f") is None
    (tmp_path / "task" / "out").rename(tmp_path / "task" / "was")
    (tmp_path / "task" / "out").symlink_to(tmp_path / "secret")
    with pytest.raises(TaskFailed, match="not a directory"):
        attempt._take("out/f")
    (tmp_path / "task" / "out").unlink()
    (tmp_path / "task" / "was").rename(tmp_path / "task" / "out")
    assert attempt._take("out/f").read_text() == "mine"
    assert (tmp_path / "secret" / "f").exists()
    assert not (tmp_path / "task" / "out" / "f").exists(), "it is moved, not copied"
