"""Answers users' questions about the workflows of this home.

There is one method for each question. A user may have asked any peer: it passes the question on
(`gateway`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import msgpack
from pydantic import BaseModel

from valence.protocols.engine import events, views

from ..consensus.keeping import Deposed
from ..consensus.replica import Replica
from ..wire.entries import Ended
from ..wire.messages import (
    Answer,
    Ask,
    Contact,
    FindHome,
    FoundHome,
    ListedWorkflows,
    ListWorkflows,
    Moved,
    Outcome,
    Value,
)
from ..wire.rpc import Rpc
from .home import UNACKNOWLEDGED, Home
from .journal import Recorded
from .run import FINAL, STATES, AttemptState, Run, TaskState
from .work import deadline_at

TASKS_PER_PAGE_MAX = 1000
EVENTS_PER_PAGE_MAX = 2000
ENTRIES_PER_PAGE = 200
FILES_PER_PAGE = 5000
EVENT_WAIT_S_MAX = 15.0
VALUES_PER_PAGE = 20_000
VALUES_BYTES_MAX = 2 * 2**20
SMALL_VALUES_MAX = 100
SMALL_VALUES_BYTES_MAX = 16 * 1024

#: told to another peer: this one is not the workflow's home
MOVED = 421
#: a majority of the keepers is away, so asking again in a moment won't help
STANDS_STILL = 423
#: the submission broke off before it was acknowledged
VOID_STATUS = 410


class ApiError(Exception):
    """An error that the user gets instead of an answer."""

    def __init__(
        self,
        status: int,
        detail: str,
        errors: list[views.FieldProblem] | None = None,
        lasting: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = errors or []
        self.lasting = lasting  # asking again in a moment won't help
        self.more = more  # further fields of its problem document


Body = BaseModel | bytes  # bytes are JSON already
Question = Callable[[Run, dict[str, Any]], Body | Awaitable[Body]]


class Answers:
    def __init__(self, home: Home, rpc: Rpc, clock: Callable[[], float]) -> None:
        self._home = home
        self._clock = clock
        self._me = rpc.me.id.hex()
        # why a workflow is blocked, if a majority of its keepers is away
        self.why_stuck: Callable[[str], str] = lambda workflow_id: ""
        self._questions: dict[str, Question] = {
            "workflow": self._workflow,
            "tasks": self._tasks,
            "values": self._values,
            "value": self._value,
            "task": self._task,
            "log": self._log,
            "events": self._events,
            "cancel": self._cancel,
            "files": self._files,
            "file": self._file,
            "document": self._document,
        }
        rpc.on(Ask, self._asked)
        rpc.on(ListWorkflows, self._list)
        rpc.on(FindHome, self._find_home)

    def knows(self, workflow_id: str) -> bool:
        return self._home.knows(workflow_id)

    async def answer(
        self, workflow_id: str, question: str, arguments: dict[str, Any], owner: str
    ) -> bytes:
        """The answer as JSON; else raises `ApiError`. For an owner, the workflows of other owners
        do not exist."""
        run = await self._home.get(workflow_id)
        if run is None or (owner and run.owner != owner):
            raise ApiError(404, f"there is no workflow {workflow_id}")
        body = self._questions[question](run, arguments)
        if not isinstance(body, BaseModel | bytes):
            body = await body
        # an end is told once it is committed, and only by the peer that may tell it
        if run.over and question != "events":
            self._check_kept(run)
            if not await self._home.stands(run):
                raise moving(run.id)
        return body if isinstance(body, bytes) else body.model_dump_json().encode()

    def _check_kept(self, run: Run) -> None:
        """While a majority of the keepers is away, nobody is told of entries that are here but not
        committed, nor kept waiting for them."""
        stuck = self.why_stuck(run.id) if self._home.journal.keeping.unkept(run.id) else ""
        if stuck:
            raise ApiError(503, f"workflow {run.id} is blocked: {stuck}", lasting=True)

    async def _asked(self, sender: Contact, message: Ask) -> Answer:
        if message.question not in self._questions:
            return Answer(status=400, body=b'{"detail": "unknown question"}')
        try:
            arguments = msgpack.unpackb(message.arguments) if message.arguments else {}
            body = await self.answer(message.workflow, message.question, arguments, message.owner)
        except ApiError as problem:
            detail = json.dumps({"detail": problem.detail}).encode()
            if problem.lasting:
                return Answer(status=STANDS_STILL, body=detail)
            gone = problem.status in (404, 503) and not self.knows(message.workflow)
            return Answer(status=MOVED if gone else problem.status, body=detail)
        return Answer(status=200, body=body)

    def _find_home(self, sender: Contact, message: FindHome) -> FoundHome:
        keeping = self._home.journal.keeping
        workflow_id = message.workflow
        is_home = self.knows(workflow_id)
        replica = keeping.replicas.get(workflow_id)
        # (the copy of a workflow that is over is on the disk only)
        copy = replica or (keeping.storage.replica(workflow_id) if is_home else None)
        kept = replica is not None
        return FoundHome(
            here=is_home,
            epoch=copy.promised if copy else 0,
            home=b"" if is_home else keeping.follows(workflow_id) or b"",
            kept=kept,
            birth=self._birth(workflow_id, copy),
            void=copy is None and self._home.journal.is_void(workflow_id),
            stuck=self.why_stuck(workflow_id) if kept and not is_home else "",
            keepers=copy.keepers if copy else (),
        )

    def _birth(self, workflow_id: str, copy: Replica | None) -> int:
        """0 unless this peer goes on with the workflow: only then does a duplicate make way."""
        run = self._home.remembered(workflow_id)
        return copy.birth if copy and run is not None and not run.cancelling else 0

    def _list(self, sender: Contact, message: ListWorkflows) -> ListedWorkflows:
        rows = self.page(message.before, message.limit, message.state, message.owner)
        return ListedWorkflows(rows=tuple(row.model_dump_json().encode() for row in rows))

    def page(self, before: str, limit: int, state: str, owner: str) -> list[views.WorkflowRow]:
        rows = self._home.journal.storage.listed(before, limit, state, owner)
        keeping = self._home.journal.keeping
        return [
            views.WorkflowRow.model_validate(
                {**asdict(row), "home": self._me if keeping.is_home(row.id) else None}
            )
            for row in rows
        ]

    # ----------------------------------------------------------------- questions

    async def _workflow(self, run: Run, arguments: dict[str, Any]) -> views.WorkflowView:
        """The workflow as it is now; with `wait_s`, as it is at its end, if that comes in time."""
        wait_s = min(EVENT_WAIT_S_MAX, float(arguments.get("wait_s") or 0))
        if wait_s:
            await self._home.ended(run, wait_s)
        return self._view(run)

    def _view(self, run: Run) -> views.WorkflowView:
        deadline = run.promise.deadline_at if run.promise is not None else deadline_at(run)
        end = run.ended_at if run.ended_at is not None else self._clock()
        return views.WorkflowView(
            id=run.id,
            name=run.workflow.name,
            owner=run.owner,
            description=run.workflow.description,
            state=run.state,
            reason=run.reason,
            strategy=self._home.strategy(run).name,
            tasks=len(run.tasks),
            counts={s: count for s in STATES if (count := run.counts.get(s))},
            submitted_at=run.submitted_at,
            ended_at=run.ended_at,
            deadline_at=deadline,
            late=deadline is not None and end > deadline,
            promise=self._promise(run),
            home=self._me,
            keepers=_hex(self._home.keepers(run)),
            risk="" if run.over else self._home.risk(run),
            blocked="" if run.over else self.why_stuck(run.id),
            peers=len({t.holder for t in run.tasks.values() if t.holder}),
            failures=_failures(run),
            values=self._small_values(run),
            waiting=self._waiting(run),
            waiting_inputs=dict(list(run.unstaged.items())[:10]),
            delivering=dict(list(run.delivering.items())[:10]),
            bytes={where: run.moved[where] for where in Moved._fields},
        )

    def _promise(self, run: Run) -> views.PromiseView | None:
        promise = run.promise
        if promise is None:
            return self._no_promise(run)
        return views.PromiseView(
            state=promise.state,
            why=promise.why,
            cause=promise.cause,
            deadline_at=promise.deadline_at,
            ends_at=promise.ends_at if promise.is_open else run.ended_at,
            slack_s=promise.deadline_at - promise.ends_at if promise.is_open else None,
            survives=promise.survives,
            risk=promise.risk,
            rebooked=promise.rebooked,
            confirmed=promise.confirmed,
            booked=len(promise.slots) if promise.is_open else 0,
        )

    def _no_promise(self, run: Run) -> views.PromiseView | None:
        if run.workflow.deadline is None:
            return None
        why = self._home.planning.why_none(run.workflow, run.owner)
        why = why or "when it was submitted, the deadline could not be promised"
        return views.PromiseView(state="none", why=why)

    def _waiting(self, run: Run) -> list[views.Failure]:
        if not run.counts.get("pending"):
            return []
        pending = (t for t in run.tasks.values() if t.state == "pending")
        return [
            views.Failure(task=t.id, reason=self._home.waiting_for(run, t))
            for t, _ in zip(pending, range(5), strict=False)
        ]

    def _small_values(self, run: Run) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if not run.over:
            return values
        left_bytes = SMALL_VALUES_BYTES_MAX
        for name, data in self._final_values(run, run.tasks):
            left_bytes -= len(data)
            if left_bytes < 0 or len(values) == SMALL_VALUES_MAX:
                break
            values[name] = json.loads(data)
        return values

    def _final_values(self, run: Run, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """The values of calls that no other task takes and that JSON can express."""
        for name in names:
            won = run.tasks[name].won
            value = won.value if won is not None else None
            if value is None or value.encoding != "json" or value.file is not None:
                continue
            if name not in run.taken:
                yield name, value.data

    def _values(self, run: Run, arguments: dict[str, Any]) -> bytes:
        """The values' JSON is joined as it came, so that ten thousand values are not parsed and
        written again."""
        start = int(arguments.get("start") or 0)
        rows: list[bytes] = []
        others: list[str] = []  # values that such a list can't have: each is asked for separately
        size = 0
        following: int | None = None
        for index, name in enumerate(itertools.islice(run.tasks, start, None), start):
            won = run.tasks[name].won
            value = won.value if won is not None else None
            if value is None or name in run.taken:
                continue
            count = len(rows) + len(others)
            if count and (count == VALUES_PER_PAGE or size + len(value.data) > VALUES_BYTES_MAX):
                following = index
                break
            if _is_other(value):
                others.append(name)
            else:
                rows.append(b"%s:%s" % (json.dumps(name).encode(), value.data))
            size += len(value.data)
        parts = (b",".join(rows), json.dumps(following).encode(), json.dumps(others).encode())
        return b'{"values":{%s},"next":%s,"others":%s}' % parts

    def _value(self, run: Run, arguments: dict[str, Any]) -> BaseModel:
        """One value of any kind: its bytes, or where they are."""
        task = self._find(run, arguments["task"])
        value = run.value(task.id)
        if value is None:
            raise ApiError(404, f"task {task.id} is {task.state} and has no value")
        file = value.file
        return _StoredValue(
            encoding=value.encoding,
            data=value.data.hex(),
            file=None
            if file is None
            else _Located(
                hash=file.hash.hex(),
                size=file.size,
                holders=_hex(self._home.targets.held_too(file).holders),
            ),
        )

    def _row(self, task: TaskState) -> dict[str, Any]:
        last = task.attempts[-1] if task.attempts else None
        ended = task.won or (last.outcome if last else None)
        where = (task.won and task.won.by) or task.holder or (last.ran_at if last else b"")
        return {
            "id": task.id,
            "state": task.state,
            "attempts": task.number,
            "peer": self._home.targets.called(where) or None,
            "exit_code": ended.exit_code if ended else None,
            "seconds": _seconds(ended),
            "reason": task.reason,
        }

    def _tasks(self, run: Run, arguments: dict[str, Any]) -> views.TaskPage:
        limit = min(TASKS_PER_PAGE_MAX, int(arguments.get("limit") or 100))
        state, after = arguments.get("state"), arguments.get("after")
        names = list(run.tasks)
        start = 0
        if after:
            if after not in run.tasks:
                raise ApiError(400, f"after: there is no task {after}")
            start = names.index(after) + 1
        rows: list[views.TaskRow] = []
        for name in names[start:]:
            task = run.tasks[name]
            if state is None or task.state == state:
                if len(rows) == limit:
                    return views.TaskPage(tasks=rows, next=rows[-1].id)
                rows.append(views.TaskRow.model_validate(self._row(task)))
        return views.TaskPage(tasks=rows, next=None)

    def _find(self, run: Run, name: str) -> TaskState:
        task = run.tasks.get(name)
        if task is None:
            like = next((t.id for t in run.workflow.tasks.values() if t.template == name), "")
            if like:
                several = f"'{name}' stands for several tasks; name one of them, such as '{like}'"
                raise ApiError(404, several)
            raise ApiError(404, f"workflow {run.id} has no task {name}")
        return task

    def _task(self, run: Run, arguments: dict[str, Any]) -> views.TaskView:
        task = self._find(run, arguments["task"])
        spec = run.workflow.tasks[task.id]
        needs = run.needs(spec.id)._asdict()
        return views.TaskView.model_validate(
            {
                **self._row(task),
                "template": spec.template,
                "command": list(command) if (command := run.spec(spec.id).command) else None,
                "call": spec.call,
                "needs": {k: v for k, v in needs.items() if v},
                "parents": list(run.workflow.parents[task.id]),
                "inputs": list(spec.inputs),
                "outputs": [self._file_view(run, name) for name in spec.outputs],
                "waiting_for": None if task.state in FINAL else self._home.waiting_for(run, task),
                **_shown_value(task),
                "level": run.level_of(task.id),
                "rank": run.ranks[task.id],
                "slot": _slot(run, task.id),
                "history": [self._attempt(a) for a in task.attempts],
            }
        )

    def _attempt(self, attempt: AttemptState) -> views.AttemptView:
        ended = attempt.outcome
        return views.AttemptView(
            number=attempt.number,
            peer=self._home.targets.called(attempt.ran_at),
            state=attempt.state,
            reason=attempt.reason,
            placed_at=attempt.at,
            queued_at=ended.queued_at if ended else None,
            started_at=(ended.started_at or None) if ended else None,
            ended_at=ended.ended_at if ended else None,
            exit_code=ended.exit_code if ended else None,
            max_rss=ended.max_rss_bytes if ended else None,
            bytes=ended.moved._asdict() if ended else {},
            placement=attempt.placement,
        )

    def _log(self, run: Run, arguments: dict[str, Any]) -> views.LogView:
        task = self._find(run, arguments["task"])
        number = arguments.get("attempt")
        tried = [a for a in task.attempts if number is None or a.number == number]
        done = [a for a in tried if a.outcome is not None]
        if not done:
            if number is not None and not tried:
                raise ApiError(404, f"task {task.id} has no attempt {number}")
            raise ApiError(404, f"task {task.id} is {task.state}; no attempt of it has ended yet")
        attempt = done[-1]
        ended = attempt.outcome
        assert ended is not None
        file = ended.log
        return views.LogView(
            task=task.id,
            attempt=attempt.number,
            peer=self._home.targets.called(attempt.ran_at),
            text=ended.log_tail,
            truncated=ended.log_truncated,
            file=[file.hash.hex(), file.size, [attempt.ran_at.hex()]] if file else None,
        )

    async def _events(self, run: Run, arguments: dict[str, Any]) -> views.EventPage:
        """The events after an id. If there are none yet, waits a while for some."""
        seq, index = arguments["after"]
        deadline = asyncio.get_running_loop().time() + min(
            EVENT_WAIT_S_MAX, float(arguments.get("wait_s", 0))
        )
        while True:
            changed = self._home.journal.changed(run.id)
            rows = self._home.journal.read(run.id, seq - 1, ENTRIES_PER_PAGE)
            page, over = _events_after(rows, seq, index)
            if not self._home.knows(run.id):
                raise moving(run.id)
            if page or over:
                return views.EventPage(events=page, over=over)
            if len(rows) == ENTRIES_PER_PAGE:  # none of these entries is an event: go on after them
                seq, index = rows[-1].seq, 10**9
                continue
            if self._home.journal.is_over(run.id):
                # the event seen last is of another line of the journal, which was longer and lost
                return views.EventPage(events=[], over=True)
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return views.EventPage(events=[], over=False)

    async def _cancel(self, run: Run, arguments: dict[str, Any]) -> views.WorkflowView:
        if run.over and run.state != "cancelled":
            raise ApiError(409, f"workflow {run.id} has already {run.state}")
        stuck = self.why_stuck(run.id)
        if stuck:
            raise ApiError(503, f"workflow {run.id} can't be cancelled: {stuck}", lasting=True)
        try:
            await self._home.cancel(run.id, arguments.get("reason") or "cancelled by its user")
        except Deposed:
            raise moving(run.id) from None
        return self._view(run)

    def _file_view(self, run: Run, name: str) -> views.FileView:
        file = run.file(name)
        maker = run.workflow.producers.get(name)
        return views.FileView(
            name=name,
            hash=f"sha256:{file.hash.hex()}" if file else None,
            size=file.size if file else None,
            made_by=maker,
            ready=file is not None,
        )

    def _files(self, run: Run, arguments: dict[str, Any]) -> views.FileList:
        final = run.final_files
        names = [*run.workflow.inputs, *run.workflow.producers]
        start = int(arguments.get("start") or 0)
        page = names[start : start + FILES_PER_PAGE]
        end = start + len(page)
        return views.FileList(
            files=[
                self._file_view(run, name).model_copy(update={"final": name in final})
                for name in page
            ],
            next=end if end < len(names) else None,
        )

    async def _document(self, run: Run, arguments: dict[str, Any]) -> BaseModel:
        """The answer serves as an acknowledgement, so it is given only of what is committed."""
        await self._home.created(run.id)
        self._check_kept(run)
        committed = await self._home.stands(run)
        document = self._home.journal.document(run.id)
        if document is None or not committed:  # or the copy is on its way to another peer
            raise moving(run.id)
        if UNACKNOWLEDGED in (run.cancelling, run.reason):
            raise ApiError(VOID_STATUS, f"workflow {run.id} was never accepted: submit it again")
        return _Document(hash=str(document[1].get("document", "")))

    def _file(self, run: Run, arguments: dict[str, Any]) -> BaseModel:
        name = arguments["name"]
        file = run.file(name)
        if file is not None:
            holders = self._home.targets.held_too(file).holders
            return _Located(hash=file.hash.hex(), size=file.size, holders=_hex(holders))
        maker = run.workflow.producers.get(name)
        if maker is not None:
            state = run.tasks[maker].state
            raise ApiError(
                404, f"file {name} does not exist yet: task {maker}, which makes it, is {state}"
            )
        if name in run.workflow.inputs:
            why = run.unstaged.get(name) or run.stage_failures.get(name, "")
            raise ApiError(404, f"input {name} is not available yet: {why}")
        raise ApiError(404, f"workflow {run.id} has no file {name}")


class _Document(BaseModel):
    hash: str


class _Located(BaseModel):
    hash: str
    size: int
    holders: list[str]


class _StoredValue(BaseModel):
    encoding: str
    data: str
    file: _Located | None


def _shown_value(task: TaskState) -> dict[str, Any]:
    value = task.won.value if task.won is not None else None
    if value is None:
        return {"value": None, "value_encoding": None}
    shown = None if _is_other(value) else json.loads(value.data)
    return {"value": shown, "value_encoding": value.encoding}


def _is_other(value: Value) -> bool:
    """A list of values in JSON can't have it."""
    return value.encoding != "json" or value.file is not None


