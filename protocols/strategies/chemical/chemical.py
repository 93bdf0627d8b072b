"""The strategy `chemical`: a task captures the best resource of the moment, found on the layer.

After seed 000, rule mapTaskRes of its Algorithm 2: a task and a resource that fits it react, and
the resource is consumed until it is free again. Rules:
- Units wait in groups (`waiting`); a group asks the layer for all its units at once, and once more
  for those that come later.
- The layer names the least loaded resources first, each with the number of units it should take,
  and offers that capacity to no other home. A capture is a lease by the resource's own peer.
- Units for which there is nothing wait on the layer, which tells their home of resources that
  appear. (The paper's tasks ask again after a while; so do these, in case a message was lost.)
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...capacity.matching import explain, unmet
from ...config import Config
from ...membership.members import Members
from ...tasks import Tasks
from ...wire.messages import (
    AttemptKey,
    Capacity,
    Contact,
    Grant,
    Member,
    Needs,
    Offers,
    Reserve,
    ReturnLeases,
    Room,
)
from ...wire.rpc import CallFailed, Rpc
from ..base import Estimate, OnPlaced, Placement, Unit
from ..waiting import Group, GroupKey, Waiting, all_busy
from .config import ChemicalConfig
from .layer import Layer
from .messages import Meta
from .questions import Questions
from .scale import value_of

#: questions and captures at once
CALLS_MAX = 64
#: when units come, those that wait are asked for once more; but not for each unit that comes
HASTE_S = 0.1
AGAIN_S, IN_VAIN_MAX = 0.02, 16


@dataclass(slots=True)
class _Search:
    """A search for capacity for some units of a group; and its record."""

    began_at: float
    matching: int
    known: int
    told: bool  # the layer told of a resource that appeared
    asked: list[tuple[bytes, int, str]] = field(default_factory=list)


class Chemical:
    name = "chemical"

    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        layer: Layer,
        questions: Questions,
        rng: random.Random,
        config: Config,
        on_placed: OnPlaced,
        estimate: Estimate = lambda unit: unit.runtime_s,
    ) -> None:
        self._rpc = rpc
        self._members = members
        self._layer = layer
        self._questions = questions
        self._rng = rng
        self._config = config
        self._own = config.of(ChemicalConfig)
        self._on_placed = on_placed
        self._estimate = estimate
        self._waiting = Waiting(estimate, by_avoid=True)
        self._ask_at: dict[GroupKey, float] = {}  # not before; until then the layer tells
        self._in_vain: Counter[GroupKey] = Counter()  # questions in a row that found nothing
        self._sought: Counter[GroupKey] = Counter()  # units in questions under way
        self._questions_of: Counter[GroupKey] = Counter()
        self._tasks = Tasks()
        self._wake = asyncio.Event()
        layer.on_appeared = self._on_appeared
        members.listen(self._member_changed, at_stake=self._waiting.groups)

    # ----------------------------------------------------------------- the interface

    def add(self, units: Iterable[Unit]) -> None:
        soon = self._now() + HASTE_S
        for group in self._waiting.add(units, self._now()):
            if group.key in self._ask_at:
                self._ask_at[group.key] = min(soon, self._ask_at[group.key])
        if self._waiting:
            self._wake.set()

    def withdraw(self, keys: Iterable[AttemptKey]) -> None:
        self._waiting.withdraw(keys)

    def waiting_for(self, key: AttemptKey) -> str | None:
        return self._waiting.reason(key)

    def vacancy(self, peer: bytes, free: Capacity) -> None:
        """Not used: the layer tells the home that has waited longest."""

    def _member_changed(self, old: Member | None, new: Member) -> None:
        self._wake.set()

    def _on_appeared(self, meta: Meta, needs: Needs, count: int) -> bool:
        groups = [
            g
            for g in self._waiting.groups.values()
            if g.needs == needs and g.left and meta.peer not in self._avoided(g)
        ]
        if not groups or len(self._tasks) >= CALLS_MAX:
            self._questions.let_be(meta.peer)
            return False
        group = min(groups, key=lambda g: g.order)
        search = self._search(group, told=True)
        self._tasks.spawn(self._capture(group, meta, count, search))
        return True

    def _avoided(self, group: Group) -> tuple[bytes, ...]:
        return self._questions.avoidable(group.needs, group.avoid) if group.avoid else ()

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._until_next()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await asyncio.sleep(0)  # units that are being added right now are included
            if self._waiting:
                self._look()

    def _until_next(self) -> float | None:
        groups = self._waiting.groups
        times = [
            self._ask_at.get(key, 0.0)
            for key, group in groups.items()
            if self._open(group) > 0 and not self._questions_of[key]  # the end of these wakes it
        ]
        return max(0.01, min(times) - self._now()) if times else None

    def _open(self, group: Group) -> int:
        """Units that no question is under way for."""
        return group.left - self._sought[group.key]

    # ----------------------------------------------------------------- looking for capacity

    def _look(self) -> None:
        self._waiting.regroup()
        self._forget_groups()
        now = self._now()
        due = [g for g in self._waiting.groups.values() if self._open(g) > 0]
        for group in sorted(due, key=lambda g: g.order):
            if self._ask_at.get(group.key, 0.0) > now:
                continue
            if len(self._tasks) >= CALLS_MAX:
                return  # every task that ends wakes this up
            if self._open(group) > 0:
                self._here(group, self._open(group))
            if self._open(group) > 0:
                self._begin_questions(group)

    def _forget_groups(self) -> None:
        groups = self._waiting.groups
        self._ask_at = {key: at for key, at in self._ask_at.items() if key in groups}
        self._in_vain = Counter({k: n for k, n in self._in_vain.items() if k in groups})

    def _begin_questions(self, group: Group) -> None:
        key = group.key
        begun = self._questions_of[key]
        for count in self._questions.walks(group.needs, self._open(group), begun):
            self._sought[key] += count
            self._questions_of[key] += 1
            self._tasks.spawn(self._seek(group, count))

    def _here(self, group: Group, count: int) -> None:
        """All idle peers are equally good, but this one can be asked without a message."""
        me = self._members.me
        if not self._layer.idle or me.contact.id in self._avoided(group):
            return
        if unmet(me.capacity, me.traits, group.needs):
            return
        runtime_s = self._estimate(group.top)
        each = self._questions.each(group.needs, count, runtime_s)
        ask = Room(group.needs, min(each, count), runtime_s, owner=group.top.owner[:64])
        answer = self._rpc.ask_self(Reserve.of((ask,), False, 0), Offers)
        if answer is not None and answer.grants[0].leases:
            search = self._search(group)
            search.asked.append((me.contact.id, len(answer.grants[0].leases), ""))
            self._use(group, me.contact, answer.grants[0].leases, search, "this one, which is idle")

    async def _seek(self, group: Group, count: int) -> None:
        key = group.key
        search: _Search | None = None
        try:
            search = self._search(group)
            if not search.matching:
                group.reason = explain(self._members.here(), group.needs) or "no peer is known"
            else:
                await self._ask(group, count, search)
                group.reason = all_busy(search.matching)
        finally:
            self._sought[key] -= count
            self._questions_of[key] -= 1
            if not self._questions_of[key]:
                del self._sought[key], self._questions_of[key]
            if search is not None and any(granted for _, granted, _ in search.asked):
                self._ask_at.pop(key, None)  # there was capacity: perhaps there is more
                self._in_vain.pop(key, None)
            else:
                self._in_vain[key] = min(IN_VAIN_MAX, self._in_vain[key] + 1)
                again_s = min(0.7 * self._own.wait_s, AGAIN_S * 2 ** self._in_vain[key])
                self._ask_at[key] = self._now() + again_s * (0.7 + 0.6 * self._rng.random())
            self._wake.set()

    async def _ask(self, group: Group, count: int, search: _Search) -> None:
        runtime_s = self._estimate(group.top)
        captures: list[asyncio.Task[None]] = []
        owner = group.top.owner[:64]
        async for rows in self._questions.ask(group.needs, count, runtime_s, group.avoid, owner):
            for meta, units in rows:
                capture = self._capture(group, meta, units, search)
                captures.append(self._tasks.spawn(capture))
        await asyncio.gather(*captures)

    def _search(self, group: Group, told: bool = False) -> _Search:
        matching = self._questions.kind_of(group.needs)[1]
        return _Search(self._now(), matching, len(self._members.here()), told)

    async def _capture(self, group: Group, meta: Meta, count: int, search: _Search) -> None:
        peer = meta.peer
        contact = self._members.contact(peer)
        if contact is None:
            return
        if not group.left:
            self._questions.let_be(peer)
            return
        room = self._room(group, count)
        try:
            limit_s = self._config.lease_ttl_s / 2
            # if this asks for less than it was given, the rest is not known: published again
            version = meta.version if room.count == count else 0
            message = Reserve(asks=(room,), consumed=True, molecule=version)
            answer = await self._rpc.call(contact, message, Offers, limit_s)
        except CallFailed as error:
            search.asked.append((peer, 0, str(error)))
            return
        grant = answer.grants[0] if answer.grants else Grant()
        search.asked.append((peer, len(grant.leases), grant.refusal))
        load = f"load {value_of(meta.order):.0%}"
        how = "it appeared while the task waited" if search.told else load
        self._use(group, contact, grant.leases, search, how)

    def _room(self, group: Group, count: int) -> Room:
        top = group.top
        runtime_s, deadline_at = self._estimate(top), top.deadline_at
        return Room(
            needs=group.needs,
            count=max(1, min(count, group.left, self._config.ask_batch_max)),
            runtime_s=runtime_s,
            deadline_in_s=None if deadline_at is None else deadline_at - self._now(),
            queue=runtime_s is not None and self._waiting.may_queue,
            owner=top.owner[:64],
        )

    def _use(
        self,
        group: Group,
        contact: Contact,
        leases: tuple[int, ...],
        search: _Search,
        how: str,
    ) -> None:
        record = Placement(
            self.name, search.asked, search.matching, search.known,
            f"the least loaded peer that fits: {how}", self._now() - search.began_at,
        )  # fmt: skip
        placed, unused = self._waiting.use(group, contact, leases, record, near=contact.id)
        if unused:
            self._rpc.tell(contact, ReturnLeases(leases=tuple(unused)))
        if placed:
            group.oldest_at = self._now()
            self._on_placed(placed)
        self._waiting.forget_if_empty(group)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def close(self) -> None:
        await self._tasks.close()
