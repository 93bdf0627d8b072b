"""`levels: strict`: level by level, as the chemical paper's section 3.3.3 has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml

from tests.conftest import Cluster
from valence.protocols.engine.run import Run
from valence.protocols.engine.work import read_document
from valence.protocols.wire.entries import (
    AttemptsFinished,
    FinishedAttempt,
    ReopenedTask,
    TasksReopened,
)
from valence.protocols.wire.messages import AttemptKey, Outcome
from valence.workflow.problems import DocumentError

TWO_LEVELS = """
name: two levels
levels: strict
tasks:
  quick: {command: [sh, -c, "date +%s.%N > quick"], outputs: [quick]}
  slow: {command: [sh, -c, "sleep 1; date +%s.%N > slow"], outputs: [slow]}
  next: {command: [sh, -c, "date +%s.%N > next"], inputs: [quick], outputs: [next]}
"""


def run_of(text: str) -> Run:
    return Run("w1", read_document(text.encode(), {}), 0.0, b"home")


def won(run: Run, *names: str) -> None:
    ended = (Outcome(AttemptKey("w1", name, 1), "ok") for name in names)
    rows = tuple(FinishedAttempt(one, b"peer", "succeeded") for one in ended)
    run.committed(AttemptsFinished(outcomes=rows))


def test_a_task_waits_for_the_whole_level_above_it() -> None:
    run = run_of(TWO_LEVELS)
    assert [t.id for t in run.ready()] == ["quick", "slow"]
    won(run, "quick")
    assert not run.is_ready(run.tasks["next"]), "what it takes is there, but slow is not done"
    won(run, "slow")
    assert run.is_ready(run.tasks["next"])


def test_without_it_a_task_goes_as_soon_as_what_it_takes_is_there() -> None:
    run = run_of(TWO_LEVELS.replace("levels: strict\n", ""))
    won(run, "quick")
    assert run.is_ready(run.tasks["next"])


def test_a_result_that_is_gone_closes_its_level_again() -> None:
    run = run_of(TWO_LEVELS)
    won(run, "quick", "slow")
    run.apply(TasksReopened(tasks=(ReopenedTask("slow", "its holder is gone"),)), 1.0, 1)
    assert not run.is_ready(run.tasks["next"])
    won(run, "slow")
    assert run.is_ready(run.tasks["next"])


def test_all_levels_behind_one_that_fails_are_skipped() -> None:
    run = run_of(TWO_LEVELS)
    assert list(run.doomed_by("slow")) == ["next"]
    assert list(run.doomed_by("next")) == []


def test_only_strict_is_known() -> None:
    with pytest.raises(DocumentError) as error:
        read_document(TWO_LEVELS.replace("strict", "loose").encode(), {})
    assert "levels" in str(error.value)


def test_levels_are_enacted_in_turn(own_cluster: Callable[..., Cluster]) -> None:
    """On the other overlay, too: a live cluster on a ring."""
    live = own_cluster(3, "--overlay", "chord")
    workflow = live.client().submit(yaml.safe_load(TWO_LEVELS))
    assert workflow.wait() == "succeeded"
    times = {name: float(workflow.read(name)) for name in ("slow", "next")}
    assert times["next"] > times["slow"]
