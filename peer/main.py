"""Start one peer in this process: its nursery first, while there are no threads, then the loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import sqlite3
import sys

import uvloop

from . import nursery
from .daemon import AlreadyRunning, Daemon
from .database import DatabaseError
from .settings import Settings, SettingsError, from_arguments

FILES_MAX = 16_384


def run(settings: Settings, kind: type[Daemon] = Daemon) -> int:
    """Until it is told to leave; the exit code."""
    logging.basicConfig(
        level=logging.ERROR if settings.quiet else logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    os.umask(0o077)
    _allow_many_files()
    # What a workflow is made of lives long and has no cycles: to walk all of it after every few
    # hundred new objects, as the default is, costs more than it ever frees.
    gc.set_threshold(20_000, 20, 200)
    # The database's thread asks for the interpreter between any two statements; while the loop is
    # busy it would wait the default of 5 ms each time.
    sys.setswitchinterval(0.0005)
    channel, _ = nursery.start()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_live(settings, channel, kind))
    except AlreadyRunning as error:
        print(f"valence {kind.what}: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError, sqlite3.Error, DatabaseError) as error:
        print(f"valence {kind.what}: it can't start: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _allow_many_files() -> None:
    """A thousand connections must not keep a peer from opening a file. (Tasks get fewer.)"""
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
