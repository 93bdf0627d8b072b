"""The journals of workflows, as their home and its users see them.

A journal is a sequence of entries. An entry is committed when a majority of the keepers has it on
disk (`protocols.consensus`).
"""

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
    """An entry of a journal, decoded."""

    seq: int
    epoch: int
    at: float
    said: Journaled


def recorded(entry: Entry) -> Recorded:
    return Recorded(entry.seq, entry.epoch, entry.at, read(entry.kind, entry.body))


class About(NamedTuple):
    """The summary of a submission that lists of workflows show."""

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
        """Why this peer can't write its journals now, and acknowledges nothing; else empty."""
        return self.storage.trouble

    def create(
        self, workflow: str, about: About, document: bytes, patient: bool, named: bool
    ) -> tuple[Submitted, float, asyncio.Future[None]]:
        """Begins the journal of a new workflow, whose home this peer is. Returns its first entry,
        the time of that, and a future that is done when it is on this peer's disk."""
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
        at, written = self.keeping.create(workflow, (first, *rest), patient, named)
        return first, at, written

    def append(
        self,
        workflow: str,
        entry: Journaled,
        soon: bool = False,
        then: Callable[[], None] | None = None,
        at: float | None = None,
    ) -> None:
        """Committed after the next `kept`; `then` is called once it is. `at`: the time of the
        decision. `soon`: nobody waits for it, so that it may share a later entry's write."""
        self.keeping.append(workflow, entry, soon, then, at)

    def is_kept(self, workflow: str) -> bool:
        """This peer is its home, and all entries so far are committed: `kept` would not wait."""
        return self.keeping.is_kept(workflow)

    async def kept(self, workflow: str) -> None:
        """Waits until all entries so far are committed; or raises `Deposed`."""
        await self.keeping.kept(workflow)

    def _committed(self, workflow: str) -> None:
        event = self._changed.pop(workflow, None)
        if event is not None:
            event.set()

    def changed(self, workflow: str) -> asyncio.Event:
        """Set when more entries of this workflow are committed."""
        return self._changed.setdefault(workflow, asyncio.Event())

    # ----------------------------------------------------------------- reading

    def read(self, workflow: str, after: int = -1, limit: int = 1_000_000) -> list[Recorded]:
        """The committed entries of a workflow whose home is here or that has ended."""
        end = self.keeping.committed(workflow) if self.keeping.is_home(workflow) else 2**62
        entries: list[Recorded] = []
        while len(entries) < limit:
            rows = self.storage.entries(workflow, after + 1, end, READ_BYTES_MAX)
            if not rows:
                break
            entries += map(recorded, rows)
            after = rows[-1].seq
        return entries[:limit]

    def document(self, workflow: str) -> tuple[bytes, dict[str, Any], float, str] | None:
        """The document as it was submitted: its text, options, time and owner. None if a part of it
        is missing here."""
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
        """The keepers of a workflow that is over and has a replica here."""
        return self.storage.keepers(workflow)

    def is_void(self, workflow: str) -> bool:
        return self.storage.is_void(workflow)

    def is_over(self, workflow: str) -> bool:
        """A replica is here, and its end is committed."""
        return self.storage.is_over(workflow)
