"""Plans of workflows that are to be accepted: with a slot for each task, or refused with an offer.

Rules:
- What is planned here is held at the peers, and nothing more: it becomes a promise when it is in
  the journal (`home`), and is released if it does not get there.
- An offer keeps its slots for a while, for the owner and the document that it was made for. Whoever
  accepts it gets as much time from then on as was offered; a new plan is made, in its place.
- Planning is bounded: in tasks, in time, and in plans at once, of one owner and of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from valence.workflow.model import Source, Workflow
from valence.workflow.quantities import show_seconds
from valence.workflow.sequences import Graph, Slot

from ..strategies.base import BookedSlot, Plan, Planner, PlanRequest
from ..wire.entries import BookedTask, Promised
from .lengths import Lengths
from .promise import APART_S, spare_for_one_s, survives
from .work import due_at, wire_needs

#: a plan is one journal entry, which a message must carry
PROMISED_TASKS_MAX, PLAN_BYTES_MAX, SLOT_BYTES = 20_000, 3 * 2**20, 80
PLANS_AT_ONCE = 4
WAITING_PLANS_MAX = 8  # of one owner
OFFER_S = 10.0
OFFERS_MAX = 100
OFFERS_OF_OWNER_MAX = 5
#: how fast files travel between peers, as plans assume
BYTES_PER_S = 50e6
#: what an end may be later than foreseen in an offer, as plans are made of times that pass
OFFER_MARGIN_S = 0.5
DEADLINE_MAX_S = 366 * 86400.0


class NotPromised(Exception):
    """There is no plan that meets the deadline."""

    def __init__(self, why: str, earliest_at: float | None, offer: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.earliest_at = earliest_at  # on the wall clock
        self.offer = offer  # accepts the earliest plan, for a while


class Unpromisable(Exception):
    """Nothing can be promised of this document, whatever its deadline."""

    def __init__(self, why: str, tasks: list[str]) -> None:
        super().__init__(why)
        self.why = why
        self.tasks = tasks  # those without a run time, if that is why


@dataclass(frozen=True, slots=True)
class Admitted:
    """A plan whose slots are held. Times are of the wall clock."""

    workflow: str  # the id that they are held for
    plan: Plan
    deadline_at: float
    entry: Promised


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan that was only looked at."""

    admitted: Admitted | None
    why: str  # the deadline can't be met; empty: it can


@dataclass(frozen=True, slots=True)
class _StandingOffer:
    owner: str
    name: str  # of the workflow
    document: bytes
    admitted: Admitted
    takes_s: float
    until: float


