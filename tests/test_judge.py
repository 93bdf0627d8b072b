"""What an outcome means: every row of the table at the top of `judge`, and the limits beside it."""

from __future__ import annotations

import pytest

from tests.test_scenarios import Story, peer
from valence.protocols.engine.judge import LOSSES_MAX, counts, judge
from valence.protocols.engine.outcomes import NO_ROOM
from valence.protocols.wire.messages import AttemptKey, Outcome

PLAIN = 'name: w\ntasks:\n  t: {command: "true"}'
PATIENT = 'name: w\ntasks:\n  t: {command: "true", retries: 1}'
GANG = 'name: w\ntasks:\n  t: {command: "true", peers: 2}'
GREEDY = 'name: w\npolicies: [more-memory]\ntasks:\n  t: {command: "true", needs: {memory: 64MiB}}'


def story(document: str, *steps: str) -> Story:
    made = Story()
    made.do("workflow", document.splitlines())
    for step in steps:
        command, *rows = step.split("\n")
        made.do(command, rows)
    return made


def ended(number: int, kind: str, epoch: int = 1, **more: object) -> Outcome:
    return Outcome(AttemptKey("w", "t", number), kind, epoch=epoch, **more)  # type: ignore[arg-type]


FIRST = ("place", "start t/1 a")
SECOND = (*FIRST, "lose t/1", "again t", "start t/2 b")


@pytest.mark.parametrize(
    ("steps", "who", "outcome", "expected"),
    [
        (("place",), "a", ended(1, "ok"), False),
        (FIRST, "a", ended(1, "ok"), True),
        (FIRST, "a", ended(1, "failed"), True),
        (FIRST, "a", ended(1, "returned"), True),
        (FIRST, "b", ended(1, "ok"), False),
        (FIRST, "a", ended(1, "ok", epoch=2), False),
        (FIRST, "a", ended(2, "ok"), False),
        ((*FIRST, "take a\nt/1 ok", "commit"), "a", ended(1, "ok"), False),
        ((*FIRST, "take a\nt/1 failed", "commit"), "a", ended(1, "ok"), False),
        (SECOND, "a", ended(1, "ok"), True),
        (SECOND, "a", ended(1, "failed"), False),
        (SECOND, "a", ended(1, "returned"), False),
        (SECOND, "b", ended(2, "failed"), True),
    ],
    ids=[
        "that was never given out", "ok", "failed", "returned", "of another peer",
        "of another home", "of a later attempt", "after it succeeded", "after it failed for good",
        "ok, of one given up", "failed, of one given up", "returned, of one given up", "the latest",
    ],
)  # fmt: skip
def test_an_outcome_counts_only_of_the_attempt_that_this_home_gave_out(
    steps: tuple[str, ...], who: str, outcome: Outcome, expected: bool
) -> None:
    run = story(PLAIN, *steps).run
    assert run is not None
    assert counts(run, peer(who), outcome) is expected


def test_a_result_of_a_gang_that_began_anew_does_not_count() -> None:
    made = story(GANG, "place", "start t[rank=0]/1 a t[rank=1]/1 b", "lose t[rank=0]/1")
    assert made.run is not None
    late = Outcome(AttemptKey("w", "t[rank=1]", 1), "ok", epoch=1)
    assert not counts(made.run, peer("b"), late)


@pytest.mark.parametrize(
    ("document", "outcome", "state"),
    [
        (PLAIN, ended(1, "ok"), "succeeded"),
        (PLAIN, ended(1, "failed"), "failed"),
        (PATIENT, ended(1, "failed"), "retrying"),
        (PATIENT, ended(1, "returned"), "returned"),
        (PLAIN, ended(1, "returned", started_at=1.0), "returned"),
        (GREEDY, ended(1, "failed", cause="memory"), "retrying"),
        (GREEDY, ended(1, "failed", cause="exit"), "failed"),
    ],
)
def test_what_an_outcome_that_counts_means(document: str, outcome: Outcome, state: str) -> None:
    run = story(document, *FIRST).run
    assert run is not None
    verdict = judge(run, peer("a"), outcome, lambda task: {peer("a"), peer("b")})
    assert verdict.state == state
    assert (verdict.memory_bytes > 64 << 20) is (state == "retrying" and document is GREEDY)


def test_a_task_that_no_peer_has_room_for_fails_once_all_have_said_so() -> None:
    made = story(PLAIN, *FIRST, f"take a\nt/1 returned cause={NO_ROOM}", "again t", "start t/2 b")
    run = made.run
    assert run is not None
    full = ended(2, "returned", cause=NO_ROOM)
    able = {peer("a"), peer("b")}
    assert judge(run, peer("b"), full, lambda task: able | {peer("c")}).state == "returned"
    assert judge(run, peer("b"), full, lambda task: able).state == "failed"
    assert judge(run, peer("b"), ended(2, "returned"), lambda task: able).state == "returned"


def test_a_task_that_is_returned_again_and_again_after_it_began_fails() -> None:
    run = story(PLAIN, *FIRST).run
    assert run is not None
    able = {peer("a")}
    run.tasks["t"].losses = LOSSES_MAX
    begun, unbegun = ended(1, "returned", started_at=1.0), ended(1, "returned")
    assert judge(run, peer("a"), begun, lambda task: able).state == "failed"
    assert judge(run, peer("a"), unbegun, lambda task: able).state == "returned"
    run.tasks["t"].losses = LOSSES_MAX - 1
    assert judge(run, peer("a"), begun, lambda task: able).state == "returned"
