"""Reads a workflow document into the model, or reports every problem in it at once.

Each task is checked by itself, so that a mistake in one hides none in the others. After that the
references between tasks are resolved: files, globs, results and `after`. Last, a circular
dependency is reported if there is one.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from . import names, plan, quantities, strategies, tree
from .foreach import Substitution, items, references
from .model import (
    NOTHING,
    Alternative,
    PromiseTerms,
    Reference,
    Source,
    Task,
    TaskNeeds,
    Workflow,
)
from .problems import Path, Problems
from .schema import (
    COMMAND_BYTES_MAX,
    EDGES_MAX,
    TASKS_MAX,
    AlternativeDocument,
    InputDocument,
    NeedsDocument,
    TaskDocument,
    WorkflowDocument,
)

GLOB_MATCHES_MAX = 5_000_000
TASK_ID_MAX = 400
#: commands, environment variables and arguments of all tasks, expanded
EXPANDED_BYTES_MAX = 256 * 2**20
#: to search for the name that somebody meant is slow: after this many mistakes there is no search
SUGGESTIONS_MAX = 20
SUGGESTED_AMONG_MAX = 1000
SUGGESTED_CHARS_MAX = 100
_BLOB = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = r"([^\s/@\[\]]*@)?(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+)(:\d{1,5})?"
_SIGN = r"[^\s\x00-\x1f\x7f-\x9f]"
_URL = re.compile(
    rf"(https?://{_HOST}([/?#]{_SIGN}*)?|s3://[^\s/\[\]\x00-\x1f\x7f-\x9f]+/{_SIGN}+|file:///{_SIGN}+)"
)
URL_PROBLEM = "unsupported URL: write http(s)://host/…, s3://bucket/key or file:///path"
_Model = TypeVar("_Model", bound=BaseModel)


def parse(text: str | bytes, *, json_only: bool = False, client: bool = False) -> Workflow:
    """Reads YAML or JSON. `client` allows inputs by `path`: only the client has the files."""
    value, lines = tree.read(text, json_only)
    return from_value(value, lines, client=client)


def from_value(
    value: Any,
    lines: Mapping[str, int] | None = None,
    *,
    client: bool = False,
    policy_problem: Callable[[str], str | None] = lambda text: None,
    rank_problem: Callable[[str], str | None] = lambda text: None,
) -> Workflow:
    """`policy_problem` and `rank_problem` check the texts that other packages parse."""
    reader = _DocumentReader(Problems(lines), client)
    reader.policy_problem = policy_problem
    reader.rank_problem = rank_problem
    return reader.read(value)


def _quoted(name: str) -> str:
    """A file's name, escaped for a URL."""
    return "".join(
        c
        if c.isascii() and (c.isalnum() or c in "-._~/")
        else "".join(f"%{byte:02X}" for byte in c.encode())
        for c in name
    )


def _needs(spec: NeedsDocument) -> TaskNeeds:
    return TaskNeeds(
        spec.cpus,
        spec.memory,
        spec.disk,
        spec.gpus,
        spec.arch,
        spec.os,
        spec.site,
        spec.speed,
        tuple(sorted(set(spec.labels))),
        tuple(sorted(set(spec.software))),
    )


def _fixed_bytes(spec: TaskDocument) -> int:
    """The size of each task of a template, without its command."""
    env = sum(len(k) + len(v) for k, v in spec.env.items())
    for other in spec.alternatives:
        env += sum(map(len, other.command)) + sum(len(k) + len(v) for k, v in other.env.items())
    return 200 + env + _weight([spec.args, spec.kwargs], {})


def _weight(value: Any, known: dict[int, int]) -> int:
    """About how many bytes a value takes when it is copied, as if nothing in it were shared.

    `known` has the parts weighed before: with aliases, a document of a few bytes can stand for
    millions of values."""
    kind = type(value)
    if kind is str:
        return 50 + len(value)
    if kind is not list and kind is not dict:
        return 32
    weight = known.get(id(value))
    if weight is None:
        weight = 64
        for child in value if kind is list else (*value, *value.values()):
            weight += _weight(child, known)
        known[id(value)] = weight
    return weight


def _is_plain(value: Any, known: set[int]) -> bool:
    """Whether there is no placeholder in it: all tasks of a template may share such a value."""
    kind = type(value)
    if kind is str:
        return "{" not in value
    if (kind is not list and kind is not dict) or id(value) in known:
        return True
    known.add(id(value))
    return all(_is_plain(v, known) for v in (value if kind is list else value.values()))


