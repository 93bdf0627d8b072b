"""One attempt, from its inputs to its outputs: a directory, a process, what is left afterwards.

Nothing a task does to its directory can touch anything else: inputs are copies, outputs are taken
only if they are plain files that really lie inside (links are followed and checked, hard links are
copied), and the directory goes when the attempt ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import secrets
import shutil
import stat
import sys
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from valence.protocols.data.transfer import Transfer, Unavailable
from valence.protocols.engine.outcomes import LOOK_S, NO_ROOM, NURSERY_DIED, WORKER_DIED, too_long
from valence.protocols.ports import NurseryGone
from valence.protocols.wire.messages import File, Moved, Value, Work
from valence.workflow.names import file_problem
from valence.workflow.quantities import show_bytes
from valence.workflow.schema import STRICT_SHELL

from .blobs import (
    CHUNK_BYTES,
    BlobError,
    DiskBlobs,
    NeverFits,
    QuotaFull,
    copy_file,
    is_plain,
    open_plain,
)
from .nursery import MARKER
from .processes import (
    REPLY_BYTES_MAX,
    WORK,
    Exit,
    LocalProcesses,
    LocalWorker,
    StartFailed,
    read_reply,
)
from .removal import remove_tree
from .sandbox import PLACES, Sandbox, module_path

log = logging.getLogger("valence.attempt")

LOG_TAIL_CHARS = 4000
NAMES_AT_ONCE = 256
GONE = "gone-"  # so begin the names of directories that are being removed
MISSING_MAX = 1000
LOOK_PART = 20  # a look at its files takes at most a part of the time
SEARCHED = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


#: with less than this left, what fails may fail for lack of it
DISK_FULL_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Of each task, where its document does not say; 0: none."""

    memory_bytes: int = 0
    disk_bytes: int = 2**63
    processes: int = 1000
    files: int = 200_000


class TaskFailed(Exception):
    """The task's own fault, with the reason its user reads."""

    def __init__(self, reason: str, exit_code: int | None = None, cause: str = "") -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.cause = cause


class PeerFailed(Exception):
    """This peer's fault, or nobody's: the attempt is handed back."""


def _names() -> Iterator[str]:
    """That nobody guesses; the system is asked for many at once."""
    while True:
        many = secrets.token_hex(8 * NAMES_AT_ONCE)
        for start in range(0, len(many), 16):
            yield many[start : start + 16]


_NAMES = _names()


