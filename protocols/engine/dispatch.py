"""Sends placed units to the peers that have leased capacity for them, and aborts unwanted attempts.

A unit is sent to another peer only once the journal's entry about it is committed. This peer's own
units would be lost with it anyway, so they wait for nothing. A commit that gets no answer may have
arrived or not: then the peer is asked (`outstanding`). Commits travel in batches, bounded by count
and bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ..consensus.keeping import Deposed
from ..strategies.base import Placed
from ..wire.messages import (
    Abort,
    AttemptKey,
    Commit,
    Committed,
    Contact,
    Done,
    ReturnLeases,
    Work,
)
from ..wire.rpc import CallFailed, Refused, Rpc
from .explain import FENCED
from .outstanding import Outstanding
from .run import Run
from .work import size_bytes

log = logging.getLogger("valence.dispatch")

COMMIT_WORKS_MAX = 500
COMMIT_BYTES_MAX = 512 * 1024

Refusals = list[tuple[AttemptKey, str]]


class Dispatch:
    def __init__(
        self,
        rpc: Rpc,
        outstanding: Outstanding,
        kept: Callable[[str], Awaitable[None]],
        make: Callable[[Run, Placed], Work | None],
        is_wanted: Callable[[Run, AttemptKey], bool],
    ) -> None:
        self.on_refused: Callable[[Refusals], None] = lambda refusals: None
        self.on_too_large: Callable[[Run, list[str], str], None] = lambda run, tasks, why: None
        self.on_fenced: Callable[[Run], None] = lambda run: None
        self._rpc = rpc
        self._outstanding = outstanding
        self._kept = kept
        self._make = make
        self._is_wanted = is_wanted

    def here(self, run: Run, rows: list[Placed]) -> None:
        """Starts units on this peer. Nothing of them outlives a crash, so they wait for no disk."""
        works = [work for row in rows if (work := self._make(run, row)) is not None]
        if len(works) < len(rows):
            wanted = {work.lease for work in works}
            unused = tuple(row.lease for row in rows if row.lease not in wanted)
            self._rpc.tell(self._rpc.me, ReturnLeases(leases=unused))
        answer = self._rpc.ask_self(Commit.of(tuple(works)), Committed)
        refused = [(w.key, "refused") for w in works] if answer is None else list(answer.refused)
        self._refused(run, refused)

    async def away(self, run: Run, rows: list[Placed]) -> None:
        """Sends units to other peers once their journal entry is committed."""
        try:
            await self._kept(run.id)
            await self._send(run, rows)
        except Deposed:
            for row in rows:
                self._rpc.tell(row.peer, ReturnLeases(leases=(row.lease,)))
        finally:
            self._outstanding.on_the_way.difference_update(row.unit.key for row in rows)

    async def _send(self, run: Run, rows: list[Placed]) -> None:
        works: dict[bytes, tuple[Contact, list[Work]]] = {}
        for row in rows:
            work = self._make(run, row)
            if work is None:
                self._rpc.tell(row.peer, ReturnLeases(leases=(row.lease,)))
            else:
                works.setdefault(row.peer.id, (row.peer, []))[1].append(work)
        if len(works) == 1:
            for peer, its_works in works.values():
                await self._commit(run, peer, its_works)
        else:
            await asyncio.gather(*(self._commit(run, p, its) for p, its in works.values()))

    async def _commit(self, run: Run, peer: Contact, works: list[Work]) -> None:
        start = 0
        while start < len(works):
            end = _batch_end(works, start)
            await self._commit_batch(run, peer, works[start:end])
            start = end

    async def _commit_batch(self, run: Run, peer: Contact, batch: list[Work]) -> None:
        try:
            answer = await self._rpc.call(peer, Commit.of(tuple(batch)), Committed)
        except Refused as error:
            if error.code == "size":
                tasks = [work.key.task for work in batch]
                self.on_too_large(run, tasks, f"the task is too large to send: {error.text}")
            else:
                self._refused(run, [(work.key, str(error)) for work in batch])
        except CallFailed:
            self._outstanding.doubt(peer.id)  # the commit may have arrived or not
        else:
            self._refused(run, list(answer.refused))
            late = [w.key for w in batch if not self._is_wanted(run, w.key)]
            if late:  # cancelled, or done elsewhere, while this was on its way
                self._outstanding.drop(peer.id, late)
                await self.abort(peer, late, (run.id, run.epoch))

    def _refused(self, run: Run, refused: Refusals) -> None:
        if refused:
            self.on_refused([(key, f"the peer refused the task: {why}") for key, why in refused])
        if any(why == FENCED for _, why in refused):
            self.on_fenced(run)

    async def abort(self, contact: Contact, keys: list[AttemptKey], epoch: tuple[str, int]) -> None:
        message = Abort(keys=tuple(keys), reason="not needed", epochs=(epoch,))
        try:
            await self._rpc.call(contact, message, Done)
        except CallFailed as error:  # they run to their end there, and their outcomes are ignored
            log.info("could not abort %d attempts: %s", len(keys), error)


def _batch_end(works: list[Work], start: int) -> int:
    """Where a batch from `start` on ends: it has at least one work."""
    end, size = start, 0
    while end < len(works) and end - start < COMMIT_WORKS_MAX:
        size += size_bytes(works[end])
        if end > start and size > COMMIT_BYTES_MAX:
            break
        end += 1
    return end
