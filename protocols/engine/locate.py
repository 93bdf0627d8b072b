"""Finds a workflow's home: by its record, else by asking all peers.

Homes change. Of several answers, the one with the highest epoch is right. It is remembered until it
turns out to be wrong (`forget`).
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Iterable
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
# if a large cluster was asked in vain for a workflow, it is not asked again within this time
ALL_AGAIN_S = 10.0
ANSWER_S = 1.5
SILENT_S = 0.6
STUCK_REMEMBERED = 1000
#: the "home" of a workflow whose submission broke off: no peer has the rest of it
VOID_HOME = b"void"


class Locate:
    def __init__(self, rpc: Rpc, members: Members, records: Records, journal: Journal) -> None:
        self._rpc = rpc
        self._members = members
        self._records = records
        self._journal = journal
        self._homes: OrderedDict[str, bytes] = OrderedDict()
        self._in_vain: OrderedDict[str, float] = OrderedDict()
        #: why workflows that were looked for lately are blocked, in a keeper's words
        self.stuck: dict[str, str] = {}

    async def home(self, workflow_id: str) -> bytes | None:
        """The peer that is its home; empty if it has replicas, but no home now; `VOID_HOME` if it
        was never accepted; None if no peer that answers has heard of it."""
        known = self._homes.get(workflow_id)
        if known is not None and self._members.is_here(known):
            return known
        followed = self._journal.keeping.follows(workflow_id)
        if followed and followed != self._rpc.me.id and self._members.is_here(followed):
            return followed
        recorded = await self._recorded_home(workflow_id)
        home: bytes | None
        if recorded is not None and self._members.is_here(recorded) and known is None:
            home = recorded
        else:
            home = await self._ask_all(workflow_id)
            if home is None:
                home = self._unanswered(workflow_id, followed is not None, recorded)
        self._remember(workflow_id, home)
        return home

    async def _recorded_home(self, workflow_id: str) -> bytes | None:
        records = await self._records.fetch(key_of("home", workflow_id))
        newest = max(records, key=lambda r: r.version, default=None)
        return newest.owner if newest is not None else None

    def _unanswered(
        self, workflow_id: str, has_replica: bool, recorded: bytes | None
    ) -> bytes | None:
        """What this peer can say itself, when no other can."""
        if has_replica:
            return b""
        if self._journal.is_void(workflow_id):
            return VOID_HOME
        # (a recorded home that is down is still the best answer)
        return None if recorded is None or self._members.is_here(recorded) else recorded

    def _remember(self, workflow_id: str, home: bytes | None) -> None:
        if home and home != VOID_HOME:
            self._homes[workflow_id] = home
            if len(self._homes) > HOMES_REMEMBERED:
                self._homes.popitem(last=False)

    async def duplicate(self, workflow_id: str, birth: int, epoch: int) -> bytes | None:
        """The peer that goes on with another journal of this name, under a higher epoch."""
        others = [m for m in self._members.here() if m.contact.id != self._rpc.me.id]
        question = FindHome(workflow=workflow_id)
        for member, answer in await self.everyone(others, question, FoundHome):
            if answer is not None and answer.birth not in (0, birth) and answer.epoch > epoch:
                return bytes(member.contact.id)
        return None

    def forget(self, workflow_id: str, wrong: bytes) -> None:
        """The home is not there: the next search does not believe the record that says so."""
        if self._homes.get(workflow_id) == wrong:
            self._homes[workflow_id] = b""

    async def _ask_all(self, workflow_id: str) -> bytes | None:
        self.stuck.pop(workflow_id, None)
        if len(self.stuck) > STUCK_REMEMBERED:
            self.stuck.clear()
        others = {m.contact.id: m for m in self._members.here() if m.contact.id != self._rpc.me.id}
        near = self._closest(workflow_id, others)  # these are the most likely to know
        home = await self._ask_some(workflow_id, [others.pop(peer) for peer in near])
        now = asyncio.get_running_loop().time()
        if home is not None or now - self._in_vain.get(workflow_id, -ALL_AGAIN_S) < ALL_AGAIN_S:
            return home
        home = await self._ask_some(workflow_id, list(others.values()))
        if home is None and len(others) > FAN_OUT:
            self._in_vain[workflow_id] = now
            if len(self._in_vain) > HOMES_REMEMBERED:
                self._in_vain.popitem(last=False)
        return home

    async def _ask_some(self, workflow_id: str, members: list[Member]) -> bytes | None:
        best: tuple[int, bool, bytes] | None = None
        answers: list[FoundHome] = []
        question = FindHome(workflow=workflow_id)
        for member, answer in await self.everyone(members, question, FoundHome):
            if not isinstance(answer, FoundHome):
                continue
            answers.append(answer)
            if answer.stuck:
                self.stuck[workflow_id] = answer.stuck
            home = member.contact.id if answer.here else answer.home
            if any(home) and self._members.is_here(home):
                row = (answer.epoch, answer.here, home)
                best = row if best is None else max(best, row)
        return best[2] if best else _without_home(answers)

    async def silent(self, workflow_id: str) -> tuple[list[Contact], int]:
        """The workflow's keepers that do not answer now, even if they are not known to be gone yet;
        and how many keepers it has. Takes at most twice `SILENT_S`, whichever peers are away."""
        keepers, answered = await self._roll_call(workflow_id)
        silent = [peer for peer in keepers if peer not in answered]
        return [self._members.contact(p) or Contact(p, "?", 0) for p in silent], len(keepers)

    async def _roll_call(self, workflow_id: str) -> tuple[tuple[bytes, ...], set[bytes]]:
        """The workflow's keepers, and the peers that have answered."""
        epoch, keepers = self._own_keepers(workflow_id)
        answered = {self._rpc.me.id}
        others = {m.contact.id: m for m in self._members.here()}
        asked = keepers or self._closest(workflow_id, others)
        for _ in range(2):  # the peers closest to its id first, then the keepers that they name
            near = [others[p] for p in asked if p in others and p not in answered]
            answers = await self._prompt_answers(workflow_id, near)
            answered.update(answers)
            epoch, keepers = _newest_keepers(answers.values(), epoch, keepers)
            asked = [p for p in keepers if p not in asked]
            if not asked:
                break
        return keepers, answered

    def _own_keepers(self, workflow_id: str) -> tuple[float, tuple[bytes, ...]]:
        """The keepers that a replica on this peer names, with an epoch that no answer outdoes."""
        replica = self._journal.keeping.replicas.get(workflow_id)
        return (math.inf, replica.keepers) if replica else (-1, ())

    def _closest(self, workflow_id: str, others: dict[bytes, Member]) -> list[bytes]:
        return closest(workflow_id, others, CLOSEST, self._journal.keeping.config.overlay)

    async def _prompt_answers(
        self, workflow_id: str, members: list[Member]
    ) -> dict[bytes, FoundHome]:
        question = FindHome(workflow=workflow_id)
        answers = await self.everyone(members, question, FoundHome, SILENT_S)
        return {member.contact.id: answer for member, answer in answers if answer is not None}

    async def everyone(
        self, members: list[Member], message: Any, kind: Any, limit_s: float = ANSWER_S
    ) -> list[Any]:
        """Each member with its answer, or None if it does not answer in time."""
        slots = asyncio.Semaphore(FAN_OUT)

        async def ask(member: Member) -> tuple[Member, Any]:
            async with slots:
                try:
                    return member, await self._rpc.call(member.contact, message, kind, limit_s)
                except CallFailed:
                    return member, None

        return list(await asyncio.gather(*map(ask, members)))


def _newest_keepers(
    answers: Iterable[FoundHome], epoch: float, keepers: tuple[bytes, ...]
) -> tuple[float, tuple[bytes, ...]]:
    """The keepers of the highest epoch, among these and those named in the answers."""
    for answer in answers:
        if answer.keepers and answer.epoch > epoch:
            epoch, keepers = answer.epoch, answer.keepers
    return epoch, keepers


def _without_home(answers: list[FoundHome]) -> bytes | None:
    if any(answer.kept for answer in answers):
        return b""
    return VOID_HOME if any(answer.void for answer in answers) else None
