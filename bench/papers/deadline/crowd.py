"""A million peers, with the product's own deciding classes on one heap of events.

Every peer has a calendar (`Bookings`), is a leaf (`Leaf`), hosts branches of the tree (`Branch`)
and is the home of workflows (`Bargain`): nothing here decides. What is modelled is the network (a
link of 1 Mbps in each direction, 50 ms on average) and time. Members are given and do not change.

Sizes of messages are counted, not encoded: see `SIZES`. Estimates are exact, as in the paper: the
margin that a peer adds to a task is taken off before.
"""

from __future__ import annotations

import gc
import heapq
import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from valence.protocols.capacity.bookings import LENGTH_EXTRA_S, LENGTH_FACTOR, Bookings, length_here
from valence.protocols.capacity.calendar import BookingAsk
from valence.protocols.strategies.base import BookedSlot, PlanRequest
from valence.protocols.strategies.deadline.bargain import BACKWARD, Bargain, WantedSequence
from valence.protocols.strategies.deadline.branch import CELL_BYTES, UPDATE_BYTES, Branch, divided
from valence.protocols.strategies.deadline.config import DeadlineConfig
from valence.protocols.strategies.deadline.leaf import Leaf
from valence.protocols.strategies.deadline.points import POINTS
from valence.protocols.strategies.deadline.summary import HoleCell, Sought, Summary
from valence.protocols.wire.messages import Capacity, Contact, Needs, Traits
from valence.workflow.sequences import Graph

CORE = Capacity(1000)
NEEDS = Needs(CORE)
LINK_BYTES_PER_S = 1e6 / 8
DELAY_S = (0.02, 0.08)
HEAD_BYTES = 60  # of every message: addresses, seal, kind and id
#: what a part of a message takes
TASK_BYTES, SLOT_BYTES, LEASE_BYTES = 26, 18, 12
HOPS_MAX = 24
BLIND_TRIES = 3
HANDLED_US_MAX = 100_000
WIDTH = 16
WAN = DeadlineConfig(update_gap_s=5.0, update_bytes_per_s=500.0)


@dataclass(slots=True)
class Seek:
    """A piece of a sequence on its way through the tree."""

    plan: Planning
    wanted: int  # the index of its sequence in the stage
    first: int  # the index of its first task in that
    tasks: Sequence[Sought]
    hops: int = 0
    tried: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class Planning:
    """One workflow that is being allocated."""

    home: int
    began_at: float
    bargain: Bargain
    total_s: float  # on its own peer
    stage: list[WantedSequence] = field(default_factory=list)
    slots: dict[tuple[int, int], BookedSlot] = field(default_factory=dict)
    open: int = 0  # pieces without an answer
    failed: bool = False
    messages: int = 0


@dataclass(slots=True)
class Results:
    allocated_s: list[float] = field(default_factory=list)
    speedups: dict[float, list[float]] = field(default_factory=dict)
    refused: int = 0
    hops: Counter[int] = field(default_factory=Counter)
    stale: int = 0
    seeks: int = 0
    forward: int = 0
    messages: int = 0
    handled_us: Counter[int] = field(default_factory=Counter)  # microseconds → messages


class Traffic:
    """Bytes or events of each peer, and the most in one second."""

    def __init__(self, peers: int) -> None:
        self._second = array("i", [-1]) * peers
        self._now = array("i", [0]) * peers
        self._sum = array("q", [0]) * peers
        self.most = array("i", [0]) * peers
        self.total = 0

    def busiest(self) -> int:
        """All of the peer that has most."""
        return max(self._sum)

    def add(self, peer: int, at: float, count: int) -> None:
        second = int(at)
        if self._second[peer] != second:
            self._second[peer] = second
            self._now[peer] = 0
        self._now[peer] += count
        self.total += count
        self._sum[peer] += count
        if self._now[peer] > self.most[peer]:
            self.most[peer] = self._now[peer]


