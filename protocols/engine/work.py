"""Translates documents into workflows, tasks into messages, and deadlines into times."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import lru_cache

import msgpack

from valence.protocols.wire import messages
from valence.workflow import document, quantities, tree, wfformat
from valence.workflow.model import Task, TaskNeeds, Workflow

from ..strategies.base import Placed
from ..strategies.pilots.ranking import problem as rank_problem
from ..wire.messages import CHECKED_NEEDS, Argument, Capacity, File, Value, Work
from .policies import policy_problem
from .run import Run

_PACKER = msgpack.Packer()  # (a new one, as for `packb`, allocates much more than it needs)


def size_bytes(work: Work) -> int:
    """Its approximate size in a message."""
    size = 300 + len(work.arguments)
    for word in work.command or ():
        size += len(word) + 5
    for name, text in work.env:
        size += len(name) + len(text) + 10
    for ref in work.references:
        size += sum(len(value.data) + 150 for value in ref.values)
    for file in work.inputs:
        size += len(file.name) + 120
    for output in work.outputs:
        size += len(output) + 5
    return size


def pack_arguments(spec: Task) -> bytes:
    packed: bytes = _PACKER.pack([list(spec.args), dict(spec.kwargs)])
    return packed


@lru_cache(1000)
def wire_needs(needs: TaskNeeds) -> messages.Needs:
    """Checked: needs that no message can express raise `ValidationError`."""
    wired = messages.Needs(
        capacity=Capacity(
            millicores=needs.millicores,
            memory_bytes=needs.memory_bytes,
            disk_bytes=needs.disk_bytes,
            gpus=needs.gpus,
        ),
        arch=needs.arch,
        os=needs.os,
        site=needs.site,
        speed=needs.speed,
        labels=needs.labels,
        software=needs.software,
    )
    return CHECKED_NEEDS.validate_python(wired)


def make_work(
    run: Run, placed: Placed, runtime_s: float | None, held_too: Callable[[File], File]
) -> Work:
    """A task as it is sent to the peer that runs it; `LookupError` if an input or value is gone.

    `held_too` adds the holders that only its home knows of."""
    spec = run.spec(placed.unit.key.task)
    return Work(
        key=placed.unit.key,
        lease=placed.lease,
        needs=placed.unit.needs,
        command=spec.command,
        call=spec.call,
        arguments=b"" if spec.call is None else pack_arguments(spec),
        references=tuple(
            Argument(
                name=name,
                many=ref.many,
                values=tuple(_value(run, task, held_too) for task in ref.tasks),
            )
            for name, ref in spec.references.items()
        ),
        env=tuple(spec.env.items()),
        inputs=tuple(held_too(_file(run, name)) for name in spec.inputs),
        outputs=spec.outputs,
        timeout_s=spec.timeout_s,
        runtime_s=runtime_s,
        network=spec.network,
        epoch=run.epoch,
        owner=run.owner[:64],
        ways=run.ways_made(placed.unit.key.task),
    )


def _file(run: Run, name: str) -> File:
    file = run.file(name)
    if file is None:
        raise LookupError(f"input {name} is gone")
    return file


def _value(run: Run, task: str, held_too: Callable[[File], File]) -> Value:
    value = run.value(task)
    if value is None:
        raise LookupError(f"the value of {task} is gone")
    return value if value.file is None else value._replace(file=held_too(value.file))


def deadline_at(run: Run) -> float | None:
    """The deadline of a run, on the wall clock."""
    return due_at(run.workflow, run.submitted_at)


def due_at(workflow: Workflow, submitted_at: float) -> float | None:
    text = workflow.deadline
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        pass
    else:
        return submitted_at + number
    try:
        return submitted_at + quantities.seconds(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


#: a document this short is read at once, because a thread would take longer to start; unless a key
#: in it multiplies tasks, or a word in it may be escaped so that it is not recognised here
INLINE_BYTES_MAX = 4096
#: keys by which a few bytes make many tasks or values (`foreach` with one digit does no harm)
_MANY = re.compile(rb"peers|&|\\|foreach(?![\"']?\s*:\s*\d\s*[,}\n\r])")


def is_much(text: bytes) -> bool:
    """Reading this document, or making its workflow, may take long: both are done in a thread, each
    time."""
    return len(text) > INLINE_BYTES_MAX or _MANY.search(text) is not None


def read_document(text: bytes, options: dict[str, object]) -> Workflow:
    """The workflow as it was submitted: our own document, or a WfFormat instance with scales."""
    value, lines = tree.read(text)
    if wfformat.is_instance(value):
        workflow = wfformat.parse(
            value,
            float(str(options.get("time_scale", 1.0))),
            float(str(options.get("size_scale", 1.0))),
        )
    else:
        workflow = document.from_value(
            value, lines, policy_problem=policy_problem, rank_problem=rank_problem
        )
    strategy = options.get("strategy")
    return workflow if strategy is None else replace(workflow, strategy=str(strategy))
