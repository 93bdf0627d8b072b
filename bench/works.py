"""The work that every system gets, and how a run of it is timed. The standard library alone.

Each `with_….py` starts one system with the given number of slots, does all works once, and prints a
JSON line for each. Every system returns each call's value to the caller, who checks it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

NOOPS = 10_000
COMMANDS = 2_000
WIDTH, DEPTH = 100, 20
LATENCIES, WARM = 200, 20
TRUE = "/bin/true"


def parents(index: int) -> tuple[int, int]:
    """The two of the layer above that a task of a layer takes."""
    return index, (index + 1) % WIDTH


def timed(work: str, count: int, run: Callable[[], None]) -> None:
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    say(work, seconds=seconds, per_s=count / seconds)


def latency(work: str, run: Callable[[], None]) -> None:
    for _ in range(WARM):
        run()
    found = []
    for _ in range(LATENCIES):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    say(work, seconds=statistics.median(found), per_s=1 / statistics.median(found))


def say(work: str, **row: object) -> None:
    print(json.dumps({"work": work, **row}), flush=True)
