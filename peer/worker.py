"""A warm worker: a process that runs the Python calls of one owner, one after the other.

It never runs a module that was edited since its import: it reports that it is stale, and is ended.

A value that JSON can express exactly travels as JSON, so that people and other languages can read
it. Any other value is pickled, and unpickled only here, in a process that runs the user's code
anyway.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import pickle
import socket
import sys
import time
import traceback
from importlib.machinery import SourceFileLoader
from typing import Any

import msgpack

from .nursery import LENGTH

INLINE_BYTES_MAX = 16 * 1024
TRACEBACK_CHARS_MAX = 8000
LOOK_AGAIN_S = 0.2
_EXACT = frozenset({type(None), bool, int, str})
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def exact(value: Any, depth: int = 0) -> bool:
    """True if JSON gives back exactly this value."""
    kind = type(value)
    if kind in _EXACT:
        return True
    if kind is float:
        return math.isfinite(value)
    if depth > 50:
        return False
    if kind is list:
        return all(exact(v, depth + 1) for v in value)
    if kind is dict:
        return all(type(k) is str and exact(v, depth + 1) for k, v in value.items())
    return False


def dump(value: Any) -> tuple[str, bytes]:
    if exact(value):
        with contextlib.suppress(ValueError, UnicodeEncodeError):
            return "json", _ENCODER.encode(value).encode()
    return "pickle", pickle.dumps(value, protocol=5)


def load(encoding: str, data: bytes) -> Any:
    return json.loads(data) if encoding == "json" else pickle.loads(data)


def _value(row: list[Any]) -> Any:
    encoding, data, path = row
    if path:
        with open(path, "rb") as file:
            data = file.read()
    return load(encoding, data)


def substitute(value: Any, results: dict[str, Any]) -> Any:
    """Replace each `{result: name}` by the value of that result."""
    if isinstance(value, dict):
        if set(value) == {"result"} and value["result"] in results:
            return results[value["result"]]
        return {k: substitute(v, results) for k, v in value.items()}
    if isinstance(value, list):
        return [substitute(v, results) for v in value]
    return value


class Imported:
    """The files of the modules that calls have imported, as they were *before* they were read: a
    file that is edited while it is being read, or while the call that imported it still runs, has
    changed since.

    It is the first of Python's finders, so that it sees each import of a module that is not loaded
    yet, and is told of each source file that is read, whoever reads it. Calls that import nothing,
    which most calls are, cost nothing here."""

    def __init__(self) -> None:
        self._seen: dict[str, _Stamp] = {}
        self._workflow = ""
        self._looked_at = 0.0
        self._fresh = False  # directories were read since the last look

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec that the other finders find; a file may be newer than a cached directory."""
        if not self._fresh:
            self._fresh = True
            importlib.invalidate_caches()
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None:
            archive = getattr(spec.loader, "archive", None)  # of a module in a zip file
            self.about_to_read(archive or (spec.origin if spec.has_location else None))
        return spec

    def about_to_read(self, path: Any) -> None:
        if isinstance(path, str) and path not in self._seen:
            self._seen[path] = _stamp(path)

    def changed(self, workflow: str) -> bool:
        """Whether a file has changed. Looked at for each new workflow, as files may have been
        edited since the last one, and now and then."""
        now = time.monotonic()
        if workflow == self._workflow and now - self._looked_at < LOOK_AGAIN_S:
            return False
        self._workflow, self._looked_at, self._fresh = workflow, now, False
        return any(_stamp(path) != stamp for path, stamp in self._seen.items())


_Stamp = tuple[int, int, int] | None


def _stamp(path: str) -> _Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_sources(imported: Imported | None = None) -> None:
    """Load the user's own modules from their source, never from compiled files: a file that is
    edited within the second in which it was compiled, and keeps its length, looks unchanged to
    Python. Installed packages are loaded as usual."""
    installed = tuple({os.path.join(p, "") for p in (sys.prefix, sys.base_prefix, sys.exec_prefix)})
    stats = SourceFileLoader.path_stats

    def path_stats(self: SourceFileLoader, path: Any) -> Any:
        if imported is not None:
            imported.about_to_read(path)
        values = stats(self, path)
        if str(path).startswith(installed):
            return values
        return {**values, "mtime": -1}  # no compiled file has this time

    sys.dont_write_bytecode = True
    SourceFileLoader.path_stats = path_stats  # type: ignore[method-assign]


