"""The strategy `probe`: asks a few random peers for capacity, and takes the best offers.

This is the baseline, after batch sampling (Sparrow): units are placed in batches, so a few peers
are asked for many units at once, and the messages per unit fall with the size of the batch.

Rules:
- Units wait in groups (`waiting`); one message to a peer carries the requests of all groups.
- Only peers that could meet the needs when idle are asked. They are drawn at random: enough of them
  for the batch, and no fewer than a handful, so that there is a choice.
- Capacity that is free now is used first, on the peer with the most of it left; a place in a queue
  only when every matching peer has been asked or has just refused.
- A few units that fit where they were submitted are placed there at once, without a message or a
  wait.
- A peer that refuses is left alone, each time for twice as long, until it announces free capacity.
- A unit that has waited long asks peers to *hold* a place for it: no stream of small units keeps a
  large one waiting for ever. The groups that have waited longest come first in every message.
- Leases that were granted and not used are returned at once, and so are those that arrive late.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from ...capacity.matching import explain, slots, unmet
from ...config import Config
from ...membership.members import Members, State
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
from ..base import Estimate, OnPlaced, Placed, Placement, Unit
from ..local import place_here
from ..waiting import Group, GroupKey, Waiting, all_busy
from .config import ProbeConfig

GROUPS_PER_ROUND = 32

#: the requests in one message to a peer
Rows = list[tuple[Group, Room]]
#: peer, group, leases granted, refusal
Asked = list[tuple[bytes, Group, int, str]]


@dataclass(slots=True)
class _Peer:
    """The backoff of a peer, kept between rounds."""

    quiet_until: float = 0.0
    refused_in_a_row: int = 0


@dataclass(slots=True)
class _Offer:
    member: Member
    group: Group
    now: list[int]
    queued: list[int]
    wait_s: float

    @property
    def leases(self) -> list[int]:
        return self.now + self.queued

    def roominess(self) -> float:
        return len(self.now) / max(1, slots(self.member.capacity, self.group.needs.capacity))


class Probe:
    name = "probe"

    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        rng: random.Random,
        config: Config,
        on_placed: OnPlaced,
        estimate: Estimate = lambda unit: unit.runtime_s,
    ) -> None:
        self._rpc = rpc
        self._members = members
        self._rng = rng
        self._config = config
        self._own = config.of(ProbeConfig)
        self._on_placed = on_placed
        self._estimate = estimate
        self._waiting = Waiting(estimate)
        self._peers: dict[bytes, _Peer] = {}
        self._asking = False
        self._wake = asyncio.Event()
        self._late: set[asyncio.Task[Offers]] = set()
        members.listen(self._member_changed, at_stake=self._waiting.groups)

    # ----------------------------------------------------------------- the interface

    def add(self, units: Iterable[Unit]) -> None:
        now = self._now()
        self._waiting.add(units, now)
        self._place_here()
        if self._waiting:
            self._wake.set()

    def withdraw(self, keys: Iterable[AttemptKey]) -> None:
        self._waiting.withdraw(keys)

    def waiting_for(self, key: AttemptKey) -> str | None:
        return self._waiting.reason(key)

    def _member_changed(self, old: Member | None, new: Member) -> None:
        self._wake.set()

    def vacancy(self, peer: bytes, free: Capacity) -> None:
        known = self._peers.get(peer)
        if known is not None and free.millicores > 0:
            known.quiet_until = 0.0
            known.refused_in_a_row = 0
        if self._waiting:
            self._wake.set()

    async def run(self) -> None:
        while True:
            wait_s = self._until_next()
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if self._waiting:
                await self._round()

    # ----------------------------------------------------------------- at this peer

    def _place_here(self) -> None:
        me = self._members.me
        if self._asking or self._peer(me).quiet_until > self._now():
            return
        placed, short = place_here(
            self.name, self._waiting, self._rpc, me, self._members.count, self._estimate
        )
        if short:
            self._refused(self._peer(me), self._now())
        if placed:
            self._on_placed(placed)

    # ----------------------------------------------------------------- a round

    def _until_next(self) -> float | None:
        """Seconds until a peer may be asked again; None if nothing waits (a wake-up will come)."""
        if not self._waiting:
            return None
        now = self._now()
        times = [p.quiet_until - now for p in self._peers.values() if p.quiet_until > now]
        return max(0.001, min([*times, self._config.ask_backoff_s_max]))

    async def _round(self) -> None:
        self._waiting.regroup()
        now = self._now()
        known = self._members.here()
        asks: dict[bytes, Rows] = {}
        listed = sorted(self._waiting.groups.values(), key=lambda g: g.order)
        matching: dict[Needs, list[Member]] = {}
        everyone: dict[GroupKey, bool] = {}  # whether all peers that were ready are asked
        for group in listed:
            if len(everyone) >= GROUPS_PER_ROUND:
                break
            matching[group.needs] = fitting = _fitting(known, group.needs)
            if not fitting:
                group.reason = explain(known, group.needs) or "no peer is known"
                continue
            ready = self._ready(fitting, now)
            self._say_busy(group, fitting, now)
            if not ready:
                continue
            chosen, rooms = self._choose(group, ready, now)
            everyone[group.key] = len(chosen) == len(ready)
            for member, room in zip(chosen, rooms, strict=True):
                asks.setdefault(member.contact.id, []).append((group, room))
        if not asks:
            return
        self._asking = True
        try:
            offers, asked = await self._ask(asks)
        finally:
            self._asking = False
        self._assign(offers, asked, matching, everyone)

    def _ready(self, members: list[Member], now: float) -> list[Member]:
        """Those that may be asked now; no suspects: a round waits for every peer that it asks."""
        alive = [m for m in members if m.state == State.ALIVE]
        return [m for m in alive if self._peer(m).quiet_until <= now]

    def _choose(
        self, group: Group, ready: list[Member], now: float
    ) -> tuple[list[Member], list[Room]]:
        config = self._config
        need = group.needs.capacity
        each = sum(slots(m.capacity, need) for m in ready) / len(ready)
        count = math.ceil(group.left / max(1.0, each)) + 2
        count = min(len(ready), max(self._own.asked_min, min(self._own.asked_max, count)))
        chosen = self._rng.sample(ready, count)
        top = group.top
        runtime_s, deadline_at = self._estimate(top), top.deadline_at
        waited = now - group.oldest_at
        hold = waited > self._own.hold_after_s
        fair = math.ceil(1.5 * group.left / count)
        rooms = []
        for member in chosen:
            wanted = max(slots(member.capacity, need), fair if runtime_s is not None else 0)
            rooms.append(
                Room(
                    needs=group.needs,
                    count=max(1, min(group.left, wanted, config.ask_batch_max)),
                    runtime_s=runtime_s,
                    deadline_in_s=None if deadline_at is None else deadline_at - now,
                    queue=runtime_s is not None and self._waiting.may_queue,
                    hold=hold,
                    owner=group.top.owner[:64],
                )
            )
        return chosen, rooms

    async def _ask(self, asks: dict[bytes, Rows]) -> tuple[list[_Offer], Asked]:
        """Ask all peers at once and wait a little; leases that come later are returned."""
        me = self._members.me
        if list(asks) == [me.contact.id]:
            rows = asks[me.contact.id]
            own_answer = await self._rpc.call(me.contact, _reserve(rows), Offers)
            return self._answers([(me, rows, own_answer)])
        calls = self._begin_calls(asks)
        done, late = await asyncio.wait(calls, timeout=self._config.offer_s)
        now = self._now()
        asked: Asked = []
        answers: list[tuple[Member, Rows, Offers]] = []
        for task in [t for t in calls if t in late]:  # in the order of asking
            asked += self._not_answered(*calls[task], "no answer yet", now)
            self._late.add(task)
            contact = calls[task][0].contact
            task.add_done_callback(lambda t, to=contact: self._came_late(t, to))  # type: ignore[misc]
        for task in [t for t in calls if t in done]:
            try:
                answers.append((*calls[task], task.result()))
            except CallFailed as error:
                asked += self._not_answered(*calls[task], str(error), now)
        offers, answered = self._answers(answers)
        return offers, asked + answered

    def _begin_calls(
        self, asks: dict[bytes, Rows]
    ) -> dict[asyncio.Task[Offers], tuple[Member, Rows]]:
        calls: dict[asyncio.Task[Offers], tuple[Member, Rows]] = {}
        for peer, rows in asks.items():
            member = self._members.get(peer)
            if member is None:
                continue
            limit_s = self._config.lease_ttl_s / 2
            call = self._rpc.call(member.contact, _reserve(rows), Offers, limit_s)
            calls[asyncio.ensure_future(call)] = (member, rows)
        return calls

    def _not_answered(self, member: Member, rows: Rows, why: str, now: float) -> Asked:
        self._refused(self._peer(member), now)
        return [(member.contact.id, group, 0, why) for group, _ in rows]

    def _answers(self, answers: list[tuple[Member, Rows, Offers]]) -> tuple[list[_Offer], Asked]:
        now = self._now()
        offers: list[_Offer] = []
        asked: Asked = []
        for member, rows, answer in answers:
            short = False
            for (group, room), grant in zip(rows, answer.grants, strict=False):
                short |= len(grant.leases) - grant.queued < room.count
                asked.append((member.contact.id, group, len(grant.leases), grant.refusal))
                offers.append(_offer(member, group, grant))
                if not grant.leases:
                    group.refusals.append(now)
                    del group.refusals[:-1000]
            if short:
                self._refused(self._peer(member), now)
            else:
                self._peers.pop(member.contact.id, None)
        return offers, asked

    def _assign(
        self,
        offers: list[_Offer],
        asked: Asked,
        matching: dict[Needs, list[Member]],
        everyone: dict[GroupKey, bool],
    ) -> None:
        placed: list[Placed] = []
        groups = list({id(o.group): o.group for o in offers}.values())
        by_group = [[o for o in offers if o.group is group] for group in groups]
        for group, suitable in zip(groups, by_group, strict=True):
            record = self._record(group, asked, matching)
            placed.extend(self._take(group, suitable, record, everyone[group.key]))
        self._return_unused(chain.from_iterable(by_group))
        if placed:
            self._on_placed(placed)
        if self._waiting and self._may_ask_more(matching):
            self._wake.set()

    def _record(self, group: Group, asked: Asked, matching: dict[Needs, list[Member]]) -> Placement:
        return Placement(
            self.name,
            [(peer, granted, refusal) for peer, g, granted, refusal in asked if g is group],
            matching=len(matching[group.needs]) if group.needs in matching else None,
            known=len(self._members.here()),
        )

    def _return_unused(self, offers: Iterable[_Offer]) -> None:
        unused: dict[bytes, tuple[Contact, list[int]]] = {}
        for offer in offers:
            if offer.leases:
                contact = offer.member.contact
                unused.setdefault(contact.id, (contact, []))[1].extend(offer.leases)
        for contact, leases in unused.values():
            self._rpc.tell(contact, ReturnLeases(leases=tuple(leases)))

    def _may_ask_more(self, matching: dict[Needs, list[Member]]) -> bool:
        """Some matching peers have not been asked yet, or may be asked again."""
        return any(
            self._peer(m).quiet_until <= self._now()
            for group in self._waiting.groups.values()
            for m in matching.get(group.needs, ())
        )

    def _take(
        self, group: Group, offers: list[_Offer], record: Placement, everyone: bool
    ) -> list[Placed]:
        placed = []
        now = self._now()
        roomy = self._by_roominess(offers)
        queues = _by_wait(offers) if everyone else []
        offering = sum(bool(o.leases) for o in offers)
        while (roomy or queues) and (unit := self._waiting.pop(group)) is not None:
            if roomy:
                offer, lease = self._take_free(unit, roomy)
                record.why = record.why or f"it had the most free capacity of {offering} offers"
            else:
                offer, lease = _take_queued(queues)
                record.why = f"all peers were busy; it had the shortest queue of {offering} offers"
            placed.append(Placed(unit, offer.member.contact, lease, record))
        group.oldest_at = now if placed else group.oldest_at
        self._waiting.forget_if_empty(group)
        return placed

    def _by_roominess(self, offers: list[_Offer]) -> list[tuple[float, float, _Offer]]:
        """A heap of those that offer free capacity; a random number decides between equals."""
        roomy = [(-o.roominess(), self._rng.random(), o) for o in offers if o.now]
        heapq.heapify(roomy)
        return roomy

    def _take_free(
        self, unit: Unit, roomy: list[tuple[float, float, _Offer]]
    ) -> tuple[_Offer, int]:
        offer = self._best_for(unit, roomy)
        lease = offer.now.pop(0)
        if offer.now:
            heapq.heappush(roomy, (-offer.roominess(), self._rng.random(), offer))
        return offer, lease

    def _best_for(self, unit: Unit, roomy: list[tuple[float, float, _Offer]]) -> _Offer:
        """The peer with the most free capacity; one where it failed only if there is no other."""
        skipped = []
        best = heapq.heappop(roomy)
        while best[2].member.contact.id in unit.avoid and roomy:
            skipped.append(best)
            best = heapq.heappop(roomy)
        for entry in skipped:
            heapq.heappush(roomy, entry)
        return best[2]

    # ----------------------------------------------------------------- small things

    def _say_busy(self, group: Group, fitting: list[Member], now: float) -> None:
        recent = [t for t in group.refusals if t > now - 2.0]
        group.refusals = recent
        count = len(fitting)
        if all(m.state != State.ALIVE for m in fitting):
            group.reason = (
                f"none of the {count} suitable peers answers"
                if count > 1
                else "the only suitable peer does not answer"
            )
        elif recent:
            group.reason = all_busy(count)
        else:
            group.reason = f"{count} suitable peer{'s' * (count > 1)}; asking for capacity"

    def _peer(self, member: Member) -> _Peer:
        return self._peers.setdefault(member.contact.id, _Peer())

    def _refused(self, peer: _Peer, now: float) -> None:
        config = self._config
        wait_s = config.ask_backoff_s_min * 2 ** min(10, peer.refused_in_a_row)
        peer.refused_in_a_row += 1
        jitter = 0.5 + self._rng.random()
        peer.quiet_until = now + min(config.ask_backoff_s_max, wait_s) * jitter

    def _came_late(self, task: asyncio.Task[Offers], to: Contact) -> None:
        self._late.discard(task)
        if task.cancelled() or task.exception() is not None:
            return
        leases = tuple(lease for grant in task.result().grants for lease in grant.leases)
        if leases:
            self._rpc.tell(to, ReturnLeases(leases=leases))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _reserve(rows: Rows) -> Reserve:
    return Reserve(asks=tuple(room for _, room in rows))


def _fitting(members: list[Member], needs: Needs) -> list[Member]:
    return [m for m in members if not unmet(m.capacity, m.traits, needs)]


def _by_wait(offers: list[_Offer]) -> list[_Offer]:
    """Those that offer places in a queue, the shortest first."""
    return sorted((o for o in offers if o.queued), key=lambda o: o.wait_s)


def _take_queued(queues: list[_Offer]) -> tuple[_Offer, int]:
    offer = queues[0]
    lease = offer.queued.pop(0)
    if not offer.queued:
        queues.pop(0)
    return offer, lease


def _offer(member: Member, group: Group, grant: Grant) -> _Offer:
    leases = list(grant.leases)
    split = max(0, len(leases) - grant.queued)
    return _Offer(member, group, leases[:split], leases[split:], grant.wait_s)
