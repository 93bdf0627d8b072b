"""The end of a split brain: of two lines of one workflow's journal, one holds everywhere.

A home that goes on without a majority (`Elections._force`) begins an era of its own. If the lost
keepers were only cut off, they may have gone on as well. Then there are two lines of one journal,
each with its keepers and its results, until the peers of the two meet again.

Rules:
- A line with half a submission (a void one) never holds against a line with all of it.
- A line that has come to its agreed end holds against one that has not. If both have, the line of
  the lower era holds: a majority agreed to its end, and its users were told first. If neither has,
  the line of the higher era holds. So both sides choose the same one of any two lines.
- A copy with an end that may be agreed on, as far as it knows, makes way for no line of a later
  era. It stands for home: either a majority of its keepers has that end, or has gone to a later era
  without it, or is lost to this line, too.
- The copies of the other line are given up. If it is the line of the higher era, the promises made
  in that era are given up too, or the line that holds could never have this peer among its keepers
  again. The peer then falls back to the promise that it had made when it left the lower era, and
  must remember how far its copy was there: without either, it could vote for a home that lacks
  committed entries.
- A copy that promised an era and has nothing of it goes, if the same line has come to its end in
  that era elsewhere. It keeps its promise. (Not if no other copy has anything of that era, either:
  they could all go. Then the promise came to nothing, and is given up.)
- Every member that is here is asked, until each has answered: keepers come and go, and neither line
  knows the keepers of the other by now. Only copies of a forced era ask, and copies that promised
  one and have nothing of it: where no home was ever forced this costs nothing.
- A copy that follows a home which is here belongs to that home's line, however far behind it is: it
  is catching up.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from ..wire.messages import Contact, Meet, Member, Met
from ..wire.rpc import CallFailed
from .keeping import Keeping
from .replica import Replica, forced

LOOK_S = 5.0
ASK_AT_ONCE = 64
WORKFLOWS_MAX = 1000


class History(NamedTuple):
    over: bool
    era: int
    void: bool = False

    @classmethod
    def of(cls, copy: Replica) -> History:
        return cls(copy.over, copy.line, copy.void)


def holds(line: History, other: History) -> bool:
    """True if this line goes on, and not the other one."""
    if line.void != other.void and line.era != other.era:
        return other.void
    if line.over != other.over:
        return line.over
    return line.era < other.era if line.over else line.era > other.era


def _is_ahead(answer: Met, copy: Replica) -> bool:
    """The other copy is of the same line, and has entries of the era that this one promised, but
    knows nothing of: this one was left behind, or is no keeper any more."""
    return answer.era == copy.line and forced(answer.epoch) >= forced(copy.promised)


class Lines:
    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping
        self._met: dict[str, set[bytes]] = {}  # peers that answered that they have no other line
        keeping.rpc.on(Meet, self._meet)
        keeping.members.listen(self._member_changed, at_stake=self._met)

    async def run(self) -> None:
        keeping = self._keeping
        while True:
            await asyncio.sleep(LOOK_S)
            self._met = {w: met for w, met in self._met.items() if w in keeping.replicas}
            asking = [w for w, r in keeping.replicas.items() if self._may_have_two(w, r)]
            for workflow in asking[:WORKFLOWS_MAX]:
                copy = keeping.replicas.get(workflow)
                if copy is not None:
                    await self.look(copy)

    def _may_have_two(self, workflow: str, copy: Replica) -> bool:
        keeping = self._keeping
        leads = workflow in keeping.leads and forced(copy.last_epoch) > 0
        stranded = forced(copy.promised) > forced(copy.last_epoch)
        return leads or (stranded and not keeping.members.is_here(copy.home))

    async def look(self, copy: Replica) -> None:
        """Asks every peer that may have another line of this journal."""
        keeping = self._keeping
        known = self._met.setdefault(copy.workflow, set()) | {keeping.rpc.me.id}
        if forced(copy.promised) == forced(copy.last_epoch):
            known |= set(copy.keepers)  # of the same line
        slots = asyncio.Semaphore(ASK_AT_ONCE)
        others = [m.contact for m in keeping.members.here() if m.contact.id not in known]
        await asyncio.gather(*(self._ask(copy, other, slots) for other in others))

    async def _ask(self, copy: Replica, contact: Contact, slots: asyncio.Semaphore) -> None:
        keeping = self._keeping
        own = History.of(copy)
        message = Meet(
            workflow=copy.workflow,
            birth=copy.birth,
            epoch=max(copy.promised, copy.last_epoch),
            era=own.era,
            over=own.over,
            void=own.void,
        )
        try:
            async with slots:
                answer = await keeping.rpc.call(contact, message, Met)
        except CallFailed:
            return
        latest = keeping.copy(copy.workflow)
        if latest is None or History.of(latest) != own:
            return  # it has gone on meanwhile: the next look compares again
        stranded = forced(copy.promised) > forced(copy.last_epoch)
        if not answer.known and not stranded:
            self._met.setdefault(copy.workflow, set()).add(contact.id)
        elif stranded and answer.over and _is_ahead(answer, latest):
            keeping.drop(copy.workflow)
        elif holds(History(answer.over, answer.era, answer.void), own):
            self._give_up(latest, own.era, answer.era, answer.epoch)

    async def _meet(self, sender: Contact, message: Meet) -> Met:
        keeping = self._keeping
        copy = keeping.copy(message.workflow)
        if copy is None or not copy.count or copy.birth != message.birth:
            return Met(known=False)
        own, other = History.of(copy), History(message.over, message.era, message.void)
        if copy.home == sender.id and forced(copy.promised) == message.era:
            return Met(known=False)  # from this copy's home, which is sending it that very line
        if own.era == other.era:
            # the same line; if the sender promised another era, that promise came to nothing
            return Met(
                known=own.over, over=own.over, era=own.era, epoch=copy.last_epoch, void=own.void
            )
        if holds(other, own):
            self._give_up(copy, own.era, other.era, message.epoch)
        return Met(known=True, over=own.over, era=own.era, epoch=copy.promised, void=own.void)

    def _give_up(self, copy: Replica, era: int, other: int, epoch: int) -> None:
        """In favour of the line of the era `other`; `epoch`: the highest one promised in it."""
        keeping = self._keeping
        if other > era and copy.may_be_over:
            return
        keeping.counts["lines_given_up"] += 1
        keeping.replicas[copy.workflow] = copy
        copy.home = b""
        keeping.depose(copy.workflow)
        if other > era:
            copy.promised = max(copy.promised, epoch)
            keeping.drop(copy.workflow)
        else:
            keeping.drop(copy.workflow, back_to=other)

    def _member_changed(self, old: Member | None, new: Member) -> None:
        """A peer that was away may have gone on by itself: ask it again."""
        if old is None or old.state != new.state or old.boot != new.boot:
            for met in self._met.values():
                met.discard(new.contact.id)
