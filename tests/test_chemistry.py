"""The chemical machine: each test of the first part is named after a sentence of seed 000."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from valence.protocols.chemistry.expressions import BUILT_IN
from valence.protocols.chemistry.molecules import (
    Call,
    Compound,
    Molecule,
    Rule,
    Solution,
    Symbol,
    size_of,
    typed,
)
from valence.protocols.chemistry.notation import (
    ChemistryError,
    read,
    read_molecule,
    read_rule,
    read_rules,
    show,
    show_program,
)
from valence.protocols.chemistry.reactor import Budget, Reactor

MAX = "replace x :: int, y :: int by x if x ≥ y in ⟨2, 4, 5, 7, 9⟩"


def floating(text: str, **functions: object) -> Reactor:
    reactor = Reactor(read(text).solution.molecules, functions)  # type: ignore[arg-type]
    reactor.react()
    return reactor


def data(reactor: Reactor) -> list[Molecule]:
    return [m for m in reactor.molecules() if not isinstance(m, Rule)]


# --------------------------------------------------------------------------- section 2


def test_section_2_the_program_that_extracts_the_maximum() -> None:
    assert data(floating(MAX)) == [9]


def test_section_2_reactions_go_on_until_inertia() -> None:
    reactor = Reactor(read(MAX).solution.molecules)
    assert not reactor.inert
    assert reactor.react() == 4  # each consumes two of five, and makes one
    assert reactor.inert
    assert reactor.react() == 0


def test_section_2_inertia_is_a_stable_state_not_an_end_new_molecules_go_on() -> None:
    reactor = floating(MAX)
    reactor.add(3)
    reactor.add(12)
    assert reactor.react() == 2
    assert data(reactor) == [12]


def test_section_2_the_result_is_deterministic_whatever_the_order() -> None:
    values = list(range(30))
    for seed in range(10):
        random.Random(seed).shuffle(values)
        reactor = Reactor([read_rule("replace x::int, y::int by x if x >= y"), *values])
        reactor.react()
        assert data(reactor) == [29]


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=30))
def test_section_2_mutual_exclusion_by_the_atomic_capture_of_the_reactants(
    values: list[int],
) -> None:
    """Every molecule is consumed once: what pairs make of them has the sum they had."""
    reactor = Reactor([read_rule("replace x::int, y::int by x + y"), *values])
    assert reactor.react() == len(values) - 1
    assert data(reactor) == [sum(values)]


def test_section_2_rules_are_regular_molecules_consumed_and_produced() -> None:
    reactor = floating(
        """
        let add = replace x::int, y::int by x + y
        let swap = replace-one max, GO by add
        let max = replace x::int, y::int by x if x >= y
        in <swap, max, 1, 2, 3>
        """
    )
    assert data(reactor) == [3]
    for one in (Symbol("GO"), 4, 5):  # it modifies its own flow on the spot
        reactor.add(one)
        reactor.react()
    assert data(reactor) == [12]
    assert [r.name for r in reactor.molecules() if isinstance(r, Rule)] == ["add"]


def test_section_2_the_presence_of_a_molecule_is_enough_to_trigger() -> None:
    reactor = floating("let done = replace TASK:id:DONE by LOG:id in <done, TASK:7:RUNNING>")
    assert data(reactor) == [read_molecule("TASK:7:RUNNING")]
    reactor.add(read_molecule("TASK:7:DONE"))
    reactor.react()
    assert read_molecule("LOG:7") in data(reactor)


# --------------------------------------------------------------------------- algorithms 1 and 2

ALGORITHM_1 = """
<  // Multiset (Solution)
  TASK:1:<"fetch":res_desc_1>:<DEST:2, DEST:3>,   // TASK 1 definition
  TASK:2:<"left":res_desc_2>:<DEST:4>,
  TASK:3:<"right":res_desc_3>:<DEST:4>,
  TASK:4:<"join":res_desc_4>:<>
>
"""
ALGORITHM_2 = """
let workflowDecomp = replace WORKFLOW:<?tasks> by levels(<?tasks>)
let levelDecomp = replace-one LEVEL:num:READY:<?tasks> by ?tasks
let mapTaskRes = replace task::TASK, res::RES by system.deploy(task, res)
                 if task.isCompatibleWith(res)
