"""Any peer answers for any workflow: find its home, ask it, pass the answer on."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
from collections.abc import Callable
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
    Describe,
    Described,
    ListedWorkflows,
    ListWorkflows,
    Member,
)
from ..wire.rpc import CallFailed, Refused, Rpc
from .answers import MOVED, STANDS_STILL, VOID_STATUS, Answers, ApiError
from .home import AlreadyHere, Home
from .locate import SILENT_S, VOID_HOME, Locate
from .work import due_at, is_much, read_document

log = logging.getLogger("valence.gateway")

MOVING_S_MAX = 12.0
ASK_TIMEOUT_S = 5.0
PROMPT_S = 0.5  # an answer that takes longer: are the keepers there?
LATE_S = 0.25
EVENTS_TIMEOUT_S = 25.0  # they are waited for
READERS_MAX = 2
BROKEN_OFF_MAX = 8


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
        self.prefix = "w"  # of the ids of workflows
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

    async def ask(self, owner: str, id: str, question: str, **arguments: Any) -> Any:
        return json.loads(await self.ask_raw(owner, id, question, **arguments))

    async def ask_raw(self, owner: str, id: str, question: str, **arguments: Any) -> bytes:
        """The home's answer, JSON, wherever it is; or `Problem`. An empty owner sees all.

        While a workflow changes its home, it is asked again for a while: all questions can be."""
        deadline = asyncio.get_running_loop().time() + MOVING_S_MAX
        delay_s = 0.1
        while True:
            try:
                return await self._ask_promptly(owner, id, question, arguments)
            except ApiError as problem:
                # (what only a peer's return can mend is told at once)
                late = asyncio.get_running_loop().time() > deadline
                if problem.status != 503 or problem.lasting or late:
                    raise
            await asyncio.sleep(delay_s)
            delay_s = min(1.0, delay_s * 1.5)

    async def _ask_promptly(
        self, owner: str, id: str, question: str, arguments: dict[str, Any]
    ) -> bytes:
        """Hosts that vanish are found gone after seconds. Whoever asks meanwhile is not kept
        waiting: if a majority of the keepers is silent now, that is the answer."""
        asked = asyncio.ensure_future(self._ask_once(owner, id, question, arguments))
        asked.add_done_callback(lambda task: task.cancelled() or task.exception())  # it was heard
        loop = asyncio.get_running_loop()
        try:
            start = loop.time()
            await asyncio.wait([asked], timeout=PROMPT_S)
            if not asked.done() and "wait_s" not in arguments:
                silent, count = await self._locate.silent(id)
                late = loop.time() - start > PROMPT_S + 2 * SILENT_S + LATE_S  # am I slow myself?
                if not asked.done() and not late and count - len(silent) < majority(count):
                    why = standstill(silent, count, "do not answer")
                    raise ApiError(503, f"workflow {id} stands still: {why}", lasting=True)
            return await asked
        finally:
            asked.cancel()

    async def _ask_once(
        self, owner: str, id: str, question: str, arguments: dict[str, Any]
    ) -> bytes:
        if self._answers.knows(id):
            return await self._answers.answer(id, question, arguments, owner)
        home = await self._locate.home(id)
        if home is None:
            raise ApiError(404, f"there is no workflow {id}")
        if home == VOID_HOME and question == "document":  # is that key in use?
            raise ApiError(VOID_STATUS, f"workflow {id} was never accepted: submit it again")
        if home == VOID_HOME:  # another of its name may have been accepted where nobody answers now
            raise ApiError(503, f"nobody who answers has accepted workflow {id}")
        member = self._members.get(home) if home else None
        if member is None or member.state >= State.DEAD:
            stuck = self._why_stuck(id) or self._locate.stuck.get(id, "")
            if stuck:
                raise ApiError(503, f"workflow {id} stands still: {stuck}", lasting=True)
            if not home:
                why = "its keepers are agreeing on a new one"
                raise ApiError(503, f"workflow {id} has no home: {why}")
            self._locate.forget(id, home)
            down = f"the home of workflow {id}, peer {home.hex()[:8]}, is down"
            raise ApiError(503, f"{down}, and no other peer that is here keeps it", lasting=True)
        packed = msgpack.packb(arguments)
        message = Ask(workflow=id, question=question, arguments=packed, owner=owner)
        try:
            limit_s = EVENTS_TIMEOUT_S if "wait_s" in arguments else ASK_TIMEOUT_S
            answer = await self._rpc.call(member.contact, message, Answer, limit_s)
        except CallFailed as error:
            self._locate.forget(id, home)
            raise ApiError(503, f"the home of workflow {id} does not answer: {error}") from None
        if answer.status == MOVED:
            self._locate.forget(id, home)
            raise ApiError(503, f"workflow {id} is changing its home; ask again in a moment")
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
            errors = [
                views.FieldProblem(pointer=p.place, message=p.message, line=p.line)
                for p in error.problems
            ]
            count = len(errors)
            first = str(error.problems[0])
            detail = first if count == 1 else f"{count} problems; the first is {first}"
            raise ApiError(422, detail, errors) from None
        id = new_id(self._rpc.me.id, self._rng, self.prefix)
        if "idempotency" in options:
            options["document"] = hashlib.sha256(text).hexdigest()
            id, new = await self._named(owner, options)
            if not new:
                return id, False
        now = self._home.now()
        due = due_at(workflow, now)
        if due is not None and due <= now:
            late = f"{workflow.deadline} is {show_seconds(now - due)} ago: a deadline is ahead"
            raise ApiError(422, late, [views.FieldProblem(pointer="/deadline", message=late)])
        try:
            run = await self._home.submit(text, workflow, id, options, owner, patient)
        except Refused as error:
            raise ApiError(503, error.text) from None
        except ValidationError as error:
            raise ApiError(
                422, f"a need of it is out of all bounds: {error.errors()[0]['msg']}"
            ) from None
        except AlreadyHere:  # the same key, a moment ago
            try:
                await self._same(owner, id, options)
            except ApiError as problem:
                if problem.status != VOID_STATUS:
                    raise
                raise ApiError(503, "that submission broke off; submit it again") from None
            return id, False
        except DatabaseError as error:
            raise ApiError(507, f"it can't be written to disk: {error}") from None
        return run.id, True

    async def _read(self, text: bytes, options: dict[str, Any], owner: str) -> Workflow:
        """Away from the loop, unless it is short and can't be much: a few bytes may stand for
        200,000 tasks. One at a time of each owner: others do not wait for who sends many."""
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
        """The id follows from the key, so that every peer finds the first submission. One that
        broke off leaves its id unusable: the next one in the row is tried then."""
        name = f"{owner}\0{options['idempotency']}"
        for again in range(BROKEN_OFF_MAX):
            digest = hashlib.sha256((name + "\0" * again).encode()).hexdigest()
            id = f"{self.prefix}{digest[:16]}"
            try:
                await self._same(owner, id, options)
                return id, False
            except ApiError as problem:
                if problem.status == 404:
                    return id, True
                if problem.status != VOID_STATUS:
                    raise
        raise ApiError(
            503, "submissions with this Idempotency-Key broke off too often; use another"
        )

    async def _same(self, owner: str, id: str, options: dict[str, Any]) -> None:
        first = await self.ask(owner, id, "document")
        if first["hash"] != options["document"]:
            raise ApiError(
                422,
                "this Idempotency-Key was used for another document; use a new key for this one",
            )

    # ----------------------------------------------------------------- listing

    async def workflows(
        self, owner: str, before: str, limit: int, state: str
    ) -> views.WorkflowPage:
        """Newest first, from all peers that are here. An empty owner sees all."""
        rows = self._answers.page(before, limit, state, owner)
        others = [m for m in self._members.here() if m.contact.id != self._rpc.me.id]
        message = ListWorkflows(before=before, limit=limit, state=state, owner=owner)
        unanswered = [m.contact.id.hex() for m in self._members.all() if m.state == State.DEAD]
        for member, answer in await self._locate.everyone(others, message, ListedWorkflows):
            if answer is None:
                unanswered.append(member.contact.id.hex())
            else:
                rows.extend(views.WorkflowRow.model_validate_json(row) for row in answer.rows)
        rows = _one_each(rows)
        rows.sort(key=lambda row: (row.submitted_at, row.id), reverse=True)
        # as many copies as a workflow has must be missing before one is
        keepers = self._home.journal.keeping.config.keepers
        if len(unanswered) < min(keepers, len(self._members) - 1):
            unanswered = []
        full = len(rows) >= limit
        rows = rows[:limit]
        last = f"{rows[-1].submitted_at!r},{rows[-1].id}" if full and rows else None
        return views.WorkflowPage(workflows=rows, next=last, unanswered=unanswered)

    async def peers(self) -> views.PeerList:
        members = self._members.all()
        here = [m for m in members if m.state <= State.SUSPECT]
        described = {
            member.contact.id: answer
            for member, answer in await self._locate.everyone(here, Describe(), Described)
        }
        mine = self._rpc.me.id
        rows = [self._peer(m, described.get(m.contact.id), m.contact.id == mine) for m in members]
        rows.sort(key=lambda v: (v.state not in ("up", "leaving"), v.id))
        return views.PeerList(peers=rows)

    def _peer(self, member: Member, found: Described | None, me: bool) -> views.PeerView:
        names = {0: "up", 1: "suspect", 2: "dead", 3: "left"}
        traits, contact = member.traits, member.contact
        state = names[member.state]
        return views.PeerView(
            id=contact.id.hex(),
            address=f"{contact.host}:{contact.port}",
            http=member.http,
            site=traits.site,
            capacity=_amounts(member.capacity),
            free=_amounts(found.free) if found else None,
            running=found.running if found else None,
            queued=found.queued if found else None,
            state=found.state if found and state == "up" else state,
            arch=traits.arch,
            os=traits.os,
            speed=traits.speed,
            labels=list(traits.labels),
            software=list(traits.software),
            pid=found.pid if found and contact.host.startswith("127.") else None,
            me=me,
        )


def _one_each(rows: list[views.WorkflowRow]) -> list[views.WorkflowRow]:
    """Of a workflow's keepers the one that knows most of it: its end, else its home."""
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
