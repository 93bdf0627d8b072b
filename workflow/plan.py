"""Plans over a DAG: topological order, cycles, levels and upward ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .model import Workflow

#: a task's run time in a plan if its document does not estimate it
RUNTIME_S_GUESS = 1.0


def order(parents: Mapping[str, Sequence[str]]) -> list[str]:
    """Tasks, each after its parents; tasks on or behind a cycle are left out."""
    missing = {task: len(set(above)) for task, above in parents.items()}
    children: dict[str, list[str]] = {}
    for task, above in parents.items():
        for parent in set(above):
            children.setdefault(parent, []).append(task)
    ready = [task for task, count in missing.items() if count == 0]
    for task in ready:  # grows while it is walked
        for child in children.get(task, ()):
            missing[child] -= 1
            if missing[child] == 0:
                ready.append(child)
    return ready


def cycle(parents: Mapping[str, Sequence[str]]) -> list[str] | None:
    """One cycle as a path `a → b → a`, in the direction in which work flows; or None."""
    left = set(parents) - set(order(parents))
    if not left:
        return None
    # every task left has a parent that is left too: walk up until a task repeats
    task = min(left)
    seen: dict[str, int] = {}
    path: list[str] = []
    while task not in seen:
        seen[task] = len(path)
        path.append(task)
        task = min(p for p in parents[task] if p in left)
    loop = [*path[seen[task] :], task]
    return loop[::-1]


def levels(workflow: Workflow) -> dict[str, int]:
    """0 for a task with no parents, otherwise one more than its deepest parent."""
    level: dict[str, int] = {}
    for task in workflow.tasks:
        level[task] = 1 + max((level[p] for p in workflow.parents[task]), default=-1)
    return level


def upward_ranks(
    workflow: Workflow, children: Mapping[str, Sequence[str]] | None = None
) -> dict[str, float]:
    """Seconds from a task's start to the end of the workflow along its longest path.

    HEFT's upward rank with equal machines and free transfers: no more is known before placement.
    """
    if children is None:
        children = workflow.children()
    ranks: dict[str, float] = {}
    for task in reversed(list(workflow.tasks)):
        spec = workflow.tasks[task]
        own = RUNTIME_S_GUESS if spec.runtime_s is None else spec.runtime_s
        below = children[task]
        ranks[task] = own + max(ranks[c] for c in below) if below else own
    return ranks
