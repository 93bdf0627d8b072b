"""`python -m bench.least`: does a task go to the peer that is least loaded at that moment?

Live peers have four cores each. Tasks arrive at random times at random peers, alone or three
together, so that half of all cores are in use. Afterwards the records of all placements tell where
each task went, how long the search took, and from when to when the task was there: and so how
loaded every peer was when the task was placed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from valence.client import Client

VALENCE = [sys.executable, "-m", "valence"]
CPUS, RATE, USED = 4, 12.0, 0.5
BEGIN_S = 5.0  # until half of all cores are in use, nothing is counted


class Stay(NamedTuple):
    """A task's time at one peer."""

    peer: str
    workflow: str
    asked_at: float
    placed_at: float
    ended_at: float
    why: str


def stays(workflow: str, view: dict[str, Any]) -> list[Stay]:
    listed = []
    for attempt in view["history"]:
        placement = attempt["placement"]
        asked_at = attempt["placed_at"] - placement.get("sought_s", 0.0)
        listed.append(
            Stay(attempt["peer"], workflow, asked_at, attempt["placed_at"],
                 attempt["ended_at"], placement["why"])
        )  # fmt: skip
    return listed


def above_least(stay: Stay, all_stays: list[Stay], peers: list[str]) -> int:
    """Tasks at its peer when it was placed, minus those at the peer that had fewest. Tasks of its
    own workflow were placed together with it, and count where they went."""
    at: Counter[str] = Counter()
    for other in all_stays:
        if other is stay:
            continue
        fellow = other.workflow == stay.workflow
        if fellow or other.placed_at <= stay.asked_at < other.ended_at:
            at[other.peer] += 1
    return at[stay.peer] - min(at[peer] for peer in peers)


def measure(count: int, strategy: str, tasks: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    mean_s = USED * count * CPUS / RATE
    with tempfile.TemporaryDirectory(prefix="valence-least-") as home:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
        environment["VALENCE_HOME"] = home
        up = [*VALENCE, "up", "--peers", str(count), "--cpus", str(CPUS), "--detach"]
        subprocess.run(up, env=environment, check=True, stdout=subprocess.DEVNULL)
        try:
            rows = [json.loads(path.read_text()) for path in Path(home).glob("peer-*/peer.json")]
            token = Path(home, "token").read_text().strip()
            clients = [Client(row["http"], token) for row in rows]
            while len(names := [peer["id"] for peer in clients[0].peers()]) < count:
                time.sleep(0.2)
            sent = []
            first = next_at = time.time()
            submitted = 0
            while submitted < tasks:
                width = rng.choice((1, 1, 3))
                next_at += rng.expovariate(RATE / width)
                time.sleep(max(0.0, next_at - time.time()))
                body = {
                    f"t{n}": {"command": ["sleep", f"{rng.uniform(0.5, 1.5) * mean_s:.3f}"]}
                    for n in range(width)
                }
                document = {"name": "least", "strategy": strategy, "tasks": body}
                sent.append((rng.choice(clients).submit(document), width))
                submitted += width
            placed: list[Stay] = []
            for workflow, width in sent:
                assert workflow.wait() == "succeeded", workflow.view()
                for n in range(width):
                    placed += stays(workflow.id, workflow.task(f"t{n}"))
        finally:
            subprocess.run([*VALENCE, "down"], env=environment, stdout=subprocess.DEVNULL)
    begin = first + max(BEGIN_S, 1.5 * mean_s)
    counted = [stay for stay in placed if stay.asked_at > begin]
    over = Counter(above_least(stay, placed, names) for stay in counted)
    sought = sorted(stay.placed_at - stay.asked_at for stay in counted)
    return {
        "peers": count,
        "placements": len(counted),
        "least_loaded": over[0] / len(counted) if counted else None,
        "above": {str(k): over[k] for k in sorted(over)},
        "sought_ms": round(1000 * sought[len(sought) // 2], 2) if sought else None,
        "how": dict(Counter(stay.why for stay in counted).most_common(8)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.least", description=__doc__)
    parser.add_argument("--peers", default="8,100")
    parser.add_argument("--strategy", default="chemical")
    parser.add_argument("--tasks", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for count in map(int, options.peers.split(",")):
        row = measure(count, options.strategy, options.tasks, options.seed)
        if options.json:
            print(json.dumps(row))
            continue
        print(
            f"{row['peers']} peers, {row['placements']} placements: "
            f"{row['least_loaded']:.1%} at the least loaded; found within {row['sought_ms']} ms"
        )
        print(f"  tasks more than at the least loaded: {row['above']}")
        print(f"  {row['how']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
