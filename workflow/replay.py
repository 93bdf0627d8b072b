"""A program that stands in for one task of a recorded workflow: it reads, computes and writes.

`python3 -I -m valence.workflow.replay --seconds 0.1 --cpu 0.9 --memory 1000 --read in …
--write out:10 …`

Its output depends only on the output's name and on the bytes it read, so a second run of the same
task makes the same files. It uses the standard library only, to start fast.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Iterator

CHUNK_BYTES = 1 << 20


def made_up(seed: str, size: int) -> Iterator[bytes]:
    """`size` bytes that depend only on the seed."""
    block = hashlib.shake_128(seed.encode()).digest(min(size, CHUNK_BYTES) or 1)
    while size > 0:
        yield block[:size]
        size -= len(block)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="valence.workflow.replay", description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument(
        "--cpu", type=float, default=1.0, help="fraction of the time spent computing"
    )
    parser.add_argument("--memory", type=int, default=0, help="bytes held in memory meanwhile")
    parser.add_argument("--read", action="append", default=[], metavar="FILE")
    parser.add_argument("--write", action="append", default=[], metavar="FILE:BYTES")
    options = parser.parse_args(argv)
    start = time.monotonic()
    held = bytearray(options.memory)
    digest = hashlib.sha256()
    for name in options.read:
        with open(name, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    spent = start + options.seconds * min(1.0, max(0.0, options.cpu))
    while time.monotonic() < spent:
        hashlib.sha256(held[:4096] + b"x" * 4096).digest()
    time.sleep(max(0.0, start + options.seconds - time.monotonic()))
    for item in options.write:
        name, _, size = item.rpartition(":")
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            for chunk in made_up(name + digest.hexdigest(), int(size)):
                file.write(chunk)
    print(f"read {len(options.read)} files, wrote {len(options.write)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
