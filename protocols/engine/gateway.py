"""Lets any peer answer for any workflow: finds its home, asks it, and passes the answer on.

Submissions and lists of workflows and peers start here, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
from pydantic import ValidationError

from valence.protocols.engine import views
from valence.workflow.model import Workflow
from valence.workflow.problems import DocumentError
from valence.workflow.quantities import show_seconds

from ..consensus.election import standstill
from ..consensus.placement import new_id
from ..consensus.replica import majority
from ..membership.members import Members, State
from ..ports import DatabaseError
from ..wire.messages import (
    Answer,
    Ask,
    Capacity,
    Contact,
    Describe,
    Described,
    ListedWorkflows,
    ListWorkflows,
    Member,
)
from ..wire.rpc import CallFailed, Refused, Rpc
from .acceptance import AlreadyHere
from .answers import MOVED, STANDS_STILL, VOID_STATUS, Answers, ApiError, moving
from .home import Home
from .locate import SILENT_S, VOID_HOME, Locate
from .planning import NotPromised, Unpromisable, never_in_time
from .work import due_at, is_much, read_document

log = logging.getLogger("valence.gateway")

MOVING_S_MAX = 12.0
ASK_TIMEOUT_S = 5.0
PROMPT_S = 0.5  # if an answer takes longer: are the keepers there?
LATE_S = 0.25
EVENTS_TIMEOUT_S = 25.0  # the home may wait for events
READERS_MAX = 2
BROKEN_OFF_MAX = 8
PROBLEMS_MAX = 100
#: the type of a problem document: no plan meets the deadline
INFEASIBLE = "urn:valence:deadline-infeasible"
FAR_S = 365 * 86400  # the deadline of a plan for a document without one


class Gateway:
    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        home: Home,
        answers: Answers,
        locate: Locate,
        rng: random.Random,
        why_stuck: Callable[[str], str],
    ) -> None:
        self.prefix = "w"  # of workflow ids
        self._rpc = rpc
        self._members = members
        self._locate = locate
        self._rng = rng
        self._why_stuck = why_stuck
        self._home = home
        self._answers = answers
        self._readers = asyncio.Semaphore(READERS_MAX)
        self._reading: dict[str, asyncio.Lock] = {}

    # ----------------------------------------------------------------- one workflow

    async def ask(self, owner: str, workflow_id: str, question: str, **arguments: Any) -> Any:
        return json.loads(await self.ask_raw(owner, workflow_id, question, **arguments))

    async def ask_raw(self, owner: str, workflow_id: str, question: str, **arguments: Any) -> bytes:
        """The home's answer as JSON, wherever the home is; else raises `ApiError`. An empty owner
        sees everything.

        While a workflow changes its home, the question is repeated for a while: all questions can
        be."""
        deadline = asyncio.get_running_loop().time() + MOVING_S_MAX
        delay_s = 0.1
        while True:
            try:
                return await self._ask_promptly(owner, workflow_id, question, arguments)
            except ApiError as problem:
                # (a lasting problem is told at once: only a peer's return can mend it)
                late = asyncio.get_running_loop().time() > deadline
                if problem.status != 503 or problem.lasting or late:
                    raise
            await asyncio.sleep(delay_s)
            delay_s = min(1.0, delay_s * 1.5)

    async def _ask_promptly(
        self, owner: str, workflow_id: str, question: str, arguments: dict[str, Any]
    ) -> bytes:
        """Asks once, and finds out early whether a majority of the keepers is silent.

        It takes seconds to detect that a host has vanished. A user who asks meanwhile is not kept
        waiting: if a majority of the keepers is silent now, that is the answer."""
        if "wait_s" in arguments:  # this one is prepared to wait
            return await self._ask_once(owner, workflow_id, question, arguments)
        asked = asyncio.ensure_future(self._ask_once(owner, workflow_id, question, arguments))
        # its exception is retrieved even if nobody awaits it any more
        asked.add_done_callback(lambda task: task.cancelled() or task.exception())
        loop = asyncio.get_running_loop()
        try:
            start = loop.time()
            await asyncio.wait([asked], timeout=PROMPT_S)
            if not asked.done():
                silent, count = await self._locate.silent(workflow_id)
                late = loop.time() - start > PROMPT_S + 2 * SILENT_S + LATE_S  # is this peer slow?
                if not asked.done() and not late and count - len(silent) < majority(count):
                    raise _silence(workflow_id, silent, count)
            return await asked
        finally:
            asked.cancel()

    async def _ask_once(
        self, owner: str, workflow_id: str, question: str, arguments: dict[str, Any]
    ) -> bytes:
        if self._answers.knows(workflow_id):
            return await self._answers.answer(workflow_id, question, arguments, owner)
        home = await self._locate.home(workflow_id)
        if home is None:
            raise ApiError(404, f"there is no workflow {workflow_id}")
        if home == VOID_HOME:
            raise _never_accepted(workflow_id, question)
        member = self._members.get(home) if home else None
        if member is None or member.state >= State.DEAD:
            raise self._without_home(workflow_id, home)
        packed = msgpack.packb(arguments)
        message = Ask(workflow=workflow_id, question=question, arguments=packed, owner=owner)
        try:
            limit_s = EVENTS_TIMEOUT_S if "wait_s" in arguments else ASK_TIMEOUT_S
            answer = await self._rpc.call(member.contact, message, Answer, limit_s)
        except CallFailed as error:
            self._locate.forget(workflow_id, home)
            silent = f"peer {home.hex()[:8]}, which runs workflow {workflow_id}, does not answer"
            raise ApiError(503, f"{silent}: {error}") from None
        return self._checked(workflow_id, home, answer)

    def _without_home(self, workflow_id: str, home: bytes) -> ApiError:
        """Why nobody can answer: `home` is empty, or down."""
        stuck = self._why_stuck(workflow_id) or self._locate.stuck.get(workflow_id, "")
        if stuck:
            return _blocked(workflow_id, stuck)
        if not home:
            choosing = "its replicas are choosing a peer to run it; try again in a moment"
            return ApiError(503, f"workflow {workflow_id}: {choosing}")
        self._locate.forget(workflow_id, home)
        down = f"peer {home.hex()[:8]}, which runs workflow {workflow_id}, is down"
        return ApiError(503, f"{down}, and no other reachable peer has a replica", lasting=True)

    def _checked(self, workflow_id: str, home: bytes, answer: Answer) -> bytes:
        """The body of an answer; an answer that reports a problem raises it."""
        if answer.status == MOVED:
            self._locate.forget(workflow_id, home)
            raise moving(workflow_id)
        if answer.status == STANDS_STILL:
            raise ApiError(503, json.loads(answer.body)["detail"], lasting=True)
        if answer.status != 200:
            raise ApiError(answer.status, json.loads(answer.body)["detail"])
        return answer.body

    # ----------------------------------------------------------------- submitting

    async def submit(
        self, text: bytes, options: dict[str, Any], owner: str, patient: bool
    ) -> tuple[str, bool]:
        """The workflow's id, and whether it is new."""
        try:
            workflow = await self._read(text, options, owner)
        except DocumentError as error:
            raise _invalid(error) from None
        workflow_id = new_id(self._rpc.me.id, self._rng, self.prefix)
        if "idempotency" in options:
            options["document"] = hashlib.sha256(text).hexdigest()
            workflow_id, new = await self._named(owner, options)
            if not new:
                return workflow_id, False
        accept = str(options.pop("accept", ""))
        if not accept:
            self._check_deadline(workflow)
        try:
            run = await self._home.submit(
                text, workflow, workflow_id, options, owner, patient, accept
            )
        except NotPromised as refusal:
            raise self._not_promised(refusal) from None
        except Unpromisable as error:
            raise _unpromisable(error) from None
        except Refused as error:
            raise ApiError(503, error.text) from None
        except ValidationError as error:
            beyond = f"a task's `needs` are out of range: {error.errors()[0]['msg']}"
            raise ApiError(422, beyond) from None
        except AlreadyHere:  # the same key, a moment ago
            await self._check_accepted(owner, workflow_id, options)
            return workflow_id, False
        except DatabaseError as error:
            unwritten = f"the workflow can't be written to this peer's disk: {error}"
            raise ApiError(507, unwritten) from None
        return run.id, True

    async def plan(self, text: bytes, options: dict[str, Any], owner: str) -> views.PlanView:
        """The plan that a submission would get now. Nothing is submitted or kept."""
        try:
            workflow = await self._read(text, options, owner)
        except DocumentError as error:
            raise _invalid(error) from None
        self._check_deadline(workflow)
        if workflow.deadline is None:
            workflow = replace(workflow, deadline=str(FAR_S))
        workflow_id = new_id(self._rpc.me.id, self._rng, self.prefix)
        why = self._home.planning.why_none(workflow, owner)
        if why:
            raise ApiError(422, f"nothing can be planned: {why}")
        due = due_at(workflow, self._home.now()) or 0.0
        trial = await self._home.planning.trial(workflow_id, workflow, owner)
        if trial.admitted is None:
            return views.PlanView(feasible=False, why=trial.why, deadline_at=due)
        rows = trial.admitted.entry.booked
        return views.PlanView(
            feasible=not trial.why,
            why=trial.why,
            deadline_at=due,
            ends_at=max(row.end_at for row in rows),
            survives=trial.admitted.entry.survives,
            asked=trial.admitted.plan.asked,
            tasks=[
                views.SlotView(
                    task=row.task, peer=row.peer.hex(), start_at=row.start_at, end_at=row.end_at
                )
                for row in rows
            ],
        )

    def _not_promised(self, refusal: NotPromised) -> ApiError:
        now = self._home.now()
        earliest = refusal.earliest_at
        return ApiError(
            409,
            never_in_time(refusal.why, earliest, now),
            type=INFEASIBLE,
            earliest_at=earliest,
            earliest_in_s=None if earliest is None else max(0.0, earliest - now),
            offer=refusal.offer or None,
        )

    def _check_deadline(self, workflow: Workflow) -> None:
        now = self._home.now()
        due = due_at(workflow, now)
        if due is not None and due <= now:
            ago = show_seconds(now - due)
            late = f"the deadline {workflow.deadline} passed {ago} ago; choose a later one"
            raise ApiError(422, late, [views.FieldProblem(pointer="/deadline", message=late)])

    async def _check_accepted(self, owner: str, workflow_id: str, options: dict[str, Any]) -> None:
        try:
            await self._same(owner, workflow_id, options)
        except ApiError as problem:
            if problem.status != VOID_STATUS:
                raise
            broken_off = "an earlier submission with this Idempotency-Key broke off; submit again"
            raise ApiError(503, broken_off) from None

    async def _read(self, text: bytes, options: dict[str, Any], owner: str) -> Workflow:
        """Reads a document in a thread, unless it is short and can't expand to much: a few bytes
        may stand for 200,000 tasks. Each owner has one read at a time, so that an owner who sends
        many does not keep others waiting."""
        if not is_much(text):
            return read_document(text, options)
        lock = self._reading.setdefault(owner, asyncio.Lock())
        try:
            async with lock, self._readers:
                return await asyncio.to_thread(read_document, text, options)
        finally:
            if not lock.locked():
                self._reading.pop(owner, None)

    async def _named(self, owner: str, options: dict[str, Any]) -> tuple[str, bool]:
        """The workflow's id, and whether it is free.

        The id follows from the key, so that every peer finds the first submission. A submission
        that broke off leaves its id unusable: then the next id in the row is tried."""
        name = f"{owner}\0{options['idempotency']}"
        for again in range(BROKEN_OFF_MAX):
            digest = hashlib.sha256((name + "\0" * again).encode()).hexdigest()
            workflow_id = f"{self.prefix}{digest[:16]}"
            try:
                await self._same(owner, workflow_id, options)
                return workflow_id, False
            except ApiError as problem:
                if problem.status == 404:
                    return workflow_id, True
                if problem.status != VOID_STATUS:
                    raise
        raise ApiError(
            503, "submissions with this Idempotency-Key broke off too often; use another"
        )

    async def _same(self, owner: str, workflow_id: str, options: dict[str, Any]) -> None:
        """Raises unless the workflow of that id was made from the same document."""
        first = await self.ask(owner, workflow_id, "document")
        if first["hash"] != options["document"]:
            raise ApiError(
                422,
                "this Idempotency-Key was used for another document; use a new key for this one",
            )

    # ----------------------------------------------------------------- listing

    async def workflows(
        self, owner: str, before: str, limit: int, state: str
    ) -> views.WorkflowPage:
        """The workflows of all reachable peers, newest first. An empty owner sees everything."""
        rows = self._answers.page(before, limit, state, owner)
        others = [m for m in self._members.here() if m.contact.id != self._rpc.me.id]
        message = ListWorkflows(before=before, limit=limit, state=state, owner=owner)
        unanswered = [m.contact.id.hex() for m in self._members.all() if m.state == State.DEAD]
        for member, answer in await self._locate.everyone(others, message, ListedWorkflows):
            if answer is None:
                unanswered.append(member.contact.id.hex())
            else:
                rows.extend(views.WorkflowRow.model_validate_json(row) for row in answer.rows)
        # a workflow is missing only if all peers that have a replica of it are
        keepers = self._home.journal.keeping.config.keepers
        if len(unanswered) < min(keepers, len(self._members) - 1):
            unanswered = []
        rows, last = _first_page(_one_each(rows), limit)
        return views.WorkflowPage(workflows=rows, next=last, unanswered=unanswered)

    async def peers(self) -> views.PeerList:
        members = self._members.all()
        here = [m for m in members if m.state <= State.SUSPECT]
        described = {
            member.contact.id: answer
            for member, answer in await self._locate.everyone(here, Describe(), Described)
        }
        me = self._rpc.me.id
        rows = [self._peer(m, described.get(m.contact.id), m.contact.id == me) for m in members]
        rows.sort(key=lambda v: (v.state not in ("up", "leaving"), v.id))
        return views.PeerList(peers=rows)

    def _peer(self, member: Member, described: Described | None, me: bool) -> views.PeerView:
        names = {0: "up", 1: "suspect", 2: "dead", 3: "left"}
        traits, contact = member.traits, member.contact
        state = names[member.state]
        return views.PeerView(
            id=contact.id.hex(),
            address=f"{contact.host}:{contact.port}",
            http=member.http,
            site=traits.site,
            capacity=_amounts(member.capacity),
            free=_amounts(described.free) if described else None,
            running=described.running if described else None,
            queued=described.queued if described else None,
            state=described.state if described and state == "up" else state,
            arch=traits.arch,
            os=traits.os,
            speed=traits.speed,
            labels=list(traits.labels),
            software=list(traits.software),
            pid=described.pid if described and contact.host.startswith("127.") else None,
            me=me,
        )


