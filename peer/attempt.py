"""Runs one attempt, from its inputs to its outputs: a directory, a process, and the cleaning up.

Nothing that a task does to its directory can touch anything else: inputs are copies, outputs are
taken only if they are plain files that really are inside (links are followed and checked, hard
links are copied), and the directory is removed when the attempt ends.
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
import signal
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
GONE = "gone-"  # prefix of directories that are being removed
MISSING_MAX = 1000
LOOK_PART = 20  # looking at a task's files takes at most this part (1/20) of the time
SEARCHED = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


#: with less free disk space than this, an attempt that fails may have failed for lack of it
DISK_FULL_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of each task for which its document says nothing; 0: no limit."""

    memory_bytes: int = 0
    disk_bytes: int = 2**63
    processes: int = 1000
    files: int = 200_000


class TaskFailed(Exception):
    """The attempt failed by the task's own fault; the text is the reason that its user reads."""

    def __init__(self, reason: str, exit_code: int | None = None, cause: str = "") -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.cause = cause


class PeerFailed(Exception):
    """The attempt failed by this peer's fault or by chance: it is handed back."""


def _names() -> Iterator[str]:
    """Names that cannot be guessed; the system is asked for the bytes of many at once."""
    while True:
        digits = secrets.token_hex(8 * NAMES_AT_ONCE)
        for start in range(0, len(digits), 16):
            yield digits[start : start + 16]


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
        self._left = False  # some files of this attempt are on disk
        self._value = ""  # path for the value, if it is large
        self._nameless_bytes = 0  # see `Usage`

    @property
    def _home(self) -> Path:
        return Path(self._place)

    @property
    def _log(self) -> Path:
        return Path(self._place + ".log")

    @property
    def plain(self) -> bool:
        """True for a call without files: it needs a worker, and nothing else."""
        work = self.work
        if self._sandbox is not None:
            return False
        if work.call is None or work.inputs or work.outputs or work.needs.capacity.memory_bytes:
            return False
        return not any(v.file for ref in work.references for v in ref.values)

    async def run(self) -> dict[str, object]:
        """The fields of an `Outcome` except its times; always cleans up."""
        return await self._outcome_of(self._run())

    async def take(self, answer: dict[str, Any]) -> dict[str, object]:
        """The same, for a call that a worker has answered."""
        return await self._outcome_of(self._taken(answer))

    async def _taken(self, answer: dict[str, Any]) -> dict[str, object]:
        await self._answered(answer)
        return {**self.result, "kind": "ok"}

    async def _outcome_of(self, work: Coroutine[Any, Any, dict[str, object]]) -> dict[str, object]:
        try:
            return await work
        except (TaskFailed, BlobError) as error:
            return {**self.result, **self._failure(error)}
        except (PeerFailed, NurseryGone) as error:
            reason = str(error) or NURSERY_DIED
            return {**self.result, "kind": "returned", "reason": reason[:2000]}
        except OSError as error:
            return {**self.result, "kind": "returned", "reason": _os_reason(error)}
        finally:
            if self._left:
                await asyncio.to_thread(self._clean)

    def _failure(self, error: TaskFailed | BlobError) -> dict[str, object]:
        if self._disk_is_full():  # it may have failed to write; at another peer it may succeed
            reason = f"this peer's disk is full: {error}"
            return {"kind": "returned", "reason": reason[:2000]}
        # a file that does not fit here, now or ever, may fit elsewhere
        elsewhere = isinstance(error, QuotaFull | Unavailable)
        kind = "returned" if elsewhere else "failed"
        failure: dict[str, object] = {"kind": kind, "reason": str(error)[:2000]}
        if isinstance(error, NeverFits):
            failure["cause"] = NO_ROOM
        if isinstance(error, TaskFailed):
            failure["exit_code"] = error.exit_code
            failure["cause"] = error.cause
        return failure

    def _disk_is_full(self) -> bool:
        disk = os.statvfs(self._blobs.directory)
        return disk.f_bavail * disk.f_frsize < DISK_FULL_BYTES

    async def _run(self) -> dict[str, object]:
        work = self.work
        values = [v.file for ref in work.references for v in ref.values if v.file is not None]
        needed = [*work.inputs, *values]
        with self._blobs.pinned([file.hash for file in needed]):
            await self._fetch(needed)
            if self._needs_directory(bool(values)):
                self._left = True
                await asyncio.to_thread(self._lay_out, self._sources())
            if work.command is not None:
                await self._command(work.command)
            elif self._sandbox is not None:
                await self._sandboxed_call()
            else:
                await self._call()
        outputs = await self._collect() if work.outputs else ()
        return {**self.result, "kind": "ok", "outputs": outputs}

    def _needs_directory(self, values: bool) -> bool:
        """Whether the directory must be laid out here. (The nursery makes that of a plain command.)

        `values`: values of other calls come as files, which another user can't read in place."""
        work = self.work
        if work.inputs or any("/" in name for name in work.outputs):
            return True
        if work.call is not None and (work.outputs or self._sandbox is not None):
            return True
        return values and self._processes.user_of(work.owner)[0] >= 0

    async def _fetch(self, files: list[File]) -> None:
        if not files:
            return
        transferred = await self._transfer.fetch_all(files)
        self.result["moved"] = transferred.moved
        gone = [f.hash for f, e in transferred.errors if isinstance(e, Unavailable) and e.gone]
        if gone:
            self.result["missing"] = tuple(gone[:MISSING_MAX])
        for _, error in transferred.errors:
            raise error
        for file in files:
            if file.hash not in self._blobs:
                raise PeerFailed(f"{file.name} was evicted while other inputs were fetched")

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
        """Give the directory to the user as whom the task runs, if that is another user. The task
        has not started yet: everything in the directory was made by this peer."""
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
            command = ("sh", "-eu", "-c", *command[len(STRICT_SHELL) :])  # as strict as sh can be
        environment = self._environment()
        if self._sandbox is not None:
            command = await self._wrap(self._sandbox, command, environment, new)
            environment = {"PATH": SEARCHED, MARKER: self._name}
            new = False
        child_id, exited = self._processes.spawn(
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
            reason, cause = await self._watch(child_id, exited)
        except StartFailed as error:
            raise TaskFailed(f"could not be started: {error}", 127) from None
        except asyncio.CancelledError:
            await self._processes.end(child_id, exited)
            raise
        ended = exited.result()
        self._left = not (ended.removed and ended.log is not None)
        self.result["max_rss_bytes"] = ended.max_rss_bytes
        self.result["log_truncated"] = ended.log_truncated
        await self._keep_log(ended.log)
        if reason:
            raise TaskFailed(reason, ended.code, cause)
        self.result["exit_code"] = ended.code
        if ended.code < 0:
            raise TaskFailed(f"killed by {_signal_name(-ended.code)}", ended.code, "signal")
        if ended.code:
            raise TaskFailed(f"exit code {ended.code}", ended.code, "exit")

    async def _wrap(
        self, sandbox: Sandbox, command: tuple[str, ...], environment: dict[str, str], new: bool
    ) -> tuple[str, ...]:
        """The command as it runs in the sandbox; its directory is made and handed over first."""
        if self.work.call is not None:
            environment["PYTHONPATH"] = module_path()
        if new:
            await asyncio.to_thread(self._home.mkdir, 0o700)
        for name in PLACES.values():
            (self._home / name).mkdir(mode=0o700, exist_ok=True)
        await asyncio.to_thread(self._hand_over)
        return sandbox.wrap(command, self._place, environment, self.work.network)

    async def _watch(self, child_id: int, exited: asyncio.Future[Exit]) -> tuple[str, str]:
        """Wait for the end; returns why the task was killed, as a sentence and as a word, if so."""
        loop = asyncio.get_running_loop()
        limit_s = self.work.timeout_s
        start = loop.time()
        look_at = start + LOOK_S
        while not exited.done():
            wait_s = LOOK_S if limit_s is None else min(LOOK_S, start + limit_s - loop.time())
            await asyncio.wait([exited], timeout=max(0.0, wait_s))
            if exited.done():
                break
            reason = ("", "")
            if limit_s is not None and loop.time() - start >= limit_s:
                reason = too_long(self.work), "timeout"
            else:
                reason = await self.too_much(child_id)
                if not reason[0] and loop.time() >= look_at:
                    began = loop.time()
                    reason = await asyncio.to_thread(self.too_much_on_disk)
                    look_at = loop.time() + max(LOOK_S, LOOK_PART * (loop.time() - began))
            if reason[0]:
                await self._processes.end(child_id, exited)
                await _known(exited)
                return reason
        exited.result()
        return "", ""

    @property
    def _memory_bytes_max(self) -> int:
        """The memory that the task asked for, or else what the peer offers."""
        return self.work.needs.capacity.memory_bytes or self._limits.memory_bytes

    async def too_much(self, child_id: int) -> tuple[str, str]:
        """Why this process has to be killed, as a sentence and as a word; empty if it need not."""
        used, processes, nameless = await self._processes.usage(child_id)
        if self._memory_bytes_max and used > self._memory_bytes_max:
            asked = self.work.needs.capacity.memory_bytes
            return too_large(used, asked, self._limits.memory_bytes), "memory"
        if processes > self._limits.processes:
            limit = self._limits.processes
            return f"killed: it had {processes:,} processes, and the limit is {limit:,}", ""
        if nameless > self._disk_bytes_max:
            return self._wrote_too_much(), ""
        self._nameless_bytes = nameless
        return "", ""

    @property
    def _disk_bytes_max(self) -> int:
        return self.work.needs.capacity.disk_bytes or self._limits.disk_bytes

    def _wrote_too_much(self) -> str:
        limit = show_bytes(self._disk_bytes_max)
        return f"killed: it wrote more than {limit} to disk, its limit; ask for more with `disk`"

    def too_much_on_disk(self) -> tuple[str, str]:
        """The same, for the files that the task has on disk."""
        size, files = self._nameless_bytes, 0
        places = [self._place] if self._left else []
        worker_place = os.path.dirname(self._value)
        if worker_place not in ("", self._place):
            places.append(worker_place)
        for place in places:
            try:
                place_bytes, place_files = usage_below(
                    place, self._disk_bytes_max, self._limits.files
                )
            except Unseen as error:
                return f"killed: {error}", ""
            size, files = size + place_bytes, files + place_files
        if size > self._disk_bytes_max:
            return self._wrote_too_much(), ""
        if files > self._limits.files:
            return f"killed: it made more than {self._limits.files:,} files, the limit", ""
        return "", ""

    async def _keep_log(self, held: bytes | None) -> None:
        """The end of the log travels with the outcome; a longer log is also kept whole, as a blob.

        `held`: the log, if it is short; None: it is in its file."""
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
                    digest, size = await self._blobs.adopt(self._log, self.work.key.workflow)
                else:
                    digest, size = await self._blobs.put(held, self.work.key.workflow), len(held)
                self.result["log"] = File(name="log", hash=digest, size=size)

    # ----------------------------------------------------------------- calls

    def request(self, place: str) -> dict[str, Any]:
        """`place`: the directory for a large value, in a file whose name cannot be guessed."""
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
            self._left = True  # a part of its value may be on disk
            if isinstance(error, TimeoutError):
                raise TaskFailed(too_long(work), cause="timeout") from None
            if isinstance(error, EOFError | OSError):
                if losses != self._processes.losses:
                    raise NurseryGone from None
                raise TaskFailed(WORKER_DIED) from None
            raise
        if answer.get("stale"):  # a module that it has imported was edited: use a new worker
            self._processes.discard(worker)
            await self._call()
            return
        self._processes.give_back(worker)
        await self._answered(answer)

    async def _bring_values(self, request: dict[str, Any]) -> None:
        """Copy the values that are files into the task's directory, the only one it can read."""
        for _, _, values in request["references"]:
            for row in values:
                if row[2]:
                    copy = self._home / f".{Path(row[2]).name}"
                    if not copy.exists():
                        await asyncio.to_thread(copy_file, Path(row[2]), copy)
                    row[2] = str(copy)
        await asyncio.to_thread(self._hand_over)

    async def _sandboxed_call(self) -> None:
        """Run the call in a process of its own in the sandbox, which a warm worker can't enter."""
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
        """The outcome of a call if there is nothing to move or to write; None: `take` it."""
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
                raise TaskFailed("the worker's reply names a value file that does not exist")
            digest, size = await self._blobs.adopt(made, self.work.key.workflow)
            self._transfer.held(digest)
            file = File(name="value", hash=digest, size=size)
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
        """All outputs are checked before the first is taken: one may be a link to another. Each is
        moved to the peer's own files before anything else is done with it: a process that the task
        has left running may still change the task's directory."""
        taken: list[Path] = []
        files = []
        try:
            copies = [await asyncio.to_thread(self._checked, name) for name in self.work.outputs]
            taken += [copy for copy in copies if copy is not None]
            for name, copy in zip(self.work.outputs, copies, strict=True):
                path = copy if copy is not None else await asyncio.to_thread(self._take, name)
                taken.append(path)
                digest, size = await self._blobs.adopt(path, self.work.key.workflow)
                self._transfer.held(digest)
                files.append(File(name=name, hash=digest, size=size))
        finally:
            for path in taken:
                path.unlink(missing_ok=True)
        return tuple(files)

    def _checked(self, name: str) -> Path | None:
        """Check that an output is one of the task's own files. Returns a copy if the file has
        another name, too, such as one file under two outputs; None: it can be taken as it is."""
        problem = file_problem(name)
        if problem:
            raise TaskFailed(f"output {name!r}: {problem}")
        root = Path(os.path.realpath(self._home))
        real = Path(os.path.realpath(self._home / name))
        if not real.is_relative_to(root):
            raise TaskFailed(f"output {name!r} is a link that leads out of the task's directory")
        try:
            status = real.lstat()
        except (FileNotFoundError, NotADirectoryError):
            raise TaskFailed(f"output {name!r} is missing: the task did not make it") from None
        if stat.S_ISDIR(status.st_mode):
            raise TaskFailed(f"output {name!r} is a directory; outputs are files: pack it with tar")
        if not stat.S_ISREG(status.st_mode):
            raise TaskFailed(f"output {name!r} is not a plain file")
        if status.st_nlink == 1 and real == root / name:
            return None
        with self._opened(str(real.relative_to(root)), name) as (file, _, _):
            return self._copied(file)

    def _take(self, name: str) -> Path:
        with self._opened(name, name) as (file, directory, last):
            part = self._blobs.new_part()
            try:
                # (the directory is not used, but without one Python's `link` follows no link)
                os.link(f"/proc/self/fd/{file}", part, src_dir_fd=directory, follow_symlinks=True)
            except OSError:
                return self._copied(file)
            with contextlib.suppress(OSError):  # if it keeps another name, it is copied later
                os.unlink(last, dir_fd=directory)
            return part

    def _copied(self, file: int) -> Path:
        part = self._blobs.new_part()
        with os.fdopen(os.dup(file), "rb") as source, part.open("xb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
        return part

    @contextlib.contextmanager
    def _opened(self, path: str, name: str) -> Iterator[tuple[int, int, str]]:
        """A plain file below the task's directory, its directory, and its name in there. No link on
        the way is followed, even one that is made at this moment."""
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
                raise TaskFailed(f"output {name!r} is not a plain file")
            yield file, directory, last

    def _clean(self) -> None:
        if not remove_tree(self._home):
            log.warning("can't remove %s; trying again at the peer's next start", self._home)
        self._log.unlink(missing_ok=True)
        if self._value:
            Path(self._value).unlink(missing_ok=True)


class LocalLauncher:
    """Makes a peer's attempts: each has a directory, below one that is removed with the peer's."""

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
        if processes.user_of("")[0] >= 0:  # each user may enter its own directory and no other
            self._directory.chmod(0o711)

    async def fetch(self, work: Work) -> Moved:
        """Fetch the inputs of an attempt before it starts."""
        return (await self._parts[2].fetch_all(work.inputs)).moved

    def attempt(self, work: Work) -> LocalAttempt:
        return LocalAttempt(work, self._directory, *self._parts)

    def clear(self) -> None:
        """Remove all directories, once no task runs any more."""
        remove_tree(self._directory)

    def _clear(self, data: Path) -> None:
        """Remove the files of an earlier run in the background, as there may be many."""
        if os.path.lexists(self._directory):
            self._directory.rename(data / f"{GONE}{secrets.token_hex(8)}")
        gone = list(data.glob(f"{GONE}*"))
        if gone:
            threading.Thread(target=_remove_all, args=(gone,), daemon=True).start()


def _remove_all(directories: list[Path]) -> None:
    for directory in directories:
        if not remove_tree(directory):
            log.warning("can't remove %s: remove it by hand", directory)


async def _known(exited: asyncio.Future[Exit]) -> None:
    if not exited.done():
        raise PeerFailed("the task's process can't be killed")


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:  # one of the real-time signals, which have no names
        return f"signal {number}"


def _os_reason(error: OSError) -> str:
    name = Path(error.filename).name if error.filename else "a file"
    return f"this peer could not use {name}: {(error.strerror or str(error)).lower()}"


def _read_reply(path: Path) -> dict[str, Any] | None:
    """The reply, written by the task's own process: None unless it is a plain file."""
    try:
        with open_plain(path) as file:
            return read_reply(file.read(REPLY_BYTES_MAX))
    except OSError:
        return None


@functools.cache
def _has_bash() -> bool:
    return shutil.which("bash", path=SEARCHED) is not None


class Unseen(Exception):
    """A part of a task's directory can't be looked at, so its disk use is unknown."""


def usage_below(root: str, bytes_max: int, files_max: int) -> tuple[int, int]:
    """Bytes on disk and number of files below a directory; stops counting beyond the limits."""
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
                raise Unseen("its directories are nested deeper than a path can be long") from None
            if error.errno == errno.EACCES:
                raise Unseen("it made a directory that this peer can't read") from None
            continue  # it was removed meanwhile
    return size, files


def _tail(path: Path) -> str:
    with open_plain(path) as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 4 * LOG_TAIL_CHARS))
        return file.read().decode("utf-8", "replace")


def too_large(used: int, asked: int, offered: int) -> str:
    asked_text = f"the {show_bytes(asked)} it asked for; ask for more with `memory`"
    limit = asked_text if asked else f"the {show_bytes(offered)} that this peer has"
    return f"killed: it used {show_bytes(used)} of memory, more than {limit}"
