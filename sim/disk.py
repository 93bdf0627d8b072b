"""A simulated disk: it keeps all synced writes, and a random part of the others.

The peer's own SQL runs on a real SQLite in memory, which holds what has reached the platter. Writes
take their time to get there, and those that wait go together; a crash loses all writes from some
point on.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import weakref
from collections.abc import Sequence
from typing import Any

from valence.peer.database import Statement, prepare
from valence.protocols.ports import DatabaseError

from .loop import NOBODY


class Platter:
    """Everything that outlives the process."""

    def __init__(self) -> None:
        self.tables = sqlite3.connect(":memory:", isolation_level=None, cached_statements=256)
        prepare(self.tables)
        self.blobs: dict[bytes, bytes] = {}
        self.holds: dict[bytes, set[str]] = {}  # blob → what it is kept for
        self.boots = 0

    def apply(self, statements: list[Statement]) -> Exception | None:
        self.tables.execute("begin")
        try:
            for sql, values in statements:
                self.tables.execute(sql, values)
        except sqlite3.Error as error:
            self.tables.execute("rollback")
            return DatabaseError(str(error))
        self.tables.execute("commit")
        return None


class SimDatabase:
    """`peer.database.Database`, as far as the parts of a peer use it."""

    def __init__(self, platter: Platter, rng: random.Random) -> None:
        self.platter = platter
        self.full = False
        self.sync_s = 0.001
        self.syncs = 0
        self._rng = rng
        self._waiting: list[tuple[list[Statement], asyncio.Future[None]]] = []
        self._syncing: list[tuple[list[Statement], asyncio.Future[None]]] = []
        self._dead = False
        self._failed: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()

    async def write(self, statements: list[Statement]) -> None:
        await asyncio.shield(self.begin(statements))

    def begin(self, statements: list[Statement], patient: bool = False) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((statements, future))
        if not self._syncing:
            self._sync()
        return future

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        return self.platter.tables.execute(sql, values).fetchall()

    def _sync(self) -> None:
        self._syncing, self._waiting = self._waiting, []
        took_s = self.sync_s * (0.5 + self._rng.random())
        loop = asyncio.get_running_loop()
        loop.call_later(took_s, self._synced, context=NOBODY)

    def _synced(self) -> None:
        if self._dead:
            return
        done, self._syncing = self._syncing, []
        self.syncs += 1
        for statements, future in done:
            error = DatabaseError("no space left") if self.full else self.platter.apply(statements)
            if future.cancelled():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                self._failed.add(future)
        if self._waiting:
            self._sync()

    def crash(self) -> None:
        """Some of the writes under way arrive, in their order; nobody is told."""
        self._dead = True
        for future in list(self._failed):
            future.exception()  # nobody will hear of it any more
        rows = [*self._syncing, *self._waiting]
        for statements, _ in rows[: self._rng.randint(0, len(rows))] if not self.full else ():
            self.platter.apply(statements)
