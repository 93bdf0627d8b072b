"""Two owners on one cluster: their shares of its slots, and the code and workers of their calls."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import Any

from valence.client import FINAL, Client, Problem, WorkflowHandle
from valence.workflow.strategies import BUILT_IN

from .processes import PeerProcesses, open_directory, until
from .queues import Queue

TASKS, TASK_S, LATER_S, SETTLING_S = 400, 0.3, 2.0, 3.0
PEERS, CPUS = 4, 2
SHARE_PERCENT = (45.0, 55.0)
CALLS, CALL_S = (500, 500, 1000), 0.002  # calls of each version of the code
SAVED_AT_S = 1_700_000_000  # edits within one second: just after this
LIMIT_S = 120.0


def as_owner(cluster: PeerProcesses, name: str, url: str) -> Client:
    """A client that can submit workflows, and sees only its own."""
    return Client(url, cluster.owner(name))


def fair(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Two owners, the second 2 s later: its share of slot time, by each strategy and by a queue."""
    shares: dict[str, tuple[float, float]] = {}
    with contextlib.closing(PeerProcesses(home / "peers", PEERS, "--cpus", str(CPUS))) as cluster:
        urls = [row["http"] for row in cluster.rows()]
        first = as_owner(cluster, "ada", urls[0])
        for strategy in BUILT_IN:
            for through, url in (("one_peer", urls[0]), ("two_peers", urls[2])):
                second = as_owner(cluster, "bob", url)
                shares[f"{strategy}_{through}"] = _share(first, second, strategy)
    shares["queue"] = _share_of_queue(home)
    least, most = SHARE_PERCENT
    return {
        "right": all(least <= percent <= most for percent, _ in shares.values()),
        **{f"{name}_percent": percent for name, (percent, _) in shares.items()},
        "least_slots_busy_percent": min(busy for _, busy in shares.values()),
    }


def _share_of_queue(home: Path) -> tuple[float, float]:
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(contextlib.closing(Queue(home / "queue")))
        site = PeerProcesses(home / "site", PEERS, "--cpus", str(CPUS), VALENCE_QUEUE=service.url)
        stack.callback(site.close)
        service.start(site.token)
        until(lambda: len(service.client().peers()) == PEERS, 30)
        first, second = (as_owner(site, name, service.url) for name in ("ada", "bob"))
        return _share(first, second, "pilots")


def _share(first: Client, second: Client, strategy: str) -> tuple[float, float]:
    """The second's percentage of the used slot time, and the used percentage of all slot time."""
    tasks = {"nap": {"foreach": TASKS, "command": ["sleep", f"{TASK_S:g}"]}}
    document = {"name": "naps", "strategy": strategy, "tasks": tasks}
    earlier = first.submit(document)
    time.sleep(LATER_S)
    start = time.time() + SETTLING_S
    later = second.submit(document)
    both = (earlier, later)
    with contextlib.suppress(TimeoutError):
        until(lambda: any(_ended(workflow) for workflow in both), LIMIT_S)
    time.sleep(3 * TASK_S)  # until attempts that began within the window are reported
    ends = [at for workflow in both if (at := workflow.view()["ended_at"])]
    # at its end a workflow has fewer tasks left than the slots it could use
    end = min(ends, default=start) - TASK_S
    for workflow in both:
        with contextlib.suppress(Problem):  # it has ended
            workflow.cancel()
    until(lambda: all(_ended(workflow) for workflow in both), LIMIT_S)
    used_s = [_used_s(workflow, start, end) for workflow in both]
    there_s = PEERS * CPUS * max(TASK_S, end - start)
    return 100 * used_s[1] / max(TASK_S, sum(used_s)), 100 * sum(used_s) / there_s


def _ended(workflow: WorkflowHandle) -> bool:
    return workflow.view()["state"] in FINAL


def _used_s(workflow: WorkflowHandle, start: float, end: float) -> float:
    """The slot time of its attempts between two moments."""
    used_s = 0.0
    for row in workflow.tasks():
        for attempt in workflow.task(row["id"])["history"] if row["attempts"] else ():
            began, ended = attempt["started_at"], attempt["ended_at"]
            if began and ended:
                used_s += max(0.0, min(ended, end) - max(began, start))
    return used_s


def edited(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Code is edited between submissions: calls run the new code; no worker serves two owners."""
    code = open_directory(home / "code")
    path = os.pathsep.join(filter(None, (str(code), os.environ.get("PYTHONPATH"))))
    new: dict[str, int] = {}
    workers: dict[str, set[int]] = {"ada": set(), "bob": set()}
    cluster = PeerProcesses(
        home / "peers", PEERS, "--cpus", str(CPUS), PYTHONPATH=path,
        PYTHONDONTWRITEBYTECODE="",  # compiled files are written, as on a user's machine
    )  # fmt: skip
    with contextlib.closing(cluster):
        url = cluster.rows()[0]["http"]
        clients = {name: as_owner(cluster, name, url) for name in workers}
        for edit in ("module", "imported", "same_second"):
            for version, calls in enumerate(CALLS, 1):
                _edit(code, edit, version)
                tasks = {"c": {"foreach": calls, "call": f"{edit}:f", "args": ["{item}"]}}
                document = {"name": f"{edit} {version}", "tasks": tasks}
                both = {name: client.submit(document) for name, client in clients.items()}
                until(lambda: all(map(_ended, both.values())), LIMIT_S)  # noqa: B023
                values = {name: list(it.values().values()) for name, it in both.items()}
                new[edit] = sum(ran == version for v in values.values() for ran, _ in v)
                for name in workers:
                    workers[name] |= {pid for _, pid in values[name]}
    shared = workers["ada"] & workers["bob"]
    calls = len(workers) * CALLS[-1]
    return {
        "right": set(new.values()) == {calls} and not shared,
        "calls": calls,
        **{f"{edit}_new": count for edit, count in new.items()},
        "workers": sum(map(len, workers.values())),
        "workers_shared": len(shared),
    }


def _edit(code: Path, edit: str, version: int) -> None:
    """Saves this version of a module, or of the one that it imports, as an editor does."""
    own, other = (0, version) if edit == "imported" else (version, 0)
    text = f"import os, time\nimport its_{edit}\n\nVERSION = {own}\n\n\ndef f(item):\n"
    text += f"    time.sleep({CALL_S:g})\n    return [VERSION + its_{edit}.VERSION, os.getpid()]\n"
    for name, content in ((f"its_{edit}", f"VERSION = {other}\n"), (edit, text)):
        path, part = code / f"{name}.py", code / f"{name}.part"
        if path.exists() and path.read_text() == content:
            continue
        part.write_text(content)
        part.chmod(0o644)
        if edit == "same_second":  # besides the size, all that a compiled file knows of its source
            at_ns = SAVED_AT_S * 10**9 + version * 10**8
            os.utime(part, ns=(at_ns, at_ns))
        part.replace(path)
