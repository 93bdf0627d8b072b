"""The model of a workflow: a DAG of tasks with files and values flowing along its edges.

Everything here is checked, expanded and resolved: `foreach` is gone, globs are file names, every
reference names a task that exists, and there is no cycle. Only `document` and `wfformat` make it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

NOTHING: Mapping[str, Any] = MappingProxyType({})


class TaskNeeds(NamedTuple):
    """A task's requirements: integers that it uses up, and attributes that the peer must have."""

    millicores: int = 1000
    memory_bytes: int = 0
    disk_bytes: int = 0
    gpus: int = 0
    arch: str | None = None
    os: str | None = None
    site: str | None = None
    speed: float | None = None
    labels: tuple[str, ...] = ()
    software: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """The source of an input: `text`, `blob` (a hash), `url`, or `size` (made-up bytes)."""

    kind: Literal["text", "blob", "url", "size", "path"]
    value: str


@dataclass(frozen=True, slots=True)
class Reference:
    """`{result: name}` in a call's arguments: one task's value, or all of a `foreach` in order."""

    tasks: tuple[str, ...]
    many: bool


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to do a task's work."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    needs: TaskNeeds
    timeout_s: float | None


class Task(NamedTuple):
    id: str
    template: str
    command: tuple[str, ...] | None = None
    call: str | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = NOTHING
    references: Mapping[str, Reference] = NOTHING
    env: Mapping[str, str] = NOTHING
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    needs: TaskNeeds = TaskNeeds()
    runtime_s: float | None = None
    timeout_s: float | None = None
    retries: int = 0
    network: bool = False
    alternatives: tuple[Alternative, ...] = ()
    branch: str = ""  # tasks that go from one of their alternatives to the next together
    gang: tuple[str, ...] = ()  # tasks that run on different peers at once, by rank, with itself


@dataclass(frozen=True, slots=True)
class PromiseTerms:
    """What the user wants of a workflow with a deadline."""

    infeasible: Literal["refuse", "earliest", "best-effort"] = "refuse"
    survive: int | None = None  # deaths of peers to leave time for; None: one if that is possible
    on_broken: Literal["go-on", "cancel"] = "go-on"


@dataclass(frozen=True, slots=True)
class Workflow:
    name: str
    strategy: str
    deadline: str | None
    inputs: Mapping[str, Source]
    tasks: Mapping[str, Task]  # in an order in which each comes after its parents
    parents: Mapping[str, tuple[str, ...]]
    producers: Mapping[str, str]  # file → the task that makes it
    description: str = ""
    policies: tuple[str, ...] = ()
    strict: bool = False  # level by level: no task starts before all levels above are done
    rank: str = ""  # an expression by which pilots rank its tasks; empty: the usual ranking
    deliver: Mapping[str, str] = field(default_factory=dict)  # output → its destination
    promise: PromiseTerms = PromiseTerms()

    def children(self) -> dict[str, Sequence[str]]:
        children: dict[str, list[str]] = {}
        for task, parents in self.parents.items():
            for parent in parents:
                children.setdefault(parent, []).append(task)
        none: Sequence[str] = ()
        return {task: children.get(task, none) for task in self.tasks}

    def final_files(self) -> list[str]:
        """The outputs that no task consumes: the workflow's results."""
        consumed = {name for task in self.tasks.values() for name in task.inputs}
        return [name for name in self.producers if name not in consumed]