class Crowd:
    def __init__(
        self,
        peers: int,
        make: Callable[[], Graph],
        *,
        load: float = 0.95,
        length_s: float = 300.0,
        ratios: Sequence[float] = (1.1, 1.2, 1.3, 1.4),
        speeds: tuple[float, float] = (0.5, 2.0),
        seed: int = 1,
        from_s: float = 20.0,
        is_blind: bool = False,
        points: str = "dyadic",
    ) -> None:
        """`is_blind`: sequences go to peers at random, and nobody hears of a summary."""
        self.rng = random.Random(seed)
        self.peers = peers
        self.results = Results()
        self.sent, self.received, self.events = Traffic(peers), Traffic(peers), Traffic(peers)
        self._make, self._length_s, self._ratios = make, length_s, ratios
        self._load, self._is_blind = load, is_blind
        self._make_points = POINTS[points]
        self._from_s = from_s  # what is submitted earlier warms the crowd up
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        self._out_free = array("d", [0.0]) * peers
        self._in_free = array("d", [0.0]) * peers
        self._levels = max(1, math.ceil(math.log(peers, WIDTH) - 1e-9))
        self._branches: dict[tuple[int, int], Branch] = {}
        self._scheduled: set[tuple[int, int]] = set()
        self._cells: dict[HoleCell, HoleCell] = {}
        self._points_at, self._points = -1.0, [0.0]
        low, high = math.log2(speeds[0]), math.log2(speeds[1])
        # quarters of an octave, as a summary tells them
        self.speeds = [2.0 ** (round(4 * self.rng.uniform(low, high)) / 4) for _ in range(peers)]
        self._contacts: list[Contact] = []
        self._build(load)

    # ----------------------------------------------------------------- building

    def _build(self, load: float) -> None:
        gc.disable()
        traits = {speed: Traits(speed=speed) for speed in set(self.speeds)}
        self.bookings: list[Bookings] = []
        self.leaves: list[Leaf] = []
        for peer, speed in enumerate(self.speeds):
            booked = Bookings(CORE, 1.0, 1e9, 1e9, 10_000)
            if self.rng.random() < load:  # it is busy with something
                length_s = self.rng.random() * self._length_s / speed
                asked = BookingAsk(CORE, length_s, 0.0, math.inf, length_s)
                (first,) = booked.hold(b"", "", "", [asked], 0.0) or []
                self.at(length_s, self._ended, peer, first.id)
            self.bookings.append(booked)
            self.leaves.append(Leaf(booked, traits[speed], WAN, self._reference_points))
            self._contacts.append(Contact(peer.to_bytes(4, "big"), "", 0))
        for peer, leaf in enumerate(self.leaves):  # everybody has told its branch once
            update = leaf.update(0.0)
            if update is not None:
                self._branch(1, peer // WIDTH).heard((0, peer), *self._interned(update), 0.0)
            leaf._next_at = self.rng.random() * WAN.update_gap_s
        for level in range(1, self._levels):
            for index in range(-(-self.peers // WIDTH**level)):
                branch = self._branch(level, index)
                update = branch.update(0.0)
                branch._next_at = self.rng.random() * WAN.update_gap_s
                if update is not None:
                    parent = self._branch(level + 1, index // WIDTH)
                    parent.heard((level, index), *update, 0.0)
        gc.freeze()

    def _interned(self, update: tuple[int, Summary]) -> tuple[int, Summary]:
        seq, cells = update
        known = self._cells
        return seq, Counter({known.setdefault(cell, cell): n for cell, n in cells.items()})

    def _branch(self, level: int, index: int) -> Branch:
        branch = self._branches.get((level, index))
        if branch is None:
            branch = self._branches[level, index] = Branch(WAN)
        return branch

    def _host(self, level: int, index: int) -> int:
        """The k-th peer of a branch of level k hosts it; a leaf is its own host."""
        return min(self.peers - 1, index * WIDTH**level + level) if level else index

    def _reference_points(self, now: float) -> Sequence[float]:
        if now - self._points_at > 0.25 or self._points_at < 0:
            self._points_at, self._points = now, self._make_points(now)
        return self._points

    # ----------------------------------------------------------------- events and the network

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        self.count += 1
        heapq.heappush(self._heap, (when, self.count, what, arguments))

    def send(
        self, source: int, target: int, size: int, what: Callable[..., None], *more: Any
    ) -> None:
        """Over the links of both, each of which has a queue."""
        self.results.messages += 1
        if source == target:
            self.at(self.now, self._arrives, target, 0, what, more)
            return
        self.sent.add(source, self.now, size)
        begin = max(self.now, self._out_free[source])
        self._out_free[source] = left_at = begin + size / LINK_BYTES_PER_S
        there_at = left_at + self.rng.uniform(*DELAY_S)
        begin = max(there_at, self._in_free[target])
        self._in_free[target] = begin + size / LINK_BYTES_PER_S
        self.at(self._in_free[target], self._arrives, target, size, what, more)

    def _arrives(self, target: int, size: int, what: Callable[..., None], more: Any) -> None:
        if size:
            self.received.add(target, self.now, size)
        self.events.add(target, self.now, 1)
        start = time.thread_time_ns()
        what(target, *more)
        took = time.thread_time_ns() - start
        self.results.handled_us[min(HANDLED_US_MAX, took // 1000)] += 1

    def run(self, seconds: float) -> Results:
        self.now = 0.0
        probe = self._make()
        work_s = self._length_s * len(probe.lengths)
        mean_speed = sum(self.speeds) / len(self.speeds)
        self._rate = self._load * self.peers * mean_speed / work_s
        self.at(self.rng.expovariate(self._rate), self._submit)
        self.at(self._from_s, self._warmed_up)
        while self._heap and self._heap[0][0] <= seconds:
            self.now, _, what, arguments = heapq.heappop(self._heap)
            what(*arguments)
        return self.results

    def _warmed_up(self) -> None:
        self.sent, self.received, self.events = (Traffic(self.peers) for _ in range(3))
        self.results.handled_us.clear()

    # ----------------------------------------------------------------- a home

    def _submit(self) -> None:
        self.at(self.now + self.rng.expovariate(self._rate), self._submit)
        home = self.rng.randrange(self.peers)
        graph = self._make()
        exact = (self._length_s - LENGTH_EXTRA_S) / LENGTH_FACTOR
        graph = Graph(dict.fromkeys(graph.lengths, exact), graph.parents, graph.children)
        total_s = self._length_s * len(graph.lengths) / self.speeds[home]
        ratio = self.rng.choice(self._ratios)
        request = PlanRequest(
            "w", "", graph, dict.fromkeys(graph.lengths, NEEDS), {}, self.now + total_s / ratio
        )
        plan = Planning(home, self.now, Bargain(request, 0.5), total_s)
        self.results.speedups.setdefault(ratio, [])
        self._next_stage(plan)

    def _next_stage(self, plan: Planning) -> None:
        bargain = plan.bargain
        if bargain.is_complete and bargain.is_in_time:
            self._allocated(plan)
            return
        stage = [] if bargain.is_complete or plan.failed else bargain.wanted(self.now + 0.5)
        if not stage and bargain.way == BACKWARD:
            self.results.forward += 1
            self._release(plan, bargain.turn_forward())
            plan.failed = False
            stage = bargain.wanted(self.now + 0.5)
        if not stage:
            self._release(plan, list(bargain.slots.values()))
            if plan.began_at >= self._from_s:
                self.results.refused += 1
            return
        plan.stage, plan.slots, plan.open = stage, {}, len(stage)
        for index, wanted in enumerate(stage):
            graph = bargain.request.graph
            tasks = [
                Sought(NEEDS, graph.lengths[task], window.start, window.end)
                for task, window in zip(wanted.tasks, wanted.windows, strict=True)
            ]
            self._begin(Seek(plan, index, 0, tasks))

    def _begin(self, seek: Seek) -> None:
        home = seek.plan.home
        if self._is_blind:
            self._send_seek(home, 0, self.rng.randrange(self.peers), seek)
        else:
            self._send_seek(home, 1, home // WIDTH, seek)

    def _got(self, home: int, seek: Seek, slots: list[BookedSlot]) -> None:
        plan = seek.plan
        for offset, slot in enumerate(slots):
            plan.slots[seek.wanted, seek.first + offset] = slot
        self._answered(plan)

    def _not_found(self, home: int, seek: Seek) -> None:
        seek.plan.failed = True
        self._answered(seek.plan)

    def _answered(self, plan: Planning) -> None:
        plan.open -= 1
        if plan.open:
            return
        for index, wanted in enumerate(plan.stage):
            slots = [plan.slots.get((index, n)) for n in range(len(wanted.tasks))]
            held = [slot for slot in slots if slot is not None]
            if len(held) == len(slots) and _in_order(held):
                plan.bargain.took(wanted, held)
            else:
                plan.failed = True
                self._release(plan, held)
        self._next_stage(plan)

    def _allocated(self, plan: Planning) -> None:
        slots = plan.bargain.slots.values()
        for peer, count in Counter(slot.peer for slot in slots).items():
            target = int.from_bytes(peer.id, "big")
            size = HEAD_BYTES + LEASE_BYTES * count
            self.send(plan.home, target, size, self._confirmed_at, plan.home)
        if plan.began_at < self._from_s:
            return
        self.results.allocated_s.append(self.now - plan.began_at)
        took_s = plan.bargain.ends_at - plan.began_at
        left_s = plan.bargain.request.deadline_at - plan.began_at
        ratio = min(self._ratios, key=lambda r: abs(plan.total_s / left_s - r))
        self.results.speedups[ratio].append(plan.total_s / took_s)

    def _confirmed_at(self, peer: int, home: int) -> None:
        self.send(peer, home, HEAD_BYTES, self._nothing)

    def _nothing(self, peer: int) -> None:
        pass

    def _release(self, plan: Planning, slots: Sequence[BookedSlot]) -> None:
        for slot in slots:
            target = int.from_bytes(slot.peer.id, "big")
            size = HEAD_BYTES + LEASE_BYTES
            self.send(plan.home, target, size, self._let_go, slot.lease)

    # ----------------------------------------------------------------- branches

    def _send_seek(self, source: int, level: int, index: int, seek: Seek) -> None:
        self.results.seeks += 1
        size = HEAD_BYTES + TASK_BYTES * len(seek.tasks) + 5 * len(seek.tried)
        target = self._host(level, index)
        self.send(source, target, size, self._seek_at_leaf if not level else self._seek, *(
            (seek,) if not level else (level, index, seek)
        ))  # fmt: skip

    def _seek(self, host: int, level: int, index: int, seek: Seek) -> None:
        """Down to the child that fits best; else in pieces; else up; else back."""
        branch = self._branch(level, index)
        seek.hops += 1
        child = branch.choose(seek.tasks, frozenset(seek.tried))
        if child is not None:
            self._route(host, child, seek)
            return
        pieces = divided(seek.tasks) if seek.plan.bargain.way == BACKWARD and level == 1 else None
        if pieces is not None and not seek.tried:
            front, back = pieces
            first = branch.choose(front, frozenset())
            second = branch.choose(back, frozenset()) if first is not None else None
            if first is not None and second is not None:
                seek.plan.open += 1
                rest = Seek(seek.plan, seek.wanted, seek.first + len(front), back, seek.hops)
                seek.tasks = front
                self._route(host, first, seek)
                self._route(host, second, rest)
                return
        if level < self._levels and seek.hops < HOPS_MAX:
            seek.tried = (*seek.tried, (level, index))[-8:]
            self._send_seek(host, level + 1, index // WIDTH, seek)
        else:
            self.send(host, seek.plan.home, HEAD_BYTES, self._not_found, seek)
        self._changed(level, index)

    def _route(self, host: int, child: Any, seek: Seek) -> None:
        level, index = child
        self._send_seek(host, level, index, seek)

    def _changed(self, level: int, index: int) -> None:
        """Its update is due at some time: one event for each branch or leaf."""
        if level >= self._levels or self._is_blind or (level, index) in self._scheduled:
            return
        part = self._branch(level, index) if level else self.leaves[index]
        when = part.update_at()
        if when < math.inf:
            self._scheduled.add((level, index))
            self.at(max(self.now, when), self._update, level, index)

    def _update(self, level: int, index: int) -> None:
        self._scheduled.discard((level, index))
        part = self._branch(level, index) if level else self.leaves[index]
        update = part.update(self.now)
        if update is None:
            self._changed(level, index)
            return
        seq, cells = self._interned(update)
        host = self._host(level, index)
        self.events.add(host, self.now, 1)
        parent = self._host(level + 1, index // WIDTH)
        size = HEAD_BYTES + UPDATE_BYTES - HEAD_BYTES + CELL_BYTES * len(cells)
        self.send(host, parent, size, self._heard, level, index, seq, cells)

    def _heard(self, host: int, level: int, index: int, seq: int, cells: Summary) -> None:
        parent = self._branch(level + 1, index // WIDTH)
        parent.heard((level, index), seq, cells, self.now)
        self._changed(level + 1, index // WIDTH)

    # ----------------------------------------------------------------- leaves

    def _seek_at_leaf(self, peer: int, seek: Seek) -> None:
        speed = self.speeds[peer]
        asks = [
            BookingAsk(
                CORE, length_here(task.length_s, speed), task.start, task.end, task.length_s / speed
            )
            for task in seek.tasks
        ]
        seek.hops += 1
        held = self.bookings[peer].hold(b"", "", "", asks, self.now)
        if held is None:
            self.results.stale += 1
            if self._is_blind:
                if seek.hops < BLIND_TRIES:
                    self._send_seek(peer, 0, self.rng.randrange(self.peers), seek)
                else:
                    self.send(peer, seek.plan.home, HEAD_BYTES, self._not_found, seek)
                return
            seek.tried = (*seek.tried, (0, peer))[-8:]
            if seek.hops < HOPS_MAX:
                self._send_seek(peer, 1, peer // WIDTH, seek)
            else:
                self.send(peer, seek.plan.home, HEAD_BYTES, self._not_found, seek)
            return
        contact = self._contacts[peer]
        slots = []
        for promise in held:
            booking = promise.booking
            slots.append(BookedSlot(contact, promise.id, booking.start_at, booking.end_at))
            self.at(booking.end_at, self._ended, peer, promise.id)
        self.results.hops[seek.hops] += 1
        self._leaf_changed(peer)
        size = HEAD_BYTES + SLOT_BYTES * len(slots)
        self.send(peer, seek.plan.home, size, self._got, seek, slots)

    def _let_go(self, peer: int, lease: int) -> None:
        if self.bookings[peer].let_go(lease, b""):
            self._leaf_changed(peer)

    def _ended(self, peer: int, lease: int) -> None:
        booked = self.bookings[peer]
        promise = booked.promises.get(lease)
        if promise is None:
            return  # it was released
        if promise.booking.end_at > self.now + 1e-6:  # it was moved
            self.at(promise.booking.end_at, self._ended, peer, lease)
            return
        booked.let_go(lease, b"")
        booked.calendar.forget(self.now)
        self._leaf_changed(peer)

    def _leaf_changed(self, peer: int) -> None:
        self.leaves[peer].changed()
        self._changed(0, peer)


def _in_order(slots: Sequence[BookedSlot]) -> bool:
    """(Pieces of one sequence are booked side by side, each in its own window.)"""
    ends = [slot.end_at for slot in slots]
    return all(slot.start_at >= end - 1e-6 for slot, end in zip(slots[1:], ends, strict=False))
