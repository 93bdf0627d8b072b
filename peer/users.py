"""Gives each owner's tasks a system user of their own, if the peer runs as root.

Tasks never run as root, nor as the peer's own user where the peer can choose; this holds inside the
sandbox, too. The users are from a range that nothing else uses, drawn at random for this peer, as
there may be other peers on the machine. The tasks of one owner can't touch the files of another's,
and none can read the peer's files. The user of each owner is kept in a file of the peer: no two
owners ever share a user, and no owner inherits another's files. Where such a user could not even
start Python (because it is in root's home directory, for example), the peer reports that at start.
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

#: ranges of user ids: the first, and their number
ALL = (2_000_000, 2_000_000_000)
FEW = (20_000, 40_000)  # where only some ids are mapped into this namespace
PEER_USERS = 100_000
PEERS_MIN = 40  # so many peers on one machine have, in most cases, no user id in common
TRY_S_MAX = 10.0
_TRY = "import os, sys, msgpack; os.chdir(sys.argv[1]); open('x', 'w').close()"


class NoUsers(ValueError):
    """Why owners can't have users of their own here."""


class Users:
    """The user id of each owner; a new owner gets the next free one."""

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
        """The user and the group of an owner's tasks."""
        user = self._users.get(owner)
        if user is None:
            with self._lock:  # threads that lay out directories call this, too
                user = self._users.get(owner) or self._assign(owner)
        return user, user

    def _assign(self, owner: str) -> int:
        user = next(self._free)
        self._write({**self._users, owner: user})  # first: after a crash no other owner gets it
        self._users[owner] = user
        return user

    def _unused(self) -> Iterator[int]:
        taken = {*self._users.values(), *(entry.pw_uid for entry in pwd.getpwall())}
        yield from (n for n in range(self._first, self._end) if n not in taken)
        raise NoUsers(f"no user id is left for another owner of tasks (see {self._path})")

    def _write(self, users: dict[str, int]) -> None:
        fresh = self._path.with_suffix(".new")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"first": self._first, "end": self._end, "users": users}, file)
            file.flush()
            os.fdatasync(file.fileno())
        fresh.replace(self._path)

    @classmethod
    def find(cls, directory: Path) -> Users:
        """The users of a peer that runs as root, tried once; raises `NoUsers`."""
        for first, count in (ALL, FEW):
            if _mapped("uid", first, count) and _mapped("gid", first, count):
                users = cls(directory, first, count)
                problem = _try(directory, *users(""))
                if problem:
                    raise NoUsers(problem)
                return users
        needed = f"{FEW[0]:,} to {sum(FEW) - 1:,}"
        raise NoUsers(f"this container has too few user ids ({needed} are needed)")


def _mapped(kind: str, first: int, count: int) -> bool:
    try:
        rows = Path(f"/proc/self/{kind}_map").read_text().splitlines()
    except OSError:
        return True  # this system has no namespaces
    spans = [tuple(map(int, row.split())) for row in rows]
    return any(start <= first and first + count <= start + size for start, _, size in spans)


def _try(work: Path, user: int, group: int) -> str:
    """Why a task of this user could not run Python or write to its directory; empty if it can."""
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
        reason = (error.strerror if isinstance(error, OSError) else str(error)) or "it fails"
        return f"other users can't run {sys.executable}: {reason.lower()}"
    finally:
        (place / "x").unlink(missing_ok=True)
        place.rmdir()
    last = done.stderr.strip().splitlines()[-1:]
    return f"other users can't run Python in {work}: {' '.join(last)}" if done.returncode else ""
