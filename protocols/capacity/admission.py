"""A peer's own decision about its own capacity: reserve → commit → release.

Rules, and why nothing is ever over-booked:
- Capacity is integers. Running units and immediate leases together never take more than there is.
- A lease is for one unit. It expires by itself, and is dropped when its home dies: a home that dies
  after reserving blocks capacity for a few seconds at most. An expired or unknown lease cannot be
  committed.
- A unit with an immediate lease begins to run when it is committed. One with a queued lease waits
  for its turn in a single queue, earliest deadline first; units without a deadline are due a fixed
  time after they came.
- The queue is short (in seconds of estimated work): it hides a round trip, it is no backlog.
- A unit at the queue's head that does not fit yet may be overtaken by smaller units for a moment
  only; then the peer drains for it. So a large unit never starves. `hold` asks for such a place.
- Owners who are refused here take turns (`turns`), through whichever homes they ask.
- A queued unit that has not begun in time is handed back, to be placed elsewhere.
- A *gang* is a task that needs several peers at once; its home gathers leases for it. A gang that
  holds a peer keeps the capacity that comes free there until it has enough. Of two gangs the older
  one gets the capacity, even if the younger has a lease already: until it is committed, a lease is
  no promise. The order of two gangs is the same at every peer, so they never deadlock.
- What was promised for a certain time (`bookings`) gets its capacity at that time. Work without a
  promise runs in between; if it is still here then, it makes way, the youngest unit first. A unit
  that has made way `ways_max` times has its place for good when it comes again.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from ..config import Config
from ..wire.messages import Capacity, GangTag, Grant, Room, Traits
from .bookings import Bookings, Commitment, length_here
from .calendar import exceeds
from .matching import plus, slots, unmet
from .turns import Turns

#: units without a deadline are due this long after they came: first come, first served
NO_DEADLINE_S = 7 * 86400.0
#: the run time assumed for a unit of unknown length: nobody should queue behind it
RUNTIME_S_UNKNOWN = 60.0
#: how long a unit whose run time is unknown is taken to run, if it makes way no more
FIXED_S = 3600.0
#: a queued unit that must be handed back in less than this begins even if it may have to make way
PATIENT_S = 1.0
#: how many booked units try to begin before their slots, and may not
EARLY_TRIES_MAX = 8
#: so long before the last moment, a booked unit takes the place of one that takes too long
PRESSING_S = 0.5
#: how far down the queue to look for a unit that fits, behind one that does not
BACKFILL_DEPTH = 32


def _work(needs: Capacity, runtime_s: float | None) -> float:
    """Core-seconds times a thousand."""
    return needs.millicores * (RUNTIME_S_UNKNOWN if runtime_s is None else runtime_s)


def _may_queue(room: Room, most: int | None) -> bool:
    """Units beyond the free capacity may wait here, unless owners take turns (`most`)."""
    return room.hold or (room.queue and most is None)


GangKey = tuple[bytes, int]  # its home, and the home's number for it


@dataclass(slots=True)
class _GangClaim:
    """One gang's claim to a lease, which it has or waits for."""

    home: bytes
    room: Room
    tag: GangTag
    expires_at: float
    lease: int = 0  # 0: none yet
    robbed: int = 0  # its former lease, which an older gang has taken

    @property
    def key(self) -> GangKey:
        return self.home, self.tag.id

    @property
    def order(self) -> tuple[float, bytes, int]:
        return self.tag.since, self.home, self.tag.id


@dataclass(slots=True)
class _Lease:
    home: bytes
    needs: Capacity
    expires_at: float
    queued: bool
    runtime_s: float | None
    due_at: float
    hold: bool
    gang: GangKey | None = None
    owner: str | None = None


@dataclass(order=True, slots=True)
class _Queued:
    due_at: float
    order: int
    unit: Hashable = field(compare=False)
    needs: Capacity = field(compare=False)
    runtime_s: float | None = field(compare=False)
    since: float = field(compare=False)
    hand_back_at: float = field(compare=False)


