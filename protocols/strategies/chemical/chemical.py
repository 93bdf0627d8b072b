"""`chemical`: a task captures the best resource of the moment, found in order on the layer.

After seed 000, rule mapTaskRes of its Algorithm 2: a task and a resource that fits it react, and
the resource is consumed until it is free again. Rules:
- Units wait in groups (`waiting`); a group asks the layer once, for all its units.
- The layer names the least loaded resources first, each with how many units it should take, and
  tells nobody else of that room. Capture is a lease by the resource's own peer.
- What finds nothing waits on the layer: it is told of what appears. (The paper's tasks ask again
  after a while; so do these, in case a word was lost.)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

from ...config import Config
from ...matching import explain, unmet
from ...members import Members
from ...messages import (
    AttemptKey,
    Capacity,
    Contact,
    Member,
    Needs,
    Offers,
    Reserve,
    ReturnLeases,
    Room,
)
from ...rpc import CallFailed, Rpc
from ...strategy import Estimate, OnPlaced, Placed, Placement, Unit
from ..waiting import Group, Waiting
from .layer import Layer
from .scale import value_of

GROUPS_PER_ROUND = 32


class Chemical:
    name = "chemical"

    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        layer: Layer,
        rng: random.Random,
        config: Config,
        on_placed: OnPlaced,
        estimate: Estimate = lambda unit: unit.runtime_s,
    ) -> None:
        self._rpc = rpc
        self._members = members
        self._layer = layer
        self._rng = rng
        self._config = config
        self._on_placed = on_placed
        self._estimate = estimate
        self._waiting = Waiting(estimate, config.place_units_max, by_avoid=True)
        self._appeared: dict[bytes, tuple[Needs, int]] = {}
        self._ask_at: dict[object, float] = {}  # group → not before; until then it is told
        self._wake = asyncio.Event()
        layer.on_appeared = self._on_appeared
        members.listen(self._member_changed, at_stake=self._waiting.groups)

    # ----------------------------------------------------------------- the interface

    def add(self, units: Iterable[Unit]) -> None:
        for group in self._waiting.add(units, self._now()):
            self._ask_at.pop(group.key, None)
        if self._waiting:
            self._wake.set()

    def withdraw(self, keys: Iterable[AttemptKey]) -> None:
        self._waiting.withdraw(keys)

    def waiting_for(self, key: AttemptKey) -> str | None:
        group = self._waiting.group_of(key)
        return None if group is None else group.reason

    def vacancy(self, peer: bytes, free: Capacity) -> None:
        """The layer says so, to whom has waited longest."""

    def _member_changed(self, old: Member | None, new: Member) -> None:
        self._wake.set()

    def _on_appeared(self, peer: bytes, needs: Needs, count: int) -> None:
        wanted = any(group.needs == needs for group in self._waiting.groups.values())
        if wanted and len(self._appeared) < self._config.layer_wishes_max:
            self._appeared[peer] = (needs, count)
            self._wake.set()
            return
        contact = self._members.contact(peer)
        if contact is not None:
            self._let_be(contact)

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._until_next()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await asyncio.sleep(0)  # what is added in this moment goes along
            if self._waiting:
                await self._layer.want()
                await self._round()

    def _until_next(self) -> float | None:
        if not self._waiting:
            return None
        times = [self._ask_at.get(key, 0.0) for key in self._waiting.groups]
        return max(0.01, min(times) - self._now())

    # ----------------------------------------------------------------- a round

    async def _round(self) -> None:
        self._waiting.regroup()
        self._ask_at = {k: at for k, at in self._ask_at.items() if k in self._waiting.groups}
        appeared, self._appeared = self._appeared, {}
        listed = sorted(self._waiting.groups.values(), key=lambda g: (g.oldest_at, g.heap[0][0]))
        work = [self._serve(group, appeared) for group in listed[:GROUPS_PER_ROUND]]
        await asyncio.gather(*work)

    async def _serve(self, group: Group, appeared: dict[bytes, tuple[Needs, int]]) -> None:
        now = self._now()
        wanted: dict[bytes, tuple[int, float | None]] = {}
        for peer, (needs, count) in appeared.items():
            if needs == group.needs:
                wanted[peer] = (count, None)
        if not wanted and now < self._ask_at.get(group.key, 0.0):
            return
        here = self._members.here()
        matching = sum(not unmet(m.capacity, m.traits, group.needs) for m in here)
        if not matching:
            group.reason = explain(here, group.needs) or "no peer is here"
            self._ask_at[group.key] = now + self._config.layer_wait_s
            return
        if not wanted:
            queue = self._estimate(group.top) is not None
            again_s = self._config.layer_wait_s * (0.6 + 0.2 * self._rng.random())
            self._ask_at[group.key] = now + again_s
            rows = await self._layer.find(group.needs, group.left, queue)
            wanted = {meta.peer: (count, value_of(meta.order)) for meta, count in rows}
        avoid = group.avoid if len(wanted) > len(group.avoid & wanted.keys()) else frozenset()
        rows_left = {peer: row for peer, row in wanted.items() if peer not in avoid}
        for peer in wanted.keys() - rows_left.keys():
            contact = self._members.contact(peer)
            if contact is not None:
                self._let_be(contact)
        record = Placement(self.name, matching=matching, known=len(here))
        calls = [self._capture(group, peer, row, record) for peer, row in rows_left.items()]
        await asyncio.gather(*calls)
        if group.left and not appeared and any(granted for _, granted, _ in record.asked):
            self._ask_at.pop(group.key, None)  # there was something: perhaps there is more
            self._wake.set()
        if group.left:
            peers = f"{matching} peer{'s match' if matching != 1 else ' matches'}"
            group.reason = f"{peers}, all busy; it waits on the layer for one that appears"
        self._waiting.forget_if_empty(group)

    async def _capture(
        self, group: Group, peer: bytes, row: tuple[int, float | None], record: Placement
    ) -> None:
        count, value = row
        contact = self._members.contact(peer)
        if contact is None:
            return
        if not group.left:
            self._let_be(contact)
            return
        top = group.top
        runtime_s, deadline_at = self._estimate(top), top.deadline_at
        room = Room(
            needs=group.needs,
            count=max(1, min(count, group.left, self._config.probe_batch_max)),
            runtime_s=runtime_s,
            deadline_in_s=None if deadline_at is None else deadline_at - self._now(),
            queue=runtime_s is not None,
        )
        try:
            limit_s = self._config.lease_ttl_s / 2
            message = Reserve(asks=(room,), consumed=True)
            answer = await self._rpc.call(contact, message, Offers, limit_s)
        except CallFailed as error:
            record.asked.append((peer, 0, str(error)))
            return
        grant = answer.grants[0] if answer.grants else None
        leases = grant.leases if grant is not None else ()
        record.asked.append((peer, len(leases), grant.refusal if grant is not None else ""))
        self._use(group, contact, leases, record, value)

    def _let_be(self, contact: Contact) -> None:
        """It is not wanted after all: it says anew where it stands, as it was consumed."""
        self._rpc.tell(contact, ReturnLeases(leases=()))

    def _use(
        self,
        group: Group,
        contact: Contact,
        leases: tuple[int, ...],
        record: Placement,
        value: float | None,
    ) -> None:
        placed: list[Placed] = []
        unused: list[int] = []
        how = "appeared while it waited" if value is None else f"the layer has it at {value:.0%}"
        mine = Placement(
            self.name, record.asked, record.matching, record.known,
            f"the least loaded that fits: {how}",
        )  # fmt: skip
        for lease in leases:
            unit = self._waiting.pop(group, near=contact.id)
            if unit is None:
                unused.append(lease)
            else:
                placed.append(Placed(unit, contact, lease, mine))
        if unused:
            self._rpc.tell(contact, ReturnLeases(leases=tuple(unused)))
        if placed:
            group.oldest_at = self._now()
            self._on_placed(placed)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
