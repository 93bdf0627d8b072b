"""Makes a workflow's events from its journal's entries, so that a stream can resume on any peer.

An event's id is `entry.index`. Each entry always gives the same events, on every peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..wire.entries import (
    AttemptsFinished,
    AttemptsLost,
    AttemptsStarted,
    CancelAsked,
    Ended,
    HomeElected,
    HomeForced,
    InputsLost,
    InputsStaged,
    Journaled,
    PromiseAtRisk,
    Promised,
    PromiseEnded,
    Submitted,
    TasksBooked,
    TasksReopened,
    TasksSkipped,
)
from ..wire.messages import Outcome

BOOKED_SHOWN_MAX = 20


def of_entry(seq: int, at: float, said: Journaled) -> Iterator[dict[str, Any]]:
    make = _EVENTS.get(type(said))
    for index, event in enumerate(make(said) if make is not None else ()):
        yield {"id": f"{seq}.{index}", "at": at, **event}


def _submitted(said: Submitted) -> Iterator[dict[str, Any]]:
    yield {"type": "workflow", "state": "running", "tasks": said.tasks}


def _inputs_staged(said: InputsStaged) -> Iterator[dict[str, Any]]:
    yield {"type": "inputs", "staged": [file.name for file in said.files]}
    for name, reason in said.failed:
        yield {"type": "inputs", "failed": name, "reason": reason}


def _inputs_lost(said: InputsLost) -> Iterator[dict[str, Any]]:
    for name, reason in said.files:
        yield {"type": "inputs", "again": name, "reason": reason}


def _attempts_started(said: AttemptsStarted) -> Iterator[dict[str, Any]]:
    for attempt in said.attempts:
        yield _task(attempt.task, "running", attempt.number, peer=attempt.peer.hex())


def _attempts_finished(said: AttemptsFinished) -> Iterator[dict[str, Any]]:
    for ended, peer, verdict in said.outcomes:
        state = "retrying" if verdict == "returned" else verdict
        more: dict[str, Any] = {"peer": peer.hex(), "seconds": _seconds(ended)}
        if ended.reason:
            more["reason"] = ended.reason
        if ended.exit_code is not None:
            more["exit_code"] = ended.exit_code
        yield _task(ended.key.task, state, ended.key.number, **more)


def _attempts_lost(said: AttemptsLost) -> Iterator[dict[str, Any]]:
    for attempt in said.attempts:
        yield _task(attempt.task, attempt.verdict, attempt.number, reason=attempt.reason)


def _tasks_skipped(said: TasksSkipped) -> Iterator[dict[str, Any]]:
    for task, state, reason in said.tasks:
        yield _task(task, state, 0, reason=reason)


def _tasks_reopened(said: TasksReopened) -> Iterator[dict[str, Any]]:
    for task, reason in said.tasks:
        yield _task(task, "waiting", 0, reason=reason)


def _home_changed(said: HomeElected | HomeForced) -> Iterator[dict[str, Any]]:
    more = {"forced": True} if isinstance(said, HomeForced) else {}
    yield {"type": "home", "peer": said.home.hex(), "reason": said.why, **more}


def _cancel_asked(said: CancelAsked) -> Iterator[dict[str, Any]]:
    yield {"type": "workflow", "state": "cancelling", "reason": said.reason}


def _promised(said: Promised) -> Iterator[dict[str, Any]]:
    made = {"deadline_at": said.deadline_at, "survives": said.survives}
    yield {"type": "promise", "state": "made", **made}


def _tasks_booked(said: TasksBooked) -> Iterator[dict[str, Any]]:
    tasks = [row.task for row in said.booked[:BOOKED_SHOWN_MAX]]
    count = len(said.booked)
    yield {"type": "promise", "state": "booked", "tasks": tasks, "count": count, "reason": said.why}


def _promise_at_risk(said: PromiseAtRisk) -> Iterator[dict[str, Any]]:
    state = "at-risk" if said.why else "on-time"
    yield {"type": "promise", "state": state, "ends_at": said.ends_at, "reason": said.why}


def _promise_ended(said: PromiseEnded) -> Iterator[dict[str, Any]]:
    if said.kept:
        yield {"type": "promise", "state": "kept"}
    else:
        yield {"type": "promise", "state": "broken", "cause": said.cause, "reason": said.why}


def _ended(said: Ended) -> Iterator[dict[str, Any]]:
    yield {"type": "workflow", "state": said.state, "reason": said.reason, "final": True}


#: other entries make no events: keepers, parts of documents, copies of files
_EVENTS: dict[type[Journaled], Callable[[Any], Iterator[dict[str, Any]]]] = {
    Submitted: _submitted,
    InputsStaged: _inputs_staged,
    InputsLost: _inputs_lost,
    AttemptsStarted: _attempts_started,
    AttemptsFinished: _attempts_finished,
    AttemptsLost: _attempts_lost,
    TasksSkipped: _tasks_skipped,
    TasksReopened: _tasks_reopened,
    HomeElected: _home_changed,
    HomeForced: _home_changed,
    Promised: _promised,
    TasksBooked: _tasks_booked,
    PromiseAtRisk: _promise_at_risk,
    PromiseEnded: _promise_ended,
    CancelAsked: _cancel_asked,
    Ended: _ended,
}


def _task(task: str, state: str, number: int, **more: Any) -> dict[str, Any]:
    event: dict[str, Any] = {"type": "task", "task": task, "state": state}
    if number:
        event["attempt"] = number
    return {**event, **more}


def _seconds(ended: Outcome) -> float:
    return round(max(0.0, ended.ended_at - ended.started_at), 6) if ended.started_at else 0.0
