"""Runs the works on Dask, with `worker-saturation` at `inf`: three times faster on no-ops."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import dask
from dask.distributed import Client, LocalCluster
from works import COMMANDS, DEPTH, NOOPS, TRUE, WIDTH, latency, parents, timed


def noop(first: Any, second: Any = None) -> Any:
    return first


def command(index: int) -> int:
    return subprocess.run([TRUE]).returncode


def main(slots: int) -> None:
    dask.config.set({"distributed.scheduler.worker-saturation": float("inf")})
    cluster = LocalCluster(
        n_workers=slots, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
    )
    client = Client(cluster)
    client.wait_for_workers(slots)
    assert client.gather(client.map(noop, range(200), pure=False)) == list(range(200))

    def noops() -> None:
        values = client.gather(client.map(noop, range(NOOPS), pure=False))
        assert values == list(range(NOOPS))

    def commands() -> None:
        assert not any(client.gather(client.map(command, range(COMMANDS), pure=False)))

    def layers() -> None:
        lazy = dask.delayed(noop, pure=False)  # a fifth faster here than `client.submit`
        layer = [lazy(i) for i in range(WIDTH)]
        for _ in range(1, DEPTH):
            layer = [lazy(*(layer[p] for p in parents(i))) for i in range(WIDTH)]
        assert dask.compute(*layer) == tuple(range(WIDTH))

    for work, count, run in (
        ("noops", NOOPS, noops),
        ("layers", WIDTH * DEPTH, layers),
        ("commands", COMMANDS, commands),
    ):
        timed(work, count, run)
        time.sleep(1.0)  # its cleaning up must not count in the next work
    latency("latency", lambda: client.submit(noop, 0, pure=False).result())
    client.close()
    cluster.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
