"""The cost of losing peers, a whole cluster or the task queue midway, and the tasks that run twice.

Tasks write to files when they begin and end: a journal tells which results counted, but not how
often a task ran.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valence.client import FINAL, Client

from .processes import PeerProcesses, open_directory, until
from .queues import Queue

PAIRS, TASK_S, FILE_BYTES, PEERS = 150, 0.2, 300_000, 8
KILLED_AFTER_S, DOWN_AFTER_S, DOWN_S = 2.0, 3.5, 1.0
RATIO_MAX = 1.5
PARTS, PART_S, PART_BYTES, SITE_PEERS = 80, 0.5, 100_000, 4
QUEUE_KILLED_AT, QUEUE_DOWN_S = 0.4, 2.0  # killed when this fraction of the parts is made
LIMIT_S = 120.0


class Marks:
    """Files to which tasks write when they begin and when they end."""

    def __init__(self, path: Path) -> None:
        self._path = open_directory(path)

    def around(self, name: str, command: str) -> str:
        mark = self._path / name
        return f"echo began >> {mark}; {command}; echo ended >> {mark}"

    def began(self, prefix: str = "") -> Counter[str]:
        return self._count("began", prefix)

    def running(self) -> int:
        return (self._count("began") - self._count("ended")).total()

    def twice(self) -> int:
        return sum(times > 1 for times in self.began().values())

    def _count(self, word: str, prefix: str = "") -> Counter[str]:
        paths = self._path.glob(f"{prefix}*")
        return Counter({path.name: path.read_text().count(word) for path in paths})


def _made(size_bytes: int) -> str:
    """A file for each item, with content of its own: equal files would be one blob."""
    return f"(printf %06d {{item}}; head -c {size_bytes - 6} /dev/zero) > f.{{item}}"


@dataclass(frozen=True, slots=True)
class LossRun:
    """The outcome of one run; `running` is the number of tasks at work when the loss happened."""

    state: str
    took_s: float
    twice: int
    running: int


def deaths(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """150 makers and their readers on 8 peers: the home dies, three die, all stop briefly."""
    calm = _pairs(home, "calm", 0.0, lambda cluster, view: None)
    one = _pairs(home, "home", KILLED_AFTER_S, lambda cluster, view: _kill(cluster, view, 0))
    three = _pairs(home, "three", KILLED_AFTER_S, lambda cluster, view: _kill(cluster, view, 2))
    again = _pairs(home, "again", DOWN_AFTER_S, _down_and_up)
    home_ratio, three_ratio = _ratio(one, calm, 1), _ratio(three, calm, 3)
    succeeded = sum(run.state == "succeeded" for run in (calm, one, three, again))
    right = max(home_ratio, three_ratio) <= RATIO_MAX and again.twice <= again.running
    return {
        "right": right and succeeded == 4,
        "runs_succeeded": succeeded,
        "calm_s": calm.took_s,
        "home_s": one.took_s,
        "home_ratio": home_ratio,
        "home_twice": one.twice,
        "three_s": three.took_s,
        "three_ratio": three_ratio,
        "three_twice": three.twice,
        "down_up_s": again.took_s,
        "down_up_running": again.running,
        "down_up_twice": again.twice,
    }


def _ratio(run: LossRun, calm: LossRun, dead: int) -> float:
    """Its time, divided by the time that the remaining slots need at the pace of the calm run."""
    needed_s = KILLED_AFTER_S + (calm.took_s - KILLED_AFTER_S) * PEERS / (PEERS - dead)
    return run.took_s / needed_s


def _pairs(
    home: Path, name: str, after_s: float, strike: Callable[[PeerProcesses, dict[str, Any]], None]
) -> LossRun:
    marks = Marks(home / f"{name}-marks")
    make = f"sleep {TASK_S:g}; {_made(FILE_BYTES)}"
    read = f"sleep {TASK_S:g}; wc -c < f.{{item}} > r.{{item}}"
    files, sizes = ["f.{item}"], ["r.{item}"]
    makers = {"foreach": PAIRS, "command": marks.around("m.{item}", make), "outputs": files}
    readers = {"foreach": PAIRS, "command": marks.around("r.{item}", read), "outputs": sizes}
    tasks = {"m": makers, "r": {**readers, "inputs": files}}
    with contextlib.closing(PeerProcesses(home / name, PEERS, "--cpus", "1")) as cluster:
        began_at = time.time()
        client = cluster.client(cluster.rows()[0])
        workflow_id = client.submit({"name": name, "tasks": tasks}).id
        time.sleep(after_s)
        view = client.request("GET", f"/v1/workflows/{workflow_id}")
        running = marks.running()
        strike(cluster, view)
        state, ended_at = _end(cluster.anyone, workflow_id)
    return LossRun(state, ended_at - began_at, marks.twice(), running)


def _kill(cluster: PeerProcesses, view: dict[str, Any], others: int) -> None:
    """Kills the home for good, and this many peers that keep no journal."""
    keeping = {view["home"], *view["keepers"]}
    without = [row["id"] for row in cluster.rows() if row["id"] not in keeping]
    for peer_id in (view["home"], *without[:others]):
        cluster.kill(peer_id)
        cluster.gone.add(peer_id)


def _down_and_up(cluster: PeerProcesses, view: dict[str, Any]) -> None:
    """Stops all peers, and restarts them on the same data."""
    cluster.close()
    time.sleep(DOWN_S)
    cluster.start()


def _end(someone: Callable[[], Client], workflow_id: str) -> tuple[str, float]:
    """A workflow's final state, and when it ended."""

    def ended() -> dict[str, Any] | None:
        view: dict[str, Any] = someone().request("GET", f"/v1/workflows/{workflow_id}")
        return view if view["state"] in FINAL else None

    try:
        view = until(ended, LIMIT_S)
    except TimeoutError:
        return "unfinished", time.time()
    return str(view["state"]), float(view["ended_at"])


