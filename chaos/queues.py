"""A site's master pilot and its task queue, killed in the middle of the work."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from valence.client import Client

from .processes import PeerProcesses, committed, until

TASKS, TASK_S, PEERS = 2000, 0.05, 12


class Queue:
    """`python -m master`, which can be killed and restarted."""

    def __init__(self, data: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.data = data
        self.token = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, token: str, **variables: str) -> None:
        self.token = token
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VALENCE_")}
        environment.update(variables)
        environment["VALENCE_TOKEN"] = token
        command = [sys.executable, "-m", "valence", "queue", "--data", str(self.data), "--quiet"]
        command += ["--http-port", str(self.port)]
        self._process = subprocess.Popen(command, env=environment)

    def client(self) -> Client:
        return Client(self.url, self.token)

    def shown(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(f"{self.url}/v1/queue", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return dict(json.load(answer))

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(30)


def work(count: int, seconds: float) -> dict[str, Any]:
    command = f"sleep {seconds:g}; echo {{item}} > o.{{item}}"
    total = "cat o.* | awk '{s+=$1} END {print s}' > total"
    return {
        "name": f"{count} tasks",
        "strategy": "pilots",
        "tasks": {
            "w": {"foreach": count, "command": command, "outputs": ["o.{item}"]},
            "total": {"command": total, "inputs": ["o.*"], "outputs": ["total"]},
        },
    }


def rounds(cluster: PeerProcesses, rows: list[dict[str, Any]]) -> int:
    """The number of rounds that the master pilots among these peers have called."""
    called = 0
    for row in rows:
        with contextlib.suppress(Exception):
            for line in cluster.client(row).metrics().splitlines():
                if line.startswith('valence_master_total{kind="assigned"'):
                    called += int(float(line.rpartition(" ")[2]))
    return called


def _kill_master(cluster: PeerProcesses) -> float:
    """Kills the master pilot (the lowest id); the seconds until another one assigns something."""
    master = min(cluster.up(), key=lambda row: str(row["id"]))
    others = [row for row in cluster.up() if row["id"] != master["id"]]
    cluster.kill(str(master["id"]))
    cluster.gone.add(str(master["id"]))
    began = time.monotonic()
    before = rounds(cluster, others)
    until(lambda: rounds(cluster, others) > before, 30)
    return time.monotonic() - began


def pilots(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """2,000 tasks with `pilots` and no queue; the site's master pilot is killed in the middle."""
    cluster = PeerProcesses(home, PEERS, "--cpus", "2")
    try:
        master = min(cluster.up(), key=lambda row: str(row["id"]))
        other = next(row for row in cluster.up() if row["id"] != master["id"])
        began = time.monotonic()
        workflow = cluster.client(other).submit(work(TASKS, TASK_S))
        until(lambda: workflow.view()["counts"].get("succeeded", 0) > TASKS // 4, 60)
        again_s = _kill_master(cluster)
        state = workflow.wait()
        right = workflow.read("total").decode().strip() == str(sum(range(TASKS)))
        each = cluster.commits(workflow.id)
        once = len(each) == TASKS + 1 and set(each.values()) == {1}
        return {
            "state": state, "right": right, "each_once": once,
            "seconds": time.monotonic() - began, "next round after": again_s,
        }  # fmt: skip
    finally:
        cluster.close()


def queue(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """2,000 tasks through the queue; the master pilot is killed, then the queue, for 3 s."""
    service = Queue(home / "queue")
    cluster = PeerProcesses(home, PEERS, "--cpus", "2", VALENCE_QUEUE=service.url)
    try:
        service.start(cluster.token)
        until(lambda: service.client().peers(), 30)
        began = time.monotonic()
        workflow = service.client().submit(work(TASKS, TASK_S))
        until(lambda: workflow.view()["counts"].get("succeeded", 0) > TASKS // 4, 60)
        again_s = _kill_master(cluster)
        until(lambda: workflow.view()["counts"].get("succeeded", 0) > TASKS // 2, 60)
        service.kill()
        direct = cluster.anyone().submit(work(50, 0.01))  # the peers still work for each other
        direct_state = direct.wait()
        time.sleep(3)
        service.start(cluster.token)
        until(lambda: service.client().peers(), 30)
        state = service.client().workflow(workflow.id).wait()
        shown = service.shown()
        text = service.client().workflow(workflow.id).read("total").decode().strip()
        each = committed(service.data / "peer.db", workflow.id)
        return {
            "state": state,
            "right": text == str(sum(range(TASKS))),
            "each_once": len(each) == TASKS + 1 and set(each.values()) == {1},
            "without the queue": direct_state,
            "seconds": time.monotonic() - began,
            "next round after": again_s,
            "requests since it is back": shown["counts"]["requests"],
        }
    finally:
        service.close()
        cluster.close()
