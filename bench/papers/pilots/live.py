"""The experiments of seed 003 with real pilots: processes on this machine.

They form two clusters that share nothing but a task queue, and run real commands on real files.
Tasks take 5 to 15 s instead of minutes. Delays are measured between two tasks of a pilot, by its
own clock: they include outcome, queue, list, bids, assignment, lease, inputs and the process's
start.
"""

from __future__ import annotations

import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from chaos.processes import PeerProcesses, until
from chaos.queues import Queue
from valence.client import WorkflowHandle

from .field import SITES, document

TASK_S = 10.0
TASKS_A_PILOT = 3


def commands(kind: str, tasks: int) -> dict[str, Any]:
    """The experiment's document, with commands that can be run."""
    made = document(kind, tasks)
    rng = random.Random(kind)
    for task in made["tasks"].values():
        (output,) = task["outputs"]
        reads = f"cat {' '.join(task['inputs'])} > /dev/null; " if "inputs" in task else ""
        seconds = TASK_S * rng.uniform(0.5, 1.5)
        size = 20_000 if output.startswith("large") else 40
        fill = f"head -c {size} /dev/urandom > {output}"
        task["command"] = ["sh", "-c", f"{reads}sleep {seconds:.2f}; {fill}"]
    return made


def delays_of(workflow: WorkflowHandle) -> list[float]:
    """The delays between two tasks of a pilot."""
    by_pilot: dict[str, list[tuple[float, float]]] = {}
    for row in workflow.tasks():
        attempt = workflow.task(row["id"])["history"][-1]
        times = (attempt["started_at"], attempt["ended_at"])
        by_pilot.setdefault(attempt["peer"], []).append(times)
    delays = []
    for spans in by_pilot.values():
        spans.sort()
        delays += [b[0] - a[1] for a, b in pairwise(spans)]
    return delays


def live(pilots: int, kinds: list[str]) -> list[dict[str, Any]]:
    tasks = TASKS_A_PILOT * pilots
    rows = []
    with tempfile.TemporaryDirectory(prefix="valence-pilots-") as place:
        queue = Queue(Path(place) / "queue")
        token = secrets.token_urlsafe(24)
        sites: list[PeerProcesses] = []
        try:
            queue.start(token)
            for number, site in enumerate(SITES):
                home = Path(place) / site
                home.mkdir()
                (home / "token").write_text(token)
                (home / "token").chmod(0o600)
                count = (pilots + number) // len(SITES)
                more = ("--cpus", "1", "--site", site)
                sites.append(PeerProcesses(home, count, *more, VALENCE_QUEUE=queue.url))
                print(f"{count} pilots of site {site} are up", file=sys.stderr, flush=True)
            until(lambda: len(queue.client().peers()) == pilots, 60)
            for kind in kinds:
                rows.append(
                    {"pilots": pilots, "tasks": tasks, "kind": kind, **_run(queue, kind, tasks)}
                )
                print(f"{kind} is done", file=sys.stderr, flush=True)
        finally:
            queue.close()
            for cluster in sites:
                cluster.close()
    return rows


def _run(queue: Queue, kind: str, tasks: int) -> dict[str, Any]:
    before = Counter(queue.shown()["counts"])
    began = time.monotonic()
    workflow = queue.client().submit(commands(kind, tasks))
    state = workflow.wait()
    took_s = time.monotonic() - began
    view = workflow.view()
    if state != "succeeded":
        raise RuntimeError(f"{kind}: {state}: {view.get('reason')}")
    delays = delays_of(workflow)
    read = view["bytes"]
    total = max(1, sum(read.values()))
    return {
        "requests": (queue.shown()["counts"]["requests"] - before["requests"]) / tasks,
        "delay_s": median(delays),
        "hits": (read["local"] + read["peer"]) / total,
        "local": read["local"] / total,
        "turnaround_s": took_s,
    }
