"""Runs the works on Ray: one node with as many CPUs as slots, dashboard and usage reports off."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import ray
from works import COMMANDS, DEPTH, NOOPS, TRUE, WIDTH, latency, parents, timed


@ray.remote
def noop(first: Any, second: Any = None) -> Any:
    return first


@ray.remote
def command(index: int) -> int:
    return subprocess.run([TRUE]).returncode


def main(slots: int) -> None:
    ray.init(
        num_cpus=slots,
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        log_to_driver=False,
    )
    assert ray.get([noop.remote(i) for i in range(200)]) == list(range(200))

    def noops() -> None:
        assert ray.get([noop.remote(i) for i in range(NOOPS)]) == list(range(NOOPS))

    def commands() -> None:
        assert not any(ray.get([command.remote(i) for i in range(COMMANDS)]))

    def layers() -> None:
        layer = [noop.remote(i) for i in range(WIDTH)]
        for _ in range(1, DEPTH):
            layer = [noop.remote(*(layer[p] for p in parents(i))) for i in range(WIDTH)]
        assert ray.get(layer) == list(range(WIDTH))

    for work, count, run in (
        ("noops", NOOPS, noops),
        ("layers", WIDTH * DEPTH, layers),
        ("commands", COMMANDS, commands),
    ):
        timed(work, count, run)
        time.sleep(1.0)
    latency("latency", lambda: ray.get(noop.remote(0)))
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
