"""What a workflow becomes on its way: its document read again, its needs, arguments and sizes in
messages, its deadline as a time."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache

import msgpack

from protocols import messages
from protocols.messages import CHECKED_NEEDS, Capacity, Work
from workflow import document, quantities, tree, wfformat
from workflow.model import Needs, Task, Workflow

from .run import Run


def size_bytes(work: Work) -> int:
    """About how many bytes it takes in a message."""
    values = [value for ref in work.references for value in ref.values]
    return (
        300
        + len(work.arguments)
        + sum(len(word) + 5 for word in work.command or ())
        + sum(len(k) + len(v) + 10 for k, v in work.env)
        + sum(len(value.data) + 150 for value in values)
        + sum(len(file.name) + 120 for file in work.inputs)
        + sum(len(name) + 5 for name in work.outputs)
    )


def pack_arguments(spec: Task) -> bytes:
    packed: bytes = msgpack.packb([list(spec.args), dict(spec.kwargs)])
    return packed


@lru_cache(1000)
def wire_needs(needs: Needs) -> messages.Needs:
    """Checked: what can't be said in a message is refused with `ValidationError`."""
    found = messages.Needs(
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
    return CHECKED_NEEDS.validate_python(found)


def deadline_at(run: Run) -> float | None:
    """On the wall clock."""
    text = run.workflow.deadline
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        pass
    else:
        return run.submitted_at + number
    try:
        return run.submitted_at + quantities.seconds(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def read_document(text: bytes, options: dict[str, object]) -> Workflow:
    """As it was submitted: our own document, or a WfFormat instance with its scales."""
    value, lines = tree.read(text)
    if wfformat.is_instance(value):
        return wfformat.parse(
            value,
            float(str(options.get("time_scale", 1.0))),
            float(str(options.get("size_scale", 1.0))),
        )
    return document.from_value(value, lines)
