"""Whose processes tasks are: never root's, and never this peer's own where it may choose.

A peer that runs as root gives each owner's tasks a user of their own, inside the sandbox as well,
from a range that nothing else uses: one drawn for this peer, as there may be others on the machine.
What one owner's tasks leave, another's can't touch, and none can read what is the peer's. Which
owner has which user stands in a file of the peer: no two ever share one, and nobody inherits what
another left. Where such a user could not even start Python (it lies in root's home directory, say),
the peer says so and does not pretend.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

#: from where on users are given out, and how many there are
ALL = (2_000_000, 2_000_000_000)
FEW = (20_000, 40_000)  # where only some are mapped into this namespace
PEER_USERS = 100_000
PEERS_MIN = 40  # on one machine, that mostly have users of their own
TRY_S_MAX = 10.0
_TRY = "import os, sys, msgpack; os.chdir(sys.argv[1]); open('x', 'w').close()"


class NoUsers(ValueError):
    """No owner can have a user of its own here, and why."""


class Users:
    def __init__(self, directory: Path, first: int, count: int) -> None:
        self._path = directory / "users.json"
        each = max(1, min(PEER_USERS, count // PEERS_MIN))
        self._first = first + each * secrets.randbelow(max(1, count // each))
        self._end = min(first + count, self._first + each)
        self._users: dict[str, int] = {}
        self._lock = threading.Lock()
        if self._path.exists():
            kept = json.loads(self._path.read_text())
            if first <= kept["first"] < kept["end"] <= first + count:
                self._first, self._end, self._users = kept["first"], kept["end"], kept["users"]
        self._free = self._unused()

    def __call__(self, owner: str) -> tuple[int, int]:
        """User and group of an owner's tasks."""
        found = self._users.get(owner)
        if found is None:
            with self._lock:  # threads that lay out directories ask, too
                found = self._users.get(owner) or self._given(owner)
        return found, found

    def _given(self, owner: str) -> int:
        found = next(self._free)
        self._write({**self._users, owner: found})  # first: after a crash nobody else gets it
        self._users[owner] = found
        return found

    def _unused(self) -> Iterator[int]:
        taken = {*self._users.values(), *(entry.pw_uid for entry in pwd.getpwall())}
        yield from (n for n in range(self._first, self._end) if n not in taken)
        raise NoUsers(f"all users that owners of tasks can have are taken ({self._path})")

    def _write(self, users: dict[str, int]) -> None:
        fresh = self._path.with_suffix(".new")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"first": self._first, "end": self._end, "users": users}, file)
            file.flush()
            os.fdatasync(file.fileno())
        fresh.replace(self._path)

    @classmethod
    def find(cls, directory: Path) -> Users:
        """For a peer that is root."""
        for first, count in (ALL, FEW):
            if _mapped("uid", first, count) and _mapped("gid", first, count):
                made = cls(directory, first, count)
                why = _try(directory, *made(""))
                if why:
                    raise NoUsers(why)
                return made
        raise NoUsers("too few users are mapped into this namespace")


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
        why = (error.strerror if isinstance(error, OSError) else str(error)) or "it fails"
        return f"another user can't run {sys.executable}: {why.lower()}"
    finally:
        (place / "x").unlink(missing_ok=True)
        place.rmdir()
    last = done.stderr.strip().splitlines()[-1:]
    return f"another user can't run Python in {work}: {' '.join(last)}" if done.returncode else ""
