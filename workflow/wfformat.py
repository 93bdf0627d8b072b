"""Reads WfCommons WfFormat 1.4 to 1.6 into a workflow whose tasks replay the recorded ones.

Each recorded task becomes a process that reads its inputs, computes and writes its outputs
(`replay`), with times multiplied by `time_scale`, and sizes and memory by `size_scale`. Inputs
that no task makes become made-up bytes of their size. Versions 1.5 and 1.6 keep structure and
execution apart; 1.4 has both in one list, and refers to parents by name. Recorded names can be
anything, such as URLs for files: a name that is not allowed here is replaced by one that is, and
different names stay different.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

from . import names, plan
from .model import Source, Task, TaskNeeds, Workflow
from .problems import Path, Problems
from .schema import TASKS_MAX

VERSIONS = ("1.4", "1.5", "1.6")
NAME_CHARS_MAX = 150
#: generous, since a replay on a loaded machine can be very late without being stuck
TIMEOUT_FACTOR, TIMEOUT_S_MIN = 20.0, 600.0


def is_instance(value: Any) -> bool:
    return isinstance(value, dict) and "schemaVersion" in value and "workflow" in value


@dataclass(slots=True)
class _Recorded:
    id: str
    place: Path
    parents: list[str]
    inputs: dict[str, int]
    outputs: dict[str, int]
    runtime_s: float = 0.0
    cpu: float = 1.0
    cores: float = 1.0
    memory_bytes: float = 0.0


def parse(value: dict[str, Any], time_scale: float = 1.0, size_scale: float = 1.0) -> Workflow:
    problems = Problems()
    version = str(value.get("schemaVersion"))
    for which, scale in (("time_scale", time_scale), ("size_scale", size_scale)):
        if not (math.isfinite(scale) and 0 <= scale <= 1e6):
            problems.add((), f"{which} must be between 0 and 1,000,000")
    if version not in VERSIONS:
        known = ", ".join(VERSIONS)
        problems.add(("schemaVersion",), f"unsupported version {version!r}; supported: {known}")
    problems.check()
    recorded = _recorded(value["workflow"], version, problems)
    builder = _Builder(recorded, time_scale, size_scale, problems)
    return builder.build(_printable(value.get("name")))


def _printable(name: Any) -> str:
    text = "".join(c for c in str(name or "instance") if c.isprintable())
    return text[:200] or "instance"


def _recorded(value: Any, version: str, problems: Problems) -> list[_Recorded]:
    reader = _InstanceReader(problems)
    body = reader.mapping(value, ("workflow",))
    recorded = reader.v14(body) if version == "1.4" else reader.v15(body)
    if not recorded:
        problems.add(("workflow",), "there are no tasks")
    if len(recorded) > TASKS_MAX:
        problems.add(("workflow",), f"too many tasks: the limit is {TASKS_MAX:,}")
    problems.check()
    return recorded


class _InstanceReader:
    """Reads the fields of an instance and checks each in its place."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def mapping(self, value: Any, path: Path) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        self.problems.add(path, "must be a mapping")
        return {}

    def rows(self, value: Any, path: Path) -> list[tuple[Path, dict[str, Any]]]:
        if not isinstance(value, list):
            self.problems.add(path, "must be a list")
            return []
        return [((*path, i), self.mapping(row, (*path, i))) for i, row in enumerate(value)]

    def text(self, row: dict[str, Any], key: str, path: Path) -> str:
        if isinstance(row.get(key), str) and row[key]:
            return str(row[key])
        self.problems.add((*path, key), f"{key} must be text")
        return ""

    def texts(self, row: dict[str, Any], key: str, path: Path) -> list[str]:
        value = row.get(key, [])
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return value
        self.problems.add((*path, key), f"{key} must be a list of texts")
        return []

    def number(
        self, row: dict[str, Any], key: str, path: Path, default: float, limit: float = 1e15
    ) -> float:
        value = row.get(key, default)
        if value is None:
            return default
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        if ok and 0 <= value <= limit:
            return float(value)
        self.problems.add((*path, key), f"{key} must be a number from 0 to {limit:g}")
        return default

    def execution(self, task: _Recorded, row: dict[str, Any], path: Path) -> None:
        task.runtime_s = self.number(row, "runtimeInSeconds", path, 0.0, 1e7)
        task.cpu = self.number(row, "avgCPU", path, 100.0) / 100
        task.cores = self.number(row, "coreCount", path, 1.0, 1e6) or 1.0
        task.memory_bytes = self.number(row, "memoryInBytes", path, 0.0)

    def v15(self, body: dict[str, Any]) -> list[_Recorded]:
        at: Path = ("workflow", "specification")
        spec = self.mapping(body.get("specification"), at)
        sizes = {}
        for path, row in self.rows(spec.get("files", []), (*at, "files")):
            sizes[self.text(row, "id", path)] = int(self.number(row, "sizeInBytes", path, 0))
        tasks = {}
        for path, row in self.rows(spec.get("tasks"), (*at, "tasks")):
            files: dict[str, dict[str, int]] = {}
            for key in ("inputFiles", "outputFiles"):
                files[key] = {}
                for name in self.texts(row, key, path):
                    if name not in sizes:
                        self.problems.add((*path, key), f"the specification has no file {name!r}")
                    files[key][name] = sizes.get(name, 0)
            task = _Recorded(
                self.text(row, "id", path),
                path,
                self.texts(row, "parents", path),
                files["inputFiles"],
                files["outputFiles"],
            )
            if task.id in tasks:
                self.problems.add((*path, "id"), f"duplicate id {task.id!r}")
            tasks[task.id] = task
        at = ("workflow", "execution")
        rows = self.mapping(body.get("execution", {}), at).get("tasks", [])
        for path, row in self.rows(rows, (*at, "tasks")):
            executed = tasks.get(self.text(row, "id", path))
            if executed is None:
                self.problems.add((*path, "id"), "no task of the specification has this id")
            else:
                self.execution(executed, row, path)
        return list(tasks.values())

    def v14(self, body: dict[str, Any]) -> list[_Recorded]:
        tasks = {}
        for path, row in self.rows(body.get("tasks"), ("workflow", "tasks")):
            links: dict[str, dict[str, int]] = {"input": {}, "output": {}}
            for where, file in self.rows(row.get("files", []), (*path, "files")):
                link = file.get("link")
                if link not in links:
                    self.problems.add((*where, "link"), "link must be 'input' or 'output'")
                    continue
                size = int(self.number(file, "sizeInBytes", where, 0))
                links[link][self.text(file, "name", where)] = size
            name = self.text(row, "name", path)
            task = _Recorded(
                name, path, self.texts(row, "parents", path), links["input"], links["output"]
            )
            if name in tasks:
                self.problems.add((*path, "name"), f"duplicate name {name!r}")
            self.execution(task, row, path)
            tasks[name] = task
        return list(tasks.values())


