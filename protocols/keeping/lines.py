"""Two lines of one workflow meet again.

A home that goes on without a majority (`Elections._force`) begins an era of its own. If the lost
keepers were only cut off, they may have gone on as well: then there are two lines of one journal,
each with its keepers and its results, and one of them must hold everywhere.

Rules:
- A line that has come to its agreed end holds against one that has not. Of two that have, the one
  of the lower era holds: a majority agreed to it, and its users were told first. Of two that have
  not, the one of the higher era holds. So of any two lines both sides choose the same one.
- The copies of the other line are given up. If that is the one of the higher era, so is what was
  promised in it, or the line that holds could never have this peer among its keepers again.
- Everybody who is here is asked, until each has answered: keepers come and go, and no line knows
  who keeps the other by now. Only copies of a forced era ask, or those that promised one and have
  nothing of it: where no home was ever forced this costs nothing.
"""

from __future__ import annotations

import asyncio

from ..messages import Contact, Meet, Member, Met
from ..rpc import CallFailed
from .keeping import Keeping
from .replica import Replica, forced

LOOK_S = 5.0
ASK_AT_ONCE = 64
WORKFLOWS_MAX = 1000


def holds(over: bool, era: int, other_over: bool, other_era: int) -> bool:
    """The first of two lines is the one that goes on."""
    if over != other_over:
        return over
    return era < other_era if over else era > other_era


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
        leads = workflow in self._keeping.leads and forced(copy.last_epoch) > 0
        return leads or forced(copy.promised) > forced(copy.last_epoch)

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
        mine = (copy.over, forced(copy.last_epoch))
        message = Meet(
            workflow=copy.workflow,
            birth=copy.birth,
            epoch=max(copy.promised, copy.last_epoch),
            era=mine[1],
            over=copy.over,
        )
        try:
            async with slots:
                found = await keeping.rpc.call(contact, message, Met)
        except CallFailed:
            return
        here = keeping.replicas.get(copy.workflow) or keeping.shelf.replica(copy.workflow)
        if here is None or (here.over, forced(here.last_epoch)) != mine:
            return  # it has gone on meanwhile: the next look compares anew
        stranded = forced(copy.promised) > mine[1]
        if not found.known and not stranded:
            self._met.setdefault(copy.workflow, set()).add(contact.id)
        elif holds(found.over, found.era, *mine):
            self._give_up(here, found.epoch if found.era > mine[1] else 0)

    async def _meet(self, sender: Contact, message: Meet) -> Met:
        keeping = self._keeping
        copy = keeping.replicas.get(message.workflow) or keeping.shelf.replica(message.workflow)
        if copy is None or not copy.count or copy.birth != message.birth:
            return Met(known=False)
        era, over = forced(copy.last_epoch), copy.over
        if era == message.era:
            # of the same line; what it promised in another era, it promised in vain
            return Met(known=over, over=over, era=era)
        if holds(message.over, message.era, over, era):
            self._give_up(copy, message.epoch if message.era > era else 0)
        return Met(known=True, over=over, era=era, epoch=copy.promised)

    def _give_up(self, copy: Replica, epoch: int) -> None:
        """`epoch`: of the line that holds; 0: it is below what was promised here, as it has ended
        in an earlier era."""
        keeping = self._keeping
        keeping.counts["lines_given_up"] += 1
        keeping.replicas[copy.workflow] = copy
        copy.home = b""
        keeping.depose(copy.workflow)
        if epoch:
            copy.promised = max(copy.promised, epoch)
            keeping.drop(copy.workflow)
        else:
            keeping.drop(copy.workflow, promise=False)

    def _member_changed(self, old: Member | None, new: Member) -> None:
        """Who was away may have gone on by itself."""
        if old is None or old.state != new.state or old.boot != new.boot:
            for met in self._met.values():
                met.discard(new.contact.id)
