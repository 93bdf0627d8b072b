"""Removes the directories that tasks leave behind, whatever is in them.

A task may nest directories deeper than a path can be long, take away its own right to enter one, or
leave a million files. So no path here is longer than one name below an open directory: each nested
directory is moved up to the top before it is emptied. At most two descriptors are open at any time,
and no depth is too deep. Links are removed, not followed.
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
    """Remove a directory; True if nothing is left. Raises nothing if something can't be removed."""
    try:
        top = _enter(str(root), None)
    except FileNotFoundError:
        return True
    except OSError:  # a file, a link, or a directory that this process may not enter
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
    """Open a directory, after giving its owner all rights to it."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=within)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=within)  # not a link: `_clear` and `O_NOFOLLOW` check that
        fd = os.open(name, _DIRECTORY, dir_fd=within)
    with contextlib.suppress(OSError):
        os.fchmod(fd, 0o700)
    return fd


def _empty(top: int) -> None:
    names = (f".{secrets.token_hex(8)}" for _ in itertools.count())  # that no task has guessed
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
    """Remove the files of a directory and move its directories up; returns their names."""
    moved_up = []
    with os.scandir(directory) as entries:
        names_there = [entry.name for entry in entries]
    for name in names_there:
        try:
            kind = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(kind):
                os.unlink(name, dir_fd=directory)
            elif directory == top:
                moved_up.append(name)
            else:
                with contextlib.suppress(OSError):  # only a writable directory can be moved
                    os.chmod(name, 0o700, dir_fd=directory)
                new_name = next(names)
                os.rename(name, new_name, src_dir_fd=directory, dst_dir_fd=top)
                moved_up.append(new_name)
        except OSError:
            continue
    return moved_up