"""


def test_algorithm_1_is_read_as_it_is_printed() -> None:
    found = read(ALGORITHM_1).solution
    assert len(found.molecules) == 4
    assert read(show(found)).solution == found
    assert 'TASK:4:<"join":res_desc_4>:<>' in show(found)


def test_algorithm_2_from_workflow_to_levels_to_tasks_to_resources() -> None:
    def levels(tasks: Solution) -> list[Molecule]:
        """By their distance from the exit task, as section 3.1.1 says."""
        return [
            read_molecule(f"LEVEL:{n}{state}:{show(Solution(part))}")
            for n, state, part in (
                (1, ":READY", tasks.molecules[:1]),
                (2, "", tasks.molecules[1:3]),
                (3, "", tasks.molecules[3:]),
            )
        ]

    def fits(task: Compound, resource: Compound) -> bool:
        return task.parts[1] == resource.parts[1]

    rules = read_rules(ALGORITHM_2)
    workflow = Compound((Symbol("WORKFLOW"), read(ALGORITHM_1).solution))
    reactor = Reactor(
        [*rules.values(), workflow, read_molecule("RES:1"), read_molecule("RES:2")],
        {"levels": levels, "isCompatibleWith": fits},
    )
    reactor.react()
    deployed = reactor.take("system.deploy")
    assert [call.arguments[1] for call in deployed] == [read_molecule("RES:1")]
    left = {show(m).split(":")[0] for m in data(reactor)}
    assert left == {"LEVEL", "RES"}, "other levels wait, the resource was consumed"
    assert "levelDecomp" not in [r.name for r in reactor.molecules() if isinstance(r, Rule)]


def test_the_notation_is_printed_so_that_it_reads_the_same() -> None:
    for text in (
        MAX,
        f"{ALGORITHM_2} in <workflowDecomp, levelDecomp, mapTaskRes>",
        'replace x, <y::int, ?w> by x:(y + 1) * 2:<?w>, "a\\"b\\n" if not (x = y or y > 2) in <-1>',
        "replace-one a::rule, LEVEL:n:<b, ?w> by in <1.5, true, f(1, A), <>>",
    ):
        program = read(text)
        assert read(show_program(program)) == program


# --------------------------------------------------------------------------- how it is quick


def test_ten_thousand_integers_find_their_maximum_in_few_steps() -> None:
    """Counted, not timed: a pair for each reaction is tried, not all pairs."""
    values = list(range(10_000))
    random.Random(1).shuffle(values)
    reactor = Reactor([read_rule("replace x::int, y::int by x if x >= y"), *values])
    assert reactor.react() == 9_999
    assert reactor.steps < 250_000  # with each: the two, a condition of three, what it makes


def test_joined_by_a_key_it_is_looked_up_not_tried() -> None:
    rule = read_rule("replace TASK:id:RUNNING, DONE:id by LOG:id")
    tasks = [read_molecule(f"TASK:{n}:RUNNING") for n in range(2000)]
    reactor = Reactor([rule, *tasks])
    reactor.react()
    for n in range(0, 2000, 2):
        reactor.add(read_molecule(f"DONE:{n}"))
    assert reactor.react() == 1000
    assert reactor.steps < 12_000, "each with its parts: by its key there is one"


# --------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("text", "line", "column", "about"),
    [
        ("<1, 2", 1, 6, "expected '>'"),
        ("<1,\n  §>", 2, 3, "unexpected character"),
        ("replace x by y in <1>", 1, 9, "y is not defined"),
        ("replace x::foo by x in <1>", 1, 12, "unknown type"),
        ("replace x + 1 by x in <1>", 1, 9, "can't compute"),
        ("replace ?w by 1 in <1>", 1, 9, "rest of a solution"),
        ("let a = replace x by x\nlet a = replace y by y in <1>", 2, 5, "defined twice"),
        ("replace by 1 in <1>", 1, 9, "at least one"),
        ("<1> 2", 1, 5, "after the end"),
        ("<" * 60 + ">" * 60, 1, 41, "levels deep"),
        ("<x + 1>", 1, 1, "inside rules only"),
        ("system.deploy", 1, 1, "must be a call"),
    ],
)
def test_errors_name_their_place(text: str, line: int, column: int, about: str) -> None:
    with pytest.raises(ChemistryError) as found:
        read(text)
    assert (found.value.line, found.value.column) == (line, column)
    assert about in str(found.value)


@given(st.text(alphabet='<>⟨⟩:,?x1A"+-*()=. \nreplacbyifnot', max_size=60))
def test_whatever_is_written_is_read_or_refused_by_name(text: str) -> None:
    try:
        found = read(text)
    except ChemistryError:
        return
    assert read(show_program(found)) == found


def test_conditions_reach_nothing_outside() -> None:
    for call in ('__import__("os")', 'open("/etc/passwd")', 'eval("1")', "x.__class__()"):
        reactor = floating(f"replace x::int by {call} if x > 0 in <1>")
        assert all(isinstance(m, Call) for m in data(reactor)), "a molecule, and nothing happens"
    assert set(BUILT_IN) == {"min", "max", "abs", "floor", "len", "part", "has"}


def test_what_can_not_be_computed_does_not_react_and_says_so() -> None:
    reactor = floating("let half = replace x::int, y::int by x / y in <half, 0, 0>")
    assert data(reactor) == [0, 0]
    assert reactor.troubles == ["half has no product: division by zero"]
    assert data(floating("replace x::int by 1 if x > A in <2>")) == [2]
    grown = floating("replace x::int by x * x if x > 1 in <10>")
    assert data(grown) == [10**16], "numbers stay small"


def test_a_reaction_without_end_is_ended() -> None:
    reactor = Reactor([read_rule("replace x::int by x + 1"), 1])
    with pytest.raises(ChemistryError, match="still reacting after 1,000"):
        reactor.react(1000)


def test_a_search_without_end_is_ended_too() -> None:
    rule = read_rule("replace <a, b, c, d, e, f, ?w> by 1 if a + b + c + d + e + f > 1000")
    reactor = Reactor([rule, Solution(tuple(range(40)))])
    with pytest.raises(ChemistryError, match="5,000 steps"):
        reactor.react(steps_max=5000)


def test_one_true_and_one_and_a_float_are_different_molecules() -> None:
    reactor = floating("replace x::int by SEEN:x in <1, true, 1.0>")
    assert sorted(map(show, data(reactor))) == ["1.0", "SEEN:1", "true"]
    assert Solution((1,)) != Solution((True,))
    assert typed(1) != typed(1.0)


def test_a_solution_inside_comes_to_rest_before_it_is_seen() -> None:
    reactor = floating(
        """
        let max = replace x::int, y::int by x if x >= y
        let out = replace-one <max, x::int> by RESULT:x
        in <out, <max, 3, 8, 5>>
        """
    )
    assert data(reactor) == [read_molecule("RESULT:8")]


# --------------------------------------------------------------------------- who means it ill


@pytest.mark.parametrize(
    "rules",
    [
        ["replace A:x by A:(x:x)"],  # a tree that is shared: 2 to the power of its depth
        ["replace A:x by A:<x, x>"],
        ["replace A:x by A:(x:1)"],  # one that only gets deeper
        ["replace A:x by A:<B:x, B:x, C:x>", "replace B:x by <A:x>"],  # inward
    ],
)
def test_what_grows_without_end_is_stopped_and_said(rules: list[str]) -> None:
    reactor = Reactor(map(read_rule, rules), size_max=1000)
    try:
        reactor.happened(read_molecule("A:1"), Budget(1000, 20_000))
    except ChemistryError as error:
        assert "still reacting" in str(error) or "deep" in str(error)
    else:
        assert any("too large" in text for text in reactor.troubles)
    assert all(size_of(m) <= 1000 for m in reactor.molecules())


def test_what_reacts_inside_of_a_molecule_is_paid_for_by_the_same_budget() -> None:
    program = read("let spin = replace x::int by x + 1 in <A:<spin, 1>>")
    [molecule] = [m for m in program.solution.molecules if isinstance(m, Compound)]
    with pytest.raises(ChemistryError, match="500 steps"):
        Reactor().happened(molecule, Budget(100_000, 500))


@pytest.mark.parametrize(
    "text",
    [
        "replace x::int by " + " + ".join(["x"] * 5000),
        "replace x::int by " + "-" * 5000 + "x",
        "replace x by 1 if " + "not " * 5000 + "true",
        "replace x::int by x if " + " and ".join(["x = 1"] * 5000),
        "replace x by " + "(" * 5000 + "x" + ")" * 5000,
        "replace x by " + "9" * 5000,
        "replace x by 1e400",
    ],
)
def test_what_would_be_too_much_to_compute_is_refused_when_it_is_read(text: str) -> None:
    with pytest.raises(ChemistryError):
        read_rule(text)