class Planning:
    def __init__(
        self, clock: Callable[[], float], new_id: Callable[[], str], counts: Counter[str]
    ) -> None:
        self.planner: Planner | None = None
        self.lengths = Lengths()
        self._clock = clock
        self._new_id = new_id
        self._counts = counts
        self._offers: OrderedDict[str, _StandingOffer] = OrderedDict()
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}  # of each owner, and its users
        self._places = asyncio.Semaphore(PLANS_AT_ONCE)

    # ----------------------------------------------------------------- before a submission

    def why_none(self, workflow: Workflow, owner: str) -> str:
        """Why nothing can be promised of a workflow; empty: something can."""
        if workflow.deadline is None:
            return "the document has no deadline"
        if self.planner is None:
            return "a task queue makes no promises"
        if workflow.strategy not in ("deadline", "auto"):
            return f"the strategy {workflow.strategy} makes none"
        if any(task.gang for task in workflow.tasks.values()):
            return "tasks that need several peers at once can't be promised yet"
        if workflow.strict:
            return "strict levels can't be promised yet"
        if len(workflow.tasks) > PROMISED_TASKS_MAX:
            return f"at most {PROMISED_TASKS_MAX:,} tasks can be promised"
        if sum(len(name.encode()) + SLOT_BYTES for name in workflow.tasks) > PLAN_BYTES_MAX:
            return "the names of its tasks are too long for a plan"
        unknown = self._unknown(workflow, owner)
        if unknown:
            more = f" and {len(unknown) - 1} more tasks have" if len(unknown) > 1 else " has"
            return f"{unknown[0]}{more} no run time"
        return ""

    def _unknown(self, workflow: Workflow, owner: str) -> list[str]:
        """The tasks whose run time nobody knows."""
        return [
            name
            for name, spec in workflow.tasks.items()
            if self.lengths.of(owner, workflow.name, spec) is None
        ]

    def insist(self, workflow: Workflow, owner: str, why: str) -> None:
        """A document that names this strategy and a deadline wants a promise or nothing."""
        if workflow.strategy == "deadline" and workflow.deadline is not None:
            raise Unpromisable(why, self._unknown(workflow, owner))

    async def admit(
        self, workflow_id: str, workflow: Workflow, owner: str, document: bytes, accept: str = ""
    ) -> Admitted:
        """A plan with slots for all tasks; else raises `NotPromised`."""
        try:
            async with self._its_turn(owner):
                return await self._plan(workflow_id, workflow, owner, document, accept)
        except NotPromised:
            self._counts["promises_refused"] += 1
            raise

    @contextlib.asynccontextmanager
    async def _its_turn(self, owner: str) -> AsyncIterator[None]:
        """Planning takes a while: each owner has one plan made at a time, and all together few."""
        lock, users = self._turns.get(owner, (asyncio.Lock(), 0))
        if users > WAITING_PLANS_MAX:
            raise NotPromised("you have too many plans made at once; try again in a moment", None)
        self._turns[owner] = lock, users + 1
        try:
            async with lock, self._places:
                yield
        finally:
            lock, users = self._turns.pop(owner)
            if users > 1:
                self._turns[owner] = lock, users - 1

    async def trial(self, workflow_id: str, workflow: Workflow, owner: str) -> Trial:
        """The plan that it would get now. Nothing of it is kept, and no offer changes."""
        async with self._its_turn(owner):
            request, deadline = self._request_for(workflow_id, workflow, owner)
            assert self.planner is not None
            plan = await self.planner.plan(request)
            made, why = (plan, "") if isinstance(plan, Plan) else (plan.earliest, plan.why)
            if made is None:
                return Trial(None, why)
            admitted = self._admitted(request, made, deadline)
            self.release(admitted)
            return Trial(admitted, why)

    async def _plan(
        self, workflow_id: str, workflow: Workflow, owner: str, document: bytes, accept: str
    ) -> Admitted:
        accepted_s = self._accepted(accept, owner, document) if accept else None
        assert self.planner is not None
        earlier = [
            name
            for name, standing in self._offers.items()
            if standing.owner == owner and standing.name == workflow.name
        ]
        for name in earlier:  # their slots would stand in the way of the new plan
            self._withdraw_offer(name)
        if earlier:
            await self.planner.settle()
        request, deadline = self._request_for(workflow_id, workflow, owner, accepted_s)
        plan = await self.planner.plan(request)
        if isinstance(plan, Plan):
            return self._admitted(request, plan, deadline)
        if plan.earliest is None:
            raise NotPromised(plan.why, None)
        ends_at = self._wall(plan.earliest.ends_at) + request.spare_s + OFFER_MARGIN_S
        earliest = self._admitted(request, plan.earliest, max(deadline, ends_at))
        if workflow.promise.infeasible == "earliest":
            return earliest
        offer = self._offer(owner, workflow.name, document, earliest)
        raise NotPromised(plan.why, ends_at, offer)

    def _request_for(
        self, workflow_id: str, workflow: Workflow, owner: str, accepted_s: float | None = None
    ) -> tuple[PlanRequest, float]:
        """What to plan, and its deadline on the wall clock. `accepted_s`: from now, whatever the
        document says."""
        now, wall = self._now(), self._clock()
        deadline = due_at(workflow, wall) if accepted_s is None else wall + accepted_s
        assert deadline is not None
        deadline = min(deadline, wall + DEADLINE_MAX_S)
        graph = self.graph_of(workflow, owner)
        request = PlanRequest(
            workflow_id,
            owner,
            graph,
            {name: wire_needs(spec.needs) for name, spec in workflow.tasks.items()},
            {},
            now + deadline - wall,
            spare_for_one_s(graph) if workflow.promise.survive else 0.0,
        )
        return request, deadline

    def graph_of(self, workflow: Workflow, owner: str) -> Graph:
        """The whole workflow. Inputs whose size is known count with the time that they travel; the
        sizes of files that are yet to be made are not known."""
        sizes = {name: _known_bytes(source) for name, source in workflow.inputs.items()}
        lengths = {
            name: (self.lengths.of(owner, workflow.name, spec) or 0.0)
            + sum(sizes.get(file, 0) for file in spec.inputs) / BYTES_PER_S
            for name, spec in workflow.tasks.items()
        }
        return Graph.of(lengths, workflow.parents)

    def _admitted(self, request: PlanRequest, plan: Plan, deadline: float) -> Admitted:
        slots = {task: Slot(slot.start_at, slot.end_at) for task, slot in plan.slots.items()}
        due = self._now() + deadline - self._clock()
        survived = survives(request.graph, slots, self._now(), due, APART_S)
        entry = Promised(
            deadline_at=deadline,
            survives=int(survived),
            booked=self.rows(plan.slots, request.graph.lengths),
        )
        return Admitted(request.workflow, plan, deadline, entry)

    def rows(
        self, slots: Mapping[str, BookedSlot], lengths: Mapping[str, float]
    ) -> tuple[BookedTask, ...]:
        return tuple(
            BookedTask(
                task, s.peer.id, s.lease, self._wall(s.start_at), self._wall(s.end_at),
                lengths[task],
            )
            for task, s in slots.items()
        )  # fmt: skip

    # ----------------------------------------------------------------- offers

    def _offer(self, owner: str, workflow: str, document: bytes, admitted: Admitted) -> str:
        """Keeps a plan for a while, in case its user accepts it."""
        self._forget_offers()
        own = [name for name, offer in self._offers.items() if offer.owner == owner]
        if len(own) >= OFFERS_OF_OWNER_MAX:
            self._withdraw_offer(own[0])
        if len(self._offers) >= OFFERS_MAX:
            self._withdraw_offer(next(iter(self._offers)))
        name = self._new_id()
        takes_s = admitted.deadline_at - self._clock()
        until = self._now() + OFFER_S
        if self.planner is not None:
            self.planner.renew(admitted.workflow, admitted.plan.slots.values())
        self._offers[name] = _StandingOffer(owner, workflow, document, admitted, takes_s, until)
        loop = asyncio.get_running_loop()
        loop.call_later(OFFER_S + 0.1, self._forget_offers)
        return name

    def _accepted(self, name: str, owner: str, document: bytes) -> float:
        """In how many seconds it will be done, as was offered. (The time in which its user made up
        his mind is not held against him: the plan begins now. Until now its slots were kept.)"""
        self._forget_offers()
        offer = self._offers.get(name)
        if offer is None or offer.owner != owner:
            gone = f"the offer {name} does not exist or has expired; submit again for a new one"
            raise NotPromised(gone, None)
        if offer.document != document:
            raise NotPromised(f"the offer {name} was made for another document", None)
        return offer.takes_s

    def _forget_offers(self) -> None:
        for name in [n for n, offer in self._offers.items() if offer.until <= self._now()]:
            self._withdraw_offer(name)

    def _withdraw_offer(self, name: str) -> None:
        self.release(self._offers.pop(name).admitted)

    def release(self, admitted: Admitted) -> None:
        """Its workflow was not accepted."""
        if self.planner is not None:
            self.planner.release(admitted.plan.slots.values())

    def _wall(self, at: float) -> float:
        return at + self._clock() - self._now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _known_bytes(source: Source) -> int:
    return int(source.value) if source.kind == "size" else 0


def never_in_time(why: str, earliest_at: float | None, now: float) -> str:
    """A refusal, in words."""
    text = f"the deadline can't be met: {why}"
    if earliest_at is not None and earliest_at < math.inf:
        text += f"; the earliest end is in {show_seconds(max(0.0, earliest_at - now))}"
    return text
