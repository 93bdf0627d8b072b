"""The nursery: a small process beside each peer that starts, watches and ends task processes.

It is a process of its own because spawning from a large, threaded daemon is slow and blocks the
daemon's loop, and because no orphan may outlive a peer: when the daemon is killed, its end of the
socket closes, and the nursery kills every task it has started and ends. It starts before the daemon
has threads, and is the parent and (on Linux) the reaper of all processes that tasks leave behind.
Workers are forks of it, and run their owner's code. So where tasks have a user of their own, the
nursery is a separate program, with nothing in its memory or variables that tasks must not see.

Daemon → nursery:  ["spawn", id, argv, cwd, new, env, log path, log bytes max, file bytes max,
                    user, group]
                   ["kill", id, signal]   ["worker", id, log path, place, sys.path, user, group]
                   ["usage", id]
Nursery → daemon:  ["exited", id, code, log truncated, max rss, log or nil, removed]
                   ["failed", id, why]
                   ["worker", id, pid] with the worker's socket attached
                   ["usage", id, rss bytes, processes, bytes in files without a name]

To start a process as another user (-1: as the daemon's own), if the daemon is root, the nursery
becomes that user for the moment of the spawn and keeps root as its saved id to come back. The new
process can't come back, as `exec` sets its saved id anew.

Starting a command is the hot path of a peer: `posix_spawn`, a pidfd and a pipe in one epoll, and
no file. A `new` directory is made here, and removed here if it is still empty at the end; a log is
sent with the exit unless it is long. Messages to the daemon are sent once per round of events.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

import valence

LENGTH = struct.Struct("!I")
MARKER = "VALENCE_ATTEMPT"
OPEN_FILES_MAX = 4096
WORKER_FILE_BYTES_MAX = 64 * 2**30
#: a log up to this length is sent with the exit, and never written to a file
LOG_INLINE_BYTES_MAX = 16 * 1024
PROGRAMS_REMEMBERED = 1000
USER_PROCESSES_MAX = 2000  # of one owner on this machine, where each owner has its own user
_SIGNALS_IGNORED_BY_PYTHON = [signal.SIGPIPE, signal.SIGXFSZ]
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1


def prctl(option: int, value: int) -> None:
    """On Linux only; without any effect elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """In the daemon: if its nursery is killed, the tasks become the daemon's children to end."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(slots=True)
class _Child:
    id: int
    pid: int
    pidfd: int
    marker: str
    cwd: str = ""  # to be removed at the end, if it is empty
    pipe: int = -1
    log_path: str = ""
    log: int = -1
    held: bytearray = field(default_factory=bytearray)  # a short log, before it gets a file
    log_left: int = 0  # free bytes of the first half, which is written to the file as it comes
    tail_max: int = 0
    tail: bytearray = field(default_factory=bytearray)  # the last half: the end of the rest
    left_out: int = 0
    truncated: bool = False
    code: int | None = None


class Nursery:
    """The nursery's own loop: orders from the daemon, output and exits of its children."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._children: dict[int, _Child] = {}
        self._buffer = bytearray()
        self._news = bytearray()
        self._programs: dict[tuple[str, str], str] = {}
        self._file_bytes_max = -1

    def run(self) -> None:
        # ignored by handlers, not by SIG_IGN, which every child would inherit
        signal.signal(signal.SIGINT, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for name in os.environ.keys() - harmless(os.environ).keys():
            del os.environ[name]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            limit = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(OPEN_FILES_MAX, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        self._channel.setblocking(True)
        self._listen(self._channel.fileno(), self._commanded)
        try:
            while True:
                for fd, _ in self._epoll.poll():
                    callback = self._callbacks.get(fd)
                    if callback is not None:  # else it was closed in this same round
                        callback()
                self._flush()
        except EOFError:
            pass  # the daemon has ended
        finally:
            for child in list(self._children.values()):
                self._kill(child, signal.SIGKILL)
            self._sweep(everything=True)

    def _listen(self, fd: int, callback: Callable[[], None]) -> None:
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def _close(self, fd: int) -> None:
        """Closing also takes it out of the epoll, as no other process has it open."""
        del self._callbacks[fd]
        os.close(fd)

    # ----------------------------------------------------------------- commands

    def _commanded(self) -> None:
        try:
            data = self._channel.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if len(self._buffer) < LENGTH.size + length:
                return
            row = msgpack.unpackb(bytes(self._buffer[LENGTH.size : LENGTH.size + length]))
            del self._buffer[: LENGTH.size + length]
            getattr(self, "_on_" + row[0])(*row[1:])

    def _tell(self, *row: Any, fd: int | None = None) -> None:
        packed = msgpack.packb(row)
        data = LENGTH.pack(len(packed)) + packed
        if fd is None:
            self._news += data
            return
        self._flush()
        try:
            self._channel.sendall(data[socket.send_fds(self._channel, [data], [fd]) :])
        except OSError:
            raise EOFError from None

    def _flush(self) -> None:
        if self._news:
            try:
                self._channel.sendall(self._news)
            except OSError:
                raise EOFError from None
            self._news.clear()

    def _on_spawn(
        self,
        child_id: int,
        argv: list[str],
        cwd: str,
        new: bool,
        env: dict[str, str],
        log_path: str,
        log_bytes_max: int,
        file_bytes_max: int,
        user: int,
        group: int,
    ) -> None:
        opened: list[int] = []
        try:
            program = self._program(argv[0], env.get("PATH", ""), cwd)
            if new:
                os.mkdir(cwd, 0o700)
                if user >= 0:
                    os.chown(cwd, user, group)
            read, write = os.pipe()
            opened += [read, write]
            self._limit(file_bytes_max)
            os.chdir(cwd)  # this process has one thread, and needs no directory of its own
            with _acting_as(user, group):
                pid = os.posix_spawn(
                    program,
                    argv,
                    env,
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, write, 1),
                        (os.POSIX_SPAWN_DUP2, write, 2),
                    ],
                    setsid=True,
                    setsigmask=[],
                    setsigdef=_SIGNALS_IGNORED_BY_PYTHON,
                )
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError) as error:
            for fd in opened:
                os.close(fd)
            self._programs.pop((argv[0], env.get("PATH", "")), None)
            if new:
                with contextlib.suppress(OSError):
                    os.rmdir(cwd)
            reason = (error.strerror or "").lower() if isinstance(error, OSError) else str(error)
            self._tell("failed", child_id, f"{argv[0]}: {reason}")
            return
        os.close(write)
        child = _Child(child_id, pid, pidfd, env.get(MARKER, ""), cwd if new else "")
        child.pipe, child.log_path = read, log_path
        child.tail_max = log_bytes_max // 2
        child.log_left = log_bytes_max - child.tail_max
        self._watch(child)
        os.set_blocking(read, False)
        self._listen(read, lambda: self._output(child))

    def _program(self, name: str, path: str, cwd: str) -> str:
        """Find it as a shell does: a name in the task's PATH, anything with a slash as it is."""
        if "/" in name:
            return name if name.startswith("/") else os.path.join(cwd, name)
        program = self._programs.get((name, path))
        if program is None:
            entries = [os.path.join(cwd, entry) for entry in path.split(":")]
            program = shutil.which(name, path=":".join(entries))
            if program is None:
                raise FileNotFoundError(errno.ENOENT, "command not found", name)
            if entries != path.split(":"):
                return program  # it may be in the task's own directory: not to be remembered
            if len(self._programs) >= PROGRAMS_REMEMBERED:
                self._programs.clear()
            self._programs[(name, path)] = program
        return program

    def _limit(self, file_bytes_max: int) -> None:
        """Set this process's own limit: a child inherits it, and so has it from its first line."""
        if file_bytes_max != self._file_bytes_max:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            limit = file_bytes_max if hard == resource.RLIM_INFINITY else min(file_bytes_max, hard)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            self._file_bytes_max = file_bytes_max

    def _watch(self, child: _Child) -> None:
        self._children[child.id] = child
        self._listen(child.pidfd, lambda: self._ended(child))

    def _on_kill(self, child_id: int, number: int) -> None:
        child = self._children.get(child_id)
        if child is not None:
            self._kill(child, number)

    def _on_usage(self, child_id: int) -> None:
        child = self._children.get(child_id)
        self._tell("usage", child_id, *((0, 0, 0) if child is None else self._usage(child)))

    def _usage(self, child: _Child) -> tuple[int, int, int]:
        """Of a child and all it has started, also of those that left it for their own session."""
        known = {c.pid for c in self._children.values()}
        fled = [p for p in children_of(os.getpid()) if p not in known and _marked(p, child.marker)]
        return usage_of([child.pid, *fled])

    def _on_worker(
        self,
        child_id: int,
        log_path: str,
        place: str,
        parent_path: list[str],
        user: int,
        group: int,
    ) -> None:
        try:
            os.mkdir(place, 0o700)
            if user >= 0:
                os.chown(place, user, group)
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._no_worker(child_id, error)
            return
        marker = f"worker-{os.getpid()}-{child_id}"
        with ours, theirs:
            try:
                pid = os.fork()
                if pid == 0:
                    ours.close()
                    _become_worker(theirs, log_path, parent_path, marker, user, group)
                pidfd = os.pidfd_open(pid)
            except OSError as error:  # out of processes or files: a child sees its channel close
                self._no_worker(child_id, error)
                return
            self._watch(_Child(child_id, pid, pidfd, marker))
            self._tell("worker", child_id, pid, fd=ours.fileno())

    def _no_worker(self, child_id: int, error: OSError) -> None:
        reason = (error.strerror or str(error)).lower()
        self._tell("failed", child_id, f"this peer can't start a worker process: {reason}")

    # ----------------------------------------------------------------- events

    def _output(self, child: _Child) -> None:
        if child.pipe < 0:
            return  # the child ended in this same round of events
        try:
            data = os.read(child.pipe, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._close_pipe(child)
            return
        head, rest = data[: child.log_left], data[child.log_left :]
        child.log_left -= len(head)
        if child.log < 0 and len(child.held) + len(data) > LOG_INLINE_BYTES_MAX:
            self._open_log(child)
        if child.log < 0:
            child.held += head
        else:
            self._write_log(child, head)
        if rest:
            child.tail += rest
            surplus = len(child.tail) - child.tail_max
            if surplus > 0:  # the beginning shows what was run, the end how it ended
                child.left_out += surplus
                del child.tail[:surplus]

    def _open_log(self, child: _Child) -> None:
        try:
            # only a new file is opened, never one that a task may have put there, such as a pipe
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            child.log = os.open(child.log_path, flags, 0o600)
        except OSError:
            child.truncated = True
            child.log = os.open(os.devnull, os.O_WRONLY)
        self._write_log(child, bytes(child.held))
        child.held.clear()

    def _write_log(self, child: _Child, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(child.log, data) :]
            except OSError:  # a full disk must not end the task
                child.truncated = True
                return

    def _close_pipe(self, child: _Child) -> None:
        if child.pipe < 0:
            return
        end = b""
        if child.left_out:
            child.truncated = True
            end = f"\n[… {child.left_out:,} bytes left out …]\n".encode()
        end += child.tail
        if child.log >= 0:
            self._write_log(child, end)
            os.close(child.log)
        else:
            child.held += end
        self._close(child.pipe)
        child.pipe = -1

    def _ended(self, child: _Child) -> None:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if not pid:
            return  # the event was for an earlier descriptor with this number
        child.code = os.waitstatus_to_exitcode(status)
        self._close(child.pidfd)
        if child.pipe >= 0:
            self._drain(child)
        self._kill(child, signal.SIGKILL)  # processes that it left running in its group
        self._close_pipe(child)
        del self._children[child.id]
        self._sweep(child.marker)
        removed = False
        if child.cwd:
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(child.cwd)
                removed = True
        log = bytes(child.held) if child.log < 0 else None
        rss = usage.ru_maxrss * 1024
        self._tell("exited", child.id, child.code, child.truncated, rss, log, removed)

    def _drain(self, child: _Child) -> None:
        """Read what it wrote before it ended, and no more: a background process may keep the pipe
        open for ever."""
        for _ in range(64):
            if child.pipe < 0:
                return
            before = (child.log_left, len(child.tail), child.left_out)
            self._output(child)
            if before == (child.log_left, len(child.tail), child.left_out):
                return

    def _kill(self, child: _Child, number: int) -> None:
        try:
            os.killpg(child.pid, number)
        except OSError:  # the group is gone, or has a process of another user
            if child.code is None:
                with contextlib.suppress(OSError):
                    os.kill(child.pid, number)

    def _sweep(self, marker: str = "", everything: bool = False) -> None:
        """Kill processes that left their group for a session of their own: they became children of
        this process."""
        known = {child.pid for child in self._children.values()}
        for pid in children_of(os.getpid()):
            if pid in known and not everything:
                continue
            with contextlib.suppress(OSError):
                if everything or _marked(pid, marker):
                    for victim in (*descendants(pid), pid):
                        with contextlib.suppress(OSError):
                            os.kill(victim, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)


def _marked(pid: int, marker: str) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return f"{MARKER}={marker}".encode() in file.read().split(b"\0")
    return False


def children_of(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    pids = children_of(pid)
    for child in pids:  # the list grows while it is walked
        pids.extend(children_of(child))
    return pids


def usage_of(roots: list[int]) -> tuple[int, int, int]:
    """Bytes of memory, number of processes, and bytes in open files whose names are removed, of
    these processes and all their descendants."""
    total = 0
    members = [member for root in roots for member in (root, *descendants(root))]
    nameless: dict[tuple[int, int], int] = {}
    for member in members:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{member}/statm") as file:
            total += int(file.read().split()[1])
        with contextlib.suppress(OSError):
            _find_nameless(member, nameless)
    return total * resource.getpagesize(), len(members), sum(nameless.values())


def _find_nameless(pid: int, nameless: dict[tuple[int, int], int]) -> None:
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in itertools.islice(entries, OPEN_FILES_MAX):
            with contextlib.suppress(OSError):
                status = os.stat(entry.path)
                if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                    nameless[status.st_dev, status.st_ino] = status.st_blocks * 512


@contextlib.contextmanager
def _acting_as(user: int, group: int) -> Iterator[None]:
    """Processes that are started meanwhile have this user, and no way back to root."""
    if user < 0:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    os.setgroups([])
    os.setresgid(group, group, 0)
    resource.setrlimit(resource.RLIMIT_NPROC, (USER_PROCESSES_MAX, before[1]))
    os.setresuid(user, user, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        resource.setrlimit(resource.RLIMIT_NPROC, before)


def _become_worker(
    channel: socket.socket, log_path: str, path: list[str], marker: str, user: int, group: int
) -> None:
    """In the fork: keep nothing open but the channel, and never return."""
    code = 1
    try:
        os.setsid()
        log = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        os.unlink(log_path)
        os.dup2(log, 1)
        os.dup2(log, 2)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # not inherited by the call's own children: while one has it open, a crash goes unnoticed
        kept = os.dup2(channel.fileno(), 3, inheritable=False) if channel.fileno() != 3 else 3
        os.environ[MARKER] = marker
        resource.setrlimit(resource.RLIMIT_FSIZE, (WORKER_FILE_BYTES_MAX,) * 2)
        os.closerange(4, OPEN_FILES_MAX)
        from .worker import serve

        if user >= 0:
            limit = (USER_PROCESSES_MAX,) * 2
            resource.setrlimit(resource.RLIMIT_NPROC, limit)
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(user, user, user)
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the change of user has cleared it
        serve(socket.socket(fileno=kept), path)
        code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            print(f"worker: {error!r}", file=sys.stderr)
    finally:
        os._exit(code)


#: variables that may hold a secret: no worker and no process of a task may see them
_SECRET = ("VALENCE_", "AWS_")
_SECRET_PARTS = ("SECRET", "TOKEN", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY")


def harmless(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables except those that may hold a secret."""
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(_SECRET) and not any(p in name.upper() for p in _SECRET_PARTS)
    }


def launch() -> tuple[socket.socket, int]:
    """Start the nursery as a separate program, with nothing of its parent's memory."""
    ours, theirs = socket.socketpair()
    package, module = __name__.rpartition(".")[::2]
    root = Path(valence.__file__).parents[1]
    code = f"import sys; sys.path.append({str(root)!r}); from {package} import {module}; "
    code += f"{module}.serve({theirs.fileno()})"
    with theirs:
        made = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            env=harmless(os.environ),
        )
    made.returncode = 0  # not waited for: its channel shows when it ends
    return ours, made.pid


def start(apart: bool = False) -> tuple[socket.socket, int]:
    """The daemon's end of the channel, and the pid. `apart`: tasks run as other users, who must not
    see the daemon's memory, which a fork would have."""
    if apart:
        return launch()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            os.setsid()
            Nursery(theirs).run()
        finally:
            os._exit(0)
    theirs.close()
    return ours, pid


def serve(fd: int) -> None:
    os.set_inheritable(fd, False)  # tasks must not have it
    Nursery(socket.socket(fileno=fd)).run()
