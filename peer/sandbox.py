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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import valence

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt")
#: of /etc only what programs need to find libraries, names and certificates
_ETC = (
    *("passwd", "group", "nsswitch.conf", "hosts", "resolv.conf", "localtime", "alternatives"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl", "ca-certificates", "pki", "mime.types"),
)
_PACKAGES = ("valence", "peer", "protocols", "workflow")
TRY_S_MAX = 10.0
#: in the task's directory: what it has in place of these
PLACES = {"/tmp": ".tmp", "/dev/shm": ".shm"}


class NoSandbox(ValueError):
    """It was asked for, and can't be had here."""


#: a user namespace in which the task is nobody, and may do nothing that root may
_POWERLESS = ("--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL")


class Sandbox:
    def __init__(self, program: str, readable: Iterable[str], hidden: str) -> None:
        self._first = [program, "--die-with-parent", "--unshare-all", "--new-session"]
        self._first += [*_POWERLESS, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run"]
        # after those, and what stands for /tmp: one may lie in a directory that is made anew
        self._then = [word for path in readable for word in ("--ro-bind-try", path, path)]
        self._then += ["--tmpfs", hidden]  # the peer's data, should it lie in anything of that
        self._closed = ("/run", hidden, "/dev")

    @classmethod
    def find(cls, data: Path, user: tuple[int, int] | None = None) -> Sandbox:
        """Tried once, as the user and group that tasks have, so that a peer that can't keep what it
        promises does not start."""
        program = shutil.which("bwrap")
        if program is None:
            raise NoSandbox("sandbox = bwrap: there is no bwrap here; install bubblewrap")
        made = cls(program, _readable(), str(data))
        python = [sys.executable, "-c", "import msgpack"]
        argv = [*made.wrap(python, "", {"PATH": os.defpath}, False)]
        more: dict[str, Any] = {}
        if user is not None:
            more = {"user": user[0], "group": user[1], "extra_groups": [], "cwd": "/"}
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=TRY_S_MAX, **more)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoSandbox(f"sandbox = bwrap: {error}") from None
        if done.returncode:
            raise NoSandbox(f"sandbox = bwrap does not work here: {done.stderr.strip()[:300]}")
        return made

    def wrap(
        self, argv: Iterable[str], cwd: str, env: Mapping[str, str], network: bool
    ) -> tuple[str, ...]:
        """The task's variables are set inside: outside, they could make bwrap itself misbehave."""
        found = [*self._first, "--clearenv"]
        for name, value in env.items():
            found += ["--setenv", name, value]
        # what it writes to /tmp and /dev/shm counts as what it writes to its directory
        for place, name in PLACES.items():
            found += ["--bind", f"{cwd}/{name}", place] if cwd else ["--tmpfs", place]
        found += self._then
        if network:
            resolver = "/run/systemd/resolve"
            found += ["--share-net", "--ro-bind-try", resolver, resolver]
        if cwd:
            found += ["--bind", cwd, cwd, "--chdir", cwd]
        for place in self._closed:  # memory that nobody would count
            found += ["--remount-ro", place]
        return (*found, "--", *argv)


def _readable() -> list[str]:
    """The system, this Python with its packages, and of ours what runs a call: no more."""
    found = dict.fromkeys(_SYSTEM)
    found.update(dict.fromkeys(f"/etc/{name}" for name in _ETC))
    for path in (sys.prefix, sys.base_prefix, *_packages()):
        real = os.path.realpath(path)
        inside = any(real == top or real.startswith(top + "/") for top in found)
        if not inside and os.path.isdir(real):
            found[real] = None
    return list(found)


def _packages() -> list[str]:
    """In a checkout they lie beside each other, else in one."""
    root = Path(module_path())
    whole = (root / "valence" / "peer").exists()
    return [str(root / name) for name in (_PACKAGES[:1] if whole else _PACKAGES)]


def module_path() -> str:
    """Where Python finds our packages in there."""
    return str(Path(os.path.realpath(valence.__file__)).parents[1])