def resolve(call: str) -> Any:
    module, _, name = call.partition(":")
    try:
        target = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and needs another that does not
        importlib.invalidate_caches()  # it may have been written a moment ago
        target = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    return target


def run(request: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for name, many, rows in request["references"]:
        values = [_value(row) for row in rows]
        results[name] = values if many else values[0]
    args, kwargs = msgpack.unpackb(request["arguments"], strict_map_key=False)
    function = resolve(request["call"])
    if results:
        args, kwargs = substitute(args, results), substitute(kwargs, results)
    value = function(*args, **kwargs)
    encoding, data = dump(value)
    if len(data) <= INLINE_BYTES_MAX:
        return {"ok": True, "encoding": encoding, "data": data}
    try:
        with open(request["value_path"], "wb") as file:
            file.write(data)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(request["value_path"])
        raise
    return {"ok": True, "encoding": encoding, "data": b"", "path": request["value_path"]}


#: the variables as `os` stores them: cheap to copy and to compare
_variables: dict[Any, Any] = getattr(os.environ, "_data", {})


def _attempt(request: dict[str, Any], log: int) -> dict[str, Any]:
    before = _variables.copy()
    try:
        if request["cwd"]:
            os.chdir(request["cwd"])
        if request["env"]:
            os.environ.update(request["env"])
        answer = run(request)
    except SystemExit as error:
        answer = {"ok": False, "error": f"the call ended its process with exit({error.code})"}
    except BaseException as error:
        last = "".join(traceback.format_exception_only(error)).strip()
        sys.stderr.write("".join(traceback.format_exception(error))[-TRACEBACK_CHARS_MAX:])
        answer = {"ok": False, "error": last[-1000:]}
    finally:
        if _variables != before:
            os.environ.clear()
            os.environ.update({os.fsdecode(k): os.fsdecode(v) for k, v in before.items()})
        if request["cwd"]:
            os.chdir("/")
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    size = os.fstat(log).st_size
    return {**answer, **_take_log(log, size, request["log_bytes_max"])} if size else answer


def _take_log(log: int, size: int, limit: int) -> dict[str, Any]:
    kept = os.pread(log, min(size, limit), 0)
    if size > limit:  # the beginning shows what was run, the end how it ended
        half = limit // 2
        left_out = f"\n[… {size - 2 * half:,} bytes left out …]\n".encode()
        kept = kept[:half] + left_out + os.pread(log, half, size - half)
    os.ftruncate(log, 0)
    os.lseek(log, 0, os.SEEK_SET)
    return {"log": kept, "truncated": size > limit}


def serve(channel: socket.socket, path: list[str]) -> None:
    """Answer calls until the channel closes. Their output goes to this process's own output, which
    is a file without a name."""
    log = os.dup(1)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.path[:] = path
    imported = Imported()
    read_sources(imported)
    sys.meta_path.insert(0, imported)
    os.chdir("/")
    stream = channel.makefile("rb")
    pack = msgpack.Packer().pack  # (a new one, as for `packb`, allocates much more than it needs)
    while True:
        head = stream.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return
        request = msgpack.unpackb(stream.read(LENGTH.unpack(head)[0]), strict_map_key=False)
        if imported.changed(request["workflow"]):
            packed = pack({"ok": False, "stale": True})
        else:
            packed = pack(_attempt(request, log))
        channel.sendall(LENGTH.pack(len(packed)) + packed)


def once(request_path: str, reply_path: str) -> int:
    """Run one call in a process of its own; the call's output is this process's output."""
    with open(request_path, "rb") as file:
        request = msgpack.unpackb(file.read(), strict_map_key=False)
    sys.path.insert(0, os.getcwd())
    read_sources()
    os.environ.update(request["env"])
    try:
        answer = run(request)
    except BaseException as error:
        last = "".join(traceback.format_exception_only(error)).strip()
        sys.stderr.write("".join(traceback.format_exception(error))[-TRACEBACK_CHARS_MAX:])
        answer = {"ok": False, "error": last[-1000:]}
    with open(reply_path, "wb") as file:
        file.write(msgpack.packb(answer))
    return 0


if __name__ == "__main__":
    sys.exit(once(sys.argv[1], sys.argv[2]))
