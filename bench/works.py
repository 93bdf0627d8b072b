"""The works that every system runs, and their timing, with nothing but the standard library.

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
    """The two tasks of the layer above whose values a task takes."""
    return index, (index + 1) % WIDTH


def timed(work: str, count: int, run: Callable[[], None]) -> None:
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    say(work, seconds=seconds, per_s=count / seconds)


def latency(work: str, run: Callable[[], None]) -> None:
    for _ in range(WARM):
        run()
    took = []
    for _ in range(LATENCIES):
        start = time.perf_counter()
        run()
        took.append(time.perf_counter() - start)
    say(work, seconds=statistics.median(took), per_s=1 / statistics.median(took))


def say(work: str, **row: object) -> None:
    print(json.dumps({"work": work, **row}), flush=True)
