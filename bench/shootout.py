"""`make shootout`: the same work with every strategy, simulated and live, in one table.

The works are the nine WfCommons instances (in `--instances DIR`), a fork-join of 500, a pool in
which one peer in ten suits the tasks, and a workflow that moves much data. Simulated: 20 peers of
two cores, the product's own code, tasks as timers, every file of 20,000 bytes. Live: ten peers of
two cores as processes, tasks scaled down. Messages of the strategies, of work and of files are
counted; messages of membership and of the overlay are not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chaos.processes import VALENCE, PeerProcesses, until
from sim.host import Host
from sim.loop import run_out
from sim.network import Network
from valence.display import Display
from valence.protocols.config import LAN
from valence.protocols.wire.messages import Capacity
from valence.workflow import wfformat
from valence.workflow.strategies import BUILT_IN

PEERS, SIM_PEERS = 10, 20
#: messages of membership and of the overlay, which are sent whether there is work or not
UPKEEP = {
    "Ping", "Ack", "PingFor", "PingedFor", "Sync", "Synced", "Exchange", "Rumours", "Wave", "Hello",
    "Welcome", "FindPeers", "FoundPeers", "Leave", "StoreRecords", "StoredRecords",
}  # fmt: skip
TIME_SCALE, SIZE_SCALE = 0.0005, 1e-7
INSTANCE_TASKS_MAX = 1500


def fork_join(command: Any) -> dict[str, Any]:
    tasks: dict[str, Any] = {"fork": {"command": command(0.01), "outputs": ["small.f"]}}
    for i in range(500):
        tasks[f"w{i}"] = {
            "command": command(0.1), "inputs": ["small.f"], "outputs": [f"small.{i}"],
        }  # fmt: skip
    outputs = [f"small.{i}" for i in range(500)]
    tasks["join"] = {"command": command(0.01), "inputs": outputs, "outputs": ["small.j"]}
    return {"name": "fork-join of 500", "tasks": tasks}


def scarce(command: Any) -> dict[str, Any]:
    needs = {"labels": ["rare"]}
    tasks = {f"w{i}": {"command": command(0.1), "needs": needs} for i in range(60)}
    return {"name": "one peer in ten suits", "tasks": tasks}


def heavy(command: Any, made: Any = None) -> dict[str, Any]:
    """Twenty files, each read by four tasks, whose own files are read in pairs by further tasks."""
    tasks: dict[str, Any] = {}
    for i in range(20):
        name = f"large.{i}"
        tasks[f"a{i}"] = {"command": made(name) if made else command(0.3), "outputs": [name]}
        for k in range(4):
            out = f"large.{i}.{k}"
            tasks[f"b{i}.{k}"] = {
                "command": made(out, name) if made else command(0.3),
                "inputs": [name], "outputs": [out],
            }  # fmt: skip
        for k in range(2):
            reads = [f"large.{i}.{k}", f"large.{i}.{k + 2}"]
            tasks[f"c{i}.{k}"] = {"command": command(0.1), "inputs": reads}
    return {"name": "much data", "tasks": tasks}


def instances(directory: Path | None) -> list[tuple[str, dict[str, Any]]]:
    named = []
    for path in sorted(directory.glob("*.json")) if directory else ():
        value = json.loads(path.read_text())
        if wfformat.is_instance(value):
            named.append((path.stem, value))
    return named


# --------------------------------------------------------------------------- simulated


def timed(seconds: float) -> list[str]:
    return ["work", f"{seconds:g}"]


def as_timers(value: dict[str, Any]) -> dict[str, Any]:
    """An instance's shape and times, with files of one size."""
    workflow = wfformat.parse(value, 0.01, 1e-9)
    tasks: dict[str, Any] = {}
    names = {name: f"large.{n}" for n, name in enumerate(workflow.producers)}
    for number, task in enumerate(workflow.tasks.values()):
        tasks[f"t{number}"] = {
            "command": timed(min(20.0, max(0.01, task.runtime_s or 0.1))),
            "inputs": [names[name] for name in task.inputs if name in names],
            "outputs": [names[name] for name in task.outputs],
        }
    return {"name": "instance", "tasks": tasks}


