"""`tickets`: a home posts claims to cells; peers whose tickets meet them offer room.

After seed 004: decentralised and cooperative scheduling through a coordination space. `space` says
where claims and tickets meet, `market` how they are matched, `owner` and `provider` are the two
sides of a cell. This is the third: the broker.

Rules:
- One claim for all units of the same needs: a number, not a thousand claims (beyond the paper).
- Fresh units are claimed from one cell after the other, from as many at a time as should have room
  for them together; only what finds no room anywhere waits in all cells at once. So mostly nothing
  is offered twice; what is, is given back at once, and the rest is withdrawn everywhere.
- Claims are said again every other second while they wait, to whoever owns the cell by then: a dead
  owner costs as long as its death takes to be known.
- Offers may be lost or come late. A lease expires by itself, and the next post says what arrived.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...capacity.matching import explain
from ...config import Config
from ...membership.members import Members
from ...wire.messages import AttemptKey, Capacity, Contact, Member, ReturnLeases
from ...wire.rpc import CallFailed, Rpc
from ..base import Estimate, OnPlaced, Placed, Placement, Unit
from ..local import place_here
from ..waiting import Group, GroupKey, Waiting
from .config import TicketsConfig
from .messages import Claim, ClaimsPosted, Offer, PostClaims, Prospect, Shortfall
from .space import Cell, Reach, Space

CLAIMS_PER_MESSAGE = 500
NEAR_MAX = 8
#: what a cell has free is remembered for so long
KNOWN_S = 0.5
#: how soon after units were placed it is looked whether a run time has become known
LOOK_S_MIN = 0.01
#: an owner that did not answer is left alone for so long
AGAIN_S = 1.0
CELLS_KNOWN_MAX = 4096


@dataclass(slots=True)
class _Stall:
    """One claim's part in one cell."""

    cell: Cell
    peers: int = 0
    offered: int = 0  # units whose offers have arrived
    promised: int = 0  # as the owner says, those among them
    promised_at: float = 0.0
    posted: int = 0  # units that the owner was last told to be wanted
    owner: bytes = b""
    others: int = 0
    failed: str = ""  # why its owner did not take the last post
    failed_at: float = -math.inf

    def under_way(self, now: float, patience_s: float) -> int:
        """Promised, and not here yet; not for ever."""
        if now - self.promised_at > patience_s:
            self.promised = self.offered
        return max(0, self.promised - self.offered)


@dataclass(slots=True)
class _Post:
    id: int
    key: GroupKey
    stalls: dict[bytes, _Stall] = field(default_factory=dict)
    tried: set[bytes] = field(default_factory=set)  # cells, for what was added last
    tries: int = 0


