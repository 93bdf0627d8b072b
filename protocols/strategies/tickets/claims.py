"""The strategy `tickets`: homes post claims to cells; peers whose tickets meet them offer leases.

After seed 004: decentralised and cooperative scheduling through a coordination space. `space` says
where claims and tickets meet, `market` matches them, `owner` and `provider` are the two sides of a
cell. This module is the third side: the broker.

Rules:
- There is one claim for all units of the same needs: a number, not a thousand claims (beyond the
  paper).
- New units are claimed from one cell after the other, from as many at a time as should have
  capacity for them together; only units for which no cell has capacity wait in all cells at once.
  So hardly anything is offered twice; leases that are, are returned at once, and the rest of the
  claim is withdrawn everywhere.
- Claims are posted again every other second while they wait, to the owner of the cell at that time:
  a dead owner delays them only until its death is known.
- Offers may be lost or late. A lease expires by itself, and the next post says what has arrived.
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
from ..base import Estimate, OnPlaced, Placement, Unit
from ..local import place_here
from ..waiting import Group, GroupKey, Waiting, all_busy
from .config import TicketsConfig
from .messages import Claim, ClaimsPosted, Offer, PostClaims, Prospect, Shortfall
from .space import Cell, Reach, Space

CLAIMS_PER_MESSAGE = 500
NEAR_MAX = 8
#: how long the free capacity of a cell is remembered
KNOWN_S = 0.5
#: how soon after units were placed to check whether a run time has become known
LOOK_S_MIN = 0.01
#: how long an owner that did not answer is left alone
AGAIN_S = 1.0
CELLS_KNOWN_MAX = 4096


@dataclass(slots=True)
class _Stall:
    """The part of a claim in one cell."""

    cell: Cell
    peers: int = 0
    offered: int = 0  # units whose offers have arrived
    promised: int = 0  # units that the owner has promised, including those
    promised_at: float = 0.0
    posted: int = 0  # units that were wanted in the last post to the owner
    owner: bytes = b""
    others: int = 0
    failed: str = ""  # why the last post to the owner failed
    failed_at: float = -math.inf

    def under_way(self, now: float, patience_s: float) -> int:
        """Units that are promised, and not here yet; given up after a while."""
        if now - self.promised_at > patience_s:
            self.promised = self.offered
        return max(0, self.promised - self.offered)


@dataclass(slots=True)
class _Post:
    id: int
    key: GroupKey
    stalls: dict[bytes, _Stall] = field(default_factory=dict)
    tried: set[bytes] = field(default_factory=set)  # cells, for the units added last
    tries: int = 0

    @property
    def peers(self) -> int:
        return sum(stall.peers for stall in self.stalls.values())


Ask = tuple[_Post, _Stall, Claim]


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
        if first:  # else other units of this home wait already, as this peer has no capacity free
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
        """Not used: the peer's ticket says so, where claims of all homes are compared."""

    def _member_changed(self, old: Member | None, new: Member) -> None:
        self._wake.set()

    async def run(self) -> None:
        refresh_at = 0.0
        while True:
            now = self._now()
            if refresh_at <= now:
                refresh_at = now + self._own.claim_refresh_s * (0.8 + 0.2 * self._rng.random())
            unknown = self._waiting.has_unknown_runtimes
            wait_s = min(refresh_at - now, self._look_s) if unknown else refresh_at - now
            self._look_s = min(self._own.claim_refresh_s, 1.5 * self._look_s)
            try:
                async with asyncio.timeout(wait_s if self._waiting or self._posts else None):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await asyncio.sleep(0)  # units that are being added right now are posted as well
            await self._round(refresh=self._now() >= refresh_at)

    # ----------------------------------------------------------------- posting

    async def _round(self, refresh: bool) -> None:
        self._waiting.regroup()
        for _ in range(self._own.claim_tries_max + 2):  # some cells in turn, then all
            asks: list[Ask] = []
            for post in list(self._posts.values()):
                if post.key not in self._waiting.groups:
                    asks += self._withdrawals(post)
            for group in sorted(self._waiting.groups.values(), key=lambda g: g.order):
                asks += self._asks(group, refresh)
            if not asks:
                return
            await self._send(asks)
            refresh = False

    def _withdrawals(self, post: _Post) -> list[Ask]:
        asks: list[Ask] = []
        for stall in post.stalls.values():
            if stall.posted > stall.offered:
                stall.posted = stall.offered
                claim = Claim(post.id, stall.cell.key, post.key[0], stall.offered, stall.offered)
                asks.append((post, stall, claim))
        if not asks:
            del self._posts[post.key], self._ids[post.id]
        return asks

    def _asks(self, group: Group, refresh: bool) -> list[Ask]:
        reach = self._space.reach(group.needs)[: self._own.claim_cells_max]
        if not reach:
            group.reason = explain(self._members.here(), group.needs) or "no peer is known"
            return []
        post = self._post_of(group)
        now, patience_s = self._now(), self._own.claim_refresh_s
        for stall in post.stalls.values():
            stall.peers = 0  # in cells that have no peers any more
        stalls = [self._stall(post, cell_reach) for cell_reach in reach]
        coming = {s.cell.key: s.under_way(now, patience_s) for s in post.stalls.values()}
        need = group.left - sum(coming.values())
        part = need if post.tries < self._own.claim_tries_max else 0
        post.tries += 1
        rows = [(stall, r.slots) for stall, r in zip(stalls, reach, strict=True)]
        asks = self._ask_untried(post, group, rows, part, coming, now)
        if asks:
            return asks
        if need > 0:
            asks = self._ask_all(post, group, stalls, need, coming, refresh)
        self._say(group, post, need)
        return asks

    def _post_of(self, group: Group) -> _Post:
        post = self._posts.get(group.key)
        if post is None:
            self._next_id += 1
            post = self._posts[group.key] = _Post(self._next_id, group.key)
            self._ids[post.id] = post
        return post

    def _ask_untried(
        self,
        post: _Post,
        group: Group,
        rows: list[tuple[_Stall, int]],
        left: int,
        coming: dict[bytes, int],
        now: float,
    ) -> list[Ask]:
        """Claims to cells that were not tried yet: as many as should have capacity together."""
        asks: list[Ask] = []
        for stall, room in rows:
            if left <= 0:
                break
            key = stall.cell.key
            if key in post.tried or now - stall.failed_at <= AGAIN_S:
                continue
            post.tried.add(key)
            part = min(left, self._guess(key, group, room, now))
            if part:
                left -= part
                wanted = stall.offered + coming[key] + part
                asks.append((post, stall, self._claim(post, group, stall, wanted, now)))
        return asks

    def _ask_all(
        self,
        post: _Post,
        group: Group,
        stalls: list[_Stall],
        need: int,
        coming: dict[bytes, int],
        refresh: bool,
    ) -> list[Ask]:
        """Claims to all cells, for all that is needed: those that are due, new, or changed."""
        now = self._now()
        asks: list[Ask] = []
        for stall in stalls:
            wanted = stall.offered + coming[stall.cell.key] + need
            moved = stall.owner != self._space.owner(stall.cell.key)
            quiet = now - stall.failed_at <= AGAIN_S and not moved
            if refresh or moved or (stall.posted < wanted and not quiet):
                asks.append((post, stall, self._claim(post, group, stall, wanted, now)))
        return asks

    def _guess(self, cell: bytes, group: Group, most: int, now: float) -> int:
        """Units that a cell should have capacity for: as it said a moment ago, else all it has."""
        millicores, at = self._free.get(cell, (0, -1.0))
        if now - at > KNOWN_S:
            return most
        return millicores // max(1, group.needs.capacity.millicores)

    def _stall(self, post: _Post, reach: Reach) -> _Stall:
        stall = post.stalls.get(reach.cell.key)
        if stall is None:
            stall = post.stalls[reach.cell.key] = _Stall(reach.cell)
        stall.peers = reach.peers
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

    async def _send(self, asks: list[Ask]) -> None:
        by_owner: dict[bytes, list[Ask]] = defaultdict(list)
        for post, stall, claim in asks:
            stall.owner = self._space.owner(stall.cell.key)
            stall.posted = claim.wanted
            by_owner[stall.owner].append((post, stall, claim))
        calls = []
        for owner, rows in by_owner.items():
            for start in range(0, len(rows), CLAIMS_PER_MESSAGE):
                calls.append(self._post(owner, rows[start : start + CLAIMS_PER_MESSAGE]))
        await asyncio.gather(*calls)

    async def _post(self, owner: bytes, rows: list[Ask]) -> None:
        contact = self._members.contact(owner)
        self.counts["claims"] += len(rows)
        try:
            if contact is None:
                raise CallFailed("it is gone")
            message = PostClaims.of(tuple(claim for _, _, claim in rows))
            answer = await self._rpc.call(contact, message, ClaimsPosted, self._own.claim_answer_s)
        except CallFailed as error:
            for _, stall, _ in rows:
                stall.posted = stall.offered  # posted again with the next refresh
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
        peers = f"{post.peers} suitable peer{'s' if post.peers != 1 else ''}"
        others = sum(stall.others for stall in post.stalls.values())
        failed = [stall.failed for stall in post.stalls.values() if stall.peers]
        if failed and all(failed):
            group.reason = f"{peers}, but the peer that assigns them does not answer: {failed[0]}"
        elif need <= 0:
            group.reason = f"{peers}, and one of them has promised capacity for it"
        elif others:
            group.reason = f"{all_busy(post.peers)}; {others} other tasks wait for them, too"
        else:
            group.reason = all_busy(post.peers)

    # ----------------------------------------------------------------- offers

    def _offer(self, sender: Contact, message: Offer) -> None:
        post = self._ids.get(message.claim)
        stall = post.stalls.get(message.cell) if post is not None else None
        if stall is not None:
            stall.offered += len(message.leases)
            stall.promised = max(stall.promised, stall.offered)
        group = self._group_for(post) if post is not None else None
        record = Placement(
            self.name,
            [(sender.id, len(message.leases), "")],
            matching=post.peers if post is not None else None,
            known=self._members.count,
            why=f"matched with this peer's free capacity, at {stall.cell} of the index"
            if stall
            else "",
        )
        placed, unused = self._waiting.use(group, sender, message.leases, record, near=sender.id)
        self.counts["offers"] += 1
        self.counts["offered"] += len(message.leases)
        self.counts["unused"] += len(unused)
        if unused:
            self._rpc.tell(sender, ReturnLeases(leases=tuple(unused)))
        if group is not None:
            if placed:
                group.oldest_at = self._now()
            self._served(group)
        if placed:
            self._on_placed(placed)

    def _served(self, group: Group) -> None:
        self._waiting.forget_if_empty(group)
        self._look_s = LOOK_S_MIN
        if not group.left or group.size is None:
            self._wake.set()  # nothing more is wanted; or soon its run time will be known

    def _shortfall(self, sender: Contact, message: Shortfall) -> None:
        post = self._ids.get(message.claim)
        stall = post.stalls.get(message.cell) if post is not None else None
        if stall is not None and stall.promised > message.promised:
            stall.promised = max(stall.offered, message.promised)
            self.counts["shortfalls"] += 1
            self._wake.set()

    def _group_for(self, post: _Post) -> Group | None:
        """The group of this post; or, if its units' run times have become known, another one with
        the same needs and peers to avoid."""
        group = self._waiting.groups.get(post.key)
        if group is not None:
            return group
        needs, _, avoid, _ = post.key
        return next(
            (g for g in self._waiting.groups.values() if (g.needs, g.avoid) == (needs, avoid)), None
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
