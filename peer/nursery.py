"""The nursery: a small process beside each peer that starts, watches and ends task processes.

Why a process of its own: spawning from a large, threaded daemon is slow and blocks its loop; and
when the daemon is killed, its end of the socket closes, and the nursery kills every task it
started and goes: no orphan outlives a peer. It is forked before the daemon has threads, and is the
parent and (Linux) the reaper of everything that tasks leave behind.

Daemon → nursery:  ["spawn", id, argv, cwd, env, log path, log bytes max, file bytes max, marker]
                   ["kill", id, signal]   ["worker", id, log path]   ["usage", id]
Nursery → daemon:  ["exited", id, code, log truncated, max rss]   ["failed", id, why]
                   ["worker", id, pid] with the worker's socket attached
                   ["usage", id, rss bytes]
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import msgpack

LENGTH = struct.Struct("!I")
MARKER = "VALENCE_ATTEMPT"
OPEN_FILES_MAX = 4096
WORKER_FILE_BYTES_MAX = 64 * 2**30
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PDEATHSIG = 1


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere we do without."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """In the daemon: should its nursery be killed, the tasks become the daemon's to end."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(slots=True)
class _Child:
    id: int
    pid: int
    pidfd: int
    marker: str
    pipe: int = -1
    log: int = -1
    log_left: int = 0  # of the first half, which goes to the file as it comes
    tail_max: int = 0
    tail: bytearray = field(default_factory=bytearray)  # of the rest, the last half
    left_out: int = 0
    truncated: bool = False
    code: int | None = None
    rss: int = 0


