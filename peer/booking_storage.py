"""Stores what this peer has promised, in its database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import msgpack

from valence.protocols.capacity.bookings import BookingRow
from valence.protocols.wire.messages import Capacity

from .database import Disk, Statement


class SqliteBookingStorage:
    def __init__(self, database: Disk) -> None:
        self._database = database

    def rows(self) -> list[BookingRow]:
        listed = []
        for (body,) in self._database.read("select body from bookings order by lease"):
            lease, workflow, home, epoch, owner, needs, *times = msgpack.unpackb(body)
            listed.append(BookingRow(lease, workflow, home, epoch, owner, Capacity(*needs), *times))
        return listed

    async def write(self, rows: Sequence[BookingRow], gone: Sequence[int]) -> None:
        statements: list[Statement] = [
            ("delete from bookings where lease = ?", (lease,)) for lease in gone
        ]
        for row in rows:
            body = msgpack.packb(astuple(row))
            statements.append(("insert or replace into bookings values (?, ?)", (row.lease, body)))
        await self._database.write(statements)
