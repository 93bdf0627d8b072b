"""The local cluster on this machine: its directory, its peers, its token and its supervisor."""

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
    """Each local peer as it described itself: id, pid, address, http."""
    described = []
    for path in sorted(directory().glob("peer-*/peer.json")):
        try:
            described.append({**json.loads(path.read_text()), "data": str(path.parent)})
        except (OSError, ValueError):
            continue
    return described


def urls() -> list[str]:
    return [peer["http"] for peer in peers() if alive(peer)]


def token() -> str | None:
    try:
        return (directory() / "token").read_text().strip()
    except OSError:
        return None


def alive(peer: dict[str, Any]) -> bool:
    """Whether its daemon holds its lock: the pid alone may belong to another process by now."""
    return _locked(Path(peer["data"]) / "lock")


def _locked(path: Path) -> bool:
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
    except OSError:
        pass
    return False


def supervisor() -> int | None:
    """The pid of a running `valence up`, which holds a lock as long as it runs."""
    path = directory() / "up.lock"
    try:
        return int(path.read_text().strip() or 0) or None if _locked(path) else None
    except (OSError, ValueError):
        return None