async def simulated(document: dict[str, Any], strategy: str) -> dict[str, float]:
    network = Network(3)
    hosts: list[Host] = []
    for index in range(SIM_PEERS):
        labels = ("rare",) if index % 10 == 3 else ()
        host = Host(network, index, LAN, Capacity(2000, 2**32), 0.0, labels=labels)
        hosts.append(host)
        host.start([other.peer.contact for other in hosts[:-1]][:3])
    await asyncio.sleep(30.0)
    assert all(host.peer.members.count == SIM_PEERS for host in hosts)

    def sent() -> tuple[int, int]:
        counts: Counter[str] = Counter()
        for host in hosts:
            counts.update(host.peer.rpc.counts.by_kind)
        return sum(n for kind, n in counts.items() if kind not in UPKEEP), sum(
            host.peer.rpc.counts.bytes_sent for host in hosts
        )

    before = sent()
    text = json.dumps({**document, "strategy": strategy}).encode()
    began = asyncio.get_running_loop().time()
    home = hosts[0].enactment
    workflow_id, _ = await home.gateway.submit(text, {}, "somebody", False)
    run = home.home.remembered(workflow_id)
    assert run is not None
    while not run.over:
        await asyncio.sleep(0.05)
        assert asyncio.get_running_loop().time() - began < 3600, dict(run.counts)
    took_s = (run.ended_at or 0.0) - run.submitted_at
    after = sent()
    assert run.state == "succeeded", run.reason
    count = len(run.tasks)
    read = sum(run.moved.values())
    return {
        "tasks": count,
        "seconds": took_s,
        "messages": (after[0] - before[0]) / count,
        "bytes": (after[1] - before[1]) / count,
        "local": run.moved["local"] / read if read else float("nan"),
    }


# --------------------------------------------------------------------------- live


def slept(seconds: float) -> list[str]:
    return ["sh", "-c", f"sleep {seconds:g}; for f in $OUT; do echo x > $f; done"]


def with_outputs(document: dict[str, Any]) -> dict[str, Any]:
    for task in document["tasks"].values():
        task["env"] = {"OUT": " ".join(task.get("outputs", ()))}
    return document


def filled(name: str, source: str = "") -> list[str]:
    """4 MiB, different for each file."""
    more = f"cat {source} | tail -c 4194000" if source else "head -c 4194000 /dev/urandom"
    return ["sh", "-c", f"({more}; head -c 304 /dev/urandom) > {name}"]


class Live:
    def __init__(self, home: Path) -> None:
        self.processes = PeerProcesses(home, PEERS - 1, "--cpus", "2")
        environment = {
            **self.processes.environment,
            "VALENCE_CLUSTER_KEY_FILE": str(home / "key"),
            "VALENCE_ROOT_TASKS": "yes",
            "VALENCE_SANDBOX": "off",
            "VALENCE_TOKEN_FILE": str(home / "token"),
        }
        first = self.processes.rows()[0]["address"]
        command = [*VALENCE, "peer", "--join", first, "--labels", "rare", "--cpus", "2", "--quiet"]
        command += ["--data", str(home / "peer-rare")]
        self.rare = subprocess.Popen(command, env=environment)
        self.client = self.processes.client(self.processes.rows()[0])
        until(lambda: len(self.client.peers()) == PEERS, 60)

    def sent(self) -> tuple[float, float]:
        messages = size = 0.0
        for row in self.processes.rows():
            for line in self.processes.client(row).metrics().splitlines():
                name, _, value = line.rpartition(" ")
                if name.startswith('valence_messages_total{kind="'):
                    kind = name.partition('"')[2].partition('"')[0]
                    messages += float(value) * (kind not in UPKEEP)
                elif name == 'valence_calls_total{kind="bytes_sent"}':
                    size += float(value)
        return messages, size

    def run(self, document: dict[str, Any], strategy: str, **scales: float) -> dict[str, float]:
        before = self.sent()
        began = time.perf_counter()
        workflow = self.client.submit(
            document,
            strategy=strategy,
            time_scale=scales.get("time_scale"),
            size_scale=scales.get("size_scale"),
        )
        state = workflow.wait()
        took_s = time.perf_counter() - began
        view = workflow.view()
        assert state == "succeeded", view
        after = self.sent()
        read = sum(view["bytes"].values())
        return {
            "tasks": view["tasks"],
            "seconds": took_s,
            "messages": (after[0] - before[0]) / view["tasks"],
            "bytes": (after[1] - before[1]) / view["tasks"],
            "local": view["bytes"]["local"] / read if read else float("nan"),
        }

    def close(self) -> None:
        self.rare.terminate()
        self.rare.wait(30)
        self.processes.close()


