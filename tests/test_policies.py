"""Policies: rules that travel with a workflow and react to what becomes of its tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Cluster, wait_for
from valence.protocols.chemistry.notation import ChemistryError
from valence.protocols.engine.alternatives import mend_branch
from valence.protocols.engine.gangs import Mending
from valence.protocols.engine.policies import SHIPPED, Again, Policies, read_policy
from valence.protocols.engine.run import Run
from valence.protocols.engine.work import read_document
from valence.protocols.wire.entries import (
    AttemptsFinished,
    AttemptsLost,
    AttemptsStarted,
    FinishedAttempt,
    StartedAttempt,
    TasksReopened,
)
from valence.protocols.wire.messages import AttemptKey, Outcome
from valence.workflow.problems import DocumentError

MIB = 2**20


def test_more_memory_doubles_three_times_and_then_gives_up() -> None:
    policies = Policies(("more-memory",))
    found = [policies.ended("t", n, "memory", 128 * MIB * 2 ** (n - 1)) for n in range(1, 6)]
    assert found == [Again(256 * MIB), Again(512 * MIB), Again(1024 * MIB), None, None]
    assert policies.ended("t", 1, "exit", 1) is None, "only for memory"


def test_slow_twice_runs_a_task_a_second_time_not_a_third() -> None:
    policies = Policies(("slow-twice",))
    assert policies.wants_slow
    assert not policies.slow("t", 1, 2.0, 1.0)
    assert policies.slow("t", 1, 4.0, 1.0)
    assert not policies.slow("t", 2, 9.0, 1.0)


def test_a_rule_of_ones_own_with_a_memory_of_its_own() -> None:
    """Tasks that exit with 75 (try later) are tried again, but only two of all of them."""
    rules = (
        'replace ENDED:task:n:"exit":75, BUDGET:left by system.again(task), BUDGET:(left - 1) '
        "if left > 0",
        "replace-one START by BUDGET:2",
        'replace ENDED:task:n:"exit":75 by START if n = 1 and task = "first"',
    )
    policies = Policies(rules)
    assert policies.ended("first", 1, "exit", 75) is None  # it starts the budget
    assert [policies.ended("t", n, "exit", 75) is not None for n in (1, 2, 3)] == [
        True,
        True,
        False,
    ]


def test_rules_without_end_are_left_alone_and_tasks_go_on() -> None:
    policies = Policies(("replace ENDED:t:n:c:v by ENDED:t:(n + 1):c:v",))
    assert policies.ended("t", 1, "exit", 1) is None
    assert "are switched off" in policies.trouble
    assert policies.ended("t", 2, "exit", 1) is None


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (
            "more-memry",
            "unknown policy 'more-memry': use more-memory, alternatives, slow-twice, or write a rule",
        ),
        ("replace x by y", "line 1, column 9: y is not defined"),
        ("replace x by open(x) if", "line 1, column 24: expected a molecule"),
    ],
)
def test_a_policy_that_can_not_be_read_is_refused_with_its_place(policy: str, problem: str) -> None:
    with pytest.raises(ChemistryError):
        read_policy(policy)
    text = f"name: p\npolicies:\n  - {policy}\ntasks: {{t: {{command: 'true'}}}}\n"
    with pytest.raises(DocumentError) as found:
        read_document(text.encode(), {})
    assert problem in str(found.value)
    assert "/policies/0 (line 3)" in str(found.value)


def test_what_was_decided_stands_in_the_journal_and_a_new_home_goes_on_from_it() -> None:
    text = b"name: p\npolicies: [more-memory]\ntasks: {t: {command: 'true', needs: {memory: 1MiB}}}"
    runs = [Run("w", read_document(text, {}), 0.0, b"h") for _ in range(2)]
    for number in (1, 2):
        ended = Outcome(AttemptKey("w", "t", number), "failed", "killed", cause="memory")
        for one in runs:
            one.apply(started("t", number), 0.0, 1)
        again = runs[0].consider(ended)
        assert again == Again(MIB * 2**number)
        assert runs[0].consider(ended) is None, "each failure is told once"
        rows = (FinishedAttempt(ended, b"p", "retrying"),)
        said = AttemptsFinished(outcomes=rows, memory={"t": again.memory_bytes})
        for one in runs:
            one.apply(said, 1.0, 1)
    assert [one.needs("t").memory_bytes for one in runs] == [4 * MIB, 4 * MIB]


def test_shipped_policies_are_described() -> None:
    from pathlib import Path

    text = (Path(__file__).parent.parent / "docs" / "policies.md").read_text()
    for name, rule in SHIPPED.items():
        assert f"`{name}`" in text
        assert " ".join(rule.split()) in " ".join(text.split())


def test_an_alternative_has_its_own_needs_and_its_own_retries() -> None:
    text = b"""