def sites(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Two clusters on one queue make 80 files and merge them; the queue is killed in between."""
    results: dict[str, Any] = {"right": True}
    for name in ("pinned", "spread"):
        state, total, took_s, began = _merge(home, name)
        each_once = len(began) == PARTS and set(began.values()) == {1}
        whole = state == "succeeded" and total == PARTS * PART_BYTES
        results["right"] = results["right"] and whole and each_once
        results[f"{name}_state"] = state
        results[f"{name}_s"] = took_s
        results[f"{name}_bytes"] = total
        results[f"{name}_parts_begun"] = began.total()
        results[f"{name}_parts_twice"] = sum(times > 1 for times in began.values())
    return results


def _merge(home: Path, name: str) -> tuple[str, int, float, Counter[str]]:
    """The final state, the merged size, the time it took, and how often each part was begun."""
    marks = Marks(home / f"{name}-marks")
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(contextlib.closing(Queue(home / f"{name}-queue")))
        token = secrets.token_urlsafe(32)
        for site in "ab":
            place = home / f"{name}-{site}"
            place.mkdir(mode=0o700)
            (place / "token").write_text(token)
            words = ("--cpus", "1", "--site", site)
            cluster = PeerProcesses(place, SITE_PEERS, *words, VALENCE_QUEUE=service.url)
            stack.callback(cluster.close)
        service.start(token)
        until(lambda: len(service.client().peers()) == 2 * SITE_PEERS, 30)
        began_at = time.time()
        workflow = service.client().submit(_merging(marks, name == "pinned"))
        enough = QUEUE_KILLED_AT * PARTS
        until(lambda: workflow.view()["counts"].get("succeeded", 0) >= enough, LIMIT_S)
        service.kill()
        time.sleep(QUEUE_DOWN_S)
        service.start(token)
        state, ended_at = _end(service.client, workflow.id)
        total = b"0"
        if state == "succeeded":
            total = service.client().workflow(workflow.id).read("total")
    return state, int(total), ended_at - began_at, marks.began("p.")


def _merging(marks: Marks, pinned: bool) -> dict[str, Any]:
    make = f"sleep {PART_S:g}; {_made(PART_BYTES)}"
    part = {"command": marks.around("p.{item}", make), "outputs": ["f.{item}"]}
    items = list(range(PARTS))
    tasks: dict[str, Any] = {"p": {**part, "foreach": items}}
    if pinned:
        tasks = {
            f"p{site}": {**part, "foreach": items[first::2], "needs": {"site": site}}
            for first, site in enumerate("ab")
        }
    merge = {"command": "cat f.* | wc -c > total", "inputs": ["f.*"], "outputs": ["total"]}
    return {"name": "merge", "strategy": "pilots", "tasks": {**tasks, "merge": merge}}
