"""`make chaos`: real peers as processes and as hosts, killed, stopped and cut off.

`python -m chaos [SCENARIO …] [--json] [--seed N] [--times N] [--only ATTACK,…]` runs all scenarios
if none is named.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from valence.display import Display

from . import losses, owners, promises, queues, strangers
from .hosts import Hosts
from .processes import PeerProcesses, until

TASKS, TASK_S = 1000, 0.2


def work(count: int, seconds: float) -> dict[str, Any]:
    """Tasks that sleep and write a number, and one that adds up the numbers."""
    return {
        "name": f"{count} tasks",
        "tasks": {
            "w": {
                "foreach": count,
                "command": f"sleep {seconds:g}; echo {{item}} > o.{{item}}",
                "outputs": ["o.{item}"],
            },
            "total": {
                "command": "cat o.* | awk '{s+=$1} END {print s}' > total",
                "inputs": ["o.*"],
                "outputs": ["total"],
            },
        },
    }


def checked(cluster: PeerProcesses, workflow: Any, count: int) -> dict[str, Any]:
    right = workflow.read("total").decode().strip() == str(sum(range(count)))
    return {"right": right, "each_once": _each_once(cluster, workflow.id, count)}


def kills(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """20 peers, 1,000 tasks, a SIGKILL every 2 s, first of the accepting peer; six never return."""
    rng = random.Random(options.seed)
    cluster = PeerProcesses(home, 20)
    try:
        start = time.monotonic()
        calm = cluster.client(cluster.rows()[0]).submit(work(TASKS, TASK_S))
        assert calm.wait() == "succeeded"
        calm_s = time.monotonic() - start
        accepting = cluster.rows()[1]
        start = time.monotonic()
        workflow = cluster.client(accepting).submit(work(TASKS, TASK_S))
        killed = 0
        again: list[tuple[float, str]] = []
        victim: str | None = accepting["id"]
        state = ""
        while state not in ("succeeded", "failed", "cancelled"):
            if victim is not None:
                cluster.kill(victim)
                killed += 1
                if len(cluster.gone) < 6:
                    cluster.gone.add(victim)
                else:
                    again.append((time.monotonic() + 1.0, victim))
            after = time.monotonic() + 2.0
            while time.monotonic() < after and state not in ("succeeded", "failed"):
                for at, peer_id in [row for row in again if row[0] <= time.monotonic()]:
                    again.remove((at, peer_id))
                    cluster.restart(peer_id)
                time.sleep(0.1)
                state = _state(cluster, workflow.id)
            there = [row["id"] for row in cluster.up()]
            victim = rng.choice(there) if there else None
            if time.monotonic() - start > 300:
                break
        took_s = time.monotonic() - start
        seen = cluster.anyone().workflow(workflow.id)
        events = list(seen.events())
        moves = [e for e in events if e["type"] == "home"]
        done = [e["at"] for e in events if e.get("state") == "succeeded"]
        first = events[0]["at"]
        per_s = [
            sum(first + s <= at < first + s + 1 for at in done) for s in range(int(took_s) + 1)
        ]
        checks = checked(cluster, seen, TASKS) if state == "succeeded" else {"right": False}
        return {
            "state": state,
            **checks,
            "kills": killed,
            "never_back": len(cluster.gone),
            "homes": [round(e["at"] - first, 1) for e in moves],
            "commits_each_second": per_s,
            "calm_s": calm_s,
            "took_s": took_s,
            "times": took_s / calm_s,
        }
    finally:
        cluster.close()


def _state(cluster: PeerProcesses, workflow_id: str) -> str:
    try:
        return str(cluster.anyone().request("GET", f"/v1/workflows/{workflow_id}")["state"])
    except Exception:
        return ""


def accept(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """The accepting peer is killed within 10 ms of its 201."""
    cluster = PeerProcesses(home, 6, "--cpus", "2")
    succeeded, late_ms = 0, []
    try:
        for turn in range(options.times or 50):
            rows = cluster.up()
            victim = rows[turn % len(rows)]
            client = cluster.client(victim)
            client.peers()  # a connection is open
            workflow = client.submit(work(4, 0.1))
            accepted = time.perf_counter()
            os.kill(victim["pid"], 9)
            late_ms.append(1000 * (time.perf_counter() - accepted))
            other = cluster.anyone(victim["id"])
            state = until(lambda: _final(other, workflow.id), 60)  # noqa: B023
            total = other.workflow(workflow.id).read("total") if state == "succeeded" else b""
            succeeded += total.strip() == b"6"
            cluster.restart(victim["id"])
            until(lambda: len(_up(other)) == 6, 60)  # noqa: B023
        return {
            "right": succeeded == turn + 1,
            "times": turn + 1,
            "succeeded": succeeded,
            "killed_within_ms": max(late_ms),
        }
    finally:
        cluster.close()


def _final(client: Any, workflow_id: str) -> str:
    state = client.request("GET", f"/v1/workflows/{workflow_id}")["state"]
    return state if state in ("succeeded", "failed", "cancelled") else ""


def _up(client: Any) -> list[Any]:
    return [peer for peer in client.peers() if peer["state"] == "up"]


def failover(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """The home is killed; measures the time until the next result is committed."""
    cluster = PeerProcesses(home, 6, "--cpus", "2")
    after_s = []
    try:
        for turn in range(options.times or 20):
            rows = cluster.up()
            victim = rows[turn % len(rows)]
            workflow = cluster.client(victim).submit(work(150, 0.3))
            other = cluster.anyone(victim["id"])
            until(lambda: workflow.view()["counts"].get("succeeded", 0) > 5, 30)  # noqa: B023
            killed_at = time.time()
            cluster.kill(victim["id"])
            for event in other.workflow(workflow.id).events():
                if event.get("state") == "succeeded" and event["at"] > killed_at + 0.05:
                    after_s.append(event["at"] - killed_at)
                    break
            assert other.workflow(workflow.id).wait() == "succeeded"
            cluster.restart(victim["id"])
            until(lambda: len(_up(other)) == 6, 60)  # noqa: B023
        return {
            "times": len(after_s),
            "median_s": statistics.median(after_s),
            "most_s": max(after_s),
        }
    finally:
        cluster.close()


def stops(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """SIGSTOP and SIGCONT at random peers, with kills and restarts in between."""
    rng = random.Random(options.seed)
    cluster = PeerProcesses(home, 10, "--cpus", "2")
    try:
        workflow = cluster.client(cluster.rows()[0]).submit(work(600, TASK_S))
        deadline = time.monotonic() + 25
        while time.monotonic() < deadline:
            victim = rng.choice(cluster.up())
            if rng.random() < 0.3:
                cluster.kill(victim["id"])
                time.sleep(rng.random())
                cluster.restart(victim["id"])
            else:
                cluster.kill(victim["id"], 19)
                time.sleep(4 * rng.random())
                cluster.kill(victim["id"], 18)
        seen = until(lambda: cluster.anyone().workflow(workflow.id), 60)
        state = until(lambda: _final(cluster.anyone(), workflow.id), 120)
        return {"state": state, **checked(cluster, seen, 600)}
    finally:
        cluster.close()


def island(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """20 hosts in network namespaces; 6 of them are cut off for 60 s, then healed."""
    cluster = Hosts(home, 20, 6)
    try:
        inside = cluster.submit(15, work(300, 0.5))  # accepted by a peer that will be cut off
        outside = cluster.submit(2, work(300, 0.5))
        time.sleep(3)
        cluster.cut()
        time.sleep(60)
        before = {
            name: cluster.view(3, workflow_id)
            for name, workflow_id in (("in", inside), ("out", outside))
        }
        cluster.heal()
        start = time.monotonic()
        states = {}
        for name, workflow_id in (("inside", inside), ("outside", outside)):
            states[name] = until(lambda: cluster.final(3, workflow_id), 180)  # noqa: B023
        took_s = time.monotonic() - start
        return {
            "states_before_healing": {k: v and v["state"] for k, v in before.items()},
            "right": set(states.values()) == {"succeeded"},
            "states": states,
            "finished_after_healing_s": took_s,
            "each_once": all(
                _each_once(cluster, workflow_id, 300) for workflow_id in (inside, outside)
            ),
        }
    finally:
        cluster.close()


def lossy(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """8 hosts; a tenth of all packets is lost; the home and one other are killed and restarted."""
    cluster = Hosts(home, 8)
    try:
        start = time.monotonic()
        calm = cluster.submit(1, work(150, TASK_S))
        until(lambda: cluster.final(1, calm), 120)
        calm_s = time.monotonic() - start
        cluster.lossy(10)
        start = time.monotonic()
        workflow_id = cluster.submit(2, work(150, TASK_S))
        for victim in (2, 3):
            time.sleep(2)
            cluster.kill(victim)
            time.sleep(1)
            cluster.restart(victim)
        state = until(lambda: cluster.final(5, workflow_id), 240)
        return {
            "state": state,
            "each_once": _each_once(cluster, workflow_id, 150),
            "calm_s": calm_s,
            "took_s": time.monotonic() - start,
        }
    finally:
        cluster.close()


def full(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """5 hosts with small disks; those of the home and of one other are full for 10 s."""
    cluster = Hosts(home, 5, disk_mib=24)
    try:
        workflow_id = cluster.submit(1, work(150, TASK_S))
        time.sleep(2)
        for index in (1, 3):
            cluster.fill(index)
        time.sleep(10)
        refused = ""
        try:
            cluster.submit(1, work(4, 0.1))
        except OSError as error:
            refused = str(error).strip().splitlines()[-1][:200]
        for index in (1, 3):
            cluster.free(index)
        state = until(lambda: cluster.final(2, workflow_id), 240)
        return {
            "state": state,
            "each_once": _each_once(cluster, workflow_id, 150),
            "a_submission_to_a_full_disk": refused or "accepted",
        }
    finally:
        cluster.close()


def _each_once(cluster: PeerProcesses | Hosts, workflow_id: str, count: int) -> bool:
    commits = cluster.commits(workflow_id)
    return len(commits) == count + 1 and set(commits.values()) == {1}


def keepers(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """The cost of three keepers over one: 10,000 calls on three peers, in turn, best of three."""
    tasks = {"n": {"foreach": 10_000, "call": "operator:pos", "args": ["{item}"]}}
    best: dict[int, float] = {}
    syncs: dict[int, float] = {}
    for turn in range(3):
        for count in (1, 3):
            place = home / f"{turn}-{count}"
            cluster = PeerProcesses(place, 3, keepers=count)
            try:
                client = cluster.client(cluster.rows()[0])
                client.submit(
                    {"name": "warm", "tasks": {"n": {**tasks["n"], "foreach": 500}}}
                ).wait()
                before = [_syncs(cluster.client(row)) for row in cluster.rows()]
                start = time.monotonic()
                assert client.submit({"name": "calls", "tasks": tasks}).wait() == "succeeded"
                took_s = time.monotonic() - start
                after = [_syncs(cluster.client(row)) for row in cluster.rows()]
            finally:
                cluster.close()
            if took_s < best.get(count, took_s + 1):
                best[count] = took_s
                others = [b - a for a, b in zip(before[1:], after[1:], strict=True)]
                syncs[count] = max(others) / took_s
    return {
        "one_keeper_per_s": 10_000 / best[1],
        "three_keepers_per_s": 10_000 / best[3],
        "ratio": best[1] / best[3],
        "syncs_per_s_of_a_keeper": syncs[3],
    }


def _lacking(scenario: str) -> str:
    """The reason why this machine can't run it; empty if it can."""
    if scenario in ("island", "lossy", "full") and os.geteuid() != 0:
        return "network namespaces need root"
    if scenario in ("island", "lossy", "full") and shutil.which("ip") is None:
        return "the command ip (iproute2) is missing"
    if scenario == "lossy" and shutil.which("nft") is None:
        return "the command nft (nftables) is missing"
    return ""