class _DocumentReader:
    def __init__(self, problems: Problems, client: bool) -> None:
        self.problems = problems
        self.client = client
        self.policy_problem: Callable[[str], str | None] = lambda text: None
        self.rank_problem: Callable[[str], str | None] = lambda text: None
        self.inputs: dict[str, Source] = {}
        self.tasks: dict[str, Task] = {}
        self.places: dict[str, Path] = {}  # task → the place of its template
        self.templates: dict[str, list[str]] = {}
        self.referring: set[str] = set()  # templates with `{result: …}` in them
        self.broken: set[str] = set()  # unreadable templates: references to them are no problems
        self.producers: dict[str, str] = {}
        self.parents: dict[str, tuple[str, ...]] = {}
        self.globs: dict[str, tuple[str, ...]] = {}
        self.edges = 0
        self.expanded_bytes = 0
        self.matches = 0
        self.suggested = 0

    def read(self, value: Any) -> Workflow:
        if not isinstance(value, dict):
            self.problems.add((), "a workflow document must be a mapping with `name` and `tasks`")
            self.problems.check()
        head = self._head(value)
        for name, content in _mapping(value.get("inputs")).items():
            self._input(name, content)
        for name, content in _mapping(value.get("tasks")).items():
            self._template(name, content)
        for task in list(self.tasks.values()):
            self._resolve(task)
        self._join_gangs()
        self._check_branches()
        deliver = self._deliver(_mapping(value.get("deliver")))
        ordered = plan.order(self.parents)
        loop = plan.cycle(self.parents) if len(ordered) < len(self.parents) else None
        if loop:
            place = self.places[loop[0]]
            self.problems.add(place, "circular dependency: " + " → ".join(loop))
        self.problems.check()
        return Workflow(
            name=head["name"],
            description=head.get("description", ""),
            policies=tuple(head.get("policies", ())),
            strict=head.get("levels") == "strict",
            deliver=deliver,
            rank=head.get("rank", ""),
            strategy=head.get("strategy", "auto"),
            deadline=None if head.get("deadline") is None else str(head["deadline"]),
            inputs=self.inputs,
            tasks={task: self.tasks[task] for task in ordered},
            parents=self.parents,
            producers=self.producers,
            promise=PromiseTerms(**_mapping(head.get("promise"))),
        )

    def _head(self, value: dict[str, Any]) -> dict[str, Any]:
        # inputs and tasks are checked one by one later; here only that each is a mapping
        shell = {**value}
        for key in ("inputs", "tasks"):
            if isinstance(shell.get(key), dict):
                shell[key] = {"x": {}} if shell[key] else {}
        self._valid(WorkflowDocument, shell, ())
        name = value.get("name")
        if isinstance(name, str) and not name.isprintable():
            self.problems.add(("name",), "name must not contain line breaks or control characters")
        self._check_rules(value)
        self._check_strategy(value.get("strategy", "auto"))
        deadline = value.get("deadline")
        if isinstance(deadline, str | int | float) and not _is_deadline(deadline):
            self.problems.add(("deadline",), f"deadline must be {_UNIONS['deadline']}")
        if deadline is None and value.get("promise") is not None:
            self.problems.add(("promise",), "promise needs a deadline; add one, such as 10m")
        return value

    def _check_rules(self, value: dict[str, Any]) -> None:
        policies = value.get("policies")
        for index, text in enumerate(policies if isinstance(policies, list) else ()):
            trouble = self.policy_problem(text) if isinstance(text, str) else None
            if trouble:
                self.problems.add(("policies", index), trouble)
        rank = value.get("rank")
        trouble = self.rank_problem(rank) if isinstance(rank, str) and rank else None
        if trouble:
            self.problems.add(("rank",), trouble)

    def _check_strategy(self, strategy: Any) -> None:
        if isinstance(strategy, str) and strategy not in strategies.names():
            known = ", ".join(strategies.names())
            self.problems.add(("strategy",), f"unknown strategy {strategy!r}; choose from: {known}")

    def _deliver(self, deliver: Mapping[str, Any]) -> dict[str, str]:
        """Each output to deliver, with its complete destination."""
        if not deliver:
            return {}
        destinations: dict[str, str] = {}
        for name, url in deliver.items():
            if isinstance(url, str):  # otherwise the schema has reported it
                destinations.update(self._destinations(name, url))
        duplicates = [url for url, count in Counter(destinations.values()).items() if count > 1]
        if duplicates:
            self.problems.add(("deliver",), f"two outputs would be written to {duplicates[0]}")
        return destinations

    def _destinations(self, name: str, url: str) -> dict[str, str]:
        """The outputs that one entry of `deliver` names."""
        path: Path = ("deliver", name)
        if not _URL.fullmatch(url) or len(url) > 1000:
            self.problems.add(path, URL_PROBLEM)
            return {}
        outputs = [name]
        if names.is_glob(name):
            if not url.endswith("/"):
                trouble = "the URL for a glob must end with '/': file names are appended to it"
                self.problems.add(path, trouble)
                return {}
            outputs = fnmatch.filter(self.producers, name)
        if not outputs or outputs[0] not in self.producers:
            self.problems.add(path, f"no task makes {name!r}")
            return {}
        if url.endswith("/"):
            return {output: url + _quoted(output) for output in outputs}
        return dict.fromkeys(outputs, url)

    def _valid(self, model: type[_Model], value: Any, path: Path) -> _Model | None:
        if not isinstance(value, dict):
            self.problems.add(path, f"{_TITLES[model]} must be a mapping, not {_kind(value)}")
            return None
        try:
            return model.model_validate(value)
        except ValidationError as error:
            for row in error.errors(include_url=False):
                self.problems.add((*path, *_place(row["loc"])), _message(row, model))
            return None

    def _input(self, name: str, value: Any) -> None:
        path: Path = ("inputs", name)
        trouble = names.file_problem(name)
        if trouble:
            self.problems.add(path, trouble)
        spec = self._valid(InputDocument, value, path)
        if spec is None:
            self.inputs.setdefault(name, Source("text", ""))  # no follow-up problems
            return
        sources = [(k, v) for k, v in spec if v is not None]
        if len(sources) != 1:
            self.problems.add(path, "give exactly one of path, text, url, blob and size")
            sources = [("text", "")]
        kind, content = sources[0]
        trouble = self._source_problem(kind, content)
        if trouble:
            self.problems.add((*path, kind), trouble)
        self.inputs[name] = Source(kind, str(content))  # type: ignore[arg-type]

    def _source_problem(self, kind: str, content: Any) -> str | None:
        if kind == "path" and not self.client:
            return (
                "only a client can read a path: use `valence submit`, or upload the file with "
                "PUT /v1/blobs/{hash} and write {blob: 'sha256:…'}"
            )
        if kind == "blob" and not _BLOB.fullmatch(content):
            return "blob must be sha256: followed by 64 hexadecimal digits"
        if kind == "url" and not _URL.fullmatch(content):
            return URL_PROBLEM
        return None

    def _template(self, name: str, value: Any) -> None:
        path: Path = ("tasks", name)
        trouble = names.task_problem(name)
        if trouble:
            self.problems.add(path, trouble)
        spec = self._valid(TaskDocument, value, path)
        if spec is None:
            self.broken.add(name)
            self._keep_outputs(name, value)
            return
        self._check_template(spec, path)
        plain = _is_plain([spec.args, spec.kwargs], set())
        shared = _needs(spec.needs), _fixed_bytes(spec), plain
        if next(references([spec.args, spec.kwargs], ()), None) is not None:
            self.referring.add(name)
        made: list[str] = []
        for item, variables in self._items(spec, path):
            if spec.foreach is not None and len(self.tasks) > TASKS_MAX:
                break
            made += self._add_all(item, variables, name, spec, shared, path)
        if not made:
            self.broken.add(name)
        if len(self.tasks) > TASKS_MAX >= len(self.tasks) - len(made):
            self.problems.add(path, f"too many tasks: the limit is {TASKS_MAX:,}")
        self.templates[name] = made

    def _items(self, spec: TaskDocument, path: Path) -> list[tuple[str, dict[str, Any]]]:
        if spec.foreach is None:
            return [("", {})]
        return items(spec.foreach, (*path, "foreach"), self.problems)

    def _keep_outputs(self, name: str, value: Any) -> None:
        """The outputs of a template that can't be read, so that tasks that read them get no problem
        of their own."""
        outputs = value.get("outputs") if isinstance(value, dict) else None
        for output in outputs if isinstance(outputs, list) else ():
            if isinstance(output, str):
                self.producers.setdefault(output, name)

    def _add_all(
        self,
        item: str,
        variables: dict[str, Any],
        name: str,
        spec: TaskDocument,
        shared: tuple[TaskNeeds, int, bool],
        path: Path,
    ) -> list[str]:
        """One task; or, with `peers`, one for each of the peers that it runs on at once."""
        if spec.peers == 1:
            gang = [f"{name}[{item}]" if item else name]
            sub = Substitution(variables, self._expand)
            self._add(gang[0], name, spec, shared, sub, path)
            return gang
        gang = [f"{name}[{item}{',' if item else ''}rank={rank}]" for rank in range(spec.peers)]
        members = tuple(gang)
        for rank, task in enumerate(gang):
            sub = Substitution({**variables, "rank": rank}, self._expand)
            self._add(task, name, spec, shared, sub, path, members)
        return gang

    def _expand(self, more: int) -> None:
        """Counts the bytes of expanded tasks: so many more."""
        self.expanded_bytes += more
        if self.expanded_bytes > EXPANDED_BYTES_MAX:
            limit = f"{EXPANDED_BYTES_MAX:,}"
            self.problems.add(("tasks",), f"expanded, the tasks take more than {limit} bytes")
            self.problems.check()

    def _check_template(self, spec: TaskDocument, path: Path) -> None:
        for index, other in enumerate(spec.alternatives):
            place = (*path, "alternatives", index)
            if spec.command is None:
                self.problems.add(place, "only a command can have alternatives")
            self._check_command(other.command, (*place, "command"))
            self._check_environment(other.env, (*place, "env"))
        if spec.peers > 1:
            self._check_gang(spec, path)
        self._check_work(spec, path)
        self._check_environment(spec.env, (*path, "env"))
        for key in ("labels", "software"):
            for index, label in enumerate(getattr(spec.needs, key)):
                trouble = names.label_problem(label)
                if trouble:
                    self.problems.add((*path, "needs", key, index), trouble)
        if spec.timeout == 0:
            self.problems.add((*path, "timeout"), "timeout must be longer than 0")

    def _check_gang(self, spec: TaskDocument, path: Path) -> None:
        if spec.command is None:
            self.problems.add((*path, "peers"), "only a command can run on several peers at once")
        if isinstance(spec.foreach, dict) and "rank" in spec.foreach:
            trouble = "choose another name: with `peers`, {rank} is the number of the peer"
            self.problems.add((*path, "foreach", "rank"), trouble)

    def _check_work(self, spec: TaskDocument, path: Path) -> None:
        """The command or the call."""
        if (spec.command is None) == (spec.call is None):
            self.problems.add(path, "a task must have either a command or a call")
        if spec.command is not None:
            self._check_command(spec.command, (*path, "command"))
            for key in ("args", "kwargs"):
                if getattr(spec, key):
                    self.problems.add((*path, key), f"only a call takes {key}")
        for key in ("args", "kwargs"):
            for place in _huge_integers(getattr(spec, key), (*path, key)):
                self.problems.add(place, "integers are limited to 64 bits")
        trouble = None if spec.call is None else names.call_problem(spec.call)
        if trouble:
            self.problems.add((*path, "call"), trouble)

    def _check_command(self, command: list[str], path: Path) -> None:
        if not command or not command[0]:
            self.problems.add(path, "command must name at least the program to run")
        if sum(len(word.encode()) + 1 for word in command) > COMMAND_BYTES_MAX:
            self.problems.add(path, f"command is limited to {COMMAND_BYTES_MAX:,} bytes")

    def _check_environment(self, env: dict[str, str], path: Path) -> None:
        for variable in env:
            trouble = names.environment_problem(variable)
            if trouble:
                self.problems.add((*path, variable), trouble)

    def _add(
        self,
        task: str,
        template: str,
        spec: TaskDocument,
        shared: tuple[TaskNeeds, int, bool],
        sub: Substitution,
        path: Path,
        gang: tuple[str, ...] = (),
    ) -> None:
        needs, fixed_bytes, plain = shared
        self._expand(200 if plain else fixed_bytes)
        inputs, outputs = sub.texts(spec.inputs), sub.texts(spec.outputs)
        if inputs or outputs:
            self._check_files(inputs, (*path, "inputs"), task, template)
            self._check_files(outputs, (*path, "outputs"), task, template)
            self._add_outputs(outputs, (*path, "outputs"), task, template)
        self.places[task] = path
        command = None if spec.command is None else sub.texts(spec.command)
        self._check_lengths(command or (), path, task, template)
        self.tasks[task] = Task(
            id=task,
            template=template,
            command=command,
            call=spec.call,
            args=tuple(spec.args if plain else sub.value(spec.args)),
            kwargs=spec.kwargs if plain else sub.value(spec.kwargs),
            env={k: sub.text(v) for k, v in spec.env.items()} if spec.env else NOTHING,
            inputs=inputs,
            outputs=outputs,
            after=sub.texts(spec.after),
            needs=needs,
            runtime_s=spec.runtime,
            timeout_s=spec.timeout,
            retries=spec.retries,
            network=spec.network,
            alternatives=_alternatives(spec, needs, sub) if spec.alternatives else (),
            branch=sub.text(spec.branch),
            gang=gang,
        )

    def _check_files(self, files: tuple[str, ...], path: Path, task: str, template: str) -> None:
        seen: set[str] = set()
        for index, name in enumerate(files):
            trouble = f"duplicate file {name!r}" if name in seen else names.file_problem(name)
            seen.add(name)
            if trouble:
                self.problems.add((*path, index), f"{trouble}{_of(task, template)}")

    def _check_lengths(
        self, command: tuple[str, ...], path: Path, task: str, template: str
    ) -> None:
        if len(task) > TASK_ID_MAX:
            trouble = f"a task's id is limited to {TASK_ID_MAX} characters: shorten the items"
            self.problems.add((*path, "foreach"), trouble)
        if sum(map(len, command)) > COMMAND_BYTES_MAX:
            trouble = f"command is limited to {COMMAND_BYTES_MAX:,} bytes{_of(task, template)}"
            self.problems.add((*path, "command"), trouble)

    def _add_outputs(self, outputs: tuple[str, ...], path: Path, task: str, template: str) -> None:
        for index, name in enumerate(outputs):
            maker = self.producers.setdefault(name, task)
            if maker != task:
                trouble = f"{name!r} is already made by {maker}{_of(task, template)}"
                self.problems.add((*path, index), trouble)
            elif name in self.inputs:
                self.problems.add((*path, index), f"{name!r} is already an input of the workflow")

    def _check_branches(self) -> None:
        """All tasks of a branch must have the same number of alternatives."""
        first: dict[str, Task] = {}
        for task in self.tasks.values():
            if not task.branch:
                continue
            other = first.setdefault(task.branch, task)
            place = (*self.places[task.id], "branch")
            if not task.alternatives:
                self.problems.add(place, "a task of a branch must have alternatives")
            elif task.gang:
                self.problems.add(
                    place, "a task that runs on several peers at once can't belong to a branch"
                )
            elif len(task.alternatives) != len(other.alternatives):
                self.problems.add(
                    place,
                    "the tasks of a branch must have the same number of alternatives: "
                    f"{task.id} has {len(task.alternatives)}, "
                    f"{other.id} has {len(other.alternatives)}",
                )

    def _join_gangs(self) -> None:
        """A gang starts as one, and what depends on one of its tasks depends on all of them."""
        # (each is met once, at its first task: to hash it for every task would take time that grows
        # with the square of its size)
        gangs = [task.gang for task in self.tasks.values() if task.gang[:1] == (task.id,)]
        for gang in gangs:
            self._share_parents(gang)
        if gangs:
            self._depend_on_whole_gangs()

    def _share_parents(self, gang: tuple[str, ...]) -> None:
        members = frozenset(gang)
        above = dict.fromkeys(p for task in gang for p in self.parents[task])
        self._count_edges(len(above) * len(gang) - sum(len(self.parents[t]) for t in gang))
        for task in gang:
            inner = next((p for p in self.parents[task] if p in members), None)
            if inner is not None:
                trouble = f"{task} can't wait for {inner}: they run at the same time"
                self.problems.add(self.places[task], trouble)
        self.parents.update(dict.fromkeys(gang, tuple(p for p in above if p not in members)))

    def _depend_on_whole_gangs(self) -> None:
        for task, parents in self.parents.items():
            if any(self.tasks[p].gang for p in parents):
                wide = dict.fromkeys(m for p in parents for m in self.tasks[p].gang or (p,))
                self._count_edges(len(wide) - len(parents))
                self.parents[task] = tuple(wide)

    def _count_edges(self, more: int, path: Path = ()) -> None:
        self.edges += more
        if self.edges > EDGES_MAX:
            self.problems.add(path, f"more than {EDGES_MAX:,} edges between tasks and files")
            self.problems.check()

    def _resolve(self, task: Task) -> None:
        """The files, results and `after` of one task, as its parents."""
        if not (task.inputs or task.after or task.template in self.referring):
            self.parents[task.id] = ()
            return
        path = self.places[task.id]
        parents: dict[str, None] = {}
        files = self._resolve_inputs(task, (*path, "inputs"), parents)
        results = self._resolve_results(task, path, parents)
        self._resolve_after(task, (*path, "after"), parents)
        self._count_edges(len(parents) + len(files), path)
        if results or files != task.inputs:
            self.tasks[task.id] = task._replace(inputs=files, references=results)
        self.parents[task.id] = tuple(parents)

    def _resolve_inputs(self, task: Task, path: Path, parents: dict[str, None]) -> tuple[str, ...]:
        files: dict[str, None] = {}
        for index, name in enumerate(task.inputs):
            matches = self._files(name, task)
            if not matches:
                known = self._to_suggest(self.producers, self.inputs)
                trouble = _unknown_file(name, known) + _of(task.id, task.template)
                self.problems.add((*path, index), trouble)
            for file in matches:
                files[file] = None
                maker = self.producers.get(file)
                if maker in self.tasks:
                    parents[maker] = None
        return tuple(files)

    def _resolve_results(
        self, task: Task, path: Path, parents: dict[str, None]
    ) -> dict[str, Reference]:
        results: dict[str, Reference] = {}
        pair = [list(task.args), dict(task.kwargs)] if task.template in self.referring else ()
        for where, ref in references(pair, ()):
            # the pair [args, kwargs] was only for the walk: name the place as the user wrote it
            place = (*path, "args" if where[0] == 0 else "kwargs", *where[1:])
            target = self._reference(ref, place)
            if target is not None:
                results[str(ref)] = target
                parents.update(dict.fromkeys(target.tasks))
        return results

    def _resolve_after(self, task: Task, path: Path, parents: dict[str, None]) -> None:
        for index, name in enumerate(task.after):
            if name in self.broken:
                continue
            tasks = self.templates.get(name) or ([name] if name in self.tasks else None)
            if tasks is None:
                known = self._to_suggest(self.templates)
                self.problems.add((*path, index), _unknown("task", name, known))
            else:
                parents.update(dict.fromkeys(tasks))

    def _to_suggest(self, *known: Mapping[str, Any]) -> list[str]:
        """Names that may have been meant, for the first few mistakes only: thousands of tasks may
        make the same one, even though it is reported once."""
        self.suggested += 1
        if self.suggested > SUGGESTIONS_MAX:
            return []
        return list(itertools.islice(itertools.chain(*known), SUGGESTED_AMONG_MAX))

    def _files(self, name: str, task: Task) -> tuple[str, ...]:
        if name in self.producers or name in self.inputs:
            return (name,)
        if not names.is_glob(name):
            return ()
        if name not in self.globs:
            known = [*self.inputs, *self.producers]
            self.matches += len(known)
            if self.matches > GLOB_MATCHES_MAX:
                self.problems.add(self.places[task.id], "too many different globs over these files")
                self.problems.check()
            self.globs[name] = tuple(sorted(fnmatch.filter(known, name)))
        own = set(task.outputs)
        return tuple(file for file in self.globs[name] if file not in own)

    def _reference(self, ref: Any, place: Path) -> Reference | None:
        if not isinstance(ref, str):
            self.problems.add(place, "write the name of one task: {result: TASK}")
            return None
        if ref in self.broken:
            return None
        targets: tuple[str, ...]
        if ref in self.tasks:
            targets, many = (ref,), False
        elif self.templates.get(ref):
            targets, many = tuple(self.templates[ref]), True
        else:
            self.problems.add(place, _unknown("task", ref, self._to_suggest(self.templates)))
            return None
        if self.tasks[targets[0]].call is None:
            self.problems.add(place, f"{ref} is a command; only calls return values: use its files")
            return None
        return Reference(targets, many)


