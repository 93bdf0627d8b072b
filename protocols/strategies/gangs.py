"""Gangs: tasks that need several peers at once. Leases at as many different peers, all or none.

Whatever a workflow's strategy is, its gangs come here: the strategies find peers one by one, and
only the peers' own doors see the claims of all of them. Rules:
- At first a gang takes what is free: enough peers are asked for room right now. If fewer have any,
  all of it is given back at once: who holds nothing keeps nobody waiting.
- A gang that has waited for a while *holds*: as many peers keep for it what comes free there, until
  all have enough. Holds are renewed every second, and expire with the gang's home.
- Of two gangs that want the same peer the older has it, as long as the younger has not begun (see
  `admission`). The order is the same at every peer. So of all gangs that hold there is an oldest;
  nobody takes anything from it, nothing new begins where it waits, and it gets what it waits for.
  No circle of gangs that wait for each other can last, and none starves.
- A peer that dies, leaves, refuses to hold or does not answer for a while is replaced by another;
  so is one that has no room yet when another one has.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

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
    Offers,
    Reserve,
    ReturnLeases,
    Room,
)
from ..wire.rpc import CallFailed, Refused, Rpc
from .base import Estimate, OnPlaced, Placed, Placement, Unit

#: beyond as many as are needed, of those asked at a time: some will be busy
SPARE = 2


@dataclass(slots=True)
class _GatheringGang:
    unit: Unit
    tag: GangTag
    added_at: float
    next_at: float
    wait_s: float
    leases: dict[bytes, int] = field(default_factory=dict)
    holding: list[bytes] = field(default_factory=list)  # where it waits, or has a lease
    missed: Counter[bytes] = field(default_factory=Counter)  # renewals in a row, unanswered
    reason: str = "peers are about to be asked"

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
        """One of a gang, and so all of it."""
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
        at = self._now() + self._config.ask_backoff_s_min  # such news comes in crowds
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
            now = self._now()
            due = sorted((g for g in self._gangs.values() if g.next_at <= now), key=lambda g: g.tag)
            due = due[: self._config.gangs_at_once]
            here = [m for m in self._members.here() if m.state == State.ALIVE] if due else []
            fits = {
                needs: [m for m in here if not unmet(m.capacity, m.traits, needs)]
                for needs in {gang.unit.needs for gang in due}
            }
            await asyncio.gather(*(self._gather(g, here, fits[g.unit.needs]) for g in due))

    # ----------------------------------------------------------------- gathering

    async def _gather(
        self, gang: _GatheringGang, here: list[Member], matching: list[Member]
    ) -> None:
        config, now = self._config, self._now()
        wanted = [m for m in matching if m.contact.id not in gang.unit.avoid]
        wanted = wanted if len(wanted) >= gang.size else matching
        if len(matching) < gang.size:
            why = explain(here, gang.unit.needs) or f"{len(matching)} of {len(here)} match"
            gang.reason = f"needs {gang.size} peers at once: {why}"
            self._give_back(gang, {*gang.holding, *gang.leases})
            gang.next_at = now + config.gang_renew_s
            return
        if now - gang.added_at < config.gang_hold_after_s:
            await self._take(gang, wanted)
        else:
            await self._hold(gang, wanted)
        if len(gang.leases) >= gang.size and gang.tag.id in self._gangs:
            self._place(gang, len(matching))

    async def _take(self, gang: _GatheringGang, wanted: list[Member]) -> None:
        """What is free right now, at enough peers; or nothing."""
        config = self._config
        order = self._rng.sample(wanted, len(wanted))
        order.sort(key=lambda m: (m.contact.id not in gang.unit.near, -m.traits.speed))
        order = order[: config.gang_asked_max]
        asked, until = 0, self._now() + config.lease_ttl_s / 2
        while len(gang.leases) < gang.size and order and gang.tag.id in self._gangs:
            if self._now() > until:
                break  # the first leases would expire
            count = gang.size - len(gang.leases) + SPARE
            some, order = order[:count], order[count:]
            asked += len(some)
            await asyncio.gather(*(self._ask(gang, m.contact, hold=False) for m in some))
        if len(gang.leases) < gang.size:
            found = len(gang.leases)
            gang.reason = (
                f"needs {gang.size} peers at once: {len(wanted)} match, {asked} were asked, "
                f"{found} had room"
            )
            self._give_back(gang, set(gang.leases))
            self._later(gang)

    async def _hold(self, gang: _GatheringGang, wanted: list[Member]) -> None:
        """What comes free at as many peers as are needed."""
        contacts = {m.contact.id: m.contact for m in wanted}
        gone = {peer for peer in gang.holding if peer not in contacts}
        self._give_back(gang, gone)
        left = [peer for peer in contacts if peer not in gang.holding]
        missing = gang.size - len(gang.holding)
        gang.holding += self._rng.sample(left, min(len(left), max(0, missing)))
        asked = list(gang.holding)
        asks = [self._ask(gang, contacts[peer], hold=True) for peer in asked]
        kept = await asyncio.gather(*asks)
        if gang.tag.id not in self._gangs:
            return  # withdrawn meanwhile, and given back
        refused = {p for p, is_kept in zip(asked, kept, strict=True) if not is_kept}
        self._give_back(gang, refused)
        await self._swap(gang, [c for p, c in contacts.items() if p not in gang.holding])
        if gang.tag.id not in self._gangs:
            return
        ready = len(gang.leases)
        gang.reason = (
            f"needs {gang.size} peers at once: {len(wanted)} match, {len(gang.holding)} keep room "
            f"for it as it comes free, {ready} have enough"
        )
        now = self._now()
        gang.next_at = now + (0.1 if refused else self._config.gang_renew_s)

    async def _swap(self, gang: _GatheringGang, others: list[Contact]) -> None:
        """Where it waits for long, another may have room by now: a few are asked each time."""
        waiting = [peer for peer in gang.holding if peer not in gang.leases]
        if not waiting or not others:
            return
        some = self._rng.sample(others, min(len(others), len(waiting) + SPARE))
        found = await asyncio.gather(*(self._ask(gang, contact, hold=False) for contact in some))
        if gang.tag.id not in self._gangs:
            return
        for contact, has_room in zip(some, found, strict=True):
            if has_room and waiting:
                self._give_back(gang, [waiting.pop()])
                gang.holding.append(contact.id)
            elif has_room:
                self._give_back(gang, [contact.id])

    async def _ask(self, gang: _GatheringGang, contact: Contact, hold: bool) -> bool:
        """True if that peer has room for it, or keeps what comes free."""
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
                return True  # what it keeps for us expires later
            grant = Grant()  # should it have said yes, it is told that nothing is wanted
        if gang.tag.id not in self._gangs:
            self._rpc.tell(contact, ReturnLeases(leases=(), gangs=(gang.tag.id,)))
            return False
        if grant.leases:
            gang.leases[contact.id] = grant.leases[0]
        else:
            gang.leases.pop(contact.id, None)  # an older gang has it now
            if not grant.held:
                self._rpc.tell(contact, ReturnLeases(leases=(), gangs=(gang.tag.id,)))
        return bool(grant.leases) or grant.held

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
            why=f"these {gang.size} peers had room for it at once",
        )
        placed = [
            Placed(replace(gang.unit, key=key), m.contact, gang.leases[m.contact.id], record)
            for key, m in zip(gang.unit.gang, chosen, strict=True)
        ]
        self._give_back(gang, unused)
        self._on_placed(placed)

    # ----------------------------------------------------------------- small things

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
