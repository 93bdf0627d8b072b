"""The daemon's side of the nursery: starts commands, runs calls in warm workers, ends either."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgpack

from valence.protocols.ports import NurseryGone, Reply

from . import nursery
from .nursery import LENGTH
from .removal import remove_tree

log = logging.getLogger("valence.processes")

TERM_GRACE_S = 2.0
RESTART_S = 1.0
REPLY_BYTES_MAX = 64 * 2**20
IDLE_WORKERS_MAX = 64
VALUE_BYTES_MAX = 64 * 1024
PLACE_KEPT_S = 5.0
WORK = "work"  # directory of all tasks, below the peer's own


class StartFailed(Exception):
    """The program could not be started: the task's fault."""


@dataclass(frozen=True, slots=True)
class Exit:
    code: int
    log_truncated: bool
    max_rss_bytes: int
    log: bytes | None  # None: it is long, and in its file
    removed: bool  # the directory that was made for the command is removed again


class Usage(NamedTuple):
    """What a process uses, with all processes that it has started."""

    memory_bytes: int = 0
    processes: int = 0
    nameless_bytes: int = 0  # on disk, in open files whose names are removed


OnReply = Callable[[Reply], None]
_PACKER = msgpack.Packer()  # (a new one, as for `packb`, allocates much more than it needs)


class LocalWorker(asyncio.Protocol):
    """One warm process, used by one call at a time; its answer comes by a callback."""

    def __init__(self, child_id: int, pid: int, owner: str, place: str) -> None:
        self.id = child_id
        self.pid = pid
        self.owner = owner
        self.place = place  # directory for large values
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._on_reply: OnReply | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=REPLY_BYTES_MAX)

    def send(self, request: Mapping[str, Any], on_reply: OnReply) -> None:
        self._on_reply = on_reply
        packed = _PACKER.pack(request)
        if self._transport is None or self._transport.is_closing():
            asyncio.get_running_loop().call_soon(self._done, None)
        else:
            self._transport.write(LENGTH.pack(len(packed)) + packed)

    async def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.send(request, lambda reply: _set(future, reply))
        reply = await future
        if reply is None:
            raise EOFError("the worker ended")
        return reply

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) < LENGTH.size:
            return
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > REPLY_BYTES_MAX:
            self.close()
        elif len(self._buffer) >= LENGTH.size + length:
            packed = bytes(self._buffer[LENGTH.size : LENGTH.size + length])
            self._buffer.clear()  # one call at a time: nothing can follow an answer
            self._done(read_reply(packed))

    def connection_lost(self, error: Exception | None) -> None:
        self._done(None)

    def _done(self, reply: Reply) -> None:
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            on_reply(reply)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def read_reply(packed: bytes) -> dict[str, Any]:
    """Check a worker's reply: the worker runs the user's code, which may send anything. An invalid
    reply fails the call, and the call is not retried."""
    try:
        # flat and with few keys: a few bytes must not become a heap of objects
        reply = msgpack.unpackb(packed, max_array_len=0, max_map_len=16, max_ext_len=0)
    except (ValueError, msgpack.UnpackException):
        return _lie("it can't be decoded")
    if not isinstance(reply, dict) or not isinstance(reply.get("ok"), bool):
        return _lie("it does not say whether the call succeeded")
    for key, value in reply.items():
        kind = _REPLY.get(key, object)
        if not isinstance(value, kind):
            return _lie(f"`{key}` is not of type {kind.__name__}")
    if reply["ok"] and not reply.get("path"):
        problem = _value_problem(reply.get("encoding"), reply.get("data", b""))
        if problem:
            return _lie(problem)
    return reply


def _value_problem(encoding: object, data: bytes) -> str:
    if encoding not in ("json", "pickle"):
        return "the value is neither JSON nor a pickle"
    if len(data) > VALUE_BYTES_MAX:
        return "the value is too large to be part of a reply"
    if encoding == "json" and not _is_json(data):
        return "the value is not valid JSON"
    return ""


_SIMPLE = re.compile(rb"-?[1-9]\d{0,17}|0|true|false|null")

_REPLY: dict[str, type] = {
    "encoding": str,
    "data": bytes,
    "path": str,
    "log": bytes,
    "error": str,
    "truncated": bool,
    "stale": bool,
}