class Admission:
    def __init__(self, capacity: Capacity, traits: Traits, config: Config) -> None:
        self.capacity = capacity
        self.traits = traits
        self.closed = ""  # why nothing is accepted any more
        self._config = config
        self._free = capacity
        self._leases: dict[int, _Lease] = {}
        self._gangs: dict[GangKey, _GangClaim] = {}  # the one heard of longest ago comes first
        self._running: dict[Hashable, tuple[Capacity, float]] = {}
        self._running_work = 0.0
        self._hand_back_at = math.inf  # no queued unit is to be handed back earlier
        self._queue: list[_Queued] = []
        self._queued: dict[Hashable, _Queued] = {}
        # waiting work, in core-seconds times a thousand: kept up to date, as it is read often
        self._queued_work = 0.0
        self._leased_work = 0.0
        self._queued_leases = 0
        self._queued_cores = 0  # millicores of queued units and queued leases
        self._hold_leases = 0
        self._wishes: dict[bytes, tuple[float, str | None]] = {}
        self._turns = Turns(config.turn_s, config.turn_answer_s)
        self._owners: dict[
            Hashable, tuple[str | None, int]
        ] = {}  # of each unit, and its millicores
        self.bookings = Bookings(
            capacity, config.promised_share, config.booking_hold_s, config.booking_affirm_s,
            config.bookings_max,
        )  # fmt: skip
        self._booked = Capacity()  # taken by booked units that run
        self._fixed: dict[Hashable, int] = {}  # units that make way no more → their place
        self._making_way: dict[Hashable, None] = {}  # they were told to end
        self._told_to_go: list[Hashable] = []  # the same, and nobody knows yet
        self._is_due = False  # a booked unit's time has come, and it waits for room
        self.passed_over = False  # one owner was refused for another's sake: tell that one
        self._next_lease = 1
        self._order = 0

    # ----------------------------------------------------------------- asking

    def reserve(self, home: bytes, room: Room, now: float) -> Grant:
        if room.runtime_s is not None and self.traits.speed not in (0.0, 1.0):
            room = room._replace(runtime_s=room.runtime_s / self.traits.speed)  # as it is here
        if self.closed:
            return Grant(refusal=self.closed)
        missing = unmet(self.capacity, self.traits, room.needs)
        if missing:
            return Grant(refusal="does not have " + " and ".join(missing))
        self.expire(now)
        if room.gang is not None:
            return self._reserve_gang(home, room, room.gang, now)
        if self._awaited():
            self._wish(home, room.owner, now)
            return Grant(refusal="busy: kept for a task that needs several peers at once")
        if self._is_due:
            self._wish(home, room.owner, now)
            return Grant(refusal="busy: kept for a task that was promised this time")
        return self._reserve_units(home, room, now)

    def _reserve_units(self, home: bytes, room: Room, now: float) -> Grant:
        """As many leases as there is capacity for, at once or queued."""
        needs = room.needs.capacity
        count = min(room.count, max(0, self._config.leases_max - len(self._leases)))
        immediate = 0 if self._is_draining(now) else min(count, self._slots_now(room, now))
        most = self._turns.most(room.owner, needs.millicores, self._free, now)
        others_turn = False
        if most is not None and immediate > most:
            immediate, self.passed_over, others_turn = most, True, True
        queued, wait_s = 0, 0.0
        if immediate < count and _may_queue(room, most):
            queued, wait_s = self._queue_room(room, count - immediate)
        granted = immediate + queued
        leases = tuple(self._lease(home, room, i >= immediate, now) for i in range(granted))
        refusal = ""
        if granted < room.count:
            refusal = "it is another owner's turn" if others_turn else self._busy(granted)
            self._wish(home, room.owner, now)
            self._turns.refused(room.owner, needs, now)
        else:
            self._turns.served(room.owner)
        return Grant(leases=leases, queued=queued, wait_s=wait_s, refusal=refusal)

    def _slots_now(self, room: Room, now: float) -> int:
        """How many such units may begin now. If it is known that they would have to make way for a
        booked one, they begin elsewhere; unless they have waited long."""
        needs = room.needs.capacity
        free = slots(self._free, needs)
        if not self.bookings or room.runtime_s is None or room.hold:
            return free
        return min(free, slots(self._beside(now, room.runtime_s), needs))

    def _beside(self, now: float, runtime_s: float) -> Capacity:
        """What is neither used nor booked for the whole of that time."""
        booked = self.bookings.calendar.most(now, now + length_here(runtime_s, 1.0))
        free = plus(self._free, self._booked)  # what runs and is in the calendar counts there
        for unit in self._fixed:
            free = plus(free, self._running[unit][0])
        return plus(free, booked, -1)

    def _busy(self, granted: int) -> str:
        """In words: why not more."""
        why = "no capacity for more" if granted else "busy"
        busy = f"{why}: {len(self._running)} running, {len(self._queue)} queued"
        promised = len(self.bookings)
        return f"{busy}, {promised} promised" if promised else busy

    def _reserve_gang(self, home: bytes, room: Room, tag: GangTag, now: float) -> Grant:
        gang = self._claim(home, room, tag)
        if gang is None:
            return Grant(refusal="busy: too many tasks that need several peers at once")
        gang.expires_at = now + self._config.lease_ttl_s
        gang.room = room
        if gang.lease:  # it is renewed, and becomes the last one to expire
            lease = self._leases.pop(gang.lease)
            lease.expires_at = gang.expires_at
            self._leases[gang.lease] = lease
        elif room.hold:
            self._gangs[gang.key] = gang
            self._serve_gangs(now)
        elif self._fits(gang) and not self._awaited():
            gang.lease = self._lease(home, room, False, now, gang.key)
        if gang.lease or room.hold:
            self._gangs[gang.key] = gang
        if gang.lease:
            return Grant(leases=(gang.lease,), held=True)
        busy = self._busy(0)
        if not room.hold:
            self._wish(home, room.owner, now)
        return Grant(refusal=busy, held=room.hold)

    def _claim(self, home: bytes, room: Room, tag: GangTag) -> _GangClaim | None:
        """A gang's claim, known or new; None: there are too many."""
        gang = self._gangs.pop((home, tag.id), None)
        if gang is not None:
            return gang
        gang = _GangClaim(home, room, tag, 0.0)
        full = len(self._gangs) >= self._config.gangs_max
        return None if full and not self._displaces(gang) else gang

    def _displaces(self, gang: _GangClaim) -> bool:
        """Younger gangs never keep an older one out: the youngest of all goes."""
        youngest = max(self._gangs.values(), key=lambda g: g.order)
        return youngest.order > gang.order and self._disband(youngest.key)

    def _fits(self, gang: _GangClaim) -> bool:
        """Now. Queued units go first: they were promised to begin soon."""
        full = len(self._leases) >= self._config.leases_max
        busy = self._queue or full or self._is_due
        return not busy and slots(self._free, gang.room.needs.capacity) > 0

    def _awaited(self) -> list[_GangClaim]:
        """Gangs that hold this peer and have no lease yet, the oldest first. (Seldom any.)"""
        if not self._gangs:
            return []
        return sorted((g for g in self._gangs.values() if not g.lease), key=lambda g: g.order)

    def _serve_gangs(self, now: float) -> list[bytes]:
        """Gives leases to gangs that wait for one; returns their homes."""
        served = []
        for gang in self._awaited():
            if not self._fits(gang):
                self._make_way(gang)
            if not self._fits(gang):
                break  # younger gangs do not overtake it
            gang.lease = self._lease(gang.home, gang.room, False, now, gang.key)
            served.append(gang.home)
        return served

    def _make_way(self, gang: _GangClaim) -> None:
        """Younger gangs that have not begun give their leases up, if that is enough."""
        having = [g for g in self._gangs.values() if g.lease and g.order > gang.order]
        having.sort(key=lambda g: g.order, reverse=True)
        free = self._free
        for count, younger in enumerate(having, 1):
            free = plus(free, younger.room.needs.capacity)
            if slots(free, gang.room.needs.capacity):
                for loser in having[:count]:
                    loser.robbed = loser.lease
                    self._drop(loser.lease)
                    if not loser.room.hold:
                        self._disband(loser.key)
                return

    def meet_gangs(self, now: float) -> list[bytes]:
        """After capacity came free: returns the homes of gangs that got a lease by that."""
        return self._serve_gangs(now) if self._gangs else []

    def _queue_room(self, room: Room, count: int) -> tuple[int, float]:
        """How many units may wait here, and an estimate of how long the last of them will."""
        waiting = len(self._queue) + self._queued_leases
        by_count = max(0, self._config.queue_units_max - waiting)
        share = max(1, room.needs.capacity.millicores) / max(1, self.capacity.millicores)
        ahead_s = self._backlog_s()
        if room.hold:
            holds = self._hold_leases + len(self._queue)
            return min(1 if holds < self._config.holds_max else 0, count, by_count), ahead_s
        if room.runtime_s is None:
            return 0, ahead_s
        each_s = max(1e-5, room.runtime_s * share)
        by_time = max(0, int((self._config.queue_s_max - ahead_s) / each_s))
        by_share = self._queue_share() // max(1, room.needs.capacity.millicores)
        granted = min(count, by_count, max(by_time, by_share))
        return granted, ahead_s + granted * each_s

    def _queue_share(self) -> int:
        """Millicores for which more units may wait, whatever their run times: of five units that
        run, one ends within a fifth of their time."""
        return max(0, int(self._config.queue_share * self.capacity.millicores) - self._queued_cores)

    def _backlog_s(self) -> float:
        # an empty sum is zero: drop the rounding errors
        self._queued_work = self._queued_work if self._queue else 0.0
        self._leased_work = self._leased_work if self._leases else 0.0
        self._running_work = self._running_work if self._running else 0.0
        work = self._queued_work + self._leased_work + self._running_work
        return work / max(1, self.capacity.millicores)

    def _lease(
        self, home: bytes, room: Room, queued: bool, now: float, gang: GangKey | None = None
    ) -> int:
        lease = self._next_lease
        self._next_lease += 1
        due_in = NO_DEADLINE_S if room.deadline_in_s is None else room.deadline_in_s
        self._leases[lease] = made = _Lease(
            home,
            room.needs.capacity,
            now + self._config.lease_ttl_s,
            queued,
            room.runtime_s,
            now + due_in,
            room.hold and queued,
            gang,
            room.owner,
        )
        self._count_lease(made, +1)
        if not queued:
            self._free = plus(self._free, room.needs.capacity, -1)
        return lease

    def _count_lease(self, lease: _Lease, sign: int) -> None:
        millicores = sign * lease.needs.millicores
        if lease.queued:
            self._queued_leases += sign
            self._queued_cores += millicores
            self._hold_leases += sign * lease.hold
        self._leased_work += sign * _work(lease.needs, lease.runtime_s)
        self._turns.count(lease.owner, millicores)

    # ----------------------------------------------------------------- deciding

    def commit(
        self,
        home: bytes,
        lease_id: int,
        unit: Hashable,
        now: float,
        owner: str | None = None,
        workflow: str = "",
        ways: int = 0,
    ) -> str:
        """`run` (it may begin), `wait` (it is queued), or the reason why neither. `ways`: how often
        the unit has made way for booked ones."""
        self.expire(now)
        lease = self._leases.get(lease_id)
        if lease is None and self.bookings.of(lease_id, workflow) is not None:
            return self._commit_booked(home, lease_id, unit, owner, workflow)
        if lease is None or lease.home != home:
            self._disband_robbed(home, lease_id)
            return "the lease has expired"
        if unit in self._running or unit in self._queued:
            return "this peer has that unit already"
        if ways >= self._config.ways_max and self.bookings and not lease.queued:
            # (its own lease is not free, so it is not counted twice)
            beside = plus(self._beside(now, lease.runtime_s or FIXED_S), lease.needs)
            if not slots(beside, lease.needs):
                return "its place is promised to other work"
            self._fixed[unit] = self.bookings.fix(lease.needs, lease.runtime_s, now)
        del self._leases[lease_id]
        self._count_lease(lease, -1)
        if owner is not None:
            self._owners[unit] = owner, lease.needs.millicores
            self._turns.count(owner, lease.needs.millicores)
        if lease.gang is not None:
            del self._gangs[lease.gang]
        if not lease.queued:
            self._run(unit, lease.needs, lease.runtime_s)
            return "run"
        self._enqueue(unit, lease, now)
        return "wait"

    def _commit_booked(
        self, home: bytes, lease_id: int, unit: Hashable, owner: str | None, workflow: str
    ) -> str:
        if unit in self._running or unit in self._queued or self.bookings.has(unit):
            return "this peer has that unit already"
        verdict = self.bookings.commit(lease_id, workflow, home, unit)
        if verdict == "wait" and owner is not None:
            millicores = self.bookings.promises[lease_id].needs.millicores
            self._owners[unit] = owner, millicores
            self._turns.count(owner, millicores)
        return verdict

    def _disband_robbed(self, home: bytes, lease_id: int) -> None:
        """A gang whose home still believed in a lease that an older gang has taken: it gathers
        anew."""
        for key in [k for k, g in self._gangs.items() if k[0] == home and g.robbed == lease_id]:
            self._disband(key)

    def _enqueue(self, unit: Hashable, lease: _Lease, now: float) -> None:
        self._order += 1
        # the promise was at most the queue's length in time; this is several times that
        long_s = 5 * self._config.queue_share * (lease.runtime_s or 0.0)
        patience_s = max(self._config.patience_s, long_s)
        entry = _Queued(
            lease.due_at,
            self._order,
            unit,
            lease.needs,
            lease.runtime_s,
            now,
            now + (NO_DEADLINE_S if lease.hold else patience_s),
        )
        if self._queue and entry < self._queue[-1]:
            bisect.insort(self._queue, entry)
        else:  # the usual case: later units are due later
            self._queue.append(entry)
        self._queued[unit] = entry
        self._queued_work += _work(entry.needs, entry.runtime_s)
        self._queued_cores += entry.needs.millicores
        self._hand_back_at = min(self._hand_back_at, entry.hand_back_at)

    def _run(self, unit: Hashable, needs: Capacity, runtime_s: float | None) -> None:
        work = _work(needs, runtime_s)
        self._running[unit] = (needs, work)
        self._running_work += work

    def _unqueue(self, entry: _Queued) -> None:
        first = self._queue[0] is entry  # the usual case
        del self._queue[0 if first else bisect.bisect_left(self._queue, entry)]
        del self._queued[entry.unit]
        self._queued_work -= _work(entry.needs, entry.runtime_s)
        self._queued_cores -= entry.needs.millicores

    def starts(self, now: float) -> list[Hashable]:
        """Queued units that may begin now; they count as running from here on."""
        self.expire(now)
        started = self._starts_booked(now) if self.bookings else []
        if self._is_due:
            return started
        index = 0
        while index < len(self._queue) and self._free.millicores > 0:
            entry = self._queue[index]
            if slots(self._free, entry.needs) > 0 and self._stays(entry, now):
                self._unqueue(entry)
                self._free = plus(self._free, entry.needs, -1)
                self._run(entry.unit, entry.needs, entry.runtime_s)
                started.append(entry.unit)
                continue
            if index == 0 and now - entry.since > self._config.backfill_s_max:
                break  # no more overtaking
            index += 1
            if index > BACKFILL_DEPTH:
                break
        return started

    def _stays(self, entry: _Queued, now: float) -> bool:
        """False: it is known that it would have to make way."""
        if not self.bookings or entry.runtime_s is None or entry.hand_back_at - now < PATIENT_S:
            return True
        return slots(self._beside(now, entry.runtime_s), entry.needs) > 0

    # ----------------------------------------------------------------- what was booked

    def _starts_booked(self, now: float) -> list[Hashable]:
        """Booked units that begin now, the earliest deadline first. Where one's time has come and
        there is no room, others are told to make way, and nothing else begins meanwhile."""
        self.bookings.tick(now)
        started: list[Hashable] = []
        kept = Capacity()  # for units that wait for room
        in_vain = 0
        for promise in self.bookings.waiting():
            is_due = promise.booking.start_at <= now
            if is_due and not slots(plus(self._free, kept, -1), promise.needs):
                self._make_room(promise, plus(self._free, kept, -1), now)
            if not slots(plus(self._free, kept, -1), promise.needs):
                kept = plus(kept, promise.needs) if is_due else kept
                continue
            if not is_due and (in_vain >= EARLY_TRIES_MAX or not self._may_be_early(promise)):
                continue
            if self.bookings.may_begin(promise, now):
                self._begin_booked(promise, now)
                started.append(promise.unit)
            else:
                in_vain += 1
        self._is_due = bool(self._making_way)  # what they leave is for booked units
        return started

    def _may_be_early(self, promise: Commitment) -> bool:
        """Before its slot a booked unit takes no more than may be promised at one instant, while
        others want to begin: they have the rest."""
        if not (self._queue or self._wishes or self._leases):
            return True
        limit = self.bookings.calendar.limit
        return not exceeds(self._booked, promise.needs, limit)

    def _begin_booked(self, promise: Commitment, now: float) -> None:
        self.bookings.begin(promise, now)
        self._free = plus(self._free, promise.needs, -1)
        self._booked = plus(self._booked, promise.needs)

    def _make_room(self, promise: Commitment, free: Capacity, now: float) -> None:
        """Tells as much as is needed to make way, if it is enough: leases that nobody has taken up,
        then the youngest units that were promised nothing, then units that take longer than they
        said, if it is high time."""
        for unit in self._making_way:
            free = plus(free, self._needs_of(unit))
        leases: list[int] = []
        units: list[Hashable] = []
        for lease_id, unit, needs in self._may_make_way(promise, now):
            if slots(free, promise.needs):
                break
            free = plus(free, needs)
            if lease_id:
                leases.append(lease_id)
            else:
                units.append(unit)
        if not slots(free, promise.needs):
            return
        for lease_id in leases:
            self._take_back(lease_id)
        self._told_to_go += units
        self._making_way.update(dict.fromkeys(units))

    def _may_make_way(
        self, promise: Commitment, now: float
    ) -> Iterator[tuple[int, Hashable, Capacity]]:
        for lease_id, lease in reversed(self._leases.items()):
            if not lease.queued:
                yield lease_id, None, lease.needs
        for unit, (needs, _) in reversed(self._running.items()):
            if not self._has_its_place(unit, now) and unit not in self._making_way:
                yield 0, unit, needs
        booking = promise.booking
        if now + PRESSING_S >= booking.due_at - booking.length_s:
            for over in self.bookings.overrunning(now):
                if over.workflow != promise.workflow and over.unit not in self._making_way:
                    yield 0, over.unit, over.needs

    def _has_its_place(self, unit: Hashable, now: float) -> bool:
        """It makes way no more, as long as it takes no longer than it said."""
        place = self.bookings.calendar.rows.get(self._fixed.get(unit, 0))
        return place is not None and place.end_at > now

    def _needs_of(self, unit: Hashable) -> Capacity:
        running = self._running.get(unit)
        if running is not None:
            return running[0]
        promise = self.bookings.promise_of(unit)
        return promise.needs if promise is not None and promise.running else Capacity()

    def _take_back(self, lease_id: int) -> None:
        gang = self._gangs.get(self._leases[lease_id].gang or (b"", 0))
        self._drop(lease_id)
        if gang is not None:
            gang.robbed = lease_id
            if not gang.room.hold:
                self._disband(gang.key)

    def told_to_go(self) -> list[Hashable]:
        """Units that must make way now, each named once."""
        units, self._told_to_go = self._told_to_go, []
        return units

    def release(self, unit: Hashable) -> bool:
        """The unit ended, was cancelled, or is handed back; True if it was here."""
        owner, millicores = self._owners.pop(unit, (None, 0))
        self._turns.count(owner, -millicores)
        self._making_way.pop(unit, None)
        if unit in self._fixed:
            self.bookings.unfix(self._fixed.pop(unit))
        promise = self.bookings.ended(unit)
        if promise is not None:
            if promise.running:
                self._free = plus(self._free, promise.needs)
                self._booked = plus(self._booked, promise.needs, -1)
            return True
        running = self._running.pop(unit, None)
        if running is not None:
            needs, work = running
            self._running_work -= work
            self._free = plus(self._free, needs)
            return True
        entry = self._queued.get(unit)
        if entry is not None:
            self._unqueue(entry)
        return entry is not None

    def give_back(self, home: bytes, leases: tuple[int, ...], gangs: tuple[int, ...] = ()) -> None:
        for lease_id in leases:
            lease = self._leases.get(lease_id)
            if lease is None:
                self.bookings.let_go(lease_id, home)
                continue
            if lease.home != home:
                continue
            if lease.gang is None or not self._disband(lease.gang):
                self._drop(lease_id)
        for gang_id in gangs:
            self._disband((home, gang_id))

    def _disband(self, key: GangKey) -> bool:
        gang = self._gangs.pop(key, None)
        if gang is not None and gang.lease:
            self._drop(gang.lease)
        return gang is not None

    def forsake(self, home: bytes) -> bool:
        """The home is dead or was restarted, and will never use its reservations. True if that
        freed capacity."""
        held = self.bookings.forsake(home)
        if not (self._leases or self._gangs or self._wishes):
            return held
        dropped = [n for n, lease in self._leases.items() if lease.home == home]
        for lease_id in dropped:
            self._drop(lease_id)
        gone = [self._disband(key) for key in list(self._gangs) if key[0] == home]
        self._wishes.pop(home, None)
        return bool(dropped or gone or held)

    def expire(self, now: float) -> None:
        self._turns.forget(now)
        if self.bookings:
            self.bookings.expire(now)
        # leases live equally long, so the oldest expires first
        while self._leases:
            lease_id, lease = next(iter(self._leases.items()))
            if lease.expires_at > now:
                break
            self._drop(lease_id)
        while self._gangs:
            key, gang = next(iter(self._gangs.items()))
            if gang.expires_at > now:
                return
            self._disband(key)

    def _drop(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id)
        self._count_lease(lease, -1)
        if lease.gang in self._gangs:
            self._gangs[lease.gang].lease = 0
        if not lease.queued:
            self._free = plus(self._free, lease.needs)

    def overdue(self, now: float) -> list[Hashable]:
        """Queued units to hand back, as they did not begin in the time that was promised."""
        if now < self._hand_back_at:
            return []
        left = (q.hand_back_at for q in self._queue if q.hand_back_at > now)
        self._hand_back_at = min(left, default=math.inf)
        return [q.unit for q in self._queue if q.hand_back_at <= now]

    def queued_units(self) -> list[Hashable]:
        return [q.unit for q in self._queue]

    # ----------------------------------------------------------------- telling

    def _wish(self, home: bytes, owner: str | None, now: float) -> None:
        self._wishes.pop(home, None)
        if len(self._wishes) < self._config.vacancy_wishes_max:
            self._wishes[home] = now + self._config.vacancy_ttl_s, owner

    def take_wish(self, now: float) -> bytes | None:
        """The home that was refused longest ago and still wants capacity, if there is any to offer;
        if several owners compete, a home of the owner who holds least here."""
        self.passed_over = False
        if self._queue or self._free.millicores <= 0 or self.closed or self._awaited():
            return None
        if self._is_due:
            return None
        while self._wishes:
            home = next(iter(self._wishes))
            if self._turns.contended:
                home = min(self._wishes, key=lambda h: self._turns.held(self._wishes[h][1]))
            until, owner = self._wishes.pop(home)
            if until > now:
                self._turns.told(owner, now)
                return home
        return None

    @property
    def free(self) -> Capacity:
        return self._free

    def on_offer(self, now: float) -> tuple[Capacity, float, int, int]:
        """What `reserve` would grant now: free capacity; how many seconds of work and how many
        units may be queued; and millicores for which units of any length may be."""
        full = self.closed or len(self._leases) >= self._config.leases_max
        if full or self._is_draining(now):
            return Capacity(), 0.0, 0, 0
        queue_s = max(0.0, self._config.queue_s_max - self._backlog_s())
        waiting = len(self._queue) + self._queued_leases
        units = max(0, self._config.queue_units_max - waiting)
        return self._free, queue_s, units, self._queue_share()

    def _is_draining(self, now: float) -> bool:
        """This peer keeps capacity free, for a gang, a booked unit or the one at the head of the
        queue."""
        if self._awaited() or self._is_due:
            return True
        return bool(self._queue) and now - self._queue[0].since > self._config.backfill_s_max

    @property
    def leased(self) -> int:
        """Leases, which may be taken up at any moment."""
        return len(self._leases)

    @property
    def running(self) -> int:
        return len(self._running) + sum(1 for _ in self.bookings.running())

    @property
    def queued(self) -> int:
        return len(self._queue)

    def next_event_at(self, now: float) -> float | None:
        """When something changes by itself: a lease expires, a unit is to be handed back, or a
        booked one's time comes."""
        at = self.bookings.next_event_at(now) if self.bookings else math.inf
        if self._leases:
            at = min(at, next(iter(self._leases.values())).expires_at)
        if self._gangs:
            at = min(at, next(iter(self._gangs.values())).expires_at)
        if self._queue:
            at = min(at, self._hand_back_at)
        if self._wishes and self._turns.contended:
            at = min(at, self._turns.next_at())
        return at if at < math.inf else None

    def sanity_check(self) -> None:
        """The invariants that hold after every step."""
        used = self._free
        for needs, _ in self._running.values():
            used = plus(used, needs)
        for lease in self._leases.values():
            if not lease.queued:
                used = plus(used, lease.needs)
        used = plus(used, self._booked)
        assert used == self.capacity, f"capacity leaked: {used} of {self.capacity}"
        assert min(self._free) >= 0, f"over-booked: {self._free}"
        assert self._queue == sorted(self._queue), "the queue is out of order"
        assert len(self._queue) == len(self._queued), "the queue and its index differ"
        assert self._queued_leases == sum(lease.queued for lease in self._leases.values())
        booked = Capacity()
        for promise in self.bookings.running():
            booked = plus(booked, promise.needs)
        assert booked == self._booked, "booked units and their capacity differ"
        assert set(self._fixed) <= set(self._running), "the place of a unit that is gone"
        self._check_owners()
        self._check_gangs()

    def _check_owners(self) -> None:
        held: Counter[str] = Counter()
        for lease in self._leases.values():
            held.update({lease.owner: lease.needs.millicores} if lease.owner is not None else {})
        for owner, millicores in self._owners.values():
            held.update({owner: millicores} if owner is not None else {})
        assert all(self._turns.held(owner) == count for owner, count in held.items())
        here = len(self._running) + len(self._queued) + len(self.bookings)
        assert len(self._owners) <= here

    def _check_gangs(self) -> None:
        leases = {lease.gang: n for n, lease in self._leases.items() if lease.gang is not None}
        claims = {key: gang.lease for key, gang in self._gangs.items() if gang.lease}
        assert leases == claims, "gangs and their leases differ"
