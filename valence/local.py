"""The local cluster: where it lives on this machine, and who finds it there."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any


def directory() -> Path:
    if os.environ.get("VALENCE_HOME"):
        return Path(os.environ["VALENCE_HOME"])
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "valence"


def peers() -> list[dict[str, Any]]:
    """What each local peer said of itself: id, pid, address, http."""
    found = []
    for path in sorted(directory().glob("peer-*/peer.json")):
        try:
            found.append({**json.loads(path.read_text()), "data": str(path.parent)})
        except (OSError, ValueError):
            continue
    return found


def urls() -> list[str]:
    return [peer["http"] for peer in peers() if alive(int(peer["pid"]))]


def token() -> str | None:
    try:
        return (directory() / "token").read_text().strip()
    except OSError:
        return None


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def supervisor() -> int | None:
    """The pid of a running `valence up`, known by the lock that it holds."""
    try:
        with (directory() / "up.lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return int(file.read().strip() or 0) or None
    except (OSError, ValueError):
        pass
    return None
