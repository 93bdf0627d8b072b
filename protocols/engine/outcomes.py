"""Makes the outcome of an attempt, on the executing side, from what the attempt has left."""

from __future__ import annotations

from typing import Any

from valence.workflow.quantities import show_seconds

from ..wire.messages import CHECKED_OUTCOME, Outcome, Work

#: why an attempt is handed back: its inputs or outputs need more than this peer has in all
NO_ROOM = "room"
MADE_WAY_CAUSE = "way"  # a promised task took its place
WORKER_DIED = "the worker process died during the call"
NURSERY_DIED = "the process that starts tasks on the peer ended"
LOOK_S = 0.5  # between two looks at what a task uses


def too_long(work: Work) -> str:
    return f"it ran longer than its timeout of {show_seconds(work.timeout_s or 0.0)}"


def outcome(work: Work, fields: dict[str, Any], times: tuple[float, float, float]) -> Outcome:
    queued_at, started_at, ended_at = times
    made = Outcome(
        key=work.key,
        queued_at=queued_at,
        started_at=started_at,
        ended_at=ended_at,
        epoch=work.epoch,
        **fields,
    )
    return CHECKED_OUTCOME.validate_python(made)
