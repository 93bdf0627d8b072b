"""The model: a workflow is a DAG of tasks with files and values flowing along its edges.

Everything here is checked, expanded and resolved: `foreach` is gone, globs are file names, every
reference names a task that exists, and there is no cycle. Made by `document` and `wfformat` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class TaskNeeds:
    """What a task needs of a peer: integers that are used up, and attributes that must fit."""

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
    """Where a workflow's input comes from: `text`, `blob` (a hash), `url`, or made up by `size`."""

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


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    template: str
    command: tuple[str, ...] | None = None
    call: str | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    references: Mapping[str, Reference] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
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
    gang: tuple[str, ...] = ()  # tasks that run at different peers at once, by rank; itself too


@dataclass(frozen=True, slots=True)
class Workflow:
    name: str
    strategy: str
    deadline: str | None
    inputs: Mapping[str, Source]
    tasks: Mapping[str, Task]  # in an order in which each comes after what it depends on
    parents: Mapping[str, tuple[str, ...]]
    producers: Mapping[str, str]  # file → the task that makes it
    description: str = ""
    policies: tuple[str, ...] = ()
    strict: bool = False  # level by level: none begins before all of the levels above are done
    rank: str = ""  # an expression by which pilots rank its tasks; empty: as always
    deliver: Mapping[str, str] = field(default_factory=dict)  # output → where it is written to

    def children(self) -> dict[str, Sequence[str]]:
        found: dict[str, list[str]] = {}
        for task, parents in self.parents.items():
            for parent in parents:
                found.setdefault(parent, []).append(task)
        none: Sequence[str] = ()
        return {task: found.get(task, none) for task in self.tasks}

    def final_files(self) -> list[str]:
        """Outputs that no task consumes: what the user came for."""
        consumed = {name for task in self.tasks.values() for name in task.inputs}
        return [name for name in self.producers if name not in consumed]