def _syncs(client: Any) -> float:
    for line in client.metrics().splitlines():
        if line.startswith('valence_disk_total{kind="syncs"}'):
            return float(line.rpartition(" ")[2])
    return 0.0


SCENARIOS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "kills": kills,
    "accept": accept,
    "failover": failover,
    "stops": stops,
    "island": island,
    "lossy": lossy,
    "full": full,
    "keepers": keepers,
    "pilots": queues.pilots,
    "queue": queues.queue,
    "deaths": losses.deaths,
    "sites": losses.sites,
    "fair": owners.fair,
    "edited": owners.edited,
    "hostile": strangers.hostile,
    "promises": promises.promises,
    "promise-deaths": promises.promise_deaths,
    "refusals": promises.refusals,
    "plans": promises.plans,
    "overruns": promises.overruns,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=0, help="rounds of accept and failover")
    parser.add_argument("--only", default="", help="attacks of hostile, separated by commas")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wrong = [name for name in options.scenarios if name not in SCENARIOS]
    if wrong:
        parser.error(f"unknown scenario {wrong[0]}; choose from {', '.join(SCENARIOS)}")
    unknown = [name for name in options.only.split(",") if name and name not in strangers.ATTACKS]
    if unknown:
        parser.error(f"unknown attack {unknown[0]}; choose from {', '.join(strangers.ATTACKS)}")
    display = Display()
    results: dict[str, Any] = {}
    for name in options.scenarios or SCENARIOS:
        lacking = _lacking(name)
        if lacking:
            print(f"{name}: skipped, {lacking}", file=sys.stderr)
            continue
        print(f"{name}: {(SCENARIOS[name].__doc__ or '').strip()}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="valence-chaos-") as home:
            results[name] = SCENARIOS[name](options, Path(home))
        if not options.json:
            rows = [
                (k, f"{v:.2f}" if isinstance(v, float) else str(v))
                for k, v in results[name].items()
            ]
            display.table((name.upper(), ""), rows)
    if options.json:
        print(json.dumps(results, indent=2))
    good = all(
        row.get("right", True) and row.get("each_once", True) and row.get("state") != "failed"
        for row in results.values()
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
