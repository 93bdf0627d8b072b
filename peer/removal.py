"""Directories that tasks left behind are removed, whatever is in them.

A task may nest directories deeper than any path is long, take away its own right to enter one, or
leave a million files. So nothing here follows a path further than one name below an open directory:
every directory that is found inside of another is moved up beside it before it is emptied. Two
descriptors are open at any time, and no depth is too deep. Links are removed, not followed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(root: Path) -> bool:
    """True if nothing of it is left. What can't be removed stays, and nothing is raised."""
    try:
        top = _enter(str(root), None)
    except FileNotFoundError:
        return True
    except OSError:  # a file, a link, or nothing that this process may touch
        with contextlib.suppress(OSError):
            os.unlink(root)
        return not os.path.lexists(root)
    try:
        _empty(top)
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        os.rmdir(root)
    return not os.path.lexists(root)


def _enter(name: str, within: int | None) -> int:
    """A directory, opened; its owner may always do that again."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=within)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=within)  # no link: `_empty` has looked, `O_NOFOLLOW` does
        fd = os.open(name, _DIRECTORY, dir_fd=within)
    with contextlib.suppress(OSError):
        os.fchmod(fd, 0o700)
    return fd


def _empty(top: int) -> None:
    names = (f".{secrets.token_hex(8)}" for _ in itertools.count())  # that no task can have taken
    waiting = _clear(top, top, names)
    while waiting:
        name = waiting.pop()
        try:
            inner = _enter(name, top)
        except OSError:
            continue
        try:
            waiting += _clear(inner, top, names)
        finally:
            os.close(inner)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=top)


def _clear(directory: int, top: int, names: Iterator[str]) -> list[str]:
    """Its files are removed; its directories are moved up, and named."""
    found = []
    with os.scandir(directory) as entries:
        there = [entry.name for entry in entries]
    for name in there:
        try:
            kind = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(kind):
                os.unlink(name, dir_fd=directory)
            elif directory == top:
                found.append(name)
            else:
                with contextlib.suppress(OSError):  # to move it, it must be writable itself
                    os.chmod(name, 0o700, dir_fd=directory)
                moved = next(names)
                os.rename(name, moved, src_dir_fd=directory, dst_dir_fd=top)
                found.append(moved)
        except OSError:
            continue
    return found
