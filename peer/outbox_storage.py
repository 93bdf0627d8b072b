"""Stores the outcomes that their homes do not have yet, in this peer's database."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgpack

from valence.protocols.ports import OutboxRow
from valence.protocols.wire.messages import CHECKED_OUTCOME

from .database import Disk, Statement


class SqliteOutboxStorage:
    def __init__(self, database: Disk, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    def rows(self) -> list[OutboxRow]:
        listed = []
        for row_id, home, body in self._database.read("select id, home, body from outbox"):
            packed = msgpack.unpackb(body, use_list=False)
            outcomes = tuple(CHECKED_OUTCOME.validate_python(row) for row in packed)
            listed.append(OutboxRow(row_id, home, outcomes))
        return listed

    async def write(self, rows: Sequence[OutboxRow], settled: Sequence[int]) -> None:
        statements: list[Statement] = [
            ("delete from outbox where id = ?", (row_id,)) for row_id in settled
        ]
        for row in rows:
            values = (row.id, row.home, self._clock(), msgpack.packb(row.outcomes))
            statements.append(("insert into outbox values (?, ?, ?, ?)", values))
        await self._database.write(statements)