# --------------------------------------------------------------------------- all of it


def simulate(strategies: Iterable[str], directory: Path | None) -> list[dict[str, Any]]:
    works = [fork_join(timed), scarce(timed), heavy(timed)]
    for name, value in instances(directory):
        if len(value["workflow"].get("specification", {}).get("tasks", ())) <= INSTANCE_TASKS_MAX:
            works.append({**as_timers(value), "name": name})
    rows = []
    for work in works:
        for strategy in strategies:
            random.seed(1)
            result = run_out(simulated(work, strategy))
            rows.append(
                {"where": "simulated", "work": work["name"], "strategy": strategy, **result}
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def live(strategies: Iterable[str], directory: Path | None) -> list[dict[str, Any]]:
    """Each strategy has peers of its own, so that none profits from caches that another filled."""
    rows = []
    works: list[tuple[str, dict[str, Any], dict[str, float]]] = [
        ("fork-join of 500", with_outputs(fork_join(slept)), {}),
        ("one peer in ten suits", with_outputs(scarce(slept)), {}),
        ("much data", with_outputs(heavy(slept, filled)), {}),
    ]
    scales = {"time_scale": TIME_SCALE, "size_scale": SIZE_SCALE}
    works += [(name, value, scales) for name, value in instances(directory)]
    for strategy in strategies:
        with tempfile.TemporaryDirectory(prefix="valence-shootout-") as home:
            pool = Live(Path(home))
            try:
                pool.run(with_outputs(scarce(slept)), strategy)  # warm
                for name, document, scaled in works:
                    result = pool.run(document, strategy, **scaled)
                    rows.append({"where": "live", "work": name, "strategy": strategy, **result})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            finally:
                pool.close()
    order = [name for name, *_ in works]
    rows.sort(key=lambda row: order.index(str(row["work"])))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.shootout", description=__doc__)
    parser.add_argument("--strategies", default=",".join(BUILT_IN))
    parser.add_argument("--instances", default=os.environ.get("VALENCE_INSTANCES", ""))
    parser.add_argument("--only", choices=("simulated", "live"), default="")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    strategies = options.strategies.split(",")
    directory = Path(options.instances) if options.instances else None
    if directory is None:
        print(
            "the WfCommons instances are left out: name their directory with --instances DIR",
            file=sys.stderr,
        )
    rows = [] if options.only == "live" else simulate(strategies, directory)
    rows += [] if options.only == "simulated" else live(strategies, directory)
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    Display().table(
        ("", "WORK", "TASKS", "STRATEGY", "MAKESPAN", "MESSAGES", "BYTES A TASK", "LOCAL"),
        [
            (r["where"], r["work"][:40], str(r["tasks"]), r["strategy"], f"{r['seconds']:.2f} s",
             f"{r['messages']:.1f}", f"{r['bytes']:,.0f}",
             "" if r["local"] != r["local"] else f"{100 * r['local']:.0f} %")
            for r in rows
        ],
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