def _unpromisable(error: Unpromisable) -> ApiError:
    if not error.tasks:
        why = f"no deadline can be promised: {error.why}"
        return ApiError(422, why, [views.FieldProblem(pointer="/strategy", message=error.why)])
    templates = dict.fromkeys(name.partition("[")[0] for name in error.tasks)
    errors = [
        views.FieldProblem(
            pointer=f"/tasks/{name.replace('~', '~0').replace('/', '~1')}",
            message="runtime is missing: how long it takes on a peer of speed 1",
        )
        for name in list(templates)[:PROBLEMS_MAX]
    ]
    count = len(error.tasks)
    listed = error.tasks[0] if count == 1 else f"{error.tasks[0]} and {count - 1} more tasks"
    need = "need a runtime" if count > 1 else "needs a runtime"
    return ApiError(422, f"{listed} {need}: without it no deadline can be promised", errors)


def _never_accepted(workflow_id: str, question: str) -> ApiError:
    if question == "document":  # the peer that asks wants to know whether the key is in use
        return ApiError(VOID_STATUS, f"workflow {workflow_id} was never accepted: submit it again")
    # another workflow of its name may have been accepted by peers that do not answer now
    return ApiError(503, f"no peer that answers has accepted workflow {workflow_id}")


def _silence(workflow_id: str, silent: list[Contact], count: int) -> ApiError:
    if count:
        return _blocked(workflow_id, standstill(silent, count, "do not answer"))
    unknown = f"no other peer answers, so nobody can say whether workflow {workflow_id} exists"
    return ApiError(503, f"{unknown}; it goes on when one of them is back", lasting=True)


