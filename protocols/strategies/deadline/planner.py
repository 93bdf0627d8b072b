"""Finds slots at peers for the sequences of a plan, confirms them, and gives back the rest.

Rules:
- A sequence is asked for at some peers at once, and goes where it ends first; all others get their
  slots back. If none of them can, four times as many are asked next, until all have been.
- A peer that does not answer in time is passed over; what it may hold expires.
- A plan is complete or nothing: what is held for one that fails is released at once.
- With the deadline first (`Bargain`, backward); if that fails, as early as possible (forward). If
  that ends in time after all, it is a plan; else it is what can be offered instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from valence.workflow.quantities import show_seconds

from ...capacity.matching import explain, unmet
from ...membership.members import Members, State
from ...wire.messages import Contact, Member, Needs, ReturnLeases
from ...wire.rpc import CallFailed, Rpc
from ..base import BookedSlot, NoPlan, Plan, PlanRequest
from .bargain import Bargain, WantedSequence
from .config import DeadlineConfig
from .messages import (
    BookedLease,
    Confirm,
    Confirmed,
    Held,
    Hold,
    NoneFound,
    Renew,
    Seek,
    SequenceAnswer,
    SlotsFound,
    TaskSequence,
    TreePlace,
    WindowedTask,
)
from .tree import Tree

#: the sequences and windows of a larger workflow are computed beside the loop
IN_LOOP_TASKS_MAX = 1000


@dataclass(slots=True)
class _Pieces:
    """What came back of a sequence that was sought in the tree."""

    over: asyncio.Future[None]
    wanted: int  # tasks
    slots: dict[int, BookedSlot] = field(default_factory=dict)


@dataclass(slots=True)
class _Placing:
    """One sequence on its way to a peer."""

    wanted: WantedSequence
    peers: list[Member]  # that could run it when idle, in the order in which they are asked
    sequence: TaskSequence
    asked: int = 0
    best: tuple[Contact, list[BookedSlot]] | None = None
    whys: dict[str, int] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return self.best is None and self.asked < len(self.peers)


class DirectPlanner:
    """Asks the peers themselves."""

    def __init__(self, rpc: Rpc, members: Members, config: DeadlineConfig) -> None:
        self._rpc = rpc
        self._members = members
        self._config = config
        self.asked = 0  # messages with questions
        self._late: set[asyncio.Task[Held]] = set()

    # ----------------------------------------------------------------- a plan

    async def plan(self, request: PlanRequest) -> Plan | NoPlan:
        before, size = self.asked, len(request.graph.lengths)
        is_large = size > IN_LOOP_TASKS_MAX
        make = partial(Bargain, request, self._config.apart_s, self._config.sequence_max)
        bargain = await asyncio.to_thread(make) if is_large else make()
        why = ""
        try:
            async with asyncio.timeout(self._config.plan_s_max):
                why = await self._try(bargain, is_large)
                if not bargain.is_in_time:
                    self.release(bargain.turn_forward())
                    why = await self._try(bargain, is_large) or why
        except TimeoutError:
            why = "the peers took too long to answer; try again, or with fewer tasks"
        except BaseException:
            self.release(bargain.slots.values())
            raise
        if not bargain.is_complete:
            self.release(bargain.slots.values())
            return NoPlan(why or "no peer has room")
        plan = Plan(dict(bargain.slots), bargain.ends_at, self.asked - before)
        if bargain.is_in_time:
            return plan
        return NoPlan(self._why_late(bargain), plan)

    async def _try(self, bargain: Bargain, is_large: bool) -> str:
        """Stage by stage, until the plan is complete; or the reason why it is not."""
        while not bargain.is_complete:
            now = self._now()
            if is_large:  # its windows are computed beside the loop
                wanted = await asyncio.to_thread(bargain.wanted, now)
            else:
                wanted = bargain.wanted(now)
            if not wanted:
                return ""
            searches = self._searches(bargain.request, wanted)
            try:
                await self._search(bargain.request, searches)
            except BaseException:
                self.release(slot for s in searches if s.best is not None for slot in s.best[1])
                raise
            for search in searches:
                if search.best is not None:
                    bargain.took(search.wanted, search.best[1])
            lost = next((s for s in searches if s.best is None), None)
            if lost is not None:
                return self._why_not(lost)
        return ""

    def _why_not(self, search: _Placing) -> str:
        if not search.peers:
            needs = [task.needs for task in search.sequence.tasks]
            here = self._members.here()
            reasons = (explain(here, one) for one in needs)
            why = next(filter(None, reasons), "no peer could run all of it")
            return f"{search.wanted.tasks[0]} {why}"
        most = max(search.whys, key=lambda why: search.whys[why], default="no answer")
        return f"{search.wanted.tasks[0]}: {_all(len(search.peers))} refused it ({most})"

    def _why_late(self, bargain: Bargain) -> str:
        here = self._fitting(list(bargain.request.needs.values()))
        speed = max((m.traits.speed or 1.0 for m in here), default=1.0)
        left_s = bargain.request.deadline_at - self._now()
        shortest_s = bargain.shortest_s(speed)
        if shortest_s > left_s:
            path = f"its longest chain of tasks takes {show_seconds(shortest_s)}"
            fastest = "" if speed == 1.0 else " on the fastest peer"
            return f"{path}{fastest}, and only {show_seconds(max(0.0, left_s))} are left"
        spare_s = bargain.request.spare_s
        if spare_s and bargain.ends_at <= bargain.request.deadline_at:
            spare = f"to survive a death it must end {show_seconds(spare_s)} before its deadline"
            return f"{spare}, and it would end later"
        several = "is" if len(here) == 1 else "are"
        have = "has" if len(here) == 1 else "have"
        busy = f"{several} too busy or too slow, or {have} promised the time"
        return f"{_all(len(here))} {busy}"

    # ----------------------------------------------------------------- a stage

    def _searches(self, request: PlanRequest, wanted: list[WantedSequence]) -> list[_Placing]:
        now = self._now()
        searches = []
        for n, one in enumerate(wanted):
            needs = [request.needs[task] for task in one.tasks]
            avoid = frozenset().union(*(request.avoid.get(t, ()) for t in one.tasks))
            fitting = self._fitting(needs)
            peers = [m for m in fitting if m.contact.id not in avoid] or fitting
            turned = n % len(peers) if peers else 0
            rows = tuple(
                WindowedTask(
                    need,
                    request.graph.lengths[task],
                    max(0.0, window.start - now),
                    None if window.end == math.inf else max(0.0, window.end - now),
                )
                for task, need, window in zip(one.tasks, needs, one.windows, strict=True)
            )
            searches.append(_Placing(one, peers[turned:] + peers[:turned], TaskSequence(rows)))
        return searches

    def _fitting(self, needs: list[Needs]) -> list[Member]:
        here = [m for m in self._members.here() if m.state == State.ALIVE]
        kinds = set(needs)
        fits = [m for m in here if not any(unmet(m.capacity, m.traits, one) for one in kinds)]
        return sorted(fits, key=lambda m: m.contact.id)

    async def _search(self, request: PlanRequest, searches: list[_Placing]) -> None:
        each = self._config.asked_first
        for _ in range(self._config.rounds_max):
            left = [search for search in searches if search.is_open]
            if not left:
                return
            # with many sequences, the peers share them: each is asked for at a few
            share = max(1, min(each, 4 * max(len(s.peers) for s in left) // len(left)))
            by_peer: dict[bytes, tuple[Contact, list[_Placing]]] = {}
            for search in left:
                for member in search.peers[search.asked : search.asked + share]:
                    row = by_peer.setdefault(member.contact.id, (member.contact, []))
                    row[1].append(search)
                search.asked += share
            await self._ask(request, list(by_peer.values()))
            if any(s.best is None and s.asked >= len(s.peers) for s in searches):
                return  # the stage has failed: nothing more is held for it
            each *= 4

    async def _ask(self, request: PlanRequest, rows: list[tuple[Contact, list[_Placing]]]) -> None:
        """Asks peers side by side, each for a part of its sequences after the other."""
        most = self._config.sequences_max
        unused: dict[bytes, tuple[Contact, list[int]]] = {}
        at = 0
        while parts := [(peer, s[at : at + most]) for peer, s in rows if s[at : at + most]]:
            await self._ask_parts(request, parts, unused)
            at += most
        for peer, leases in unused.values():
            self._rpc.tell(peer, ReturnLeases(leases=tuple(leases)))

    async def _ask_parts(
        self,
        request: PlanRequest,
        parts: list[tuple[Contact, list[_Placing]]],
        unused: dict[bytes, tuple[Contact, list[int]]],
    ) -> None:
        self.asked += len(parts)
        calls = {
            asyncio.ensure_future(self._hold(request, peer, part)): (peer, part)
            for peer, part in parts
        }
        try:
            done, late = await asyncio.wait(calls, timeout=self._config.ask_enough_s)
            answered = {id(search) for call in done for search in _served(call, calls[call][1])}
            if late and any(id(s) not in answered for _, part in parts for s in part):
                rest_s = self._config.ask_s - self._config.ask_enough_s
                more, late = await asyncio.wait(late, timeout=rest_s)
                done |= more
        except asyncio.CancelledError:
            for call, (peer, _) in calls.items():
                self._return_later(call, peer)
            raise
        for call in [c for c in calls if c in late]:
            self._return_later(call, calls[call][0])
        for call in [c for c in calls if c in done]:
            peer, part = calls[call]
            with contextlib.suppress(CallFailed):
                self._take(peer, part, call.result().answers, unused)

    async def _hold(self, request: PlanRequest, peer: Contact, part: list[_Placing]) -> Held:
        message = Hold(
            workflow=request.workflow,
            owner=request.owner[:64],
            sequences=tuple(search.sequence for search in part),
        )
        return await self._rpc.call(peer, message, Held, 4 * self._config.ask_s)

    def _return_later(self, call: asyncio.Task[Held], peer: Contact) -> None:
        """What comes too late is given back when it comes."""
        self._late.add(call)

        def over(call: asyncio.Task[Held]) -> None:
            self._late.discard(call)
            if call.cancelled() or call.exception() is not None:
                return
            leases = tuple(held.lease for a in call.result().answers for held in a.held)
            if leases:
                self._rpc.tell(peer, ReturnLeases(leases=leases))

        call.add_done_callback(over)

    def _take(
        self,
        peer: Contact,
        part: list[_Placing],
        answers: tuple[SequenceAnswer, ...],
        unused: dict[bytes, tuple[Contact, list[int]]],
    ) -> None:
        now = self._now()
        for search, answer in zip(part, answers, strict=False):
            slots = [
                BookedSlot(peer, h.lease, now + h.start_in_s, now + h.end_in_s) for h in answer.held
            ]
            if not self._is_in_windows(search.wanted, slots):
                why = answer.why or "it answered too slowly"
                search.whys[why] = search.whys.get(why, 0) + 1
                loser = (peer, [held.lease for held in answer.held])
            else:
                loser = (peer, [held.lease for held in answer.held])
                if search.best is None or slots[-1].end_at < search.best[1][-1].end_at - 1e-3:
                    before, search.best = search.best, (peer, slots)
                    loser = (before[0], [s.lease for s in before[1]]) if before else (peer, [])
            if loser[1]:
                unused.setdefault(loser[0].id, (loser[0], []))[1].extend(loser[1])

    def _is_in_windows(self, wanted: WantedSequence, slots: list[BookedSlot]) -> bool:
        """Windows travel as seconds from now, so they slip by the time that messages take: what
        ends too late by that is no use. (Nor are the slots of a peer that lies.)"""
        if len(slots) != len(wanted.tasks):
            return False
        late_s = self._config.apart_s / 2
        rows = zip(wanted.windows, slots, strict=True)
        return all(slot.end_at <= window.end + late_s for window, slot in rows)

    # ----------------------------------------------------------------- what becomes of a plan

    async def confirm(
        self, workflow: str, epoch: int, slots: Mapping[str, BookedSlot], due: Mapping[str, float]
    ) -> tuple[list[str], bool]:
        by_peer: dict[Contact, list[str]] = {}
        for task, slot in slots.items():
            by_peer.setdefault(slot.peer, []).append(task)
        most = self._config.confirm_rows_max
        answers = await asyncio.gather(
            *(
                self._confirm(workflow, epoch, peer, tasks[at : at + most], slots, due)
                for peer, tasks in by_peer.items()
                for at in range(0, len(tasks), most)
            )
        )
        lost = [task for some in answers if some is not None for task in some]
        return lost, all(some is not None for some in answers)

    async def _confirm(
        self,
        workflow: str,
        epoch: int,
        peer: Contact,
        tasks: list[str],
        slots: Mapping[str, BookedSlot],
        due: Mapping[str, float],
    ) -> list[str] | None:
        """The tasks that the peer does not keep; None: it did not answer."""
        now = self._now()
        booked = tuple(BookedLease(slots[t].lease, max(0.0, due[t] - now)) for t in tasks)
        message = Confirm(workflow=workflow, epoch=epoch, booked=booked)
        try:
            answer = await self._rpc.call(peer, message, Confirmed)
        except CallFailed:
            return None  # it is asked again; if it is dead, the failure detector will say so
        unknown = set(answer.unknown)
        return [task for task in tasks if slots[task].lease in unknown]

    async def settle(self) -> None:
        """(The peers themselves are asked: they know at once.)"""

    def renew(self, workflow: str, slots: Iterable[BookedSlot]) -> None:
        most = self._config.confirm_rows_max
        for peer, leases in _by_peer(slots):
            for at in range(0, len(leases), most):
                part = tuple(leases[at : at + most])
                self._rpc.tell(peer, Renew(workflow=workflow, leases=part))

    def release(self, slots: Iterable[BookedSlot]) -> None:
        for peer, leases in _by_peer(slots):
            self._rpc.tell(peer, ReturnLeases(leases=tuple(leases)))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class TreePlanner(DirectPlanner):
    """Among many members it seeks in the tree of summaries; what is not found there, or is lost on
    its way, is asked for directly, at a few peers."""

    def __init__(self, rpc: Rpc, members: Members, tree: Tree, config: DeadlineConfig) -> None:
        super().__init__(rpc, members, config)
        self._tree = tree
        self._sought: dict[int, _Pieces] = {}
        self._next_id = 1
        rpc.on(SlotsFound, self._slots_found)
        rpc.on(NoneFound, self._none_found)

    async def settle(self) -> None:
        if self._tree.is_used:  # its branches have to hear of it first
            await asyncio.sleep(self._config.settle_s)

    async def _search(self, request: PlanRequest, searches: list[_Placing]) -> None:
        if not self._tree.is_used:
            await super()._search(request, searches)
            return
        sought, most = [s for s in searches if s.peers], self._config.seeks_at_once
        for at in range(0, len(sought), most):
            await asyncio.gather(*(self._seek(request, s) for s in sought[at : at + most]))
        left = [search for search in searches if search.best is None]
        if left:
            await super()._search(request, left)

    async def _seek(self, request: PlanRequest, search: _Placing) -> None:
        number, self._next_id = self._next_id, self._next_id + 1
        pieces = _Pieces(asyncio.get_running_loop().create_future(), len(search.wanted.tasks))
        seek = Seek(
            id=number,
            home=self._members.me.contact,
            workflow=request.workflow,
            owner=request.owner[:64],
            first=0,
            tasks=search.sequence.tasks,
            at=TreePlace(0, self._members.me.contact.id),
        )
        self._sought[number] = pieces
        self.asked += 1
        try:
            if self._tree.begin(seek):
                async with asyncio.timeout(self._config.seek_s):
                    await pieces.over
        except TimeoutError:
            pass
        finally:
            del self._sought[number]
            slots = [pieces.slots.get(n) for n in range(len(search.wanted.tasks))]
            held = [slot for slot in slots if slot is not None]
            if not self._is_in_windows(search.wanted, held) or not _in_order(held):
                self.release(pieces.slots.values())
            else:
                search.best = (held[0].peer, held)

    def _slots_found(self, sender: Contact, message: SlotsFound) -> None:
        pieces = self._sought.get(message.id)
        now = self._now()
        slots = [
            BookedSlot(sender, h.lease, now + h.start_in_s, now + h.end_in_s) for h in message.held
        ]
        if pieces is None or pieces.over.done():
            self.release(slots)
            return
        for n, slot in enumerate(slots, message.first):
            if n in pieces.slots:
                self.release([slot])
            else:
                pieces.slots[n] = slot
        if len(pieces.slots) == pieces.wanted:
            pieces.over.set_result(None)

    def _none_found(self, sender: Contact, message: NoneFound) -> None:
        pieces = self._sought.get(message.id)
        if pieces is not None and not pieces.over.done():
            pieces.over.set_result(None)


def _served(call: asyncio.Task[Held], part: list[_Placing]) -> list[_Placing]:
    """The sequences for which a peer has offered slots."""
    if call.cancelled() or call.exception() is not None:
        return []
    rows = zip(part, call.result().answers, strict=False)
    return [search for search, answer in rows if answer.held]


def _in_order(slots: list[BookedSlot]) -> bool:
    """(Pieces of one sequence are booked side by side, each in its own windows.)"""
    return all(a.end_at <= b.start_at + 1e-3 for a, b in pairwise(slots))


def _by_peer(slots: Iterable[BookedSlot]) -> list[tuple[Contact, list[int]]]:
    by_peer: dict[Contact, list[int]] = {}
    for slot in slots:
        by_peer.setdefault(slot.peer, []).append(slot.lease)
    return list(by_peer.items())


def _all(count: int) -> str:
    if count == 1:
        return "the only suitable peer"
    return "both suitable peers" if count == 2 else f"all {count} suitable peers"
