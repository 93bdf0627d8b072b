"""How many graphs are left with a task that has no window, by the paper's rule and by ours.

Peers are idle, equal and as many as one likes, so only the rule itself can fail.
"""

from __future__ import annotations

from valence.workflow.sequences import Graph, Slot, paper_windows, stages, windows


def by_paper(graph: Graph, deadline: float) -> bool:
    """True if every sequence has a window by section IV: from its allocated parents to its
    allocated children. Each is placed as early as that lets it."""
    slots: dict[str, Slot] = {}
    for stage in stages(graph):
        for sequence in stage:
            start, end = paper_windows(graph, sequence, slots, 0.0, deadline)
            if start + sum(graph.lengths[t] for t in sequence) > end + 1e-9:
                return False
            for task in sequence:
                slots[task] = Slot(start, start + graph.lengths[task])
                start = slots[task].end
    return True


def by_whole_graph(graph: Graph, deadline: float) -> bool:
    """The same with the windows of `workflow.sequences`."""
    slots: dict[str, Slot] = {}
    for stage in stages(graph):
        spans = windows(graph, slots, 0.0, deadline)
        for sequence in stage:
            free_at = 0.0
            for task in sequence:
                start = max(free_at, spans[task].start)
                free_at = start + graph.lengths[task]
                if free_at > spans[task].end + 1e-9:
                    return False
                slots[task] = Slot(start, free_at)
    return True
