"""A home sees to it that its journals have enough keepers that are there.

One change at a time, of one keeper, and the next only when a majority has the one before: first the
one that is gone is let go, then the closest peer that has no copy is asked in. (Both at once could
leave two majorities with no peer in common.) Of keepers on one machine one is replaced when there
is a peer on another: that one is asked in first.
"""

from __future__ import annotations

import asyncio

from ..membership.members import State
from .keeping import Keeping, Leadership
from .placement import crowding, spread, where, without_one, would_part
from .replica import Replica, majority, odd

PAUSE_S = 0.02
AGAIN_S = 2.0
BATCH_MAX = 200


class MembershipChange:
    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping
        self._look: dict[str, None] = {}
        self._wake = asyncio.Event()
        keeping.on_news = self.look
        keeping.complete = self.complete

    def look(self, workflow: str) -> None:
        self._look[workflow] = None
        self._wake.set()

    def complete(self, replica: Replica, lead: Leadership) -> bool:
        """No other set is wanted, and this one counts."""
        return replica.config_agreed and self.wanted(replica, lead) == replica.keepers

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(PAUSE_S)  # deaths and arrivals come in crowds
            self._wake.clear()
            for workflow in list(self._look)[:BATCH_MAX]:
                del self._look[workflow]
                lead = self._keeping.leads.get(workflow)
                if lead is not None:
                    self._tend(self._keeping.replicas[workflow], lead)
            if self._look:
                self._wake.set()

    def _tend(self, replica: Replica, lead: Leadership) -> None:
        # an entry of this epoch must be on a majority before the set may change: until then a set
        # that an earlier home has begun to change may still be the one that counts
        settled = replica.epoch_at(replica.committed - 1) == lead.epoch
        if settled and not replica.config_agreed:
            before = self._undone(replica, lead)
            if before:
                self._keeping.changes(replica.workflow, before)
        if not settled or not replica.config_agreed:
            return
        keepers = self.wanted(replica, lead)
        if keepers == replica.keepers:
            if not all(map(self._keeping.members.is_alive, keepers)):
                loop = asyncio.get_running_loop()  # when others have caught up, it may be replaced
                loop.call_later(AGAIN_S, self.look, replica.workflow)
            self._keeping.let_go(replica, lead)  # if it is over, and nothing more is to be done
            return
        self._keeping.changes(replica.workflow, keepers)

    def _undone(self, replica: Replica, lead: Leadership) -> tuple[bytes, ...]:
        """The set as it was, if one was asked in that will never have a copy, or is gone: with it
        an even set may lack the majority that could let it go again.

        Safe, though the larger set was never agreed on: only these two sets are in play, and any
        majority of the one has a peer in common with any majority of the other."""
        if len(replica.configs) < 2 or replica.configs[-2][0] >= replica.committed:
            return ()
        before, now = replica.configs[-2][1], replica.keepers
        [*added] = set(now) - set(before)
        if len(added) != 1 or len(now) != len(before) + 1:
            return ()
        lost = added[0] in lead.strangers or not self._keeping.members.is_here(added[0])
        return before if lost else ()

    def wanted(self, replica: Replica, lead: Leadership) -> tuple[bytes, ...]:
        """The next set on the way: at most one keeper more or less."""
        members, me, strangers = self._keeping.members, self._keeping.rpc.me.id, lead.strangers
        healthy = all(k not in strangers and members.is_alive(k) for k in replica.keepers)
        alone = members.count <= len(replica.keepers)  # nobody could take another's place
        # (one keeper falls with nobody else)
        places = [] if alone or len(replica.keepers) == 1 else self._keeping.places(replica.keepers)
        crowded = any(crowding(places))
        full = len(replica.keepers) == odd(min(self._keeping.config.keepers, members.count))
        if full and healthy and not crowded:
            return replica.keepers  # mostly; not all members are looked at for that
        there_are = [where(m) for m in members.here() if m.state == State.ALIVE]
        there_are = [w for w in there_are if w.id not in strangers]
        alive = [w.id for w in there_are]
        now = replica.keepers
        overlay = self._keeping.config.overlay
        there = [k for k in now if k in alive]
        free = [p for p in alive if p not in now]
        aim = odd(min(self._keeping.config.keepers, len(there) + len(free)))
        gone = [k for k in now if k not in alive and k != me]
        if len(there) < majority(len(now)):
            return now  # nobody could agree to it
        if gone and free:
            left = tuple(k for k in now if k != gone[0])
            # Who is left must be able to agree without it: one that was added and has no copy yet
            # may turn out to have none of this journal ever (a stranger). The lost may be back.
            having = [k for k in left if k == me or lead.have.get(k, 0) >= replica.committed]
            return left if len(having) >= majority(len(left)) else now
        if len(now) > max(aim, self._keeping.config.keepers):
            stay = without_one(me, places)
            out = [w.id for w in places if w not in stay] or [k for k in now if k != me]
            return tuple(k for k in now if k != out[-1])
        if len(now) < aim and free:
            rest = [w for w in there_are if w.id not in now]
            return (*now, *spread(replica.workflow, places, rest, 1, overlay))
        if len(now) == aim and healthy:  # one more first, on a machine or site of its own
            rest = [w for w in there_are if w.id not in now]
            rest = [w for w in rest if would_part(me, places, w)]
            return (*now, *spread(replica.workflow, places, rest, 1, overlay))
        return now