def moving(workflow_id: str) -> ApiError:
    return ApiError(503, f"workflow {workflow_id} is moving to another peer; try again in a moment")


def _failures(run: Run) -> list[views.Failure]:
    if not run.counts.get("failed"):
        return []
    failed = (t for t in run.tasks.values() if t.state == "failed")
    return [
        views.Failure(task=t.id, reason=t.reason) for t, _ in zip(failed, range(10), strict=False)
    ]


def _seconds(ended: Outcome | None) -> float | None:
    return round(ended.ended_at - ended.started_at, 6) if ended and ended.started_at else None


def _events_after(rows: list[Recorded], seq: int, index: int) -> tuple[list[dict[str, Any]], bool]:
    """The events of these entries after event `seq.index`, and whether one of them is the end."""
    page: list[dict[str, Any]] = []
    over = False
    for row in rows:
        for event in events.of_entry(row.seq, row.at, row.said):
            if row.seq > seq or int(event["id"].partition(".")[2]) > index:
                page.append(event)
            if len(page) >= EVENTS_PER_PAGE_MAX:
                return page, over
        over = over or isinstance(row.said, Ended)
    return page, over


def _hex(peer_ids: tuple[bytes, ...]) -> list[str]:
    return [peer_id.hex() for peer_id in peer_ids]


def _slot(run: Run, task: str) -> views.SlotView | None:
    row = run.promise.slots.get(task) if run.promise is not None else None
    if row is None:
        return None
    return views.SlotView(task=task, peer=row.peer.hex(), start_at=row.start_at, end_at=row.end_at)
