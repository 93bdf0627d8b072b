"""The claims and tickets of one cell, and their matching. Pure.

After seed 004, Algorithm 2. Rules:
- Claims are ordered by deadline; a claim without one counts as due a fixed time after it came, less
  its rank (the seconds of work that depend on it). So ranks are aged: a second of waiting weighs as
  much as a second of work, and none starves. The order of two claims does not change while they
  wait, so nothing is sorted again, except a claim whose next unit is due earlier. A claim whose
  oldest units are served moves to where the others belong: a home with an endless stream of units
  does not keep its place.
- A ticket is divided among the claims it meets, the first in order first, until its free capacity
  is used up: a cell never overbooks a ticket. (In the end, only the ticket's peer decides.)
- Claims of one owner with the same needs form a line; a ticket is compared with the head of each
  line, not with each claim: a match takes time only for each different need and owner.
- Waiting owners take turns (`shares`); among claims of one owner, their order decides.
- A claim stands for many units. Both sides count from a claim's first unit on (`wanted`, `offered`,
  `matched`), so a post that crosses an offer on its way is not matched twice.
- An offer that has not reached its home after a while never will: its units are wanted again.
- A claim that waits long for capacity that never comes free all at once (a large need beside a
  stream of small ones) asks one peer to *hold* a place in its queue.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...capacity.admission import NO_DEADLINE_S
from ...capacity.matching import plus, slots, unmet
from ...config import Config
from ...wire.messages import Capacity, Member, Needs, Ticket
from ..shares import Shares
from .config import TicketsConfig
from .messages import Claim, Prospect, Redemption

ClaimKey = tuple[bytes, int]  # its home, and the home's number for it
Match = tuple[bytes, Redemption]  # the ticket's peer, and the claim it is to redeem
#: how far down a line to look for a claim that does not avoid a peer
LINE_DEPTH = 15
REDEMPTIONS_MAX = 500  # half of what a message holds, as a ticket may be in two cells
LINE_SLACK = 64
#: a claim whose units are younger by less than this keeps its place
ORDER_S_MIN = 0.5
UNITS_MAX = 2**31
NOTHING = Capacity()
#: units that add up to less work than this go to one peer
CHUNK_S = 0.01


@dataclass(slots=True)
class _Standing:
    key: ClaimKey
    claim: Claim
    order: float  # the claim with the smallest goes first
    matched: int  # units, counted from the first one
    matched_at: float
    expires_at: float
    since: float
    held_at: float = 0.0
    waits: bool = False  # its owner is among those that take turns

    @property
    def left(self) -> int:
        return max(0, self.claim.wanted - self.matched)


_Place = tuple[float, int, _Standing]  # its order, and a unique number


@dataclass(slots=True)
class _Booked:
    """A ticket, less what has been promised of it since it was posted."""

    member: Member
    free: Capacity
    queue_s: float = 0.0
    queue_units: int = 0
    queue_cores: int = 0
    base: Capacity = NOTHING  # its free capacity when that was last known
    at: float = -math.inf  # when that was
    told_until: float = -math.inf  # until then its peer announces more capacity by itself
    meets: dict[Needs, bool] = field(default_factory=dict)


class Market:
    def __init__(self, key: bytes, config: Config, rng: random.Random) -> None:
        self.key = key
        self.active_at = 0.0  # when a claim was last here
        self.tickets: dict[bytes, _Booked] = {}
        self._config = config
        self._own = config.of(TicketsConfig)
        self._rng = rng
        self._claims: dict[ClaimKey, _Standing] = {}
        self._lines: dict[Needs, dict[str, list[_Place]]] = {}  # by needs, then by owner
        self._count = 0
        self._runtime_s = self._own.claim_answer_s
        self._left_before = (-1.0, 0)
        self._shares = Shares()  # of owners whose claims wait here

    def __len__(self) -> int:
        return len(self._claims)

    def has(self, home: bytes, claim: int) -> bool:
        return (home, claim) in self._claims

    # ----------------------------------------------------------------- claims

    def post(self, home: bytes, claim: Claim, now: float) -> tuple[Prospect, list[Match]]:
        """A new claim, or an update of one: its prospect, and what it is matched with at once."""
        key = (home, claim.id)
        if claim.wanted <= claim.offered:
            self._remove(key)
            return Prospect(claim.offered), []
        self.active_at = now
        standing = self._claims.get(key)
        if standing is not None and standing.claim.needs != claim.needs:
            self._remove(key)
            standing = None
        if standing is None:
            standing = self._enter(key, claim, now)
        else:
            self._update(standing, claim, now)
        self._note(standing)
        # (the paper's claims wait for the next ticket, whatever the last ones had left)
        matches: list[Match] = []
        if self._own.ticket_on_change:
            self._pace(claim.runtime_s)
            self._guess_silent(now)
            matches = self._serve(standing, now)
        free = self._free_slots(claim.needs)
        others = max(0, self._all_left(now) - standing.left)
        return Prospect(standing.matched, min(free, UNITS_MAX), min(others, UNITS_MAX)), matches

    def _enter(self, key: ClaimKey, claim: Claim, now: float) -> _Standing:
        order = _order(claim, now)
        expires_at = now + self._own.claim_ttl_s
        since = now - claim.waited_s
        standing = _Standing(key, claim, order, claim.offered, now, expires_at, since)
        self._claims[key] = standing
        self._line_up(standing)
        return standing

    def _update(self, standing: _Standing, claim: Claim, now: float) -> None:
        idle = not standing.left
        if now - standing.matched_at > self._own.claim_refresh_s:
            standing.matched = claim.offered  # offers that have not arrived by now never will
        standing.matched = max(standing.matched, claim.offered)
        if standing.claim.owner != claim.owner:  # it belongs in another line
            idle = True
            self._rest(standing)
        standing.claim = claim
        standing.expires_at = now + self._own.claim_ttl_s
        standing.since = now - claim.waited_s
        order = _order(claim, now)
        moves = _moves(standing, order)
        if moves or idle:
            standing.order = order if order != standing.order else math.nextafter(order, 0.0)
        if standing.left and (idle or moves):
            self._line_up(standing)

    def _guess_silent(self, now: float) -> None:
        for booked in self.tickets.values():
            if booked.told_until <= now:
                self._guess(booked, now)

    def _free_slots(self, needs: Needs) -> int:
        """Units with these needs that would find capacity here now."""
        booked = self.tickets.values()
        return sum(slots(b.free, needs.capacity) for b in booked if self._meets(b, needs))

    def _all_left(self, now: float) -> int:
        """Outstanding units of all claims. Only shown to people, so it may be a moment old."""
        at, count = self._left_before
        if now - at > 0.5:
            count = sum(standing.left for standing in self._claims.values())
            self._left_before = now, count
        return count

    def _line_up(self, standing: _Standing) -> None:
        self._count += 1
        line = self._lines.setdefault(standing.claim.needs, {}).setdefault(standing.claim.owner, [])
        if len(line) > 2 * len(self._claims) + LINE_SLACK:
            line[:] = [entry for entry in line if _counts(entry)]
            heapq.heapify(line)
        heapq.heappush(line, (standing.order, self._count, standing))

    def _remove(self, key: ClaimKey) -> None:
        standing = self._claims.pop(key, None)
        if standing is not None:  # its place in the line is skipped when it comes up
            standing.claim = standing.claim._replace(wanted=0)
            self._note(standing)

    def _rest(self, standing: _Standing) -> None:
        if standing.waits:
            self._shares.leaves(standing.claim.owner)
            standing.waits = False

    def _note(self, standing: _Standing) -> None:
        """A claim may have started or stopped waiting: only owners that wait take turns."""
        if not standing.left:
            self._rest(standing)
        elif not standing.waits:
            self._shares.waits(standing.claim.owner)
            standing.waits = True

    def short(self, home: bytes, claim: int, count: int) -> None:
        """So many units were to be redeemed, and there was no capacity for them."""
        standing = self._claims.get((home, claim))
        if standing is not None and count:
            idle = not standing.left
            standing.matched = max(standing.claim.offered, standing.matched - count)
            if idle and standing.left:
                self._line_up(standing)
            self._note(standing)

    def promised(self, home: bytes, claim: int) -> int | None:
        """The units promised to a claim so far; None if it has all that it wants."""
        standing = self._claims.get((home, claim))
        return standing.matched if standing is not None and standing.left else None

    def serve_again(self, claims: Iterable[ClaimKey], but: bytes, now: float) -> list[Match]:
        """These claims came up short at that peer: another one may have capacity for them."""
        matches: list[Match] = []
        for key in claims:
            standing = self._claims.get(key)
            if standing is not None and self._own.ticket_on_change:
                matches += self._serve(standing, now, but)
        return matches

    def forget_home(self, home: bytes) -> None:
        for key in [key for key in self._claims if key[0] == home]:
            self._remove(key)

    def expect(self, member: Member) -> None:
        """A peer of this cell that has not posted a ticket yet: assume for now that it is idle."""
        self.tickets[member.contact.id] = _Booked(member, member.capacity)

    def left_of(self, peer: bytes) -> Ticket:
        booked = self.tickets[peer]
        return Ticket(booked.free, booked.queue_s, booked.queue_units, booked.queue_cores)

    def _pace(self, runtime_s: float | None) -> None:
        """The smoothed run time of recent tasks here."""
        runtime_s = self._own.claim_answer_s if runtime_s is None else runtime_s
        self._runtime_s += (runtime_s - self._runtime_s) / 8

    def _guess(self, booked: _Booked, now: float) -> None:
        """Guess the free capacity of a silent peer: of the work that ran when it was last heard of,
        the part that has ended grows with the time that has passed. A guess that is too high costs
        a redemption in vain; one that is too low, a question."""
        passed = min(1.0, (now - booked.at) / max(1e-3, self._runtime_s))
        rows = zip(booked.base, booked.member.capacity, strict=True)
        booked.free = Capacity(*(have + int((most - have) * passed) for have, most in rows))

    def unheard(self, now: float) -> list[bytes]:
        """The silent peers: they do not know that a claim waits here."""
        return [peer for peer, booked in self.tickets.items() if booked.told_until <= now]

    def tell(self, peer: bytes, now: float) -> float:
        """How long this peer is to announce it when it has more capacity; 0 if no claim waits."""
        wanted_s = self._own.ticket_wanted_s if self.waits() else 0.0
        booked = self.tickets.get(peer)
        if booked is not None:
            booked.told_until = now + wanted_s
        return wanted_s

    def told(self, peer: bytes, until: float) -> None:
        """This peer knows that it is to announce it when it has more capacity."""
        if peer in self.tickets:
            self.tickets[peer].told_until = until

    def waits(self) -> bool:
        """Some claim here does not have all that it wants."""
        return any(self._heads(needs) for needs in list(self._lines))

    def active(self, now: float) -> bool:
        """There is a claim here, or was a moment ago."""
        return bool(self._claims) or now - self.active_at < self._own.ticket_wanted_s

    # ----------------------------------------------------------------- matching

    def _meets(self, booked: _Booked, needs: Needs) -> bool:
        """Whether its peer meets the needs when idle; cached, as there are few different needs."""
        meets = booked.meets.get(needs)
        if meets is None:
            if len(booked.meets) >= 256:
                booked.meets.clear()
            meets = not unmet(booked.member.capacity, booked.member.traits, needs)
            booked.meets[needs] = meets
        return meets

    def _ahead(self, booked: _Booked, claim: Claim) -> int:
        """Units that may wait in its queue: a little work, and only units of known run time."""
        if claim.runtime_s is None:
            return 0
        places = min(booked.queue_units, self._config.leases_max)
        by_time = int(booked.queue_s / max(1e-5, _share_s(booked, claim)))
        by_share = booked.queue_cores // max(1, claim.needs.capacity.millicores)
        return max(0, min(places, max(by_time, by_share)))

    def _avoids(self, standing: _Standing, peer: bytes, now: float) -> bool:
        patient = now - standing.since < self._own.ticket_hold_after_s
        return patient and peer in standing.claim.avoid

    def _give(
        self, standing: _Standing, booked: _Booked, count: int, queued: int, now: float
    ) -> Match:
        claim = standing.claim
        if count:
            booked.free = plus(booked.free, claim.needs.capacity, -count)
        if queued:
            booked.queue_s = max(0.0, booked.queue_s - queued * _share_s(booked, claim))
            booked.queue_units -= queued
            cores = queued * claim.needs.capacity.millicores
            booked.queue_cores = max(0, booked.queue_cores - cores)
        booked.base, booked.at = booked.free, now
        standing.matched += count + queued
        standing.matched_at = now
        if self._shares.contended:
            each = max(1, claim.needs.capacity.millicores) / 1000 * (claim.runtime_s or 1.0)
            self._shares.give(claim.owner, (count + queued) * each)
        self._note(standing)
        return booked.member.contact.id, self._redemption(standing, count + queued)

    def _redemption(self, standing: _Standing, count: int, hold: bool = False) -> Redemption:
        claim = standing.claim
        return Redemption(
            standing.key[0],
            claim.id,
            claim.cell,
            claim.needs,
            count,
            claim.runtime_s,
            claim.deadline_in_s,
            hold,
        )

    def _slots(self, booked: _Booked, needs: Capacity) -> int:
        """Units that may start at once; no peer leases more than this at a time."""
        return min(slots(booked.free, needs), self._config.leases_max)

    def _serve(self, standing: _Standing, now: float, but: bytes = b"") -> list[Match]:
        """Match a claim with all tickets: see `_place` for their order."""
        if not standing.left or self._comes_later(standing):
            return []
        claim = standing.claim
        fitting = [
            booked
            for peer, booked in self.tickets.items()
            if peer != but
            and self._meets(booked, claim.needs)
            and not self._avoids(standing, peer, now)
        ]
        shares: dict[bytes, list[int]] = {}  # units that start at once, and that wait in the queue
        left = self._fill_free(claim, standing.left, fitting, shares)
        self._fill_queues(claim, left, fitting, shares)
        return [
            self._give(standing, self.tickets[peer], at_once, queued, now)
            for peer, (at_once, queued) in shares.items()
        ]

    def _fill_free(
        self, claim: Claim, left: int, fitting: list[_Booked], shares: dict[bytes, list[int]]
    ) -> int:
        """One unit after the other to the best peer with free capacity; how many are left."""
        needs = claim.needs.capacity
        open_now = [self._place(b, claim) for b in fitting if self._slots(b, needs)]
        heapq.heapify(open_now)
        free = {b.member.contact.id: self._slots(b, needs) for b in fitting}
        while left and open_now:
            far, slow, load, luck, peer = heapq.heappop(open_now)
            booked = self.tickets[peer]
            share = shares.setdefault(peer, [0, 0])
            share[0] += 1
            left -= 1
            free[peer] -= 1
            more = min(left, self._chunk(booked, claim) - 1, self._ahead(booked, claim) - share[1])
            if more > 0:  # units so short that they are not worth a message each
                share[1] += more
                left -= more
            if free[peer]:
                load += 1 / max(1, slots(booked.member.capacity, needs))
                heapq.heappush(open_now, (far, slow, load, luck, peer))
        return left

    def _fill_queues(
        self, claim: Claim, left: int, fitting: list[_Booked], shares: dict[bytes, list[int]]
    ) -> None:
        """The units that are left go into the queues, in equal parts."""
        queues = sorted(fitting, key=lambda b: -b.queue_s) if left else []
        for index, booked in enumerate(queues):
            peer = booked.member.contact.id
            at_once, queued = shares.get(peer, (0, 0))
            fair = -(-left // (len(queues) - index))
            room = self._ahead(booked, claim) - queued
            count = min(left, room, max(fair, self._chunk(booked, claim)))
            if count > 0:
                shares[peer] = [at_once, queued + count]
                left -= count

    def _comes_later(self, standing: _Standing) -> bool:
        """Another owner, which got less, waits with the same needs: so both wait for tickets, and
        take turns."""
        if not self._shares.contended:
            return False
        own_share = self._shares.given(standing.claim.owner)
        heads = self._heads(standing.claim.needs)
        return any(self._shares.given(line[0][2].claim.owner) < own_share for line in heads)

    def _chunk(self, booked: _Booked, claim: Claim) -> int:
        """How many units make up enough work for a message."""
        if claim.runtime_s is None:
            return 1
        return math.ceil(CHUNK_S / max(1e-5, _share_s(booked, claim)))

    def _place(self, booked: _Booked, claim: Claim) -> tuple[bool, float, float, float, bytes]:
        """Sorts peers: those that hold its inputs, then the fastest, then the least loaded."""
        peer, needs = booked.member.contact.id, claim.needs.capacity
        load = 1 - slots(booked.free, needs) / max(1, slots(booked.member.capacity, needs))
        speed = round(4 * min(1e6, booked.member.traits.speed))
        return peer not in claim.near, -speed, load, self._rng.random(), peer

    def ticket(self, member: Member, ticket: Ticket, now: float) -> list[Redemption]:
        """The current ticket of a peer; the claims it is to redeem with it."""
        peer = member.contact.id
        known = self.tickets.get(peer)
        if known is None or known.member is not member:
            known = self.tickets[peer] = _Booked(member, ticket.free)
        known.free, known.queue_s, known.queue_units, known.queue_cores = ticket
        known.base, known.at = known.free, now
        rows: list[Redemption] = []
        left = self._config.leases_max  # no peer leases more at a time
        for queued in (False, True):
            while left and len(rows) < REDEMPTIONS_MAX:
                standing = self._first(known, queued, now)
                if standing is None:
                    break
                count = min(left, standing.left, self._room(known, standing.claim, queued))
                count = 1 if self._shares.contended else count
                left -= count
                split = (0, count) if queued else (count, 0)
                rows.append(self._give(standing, known, *split, now)[1])
        return _merged(rows)

    def _room(self, booked: _Booked, claim: Claim, queued: bool) -> int:
        return self._ahead(booked, claim) if queued else self._slots(booked, claim.needs.capacity)

    def _first(self, booked: _Booked, queued: bool, now: float) -> _Standing | None:
        """The first in turn of the claims that a ticket meets and has capacity for."""
        peer = booked.member.contact.id
        best: _Place | None = None
        for needs in list(self._lines):
            if not self._meets(booked, needs):
                continue
            head = self._head(needs, peer, now)
            if head is None or (best is not None and self._turn(head) >= self._turn(best)):
                continue
            if self._room(booked, head[2].claim, queued):
                best = head
        return None if best is None else best[2]

    def _heads(self, needs: Needs) -> list[list[_Place]]:
        """The lines with these needs in which a claim waits, one for each owner."""
        lines = self._lines.get(needs, {})
        for owner, line in list(lines.items()):
            while line and not _counts(line[0]):
                heapq.heappop(line)
            if not line:
                del lines[owner]
        if not lines:
            self._lines.pop(needs, None)
        return list(lines.values())

    def _head(self, needs: Needs, peer: bytes, now: float) -> _Place | None:
        """Each owner's first claim that does not avoid that peer; of these, the one whose turn it
        is."""
        heads = []
        for line in self._heads(needs):
            few = line[:LINE_DEPTH]  # in a heap these are close to the first
            fits = (e for e in few if _counts(e) and not self._avoids(e[2], peer, now))
            heads += [line[0]] if not self._avoids(line[0][2], peer, now) else [*fits][:1]
        return min(heads, key=self._turn, default=None)

    def _turn(self, entry: _Place) -> tuple[float, float, int]:
        """Sorts claims: by the owner that got least, then by their order."""
        return self._shares.given(entry[2].claim.owner), entry[0], entry[1]

    # ----------------------------------------------------------------- as time goes by

    def tick(self, now: float) -> list[Match]:
        """Remove claims whose home no longer renews them; and ask for holds for the old ones."""
        for key in [key for key, s in self._claims.items() if s.expires_at <= now]:
            self._remove(key)
        matches: list[Match] = []
        for standing in list(self._claims.values()):
            waited_s = now - max(standing.since, standing.held_at)
            if standing.left and waited_s >= self._own.ticket_hold_after_s:
                matches += self._hold(standing, now)
        return matches

    def _hold(self, standing: _Standing, now: float) -> list[Match]:
        """One unit of a claim that finds no free capacity waits at one peer that suits it."""
        needs = standing.claim.needs
        fitting = [b for b in self.tickets.values() if self._meets(b, needs)]
        if not fitting or any(slots(b.free, needs.capacity) for b in fitting):
            return []
        chosen = self._rng.choice(fitting)
        standing.held_at = now
        standing.matched += 1
        standing.matched_at = now
        self._note(standing)
        return [(chosen.member.contact.id, self._redemption(standing, 1, hold=True))]

    def sanity_check(self) -> None:
        for booked in self.tickets.values():
            assert min(booked.free) >= 0, "a ticket was promised away twice"
        for standing in self._claims.values():
            lined = self._lines.get(standing.claim.needs, {}).get(standing.claim.owner, [])
            lined_up = any(e[2] is standing and _counts(e) for e in lined)
            assert not standing.left or lined_up, "a claim is in no line"
            assert standing.waits == bool(standing.left), "its owner does not take turns"


def _order(claim: Claim, now: float) -> float:
    """When its first unit is due, less the work that depends on it."""
    if claim.deadline_in_s is not None:
        return now + claim.deadline_in_s - claim.rank_s
    return now - claim.waited_s + NO_DEADLINE_S - claim.rank_s


def _moves(standing: _Standing, order: float) -> bool:
    """It moves in its line: later units have not waited as long as the first ones; or the next one
    is due earlier."""
    if standing.claim.deadline_in_s is not None:
        return abs(order - standing.order) > ORDER_S_MIN
    return order > standing.order + ORDER_S_MIN


def _counts(entry: _Place) -> bool:
    """Whether a place in a line is valid: its claim wants more, and has not moved since."""
    return bool(entry[2].left) and entry[0] == entry[2].order


def _share_s(booked: _Booked, claim: Claim) -> float:
    """Seconds for which one unit would take up the whole peer."""
    needs = max(1, claim.needs.capacity.millicores)
    runtime_s = (claim.runtime_s or 0.0) / (booked.member.traits.speed or 1.0)
    return runtime_s * needs / max(1, booked.member.capacity.millicores)


def _merged(rows: list[Redemption]) -> list[Redemption]:
    """One redemption for each claim: its units that start now, and those that queue."""
    by_claim: dict[ClaimKey, Redemption] = {}
    for row in rows:
        before = by_claim.get((row.home, row.claim))
        count = row.count + (before.count if before is not None else 0)
        by_claim[row.home, row.claim] = row._replace(count=count)
    return list(by_claim.values())