def _alternatives(
    spec: TaskDocument, needs: TaskNeeds, sub: Substitution
) -> tuple[Alternative, ...]:
    return tuple(
        Alternative(
            sub.texts(other.command),
            {k: sub.text(v) for k, v in (other.env or spec.env).items()},
            needs if other.needs is None else _needs(other.needs),
            spec.timeout if other.timeout is None else other.timeout,
        )
        for other in spec.alternatives
    )


def _place(loc: tuple[int | str, ...]) -> Path:
    # pydantic names the branch of a union that it tried, as in `foreach, list[any]`
    return loc[:1] if loc[0] in _UNIONS else tuple(p for p in loc if p != "[key]")


_TITLES: Mapping[type[BaseModel], str] = {
    WorkflowDocument: "a workflow document",
    InputDocument: "an input",
    TaskDocument: "a task",
}
#: keys with values of several kinds: pydantic reports a problem for each
_UNIONS = {
    "foreach": "a list, a mapping of lists or a whole number",
    "deadline": "a duration from submission such as 10m, or a timestamp (ISO 8601)",
}
_TYPES = {
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
}
#: pydantic's other problems, in words: filled in from their context
_LIMITS = {
    "greater_than_equal": "must be at least {ge}, not {value}",
    "less_than_equal": "must be at most {le}, not {value}",
    "string_too_short": "must have at least {min_length} character",
    "string_too_long": "must have at most {max_length:,} characters",
    "too_short": "must have at least {min_length} entry",
    "too_long": "must have at most {max_length:,} entries",
    "literal_error": "must be {expected}, not {value}",
}


