"""Gang scheduling: places tasks that must run at several peers at once, at all of them or at none.

Gangs are placed here whatever the strategy of their workflow: the strategies find peers one by one,
and only the peers' own doors see the requests of all of them. Rules:
- At first a gang takes what is free: enough peers are asked for capacity right now. If too few have
  any, all leases are returned at once: a gang that holds nothing keeps nobody waiting.
- A gang that has waited for a while *holds*: as many peers as it needs reserve for it what comes
  free there, until all have enough. Holds are renewed every second, and expire if its home dies.
- Of two gangs that want the same peer, the older one gets it, as long as the younger one has not
  started (see `admission`). The order is the same at every peer. So one of all gangs that hold is
  the oldest; nothing is taken from it, nothing new starts where it waits, and it gets what it waits
  for. There is no deadlock among gangs, and none starves.
- A peer that dies, leaves, refuses to hold or does not answer for a while is replaced by another;
  so is one that has no free capacity yet when another one has.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress

from ..capacity.matching import explain, unmet
from ..config import Config
from ..membership.members import Members, State
from ..wire.messages import (
    AttemptKey,
    Capacity,
    Contact,
    GangTag,
    Grant,
    Member,
    Needs,
    Offers,
    Reserve,
    ReturnLeases,
    Room,
)
from ..wire.rpc import CallFailed, Refused, Rpc
from .base import Estimate, OnPlaced, Placed, Placement, Unit

#: peers that are asked beyond those needed, because some will be busy
SPARE = 2


@dataclass(slots=True)
class _GatheringGang:
    unit: Unit
    tag: GangTag
    added_at: float
    next_at: float
    wait_s: float
    leases: dict[bytes, int] = field(default_factory=dict)
    holding: list[bytes] = field(default_factory=list)  # peers where it waits, or has a lease
    missed: Counter[bytes] = field(default_factory=Counter)  # unanswered renewals in a row
    reason: str = "it is about to be placed"

    @property
    def size(self) -> int:
        return len(self.unit.gang)


class Gangs:
    name = "gangs"

    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        rng: random.Random,
        config: Config,
        clock: Callable[[], float],
        on_placed: OnPlaced,
        estimate: Estimate = lambda unit: unit.runtime_s,
    ) -> None:
        self._rpc = rpc
        self._members = members
        self._rng = rng
        self._config = config
        self._clock = clock
        self._on_placed = on_placed
        self._estimate = estimate
        self._gangs: dict[int, _GatheringGang] = {}
        self._of: dict[AttemptKey, _GatheringGang] = {}
        self._next_id = rng.getrandbits(48)
        self._wake = asyncio.Event()
        members.listen(self._member_changed, at_stake=self._gangs)

    # ----------------------------------------------------------------- the interface

    def add(self, units: Iterable[Unit]) -> None:
        now = self._now()
        for unit in units:
            if any(key in self._of for key in unit.gang):
                continue
            self._next_id += 1
            tag = GangTag(self._clock(), self._next_id)
            gang = _GatheringGang(unit, tag, now, now, self._config.ask_backoff_s_min)
            self._gangs[tag.id] = gang
            self._of.update(dict.fromkeys(unit.gang, gang))
            self._wake.set()

    def withdraw(self, keys: Iterable[AttemptKey]) -> None:
        """Withdrawing one task of a gang withdraws the whole gang."""
        for key in keys:
            gang = self._of.get(key)
            if gang is not None:
                self._remove(gang)
                self._give_back(gang, {*gang.holding, *gang.leases})

    def waiting_for(self, key: AttemptKey) -> str | None:
        gang = self._of.get(key)
        return None if gang is None else gang.reason

    def vacancy(self, peer: bytes, free: Capacity) -> None:
        if free.millicores > 0:
            self._soon(g for g in self._gangs.values() if peer in g.holding)

    def _member_changed(self, old: Member | None, new: Member) -> None:
        came = new.state == State.ALIVE and (old is None or old.state != State.ALIVE)
        peer = new.contact.id
        self._soon(g for g in self._gangs.values() if came or peer in g.holding)

    def _soon(self, gangs: Iterable[_GatheringGang]) -> None:
        at = self._now() + self._config.ask_backoff_s_min  # such events come in bursts
        for gang in gangs:
            if at < gang.next_at:
                gang.next_at = at
                self._wake.set()

    async def run(self) -> None:
        while True:
            at = min((gang.next_at for gang in self._gangs.values()), default=None)
            try:
                async with asyncio.timeout(None if at is None else max(0.0, at - self._now())):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            due = self._due()
            here = [m for m in self._members.here() if m.state == State.ALIVE] if due else []
            fits = _fitting(here, {gang.unit.needs for gang in due})
            await asyncio.gather(*(self._gather(g, here, fits[g.unit.needs]) for g in due))

    def _due(self) -> list[_GatheringGang]:
        now = self._now()
        due = sorted((g for g in self._gangs.values() if g.next_at <= now), key=lambda g: g.tag)
        return due[: self._config.gangs_at_once]

    # ----------------------------------------------------------------- gathering

    async def _gather(
        self, gang: _GatheringGang, here: list[Member], matching: list[Member]
    ) -> None:
        config, now = self._config, self._now()
        wanted = [m for m in matching if m.contact.id not in gang.unit.avoid]
        wanted = wanted if len(wanted) >= gang.size else matching
        if len(matching) < gang.size:
            few = f"only {len(matching)} of {len(here)} are suitable"
            why = explain(here, gang.unit.needs) or few
            gang.reason = f"needs {gang.size} peers at once: {why}"
            self._give_back(gang, {*gang.holding, *gang.leases})
            gang.next_at = now + config.gang_renew_s
            return
        if now - gang.added_at < config.gang_hold_after_s:
            await self._take(gang, wanted)
        else:
            await self._hold(gang, wanted)
        if len(gang.leases) >= gang.size and self._is_wanted(gang):
            self._place(gang, len(matching))

    async def _take(self, gang: _GatheringGang, wanted: list[Member]) -> None:
        """Take what is free right now at enough peers; or nothing."""
        config = self._config
        order = self._rng.sample(wanted, len(wanted))
        order.sort(key=lambda m: (m.contact.id not in gang.unit.near, -m.traits.speed))
        order = order[: config.gang_asked_max]
        asked, until = 0, self._now() + config.lease_ttl_s / 2
        while len(gang.leases) < gang.size and order and self._is_wanted(gang):
            if self._now() > until:
                break  # the first leases would expire
            count = gang.size - len(gang.leases) + SPARE
            some, order = order[:count], order[count:]
            asked += len(some)
            await asyncio.gather(*(self._ask(gang, m.contact, hold=False) for m in some))
        if len(gang.leases) < gang.size:
            gang.reason = (
                f"needs {gang.size} peers at once: {len(wanted)} are suitable, {asked} were asked, "
                f"{len(gang.leases)} had free capacity"
            )
            self._give_back(gang, set(gang.leases))
            self._later(gang)

    async def _hold(self, gang: _GatheringGang, wanted: list[Member]) -> None:
        """Have as many peers as the gang needs reserve for it what comes free there."""
        contacts = {m.contact.id: m.contact for m in wanted}
        self._choose_holding(gang, contacts)
        refused = await self._renew(gang, contacts)
        if not self._is_wanted(gang):
            return  # withdrawn meanwhile, and its leases were returned then
        self._give_back(gang, refused)
        await self._swap(gang, [c for p, c in contacts.items() if p not in gang.holding])
        if not self._is_wanted(gang):
            return
        gang.reason = (
            f"needs {gang.size} peers at once: {len(wanted)} are suitable, {len(gang.holding)} "
            f"reserve for it what comes free, {len(gang.leases)} have enough"
        )
        now = self._now()
        gang.next_at = now + (0.1 if refused else self._config.gang_renew_s)

    def _choose_holding(self, gang: _GatheringGang, contacts: dict[bytes, Contact]) -> None:
        self._give_back(gang, {peer for peer in gang.holding if peer not in contacts})
        left = [peer for peer in contacts if peer not in gang.holding]
        missing = gang.size - len(gang.holding)
        gang.holding += self._rng.sample(left, min(len(left), max(0, missing)))

    async def _renew(self, gang: _GatheringGang, contacts: dict[bytes, Contact]) -> set[bytes]:
        """Ask all that hold for the gang to go on; the peers that refuse."""
        asked = list(gang.holding)
        asks = [self._ask(gang, contacts[peer], hold=True) for peer in asked]
        kept = await asyncio.gather(*asks)
        return {p for p, is_kept in zip(asked, kept, strict=True) if not is_kept}

    async def _swap(self, gang: _GatheringGang, others: list[Contact]) -> None:
        """Ask a few other peers each time: by now one may have what the gang waits for."""
        waiting = [peer for peer in gang.holding if peer not in gang.leases]
        if not waiting or not others:
            return
        some = self._rng.sample(others, min(len(others), len(waiting) + SPARE))
        have_room = await asyncio.gather(*(self._ask(gang, c, hold=False) for c in some))
        if not self._is_wanted(gang):
            return
        for contact in compress(some, have_room):
            if waiting:
                self._give_back(gang, [waiting.pop()])
                gang.holding.append(contact.id)
            else:
                self._give_back(gang, [contact.id])

    async def _ask(self, gang: _GatheringGang, contact: Contact, hold: bool) -> bool:
        """True if that peer granted a lease, or reserves what comes free."""
        grant = await self._request(gang, contact, hold)
        if grant is None:
            return True  # its hold is still there, and expires later
        if not self._is_wanted(gang):
            self._rpc.tell(contact, ReturnLeases(leases=(), gangs=(gang.tag.id,)))
            return False
        if grant.leases:
            gang.leases[contact.id] = grant.leases[0]
        else:
            gang.leases.pop(contact.id, None)  # an older gang has it now
            if not grant.held:
                self._rpc.tell(contact, ReturnLeases(leases=(), gangs=(gang.tag.id,)))
        return bool(grant.leases) or grant.held

    async def _request(self, gang: _GatheringGang, contact: Contact, hold: bool) -> Grant | None:
        """None: a peer that holds did not answer, but not for long enough to be given up."""
        unit, now = gang.unit, self._now()
        due_s = None if unit.deadline_at is None else unit.deadline_at - now
        room = Room(unit.needs, 1, self._estimate(unit), due_s, hold=hold, gang=gang.tag)
        try:
            limit_s = self._config.offer_s if not hold else self._config.gang_renew_s
            answer = await self._rpc.call(contact, Reserve(asks=(room,)), Offers, limit_s)
            grant = answer.grants[0] if answer.grants else Grant()
            gang.missed.pop(contact.id, None)
        except Refused:
            grant = Grant()
        except CallFailed:
            gang.missed[contact.id] += hold
            if hold and gang.missed[contact.id] < self._config.gang_misses_max:
                return None
            grant = Grant()  # in case it did grant a lease, it is told to return it
        return grant

    def _place(self, gang: _GatheringGang, matching: int) -> None:
        known = self._members.get
        peers = [m for peer in gang.leases if (m := known(peer)) is not None]
        if len(peers) < gang.size:  # one was forgotten just now
            self._give_back(gang, [p for p in gang.leases if known(p) is None])
            self._later(gang)
            return
        self._remove(gang)
        peers.sort(key=lambda m: (m.contact.id not in gang.unit.near, -m.traits.speed))
        chosen, unused = peers[: gang.size], {m.contact.id for m in peers[gang.size :]}
        record = Placement(
            self.name,
            [(m.contact.id, 1, "") for m in chosen],
            matching=matching,
            known=self._members.count,
            why=f"these {gang.size} peers had free capacity for it at once",
        )
        placed = [
            Placed(gang.unit._replace(key=key), m.contact, gang.leases[m.contact.id], record)
            for key, m in zip(gang.unit.gang, chosen, strict=True)
        ]
        self._give_back(gang, unused)
        self._on_placed(placed)

    # ----------------------------------------------------------------- small things

    def _is_wanted(self, gang: _GatheringGang) -> bool:
        """It has been neither placed nor withdrawn."""
        return gang.tag.id in self._gangs

    def _remove(self, gang: _GatheringGang) -> None:
        del self._gangs[gang.tag.id]
        for key in gang.unit.gang:
            del self._of[key]

    def _give_back(self, gang: _GatheringGang, peers: Iterable[bytes]) -> None:
        for peer in sorted(peers):
            gang.leases.pop(peer, None)
            if peer in gang.holding:
                gang.holding.remove(peer)
            contact = self._members.contact(peer)
            if contact is not None:
                self._rpc.tell(contact, ReturnLeases(leases=(), gangs=(gang.tag.id,)))

    def _later(self, gang: _GatheringGang) -> None:
        gang.next_at = self._now() + gang.wait_s * (0.75 + 0.5 * self._rng.random())
        gang.wait_s = min(self._config.gang_renew_s, 2 * gang.wait_s)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _fitting(here: list[Member], kinds: set[Needs]) -> dict[Needs, list[Member]]:
    return {n: [m for m in here if not unmet(m.capacity, m.traits, n)] for n in kinds}
