"""The answers of the HTTP API, as models; `/openapi.json` is made from them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class FieldProblem(BaseModel):
    pointer: str = Field(description="JSON pointer into the document (RFC 6901).")
    message: str
    line: int | None = None


class ProblemDocument(BaseModel):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[FieldProblem] = []
    earliest_at: float | None = Field(
        default=None,
        description="if a deadline can't be met: the earliest end, in seconds since 1970",
    )
    earliest_in_s: float | None = Field(
        default=None, description="the same in seconds from now; a later deadline is accepted"
    )
    offer: str | None = Field(
        default=None,
        description="accepts the plan with that end: submit the same document again with "
        "`?accept=…` within ten seconds, through the same peer",
    )


class Health(BaseModel):
    status: str
    peer: str
    version: str


class Amounts(BaseModel):
    cpus: float
    memory: int
    disk: int
    gpus: int


class PeerView(BaseModel):
    id: str
    address: str
    http: str
    site: str
    capacity: Amounts
    free: Amounts | None = Field(description="null if the peer did not answer")
    running: int | None = None
    queued: int | None = None
    state: str
    arch: str
    os: str
    speed: float
    labels: list[str]
    software: list[str]
    pid: int | None = None
    me: bool = False


class PeerList(BaseModel):
    peers: list[PeerView]


class Failure(BaseModel):
    task: str
    reason: str


class SlotView(BaseModel):
    task: str
    peer: str
    start_at: float
    end_at: float


class PromiseView(BaseModel):
    """The promise that a workflow will be done by its deadline."""

    state: str = Field(description="made, kept, broken; or none")
    why: str = Field(default="", description="why there is none, or why it was broken")
    cause: str = Field(
        default="", description="of a broken one: peer-lost, overrun, failed, data-late, cancelled"
    )
    deadline_at: float | None = None
    ends_at: float | None = Field(default=None, description="when it will end, as foreseen")
    slack_s: float | None = None
    survives: int = Field(default=0, description="how many deaths of peers it has time for")
    risk: str = Field(default="", description="why it will be late, as things are")
    rebooked: int = Field(default=0, description="how many tasks had to be booked again")
    confirmed: bool = Field(default=False, description="all its slots are on their peers' disks")
    booked: int = Field(default=0, description="how many tasks have a slot that they still need")


class PlanView(BaseModel):
    """A plan for a workflow that was not submitted. Nothing of it is kept."""

    feasible: bool
    why: str = Field(default="", description="why the deadline can't be met")
    deadline_at: float
    ends_at: float | None = None
    survives: int = 0
    asked: int = Field(default=0, description="messages to peers")
    tasks: list[SlotView] = []


class WorkflowView(BaseModel):
    id: str
    name: str
    owner: str = ""
    description: str = ""
    state: str = Field(description="pending, running, succeeded, failed or cancelled")
    reason: str = ""
    strategy: str
    tasks: int
    counts: dict[str, int]
    submitted_at: float
    ended_at: float | None
    deadline_at: float | None = None
    late: bool = False
    promise: PromiseView | None = Field(default=None, description="null without a deadline")
    home: str
    keepers: list[str] = []
    risk: str = ""  # what the loss of one machine or site would cost, if anything
    blocked: str = ""  # why it can't go on now, if so: too few of its keepers answer
    peers: int = Field(description="how many different peers ran its tasks")
    failures: list[Failure] = Field(default=[], description="the first ten")
    values: dict[str, Any] = Field(
        default={},
        description="when the workflow is over: the first small values of calls that no other task"
        " takes; all of them are at …/values",
    )
    waiting: list[Failure] = Field(
        default=[], description="the first five ready tasks that no peer has taken yet"
    )
    waiting_inputs: dict[str, str] = {}
    delivering: dict[str, str] = Field(
        default={}, description="results that are being delivered, and the progress of each"
    )
    bytes: dict[str, int] = Field(
        default={},
        description="bytes of inputs that its tasks read: from their own disk (`local`), from other"
        " peers (`peer`), from the URLs in the document (`origin`)",
    )


class WorkflowRow(BaseModel):
    id: str
    name: str
    owner: str = ""
    state: str
    submitted_at: float
    ended_at: float | None
    tasks: int
    home: str | None = None  # None: the peer that was asked only keeps its journal


class WorkflowPage(BaseModel):
    workflows: list[WorkflowRow]
    next: str | None = Field(description="pass as `before` for the next page")
    unanswered: list[str] = Field(default=[], description="peers whose workflows are missing")


class FileView(BaseModel):
    name: str
    hash: str | None = None
    size: int | None = None
    made_by: str | None = None
    final: bool = Field(default=False, description="an output that no task consumes")
    ready: bool


class FileList(BaseModel):
    files: list[FileView]
    next: int | None = Field(default=None, description="pass as `start` for the next page")


class AttemptView(BaseModel):
    number: int
    peer: str
    state: str
    reason: str = ""
    placed_at: float
    queued_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    max_rss: int | None = None
    bytes: dict[str, int] = Field(
        default={}, description="as for a workflow, but of this attempt only"
    )
    placement: dict[str, Any]


class TaskRow(BaseModel):
    id: str
    state: str
    attempts: int
    peer: str | None = None
    exit_code: int | None = None
    seconds: float | None = None
    reason: str = ""


class TaskView(TaskRow):
    template: str
    command: list[str] | None = None
    call: str | None = None
    needs: dict[str, Any]
    parents: list[str]
    inputs: list[str]
    outputs: list[FileView]
    waiting_for: str | None = None
    value: Any = None
    value_encoding: str | None = None
    level: int
    rank: float
    slot: SlotView | None = Field(default=None, description="where and when it was promised")
    history: list[AttemptView]


class TaskPage(BaseModel):
    tasks: list[TaskRow]
    next: str | None = Field(description="pass as `after` for the next page")


class ValuePage(BaseModel):
    values: dict[str, Any] = Field(
        description="by task: the values of calls that no other task takes"
    )
    next: int | None = Field(description="pass as `start` for the next page")
    others: list[str] = Field(
        [],
        description="on the last page: calls whose value is a pickle or large; get each from"
        " …/tasks/T/value",
    )


class LogView(BaseModel):
    task: str
    attempt: int
    peer: str
    text: str
    truncated: bool
    file: list[Any] | None = None  # hash, size, holders: for the peer that answers the user


class EventPage(BaseModel):
    events: list[dict[str, Any]]
    over: bool


class BlobView(BaseModel):
    hash: str
    size: int