name: p
policies: [alternatives]
tasks:
  t:
    foreach: [a]
    command: "fast {item}"
    needs: {gpus: 1}
    retries: 1
    alternatives: [{command: "slow {item}", needs: {cpus: 2}}, {command: "last"}]
"""
    whole = Run("w", read_document(text, {}), 0.0, b"h")
    commands, verdicts = [], []
    for number in range(1, 7):
        commands.append(whole.spec("t[a]").command)
        whole.apply(started("t[a]", number), 0.0, 1)
        ended = Outcome(AttemptKey("w", "t[a]", number), "failed", "exit code 1", 1, cause="exit")
        verdict, again = whole.verdict(ended), whole.consider(ended)
        rows = (FinishedAttempt(ended, b"p", "retrying" if again else verdict),)
        instead = ("t[a]",) if again is not None and again.instead else None
        whole.apply(AttemptsFinished(outcomes=rows, instead=instead), 1.0, 1)
        verdicts.append(whole.tasks["t[a]"].state)
    assert [words[-1] for words in commands if words] == [
        "fast a", "fast a", "slow a", "slow a", "last", "last",
    ]  # fmt: skip
    assert verdicts == [*["retrying"] * 5, "failed"]
    assert whole.spec("t[a]").needs.gpus == 1, "what an alternative does not say, the task does"


def test_only_commands_have_alternatives_and_theirs_are_checked() -> None:
    for task, place in (
        ("call: 'm:f', alternatives: [{command: x}]", "/tasks/t/alternatives/0"),
        ("command: x, alternatives: [{command: []}]", "/tasks/t/alternatives/0/command"),
        ("command: x, alternatives: [{command: y, env: {VALENCE_X: '1'}}]", "env/VALENCE_X"),
        ("command: x, alternatives: [{comand: y}]", "/tasks/t/alternatives/0"),
    ):
        with pytest.raises(DocumentError, match=place):
            read_document(f"name: p\ntasks: {{t: {{{task}}}}}".encode(), {})


# --------------------------------------------------------------------------- live

EATER = (
    "import sys, time; kept = b'x' * (int(sys.argv[1]) << 20); time.sleep(1.0); "
    "open('out', 'w').write(str(len(kept)))"
)


def test_a_task_that_needs_more_than_it_asked_for_is_rescued(
    own_cluster: Callable[..., Cluster],
) -> None:
    """With nobody doing anything; and its history tells why."""
    live = own_cluster(2)
    workflow = live.client().submit(
        {
            "name": "hungry",
            "policies": ["more-memory"],
            "tasks": {
                "eat": {
                    "command": ["python3", "-c", EATER, "150"],
                    "needs": {"memory": "64MiB"},
                    "outputs": ["out"],
                }
            },
        }
    )
    assert workflow.wait() == "succeeded"
    view = workflow.task("eat")
    story = [row["reason"] for row in view["history"]]
    assert len(story) == 3
    assert "a policy retries it with 128 MiB" in story[0]
    assert view["needs"]["memory_bytes"] == 256 * MIB


BRANCH: dict[str, dict[str, Any]] = {
    "index": {
        "branch": "mapping",
        "command": "echo fine > index",
        "outputs": ["index"],
        "alternatives": [{"command": "echo plain > index"}],
    },
    "side": {  # runs while the branch fails
        "branch": "mapping",
        "command": "sleep 600; echo fine > side",
        "outputs": ["side"],
        "alternatives": [{"command": "echo plain > side"}],
    },
    "align": {
        "branch": "mapping",
        "command": "grep plain index > hits",
        "inputs": ["index"],
        "outputs": ["hits"],
        "alternatives": [{"command": "grep plain index > hits"}],
    },
    "other": {"command": "cat index > seen", "inputs": ["index"], "outputs": ["seen"]},
    "report": {"command": "cat side hits > out", "inputs": ["side", "hits"], "outputs": ["out"]},
}


def started(task: str, number: int) -> AttemptsStarted:
    return AttemptsStarted(attempts=(StartedAttempt(task, number, b"p", 1),), placement={})


def branch_run() -> Run:
    document = {"name": "b", "policies": ["alternatives"], "tasks": BRANCH}
    return Run("w", read_document(json.dumps(document).encode(), {}), 0.0, b"h")


def test_all_of_a_branch_begin_anew_in_the_next_way() -> None:
    run = branch_run()
    for name in ("index", "side", "align"):
        run.apply(started(name, 1), 0.0, 1)
    done = FinishedAttempt(Outcome(AttemptKey("w", "index", 1), "ok"), b"p", "succeeded")
    run.apply(AttemptsFinished(outcomes=(done,)), 1.0, 1)
    assert not any(vars_of(mend_branch(run, "mapping")))
    failed = Outcome(AttemptKey("w", "align", 1), "failed", "exit code 1", 1, cause="exit")
    again = run.consider(failed)
    assert again is not None
    assert again.instead
    rows = (FinishedAttempt(failed, b"p", "retrying"),)
    run.apply(AttemptsFinished(outcomes=rows, instead=("align",)), 2.0, 1)
    assert [run.ways[name] for name in ("index", "side", "align", "other")] == [1, 1, 1, 0]
    found = mend_branch(run, "mapping")
    assert [name for name, _ in found.reopened] == ["index"]
    assert found.running == [("side", 1, b"p")]
    run.apply(TasksReopened(tasks=tuple(found.reopened)), 3.0, 1)
    run.apply(AttemptsLost(attempts=tuple(found.lost)), 3.0, 1)
    assert not any(vars_of(mend_branch(run, "mapping"))), "once is enough"
    assert run.spec("index").command == ("bash", "-euo", "pipefail", "-c", "echo plain > index")
    assert run.tasks["align"].missing == 1 + 1, "it waits for the new index"


def test_two_tasks_of_a_branch_that_fail_together_are_one_step() -> None:
    run = branch_run()
    rows = []
    for name in ("index", "side"):
        run.apply(started(name, 1), 0.0, 1)
        failed = Outcome(AttemptKey("w", name, 1), "failed", "exit code 1", 1, cause="exit")
        again = run.consider(failed)
        assert again is not None
        assert again.instead
        rows.append(FinishedAttempt(failed, b"p", "retrying"))
    run.apply(AttemptsFinished(outcomes=tuple(rows), instead=("index", "side")), 1.0, 1)
    assert run.ways["align"] == 1
    assert run.spec("align").command is not None


def vars_of(found: Mending) -> list[object]:
    return [found.lost, found.reopened, found.skipped, found.unplaced, found.running]


@pytest.mark.parametrize(
    ("change", "trouble"),
    [
        ({"alternatives": []}, "a task of a branch must have alternatives"),
        (
            {"alternatives": [{"command": "a"}, {"command": "b"}]},
            "the same number of alternatives: side has 2, index has 1",
        ),
        ({"peers": 2, "outputs": []}, "on several peers at once can't belong to a branch"),
    ],
)
def test_branches_are_checked(change: dict[str, object], trouble: str) -> None:
    tasks = {**BRANCH, "side": {**BRANCH["side"], **change}, "report": {"command": "x"}}
    document = {"name": "b", "policies": ["alternatives"], "tasks": tasks}
    with pytest.raises(DocumentError, match=trouble) as found:
        read_document(json.dumps(document).encode(), {})
    assert "/tasks/side/branch" in str(found.value)


def test_a_branch_of_several_tasks_is_replaced(own_cluster: Callable[..., Cluster]) -> None:
    live = own_cluster(3)
    document = {"name": "b", "policies": ["alternatives"], "tasks": BRANCH}
    workflow = live.client().submit(document)
    assert workflow.wait() == "succeeded"
    # what runs in the old way is ended
    wait_for(lambda: not any("sleep\x00600" in line for line in live.processes()))
    assert workflow.read("out") == b"plain\nplain\n"
    assert [row["state"] for row in workflow.task("index")["history"]] == ["ok", "ok"]
    side = workflow.task("side")["history"]
    assert side[0]["state"] == "lost"
    assert "branch mapping has moved on to another alternative" in side[0]["reason"]
    assert len(workflow.task("other")["history"]) == 1, "what is of no branch is left alone"


def test_a_task_that_fails_is_done_in_another_way(own_cluster: Callable[..., Cluster]) -> None:
    live = own_cluster(2)
    first = {
        "command": "exit 3",
        "outputs": ["hits"],
        "alternatives": [{"command": "echo rough > hits"}],
    }
    last = {"command": "cat hits > out", "inputs": ["hits"], "outputs": ["out"]}
    workflow = live.client().submit(
        {"name": "a", "policies": ["alternatives"], "tasks": {"align": first, "report": last}}
    )
    assert workflow.wait() == "succeeded"
    assert workflow.read("out") == b"rough\n"
    story = workflow.task("align")["history"]
    assert story[0]["reason"] == "exit code 3; a policy switches it to its next alternative"
    assert workflow.task("align")["command"][-1] == "echo rough > hits"


def test_a_slow_task_is_run_a_second_time_and_the_first_result_wins(
    own_cluster: Callable[..., Cluster],
) -> None:
    live = own_cluster(3)
    slow = "[ $VALENCE_TASK = 't[5]' ] && mkdir {d}/first && exec sleep 60; sleep 0.3; echo ok > out.{i}"
    script = slow.replace("{d}", str(live.home)).replace("{i}", "{item}")
    workflow = live.client().submit(
        {
            "name": "straggler",
            "policies": ["slow-twice"],
            "tasks": {"t": {"foreach": 6, "command": script, "outputs": ["out.{item}"]}},
        }
    )
    assert workflow.wait() == "succeeded"
    view = workflow.task("t[5]")
    assert [row["state"] for row in view["history"]] == ["lost", "ok"]
    assert "a policy starts a second attempt" in view["history"][0]["reason"]