class LocalAttempt:
    def __init__(
        self,
        work: Work,
        directory: Path,
        processes: LocalProcesses,
        blobs: DiskBlobs,
        transfer: Transfer,
        log_bytes_max: int,
        sandbox: Sandbox | None,
        limits: Limits,
    ) -> None:
        self._limits = limits
        self.work = work
        self.result: dict[str, object] = {}
        self._name = next(_NAMES)
        self._place = f"{directory}/{self._name}"
        self._processes = processes
        self._blobs = blobs
        self._transfer = transfer
        self._log_bytes_max = log_bytes_max
        self._sandbox = sandbox
        self._left = False  # something of it is on disk
        self._value = ""  # the path of a value, should it be large
        self._nameless_bytes = 0  # see `Usage`

    @property
    def _home(self) -> Path:
        return Path(self._place)

    @property
    def _log(self) -> Path:
        return Path(self._place + ".log")

    @property
    def plain(self) -> bool:
        """A call without files: it needs a worker, and nothing else."""
        work = self.work
        if self._sandbox is not None:
            return False
        if work.call is None or work.inputs or work.outputs or work.needs.capacity.memory_bytes:
            return False
        return not any(v.file for ref in work.references for v in ref.values)

    async def run(self) -> dict[str, object]:
        """What an `Outcome` says of it besides its times; always cleans up."""
        return await self._told(self._run())

    async def take(self, answer: dict[str, Any]) -> dict[str, object]:
        """The same, of a call that a worker has answered."""
        return await self._told(self._taken(answer))

    async def _taken(self, answer: dict[str, Any]) -> dict[str, object]:
        await self._answered(answer)
        return {**self.result, "kind": "ok"}

    async def _told(self, work: Coroutine[Any, Any, dict[str, object]]) -> dict[str, object]:
        try:
            return await work
        except (TaskFailed, BlobError) as error:
            if self._disk_is_full():  # who knows what it could not write; elsewhere it may
                reason = f"this peer's disk is full: {error}"
                return {**self.result, "kind": "returned", "reason": reason[:2000]}
            # what does not fit here, now or ever, may fit elsewhere
            elsewhere = isinstance(error, QuotaFull | Unavailable)
            kind = "returned" if elsewhere else "failed"
            found: dict[str, object] = {"kind": kind, "reason": str(error)[:2000]}
            if isinstance(error, NeverFits):
                found["cause"] = NO_ROOM
            if isinstance(error, TaskFailed):
                found["exit_code"] = error.exit_code
                found["cause"] = error.cause
            return {**self.result, **found}
        except (PeerFailed, NurseryGone) as error:
            reason = str(error) or NURSERY_DIED
            return {**self.result, "kind": "returned", "reason": reason[:2000]}
        except OSError as error:
            reason = f"{error.strerror}: {Path(error.filename).name if error.filename else ''}"
            return {**self.result, "kind": "returned", "reason": reason}
        finally:
            if self._left:
                await asyncio.to_thread(self._clean)

    def _disk_is_full(self) -> bool:
        disk = os.statvfs(self._blobs.directory)
        return disk.f_bavail * disk.f_frsize < DISK_FULL_BYTES

    async def _run(self) -> dict[str, object]:
        work = self.work
        values = [v.file for ref in work.references for v in ref.values if v.file is not None]
        needed = [*work.inputs, *values]
        with self._blobs.pinned([file.hash for file in needed]):
            await self._fetch(needed)
            gone = [file.name for file in needed if file.hash not in self._blobs]
            if gone:
                raise PeerFailed(f"{gone[0]} was evicted before the others had come")
            nested = work.inputs or any("/" in name for name in work.outputs)
            walled = work.call is not None and self._sandbox is not None
            apart = bool(values) and self._processes.user_of(work.owner)[0] >= 0
            if nested or walled or apart or (work.call is not None and work.outputs):
                self._left = True
                await asyncio.to_thread(self._lay_out, self._sources())
            if work.command is not None:
                await self._command(work.command)
            elif walled:
                await self._walled_call()
            else:
                await self._call()
        outputs = await self._collect() if work.outputs else ()
        return {**self.result, "kind": "ok", "outputs": outputs}

    async def _fetch(self, files: list[File]) -> None:
        if not files:
            return
        found = await self._transfer.fetch_all(files)
        self.result["moved"] = found.moved
        gone = [f.hash for f, e in found.errors if isinstance(e, Unavailable) and e.gone]
        if gone:
            self.result["missing"] = tuple(gone[:MISSING_MAX])
        for _, error in found.errors:
            raise error

    def _sources(self) -> list[Path]:
        return [self._blobs.path(file.hash) for file in self.work.inputs]

    def _lay_out(self, sources: list[Path]) -> None:
        self._home.mkdir(mode=0o700)
        for file, source in zip(self.work.inputs, sources, strict=True):
            if file_problem(file.name):
                raise TaskFailed(f"{file.name!r}: {file_problem(file.name)}")
            target = self._home / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_file(source, target)
        for name in self.work.outputs:
            (self._home / name).parent.mkdir(parents=True, exist_ok=True)
        self._hand_over()

    def _hand_over(self) -> None:
        """To the user whom the task runs as, if that is another one. Nothing of the task runs yet:
        all that is there was made here."""
        user, group = self._processes.user_of(self.work.owner)
        if user < 0:
            return
        for path, _, files in os.walk(self._home):
            os.chown(path, user, group)
            for name in files:
                os.chown(os.path.join(path, name), user, group)

    def _environment(self) -> dict[str, str]:
        key = self.work.key
        return {
            "PATH": SEARCHED,
            "HOME": self._place,
            "TMPDIR": self._place,
            "LANG": "C.UTF-8",
            **dict(self.work.env),
            "VALENCE_WORKFLOW": key.workflow,
            "VALENCE_TASK": key.task,
            MARKER: self._name,
        }

    # ----------------------------------------------------------------- commands

    async def _command(self, command: tuple[str, ...]) -> None:
        new = not self._left
        self._left = True
        if command[: len(STRICT_SHELL)] == STRICT_SHELL and not _has_bash():
            command = ("sh", "-eu", "-c", *command[len(STRICT_SHELL) :])  # as strict as it can be
        environment = self._environment()
        if self._sandbox is not None:
            if self.work.call is not None:
                environment["PYTHONPATH"] = module_path()
            if new:
                await asyncio.to_thread(self._home.mkdir, 0o700)
                new = False
            for name in PLACES.values():
                (self._home / name).mkdir(mode=0o700, exist_ok=True)
            await asyncio.to_thread(self._hand_over)
            command = self._sandbox.wrap(command, self._place, environment, self.work.network)
            environment = {"PATH": SEARCHED, MARKER: self._name}
        id, exit = self._processes.spawn(
            command,
            self._place,
            new,
            environment,
            self._place + ".log",
            self._log_bytes_max,
            self._blobs.blob_bytes_max,
            self.work.owner,
        )
        try:
            reason, cause = await self._watch(id, exit)
        except StartFailed as error:
            raise TaskFailed(f"it could not be started: {error}", 127) from None
        except asyncio.CancelledError:
            await self._processes.end(id, exit)
            raise
        ended = exit.result()
        self._left = not (ended.removed and ended.log is not None)
        self.result["max_rss_bytes"] = ended.max_rss_bytes
        self.result["log_truncated"] = ended.log_truncated
        await self._keep_log(ended.log)
        if reason:
            raise TaskFailed(reason, ended.code, cause)
        self.result["exit_code"] = ended.code
        if ended.code < 0:
            raise TaskFailed(f"killed by signal {-ended.code}", ended.code, "signal")
        if ended.code:
            raise TaskFailed(f"exit code {ended.code}", ended.code, "exit")

    async def _watch(self, id: int, exit: asyncio.Future[Exit]) -> tuple[str, str]:
        """Until it ended; why it was made to, in a sentence and in a word, if it was."""
        loop = asyncio.get_running_loop()
        limit_s = self.work.timeout_s
        start = loop.time()
        look_at = start + LOOK_S
        while not exit.done():
            wait_s = LOOK_S if limit_s is None else min(LOOK_S, start + limit_s - loop.time())
            await asyncio.wait([exit], timeout=max(0.0, wait_s))
            if exit.done():
                break
            found = ("", "")
            if limit_s is not None and loop.time() - start >= limit_s:
                found = too_long(self.work), "timeout"
            else:
                found = await self.too_much(id)
                if not found[0] and loop.time() >= look_at:
                    began = loop.time()
                    found = await asyncio.to_thread(self.too_much_on_disk)
                    look_at = loop.time() + max(LOOK_S, LOOK_PART * (loop.time() - began))
            if found[0]:
                await self._processes.end(id, exit)
                await _known(exit)
                return found
        exit.result()
        return "", ""

    @property
    def _memory_bytes_max(self) -> int:
        """As it asked for; if it did not say, what the peer has."""
        return self.work.needs.capacity.memory_bytes or self._limits.memory_bytes

    async def too_much(self, id: int) -> tuple[str, str]:
        """Why the process with this id has to end, in a sentence and in a word, if it has."""
        used, processes, nameless = await self._processes.usage(id)
        if self._memory_bytes_max and used > self._memory_bytes_max:
            asked = self.work.needs.capacity.memory_bytes
            return too_large(used, asked, self._limits.memory_bytes), "memory"
        if processes > self._limits.processes:
            return f"killed: it has {processes:,} processes, {self._limits.processes:,} may be", ""
        if nameless > self._disk_bytes_max:
            return self._wrote_too_much(), ""
        self._nameless_bytes = nameless
        return "", ""

    @property
    def _disk_bytes_max(self) -> int:
        return self.work.needs.capacity.disk_bytes or self._limits.disk_bytes

    def _wrote_too_much(self) -> str:
        return f"killed: it wrote more than {show_bytes(self._disk_bytes_max)}; ask for `disk`"

    def too_much_on_disk(self) -> tuple[str, str]:
        """The same, of what it has on disk."""
        size, files = self._nameless_bytes, 0
        places = [self._place] if self._left else []
        worker_place = os.path.dirname(self._value)
        if worker_place not in ("", self._place):
            places.append(worker_place)
        for place in places:
            try:
                more, there = usage_below(place, self._disk_bytes_max, self._limits.files)
            except Unseen as error:
                return f"killed: {error}", ""
            size, files = size + more, files + there
        if size > self._disk_bytes_max:
            return self._wrote_too_much(), ""
        if files > self._limits.files:
            return f"killed: it left more than {self._limits.files:,} files", ""
        return "", ""

    async def _keep_log(self, held: bytes | None) -> None:
        """The end of it travels with the outcome; all of it, where longer, is a blob."""
        if held is None and not is_plain(self._log):  # the task has put something else there
            self.result["log_truncated"] = True
            return
        if held is None:
            data = await asyncio.to_thread(_tail, self._log)
        elif not held:
            return
        else:
            data = held.decode("utf-8", "replace")
        self.result["log_tail"] = data[-LOG_TAIL_CHARS:]
        if held is None or len(held) > LOG_TAIL_CHARS:
            with contextlib.suppress(BlobError):
                if held is None:
                    hash, size = await self._blobs.adopt(self._log, self.work.key.workflow)
                else:
                    hash, size = await self._blobs.put(held, self.work.key.workflow), len(held)
                self.result["log"] = File(name="log", hash=hash, size=size)

    # ----------------------------------------------------------------- calls

    def request(self, place: str) -> dict[str, Any]:
        """`place`: where a value that is large goes, in a file of a name that nobody guesses."""
        work = self.work
        self._value = f"{place}/{self._name}.value"
        return {
            "call": work.call,
            "arguments": work.arguments,
            "references": [
                [ref.name, ref.many, [self._value_row(v) for v in ref.values]]
                for ref in work.references
            ],
            "cwd": self._place if self._left else "",
            "env": self._environment() if self._left else dict(work.env),
            "workflow": work.key.workflow,
            "value_path": self._value,
            "log_bytes_max": self._log_bytes_max,
        }

    async def _call(self) -> None:
        work = self.work
        worker = await self._processes.worker(work.owner)
        request = self.request(worker.place)
        losses = self._processes.losses
        try:
            if self._processes.user_of(work.owner)[0] >= 0:
                await self._bring_values(request)
            async with asyncio.timeout(work.timeout_s):
                answer = await self._answer(worker, request)
        except BaseException as error:
            self._processes.discard(worker)
            self._left = True  # perhaps a part of its value
            if isinstance(error, TimeoutError):
                raise TaskFailed(too_long(work), cause="timeout") from None
            if isinstance(error, EOFError | OSError):
                if losses != self._processes.losses:
                    raise NurseryGone from None
                raise TaskFailed(WORKER_DIED) from None
            raise
        if answer.get("stale"):  # what it has imported was edited since: by another one, then
            self._processes.discard(worker)
            await self._call()
            return
        self._processes.give_back(worker)
        await self._answered(answer)

    async def _bring_values(self, request: dict[str, Any]) -> None:
        """Those it takes that are files: nothing but its own directory can be read by it."""
        for _, _, values in request["references"]:
            for row in values:
                if row[2]:
                    copy = self._home / f".{Path(row[2]).name}"
                    if not copy.exists():
                        await asyncio.to_thread(copy_file, Path(row[2]), copy)
                    row[2] = str(copy)
        await asyncio.to_thread(self._hand_over)

    async def _walled_call(self) -> None:
        """In a process of its own inside the sandbox, which a warm worker can't enter."""
        request = self.request(self._place)
        await self._bring_values(request)
        (self._home / ".request").write_bytes(msgpack.packb(request))
        once = (sys.executable, "-m", f"{__package__}.worker", ".request", ".reply")
        failure: TaskFailed | None = None
        try:
            await self._command(once)
        except TaskFailed as error:
            failure = error
        answer = await asyncio.to_thread(_read_reply, self._home / ".reply")
        if failure is not None or answer is None:
            raise failure or TaskFailed(WORKER_DIED)
        self.result.pop("exit_code", None)
        await self._answered(answer)

    def short(self, answer: dict[str, Any]) -> dict[str, object] | None:
        """What became of it, if there is nothing to move or to write; else `take` it."""
        if answer.get("stale") or not answer["ok"] or answer.get("log") or answer.get("path"):
            return None
        value = Value(answer.get("encoding", ""), answer.get("data", b""))
        return {"kind": "ok", "value": value}

    async def _answered(self, answer: dict[str, Any]) -> None:
        log = answer.get("log")
        if isinstance(log, bytes) and log:
            self.result["log_truncated"] = answer.get("truncated") is True
            await self._keep_log(log)
        if not answer["ok"]:
            raise TaskFailed(str(answer.get("error")))
        file = None
        if answer.get("path"):
            self._left = True
            made = Path(self._value)
            if not self._value or not is_plain(made):
                raise TaskFailed("its reply lies: it names a value that is not there")
            hash, size = await self._blobs.adopt(made, self.work.key.workflow)
            self._transfer.held(hash)
            file = File(name="value", hash=hash, size=size)
        self.result["value"] = Value(answer.get("encoding", ""), answer.get("data", b""), file)

    async def _answer(self, worker: LocalWorker, request: dict[str, Any]) -> dict[str, Any]:
        call = asyncio.ensure_future(worker.call(request))
        try:
            while True:
                await asyncio.wait([call], timeout=LOOK_S)
                if call.done():
                    return call.result()
                reason, cause = await self.too_much(worker.id)
                if not reason:
                    reason, cause = await asyncio.to_thread(self.too_much_on_disk)
                if reason:
                    raise TaskFailed(reason, cause=cause)
        finally:
            call.cancel()

    def _value_row(self, value: Value) -> list[object]:
        path = str(self._blobs.path(value.file.hash)) if value.file else ""
        return [value.encoding, value.data, path]

    # ----------------------------------------------------------------- outputs

    async def _collect(self) -> tuple[File, ...]:
        """All are looked at before the first is taken: one may be a link to another. What is taken
        lies among the peer's own files before anything more is done with it: something that the
        task has left running may still change what is in its directory."""
        taken: list[Path] = []
        found = []
        try:
            copies = [await asyncio.to_thread(self._checked, name) for name in self.work.outputs]
            taken += [copy for copy in copies if copy is not None]
            for name, copy in zip(self.work.outputs, copies, strict=True):
                path = copy if copy is not None else await asyncio.to_thread(self._take, name)
                taken.append(path)
                hash, size = await self._blobs.adopt(path, self.work.key.workflow)
                self._transfer.held(hash)
                found.append(File(name=name, hash=hash, size=size))
        finally:
            for path in taken:
                path.unlink(missing_ok=True)
        return tuple(found)

    def _checked(self, name: str) -> Path | None:
        """If it is one of the task's own files: a copy of what it has by another name, too, such as
        one file under two outputs; None of what can be taken as it is."""
        trouble = file_problem(name)
        if trouble:
            raise TaskFailed(f"output {name!r}: {trouble}")
        root = Path(os.path.realpath(self._home))
        real = Path(os.path.realpath(self._home / name))
        if not real.is_relative_to(root):
            raise TaskFailed(f"output {name!r} is a link that leads out of the task's directory")
        try:
            status = real.lstat()
        except (FileNotFoundError, NotADirectoryError):
            raise TaskFailed(f"output {name!r} is missing: the task ended without it") from None
        if stat.S_ISDIR(status.st_mode):
            raise TaskFailed(f"output {name!r} is a directory; outputs are files: pack it with tar")
        if not stat.S_ISREG(status.st_mode):
            raise TaskFailed(f"output {name!r} is no plain file")
        if status.st_nlink == 1 and real == root / name:
            return None
        with self._opened(str(real.relative_to(root)), name) as (file, _, _):
            return self._copied(file)

    def _take(self, name: str) -> Path:
        with self._opened(name, name) as (file, directory, last):
            part = self._blobs.new_part()
            try:
                # (with a directory, if only for show: else Python's `link` follows no link)
                os.link(f"/proc/self/fd/{file}", part, src_dir_fd=directory, follow_symlinks=True)
            except OSError:
                return self._copied(file)
            with contextlib.suppress(OSError):  # else it has another name, and is copied
                os.unlink(last, dir_fd=directory)
            return part

    def _copied(self, file: int) -> Path:
        part = self._blobs.new_part()
        with os.fdopen(os.dup(file), "rb") as source, part.open("xb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
        return part

    @contextlib.contextmanager
    def _opened(self, path: str, name: str) -> Iterator[tuple[int, int, str]]:
        """A plain file below the task's directory, its directory, and its name in that: no link on
        the way is followed, whoever puts one there now."""
        *parts, last = path.split("/")
        with contextlib.ExitStack() as held:

            def step(part: str, within: int | None, flags: int) -> int:
                try:
                    fd = os.open(part, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
                except OSError as error:
                    raise TaskFailed(f"output {name!r}: {(error.strerror or '').lower()}") from None
                held.callback(os.close, fd)
                return fd

            directory = step(os.path.realpath(self._home), None, os.O_RDONLY | os.O_DIRECTORY)
            for part in parts:
                directory = step(part, directory, os.O_RDONLY | os.O_DIRECTORY)
            file = step(last, directory, os.O_RDONLY | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise TaskFailed(f"output {name!r} is no plain file")
            yield file, directory, last

    def _clean(self) -> None:
        if not remove_tree(self._home):
            log.warning("%s can't be removed: it is tried again when the peer starts", self._home)
        self._log.unlink(missing_ok=True)
        if self._value:
            Path(self._value).unlink(missing_ok=True)


class LocalLauncher:
    """Where a peer's attempts run: a directory for each, below one that goes with the peer."""

    def __init__(
        self,
        directory: Path,
        processes: LocalProcesses,
        blobs: DiskBlobs,
        transfer: Transfer,
        log_bytes_max: int,
        sandbox: Sandbox | None,
        limits: Limits,
    ) -> None:
        self.processes = processes
        self.pid = os.getpid()
        self._directory = directory / WORK
        self._parts = (processes, blobs, transfer, log_bytes_max, sandbox, limits)
        self._clear(directory)
        self._directory.mkdir(mode=0o700)
        if processes.user_of("")[0] >= 0:  # each to its own directory there, and to no other
            self._directory.chmod(0o711)

    async def fetch(self, work: Work) -> Moved:
        """Its inputs, before it begins."""
        return (await self._parts[2].fetch_all(work.inputs)).moved

    def attempt(self, work: Work) -> LocalAttempt:
        return LocalAttempt(work, self._directory, *self._parts)

    def clear(self) -> None:
        """No task runs any more."""
        remove_tree(self._directory)

    def _clear(self, data: Path) -> None:
        """What tasks of an earlier run left goes, but nobody waits for it: it may be much."""
        if os.path.lexists(self._directory):
            self._directory.rename(data / f"{GONE}{secrets.token_hex(8)}")
        gone = list(data.glob(f"{GONE}*"))
        if gone:
            threading.Thread(target=_remove_all, args=(gone,), daemon=True).start()


def _remove_all(directories: list[Path]) -> None:
    for directory in directories:
        if not remove_tree(directory):
            log.warning("%s can't be removed: remove it by hand", directory)


async def _known(exit: asyncio.Future[Exit]) -> None:
    if not exit.done():
        raise PeerFailed("its process can't be ended")


def _read_reply(path: Path) -> dict[str, Any] | None:
    """Written by the task's own process: a plain file of a sensible size, or nothing."""
    try:
        with open_plain(path) as file:
            return read_reply(file.read(REPLY_BYTES_MAX))
    except OSError:
        return None


@functools.cache
def _has_bash() -> bool:
    return shutil.which("bash", path=SEARCHED) is not None


class Unseen(Exception):
    """A task keeps a part of its directory from being looked at: who knows how much it is."""


def usage_below(root: str, bytes_max: int, files_max: int) -> tuple[int, int]:
    """Bytes on disk and files below a directory, not counted much further than the limits."""
    size = files = 0
    stack = [root]
    while stack and size <= bytes_max and files <= files_max:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    files += 1
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if files > files_max:
                        break
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise Unseen("its directories are nested deeper than a path may be long") from None
            if error.errno == errno.EACCES:
                raise Unseen("it has a directory that nobody may look into") from None
            continue  # it went away
    return size, files


def _tail(path: Path) -> str:
    with open_plain(path) as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4 * LOG_TAIL_CHARS))
        return file.read().decode("utf-8", "replace")


def too_large(used: int, asked: int, there: int) -> str:
    most = (
        f"{show_bytes(asked)} asked" if asked else f"all that this peer has is {show_bytes(there)}"
    )
    return f"killed: it used {show_bytes(used)} of memory, {most}"