#: keys whose values have keys of their own
_NESTED: dict[str, type[BaseModel]] = {
    "needs": NeedsDocument,
    "alternatives": AlternativeDocument,
}


def _message(row: Any, model: type[BaseModel]) -> str:
    """One of pydantic's problems in the words of a document."""
    kind, loc, value = row["type"], row["loc"], row["input"]
    key = loc[-1] if isinstance(loc[-1], str) else "this entry"
    if loc[0] in _UNIONS:
        return f"{loc[0]} must be {_UNIONS[loc[0]]}, not {_kind(value)}"
    if kind == "extra_forbidden":
        for part in loc[:-1]:
            model = _NESTED.get(str(part), model)
        return _unknown("key", str(loc[-1]), list(model.model_fields))
    if kind == "missing":
        return f"the key {key!r} is missing"
    if kind == "value_error":
        return str(row["ctx"]["error"])
    if kind in _LIMITS:
        return f"{key} {_LIMITS[kind].format_map({**row['ctx'], 'value': _kind(value)})}"
    if kind in _TYPES:
        wanted = "a list or text" if key == "command" else _TYPES[kind]
        return f"{key} must be {wanted}{_instead(wanted, value)}"
    message = str(row["msg"])
    return message[:1].lower() + message[1:] + f", not {_kind(value)}"


