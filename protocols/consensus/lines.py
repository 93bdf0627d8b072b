"""Two lines of one workflow meet again.

A home that goes on without a majority (`Elections._force`) begins an era of its own. If the lost
keepers were only cut off, they may have gone on as well: then there are two lines of one journal,
each with its keepers and its results, and one of them must hold everywhere.

Rules:
- Half a submission (a line that is void) holds against none that has all of it.
- A line that has come to its agreed end holds against one that has not. Of two that have, the one
  of the lower era holds: a majority agreed to it, and its users were told first. Of two that have
  not, the one of the higher era holds. So of any two lines both sides choose the same one.
- The copies of the other line are given up. If that is the one of the higher era, so is what was
  promised in it, or the line that holds could never have this peer among its keepers again: then
  what this peer had promised when it left the lower era is promised again, and how far its copy was
  there, it must not forget either. With less, it could vote for a home that has not what counts.
- Everybody who is here is asked, until each has answered: keepers come and go, and no line knows
  who keeps the other by now. Only copies of a forced era ask, or those that promised one and have
  nothing of it: where no home was ever forced this costs nothing.
- A copy that follows a home which is here is that home's, however far behind: it is catching up.
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
    """Of two lines this one is the one that goes on."""
    if line.void != other.void and line.era != other.era:
        return other.void
    if line.over != other.over:
        return line.over
    return line.era < other.era if line.over else line.era > other.era


class Lines:
    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping
        self._met: dict[str, set[bytes]] = {}  # who has answered that it has no other line
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
        """Ask those who may have another line of this one."""
        keeping = self._keeping
        known = self._met.setdefault(copy.workflow, set()) | {keeping.rpc.me.id}
        if forced(copy.promised) == forced(copy.last_epoch):
            known |= set(copy.keepers)  # of the same line
        slots = asyncio.Semaphore(ASK_AT_ONCE)
        others = [m.contact for m in keeping.members.here() if m.contact.id not in known]
        await asyncio.gather(*(self._ask(copy, other, slots) for other in others))

    async def _ask(self, copy: Replica, contact: Contact, slots: asyncio.Semaphore) -> None:
        keeping = self._keeping
        mine = History.of(copy)
        message = Meet(
            workflow=copy.workflow,
            birth=copy.birth,
            epoch=max(copy.promised, copy.last_epoch),
            era=mine.era,
            over=mine.over,
            void=mine.void,
        )
        try:
            async with slots:
                found = await keeping.rpc.call(contact, message, Met)
        except CallFailed:
            return
        here = keeping.replicas.get(copy.workflow) or keeping.storage.replica(copy.workflow)
        if here is None or History.of(here) != mine:
            return  # it has gone on meanwhile: the next look compares anew
        stranded = forced(copy.promised) > forced(copy.last_epoch)
        if not found.known and not stranded:
            self._met.setdefault(copy.workflow, set()).add(contact.id)
        elif holds(History(found.over, found.era, found.void), mine):
            self._give_up(here, mine.era, found.era, found.epoch)

    async def _meet(self, sender: Contact, message: Meet) -> Met:
        keeping = self._keeping
        copy = keeping.replicas.get(message.workflow) or keeping.storage.replica(message.workflow)
        if copy is None or not copy.count or copy.birth != message.birth:
            return Met(known=False)
        mine, other = History.of(copy), History(message.over, message.era, message.void)
        if copy.home == sender.id and forced(copy.promised) == message.era:
            return Met(known=False)  # its home, which is sending it that very line
        if mine.era == other.era:
            # of the same line; what it promised in another era, it promised in vain
            return Met(known=mine.over, over=mine.over, era=mine.era, void=mine.void)
        if holds(other, mine):
            self._give_up(copy, mine.era, other.era, message.epoch)
        return Met(known=True, over=mine.over, era=mine.era, epoch=copy.promised, void=mine.void)

    def _give_up(self, copy: Replica, era: int, other: int, epoch: int) -> None:
        """For the line of the era `other`, which holds; `epoch`: what was promised in it."""
        keeping = self._keeping
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
        """Who was away may have gone on by itself."""
        if old is None or old.state != new.state or old.boot != new.boot:
            for met in self._met.values():
                met.discard(new.contact.id)
