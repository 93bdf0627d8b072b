"""The journals of workflows, as their home and its users see them: entries in order, of which those
count that a majority of the keepers has on disk (`protocols.consensus`)."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from valence.workflow.tree import DOCUMENT_BYTES_MAX

from ..consensus.keeping import Keeping
from ..ports import JournalStorage
from ..wire.entries import (
    DocumentPart,
    Journaled,
    Submitted,
    read,
    read_as,
)
from ..wire.messages import Entry

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
    def __init__(self, storage: JournalStorage, keeping: Keeping) -> None:
        self.keeping = keeping
        self.storage = storage
        self._changed: dict[str, asyncio.Event] = {}
        keeping.on_committed = self._committed

    @property
    def trouble(self) -> str:
        """Why nothing is being acknowledged, while that is so."""
        return self.storage.trouble

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
        at: float | None = None,
    ) -> None:
        """It counts after the next `kept`; `then` is called when. `at`: when it was decided."""
        self.keeping.append(workflow, said, soon, then, at)

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
            rows = self.storage.entries(workflow, after + 1, end, READ_BYTES_MAX)
            if not rows:
                break
            found += map(recorded, rows)
            after = rows[-1].seq
        return found[:limit]

    def document(self, workflow: str) -> tuple[bytes, dict[str, Any], float, str] | None:
        """As it was submitted: text, options, when, by whom. None: not all of it is here."""
        rows = self.storage.entries(workflow, 1, 2, READ_BYTES_MAX)
        if not rows or rows[0].kind != "submitted":
            return None
        first = read_as(Submitted, rows[0].body)
        packed = first.document
        count = first.parts - 1
        rest = self.storage.entries(workflow, 2, 2 + count, READ_BYTES_MAX) if count else []
        if [entry.kind for entry in rest] != ["document"] * count:
            return None
        packed += b"".join(read_as(DocumentPart, entry.body).part for entry in rest)
        if first.zipped:
            packed = zlib.decompressobj().decompress(packed, DOCUMENT_BYTES_MAX)
        return packed, json.loads(first.options), rows[0].at, first.owner

    def keepers(self, workflow: str) -> tuple[bytes, ...]:
        """Of one that is over, and of which a copy is here."""
        return self.storage.keepers(workflow)

    def is_void(self, workflow: str) -> bool:
        return self.storage.is_void(workflow)

    def is_over(self, workflow: str) -> bool:
        """A copy is here, and its end counts."""
        return self.storage.is_over(workflow)
