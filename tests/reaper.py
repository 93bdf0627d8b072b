"""Ends what a killed test run has left: every process that names the run's own directory.

`python reaper.py DIRECTORY`, with a pipe as standard input that only the test run holds. A word on it
is a goodbye: the run has cleaned up itself. An end of file without one: it was killed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

ROUNDS = 20  # what is being started as its parent dies is found by a later one


def naming(directory: str) -> list[int]:
    """Processes that were started in it, or have it in their command or environment."""
    # (`pytest-1` is not `pytest-12`)
    named = re.compile(re.escape(directory.encode()) + rb"(?![\w.-])")
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            texts = [os.fsencode(os.readlink(path / "cwd"))]
            texts += [(path / name).read_bytes() for name in ("cmdline", "environ")]
        except OSError:
            continue
        if any(map(named.search, texts)) and int(path.name) != os.getpid():
            pids.append(int(path.name))
    return pids


def main(directory: str) -> None:
    if os.fork():
        return
    if sys.stdin.buffer.read(1):
        return
    for _ in range(ROUNDS):
        for pid in naming(directory):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1])
