"""One SQLite database per peer, and one thread that writes it.

Writes that wait at the same time are committed together, with one sync (`synchronous=FULL`), so a
batch costs as much as one write. A write's future resolves when it is on disk; nothing is
acknowledged before. Reads have a connection of their own (WAL: they never wait for the writer).

A *patient* write waits a moment for others to share its sync: its caller waits for more writes
anyway. If nothing else is being written then, and the disk has been fast recently, it is written on
the spot: on a good disk, two hand-overs between threads cost half as much as the sync itself. After
one slow sync the thread writes the next ones, so the loop is not blocked twice.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from valence.protocols.ports import DatabaseError

Statement = tuple[str, Sequence[Any] | dict[str, Any]]
BATCH_MAX = 512
PATIENCE_S = 0.005
QUICK_S = 0.001  # average time of a transaction, up to which the loop waits for one on the spot

SCHEMA_VERSION = 3

_SCHEMA = """
create table if not exists meta (key text primary key, value) without rowid;
create table if not exists workflows (
    id text primary key, name text not null, owner text not null, state text not null,
    submitted_at real not null, ended_at real, tasks integer not null,
    keepers blob -- the last entry that names them
) without rowid;
create index if not exists workflows_by_time on workflows (submitted_at desc, id);
create table if not exists entries (
    workflow text not null, seq integer not null, epoch integer not null, at real not null,
    kind text not null, body blob not null, primary key (workflow, seq)
) without rowid;
create table if not exists copies (
    workflow text primary key, promised integer not null, here integer not null, at real not null,
    last_epoch integer not null, count integer not null
) without rowid;
create table if not exists eras (
    workflow text not null, promised integer not null, last_epoch integer not null,
    count integer not null, primary key (workflow, promised)
) without rowid;
create table if not exists voided (
    workflow text not null, birth integer not null, primary key (workflow, birth)
) without rowid;
create table if not exists outbox (
    id integer primary key, home blob not null, at real not null, body blob not null
);
create table if not exists bookings (lease integer primary key, body blob not null);
create table if not exists peers (id blob primary key, member blob not null) without rowid;
"""


class Disk(Protocol):
    """A database, real or simulated."""

    async def write(self, statements: list[Statement]) -> None: ...

    def begin(self, statements: list[Statement], patient: bool = False) -> asyncio.Future[None]: ...

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[Any]: ...


def prepare(connection: sqlite3.Connection) -> None:
    """Create the tables; a database of another version is left alone."""
    (version,) = connection.execute("pragma user_version").fetchone()
    (tables,) = connection.execute("select count(*) from sqlite_master").fetchone()
    if tables and version != SCHEMA_VERSION:
        raise DatabaseError(
            "the data directory belongs to another version of Valence "
            "(choose another directory with `--data`)"
        )
    connection.executescript(_SCHEMA)
    connection.execute(f"pragma user_version={SCHEMA_VERSION}")


class Database:
    """The database of one peer: a reading connection, and a thread that writes."""

    def __init__(self, path: Path) -> None:
        path.touch(mode=0o600)
        path.chmod(0o600)
        self.syncs = 0
        self.writes = 0
        self._loop = asyncio.get_running_loop()
        self._path = path
        self._queue: queue.SimpleQueue[tuple[list[Statement], asyncio.Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._patient: list[tuple[list[Statement], asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._reader = self._connect()
        prepare(self._reader)
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # one transaction at a time, in whichever thread
        self._writer = self._connect()
        self._took_s = 0.0  # time of a transaction, smoothed
        self._thread = threading.Thread(target=self._write_all, name="database", daemon=True)
        self._thread.start()
        self._open = True

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        connection.execute("pragma journal_mode=wal")
        connection.execute("pragma synchronous=full")
        connection.execute("pragma busy_timeout=10000")
        connection.execute("pragma journal_size_limit=16777216")
        return connection

    async def write(self, statements: list[Statement]) -> None:
        """Write all of them or none; they are on disk when this returns."""
        await asyncio.shield(self.begin(statements))

    def begin(self, statements: list[Statement], patient: bool = False) -> asyncio.Future[None]:
        """The same, without waiting. Writes are committed in the order in which they begin.

        `patient`: this write may wait a moment, to share the sync of others."""
        if not self._open:
            raise DatabaseError("the database is closed")
        future: asyncio.Future[None] = self._loop.create_future()
        if patient:
            self._patient.append((statements, future))
            if self._timer is None:
                self._timer = self._loop.call_later(PATIENCE_S, self._flush)
        elif not self._on_the_spot(statements, future):
            self._flush()
            self._queue.put((statements, future))
        return future

    def _on_the_spot(self, statements: list[Statement], future: asyncio.Future[None]) -> bool:
        """Write this and the one patient write before it here, if nothing speaks against it."""
        if len(self._patient) != 1 or self._took_s > QUICK_S:
            return False
        if not self._queue.empty() or not self._writing.acquire(blocking=False):
            return False
        try:
            rows = [*self._patient, (statements, future)]
            self._patient.clear()
            results = self._commit(self._writer, rows)
        finally:
            self._writing.release()
        self._flush()  # cancels the timer
        _resolve(results)
        return True

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for item in self._patient:
            self._queue.put(item)
        self._patient.clear()

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            return self._reader.execute(sql, values).fetchall()

    # ----------------------------------------------------------------- the writer's thread

    def _write_all(self) -> None:
        while True:
            batch = [self._queue.get()]
            while len(batch) < BATCH_MAX and not self._queue.empty():
                batch.append(self._queue.get())
            last = None in batch
            rows = [row for row in batch if row is not None]
            with self._writing:
                results = self._commit(self._writer, rows)
            try:
                self._loop.call_soon_threadsafe(_resolve, results)
            except RuntimeError:  # the loop is closed: nothing waits for the results
                last = True
            if last:
                self._writer.close()
                return

    def _commit(
        self,
        connection: sqlite3.Connection,
        rows: list[tuple[list[Statement], asyncio.Future[None]]],
    ) -> list[tuple[asyncio.Future[None], Exception | None]]:
        if not rows:
            return []
        error = self._transaction(connection, [s for statements, _ in rows for s in statements])
        if error is None:
            return [(future, None) for _, future in rows]
        if len(rows) == 1:
            return [(rows[0][1], error)]
        # one of them is invalid: write each by itself, so that only that one fails
        return [(f, self._transaction(connection, statements)) for statements, f in rows]

    def _transaction(
        self, connection: sqlite3.Connection, statements: list[Statement]
    ) -> Exception | None:
        start = time.monotonic()
        try:
            connection.execute("begin immediate")
            for sql, values in statements:
                connection.execute(sql, values)
            connection.execute("commit")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute("rollback")
            return DatabaseError(str(error))
        self._took_s += (time.monotonic() - start - self._took_s) / 8
        self.syncs += 1
        self.writes += len(statements)
        return None

    async def close(self) -> None:
        self._open = False
        self._flush()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, 10)
        self._reader.close()


def _resolve(results: list[tuple[asyncio.Future[None], Exception | None]]) -> None:
    for future, error in results:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
