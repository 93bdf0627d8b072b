"""What an unfinished task waits for, in the words that users read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from valence.protocols.engine.explain import waiting_for
from valence.protocols.engine.run import Bringing, Pending, Run
from valence.protocols.engine.work import read_document
from valence.protocols.wire.entries import (
    AttemptsFinished,
    AttemptsStarted,
    FinishedAttempt,
    InputsStaged,
    StagedFile,
    StartedAttempt,
)
from valence.protocols.wire.messages import AttemptKey, Outcome

DOCUMENT = """
name: w
inputs:
  reads: {url: "http://example.org/reads"}
  in0: {text: "0"}
  in1: {text: "1"}
tasks:
  prep: {command: "true"}
  trim: {command: "true", inputs: [reads]}
  align: {command: "true", after: [prep], outputs: [bam]}
  sort: {command: "true", inputs: [bam], after: [prep]}
  all: {command: "true", foreach: 7, outputs: ["part{item}"]}
  gang: {command: "true", peers: 2, inputs: ["in{rank}"]}
"""
LEVELS = """
name: w
levels: strict
tasks:
  a: {command: "true", foreach: 2}
  b: {command: "true", outputs: [out]}
  c: {command: "true", inputs: [out]}
"""


def run_of(text: str = DOCUMENT) -> Run:
    return Run("w1", read_document(text.encode(), {}), 0.0, b"home")


def started(run: Run, task: str, peer: bytes = b"\xab\xcd" * 10) -> None:
    run.apply(AttemptsStarted(placement={}, attempts=(StartedAttempt(task, 1, peer, 1),)), 1.0, 1)


def finished(run: Run, task: str, kind: str, verdict: str, reason: str = "") -> None:
    ended = Outcome(AttemptKey("w1", task, 1), kind, reason)
    entry = AttemptsFinished(outcomes=(FinishedAttempt(ended, b"peer", verdict),))
    run.apply(entry, 2.0, 1)
    run.committed(entry)


def said(run: Run, task: str, trouble: str = "", unkept: str = "", reason: str = "") -> str:
    journal: Any = SimpleNamespace(
        trouble=trouble, keeping=SimpleNamespace(unkept=lambda workflow: unkept)
    )
    strategy: Any = SimpleNamespace(waiting_for=lambda key: reason or None)
    return waiting_for(run, run.tasks[task], journal, strategy)


def test_a_task_waits_for_inputs_and_parents() -> None:
    run = run_of()
    run.note(Bringing("reads", "http://example.org/reads is being fetched (try 1)"))
    assert said(run, "trim") == "input reads: http://example.org/reads is being fetched (try 1)"
    assert said(run, "align") == "prep, which is waiting, must finish first"
    run.note(Pending(("prep",)))
    assert said(run, "sort") == (
        "input bam comes from align, which is waiting; prep, which is pending, must finish first"
    )


def test_only_the_first_reasons_are_listed() -> None:
    text = DOCUMENT + '  last: {command: "true", after: [all]}\n'
    assert said(run_of(text), "last").endswith(
        "all[4], which is waiting, must finish first; and 2 more"
    )


def test_strict_levels_hold_a_task_back_though_its_inputs_are_there() -> None:
    run = run_of(LEVELS)
    for task in ("b", "a[0]"):
        started(run, task)
    finished(run, "b", "ok", "succeeded")
    assert said(run, "c") == "levels are strict, and level 1 still has 2 tasks to finish"
    finished(run, "a[0]", "ok", "succeeded")
    assert said(run, "c") == "levels are strict, and level 1 still has 1 task to finish"


def test_a_task_of_a_gang_waits_for_what_the_others_of_it_wait_for() -> None:
    run = run_of()
    run.note(Bringing("in1", "half of it is there"))
    staged = InputsStaged(files=(StagedFile("in0", bytes(32), 1, (b"home",)),), failed=())
    run.apply(staged, 1.0, 1)
    run.committed(staged)
    assert said(run, "gang[rank=1]") == "input in1: half of it is there"
    assert said(run, "gang[rank=0]") == (
        "gang[rank=1], which must start at the same time: input in1: half of it is there"
    )


def test_a_ready_task_waits_for_the_commit() -> None:
    assert said(run_of(), "prep") == (
        "ready to start once a majority of the journal's replicas has committed "
        "everything that it depends on"
    )


def test_a_placed_task_says_where_it_is() -> None:
    run = run_of()
    run.note(Pending(("prep",)))
    busy = "all 3 suitable peers are busy"
    assert said(run, "prep", reason=busy) == busy
    assert said(run, "prep") == "a peer has been found; about to start there"
    started(run, "prep")
    assert said(run, "prep") == "running on peer abcdabcd"
    finished(run, "prep", "failed", "retrying", "exit code 3")
    assert said(run, "prep") == "will be retried soon; the last attempt: exit code 3"


def test_trouble_with_the_journal_comes_before_all_else() -> None:
    run = run_of()
    assert said(run, "prep", trouble="disk full") == (
        "this workflow's journal can't be written: disk full"
    )
    assert said(run, "prep", unkept="only 1 of 3 replicas is there") == (
        "only 1 of 3 replicas is there"
    )
