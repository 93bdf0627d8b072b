"""`make bench`: tasks a second through a real local cluster, journal and security on.

`python -m bench [--peers N] [--json]`. These machines are noisy: the best of several runs counts,
and only ratios within one run mean much.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from valence.client import Client
from valence.display import Display

VALENCE = [sys.executable, "-m", "valence"]


def noops(count: int) -> dict[str, Any]:
    tasks = {"n": {"foreach": count, "call": "operator:add", "args": ["{item}", 1]}}
    return {"name": f"{count} no-op calls", "tasks": tasks}


def trues(count: int) -> dict[str, Any]:
    return {"name": f"{count} commands", "tasks": {"t": {"foreach": count, "command": ["true"]}}}


def layers(width: int, depth: int) -> dict[str, Any]:
    """Each task depends on two of the layer above."""
    tasks: dict[str, Any] = {}
    for level in range(depth):
        for i in range(width):
            above = [f"l{level - 1}.{i}", f"l{level - 1}.{(i + 1) % width}"] if level else []
            tasks[f"l{level}.{i}"] = {"call": "operator:add", "args": [1, 1], "after": above}
    return {"name": f"{width} x {depth} layers", "tasks": tasks}


def timed(client: Client, document: dict[str, Any]) -> float:
    start = time.monotonic()
    state = client.submit(document).wait()
    assert state == "succeeded", state
    return time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    works = [(1000, noops(1000)), (500, trues(500)), (500, layers(50, 10)), (1, noops(1))]
    rows = []
    with tempfile.TemporaryDirectory(prefix="valence-bench-") as home:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
        environment["VALENCE_HOME"] = home
        up = [*VALENCE, "up", "--peers", str(options.peers), "--detach"]
        subprocess.run(up, env=environment, check=True, stdout=subprocess.DEVNULL)
        os.environ["VALENCE_HOME"] = home
        try:
            client = Client()
            timed(client, noops(10))
            for count, document in works:
                best = min(timed(client, document) for _ in range(options.runs))
                rows.append({"work": document["name"], "seconds": best, "per_s": count / best})
        finally:
            down = [*VALENCE, "down"]
            subprocess.run(down, env=environment, check=True, stdout=subprocess.DEVNULL)
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        table = [(r["work"], f"{r['seconds']:.3f}", f"{r['per_s']:.0f}") for r in rows]
        Display().table(("WORK", "SECONDS", "TASKS/S"), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
