"""A workflow's events, made from its journal's entries: so a stream can begin again anywhere.

An event's id is `entry.index`. Each entry always gives the same events, on any run of any peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from protocols.messages import AttemptKey, Outcome


def of_entry(seq: int, at: float, kind: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for index, event in enumerate(_events(kind, body)):
        yield {"id": f"{seq}.{index}", "at": at, **event}


def _events(kind: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if kind == "submitted":
        yield {"type": "workflow", "state": "running", "tasks": body["tasks"]}
    elif kind == "staged":
        yield {"type": "inputs", "staged": [name for name, *_ in body["files"]]}
        for name, reason in body.get("failed", ()):
            yield {"type": "inputs", "failed": name, "reason": reason}
    elif kind == "started":
        for task, number, peer, _ in body["attempts"]:
            yield _task(task, "running", number, peer=peer.hex())
    elif kind == "finished":
        for row, peer, verdict in body["outcomes"]:
            ended = Outcome(*row)  # our own disk: it was checked before it was written
            key = AttemptKey(*ended.key)
            state = "retrying" if verdict == "returned" else verdict
            more: dict[str, Any] = {"peer": peer.hex(), "seconds": _seconds(ended)}
            if ended.reason:
                more["reason"] = ended.reason
            if ended.exit_code is not None:
                more["exit_code"] = ended.exit_code
            yield _task(key.task, state, key.number, **more)
    elif kind == "lost":
        for task, number, reason, verdict, _ in body["attempts"]:
            yield _task(task, verdict, number, reason=reason)
    elif kind == "skipped":
        for task, state, reason in body["tasks"]:
            yield _task(task, state, 0, reason=reason)
    elif kind == "reopened":
        for task, reason in body["tasks"]:
            yield _task(task, "waiting", 0, reason=reason)
    elif kind == "unstaged":
        for name, reason in body["files"]:
            yield {"type": "inputs", "again": name, "reason": reason}
    elif kind in ("home", "forced"):
        more = {"forced": True} if kind == "forced" else {}
        yield {"type": "home", "peer": body["home"].hex(), "reason": body["why"], **more}
    elif kind == "cancelled":
        yield {"type": "workflow", "state": "cancelling", "reason": body["reason"]}
    elif kind == "ended":
        yield {"type": "workflow", "state": body["state"], "reason": body["reason"], "final": True}


def _task(task: str, state: str, number: int, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "task", "task": task, "state": state}
    if number:
        found["attempt"] = number
    return {**found, **more}


def _seconds(ended: Outcome) -> float:
    return round(max(0.0, ended.ended_at - ended.started_at), 6) if ended.started_at else 0.0
