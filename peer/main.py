"""Starts one peer in this process: first its nursery, while there are no threads, then its loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import re
import resource
import socket
import sqlite3
import sys

import uvloop

from valence.protocols.ports import DatabaseError
from valence.workflow.shown import plain

from . import nursery
from .daemon import AlreadyRunning, Daemon
from .settings import Settings, SettingsError, from_arguments

FILES_MAX = 16_384
LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


class _Plain(logging.Formatter):
    """Logs end up on terminals, and quote text from users: control characters are made visible."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def run(settings: Settings, kind: type[Daemon] = Daemon) -> int:
    """Run until the peer is told to leave; returns the exit code."""
    logging.basicConfig(
        level=logging.ERROR if settings.quiet else logging.INFO,
        stream=sys.stderr,
        force=True,
    )
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Plain(LOG_FORMAT))
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    os.umask(0o077)
    _allow_many_files()
    # The objects of a workflow live long and have no cycles: to walk all of them after every few
    # hundred new ones, as is the default, costs more than it ever frees.
    gc.set_threshold(20_000, 20, 200)
    # The database's thread needs the interpreter between any two statements; while the loop is
    # busy, it would wait the default of 5 ms each time.
    sys.setswitchinterval(0.0005)
    channel, _ = nursery.start(apart=kind.runs_tasks and os.geteuid() == 0)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_live(settings, channel, kind))
    except AlreadyRunning as error:
        print(f"valence {kind.what}: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, sqlite3.Error, DatabaseError) as error:
        print(f"valence {kind.what}: {_why_not(error, settings)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _why_not(error: Exception, settings: Settings) -> str:
    """Why the peer did not start, and what to do about it."""
    if isinstance(error, socket.gaierror):
        flags = "`--host`, `--http-host` and `--advertise`"
        return f"can't resolve the address to listen on or to advertise (check {flags})"
    if isinstance(error, OSError):
        if error.errno == errno.EADDRINUSE:
            return _port_in_use(error, settings)
        reason = (error.strerror or str(error)).lower()
        return f"can't start: {f'{error.filename}: ' if error.filename else ''}{reason}"
    if isinstance(error, sqlite3.Error):
        return f"can't use the database in {settings.data}: {error} (choose another with `--data`)"
    return f"can't start: {error}"


def _port_in_use(error: OSError, settings: Settings) -> str:
    match = re.search(r"(\d+)\)", str(error))
    port = int(match[1]) if match else settings.port  # without a number, it is the datagrams' port
    flag = "--http-port" if port == settings.http_port else "--port"
    return f"port {port} is already in use (choose another with `{flag}`)"


def _allow_many_files() -> None:
    """Raise the limit of open files, so that a thousand connections leave some for files. (Tasks
    get a lower limit.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(FILES_MAX, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _live(settings: Settings, channel: object, kind: type[Daemon]) -> int:
    daemon = kind(settings, channel)  # type: ignore[arg-type]
    await daemon.start()
    try:
        await daemon.serve()
        await daemon.leave()
    finally:
        await daemon.close()
    return daemon.exit_code


def main(argv: list[str] | None = None, prog: str = "python -m peer") -> int:
    try:
        settings = from_arguments(sys.argv[1:] if argv is None else argv, prog)
    except SettingsError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return run(settings)
