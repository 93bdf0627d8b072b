"""The journal of the workflows whose home is here: entries in order, in batches, on disk.

`append` gives entries their numbers at once, and `synced` waits until they are on disk. While one
batch is being written the next gathers, so a busy home pays one sync for many entries; one that
nobody waits for (`soon`) goes with the next that somebody does, or after a moment. A disk that
refuses is tried again, with the entries in their order, and nothing is acknowledged meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable
from typing import Any

import msgpack

from .database import Database, DatabaseError, Statement

log = logging.getLogger("valence.journal")

RETRY_S_MAX = 5.0
SOON_S = 0.02


class Journal:
    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self.entries = 0
        self.trouble = ""  # why nothing is being acknowledged, while that is so
        self._database = database
        self._clock = clock
        self._waiting: list[Statement] = []
        self._next: asyncio.Future[None] | None = None
        self._current: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed: dict[str, asyncio.Event] = {}
        self._touched: set[str] = set()

    def append(
        self, workflow: str, seq: int, kind: str, body: dict[str, Any], soon: bool = False
    ) -> float:
        """Returns the entry's time. It is on disk after the next `synced`."""
        at = self._clock()
        packed = msgpack.packb(body)
        self._put(
            workflow,
            ("insert into entries values (?, ?, ?, ?, ?)", (workflow, seq, at, kind, packed)),
            soon,
        )
        self.entries += 1
        return at

    def _put(self, workflow: str, statement: Statement, soon: bool = False) -> None:
        self._waiting.append(statement)
        self._touched.add(workflow)
        loop = asyncio.get_running_loop()
        if self._next is None:
            self._next = loop.create_future()
        if not soon:
            self._start()
        elif self._timer is None:
            self._timer = loop.call_later(SOON_S, self._start)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and (self._writer is None or self._writer.done()):
            self._writer = asyncio.ensure_future(self._write())

    def update_state(self, workflow: str, state: str, ended_at: float | None) -> None:
        sql = "update workflows set state = ?, ended_at = ? where id = ?"
        self._put(workflow, (sql, (state, ended_at, workflow)))

    async def synced(self) -> None:
        """All that was appended so far is on disk."""
        self._start()
        waiting = self._next or self._current
        if waiting is not None:
            await asyncio.shield(waiting)

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            self._current = done = self._next
            self._next = None
            touched, self._touched = self._touched, set()
            assert done is not None
            delay_s = 0.05
            while True:
                try:
                    await self._database.write(batch)
                    self.trouble = ""
                    break
                except sqlite3.IntegrityError as error:
                    log.critical("an entry of the journal is there already: %s", error)
                    await self._write_singly(batch)
                    break
                except DatabaseError as error:
                    self.trouble = str(error)
                    log.error("the journal can't be written, trying again: %s", error)
                    await asyncio.sleep(delay_s)
                    delay_s = min(RETRY_S_MAX, delay_s * 2)
            done.set_result(None)
            self._current = None
            for workflow in touched:
                event = self._changed.pop(workflow, None)
                if event is not None:
                    event.set()

    async def _write_singly(self, batch: list[Statement]) -> None:
        """One of them can't be written by any means: the others must not go with it."""
        for statement in batch:
            try:
                await self._database.write([statement])
            except (DatabaseError, sqlite3.Error) as error:
                log.critical("given up: %s: %s", statement[1][:3], error)

    def create(
        self, row: tuple[Any, ...], body: dict[str, Any], patient: bool
    ) -> tuple[float, asyncio.Future[None]]:
        """A new workflow, its row and first entry at once: the time, and when it is on disk.

        What is appended later is written later; if this fails, `remove` what was."""
        at = self._clock()
        packed = msgpack.packb(body)
        written = self._database.begin(
            [
                ("insert into workflows values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row),
                (
                    "insert into entries values (?, ?, ?, ?, ?)",
                    (row[0], 0, at, "submitted", packed),
                ),
            ],
            patient,
        )
        self.entries += 1
        return at, written

    def remove(self, workflow: str) -> None:
        """What followed a creation that failed. (The same key may be submitted again by then.)"""
        self._put(workflow, ("delete from entries where workflow = ? and seq > 0", (workflow,)))

    def changed(self, workflow: str) -> asyncio.Event:
        """Set when something more of this workflow is on disk."""
        return self._changed.setdefault(workflow, asyncio.Event())

    def read(
        self, workflow: str, after: int = -1, limit: int = 1_000_000
    ) -> list[tuple[int, float, str, dict[str, Any]]]:
        rows = self._database.read(
            "select seq, at, kind, body from entries where workflow = ? and seq > ? "
            "order by seq limit ?",
            (workflow, after, limit),
        )
        return [(seq, at, kind, unpack(body)) for seq, at, kind, body in rows]

    def rows(self, where: str, values: tuple[Any, ...]) -> list[dict[str, Any]]:
        """Workflows, without their documents."""
        names = ("id", "name", "owner", "state", "submitted_at", "ended_at", "tasks")
        found = self._database.read(f"select {', '.join(names)} from workflows {where}", values)
        return [dict(zip(names, row, strict=True)) for row in found]

    def document(self, workflow: str) -> tuple[bytes, dict[str, Any], float, str] | None:
        """As it was submitted: text, options, when, by whom."""
        rows = self._database.read(
            "select document, options, submitted_at, owner from workflows where id = ?", (workflow,)
        )
        if not rows:
            return None
        text, options, at, owner = rows[0]
        return text, json.loads(options), at, owner

    async def forget(self, before: float) -> int:
        """Workflows that ended before then, with all their entries."""
        rows = self._database.read(
            "select id from workflows where ended_at is not null and ended_at < ? limit 1000",
            (before,),
        )
        statements: list[Statement] = []
        for (workflow,) in rows:
            statements.append(("delete from entries where workflow = ?", (workflow,)))
            statements.append(("delete from workflows where id = ?", (workflow,)))
        if statements:
            await self._database.write(statements)
        return len(rows)


def unpack(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(body, use_list=False, strict_map_key=False)
    return found
