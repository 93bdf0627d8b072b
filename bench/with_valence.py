"""Runs the works on Valence: one peer per slot, journal and security on, used over HTTP.

The cost of a task comes from the peers' own metrics, before and after each work.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from works import COMMANDS, DEPTH, NOOPS, TRUE, WIDTH, latency, parents, say, timed

from valence.client import Client

VALENCE = [sys.executable, "-m", "valence"]
STRATEGY = "auto"


def noops(count: int) -> dict[str, Any]:
    tasks = {"n": {"foreach": count, "call": "operator:pos", "args": ["{item}"]}}
    return {"name": f"{count} no-op calls", "tasks": tasks}


def commands(count: int) -> dict[str, Any]:
    return {"name": f"{count} commands", "tasks": {"t": {"foreach": count, "command": [TRUE]}}}


def layers() -> dict[str, Any]:
    """Each task takes the values of two tasks of the layer above."""
    tasks: dict[str, Any] = {}
    for level in range(DEPTH):
        for i in range(WIDTH):
            above: list[Any] = [{"result": f"l{level - 1}.{p}"} for p in parents(i)]
            tasks[f"l{level}.{i}"] = {"call": "operator:or_", "args": above if level else [i, i]}
    return {"name": f"{WIDTH} x {DEPTH} layers", "tasks": tasks}


def counted(urls: list[str]) -> Counter[str]:
    """The totals of all peers: messages and bytes between them, syncs, wake-ups."""
    counts: Counter[str] = Counter()
    for url in urls:
        for line in Client(url, os.environ["VALENCE_TOKEN"]).metrics().splitlines():
            name, _, value = line.rpartition(" ")
            if name == 'valence_disk_total{kind="syncs"}':
                counts["syncs"] += float(value)
            elif name.startswith("valence_messages_total{"):
                counts["messages"] += float(value)
            elif name == 'valence_calls_total{kind="bytes_sent"}':
                counts["bytes"] += float(value)
            elif name == 'valence_process_total{kind="wakeups"}':
                counts["wakeups"] += float(value)
            elif name == 'valence_process_total{kind="cpu_seconds"}':
                counts["cpu_us"] += 1e6 * float(value)
    return counts


def pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def do(client: Client, urls: list[str], work: str, count: int, document: dict[str, Any]) -> None:
    before = counted(urls)
    values: dict[str, Any] = {}

    def run() -> None:
        workflow = client.submit({**document, "strategy": STRATEGY})
        assert workflow.wait() == "succeeded", workflow.view()
        if work != "commands":
            values.update(workflow.values())

    timed(work, count, run)
    if work == "noops":
        assert values == {f"n[{i}]": i for i in range(count)}
    elif work == "layers":
        assert len(values) == WIDTH, len(values)
    after = counted(urls)
    say(work, **{name: (after[name] - before[name]) / count for name in after})


def main(slots: int, long: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="valence-bench-") as home:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
        environment["VALENCE_HOME"] = home
        up = [*VALENCE, "up", "--peers", str(slots), "--cpus", "1", "--detach"]
        subprocess.run(up, env=environment, check=True, stdout=subprocess.DEVNULL)
        try:
            os.environ["VALENCE_TOKEN"] = Path(home, "token").read_text().strip()
            os.environ["VALENCE_HOME"] = home
            client = Client()
            while len(client.peers()) < slots:
                time.sleep(0.1)
            peers = client.peers()
            urls = [peer["http"] for peer in peers]
            client.submit(noops(200)).wait()
            if long:
                grow(client, next(p["pid"] for p in peers if p["me"]))
                return
            do(client, urls, "noops", NOOPS, noops(NOOPS))
            time.sleep(1.0)
            do(client, urls, "layers", WIDTH * DEPTH, layers())
            time.sleep(1.0)
            do(client, urls, "commands", COMMANDS, commands(COMMANDS))
            time.sleep(1.0)
            one = {**noops(1), "strategy": STRATEGY}

            def single() -> None:
                assert client.submit(one, wait_s=10).view()["values"] == {"n[0]": 0}

            latency("latency", single)
        finally:
            down = [*VALENCE, "down"]
            subprocess.run(down, env=environment, check=True, stdout=subprocess.DEVNULL)


def grow(client: Client, pid: int) -> None:
    """Ten times the work: how much longer it takes, and how much memory a finished task keeps."""

    def run(count: int) -> float:
        start = time.perf_counter()
        workflow = client.submit(noops(count))
        assert workflow.wait() == "succeeded", workflow.view()
        return time.perf_counter() - start

    small, large, held = [], [], 0.0
    for turn in range(3):
        small.append(run(NOOPS))
        before = pss_bytes(pid)
        large.append(run(10 * NOOPS))
        if turn == 0:  # later tasks reuse memory that the first ones have freed
            held = (pss_bytes(pid) - before) / (10 * NOOPS)
    report(min(small), min(large), held)


def report(small: float, large: float, held: float) -> None:
    say("growth", small_s=small, large_s=large, times=large / small, bytes_per_task=held)


if __name__ == "__main__":
    if "--strategy" in sys.argv:
        STRATEGY = sys.argv[sys.argv.index("--strategy") + 1]
    main(int(sys.argv[1]), "--long" in sys.argv)