class _Builder:
    """Recorded tasks, renamed and connected, become the tasks of a workflow."""

    def __init__(
        self,
        recorded: list[_Recorded],
        time_scale: float,
        size_scale: float,
        problems: Problems,
    ) -> None:
        self.recorded = recorded
        self.time_scale = time_scale
        self.size_scale = size_scale
        self.problems = problems
        self.files = _Files()
        self.producers: dict[str, str] = {}
        self.inputs: dict[str, Source] = {}

    def build(self, name: str) -> Workflow:
        for task in self.recorded:
            task.id = _task_id(task.id)
            task.parents = [_task_id(parent) for parent in task.parents]
            for file in (*task.inputs, *task.outputs):
                self.files.add(file)
        for task in self.recorded:
            self._add_outputs(task)
        known = {task.id for task in self.recorded}
        tasks: dict[str, Task] = {}
        parents: dict[str, tuple[str, ...]] = {}
        for task in self.recorded:
            self._check_names(task)
            parents[task.id] = self._parents(task, known)
            tasks[task.id] = self._task(task)
        loop = plan.cycle(parents)
        if loop:
            self.problems.add(("workflow",), "circular dependency: " + " → ".join(loop))
        self.problems.check()
        ordered = {task: tasks[task] for task in plan.order(parents)}
        return Workflow(name, "auto", None, self.inputs, ordered, parents, self.producers)

    def _add_outputs(self, task: _Recorded) -> None:
        for file in task.outputs:
            maker = self.producers.setdefault(self.files[file], task.id)
            if maker != task.id:
                self.problems.add(task.place, f"{file!r} is already made by {maker}")

    def _check_names(self, task: _Recorded) -> None:
        trouble = names.task_problem(task.id)
        if trouble:
            self.problems.add(task.place, trouble)
        for file in (*task.inputs, *task.outputs):
            trouble = names.file_problem(self.files[file])
            if trouble:
                self.problems.add(task.place, f"{file!r}: {trouble}")

    def _parents(self, task: _Recorded, known: set[str]) -> tuple[str, ...]:
        """The parents that were recorded, and the makers of its inputs; other inputs are added to
        the workflow's."""
        above = dict.fromkeys(task.parents)
        for parent in task.parents:
            if parent not in known:
                self.problems.add((*task.place, "parents"), f"unknown task {parent!r}")
        for file, size in task.inputs.items():
            maker = self.producers.get(self.files[file], "")
            if maker == task.id:
                self.problems.add(task.place, f"{file!r} is made and read by the same task")
            elif maker:
                above[maker] = None
            else:
                self.inputs[self.files[file]] = Source("size", str(self._scaled(size)))
        return tuple(p for p in above if p in known)

    def _task(self, task: _Recorded) -> Task:
        runtime_s = task.runtime_s * self.time_scale
        return Task(
            id=task.id,
            template=task.id,
            command=self._command(task, runtime_s),
            inputs=tuple(map(self.files.__getitem__, task.inputs)),
            outputs=tuple(map(self.files.__getitem__, task.outputs)),
            after=tuple(task.parents),
            needs=TaskNeeds(millicores=max(1, math.ceil(task.cores * 1000))),
            runtime_s=runtime_s,
            timeout_s=max(TIMEOUT_S_MIN, runtime_s * TIMEOUT_FACTOR),
        )

    def _command(self, task: _Recorded, runtime_s: float) -> tuple[str, ...]:
        return (
            *("python3", "-I", "-m", "valence.workflow.replay"),
            *("--seconds", f"{runtime_s:.6g}"),
            *("--cpu", f"{min(1.0, task.cpu):.4g}"),
            *("--memory", str(self._scaled(task.memory_bytes))),
            *(f"--read={self.files[file]}" for file in task.inputs),
            *(
                f"--write={self.files[file]}:{self._scaled(size)}"
                for file, size in task.outputs.items()
            ),
        )

    def _scaled(self, size: float) -> int:
        return math.ceil(size * self.size_scale)


