"""Capacity that this peer has promised: hold → confirm → commit → run → released.

Rules, and why a promise outlives what made it:
- A *hold* is a booking that its home has not confirmed yet. It expires by itself, and is dropped
  when its home dies.
- A confirmed booking belongs to its workflow and not to the peer that made it: the home of the
  highest epoch speaks for it. It is on disk before the home hears that it is confirmed.
- A home affirms its bookings now and then. One that nobody has affirmed for a while is released:
  no booking outlives its workflow for long.
- A booked unit begins when its home has committed it and there is room: as soon as no other booking
  is hurt, and for certain when its slot comes; work that was promised nothing makes way then.
- A unit that takes longer than it said goes on until a promise needs its place. Then it is the one
  that goes, and never the unit of another promise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..wire.messages import Capacity
from .calendar import NOTHING, TINY_S, Booking, BookingAsk, Calendar, exceeds

#: what a peer adds to a task's stated time: estimates are rough, and starting takes time, too
LENGTH_FACTOR, LENGTH_EXTRA_S = 1.1, 0.2
#: an overrunning unit is given so much more time at once, as a share of its length
OVERRUN_SHARE = 0.2
#: a unit that must not make way any more, and whose run time is unknown, is taken to run so long
FIXED_S = 3600.0
OWNERS_WANTING_MAX = 1000
#: bookings and leases never share a number
FIRST_ID, IDS_PER_BOOT = 2**40, 2**24
#: an end that is later by less than this is in time: windows travel as seconds from now
LATE_S = 0.5
#: how often a unit whose time has come looks for room, if nothing else happens
DUE_S = 0.1


def length_here(length_s: float, speed: float) -> float:
    """How long a task is booked for at a peer of that speed."""
    return length_s / (speed or 1.0) * LENGTH_FACTOR + LENGTH_EXTRA_S


@dataclass(slots=True)
class Commitment:
    """One booking of this peer, and whose it is."""

    booking: Booking
    workflow: str
    home: bytes
    epoch: int = 0
    confirmed: bool = False
    expires_at: float = math.inf
    unit: Hashable = None  # once it is committed
    running: bool = False
    over_at: float = math.inf  # once it runs: when it has taken as long as it said

    @property
    def id(self) -> int:
        return self.booking.id

    @property
    def needs(self) -> Capacity:
        return self.booking.needs


@dataclass(frozen=True, slots=True)
class BookingRow:
    """A confirmed booking on disk. Times are of the wall clock."""

    lease: int
    workflow: str
    home: bytes
    epoch: int
    owner: str
    needs: Capacity
    length_s: float
    start_line: float
    due_at: float
    least_s: float
    start_at: float


class Bookings:
    def __init__(
        self, capacity: Capacity, share: float, hold_s: float, affirm_s: float, most: int
    ) -> None:
        self.calendar = Calendar(capacity, share)
        self.promises: dict[int, Commitment] = {}
        self._hold_s = hold_s
        self._affirm_s = affirm_s
        self._most = most
        self._units: dict[Hashable, Commitment] = {}
        self._waiting: dict[int, Commitment] = {}  # committed, and not running yet
        self._owned: Counter[str] = Counter()  # bookings of each owner
        self._wanting: dict[str, float] = {}  # owners that were refused: until when that counts
        self.on_changed: Callable[[], None] = lambda: None  # the holes between them are others
        self._gone: list[int] = []  # confirmed bookings that are on disk for nothing
        self._next_id = FIRST_ID

    def __len__(self) -> int:
        return len(self.promises)

    def __bool__(self) -> bool:
        return bool(self.calendar.rows)

    # ----------------------------------------------------------------- hold

    def hold(
        self, home: bytes, workflow: str, owner: str, asks: list[BookingAsk], now: float
    ) -> list[Commitment] | None:
        """Bookings for a sequence of tasks, all or none; not confirmed yet. (Call `refresh`
        before, once for many.)"""
        contested = self._contested(owner, now)
        fit = None
        if self.may_have(owner, len(asks)):
            fit = self.calendar.fit(asks, owner, now, contested)
        if fit is None:
            self._refused(owner, asks, now)
            return None
        starts, moves = fit
        self.calendar.apply(moves)
        made = []
        for ask, start_at in zip(asks, starts, strict=True):
            booking = Booking(self.new_id(), *ask, start_at, owner)
            booking.due_at = booking.end_at  # its home is told so: it stays until it is confirmed
            self._owned[owner] += 1
            promise = Commitment(booking, workflow, home, expires_at=now + self._hold_s)
            self.calendar.add(booking)
            self.promises[booking.id] = promise
            made.append(promise)
        self.on_changed()
        return made

    def refresh(self, now: float) -> None:
        """Time has passed: what nobody confirmed is gone, slots that have begun move on."""
        self.expire(now)
        self.tick(now)

    def may_have(self, owner: str, count: int) -> bool:
        """One owner has at most half of the places."""
        if self._owned[owner] + count > self._most // 2:
            return False
        return len(self.promises) + count <= self._most

    def _refused(self, owner: str, asks: list[BookingAsk], now: float) -> None:
        """It counts as one of several owners for a while, if an idle peer could have served it."""
        if any(ask.start_line + ask.length_s > ask.due_at for ask in asks):
            return
        if len(self._wanting) < OWNERS_WANTING_MAX or owner in self._wanting:
            self._wanting[owner] = now + self._affirm_s

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _contested(self, owner: str, now: float) -> bool:
        """Whether another owner has promises here, or was refused some lately."""
        for other in [o for o, until in self._wanting.items() if until <= now]:
            del self._wanting[other]
        if any(other != owner for other in self._wanting):
            return True
        return any(other != owner for other in self._owned)

    # ----------------------------------------------------------------- confirm, affirm, let go

    def of(self, lease: int, workflow: str) -> Commitment | None:
        promise = self.promises.get(lease)
        return promise if promise is not None and promise.workflow == workflow else None

    def renew(self, lease: int, workflow: str, home: bytes, now: float) -> bool:
        """Keeps a hold for longer. False: it is not here."""
        promise = self.of(lease, workflow)
        if promise is None or (promise.home != home and not promise.confirmed):
            return False
        if not promise.confirmed:
            promise.expires_at = now + self._hold_s
        return True

    def confirm(
        self, lease: int, workflow: str, home: bytes, epoch: int, due_at: float, now: float
    ) -> Commitment | None:
        """Confirms a hold, or affirms a booking; with its final deadline. None: it is not here, a
        later home speaks for it, or it will end too late here."""
        promise = self.of(lease, workflow)
        if promise is None or epoch < promise.epoch:
            return None
        if promise.unit is None and promise.booking.end_at > due_at + LATE_S:
            return None
        promise.home, promise.epoch, promise.confirmed = home, epoch, True
        promise.expires_at = now + self._affirm_s
        promise.booking.due_at = due_at
        return promise

    def let_go(self, lease: int, home: bytes) -> bool:
        """The home needs it no more. (A unit that is here goes on: it is ended by `Abort`.)"""
        promise = self.promises.get(lease)
        if promise is None or promise.home != home or promise.unit is not None:
            return False
        self._drop(promise)
        return True

    def forsake(self, home: bytes) -> bool:
        """The home is dead: what it held without a promise is free."""
        held = [p for p in self.promises.values() if p.home == home and not p.confirmed]
        for promise in held:
            self._drop(promise)
        return bool(held)

    def expire(self, now: float) -> list[int]:
        """Drops what nobody has confirmed or affirmed in time; returns their leases."""
        gone = [p for p in self.promises.values() if p.expires_at <= now and p.unit is None]
        for promise in gone:
            self._drop(promise)
        return [promise.id for promise in gone]

    def _drop(self, promise: Commitment) -> None:
        self.calendar.drop(promise.id)
        del self.promises[promise.id]
        if promise.confirmed and promise.unit is None:
            self._gone.append(promise.id)
        self._owned[promise.booking.owner] -= 1
        if not self._owned[promise.booking.owner]:
            del self._owned[promise.booking.owner]
        self._waiting.pop(promise.id, None)
        if promise.unit is not None:
            self._units.pop(promise.unit, None)
        self.on_changed()

    def take_gone(self, now: float) -> list[int]:
        """Confirmed bookings that were used or released since the last time."""
        gone, self._gone = self._gone, []
        self.calendar.forget(now)
        return gone

    # ----------------------------------------------------------------- units

    def commit(self, lease: int, workflow: str, home: bytes, unit: Hashable) -> str:
        """`wait`, or the reason why not."""
        promise = self.of(lease, workflow)
        if promise is None or promise.unit is not None:
            return "this capacity is not booked here any more"
        promise.unit, promise.home = unit, home
        promise.booking.here = True
        if promise.confirmed:
            self._gone.append(promise.id)  # on disk: its attempt does not outlive this process
        promise.confirmed = True
        self._units[unit] = promise
        self._waiting[promise.id] = promise
        return "wait"

    def has(self, unit: Hashable) -> bool:
        return unit in self._units

    def waiting(self) -> list[Commitment]:
        """Committed units that do not run yet, the earliest deadline first."""
        return sorted(self._waiting.values(), key=lambda p: (p.booking.due_at, p.id))

    def may_begin(self, promise: Commitment, now: float) -> bool:
        """Whether its slot has come, or it may begin early because that breaks no other promise."""
        if promise.booking.start_at <= now:
            return True
        moves = self.calendar.at_once(promise.booking, now)
        if moves is None:
            return False
        self.calendar.apply(moves)
        return True

    def begin(self, promise: Commitment, now: float) -> None:
        del self._waiting[promise.id]
        promise.running = promise.booking.fixed = True
        self.calendar.move(promise.booking, now)
        promise.over_at = promise.booking.end_at

    def ended(self, unit: Hashable) -> Commitment | None:
        """Its unit is not here any more: the booking is used up."""
        promise = self._units.get(unit)
        if promise is not None:
            self._drop(promise)
        return promise

    def promise_of(self, unit: Hashable) -> Commitment | None:
        return self._units.get(unit)

    def running(self) -> Iterator[Commitment]:
        return (p for p in self._units.values() if p.running)

    def overrunning(self, now: float) -> list[Commitment]:
        """Units that have taken longer than they were booked for, the longest overdue first."""
        over = [p for p in self.running() if p.over_at <= now]
        return sorted(over, key=lambda p: p.over_at)

    def tick(self, now: float) -> None:
        """Time has passed: units that still run take longer, slots that have begun without their
        unit move on."""
        for promise in self.running():
            booking = promise.booking
            if booking.end_at <= now + TINY_S:
                ran_s = now - booking.start_at
                longer_s = ran_s + max(LENGTH_EXTRA_S, OVERRUN_SHARE * ran_s)
                self.calendar.move(booking, booking.start_at, longer_s)
        self.calendar.slip(now)

    # ----------------------------------------------------------------- work without a promise

    def fix(self, needs: Capacity, runtime_s: float | None, now: float) -> int:
        """Work that has made way too often: it has its place now, under this number."""
        length_s = FIXED_S if runtime_s is None else length_here(runtime_s, 1.0)
        booking = Booking(
            self.new_id(), needs, length_s, now, now + length_s, length_s, now, fixed=True
        )
        self.calendar.add(booking)
        return booking.id

    def unfix(self, booking: int) -> None:
        self.calendar.drop(booking)

    # ----------------------------------------------------------------- disk and time

    def row(self, promise: Commitment, wall_s: float) -> BookingRow:
        """`wall_s`: the wall clock, less the clock of the bookings."""
        booking = promise.booking
        return BookingRow(
            promise.id, promise.workflow, promise.home, promise.epoch, booking.owner,
            booking.needs, booking.length_s, booking.start_line + wall_s, booking.due_at + wall_s,
            booking.least_s, booking.start_at + wall_s,
        )  # fmt: skip

    def load(self, rows: Iterable[BookingRow], boot: int, wall_s: float, now: float) -> None:
        """What an earlier process of this peer had promised. No two of them share a number."""
        self._next_id = FIRST_ID + boot * IDS_PER_BOOT
        for row in sorted(rows, key=lambda row: row.due_at):
            if row.due_at - wall_s <= now or row.lease in self.promises:
                self._gone.append(row.lease)
                continue
            booking = Booking(
                row.lease, row.needs, row.length_s, row.start_line - wall_s, row.due_at - wall_s,
                row.least_s, row.start_at - wall_s, row.owner,
            )  # fmt: skip
            # (it may have been moved since it was written)
            if not self.calendar.has_room(booking.needs, booking.start_at, booking.end_at):
                self.calendar.add_behind(booking, now)
            else:
                self.calendar.add(booking)
            self._owned[row.owner] += 1
            self.promises[row.lease] = Commitment(
                booking, row.workflow, row.home, row.epoch, True, now + self._affirm_s
            )

    def next_event_at(self, now: float) -> float:
        """When something changes by itself."""
        expiry = (p.expires_at for p in self.promises.values() if p.unit is None)
        slots = (max(now + DUE_S, p.booking.start_at) for p in self._waiting.values())
        return min((*expiry, *slots), default=math.inf)

    def sanity_check(self, now: float) -> None:
        """The invariants that hold after every step."""
        self.calendar.sanity_check()
        ids = {n for n, b in self.calendar.rows.items() if b.owner or n in self.promises}
        assert ids == set(self.promises), "bookings and the calendar differ"
        assert all(p.unit is not None and not p.running for p in self._waiting.values())
        on_time = Calendar(self.calendar.capacity)
        for promise in self.promises.values():
            booking = promise.booking
            if promise.over_at > now and booking.end_at <= booking.due_at + TINY_S:
                on_time.add(replace(booking))
                assert booking.start_at >= booking.start_line - TINY_S or booking.fixed
        times = [p.booking.start_at for p in self.promises.values()]
        used = [on_time.at(time + TINY_S) for time in times if time >= now]
        assert not any(exceeds(NOTHING, u, self.calendar.capacity) for u in used), "over-booked"
