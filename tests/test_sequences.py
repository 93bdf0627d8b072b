"""Sequences, stages and windows: the claims of the paper's section IV, and what it forgets."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.deadline.models import fork_join, laplace, layered
from bench.papers.deadline.spans import by_paper, by_whole_graph
from sim.mutants import applied
from valence.workflow import sequences
from valence.workflow.sequences import Graph, Slot, decompose, stages, windows


@pytest.mark.parametrize("wide", [1, 2, 8, 64])
def test_a_fork_join_has_two_stages_at_any_size(wide: int) -> None:
    assert len(stages(fork_join(wide))) == (2 if wide > 1 else 1)


@pytest.mark.parametrize("side", [2, 3, 4, 5, 6, 8, 10])
def test_a_laplace_diamond_is_as_wide_as_it_is_long(side: int) -> None:
    assert len(stages(laplace(side))) == 2 * side - 3 if side > 2 else True
    assert laplace(side).critical_path_s() == 2 * side - 1


def test_the_models_are_those_of_table_two() -> None:
    for graph, speedup in ((fork_join(8), 10 / 3), (laplace(3), 9 / 5)):
        assert sum(graph.lengths.values()) / graph.critical_path_s() == pytest.approx(speedup)


def test_the_critical_path_is_extracted_first() -> None:
    graph = Graph.of({"a": 1, "b": 5, "c": 2, "d": 1}, {"a": [], "b": ["a"], "c": ["a"], "d": "bc"})
    assert decompose(graph) == [("a", "b", "d"), ("c",)]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(1, 25))
    lengths = {f"t{i}": draw(st.floats(0.1, 10)) for i in range(count)}
    parents = {
        f"t{i}": [f"t{j}" for j in draw(st.sets(st.integers(0, i - 1), max_size=3))] if i else []
        for i in range(count)
    }
    return Graph.of(lengths, parents)


@given(graphs())
@settings(max_examples=200, deadline=None)
def test_sequences_keep_the_two_rules_of_figure_2(graph: Graph) -> None:
    """Only the first task has extracted parents, and only the last has extracted children."""
    extracted: set[str] = set()
    for sequence in decompose(graph):
        for above, below in pairwise(sequence):
            assert above in graph.parents[below]
            assert not extracted & set(graph.parents[below])
            assert not extracted & set(graph.children[above])
        assert not extracted & set(sequence)
        extracted.update(sequence)
    assert extracted == set(graph.lengths)


def naive(graph: Graph) -> list[float]:
    """The lengths of the sequences, by trying every path."""
    left, extracted, found = set(graph.lengths), set[str](), []

    def longest(task: str) -> tuple[float, list[str]]:
        below = [c for c in graph.children[task] if c in left]
        below = [c for c in below if not extracted & set(graph.parents[c])]
        if extracted & set(graph.children[task]):
            below = []
        rest = max((longest(c) for c in below), default=(0.0, []))
        return graph.lengths[task] + rest[0], [task, *rest[1]]

    while left:
        length, path = max(longest(task) for task in left)
        found.append(length)
        left -= set(path)
        extracted |= set(path)
    return found


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_each_sequence_is_the_longest_that_is_left(graph: Graph) -> None:
    lengths = [sum(graph.lengths[t] for t in sequence) for sequence in decompose(graph)]
    if len(set(graph.lengths.values())) == len(graph.lengths):  # (ties may be cut either way)
        assert lengths == pytest.approx(naive(graph))


@given(graphs(), st.floats(1.0, 3.0))
@settings(max_examples=200, deadline=None)
def test_on_idle_peers_every_task_has_a_window(graph: Graph, factor: float) -> None:
    assert by_whole_graph(graph, factor * graph.critical_path_s() + 1e-6)


def test_by_the_papers_rule_many_graphs_have_a_task_without_a_window() -> None:
    rng = random.Random(1)
    unequal = [layered(rng) for _ in range(100)]
    bad = sum(not by_paper(graph, 3 * graph.critical_path_s()) for graph in unequal)
    assert bad > 30
    equal = [fork_join(8), laplace(3)]  # the paper's own models hide it
    assert all(by_paper(graph, 1.1 * graph.critical_path_s()) for graph in equal)


@pytest.mark.parametrize("mutant", ["", "windows-forget-parents-to-come"])
def test_windows_leave_time_for_parents_that_are_still_to_come(mutant: str) -> None:
    graph = Graph.of({"a": 1, "b": 1, "c": 1}, {"a": [], "b": ["a"], "c": ["b"]})
    with applied(mutant):
        spans = sequences.windows(graph, {}, 0.0, 10.0)
    assert (spans["c"].start >= 2) is not bool(mutant)


def test_windows_end_where_allocated_children_begin() -> None:
    graph = Graph.of({"a": 1, "b": 1, "c": 1}, {"a": [], "b": [], "c": ["a", "b"]})
    spans = windows(graph, {"a": Slot(0, 1), "c": Slot(4, 5)}, 0.0, 10.0, apart_s=0.5)
    assert spans["b"] == (0.0, 3.5)
    assert spans["c"] == (4, 5)


def test_ten_thousand_tasks_are_decomposed_in_one_pass() -> None:
    """(A path is looked for again only where an extraction has changed something.)"""
    graph = laplace(60)
    looked = 0

    class Counted(sequences._Extraction):
        def _longest(self, task: str) -> float:
            nonlocal looked
            looked += 1
            return super()._longest(task)

    extraction = Counted(graph)
    while extraction.pop() is not None:
        pass
    assert looked < 40 * len(graph.lengths)
