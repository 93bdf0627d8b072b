"""An optional wall around tasks: bubblewrap, where it is installed and allowed.

Inside, a task sees the system read-only, a `/tmp` of its own, its own directory, no other process,
and no network unless its document asks for it. It sees nothing else: no home directories, no data
of the peer. All of it ends when the task's first process ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/etc")
TRY_S_MAX = 10.0


class NoSandbox(ValueError):
    """It was asked for, and can't be had here."""


class Sandbox:
    def __init__(self, program: str, readable: Iterable[str]) -> None:
        self._fixed = [program, "--die-with-parent", "--unshare-all", "--new-session"]
        self._fixed += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run"]
        for path in readable:  # last: one of them may lie in a directory that is made anew
            self._fixed += ["--ro-bind-try", path, path]

    @classmethod
    def find(cls) -> Sandbox:
        """Tried once, so that a peer that can't keep what it promises does not start."""
        program = shutil.which("bwrap")
        if program is None:
            raise NoSandbox("sandbox = bwrap: there is no bwrap here; install bubblewrap")
        made = cls(program, _readable())
        argv = [*made.wrap(["true"], "", False)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=TRY_S_MAX)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoSandbox(f"sandbox = bwrap: {error}") from None
        if done.returncode:
            raise NoSandbox(f"sandbox = bwrap does not work here: {done.stderr.strip()[:300]}")
        return made

    def wrap(self, argv: Iterable[str], cwd: str, network: bool) -> tuple[str, ...]:
        own = ["--bind", cwd, cwd, "--chdir", cwd] if cwd else []
        shared = ["--share-net"] if network else []
        if network:
            shared += ["--ro-bind-try", "/run/systemd/resolve", "/run/systemd/resolve"]
        return (*self._fixed, *shared, *own, "--", *argv)


def _readable() -> list[str]:
    """The system, and where this Python and its packages are."""
    found = dict.fromkeys(_SYSTEM)
    package = str(Path(__file__).parents[1])
    for path in (sys.prefix, sys.base_prefix, package, *sys.path):
        real = os.path.realpath(path) if path else ""
        inside = any(real == top or real.startswith(top + "/") for top in found)
        if real and real != "/" and not inside and os.path.isdir(real):
            found[real] = None
    return list(found)