def _instead(wanted: str, value: Any) -> str:
    if wanted.endswith("text") and isinstance(value, bool | int | float):
        return f'; put "{_kind(value)}" in quotes'
    return f", not {_kind(value)}"


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)[:40]
    return f"the text {text}" if isinstance(value, str) else text


def _unknown(noun: str, name: str, known: list[str]) -> str:
    close = _close(name, known)
    if close:
        return f"unknown {noun} {name!r}; did you mean {close[0]!r}?"
    if 0 < len(known) <= 20:
        return f"unknown {noun} {name!r}; the {noun}s are: {', '.join(known)}"
    return f"unknown {noun} {name!r}"


def _close(name: str, known: list[str]) -> list[str]:
    if len(name) > SUGGESTED_CHARS_MAX:
        return []
    near = [other for other in known if abs(len(other) - len(name)) <= len(name)]
    return difflib.get_close_matches(name, near[:SUGGESTED_AMONG_MAX], n=1)


def _unknown_file(name: str, known: list[str]) -> str:
    if names.is_glob(name):
        return f"{name!r} matches no output of a task and no input of the workflow"
    close = _close(name, known)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"no task makes {name!r}, and it is not an input of the workflow{hint}"


def _of(task: str, template: str) -> str:
    return "" if task == template else f" (in {task})"


def _huge_integers(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        yield path
    elif isinstance(value, dict | list):
        rows = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in rows:
            yield from _huge_integers(child, (*path, key))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_deadline(value: str | int | float) -> bool:
    try:
        quantities.seconds(value)
    except ValueError:
        try:
            datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError):
            return False
    return True
