"""A workflow document → the model, or every problem in it at once.

Each task is checked by itself, so that a mistake in one hides none in the others; then what lies
between tasks is resolved: files, globs, results, `after`, and the cycle if there is one.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace as _replace
from datetime import datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from . import names, plan, quantities, strategies, tree
from .foreach import Substitution, items, references
from .model import Alternative, Reference, Source, Task, TaskNeeds, Workflow
from .problems import Path, Problems
from .schema import (
    COMMAND_BYTES_MAX,
    EDGES_MAX,
    TASKS_MAX,
    InputDocument,
    NeedsDocument,
    TaskDocument,
    WorkflowDocument,
)

GLOB_MATCHES_MAX = 5_000_000
TASK_ID_MAX = 400
#: all tasks' commands, variables and arguments, written out
EXPANDED_BYTES_MAX = 256 * 2**20
#: looking for the name somebody meant is dear; after so many mistakes it is not done any more
SUGGESTIONS_MAX = 20
SUGGESTED_AMONG_MAX = 1000
SUGGESTED_CHARS_MAX = 100
_BLOB = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = r"([^\s/@\[\]]*@)?(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+)(:\d{1,5})?"
_SIGN = r"[^\s\x00-\x1f\x7f-\x9f]"
_URL = re.compile(
    rf"(https?://{_HOST}([/?#]{_SIGN}*)?|s3://[^\s/\[\]\x00-\x1f\x7f-\x9f]+/{_SIGN}+|file:///{_SIGN}+)"
)
URL_PROBLEM = "write http(s)://host/…, s3://bucket/key or file:///path"
_NOTHING: Mapping[str, Any] = {}  # shared by all tasks that have none
_Model = TypeVar("_Model", bound=BaseModel)


def parse(text: str | bytes, *, json_only: bool = False, client: bool = False) -> Workflow:
    """Read YAML or JSON; `client` allows inputs by `path`, for the side that has the files."""
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
    """`policy_problem` and `rank_problem` say what is wrong with what is read by others."""
    reader = _DocumentReader(Problems(lines), client)
    reader.policy_problem = policy_problem
    reader.rank_problem = rank_problem
    return reader.read(value)


def _quoted(name: str) -> str:
    """As a part of a URL."""
    return "".join(
        c
        if c.isascii() and (c.isalnum() or c in "-._~/")
        else "".join(f"%{byte:02X}" for byte in c.encode())
        for c in name
    )


def _needs(found: NeedsDocument) -> TaskNeeds:
    return TaskNeeds(
        found.cpus,
        found.memory,
        found.disk,
        found.gpus,
        found.arch,
        found.os,
        found.site,
        found.speed,
        tuple(sorted(set(found.labels))),
        tuple(sorted(set(found.software))),
    )


def _fixed_bytes(found: TaskDocument) -> int:
    """Of each task of a template, besides its command."""
    env = sum(len(k) + len(v) for k, v in found.env.items())
    for other in found.alternatives:
        env += sum(map(len, other.command)) + sum(len(k) + len(v) for k, v in other.env.items())
    return 200 + env + _weight([found.args, found.kwargs], {})


def _weight(value: Any, known: dict[int, int]) -> int:
    """About how many bytes a value takes when it is copied, as if nothing in it were shared;
    `known`: what was weighed before, as aliases make a value of a few bytes that has millions."""
    kind = type(value)
    if kind is str:
        return 50 + len(value)
    if kind is not list and kind is not dict:
        return 32
    found = known.get(id(value))
    if found is None:
        found = 64
        for child in value if kind is list else (*value, *value.values()):
            found += _weight(child, known)
        known[id(value)] = found
    return found


def _is_plain(value: Any, known: set[int]) -> bool:
    """Without a placeholder anywhere: all tasks of a template may share it."""
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
        self.places: dict[str, Path] = {}  # task → where its template stands
        self.templates: dict[str, list[str]] = {}
        self.referring: set[str] = set()  # templates with `{result: …}` in them
        self.broken: set[str] = set()  # templates that could not be read: no follow-up problems
        self.producers: dict[str, str] = {}
        self.parents: dict[str, tuple[str, ...]] = {}
        self.globs: dict[str, tuple[str, ...]] = {}
        self.edges = 0
        self.expanded_bytes = 0
        self.matches = 0
        self.suggested = 0

    def read(self, value: Any) -> Workflow:
        if not isinstance(value, dict):
            self.problems.add((), "a workflow document is a mapping with `name` and `tasks`")
            self.problems.check()
        head = self._head(value)
        for name, found in _mapping(value.get("inputs")).items():
            self._input(name, found)
        for name, found in _mapping(value.get("tasks")).items():
            self._template(name, found)
        for task in list(self.tasks.values()):
            self._resolve(task)
        self._tie()
        self._check_branches()
        deliver = self._deliver(_mapping(value.get("deliver")))
        ordered = plan.order(self.parents)
        loop = plan.cycle(self.parents) if len(ordered) < len(self.parents) else None
        if loop:
            place = self.places[loop[0]]
            self.problems.add(place, "the tasks depend on each other: " + " → ".join(loop))
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
        )

    def _head(self, value: dict[str, Any]) -> dict[str, Any]:
        # inputs and tasks are checked one by one below; here only that they are what they are
        shell = {**value}
        for key in ("inputs", "tasks"):
            if isinstance(shell.get(key), dict):
                shell[key] = {"x": {}} if shell[key] else {}
        self._valid(WorkflowDocument, shell, ())
        name = value.get("name")
        if isinstance(name, str) and not name.isprintable():
            self.problems.add(("name",), "a name has no line breaks or control characters")
        policies = value.get("policies")
        for index, text in enumerate(policies if isinstance(policies, list) else ()):
            trouble = self.policy_problem(text) if isinstance(text, str) else None
            if trouble:
                self.problems.add(("policies", index), trouble)
        rank = value.get("rank")
        trouble = self.rank_problem(rank) if isinstance(rank, str) and rank else None
        if trouble:
            self.problems.add(("rank",), trouble)
        strategy = value.get("strategy", "auto")
        if isinstance(strategy, str) and strategy not in strategies.names():
            known = ", ".join(strategies.names())
            self.problems.add(("strategy",), f"unknown strategy {strategy!r}; there are: {known}")
        deadline = value.get("deadline")
        if isinstance(deadline, str | int | float) and not _is_deadline(deadline):
            self.problems.add(
                ("deadline",), "a duration from submission such as 10m, or a timestamp (ISO 8601)"
            )
        return value

    def _deliver(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Each output that is named, with all of its destination."""
        found: dict[str, str] = {}
        for name, url in given.items():
            path: Path = ("deliver", name)
            if not isinstance(url, str):
                continue  # the schema has said so
            if not _URL.fullmatch(url) or len(url) > 1000:
                self.problems.add(path, URL_PROBLEM)
                continue
            pattern = any(c in name for c in "*?[")
            made = fnmatch.filter(self.producers, name) if pattern else [name]
            if pattern and not url.endswith("/"):
                self.problems.add(path, "of a glob the URL ends with /, and names are added to it")
            elif not made or made[0] not in self.producers:
                self.problems.add(path, f"no task makes {name}")
            else:
                found.update(
                    (one, url + _quoted(one) if url.endswith("/") else url) for one in made
                )
        twice = [url for url, count in Counter(found.values()).items() if count > 1]
        if twice:
            self.problems.add(("deliver",), f"two outputs would be written to {twice[0]}")
        return found

    def _valid(self, model: type[_Model], value: Any, path: Path) -> _Model | None:
        if not isinstance(value, dict):
            self.problems.add(path, f"a mapping is expected, not {_kind(value)}")
            return None
        try:
            return model.model_validate(value)
        except ValidationError as error:
            for found in error.errors(include_url=False):
                self.problems.add((*path, *_place(found["loc"])), _message(found, model))
            return None

    def _input(self, name: str, value: Any) -> None:
        path: Path = ("inputs", name)
        trouble = names.file_problem(name)
        if trouble:
            self.problems.add(path, trouble)
        found = self._valid(InputDocument, value, path)
        if found is None:
            self.inputs.setdefault(name, Source("text", ""))  # no follow-up problems
            return
        given = [(k, v) for k, v in found if v is not None]
        if len(given) != 1:
            self.problems.add(path, "exactly one of path, text, url, blob and size is given")
            given = [("text", "")]
        kind, content = given[0]
        if kind == "path" and not self.client:
            self.problems.add(
                (*path, "path"),
                "a path is read by the client: upload the file with PUT /v1/blobs/{hash} "
                "and write {blob: 'sha256:…'}, or use `valence submit`",
            )
        elif kind == "blob" and not _BLOB.fullmatch(content):
            self.problems.add((*path, "blob"), "a blob is named sha256: and 64 hexadecimal digits")
        elif kind == "url" and not _URL.fullmatch(content):
            self.problems.add((*path, "url"), URL_PROBLEM)
        self.inputs[name] = Source(kind, str(content))  # type: ignore[arg-type]

    def _template(self, name: str, value: Any) -> None:
        path: Path = ("tasks", name)
        made: list[str] = []
        trouble = names.task_problem(name)
        if trouble:
            self.problems.add(path, trouble)
        found = self._valid(TaskDocument, value, path)
        if found is None:
            self.broken.add(name)
            # its outputs still count, so that those who read them get no problem of their own
            outputs = value.get("outputs") if isinstance(value, dict) else None
            for output in outputs if isinstance(outputs, list) else ():
                if isinstance(output, str):
                    self.producers.setdefault(output, name)
            return
        self._check_template(found, path)
        plain = _is_plain([found.args, found.kwargs], set())
        shared = _needs(found.needs), _fixed_bytes(found), plain
        if next(references([found.args, found.kwargs], ()), None) is not None:
            self.referring.add(name)
        if found.foreach is None:
            made += self._add_all("", {}, name, found, shared, path)
        else:
            for item, variables in items(found.foreach, (*path, "foreach"), self.problems):
                if len(self.tasks) > TASKS_MAX:
                    break
                made += self._add_all(item, variables, name, found, shared, path)
            if not made:
                self.broken.add(name)
        if len(self.tasks) > TASKS_MAX >= len(self.tasks) - len(made):
            self.problems.add(path, f"at most {TASKS_MAX:,} tasks are read")
        self.templates[name] = made

    def _add_all(
        self,
        item: str,
        variables: dict[str, Any],
        name: str,
        found: TaskDocument,
        shared: tuple[TaskNeeds, int, bool],
        path: Path,
    ) -> list[str]:
        """One task; or as many as run at different peers at once."""
        if found.peers == 1:
            gang = [f"{name}[{item}]" if item else name]
            sub = Substitution(variables, self._expand)
            self._add(gang[0], name, found, shared, sub, path)
            return gang
        gang = [f"{name}[{item}{',' if item else ''}rank={rank}]" for rank in range(found.peers)]
        tied = tuple(gang)
        for rank, task in enumerate(gang):
            sub = Substitution({**variables, "rank": rank}, self._expand)
            self._add(task, name, found, shared, sub, path, tied)
        return gang

    def _expand(self, more: int) -> None:
        """Tasks are written out: so many bytes more."""
        self.expanded_bytes += more
        if self.expanded_bytes > EXPANDED_BYTES_MAX:
            limit = f"{EXPANDED_BYTES_MAX:,}"
            self.problems.add(("tasks",), f"all tasks written out have more than {limit} bytes")
            self.problems.check()

    def _check_template(self, found: TaskDocument, path: Path) -> None:
        problems = self.problems
        for index, other in enumerate(found.alternatives):
            place = (*path, "alternatives", index)
            if found.command is None:
                problems.add(place, "only a command has alternatives")
            self._check_command(other.command, (*place, "command"))
            self._check_environment(other.env, (*place, "env"))
        if found.peers > 1 and found.command is None:
            problems.add((*path, "peers"), "only a command can run at several peers at once")
        if found.peers > 1 and isinstance(found.foreach, dict) and "rank" in found.foreach:
            problems.add((*path, "foreach", "rank"), "{rank} is what `peers` counts")
        if (found.command is None) == (found.call is None):
            problems.add(path, "a task has either a command or a call")
        if found.command is not None:
            self._check_command(found.command, (*path, "command"))
            for key in ("args", "kwargs"):
                if getattr(found, key):
                    problems.add((*path, key), "only a call has arguments of this kind")
        for key in ("args", "kwargs"):
            for place in _huge_integers(getattr(found, key), (*path, key)):
                problems.add(place, "an integer has at most 64 bits")
        if found.call is not None:
            trouble = names.call_problem(found.call)
            if trouble:
                problems.add((*path, "call"), trouble)
        self._check_environment(found.env, (*path, "env"))
        for key in ("labels", "software"):
            for index, label in enumerate(getattr(found.needs, key)):
                trouble = names.label_problem(label)
                if trouble:
                    problems.add((*path, "needs", key, index), trouble)
        if found.timeout == 0:
            problems.add((*path, "timeout"), "a time-out is longer than nothing")

    def _check_command(self, command: list[str], path: Path) -> None:
        if not command or not command[0]:
            self.problems.add(path, "a command has at least the program's name")
        if sum(len(word.encode()) + 1 for word in command) > COMMAND_BYTES_MAX:
            self.problems.add(path, f"at most {COMMAND_BYTES_MAX:,} bytes")

    def _check_environment(self, env: dict[str, str], path: Path) -> None:
        for variable in env:
            trouble = names.environment_problem(variable)
            if trouble:
                self.problems.add((*path, variable), trouble)

    def _add(
        self,
        task: str,
        template: str,
        found: TaskDocument,
        shared: tuple[TaskNeeds, int, bool],
        sub: Substitution,
        path: Path,
        gang: tuple[str, ...] = (),
    ) -> None:
        needs, fixed_bytes, plain = shared
        self._expand(200 if plain else fixed_bytes)
        inputs, outputs = sub.texts(found.inputs), sub.texts(found.outputs)
        for key, listed in (("inputs", inputs), ("outputs", outputs)):
            if not listed:
                continue
            seen: set[str] = set()
            for index, name in enumerate(listed):
                trouble = names.file_problem(name)
                if name in seen:
                    trouble = f"{name!r} stands twice"
                seen.add(name)
                if trouble:
                    self.problems.add((*path, key, index), f"{trouble}{_of(task, template)}")
        for index, name in enumerate(outputs):
            maker = self.producers.setdefault(name, task)
            if maker != task:
                self.problems.add(
                    (*path, "outputs", index),
                    f"{name!r} is made by {maker} already{_of(task, template)}",
                )
            elif name in self.inputs:
                self.problems.add(
                    (*path, "outputs", index), f"{name!r} is an input of the workflow already"
                )
        if len(task) > TASK_ID_MAX:
            self.problems.add(
                (*path, "foreach"), f"a task's id has at most {TASK_ID_MAX} characters"
            )
        self.places[task] = path
        command = None if found.command is None else sub.texts(found.command)
        if command and sum(map(len, command)) > COMMAND_BYTES_MAX:
            place = (*path, "command")
            self.problems.add(place, f"at most {COMMAND_BYTES_MAX:,} bytes{_of(task, template)}")
        self.tasks[task] = Task(
            id=task,
            template=template,
            command=command,
            call=found.call,
            args=tuple(found.args if plain else sub.value(found.args)),
            references=_NOTHING,
            kwargs=found.kwargs if plain else sub.value(found.kwargs),
            env={k: sub.text(v) for k, v in found.env.items()} if found.env else _NOTHING,
            inputs=inputs,
            outputs=outputs,
            after=sub.texts(found.after),
            needs=needs,
            runtime_s=found.runtime,
            timeout_s=found.timeout,
            retries=found.retries,
            network=found.network,
            alternatives=tuple(
                Alternative(
                    sub.texts(other.command),
                    {k: sub.text(v) for k, v in (other.env or found.env).items()},
                    needs if other.needs is None else _needs(other.needs),
                    found.timeout if other.timeout is None else other.timeout,
                )
                for other in found.alternatives
            ),
            branch=sub.text(found.branch),
            gang=gang,
        )

    def _check_branches(self) -> None:
        """All of a branch have the same number of other ways."""
        first: dict[str, Task] = {}
        for task in self.tasks.values():
            if not task.branch:
                continue
            other = first.setdefault(task.branch, task)
            place = (*self.places[task.id], "branch")
            if not task.alternatives:
                self.problems.add(place, "a task of a branch has alternatives")
            elif task.gang:
                self.problems.add(place, "what runs at several peers at once is of no branch")
            elif len(task.alternatives) != len(other.alternatives):
                self.problems.add(
                    place,
                    f"it has {len(task.alternatives)} alternatives, {other.id} of the same branch "
                    f"has {len(other.alternatives)}: they go from one to the next together",
                )

    def _tie(self) -> None:
        """What runs at once begins at once, and only all of it has made what others wait for."""
        # (each is met once, by its first: to hash it for each of its tasks would cost its square)
        gangs = [task.gang for task in self.tasks.values() if task.gang[:1] == (task.id,)]
        for gang in gangs:
            members = frozenset(gang)
            above = dict.fromkeys(p for task in gang for p in self.parents[task])
            self._count_edges(len(above) * len(gang) - sum(len(self.parents[t]) for t in gang))
            for task in gang:
                inner = next((p for p in self.parents[task] if p in members), None)
                if inner is not None:
                    self.problems.add(
                        self.places[task], f"{task} waits for {inner}, which runs at once"
                    )
            self.parents.update(dict.fromkeys(gang, tuple(p for p in above if p not in members)))
        if not gangs:
            return
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
        """Files, results and `after` of one task → its parents."""
        path = self.places[task.id]
        parents: dict[str, None] = {}
        files: dict[str, None] = {}
        for index, name in enumerate(task.inputs):
            matched = self._files(name, task)
            if not matched:
                known = self._to_suggest(self.producers, self.inputs)
                self.problems.add(
                    (*path, "inputs", index),
                    _unknown_file(name, known) + _of(task.id, task.template),
                )
            for file in matched:
                files[file] = None
                maker = self.producers.get(file)
                if maker in self.tasks:
                    parents[maker] = None
        found = {}
        pair = [list(task.args), dict(task.kwargs)] if task.template in self.referring else ()
        for where, ref in references(pair, ()):
            # the pair [args, kwargs] was only for the walk: name the place as the user wrote it
            place = (*path, "args" if where[0] == 0 else "kwargs", *where[1:])
            target = self._reference(ref, place, task)
            if target is not None:
                found[str(ref)] = target
                parents.update(dict.fromkeys(target.tasks))
        for index, name in enumerate(task.after):
            if name in self.broken:
                continue
            listed = self.templates.get(name) or ([name] if name in self.tasks else None)
            if listed is None:
                self.problems.add(
                    (*path, "after", index),
                    _unknown("task", name, self._to_suggest(self.templates)),
                )
            else:
                parents.update(dict.fromkeys(listed))
        self._count_edges(len(parents) + len(files), path)
        if found or tuple(files) != task.inputs:
            self.tasks[task.id] = _replace(task, inputs=tuple(files), references=found)
        self.parents[task.id] = tuple(parents)

    def _to_suggest(self, *known: Mapping[str, Any]) -> list[str]:
        """What may have been meant. Also a mistake that is told once may be made by each of
        thousands of tasks: it is looked for a few times only."""
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

    def _reference(self, ref: Any, place: Path, task: Task) -> Reference | None:
        if not isinstance(ref, str):
            self.problems.add(place, "a result is named by its task")
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
            self.problems.add(place, f"{ref} is a command: only calls have a value; use its files")
            return None
        return Reference(targets, many)


