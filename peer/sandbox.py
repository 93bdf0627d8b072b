"""An optional sandbox for tasks: bubblewrap, where it is installed and allowed.

Inside, a task sees the system read-only, a `/tmp` of its own, its own directory, no other process,
and no network unless its document asks for it. It sees nothing else: no home directories, no data
of the peer. All processes in the sandbox end when the task's first process ends.
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
#: of /etc, only the files that programs need to find libraries, names and certificates
_ETC = (
    *("passwd", "group", "nsswitch.conf", "hosts", "resolv.conf", "localtime", "alternatives"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ssl", "ca-certificates", "pki", "mime.types"),
)
_PACKAGES = ("valence", "peer", "protocols", "workflow")
TRY_S_MAX = 10.0
#: directories inside the task's own directory that stand in for these
PLACES = {"/tmp": ".tmp", "/dev/shm": ".shm"}


class NoSandbox(ValueError):
    """Why there can be no sandbox on this machine."""


#: a user namespace in which the task is the user nobody, without any right of root's
_POWERLESS = ("--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL")


class Sandbox:
    """Wraps a command in `bwrap`."""

    def __init__(self, program: str, readable: Iterable[str], hidden: str) -> None:
        self._first = [program, "--die-with-parent", "--unshare-all", "--new-session"]
        self._first += [*_POWERLESS, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run"]
        # after those, and after the stand-in for /tmp: a path may be inside a replaced directory
        self._then = [word for path in readable for word in ("--ro-bind-try", path, path)]
        self._then += ["--tmpfs", hidden]  # the peer's data, in case it is inside one of the paths
        self._closed = ("/run", hidden, "/dev")

    @classmethod
    def find(cls, data: Path, user: tuple[int, int] | None = None) -> Sandbox:
        """The sandbox of this machine, tried once as the user and group that tasks have, so that a
        peer which promises a sandbox and can't provide it does not start."""
        program = shutil.which("bwrap")
        if program is None:
            raise NoSandbox("the program bwrap is not installed (install bubblewrap)")
        sandbox = cls(program, _readable(), str(data))
        python = [sys.executable, "-c", "import msgpack"]
        argv = [*sandbox.wrap(python, "", {"PATH": os.defpath}, False)]
        options: dict[str, Any] = {}
        if user is not None:
            options = {"user": user[0], "group": user[1], "extra_groups": [], "cwd": "/"}
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=TRY_S_MAX, **options
            )
        except subprocess.TimeoutExpired:
            raise NoSandbox(f"bwrap did not start Python within {TRY_S_MAX:g} s") from None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise NoSandbox(f"{program} can't be run: {reason}") from None
        if done.returncode:
            raise NoSandbox(f"bwrap does not work on this machine: {done.stderr.strip()[:300]}")
        return sandbox

    def wrap(
        self, argv: Iterable[str], cwd: str, env: Mapping[str, str], network: bool
    ) -> tuple[str, ...]:
        """The task's variables are set inside: outside, they could make bwrap itself misbehave."""
        words = [*self._first, "--clearenv"]
        for name, value in env.items():
            words += ["--setenv", name, value]
        # so that files in /tmp and /dev/shm are counted like those in the task's directory
        for place, name in PLACES.items():
            words += ["--bind", f"{cwd}/{name}", place] if cwd else ["--tmpfs", place]
        words += self._then
        if network:
            resolver = "/run/systemd/resolve"
            words += ["--share-net", "--ro-bind-try", resolver, resolver]
        if cwd:
            words += ["--bind", cwd, cwd, "--chdir", cwd]
        for place in self._closed:  # files in memory, which nothing would count
            words += ["--remount-ro", place]
        return (*words, "--", *argv)


def _readable() -> list[str]:
    """The system, this Python with its packages, and Valence's packages that run a call."""
    paths = dict.fromkeys(_SYSTEM)  # in order
    paths.update(dict.fromkeys(f"/etc/{name}" for name in _ETC))
    for path in (sys.prefix, sys.base_prefix, *_packages()):
        real = os.path.realpath(path)
        inside = any(real == top or real.startswith(top + "/") for top in paths)
        if not inside and os.path.isdir(real):
            paths[real] = None
    return list(paths)


def _packages() -> list[str]:
    """In a checkout the packages are beside each other, in an installation all are in one."""
    root = Path(module_path())
    installed = (root / "valence" / "peer").exists()
    return [str(root / name) for name in (_PACKAGES[:1] if installed else _PACKAGES)]


def module_path() -> str:
    """The directory in which Python finds Valence's packages inside the sandbox."""
    return str(Path(os.path.realpath(valence.__file__)).parents[1])