def _is_json(data: bytes) -> bool:
    if _SIMPLE.fullmatch(data):
        return True
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _lie(problem: str) -> dict[str, Any]:
    return {"ok": False, "error": f"invalid reply from the call's worker: {problem}", "lie": True}


class LocalProcesses:
    def __init__(
        self,
        channel: socket.socket,
        directory: Path,
        users: Callable[[str], tuple[int, int]] = lambda owner: (-1, -1),
    ) -> None:
        self._users = users
        self.spawned = 0
        self.losses = 0  # of the nursery itself
        self._directory = directory
        self._ids = itertools.count(1)
        self._exits: dict[int, asyncio.Future[Exit]] = {}
        self._workers: dict[int, asyncio.Future[tuple[int, socket.socket]]] = {}
        self._usages: dict[int, asyncio.Future[Usage]] = {}
        self._places: dict[int, Path] = {}  # of workers: a directory each, removed with its worker
        self._idle: list[LocalWorker] = []  # the most recently used worker is last
        self._alive: set[int] = set()
        self._closing = False
        self._attach(channel)

    def _attach(self, channel: socket.socket) -> None:
        self._channel = channel
        channel.setblocking(False)
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._orders = bytearray()  # earlier orders were for a nursery that is gone
        self._flushing = False
        asyncio.get_running_loop().add_reader(channel.fileno(), self._readable)

    def _tell(self, *row: Any) -> None:
        """Orders of one round of the loop are sent together."""
        packed = msgpack.packb(row)
        self._orders += LENGTH.pack(len(packed)) + packed
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._channel.fileno() < 0:
            return
        loop = asyncio.get_running_loop()
        try:
            del self._orders[: self._channel.send(self._orders)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._orders.clear()  # the nursery is gone; the reader handles that
        if self._orders:
            loop.add_writer(self._channel.fileno(), self._flush)
        else:
            loop.remove_writer(self._channel.fileno())
            self._flushing = False

    # ----------------------------------------------------------------- events

    def _readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, 1 << 18, 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._lost()
            return
        self._fds.extend(fds)
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if len(self._buffer) < LENGTH.size + length:
                return
            row = msgpack.unpackb(bytes(self._buffer[LENGTH.size : LENGTH.size + length]))
            del self._buffer[: LENGTH.size + length]
            self._event(row)

    def _event(self, row: list[Any]) -> None:
        kind, child_id = row[0], row[1]
        if kind == "exited":
            self._alive.discard(child_id)
            self._forget_place(child_id)
            self._idle = [w for w in self._idle if w.id != child_id or w.close()]  # type: ignore[func-returns-value]
            _set(self._exits.pop(child_id, None), Exit(*row[2:]))
        elif kind == "failed":
            _fail(self._exits.pop(child_id, None), StartFailed(row[2]))
            _fail(self._workers.pop(child_id, None), NurseryGone(row[2]))
            self._forget_place(child_id)
        elif kind == "worker":
            self._alive.add(child_id)
            channel = socket.socket(fileno=self._fds.pop(0))
            future = self._workers.pop(child_id, None)
            if future is None or future.done():
                channel.close()
                self._tell("kill", child_id, int(signal.SIGKILL))
            else:
                future.set_result((row[2], channel))
        elif kind == "usage":
            _set(self._usages.pop(child_id, None), Usage(*row[2:]))

    def _forget_place(self, child_id: int) -> None:
        """Remove a worker's directory, but not yet: its last value may still be being copied."""
        place = self._places.pop(child_id, None)
        if place is not None:
            loop = asyncio.get_running_loop()
            later = functools.partial(loop.run_in_executor, None, remove_tree, place)
            loop.call_later(PLACE_KEPT_S, later)

    def _detach(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._channel.fileno())
        loop.remove_writer(self._channel.fileno())
        self._channel.close()

    def _lost(self) -> None:
        """The nursery was killed: end its children, and start another one."""
        self.losses += 1
        self._detach()
        waiting: list[asyncio.Future[Any]] = [
            *self._exits.values(),
            *self._workers.values(),
            *self._usages.values(),
        ]
        for futures in (self._exits, self._workers, self._usages):
            futures.clear()
        for future in waiting:
            _fail(future, NurseryGone())
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        self._alive.clear()
        for child_id in list(self._places):
            self._forget_place(child_id)
        self._orders.clear()
        self._flushing = False
        # its children are this process's children now (see `adopt_orphans`): end them
        for pid in nursery.descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._start_another()

    def _start_another(self) -> None:
        """This process has threads by now, so the new nursery is a new program, not a fork."""
        if self._closing:
            return
        try:
            channel, _ = nursery.launch()
        except OSError:  # out of processes or files: orders wait meanwhile
            log.exception("can't restart the process nursery, trying again in %g s", RESTART_S)
            asyncio.get_running_loop().call_later(RESTART_S, self._start_another)
            return
        orders = bytes(self._orders)
        self._attach(channel)
        if orders:
            self._orders += orders
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    # ----------------------------------------------------------------- commands

    def spawn(
        self,
        argv: tuple[str, ...],
        cwd: str,
        new: bool,
        env: Mapping[str, str],
        log: str,
        log_bytes_max: int,
        file_bytes_max: int,
        owner: str = "",
    ) -> tuple[int, asyncio.Future[Exit]]:
        """`new`: the nursery makes the directory, and removes it if it is empty at the end."""
        child_id = next(self._ids)
        future: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._exits[child_id] = future
        self.spawned += 1
        limits = (log_bytes_max, file_bytes_max)
        self._tell("spawn", child_id, argv, cwd, new, env, log, *limits, *self.user_of(owner))
        return child_id, future

    def user_of(self, owner: str) -> tuple[int, int]:
        """The user and group as which a task of this owner runs; -1: the peer's own."""
        return self._users(owner)

    async def end(self, child_id: int, exited: asyncio.Future[Exit]) -> None:
        """End the whole process tree: first SIGTERM, then SIGKILL."""
        self._tell("kill", child_id, int(signal.SIGTERM))
        await asyncio.wait([exited], timeout=TERM_GRACE_S)
        if not exited.done():
            self._tell("kill", child_id, int(signal.SIGKILL))
            await asyncio.wait([exited], timeout=TERM_GRACE_S)

    async def usage(self, child_id: int) -> Usage:
        future: asyncio.Future[Usage] = asyncio.get_running_loop().create_future()
        self._usages[child_id] = future
        self._tell("usage", child_id)
        return await future

    # ----------------------------------------------------------------- workers

    def idle_worker(self, owner: str) -> LocalWorker | None:
        """A worker that has only run this owner's code: a call may change its process for good."""
        for index in range(len(self._idle) - 1, -1, -1):
            if self._idle[index].owner == owner:
                worker = self._idle.pop(index)
                if worker.id in self._alive:
                    return worker
                worker.close()
        return None

    async def worker(self, owner: str) -> LocalWorker:
        idle = self.idle_worker(owner)
        if idle is not None:
            return idle
        child_id = next(self._ids)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[int, socket.socket]] = loop.create_future()
        self._workers[child_id] = future
        log = str(self._directory / f"worker-{child_id}.log")
        place = self._directory / WORK / f"worker-{secrets.token_hex(8)}"
        place.parent.mkdir(mode=0o711, exist_ok=True)
        self._places[child_id] = place
        self._tell("worker", child_id, log, str(place), sys.path, *self.user_of(owner))
        pid, channel = await future
        worker = LocalWorker(child_id, pid, owner, str(place))
        await loop.create_unix_connection(lambda: worker, sock=channel)
        return worker

    def give_back(self, worker: LocalWorker) -> None:
        if worker.id not in self._alive:
            self.discard(worker)
            return
        self._idle.append(worker)
        if len(self._idle) > IDLE_WORKERS_MAX:
            self.discard(self._idle.pop(0))  # the least recently used worker

    def discard(self, worker: LocalWorker) -> None:
        """End a worker, if it has not crashed already; the next call gets a new one."""
        self._tell("kill", worker.id, int(signal.SIGKILL))
        worker.close()

    async def close(self) -> None:
        """Closing the channel ends the nursery, and with it all processes that it started."""
        self._closing = True
        for worker in self._idle:
            worker.close()
        self._detach()
        for fd in self._fds:
            socket.close(fd)


def _set(future: asyncio.Future[Any] | None, value: Any) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any] | None, error: Exception) -> None:
    if future is not None and not future.done():
        future.set_exception(error)
        future.exception()  # marked as retrieved: the waiting task may be gone
