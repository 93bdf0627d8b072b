"""Repair of ended journals: when a keeper of one is lost, another peer gets a copy.

Ended journals are on disk only, and their keepers die like all others. So each keeper checks its
ended journals now and then, and a while after one of their keepers was lost or is back. If a
journal lacks a keeper, the first of its keepers that is here takes it up once more: it stands for
home as for any journal; once elected, it lets the lost keeper go and asks the next one in
(`membership_change`), and lets go of the journal when all of them have it. A few at a time: running
workflows come first.
"""

from __future__ import annotations

import asyncio
import math

from ..membership.members import State
from ..wire.messages import Member
from .election import Elections
from .keeping import Keeping
from .lines import Lines
from .replica import Replica, forced, majority, odd

PAGE = 500
RENEWED_S_MAX = 30.0


class Archive:
    def __init__(self, keeping: Keeping, elections: Elections, lines: Lines) -> None:
        self._keeping = keeping
        self._lines = lines
        self._elections = elections
        self._lost = asyncio.Event()
        self._lost.set()  # after a start too: some may have been lost meanwhile
        self._under_way: dict[str, float] = {}  # since when
        self._fellows: set[bytes] = set()  # the other keepers of these journals
        keeping.on_put_away = self._put_away
        keeping.members.listen(self._member_changed, at_stake=self._fellows)

    def _put_away(self, replica: Replica) -> None:
        self._fellows.update(replica.keepers)
        if forced(replica.last_epoch):
            self._lost.set()  # another line may have come to another end: the two have to meet

    def _member_changed(self, old: Member | None, new: Member) -> None:
        few = self._keeping.config.keepers
        gone = new.state >= State.DEAD
        was_gone = old is None or old.state >= State.DEAD
        # a keeper that is back may make a majority again
        look = (gone or was_gone) and new.contact.id in self._fellows
        # a peer that is back may have gone on by itself, if homes are allowed to
        back = new.state == State.ALIVE and old is not None and old.state >= State.DEAD
        look = look or (back and not math.isinf(self._keeping.config.majority_lost_s))
        if look or self._keeping.members.count <= few:
            self._lost.set()

    async def run(self) -> None:
        config = self._keeping.config
        while True:
            try:
                async with asyncio.timeout(config.archive_s):
                    await self._lost.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(
                config.archive_after_s
            )  # it may come back; and losses come in crowds
            self._lost.clear()
            await self._look()

    async def _look(self) -> None:
        after = ""
        self._fellows.clear()
        while True:
            rows = self._keeping.storage.ended(after, PAGE)
            for workflow, keepers, epoch in rows:
                self._fellows.update(keepers)
                copy = self._keeping.storage.replica(workflow) if forced(epoch) else None
                if copy is not None and workflow not in self._keeping.replicas:
                    await self._lines.look(copy)
                if self._is_mine(keepers):
                    await self._renew(workflow)
            if len(rows) < PAGE:
                return
            after = rows[-1][0]
            await asyncio.sleep(0)

    def _is_mine(self, keepers: tuple[bytes, ...]) -> bool:
        """It has too few keepers, and this peer is the first of those that are here."""
        members = self._keeping.members
        here = [k for k in keepers if members.is_here(k)]
        aim = odd(min(self._keeping.config.keepers, members.count))
        short = len(here) < len(keepers) or len(keepers) < aim
        return short and here[:1] == [self._keeping.rpc.me.id]

    async def _renew(self, workflow: str) -> None:
        keeping = self._keeping
        loop = asyncio.get_running_loop()
        while len(self._under_way) >= keeping.config.archive_at_once:
            await asyncio.sleep(0.2)
            limit = loop.time() - RENEWED_S_MAX  # if it takes longer, a majority is away
            self._under_way = {
                w: since
                for w, since in self._under_way.items()
                if w in keeping.replicas and since > limit
            }
        replica = keeping.storage.replica(workflow)
        if workflow in keeping.replicas or replica is None or not self._is_mine(replica.keepers):
            return
        here = sum(map(keeping.members.is_here, replica.keepers))
        never_forced = math.isinf(keeping.config.majority_lost_s)
        if never_forced and here < majority(len(replica.keepers)):
            return  # there is no majority; the journal is checked again when a keeper is back
        keeping.counts["journals_renewed"] += 1
        keeping.replicas[workflow] = replica
        self._under_way[workflow] = loop.time()
        self._elections.vacant(workflow)
