"""Where a workflow's home is: by its record, else by asking everybody.

Homes change. Of several answers the one with the highest epoch holds; an answer is remembered until
somebody says that it is wrong (`forget`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from ..consensus.placement import closest
from ..membership.members import Members
from ..records import Records, key_of
from ..wire.messages import Contact, FindHome, FoundHome, Member
from ..wire.rpc import CallFailed, Rpc
from .journal import Journal

HOMES_REMEMBERED = 10_000
FAN_OUT = 64
CLOSEST = 16
ALL_AGAIN_S = 10.0  # many are not asked twice within this whether anybody has heard of it
ANSWER_S = 1.5
SILENT_S = 0.6
STUCK_REMEMBERED = 1000
#: the "home" of a workflow whose submission broke off: nobody has more of it
VOID_HOME = b"void"


class Locate:
    def __init__(self, rpc: Rpc, members: Members, records: Records, journal: Journal) -> None:
        self._rpc = rpc
        self._members = members
        self._records = records
        self._journal = journal
        self._homes: OrderedDict[str, bytes] = OrderedDict()
        self._in_vain: OrderedDict[str, float] = OrderedDict()
        #: of workflows that were looked for last: why they stand still, as a keeper says
        self.stuck: dict[str, str] = {}

    async def home(self, id: str) -> bytes | None:
        """Empty: it is kept, but has no home now. None: nobody who answers has heard of it.
        `VOID_HOME`: it was never accepted."""
        known = self._homes.get(id)
        if known is not None and self._members.is_here(known):
            return known
        followed = self._journal.keeping.follows(id)
        if followed and followed != self._rpc.me.id and self._members.is_here(followed):
            return followed
        records = await self._records.fetch(key_of("home", id))
        newest = max(records, key=lambda r: r.version, default=None)
        if newest is not None and self._members.is_here(newest.owner) and known is None:
            home: bytes | None = newest.owner
        else:
            home = await self._ask_all(id)
            if home is None and followed is not None:
                home = b""
            if home is None and self._journal.is_void(id):
                home = VOID_HOME
            if home is None and newest is not None and not self._members.is_here(newest.owner):
                home = newest.owner  # it is down, and nobody else can say more
        if home and home != VOID_HOME:
            self._homes[id] = home
            if len(self._homes) > HOMES_REMEMBERED:
                self._homes.popitem(last=False)
        return home

    async def duplicate(self, id: str, birth: int, epoch: int) -> bytes | None:
        """Who goes on with another journal of this name, under a higher epoch."""
        others = [m for m in self._members.here() if m.contact.id != self._rpc.me.id]
        for member, found in await self.everyone(others, FindHome(workflow=id), FoundHome):
            if found is not None and found.birth not in (0, birth) and found.epoch > epoch:
                return bytes(member.contact.id)
        return None

    def forget(self, id: str, wrong: bytes) -> None:
        """It is not there: the next look does not believe the record that says so."""
        if self._homes.get(id) == wrong:
            self._homes[id] = b""

    async def _ask_all(self, id: str) -> bytes | None:
        self.stuck.pop(id, None)
        if len(self.stuck) > STUCK_REMEMBERED:
            self.stuck.clear()
        others = {m.contact.id: m for m in self._members.here() if m.contact.id != self._rpc.me.id}
        overlay = self._journal.keeping.config.overlay
        near = closest(id, others, CLOSEST, overlay)  # who should have it, before all others
        found = await self._ask_some(id, [others.pop(peer) for peer in near])
        now = asyncio.get_running_loop().time()
        if found is not None or now - self._in_vain.get(id, -ALL_AGAIN_S) < ALL_AGAIN_S:
            return found
        found = await self._ask_some(id, list(others.values()))
        if found is None and len(others) > FAN_OUT:
            self._in_vain[id] = now
            if len(self._in_vain) > HOMES_REMEMBERED:
                self._in_vain.popitem(last=False)
        return found

    async def _ask_some(self, id: str, members: list[Member]) -> bytes | None:
        answers = await self.everyone(members, FindHome(workflow=id), FoundHome)
        best: tuple[int, bool, bytes] | None = None
        kept = void = False
        for member, found in answers:
            if not isinstance(found, FoundHome):
                continue
            kept = kept or found.kept
            void = void or found.void
            if found.stuck:
                self.stuck[id] = found.stuck
            where = member.contact.id if found.here else found.home
            if any(where) and self._members.is_here(where):
                row = (found.epoch, found.here, where)
                best = row if best is None else max(best, row)
        return best[2] if best else b"" if kept else VOID_HOME if void else None

    async def silent(self, id: str) -> tuple[list[Contact], int]:
        """Its keepers that do not answer now, though nobody has found them gone yet; and how many
        keepers it has. Known within `SILENT_S` twice, whoever is away."""
        replica = self._journal.keeping.replicas.get(id)
        keepers, answered = (replica.keepers if replica else ()), {self._rpc.me.id}
        others = {m.contact.id: m for m in self._members.here()}
        overlay = self._journal.keeping.config.overlay
        asked = keepers or closest(id, others, CLOSEST, overlay)
        best = -1
        for _ in range(2):  # those that are close to its id first, then those they name
            near = [others[p] for p in asked if p in others and p not in answered]
            for member, found in await self.everyone(
                near, FindHome(workflow=id), FoundHome, SILENT_S
            ):
                if found is None:
                    continue
                answered.add(member.contact.id)
                if found.keepers and not replica and found.epoch > best:
                    best, keepers = found.epoch, found.keepers
            asked = [p for p in keepers if p not in asked]
            if not asked:
                break
        contacts = {p: self._members.contact(p) for p in keepers if p not in answered}
        return [contacts[p] or Contact(p, "?", 0) for p in contacts], len(keepers)

    async def everyone(
        self, members: list[Member], message: Any, kind: Any, limit_s: float = ANSWER_S
    ) -> list[Any]:
        """What each of them answers; None where one does not."""
        slots = asyncio.Semaphore(FAN_OUT)

        async def one(member: Member) -> tuple[Member, Any]:
            async with slots:
                try:
                    return member, await self._rpc.call(member.contact, message, kind, limit_s)
                except CallFailed:
                    return member, None

        return list(await asyncio.gather(*map(one, members)))