class _Files(dict[str, str]):
    """The files' recorded names, each with its name in a task's directory."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._directories: set[str] = set()

    def add(self, name: str) -> None:
        if name in self:
            return
        file = _relative(name)
        parts = file.split("/")
        above = ["/".join(parts[:end]) for end in range(1, len(parts))]
        if file in self._taken or file in self._directories or self._taken.intersection(above):
            file = _hashed(name)
            above = [file.partition("/")[0]]
        self._taken.add(file)
        self._directories.update(above)
        self[name] = file


def _task_id(name: str) -> str:
    if not names.task_problem(name):
        return name
    plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[-NAME_CHARS_MAX:].lstrip(".-")
    return f"{plain or 'task'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _relative(name: str) -> str:
    """A recorded absolute path, made relative to the task's directory. A name that can't be a
    file's, such as a URL, gets one of its own."""
    relative = name.lstrip("/")
    return _hashed(name) if names.file_problem(relative) else relative


def _hashed(name: str) -> str:
    parts = [re.sub(r"[^\w.-]", "_", part, flags=re.ASCII) for part in re.split(r"[/\\]+", name)]
    plain = "/".join(part for part in parts if part.strip("."))[-NAME_CHARS_MAX:].lstrip("/.-")
    return f"{hashlib.sha256(name.encode()).hexdigest()[:10]}/{plain or 'file'}"
