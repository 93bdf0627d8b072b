"""Changes of a journal's keepers: its home sees to it that there are enough of them and all alive.

One change at a time, of one keeper, and the next only when a majority has the one before: first the
home lets the lost keeper go, then it asks the closest peer without a copy in. (Both at once could
leave two majorities with no peer in common.) Where two keepers share a machine or a site and a peer
elsewhere could replace one of them, the home asks that peer in first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..membership.members import State
from .keeping import Keeping, Leadership
from .placement import Where, crowding, spread, where, without_one, would_part
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
        """This set of keepers is committed, and no other set is wanted."""
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
        # An entry of this epoch must be on a majority before the set may change: until then, a set
        # that an earlier home has begun to change to may still be the one that is committed.
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
            self._keeping.let_go(replica, lead)  # if the workflow has ended and no change is left
            return
        self._keeping.changes(replica.workflow, keepers)

    def _undone(self, replica: Replica, lead: Leadership) -> tuple[bytes, ...]:
        """The set as it was before, if the peer asked in is gone or will never have a copy: with
        that peer, an even set may lack the majority that could let it go again.

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
        """The next set on the way to the best one: at most one keeper more or less."""
        config = self._keeping.config
        keepers, places = replica.keepers, self._places(replica.keepers)
        if self._is_best(keepers, places, lead):
            return keepers  # the usual case, in which there is no need to look at all members
        able = self._able(lead)
        spare, here = _spare(keepers, able), len(keepers) - len(_absent(keepers, able))
        if here < majority(len(keepers)):
            return keepers  # no majority could agree to a change
        lost = _absent(self._others(keepers), able)
        if lost and spare:
            return self._without_lost(replica, lead, lost[0])
        aim = odd(min(config.keepers, here + len(spare)))
        if len(keepers) > max(aim, config.keepers):
            return self._without_surplus(keepers, places)
        if len(keepers) >= aim:  # one more first, on a machine or site of its own
            moves = len(keepers) == aim and self._is_healthy(keepers, lead)
            spare = self._apart(places, spare) if moves else []
        return (*keepers, *spread(replica.workflow, places, spare, 1, config.overlay))

    def _is_best(self, keepers: tuple[bytes, ...], places: list[Where], lead: Leadership) -> bool:
        full = odd(min(self._keeping.config.keepers, self._keeping.members.count))
        healthy = self._is_healthy(keepers, lead)
        return len(keepers) == full and healthy and not any(crowding(places))

    def _is_healthy(self, keepers: tuple[bytes, ...], lead: Leadership) -> bool:
        is_alive = self._keeping.members.is_alive
        return all(k not in lead.strangers and is_alive(k) for k in keepers)

    def _places(self, keepers: tuple[bytes, ...]) -> list[Where]:
        """Where the keepers are; empty if that changes nothing: a single keeper shares its machine
        with no other, and if all members are keepers there is nobody to replace one."""
        if len(keepers) == 1 or self._keeping.members.count <= len(keepers):
            return []
        return self._keeping.places(keepers)

    def _others(self, keepers: tuple[bytes, ...]) -> list[bytes]:
        return [k for k in keepers if k != self._keeping.rpc.me.id]

    def _apart(self, places: list[Where], spare: list[Where]) -> list[Where]:
        """Peers with which fewer keepers would share a machine or a site."""
        me = self._keeping.rpc.me.id
        return [w for w in spare if would_part(me, places, w)]

    def _able(self, lead: Leadership) -> list[Where]:
        """Every peer that can keep this journal."""
        alive = (where(m) for m in self._keeping.members.here() if m.state == State.ALIVE)
        return [w for w in alive if w.id not in lead.strangers]

    def _without_lost(self, replica: Replica, lead: Leadership, lost: bytes) -> tuple[bytes, ...]:
        """The keepers that are left must be able to agree without the lost one: a keeper that was
        asked in and has no copy yet may turn out to be a stranger, which never will have one. The
        lost one may be back."""
        me = self._keeping.rpc.me.id
        left = tuple(k for k in replica.keepers if k != lost)
        having = [k for k in left if k == me or lead.have.get(k, 0) >= replica.committed]
        return left if len(having) >= majority(len(left)) else replica.keepers

    def _without_surplus(
        self, keepers: tuple[bytes, ...], places: list[Where]
    ) -> tuple[bytes, ...]:
        me = self._keeping.rpc.me.id
        stay = without_one(me, places)
        out = [w.id for w in places if w not in stay] or self._others(keepers)
        return tuple(k for k in keepers if k != out[-1])


def _spare(keepers: Sequence[bytes], able: list[Where]) -> list[Where]:
    return [w for w in able if w.id not in keepers]


def _absent(keepers: Sequence[bytes], able: list[Where]) -> list[bytes]:
    ids = {w.id for w in able}
    return [k for k in keepers if k not in ids]