class Nursery:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._buffer = bytearray()

    def run(self) -> None:
        # deaf by handlers, not by SIG_IGN: what is ignored stays ignored in every child
        signal.signal(signal.SIGINT, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for name in [n for n in os.environ if n.startswith("VALENCE_")]:
            del os.environ[name]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            limit = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(OPEN_FILES_MAX, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        self._channel.setblocking(True)
        self._selector.register(self._channel, selectors.EVENT_READ, self._commanded)
        try:
            while True:
                for key, _ in self._selector.select():
                    key.data()
        except EOFError:
            pass  # the daemon is gone
        finally:
            for child in list(self._children.values()):
                self._kill(child, signal.SIGKILL)
            self._sweep(everything=True)

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
        try:
            if fd is not None:
                data = data[socket.send_fds(self._channel, [data], [fd]) :]
            if data:
                self._channel.sendall(data)
        except OSError:
            raise EOFError from None

    def _on_spawn(
        self,
        id: int,
        argv: list[str],
        cwd: str,
        env: dict[str, str],
        log_path: str,
        log_bytes_max: int,
        file_bytes_max: int,
        marker: str,
    ) -> None:
        opened: list[int] = []
        try:
            read, write = os.pipe()
            opened += [read, write]
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            opened.append(log)
            with _limited(file_bytes_max):
                process = subprocess.Popen(
                    argv,
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=write,
                    stderr=write,
                    start_new_session=True,
                )
            process.returncode = 0  # it is waited for here, not by subprocess
            pidfd = os.pidfd_open(process.pid)
        except (OSError, ValueError) as error:
            for fd in opened:
                os.close(fd)
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._tell("failed", id, f"{argv[0]}: {reason}")
            return
        os.close(write)
        child = _Child(id, process.pid, pidfd, marker)
        child.pipe, child.log = read, log
        child.tail_max = log_bytes_max // 2
        child.log_left = log_bytes_max - child.tail_max
        self._watch(child)
        os.set_blocking(read, False)
        self._selector.register(read, selectors.EVENT_READ, lambda: self._output(child))

    def _watch(self, child: _Child) -> None:
        self._children[child.id] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._ended(child))

    def _on_kill(self, id: int, number: int) -> None:
        child = self._children.get(id)
        if child is not None:
            self._kill(child, number)

    def _on_usage(self, id: int) -> None:
        child = self._children.get(id)
        self._tell("usage", id, 0 if child is None else tree_rss_bytes(child.pid))

    def _on_worker(self, id: int, log_path: str, parent_path: list[str]) -> None:
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._tell("failed", id, f"a worker can't be started: {error.strerror}")
            return
        marker = f"worker-{os.getpid()}-{id}"
        with ours, theirs:
            pid = os.fork()
            if pid == 0:
                ours.close()
                _become_worker(theirs, log_path, parent_path, marker)
            self._watch(_Child(id, pid, os.pidfd_open(pid), marker))
            self._tell("worker", id, pid, fd=ours.fileno())

    # ----------------------------------------------------------------- events

    def _output(self, child: _Child) -> None:
        if child.pipe < 0:
            return  # it ended in the same round of events
        try:
            data = os.read(child.pipe, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._close_pipe(child)
            return
        head, rest = data[: child.log_left], data[child.log_left :]
        child.log_left -= len(head)
        self._write_log(child, head)
        if rest:
            child.tail += rest
            surplus = len(child.tail) - child.tail_max
            if surplus > 0:  # the beginning says what it was about, the end how it ended
                child.left_out += surplus
                del child.tail[:surplus]

    def _write_log(self, child: _Child, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(child.log, data) :]
            except OSError:  # a full disk must not end the task
                child.truncated = True
                return

    def _close_pipe(self, child: _Child) -> None:
        if child.pipe >= 0:
            if child.left_out:
                child.truncated = True
                self._write_log(child, f"\n[… {child.left_out:,} bytes left out …]\n".encode())
            self._write_log(child, bytes(child.tail))
            self._selector.unregister(child.pipe)
            os.close(child.pipe)
            os.close(child.log)
            child.pipe = child.log = -1

    def _ended(self, child: _Child) -> None:
        _, status, usage = os.wait4(child.pid, 0)
        child.code = os.waitstatus_to_exitcode(status)
        child.rss = usage.ru_maxrss * 1024
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        if child.pipe >= 0:
            self._drain(child)
        self._kill(child, signal.SIGKILL)  # what it left running in its group
        self._close_pipe(child)
        del self._children[child.id]
        self._sweep(child.marker)
        self._tell("exited", child.id, child.code, child.truncated, child.rss)

    def _drain(self, child: _Child) -> None:
        """What it wrote before it ended; a background child may hold the pipe open for ever."""
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
        except OSError:  # no group any more, or a process of another user in it
            if child.code is None:
                with contextlib.suppress(OSError):
                    os.kill(child.pid, number)

    def _sweep(self, marker: str = "", everything: bool = False) -> None:
        """End what fled from its group into a session of its own: it became our child."""
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
    found = children_of(pid)
    for child in found:  # grows while it is walked
        found.extend(children_of(child))
    return found


def tree_rss_bytes(pid: int) -> int:
    total = 0
    for member in (pid, *descendants(pid)):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{member}/statm") as file:
            total += int(file.read().split()[1])
    return total * resource.getpagesize()


@contextlib.contextmanager
def _limited(file_bytes_max: int) -> Any:
    """A child inherits the limits its parent has at that moment, from its first instruction on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = file_bytes_max
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _become_worker(channel: socket.socket, log_path: str, path: list[str], marker: str) -> None:
    """In the fork: keep only the channel, and never return."""
    code = 1
    try:
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # not for the call's own children: while one had it open, a crash would not be seen
        kept = os.dup2(channel.fileno(), 3, inheritable=False) if channel.fileno() != 3 else 3
        os.environ[MARKER] = marker
        resource.setrlimit(resource.RLIMIT_FSIZE, (WORKER_FILE_BYTES_MAX,) * 2)
        os.closerange(4, OPEN_FILES_MAX)
        from .worker import serve

        serve(socket.socket(fileno=kept), log_path, path)
        code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            print(f"worker: {error!r}", file=sys.stderr)
    finally:
        os._exit(code)


def start() -> tuple[socket.socket, int]:
    """Fork a nursery: the daemon's end of the channel, and the pid."""
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


if __name__ == "__main__":
    Nursery(socket.socket(fileno=int(sys.argv[1]))).run()
