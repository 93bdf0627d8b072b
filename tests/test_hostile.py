"""Strangers: documents, names, files and replies that mean it ill, and owners beside each other."""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from peer import nursery
from peer.attempt import Limits, _usage
from peer.blobs import is_plain, open_plain
from peer.policies import Policies
from peer.processes import Processes, read_reply
from peer.removal import remove_tree
from peer.tokens import PILOT, BadToken, PilotToken, Tokens, make
from peer.users import Users
from peer.work import read_document
from peer.worker import Imported, read_sources
from protocols.data.cache import Cache, QuotaFull
from protocols.keeping.lines import holds
from protocols.keeping.place import Where, risk, spread, too_close, would_part
from protocols.keeping.replica import begins_era, forced_epoch, in_era, next_epoch
from protocols.messages import AttemptKey, Capacity, Needs
from protocols.strategies.pilots.ranking import problem, ranking
from protocols.strategies.shares import Shares
from protocols.strategies.waiting import Waiting
from protocols.strategy import Unit
from valence.display import Display
from workflow import wfformat
from workflow.problems import DocumentError

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
    size, files = _usage(str(tmp_path), 2**40, 1000)
    assert files == 50
    assert size >= 500_000
    assert _usage(str(tmp_path), 2**40, 10)[1] == 11
    assert Limits().processes < 10_000


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


def processes(tmp_path: Path, **more: Any) -> Processes:
    channel, _ = nursery.start()
    return Processes(channel, tmp_path, **more)


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
    users = Users(2_000_000, 100_000)
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


def test_an_edited_module_is_noticed_and_its_source_is_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: what it changes about imports is for workers only."""
    code = f"""
import importlib, os, sys, time
sys.path[:0] = [{str(tmp_path)!r}, {os.getcwd()!r}]
from peer.worker import Imported, read_sources, resolve
path = {str(tmp_path / "edited.py")!r}
open(path, "w").write("def which(): return 1\\n")
import py_compile; py_compile.compile(path)   # as the user's own run leaves it
read_sources()
imported = Imported()
assert resolve("edited:which")() == 1
imported.note()
assert not imported.changed("w1") and not imported.changed("w1")
at = os.stat(path).st_mtime
open(path, "w").write("def which(): return 2\\n")   # the same length, perhaps the same second
os.utime(path, ns=(int(at * 1e9), int(at // 1 * 1e9) + 7))
assert imported.changed("w2"), "another workflow: looked at anew"
del sys.modules["edited"]; importlib.invalidate_caches()
assert resolve("edited:which")() == 2, "not what was compiled from the old one"
"""
    import subprocess
    import sys

    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert Imported
    assert read_sources


# --------------------------------------------------------------------------- owners beside each other

NEEDS = Needs(Capacity(millicores=1000))


def unit(owner: str, number: int, **more: Any) -> Unit:
    return Unit(AttemptKey(f"w{owner}", f"t{number}", 1), NEEDS, owner=owner, **more)


def test_owners_who_wait_take_turns_whoever_came_first() -> None:
    waiting = Waiting(lambda unit: 1.0, 10_000)
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


def test_of_one_owner_what_is_due_first_goes_first() -> None:
    waiting = Waiting(lambda unit: 1.0, 10_000)
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


# --------------------------------------------------------------------------- keepers


def test_keepers_are_on_machines_and_sites_of_their_own_where_there_are_such() -> None:
    me = Where(b"\1" * 20, "h1", "here")
    same = [Where(bytes([n]) * 20, "h1", "here") for n in (2, 3)]
    near = Where(b"\4" * 20, "h2", "here")
    far = Where(b"\5" * 20, "h3", "there")
    assert set(spread("w1", [me], [*same, near, far], 2, "kademlia")) == {near.id, far.id}
    assert len(spread("w1", [me], same, 2, "kademlia")) == 2, "where there are none"
    crowded = too_close(me.id, [me, *same])
    assert [w.id for w in crowded] == [w.id for w in same]
    assert would_part([me, *same], crowded, near)
    assert not would_part([me, *same], crowded, Where(b"\6" * 20, "h1", "there"))
    assert "all 3 keepers" in risk([me, *same])
    assert "stands still" in risk([me, same[0], far])
    assert "at one site" in risk([me, near, Where(b"\7" * 20, "h4", "here")])
    assert risk([me, near, far]) == ""


def test_of_two_lines_both_sides_choose_the_same() -> None:
    lines = [(over, era) for over in (False, True) for era in (0, 3, 7)]
    for a in lines:
        for b in lines:
            if a[1] != b[1]:
                assert holds(*a, *b) != holds(*b, *a)
    assert holds(True, 0, False, 7), "an agreed end holds against a home without a majority"
    assert holds(True, 0, True, 7)
    assert holds(False, 7, False, 0)


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
