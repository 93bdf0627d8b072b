"""What a home answers about its workflows, for users of any peer. One method per question."""

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
    Value,
)
from ..wire.rpc import Rpc
from .home import UNACKNOWLEDGED, Home
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


#: to another peer: this one is not its home
MOVED = 421
#: a majority of its keepers is away: to ask again in a moment is of no use
STANDS_STILL = 423
#: its submission broke off before it was acknowledged
VOID_STATUS = 410


class ApiError(Exception):
    """What the user is told instead of an answer."""

    def __init__(
        self,
        status: int,
        detail: str,
        errors: list[views.FieldProblem] | None = None,
        lasting: bool = False,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = errors or []
        self.lasting = lasting  # to ask again in a moment is of no use


Found = BaseModel | bytes  # bytes: JSON already
Question = Callable[[Run, dict[str, Any]], Found | Awaitable[Found]]


class Answers:
    def __init__(self, home: Home, rpc: Rpc, clock: Callable[[], float]) -> None:
        self._home = home
        self._clock = clock
        self._me = rpc.me.id.hex()
        self.why_stuck: Callable[[str], str] = lambda id: ""  # a majority of its keepers is away
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

    def knows(self, id: str) -> bool:
        return self._home.knows(id)

    async def answer(self, id: str, question: str, arguments: dict[str, Any], owner: str) -> bytes:
        """JSON, or `Problem`. What is another owner's does not exist."""
        run = await self._home.get(id)
        if run is None or (owner and run.owner != owner):
            raise ApiError(404, f"there is no workflow {id}")
        found = self._questions[question](run, arguments)
        if not isinstance(found, BaseModel | bytes):
            found = await found
        # the end is told when it counts, and by who may tell it
        if run.over and question != "events":
            self._check_kept(run)
            if not await self._home.stands(run):
                raise ApiError(503, f"workflow {id} is changing its home; ask again in a moment")
        return found if isinstance(found, bytes) else found.model_dump_json().encode()

    def _check_kept(self, run: Run) -> None:
        """What is known here, and does not count while a majority of its keepers is away, is not
        waited for; and nobody is told of it."""
        stuck = self.why_stuck(run.id) if self._home.journal.keeping.unkept(run.id) else ""
        if stuck:
            raise ApiError(503, f"workflow {run.id} stands still: {stuck}", lasting=True)

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
        id = message.workflow
        here = self.knows(id)
        home = b"" if here else keeping.follows(id) or b""
        replica = keeping.replicas.get(id)
        # (of one that is over, the copy is on the disk only)
        copy = replica or (keeping.storage.replica(id) if here else None)
        epoch, birth = (copy.promised, 0) if copy else (0, 0)
        run = self._home.remembered(id)
        if run is not None and not run.cancelling and copy is not None:
            birth = copy.birth
        void = copy is None and self._home.journal.is_void(id)
        kept = replica is not None
        stuck = self.why_stuck(id) if kept and not here else ""
        keepers = copy.keepers if copy else ()
        return FoundHome(
            here=here,
            epoch=epoch,
            home=home,
            kept=kept,
            birth=birth,
            void=void,
            stuck=stuck,
            keepers=keepers,
        )

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
        """As it is; with `wait_s`, as it is in the end, if that comes in time."""
        wait_s = min(EVENT_WAIT_S_MAX, float(arguments.get("wait_s") or 0))
        if wait_s:
            await self._home.ended(run, wait_s)
        return self._view(run)

    def _view(self, run: Run) -> views.WorkflowView:
        deadline = deadline_at(run)
        end = run.ended_at if run.ended_at is not None else self._clock()
        failed = (t for t in run.tasks.values() if t.state == "failed")
        failures = [
            views.Failure(task=t.id, reason=t.reason)
            for t, _ in zip(failed, range(10), strict=False)
        ]
        return views.WorkflowView(
            id=run.id,
            name=run.workflow.name,
            owner=run.owner,
            description=run.workflow.description,
            state=run.state,
            reason=run.reason,
            strategy=self._home.strategy(run).name,
            tasks=len(run.tasks),
            counts={s: run.counts[s] for s in STATES if run.counts[s]},
            submitted_at=run.submitted_at,
            ended_at=run.ended_at,
            deadline_at=deadline,
            late=deadline is not None and end > deadline,
            home=self._me,
            keepers=_hex(self._home.keepers(run)),
            risk="" if run.over else self._home.risk(run),
            blocked="" if run.over else self.why_stuck(run.id),
            peers=len({t.holder for t in run.tasks.values() if t.holder}),
            failures=failures,
            values=self._small_values(run),
            waiting=self._waiting(run),
            waiting_inputs=dict(list(run.unstaged.items())[:10]),
            delivering=dict(list(run.delivering.items())[:10]),
            bytes={where: run.moved[where] for where in Moved._fields},
        )

    def _waiting(self, run: Run) -> list[views.Failure]:
        if not run.counts["pending"]:
            return []
        pending = (t for t in run.tasks.values() if t.state == "pending")
        return [
            views.Failure(task=t.id, reason=self._home.waiting_for(run, t))
            for t, _ in zip(pending, range(5), strict=False)
        ]

    def _small_values(self, run: Run) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if not run.over:
            return found
        left = SMALL_VALUES_BYTES_MAX
        for name, data in self._final_values(run, run.tasks):
            left -= len(data)
            if left < 0 or len(found) == SMALL_VALUES_MAX:
                break
            found[name] = json.loads(data)
        return found

    def _final_values(self, run: Run, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Of calls whose value no other task takes, and JSON can say."""
        for name in names:
            won = run.tasks[name].won
            value = won.value if won is not None else None
            if value is None or value.encoding != "json" or value.file is not None:
                continue
            if name not in run.taken:
                yield name, value.data

    def _values(self, run: Run, arguments: dict[str, Any]) -> bytes:
        """Put together as they came: ten thousand values are not read and written again."""
        start = int(arguments.get("start") or 0)
        rows: list[bytes] = []
        others: list[str] = []  # those that such a list can't have: each is asked for by itself
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
        found = (b",".join(rows), json.dumps(following).encode(), json.dumps(others).encode())
        return b'{"values":{%s},"next":%s,"others":%s}' % found

    def _value(self, run: Run, arguments: dict[str, Any]) -> BaseModel:
        """One, whatever it is: where its bytes are, or the bytes themselves."""
        task = self._find(run, arguments["task"])
        value = run.value(task.id)
        if value is None:
            raise ApiError(404, f"{task.id} is {task.state} and has no value")
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
            "seconds": round(ended.ended_at - ended.started_at, 6)
            if ended and ended.started_at
            else None,
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
        found: list[views.TaskRow] = []
        for name in names[start:]:
            task = run.tasks[name]
            if state is None or task.state == state:
                if len(found) == limit:
                    return views.TaskPage(tasks=found, next=found[-1].id)
                found.append(views.TaskRow.model_validate(self._row(task)))
        return views.TaskPage(tasks=found, next=None)

    def _find(self, run: Run, name: str) -> TaskState:
        task = run.tasks.get(name)
        if task is None:
            like = next((t.id for t in run.workflow.tasks.values() if t.template == name), "")
            hint = f"; one of its `foreach` is {like}" if like else ""
            raise ApiError(404, f"workflow {run.id} has no task {name}{hint}")
        return task

    def _task(self, run: Run, arguments: dict[str, Any]) -> views.TaskView:
        task = self._find(run, arguments["task"])
        spec = run.workflow.tasks[task.id]
        value, encoding = None, None
        if task.won is not None and task.won.value is not None:
            encoding = task.won.value.encoding
            if encoding == "json" and task.won.value.file is None:
                value = json.loads(task.won.value.data)
        needs = {k: getattr(run.needs(spec.id), k) for k in spec.needs.__slots__}
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
                "value": value,
                "value_encoding": encoding,
                "level": run.level_of(task.id),
                "rank": run.ranks[task.id],
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
                raise ApiError(404, f"{task.id} has no attempt {number}")
            raise ApiError(404, f"{task.id} is {task.state}: no attempt of it has ended yet")
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
        """Those after an id; if there are none yet, waits a while for some."""
        seq, index = arguments["after"]
        deadline = asyncio.get_running_loop().time() + min(
            EVENT_WAIT_S_MAX, float(arguments.get("wait_s", 0))
        )
        while True:
            changed = self._home.journal.changed(run.id)
            found: list[dict[str, Any]] = []
            over = False
            rows = self._home.journal.read(run.id, seq - 1, ENTRIES_PER_PAGE)
            for row in rows:
                for event in events.of_entry(row.seq, row.at, row.said):
                    if row.seq > seq or int(event["id"].partition(".")[2]) > index:
                        found.append(event)
                    if len(found) >= EVENTS_PER_PAGE_MAX:
                        break
                if len(found) >= EVENTS_PER_PAGE_MAX:
                    break
                over = over or isinstance(row.said, Ended)
            if not self._home.knows(run.id):
                raise ApiError(503, f"workflow {run.id} is changing its home; go on in a moment")
            if found or over:
                return views.EventPage(events=found, over=over)
            if len(rows) == ENTRIES_PER_PAGE:  # all of them silent: go on behind them
                seq, index = rows[-1].seq, 10**9
                continue
            if self._home.journal.is_over(run.id):
                # what was seen last is of another line, which was longer and does not hold
                return views.EventPage(events=[], over=True)
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return views.EventPage(events=[], over=False)

    async def _cancel(self, run: Run, arguments: dict[str, Any]) -> views.WorkflowView:
        if run.over and run.state != "cancelled":
            raise ApiError(409, f"workflow {run.id} has {run.state} already")
        stuck = self.why_stuck(run.id)
        if stuck:
            raise ApiError(503, f"workflow {run.id} can't be cancelled: {stuck}", lasting=True)
        try:
            await self._home.cancel(run.id, arguments.get("reason") or "cancelled by its user")
        except Deposed:
            raise ApiError(503, "it is changing its home; cancel it again in a moment") from None
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
        """Who asks for it takes the answer for an acknowledgement: only if it counts."""
        await self._home.created(run.id)
        self._check_kept(run)
        counts = await self._home.stands(run)
        found = self._home.journal.document(run.id)
        if found is None or not counts:  # or its copy is on its way to another peer
            raise ApiError(503, f"workflow {run.id} is changing its home; ask again in a moment")
        if UNACKNOWLEDGED in (run.cancelling, run.reason):
            raise ApiError(VOID_STATUS, f"workflow {run.id} was never accepted: submit it again")
        return _Document(hash=str(found[1].get("document", "")))

    def _file(self, run: Run, arguments: dict[str, Any]) -> BaseModel:
        name = arguments["name"]
        file = run.file(name)
        if file is not None:
            holders = self._home.targets.held_too(file).holders
            return _Located(hash=file.hash.hex(), size=file.size, holders=_hex(holders))
        maker = run.workflow.producers.get(name)
        if maker is not None:
            state = run.tasks[maker].state
            raise ApiError(404, f"{name} is not there: {maker}, which makes it, is {state}")
        if name in run.workflow.inputs:
            why = run.unstaged.get(name) or run.stage_failures.get(name, "")
            raise ApiError(404, f"input {name} is not there yet: {why}")
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


def _is_other(value: Value) -> bool:
    """It is not among those that a list of values in JSON can have."""
    return value.encoding != "json" or value.file is not None


def _hex(ids: tuple[bytes, ...]) -> list[str]:
    return [id.hex() for id in ids]