def _blocked(workflow_id: str, why: str) -> ApiError:
    return ApiError(503, f"workflow {workflow_id} is blocked: {why}", lasting=True)


def _invalid(error: DocumentError) -> ApiError:
    errors = [
        views.FieldProblem(pointer=p.place, message=p.message, line=p.line) for p in error.problems
    ]
    count = len(errors)
    first = str(error.problems[0])
    return ApiError(422, first if count == 1 else f"{count} problems; the first: {first}", errors)


def _first_page(
    rows: list[views.WorkflowRow], limit: int
) -> tuple[list[views.WorkflowRow], str | None]:
    """The newest rows, and where the next page begins."""
    rows.sort(key=lambda row: (row.submitted_at, row.id), reverse=True)
    full = len(rows) >= limit
    rows = rows[:limit]
    return rows, f"{rows[-1].submitted_at!r},{rows[-1].id}" if full and rows else None


def _one_each(rows: list[views.WorkflowRow]) -> list[views.WorkflowRow]:
    """One row for each workflow: of the keeper that knows most, its end or else its home."""
    best: dict[str, views.WorkflowRow] = {}
    for row in rows:
        before = best.get(row.id)
        rank = (row.ended_at is not None, row.home is not None)
        if before is None or rank > (before.ended_at is not None, before.home is not None):
            best[row.id] = row
    return list(best.values())


def _amounts(capacity: Capacity) -> views.Amounts:
    return views.Amounts(
        cpus=capacity.millicores / 1000,
        memory=capacity.memory_bytes,
        disk=capacity.disk_bytes,
        gpus=capacity.gpus,
    )