class Tickets:
    name = "tickets"

    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        space: Space,
        rng: random.Random,
        config: Config,
        on_placed: OnPlaced,
        estimate: Estimate = lambda unit: unit.runtime_s,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._rpc = rpc
        self._members = members
        self._space = space
        self._rng = rng
        self._config = config
        self._own = config.of(TicketsConfig)
        self._on_placed = on_placed
        self._estimate = estimate
        self._waiting = Waiting(estimate, by_avoid=True)
        self._posts: dict[GroupKey, _Post] = {}
        self._ids: dict[int, _Post] = {}
        self._free: dict[bytes, tuple[int, float]] = {}  # cell → millicores, as of when
        self._next_id = rng.getrandbits(48)
        self._look_s = LOOK_S_MIN
        self._wake = asyncio.Event()
        rpc.on(Offer, self._offer)
        rpc.on(Shortfall, self._shortfall)
        members.listen(self._member_changed, at_stake=self._waiting.groups)

    # ----------------------------------------------------------------- the interface

    def add(self, units: Iterable[Unit]) -> None:
        first = not self._waiting
        grown = self._waiting.add(units, self._now())
        if first:  # else others of this home wait already, and there is no room here
            known = self._members.count
            placed, _ = place_here(
                self.name, self._waiting, self._rpc, self._members.me, known, self._estimate
            )
            if placed:
                self._on_placed(placed)
        for group in grown:
            post = self._posts.get(group.key)
            if post is not None:
                post.tried.clear()
                post.tries = 0
        if self._waiting:
            self._wake.set()

    def withdraw(self, keys: Iterable[AttemptKey]) -> None:
        self._waiting.withdraw(keys)
        if self._posts:
            self._wake.set()

    def waiting_for(self, key: AttemptKey) -> str | None:
        return self._waiting.reason(key)

    def vacancy(self, peer: bytes, free: Capacity) -> None:
        """Its ticket says so, where claims of all homes are weighed against each other."""

    def _member_changed(self, old: Member | None, new: Member) -> None:
        self._wake.set()

    async def run(self) -> None:
        refresh_at = 0.0
        while True:
            now = self._now()
            if refresh_at <= now:
                refresh_at = now + self._own.claim_refresh_s * (0.8 + 0.2 * self._rng.random())
            unknown = any(group.size is None for group in self._waiting.groups.values())
            wait_s = min(refresh_at - now, self._look_s) if unknown else refresh_at - now
            self._look_s = min(self._own.claim_refresh_s, 1.5 * self._look_s)
            try:
                async with asyncio.timeout(wait_s if self._waiting or self._posts else None):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await asyncio.sleep(0)  # what is added in this moment goes along
            await self._round(refresh=self._now() >= refresh_at)

    # ----------------------------------------------------------------- posting

    async def _round(self, refresh: bool) -> None:
        self._waiting.regroup()
        for _ in range(self._own.claim_tries_max + 2):  # some cells in turn, then all
            asks: list[tuple[_Post, _Stall, Claim]] = []
            for post in list(self._posts.values()):
                if post.key not in self._waiting.groups:
                    asks += self._withdrawals(post)
            for group in sorted(self._waiting.groups.values(), key=lambda g: g.order):
                asks += self._asks(group, refresh)
            if not asks:
                return
            await self._send(asks)
            refresh = False

    def _withdrawals(self, post: _Post) -> list[tuple[_Post, _Stall, Claim]]:
        found = []
        for stall in post.stalls.values():
            if stall.posted > stall.offered:
                stall.posted = stall.offered
                claim = Claim(post.id, stall.cell.key, post.key[0], stall.offered, stall.offered)
                found.append((post, stall, claim))
        if not found:
            del self._posts[post.key], self._ids[post.id]
        return found

    def _asks(self, group: Group, refresh: bool) -> list[tuple[_Post, _Stall, Claim]]:
        reach = self._space.reach(group.needs)[: self._own.claim_cells_max]
        if not reach:
            group.reason = explain(self._members.here(), group.needs) or "no peer is here"
            return []
        post = self._posts.get(group.key)
        if post is None:
            self._next_id += 1
            post = self._posts[group.key] = _Post(self._next_id, group.key)
            self._ids[post.id] = post
        now, patience_s = self._now(), self._own.claim_refresh_s
        for stall in post.stalls.values():
            stall.peers = 0  # in cells that nobody lives in any more
        stalls = [self._stall(post, one) for one in reach]
        coming = {s.cell.key: s.under_way(now, patience_s) for s in post.stalls.values()}
        need = group.left - sum(coming.values())
        found = []
        part_left = need if post.tries < self._own.claim_tries_max else 0
        post.tries += 1
        for stall, one in zip(stalls, reach, strict=True):
            if part_left <= 0:
                break
            if stall.cell.key not in post.tried and now - stall.failed_at > AGAIN_S:
                post.tried.add(stall.cell.key)
                part = min(part_left, self._guess(stall.cell.key, group, one.slots, now))
                if part:
                    part_left -= part
                    wanted = stall.offered + coming[stall.cell.key] + part
                    found.append((post, stall, self._claim(post, group, stall, wanted, now)))
        if found:
            return found
        if need > 0:
            for stall in stalls:
                wanted = stall.offered + coming[stall.cell.key] + need
                moved = stall.owner != self._space.owner(stall.cell.key)
                quiet = now - stall.failed_at <= AGAIN_S and not moved
                if refresh or moved or (stall.posted < wanted and not quiet):
                    found.append((post, stall, self._claim(post, group, stall, wanted, now)))
        self._say(group, post, need)
        return found

    def _guess(self, cell: bytes, group: Group, most: int, now: float) -> int:
        """Units that should find room there: as was heard a moment ago, else all it ever has."""
        millicores, at = self._free.get(cell, (0, -1.0))
        if now - at > KNOWN_S:
            return most
        return millicores // max(1, group.needs.capacity.millicores)

    def _stall(self, post: _Post, one: Reach) -> _Stall:
        stall = post.stalls.get(one.cell.key)
        if stall is None:
            stall = post.stalls[one.cell.key] = _Stall(one.cell)
        stall.peers = one.peers
        return stall

    def _claim(self, post: _Post, group: Group, stall: _Stall, wanted: int, now: float) -> Claim:
        top = group.top
        near = Counter(peer for unit in group.units(64) for peer in unit.near)
        return Claim(
            id=post.id,
            cell=stall.cell.key,
            needs=group.needs,
            wanted=wanted,
            offered=stall.offered,
            rank_s=min(1e8, max(0.0, top.rank)),
            waited_s=max(0.0, now - group.oldest_at),
            runtime_s=self._estimate(top),
            deadline_in_s=None if top.deadline_at is None else top.deadline_at - now,
            avoid=tuple(sorted(group.avoid))[:8],
            near=tuple(peer for peer, _ in near.most_common(NEAR_MAX)),
            owner=top.owner[:64],
        )

    async def _send(self, asks: list[tuple[_Post, _Stall, Claim]]) -> None:
        by_owner: dict[bytes, list[tuple[_Post, _Stall, Claim]]] = defaultdict(list)
        for post, stall, claim in asks:
            stall.owner = self._space.owner(stall.cell.key)
            stall.posted = claim.wanted
            by_owner[stall.owner].append((post, stall, claim))
        calls = []
        for owner, rows in by_owner.items():
            for start in range(0, len(rows), CLAIMS_PER_MESSAGE):
                calls.append(self._post(owner, rows[start : start + CLAIMS_PER_MESSAGE]))
        await asyncio.gather(*calls)

    async def _post(self, owner: bytes, rows: list[tuple[_Post, _Stall, Claim]]) -> None:
        contact = self._members.contact(owner)
        self.counts["claims"] += len(rows)
        try:
            if contact is None:
                raise CallFailed("it is gone")
            message = PostClaims.of(tuple(claim for _, _, claim in rows))
            answer = await self._rpc.call(contact, message, ClaimsPosted, self._own.claim_answer_s)
        except CallFailed as error:
            for _, stall, _ in rows:
                stall.posted = stall.offered  # tried again with the next refresh
                stall.failed, stall.failed_at = str(error), self._now()
            return
        now = self._now()
        for (_, stall, claim), prospect in zip(rows, answer.prospects, strict=False):
            self._take(stall, claim, prospect, now)

    def _take(self, stall: _Stall, claim: Claim, prospect: Prospect, now: float) -> None:
        if prospect.promised > stall.promised:
            stall.promised_at = now
        stall.promised = max(stall.offered, min(prospect.promised, claim.wanted))
        stall.others = prospect.others
        stall.failed, stall.failed_at = "", -math.inf
        if len(self._free) >= CELLS_KNOWN_MAX:
            self._free.clear()
        millicores = prospect.free * claim.needs.capacity.millicores
        self._free[stall.cell.key] = (millicores, now)

    def _say(self, group: Group, post: _Post, need: int) -> None:
        peers = sum(stall.peers for stall in post.stalls.values())
        others = sum(stall.others for stall in post.stalls.values())
        match = f"{peers} peer{'s match' if peers != 1 else ' matches'}"
        failed = [stall.failed for stall in post.stalls.values() if stall.peers]
        if failed and all(failed):
            group.reason = f"{match}, but who matches it with them does not answer: {failed[0]}"
        elif need <= 0:
            group.reason = f"{match}, room was promised for it and is on its way"
        elif others:
            group.reason = f"{match}, all busy; its claim waits beside {others} units of others"
        else:
            group.reason = f"{match}, all busy; its claim waits for a ticket"

    # ----------------------------------------------------------------- offers

    def _offer(self, sender: Contact, message: Offer) -> None:
        post = self._ids.get(message.claim)
        stall = post.stalls.get(message.cell) if post is not None else None
        if stall is not None:
            stall.offered += len(message.leases)
            stall.promised = max(stall.promised, stall.offered)
        group = self._group_for(post) if post is not None else None
        placed: list[Placed] = []
        unused: list[int] = []
        record = Placement(
            self.name,
            [(sender.id, len(message.leases), "")],
            matching=sum(s.peers for s in post.stalls.values()) if post is not None else None,
            known=self._members.count,
            why=f"its claim met a ticket of this peer in cell {stall.cell}" if stall else "",
        )
        for lease in message.leases:
            unit = self._waiting.pop(group, near=sender.id) if group is not None else None
            if unit is None:
                unused.append(lease)
            else:
                placed.append(Placed(unit, sender, lease, record))
        self.counts["offers"] += 1
        self.counts["offered"] += len(message.leases)
        self.counts["unused"] += len(unused)
        if unused:
            self._rpc.tell(sender, ReturnLeases(leases=tuple(unused)))
        if group is not None:
            if placed:
                group.oldest_at = self._now()
            self._waiting.forget_if_empty(group)
            self._look_s = LOOK_S_MIN
            if not group.left or group.size is None:
                self._wake.set()  # nothing more is wanted; or soon it is known how long it takes
        if placed:
            self._on_placed(placed)

    def _shortfall(self, sender: Contact, message: Shortfall) -> None:
        post = self._ids.get(message.claim)
        stall = post.stalls.get(message.cell) if post is not None else None
        if stall is not None and stall.promised > message.promised:
            stall.promised = max(stall.offered, message.promised)
            self.counts["shortfalls"] += 1
            self._wake.set()

    def _group_for(self, post: _Post) -> Group | None:
        """Its own; or, as its units' run times are known by now, another of the same needs."""
        found = self._waiting.groups.get(post.key)
        if found is not None:
            return found
        needs, _, avoid, _ = post.key
        return next(
            (g for g in self._waiting.groups.values() if (g.needs, g.avoid) == (needs, avoid)), None
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
