"""`python -m bench.scarce`: many homes compete for few suitable peers, with each strategy in turn.

Only two of twenty peers have what the tasks need. Eight workflows are submitted at once, each
through a peer of its own: forks of four tasks of 0.1 s between single tasks. The result is the time
until the last of them has ended, best of `--runs` turns, and its ratio to the least possible.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from valence.client import Client

VALENCE = [sys.executable, "-m", "valence"]
PEERS, RARE, HOMES, FORKS, WIDTH, TASK_S = 18, 2, 8, 4, 4, 0.1


def document(strategy: str, number: int) -> dict[str, Any]:
    tasks: dict[str, Any] = {}
    above: list[str] = []
    for level in range(2 * FORKS + 1):
        names = [f"l{level}.{i}" for i in range(WIDTH if level % 2 else 1)]
        for name in names:
            tasks[name] = {
                "command": ["sleep", str(TASK_S)],
                "after": above,
                "needs": {"labels": ["rare"]},
            }
        above = names
    return {"name": f"scarce {number}", "strategy": strategy, "tasks": tasks}


def turn(clients: list[Client], strategy: str) -> float:
    start = time.perf_counter()
    workflows = [c.submit(document(strategy, n)) for n, c in enumerate(clients)]
    for workflow in workflows:
        assert workflow.wait() == "succeeded", workflow.view()
    return time.perf_counter() - start


def measure(strategies: list[str], runs: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="valence-scarce-") as home:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
        environment["VALENCE_HOME"] = home
        up = [*VALENCE, "up", "--peers", str(PEERS), "--cpus", "1", "--detach"]
        subprocess.run(up, env=environment, check=True, stdout=subprocess.DEVNULL)
        rare = []
        try:
            rows = [json.loads(path.read_text()) for path in Path(home).glob("peer-*/peer.json")]
            environment["VALENCE_CLUSTER_KEY_FILE"] = str(Path(home, "key"))
            environment |= {"VALENCE_ROOT_TASKS": "yes", "VALENCE_SANDBOX": "off"}
            environment["VALENCE_TOKEN_FILE"] = str(Path(home, "token"))
            token = Path(home, "token").read_text().strip()
            clients = [Client(row["http"], token) for row in rows[:HOMES]]
            first = clients[0].peers()[0]["address"]
            for n in range(RARE):
                command = [*VALENCE, "peer", "--join", first, "--labels", "rare", "--cpus", "1"]
                command += ["--data", str(Path(home, f"rare-{n}")), "--quiet"]
                rare.append(subprocess.Popen(command, env=environment))
            while len(clients[0].peers()) < PEERS + RARE:
                time.sleep(0.2)
            for strategy in strategies:
                turn(clients[:2], strategy)
            best: dict[str, float] = {}
            for _ in range(runs):
                for strategy in strategies:
                    took_s = turn(clients, strategy)
                    best[strategy] = min(best.get(strategy, took_s), took_s)
            return best
        finally:
            for process in rare:
                process.terminate()
            subprocess.run([*VALENCE, "down"], env=environment, stdout=subprocess.DEVNULL)
            for process in rare:
                process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scarce", description=__doc__)
    parser.add_argument("--strategies", default="probe,tickets")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    best = measure(options.strategies.split(","), options.runs)
    least_s = HOMES * (FORKS * WIDTH + FORKS + 1) * TASK_S / RARE
    if options.json:
        print(json.dumps({"seconds": best, "least_s": least_s}))
    else:
        for strategy, took_s in best.items():
            print(f"{strategy:10} {took_s:6.2f} s, {took_s / least_s:.2f} x the least possible")
    return 0


if __name__ == "__main__":
    sys.exit(main())
