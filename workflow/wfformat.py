"""WfCommons WfFormat 1.4 to 1.6 → a workflow whose tasks replay the recorded ones.

Each recorded task becomes a process that reads its inputs, computes and writes its outputs
(`replay`), with times multiplied by `time_scale`, and sizes and memory by `size_scale`. Inputs
that no task makes are made up at their size. 1.5 and 1.6 keep structure and execution apart; 1.4
has both in one list, and names parents by name. Recorded names may be anything, such as URLs for
files: what could be no file in a task's directory, or no task, becomes a name that can, and two
that are different stay so.
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
#: generous: a replay on a loaded machine is late long before it hangs
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
            problems.add((), f"{which} lies between 0 and 1,000,000")
    if version not in VERSIONS:
        problems.add(("schemaVersion",), f"{version!r} is not read; 1.4, 1.5 and 1.6 are")
    problems.check()
    reader = _InstanceReader(problems)
    body = reader.mapping(value["workflow"], ("workflow",))
    recorded = reader.v14(body) if version == "1.4" else reader.v15(body)
    if not recorded:
        problems.add(("workflow",), "there are no tasks")
    if len(recorded) > TASKS_MAX:
        problems.add(("workflow",), f"at most {TASKS_MAX:,} tasks are read")
    problems.check()
    name = "".join(c for c in str(value.get("name") or "instance") if c.isprintable())
    return _build(name[:200] or "instance", recorded, time_scale, size_scale, problems)


class _InstanceReader:
    """Fields of an instance, each checked where it stands."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def mapping(self, value: Any, path: Path) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        self.problems.add(path, "a mapping is expected")
        return {}

    def rows(self, value: Any, path: Path) -> list[tuple[Path, dict[str, Any]]]:
        if not isinstance(value, list):
            self.problems.add(path, "a list is expected")
            return []
        return [((*path, i), self.mapping(row, (*path, i))) for i, row in enumerate(value)]

    def text(self, row: dict[str, Any], key: str, path: Path) -> str:
        if isinstance(row.get(key), str) and row[key]:
            return str(row[key])
        self.problems.add((*path, key), "a text is expected")
        return ""

    def texts(self, row: dict[str, Any], key: str, path: Path) -> list[str]:
        value = row.get(key, [])
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return value
        self.problems.add((*path, key), "a list of texts is expected")
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
        self.problems.add((*path, key), f"a number from 0 to {limit:g} is expected")
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
                        self.problems.add((*path, key), f"{name!r} is not among the files")
                    files[key][name] = sizes.get(name, 0)
            task = _Recorded(
                self.text(row, "id", path),
                path,
                self.texts(row, "parents", path),
                files["inputFiles"],
                files["outputFiles"],
            )
            if task.id in tasks:
                self.problems.add((*path, "id"), f"{task.id!r} stands twice")
            tasks[task.id] = task
        at = ("workflow", "execution")
        rows = self.mapping(body.get("execution", {}), at).get("tasks", [])
        for path, row in self.rows(rows, (*at, "tasks")):
            found = tasks.get(self.text(row, "id", path))
            if found is None:
                self.problems.add((*path, "id"), "no task of the specification has this id")
            else:
                self.execution(found, row, path)
        return list(tasks.values())

    def v14(self, body: dict[str, Any]) -> list[_Recorded]:
        tasks = {}
        for path, row in self.rows(body.get("tasks"), ("workflow", "tasks")):
            links: dict[str, dict[str, int]] = {"input": {}, "output": {}}
            for where, file in self.rows(row.get("files", []), (*path, "files")):
                link = file.get("link")
                if link not in links:
                    self.problems.add((*where, "link"), "a link is 'input' or 'output'")
                    continue
                size = int(self.number(file, "sizeInBytes", where, 0))
                links[link][self.text(file, "name", where)] = size
            name = self.text(row, "name", path)
            task = _Recorded(
                name, path, self.texts(row, "parents", path), links["input"], links["output"]
            )
            if name in tasks:
                self.problems.add((*path, "name"), f"{name!r} stands twice")
            self.execution(task, row, path)
            tasks[name] = task
        return list(tasks.values())