def _place(loc: tuple[int | str, ...]) -> Path:
    # pydantic names the branch of a union it tried, as in `foreach, list[any]`
    return tuple(p for p in loc if not (isinstance(p, str) and re.search(r"[\[\]]|^int$|^str$", p)))


def _message(found: Any, model: type[BaseModel]) -> str:
    kind, loc = found["type"], found["loc"]
    if kind == "extra_forbidden":
        for part in loc[:-1]:
            model = {"needs": NeedsDocument}.get(str(part), model)
        return _unknown("key", str(loc[-1]), list(model.model_fields))
    if kind == "missing":
        return "this key is missing"
    if kind == "too_short":
        return "at least 1 entry is needed"
    if kind == "value_error":
        return str(found["ctx"]["error"])
    message = str(found["msg"])
    return message[:1].lower() + message[1:] + f", not {_kind(found['input'])}"


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    kinds = {dict: "a mapping", list: "a list", str: "the text", bool: "the truth value"}
    kind = kinds.get(type(value), "the number")
    return kind if isinstance(value, dict | list) else f"{kind} {text[:40]}"


def _unknown(what: str, name: str, known: list[str]) -> str:
    close = _close(name, known)
    if close:
        return f"unknown {what} {name!r}; did you mean {close[0]!r}?"
    if 0 < len(known) <= 20:
        return f"unknown {what} {name!r}; there are: {', '.join(known)}"
    return f"unknown {what} {name!r}"


def _close(name: str, known: list[str]) -> list[str]:
    if len(name) > SUGGESTED_CHARS_MAX:
        return []
    near = [one for one in known if abs(len(one) - len(name)) <= len(name)]
    return difflib.get_close_matches(name, near[:SUGGESTED_AMONG_MAX], n=1)


def _unknown_file(name: str, known: list[str]) -> str:
    if names.is_glob(name):
        return f"{name!r} matches no output of a task and no input of the workflow"
    close = _close(name, known)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"no task makes {name!r}, and it is no input of the workflow{hint}"


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
