"""Whose processes tasks are: never root's, and never this peer's own where it may choose.

A peer that runs as root gives each owner's tasks a user of their own: by the owner's name, from a
range that nothing else uses. What one owner's tasks leave, another's can't touch, and none can read
what is the peer's. Where that user could not even start Python (it lies in root's home directory,
say), the peer says so and does not pretend.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

FIRST, COUNT = 2_000_000, 100_000
NOBODY = 65534  # where only few users are mapped into this namespace: one for all tasks
TRY_S_MAX = 10.0
_TRY = "import os, sys, msgpack; os.chdir(sys.argv[1]); open('x', 'w').close()"


class Users:
    def __init__(self, first: int, count: int) -> None:
        self._first = first
        self._count = count

    def __call__(self, owner: str) -> tuple[int, int]:
        """User and group of an owner's tasks."""
        found = self._first + zlib.crc32(owner.encode()) % self._count
        return found, found

    @classmethod
    def find(cls, work: Path) -> Users | str:
        """For a peer that is root; or why it can't be."""
        for first, count in ((FIRST, COUNT), (NOBODY, 1)):
            if _mapped("uid", first, count) and _mapped("gid", first, count):
                made = cls(first, count)
                why = _try(work, *made(""))
                return why or made
        return "this namespace has no user to spare"


def _mapped(kind: str, first: int, count: int) -> bool:
    try:
        rows = Path(f"/proc/self/{kind}_map").read_text().splitlines()
    except OSError:
        return True  # no namespaces here
    spans = [tuple(map(int, row.split())) for row in rows]
    return any(start <= first and first + count <= start + size for start, _, size in spans)


def _try(work: Path, user: int, group: int) -> str:
    """Empty, if a task of that user could run Python and write to its directory."""
    place = work / ".try-user"
    place.mkdir(mode=0o700, exist_ok=True)
    try:
        os.chown(place, user, group)
        done = subprocess.run(
            [sys.executable, "-c", _TRY, str(place)],
            user=user,
            group=group,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=TRY_S_MAX,
            cwd="/",
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"another user can't run {sys.executable}: {error}"
    finally:
        (place / "x").unlink(missing_ok=True)
        place.rmdir()
    last = done.stderr.strip().splitlines()[-1:]
    return f"another user can't run Python in {work}: {' '.join(last)}" if done.returncode else ""
