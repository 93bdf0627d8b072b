"""The journals of workflows, as their home and its users see them: entries in order, of which those
count that a majority of the keepers has on disk (`protocols.keeping`)."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from protocols.entries import (
    VOID,
    DocumentPart,
    Journaled,
    Submitted,
    keepers_in,
    read,
    read_as,
)
from protocols.keeping.keeping import Keeping
from protocols.messages import Entry
from workflow.tree import DOCUMENT_BYTES_MAX

from .database import Statement
from .shelf import Disk, Shelf

ZIPPED_BYTES_MIN = 4096
READ_BYTES_MAX = 2**40


class Recorded(NamedTuple):
    """An entry, read."""

    seq: int
    epoch: int
    at: float
    said: Journaled


def recorded(entry: Entry) -> Recorded:
    return Recorded(entry.seq, entry.epoch, entry.at, read(entry.kind, entry.body))


class About(NamedTuple):
    """A submission, as the lists of workflows show it."""

    name: str
    owner: str
    tasks: int
    options: str  # JSON


class Journal:
    def __init__(self, database: Disk, shelf: Shelf, keeping: Keeping) -> None:
        self.keeping = keeping
        self._database = database
        self._shelf = shelf
        self._changed: dict[str, asyncio.Event] = {}
        keeping.on_committed = self._committed

    @property
    def trouble(self) -> str:
        """Why nothing is being acknowledged, while that is so."""
        return self._shelf.trouble

    def create(
        self, id: str, about: About, document: bytes, patient: bool, named: bool
    ) -> tuple[Submitted, float, asyncio.Future[None]]:
        """A new workflow, whose home this is: how it begins, the time, and when it is on this
        disk."""
        zipped = len(document) > ZIPPED_BYTES_MIN
        packed = zlib.compress(document, 1) if zipped else document
        step = self.keeping.config.document_part_bytes
        parts = [packed[i : i + step] for i in range(0, len(packed), step)]
        first = Submitted(
            name=about.name,
            owner=about.owner,
            tasks=about.tasks,
            options=about.options,
            parts=len(parts),
            zipped=zipped,
            document=parts[0],
        )
        rest = (DocumentPart(part=part) for part in parts[1:])
        at, written = self.keeping.found(id, (first, *rest), patient, named)
        return first, at, written

    def append(
        self,
        workflow: str,
        said: Journaled,
        soon: bool = False,
        then: Callable[[], None] | None = None,
    ) -> float:
        """Returns the entry's time. It counts after the next `kept`; `then` is called when."""
        return self.keeping.append(workflow, said, soon, then)

    async def kept(self, workflow: str) -> None:
        """All that was appended so far counts; or `Deposed`."""
        await self.keeping.kept(workflow)

    def _committed(self, workflow: str) -> None:
        event = self._changed.pop(workflow, None)
        if event is not None:
            event.set()

    def changed(self, workflow: str) -> asyncio.Event:
        """Set when something more of this workflow counts."""
        return self._changed.setdefault(workflow, asyncio.Event())

    # ----------------------------------------------------------------- reading

    def read(self, workflow: str, after: int = -1, limit: int = 1_000_000) -> list[Recorded]:
        """What counts, of a workflow whose home is here or that has ended."""
        end = self.keeping.committed(workflow) if self.keeping.is_home(workflow) else 2**62
        found: list[Recorded] = []
        while len(found) < limit:
            rows = self._shelf.entries(workflow, after + 1, end, READ_BYTES_MAX)
            if not rows:
                break
            found += map(recorded, rows)
            after = rows[-1].seq
        return found[:limit]

    def document(self, workflow: str) -> tuple[bytes, dict[str, Any], float, str] | None:
        """As it was submitted: text, options, when, by whom. None: not all of it is here."""
        rows = self._shelf.entries(workflow, 1, 2, READ_BYTES_MAX)
        if not rows or rows[0].kind != "submitted":
            return None
        first = read_as(Submitted, rows[0].body)
        packed = first.document
        count = first.parts - 1
        rest = self._shelf.entries(workflow, 2, 2 + count, READ_BYTES_MAX) if count else []
        if [entry.kind for entry in rest] != ["document"] * count:
            return None
        packed += b"".join(read_as(DocumentPart, entry.body).part for entry in rest)
        if first.zipped:
            packed = zlib.decompressobj().decompress(packed, DOCUMENT_BYTES_MAX)
        return packed, json.loads(first.options), rows[0].at, first.owner

    def rows(self, where: str, values: tuple[Any, ...]) -> list[dict[str, Any]]:
        """Workflows of which a copy is here."""
        names = ("id", "name", "owner", "state", "submitted_at", "ended_at", "tasks")
        sql = f"select {', '.join(names)} from workflows where state != '{VOID}' {where}"
        found = self._database.read(sql, values)
        return [dict(zip(names, row, strict=True)) for row in found]

    def tasks(self, workflow: str) -> int:
        """How many it has, as its submission says."""
        rows = self._database.read("select tasks from workflows where id = ?", (workflow,))
        return int(rows[0][0]) if rows else 0

    def keepers(self, workflow: str) -> tuple[bytes, ...]:
        """Of one that is over, and of which a copy is here."""
        rows = self._database.read("select keepers from workflows where id = ?", (workflow,))
        return keepers_in(rows[0][0]) if rows else ()

    def is_void(self, workflow: str) -> bool:
        return self._shelf.is_void(workflow)

    def is_over(self, workflow: str) -> bool:
        """A copy is here, and its end counts."""
        sql = "select 1 from workflows where id = ? and ended_at is not null and state != ?"
        return bool(self._database.read(sql, (workflow, VOID)))

    async def forget(self, before: float, tombstones_before: float) -> int:
        """Workflows that ended before then, with all their entries."""
        rows = self._database.read(
            "select id from workflows where ended_at is not null and ended_at < ? limit 1000",
            (before,),
        )
        statements: list[Statement] = [
            ("delete from copies where here = 0 and at < ?", (tombstones_before,)),
            ("delete from eras where workflow not in (select workflow from copies)", ()),
            ("delete from voided where workflow not in (select workflow from copies)", ()),
        ]
        for (workflow,) in rows:
            for table, key in (
                ("entries", "workflow"),
                ("workflows", "id"),
                ("copies", "workflow"),
                ("eras", "workflow"),
            ):
                statements.append((f"delete from {table} where {key} = ?", (workflow,)))
        await asyncio.shield(self._database.begin(statements))
        return len(rows)