def _build(
    name: str,
    recorded: list[_Recorded],
    time_scale: float,
    size_scale: float,
    problems: Problems,
) -> Workflow:
    def scaled(size: float) -> int:
        return math.ceil(size * size_scale)

    files = _Files()
    for task in recorded:
        task.id = _task_id(task.id)
        task.parents = [_task_id(parent) for parent in task.parents]
        for file in (*task.inputs, *task.outputs):
            files.add(file)
    known = {task.id for task in recorded}
    producers: dict[str, str] = {}
    for task in recorded:
        for file in task.outputs:
            maker = producers.setdefault(files[file], task.id)
            if maker != task.id:
                problems.add(task.place, f"{file!r} is made by {maker} already")
    inputs: dict[str, Source] = {}
    tasks: dict[str, Task] = {}
    parents: dict[str, tuple[str, ...]] = {}
    for task in recorded:
        trouble = names.task_problem(task.id)
        if trouble:
            problems.add(task.place, trouble)
        for file in (*task.inputs, *task.outputs):
            trouble = names.file_problem(files[file])
            if trouble:
                problems.add(task.place, f"{file!r}: {trouble}")
        above = dict.fromkeys(task.parents)
        for parent in task.parents:
            if parent not in known:
                problems.add((*task.place, "parents"), f"unknown task {parent!r}")
        for file, size in task.inputs.items():
            maker = producers.get(files[file], "")
            if maker == task.id:
                problems.add(task.place, f"{file!r} is made and read by the same task")
            elif maker:
                above[maker] = None
            else:
                inputs[files[file]] = Source("size", str(scaled(size)))
        runtime_s = task.runtime_s * time_scale
        command = [
            "python3",
            "-I",
            "-m",
            "valence.workflow.replay",
            "--seconds",
            f"{runtime_s:.6g}",
        ]
        command += ["--cpu", f"{min(1.0, task.cpu):.4g}"]
        command += ["--memory", str(scaled(task.memory_bytes))]
        for file in task.inputs:
            command.append(f"--read={files[file]}")
        for file, size in task.outputs.items():
            command.append(f"--write={files[file]}:{scaled(size)}")
        tasks[task.id] = Task(
            id=task.id,
            template=task.id,
            command=tuple(command),
            inputs=tuple(map(files.__getitem__, task.inputs)),
            outputs=tuple(map(files.__getitem__, task.outputs)),
            after=tuple(task.parents),
            needs=TaskNeeds(millicores=max(1, math.ceil(task.cores * 1000))),
            runtime_s=runtime_s,
            timeout_s=max(TIMEOUT_S_MIN, runtime_s * TIMEOUT_FACTOR),
        )
        parents[task.id] = tuple(p for p in above if p in known)
    loop = plan.cycle(parents)
    if loop:
        problems.add(("workflow",), "the tasks depend on each other: " + " → ".join(loop))
    problems.check()
    ordered = {task: tasks[task] for task in plan.order(parents)}
    return Workflow(name, "auto", None, inputs, ordered, parents, producers)


class _Files(dict[str, str]):
    """Recorded names → those in a task's directory."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._directories: set[str] = set()

    def add(self, name: str) -> None:
        if name in self:
            return
        found = _relative(name)
        parts = found.split("/")
        above = ["/".join(parts[:end]) for end in range(1, len(parts))]
        if found in self._taken or found in self._directories or self._taken.intersection(above):
            found = _hashed(name)
            above = [found.partition("/")[0]]
        self._taken.add(found)
        self._directories.update(above)
        self[name] = found


def _task_id(name: str) -> str:
    if not names.task_problem(name):
        return name
    plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[-NAME_CHARS_MAX:].lstrip(".-")
    return f"{plain or 'task'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _relative(name: str) -> str:
    """Recorded absolute paths become paths inside the task's directory; and so do URLs and
    whatever else was recorded, each under a name of its own."""
    found = name.lstrip("/")
    return _hashed(name) if names.file_problem(found) else found


def _hashed(name: str) -> str:
    parts = [re.sub(r"[^\w.-]", "_", part, flags=re.ASCII) for part in re.split(r"[/\\]+", name)]
    plain = "/".join(part for part in parts if part.strip("."))[-NAME_CHARS_MAX:].lstrip("/.-")
    return f"{hashlib.sha256(name.encode()).hexdigest()[:10]}/{plain or 'file'}"
