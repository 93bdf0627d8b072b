"""The paper's own space, as its experiments run it: molecules of levels and tasks at their owners.

Each test names the sentence of seed 000 that it is about.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from bench.papers.chemical.engine import Engine, id_of, react, task_molecule
from bench.papers.chemical.space import STEP_S, ChemicalSpace, Experiment, Node
from sim.loop import run_out
from valence.protocols.chemistry.molecules import Call, Compound, Solution, Symbol
from valence.protocols.chemistry.notation import read_molecule, show
from valence.protocols.wire.messages import AttemptKey

Story = dict[str, Any]


def seen(monkeypatch: pytest.MonkeyPatch, nodes: int = 24, workflows: int = 3) -> Story:
    """A run of the experiment, and what happened in it."""
    story: Story = {"stored": [], "began": {}, "ended": {}, "ran": defaultdict(int), "results": []}
    store, begin, end = Engine._store, Node.start, Node._end

    def stored(self: Engine, sender: Any, message: Any) -> Any:
        story["stored"].append((self._rpc.me.id, read_molecule(message.molecule)))
        return store(self, sender, message)

    def began(self: Node, key: AttemptKey) -> None:
        story["began"][key] = asyncio.get_running_loop().time()
        story["ran"][key] += 1
        begin(self, key)

    def ended(self: Node, key: AttemptKey) -> None:
        story["ended"][key] = asyncio.get_running_loop().time()
        end(self, key)

    monkeypatch.setattr(Engine, "_store", stored)
    monkeypatch.setattr(Node, "start", began)
    monkeypatch.setattr(Node, "_end", ended)

    async def scenario() -> None:
        space = ChemicalSpace(Experiment(nodes, workflows, "paper"))
        results = space.results
        for node in space.nodes:
            entry = node.rpc.me.id
            node.engine._on_results = lambda w, entry=entry: (  # type: ignore[misc]
                story["results"].append((w, entry)), results(w)
            )  # fmt: skip
        story["space"] = space
        await space.run()
        story["tasks"] = set(space.steps)
        story["home"] = {w: n.rpc.me.id for w, n in space.home.items()}
        story["following"] = space.nodes[0].layer._members.following

    run_out(scenario())
    return story


@pytest.fixture(scope="module")
def story() -> Story:
    with pytest.MonkeyPatch.context() as patch:
        return seen(patch)


def test_section_3_1_molecules_lie_at_the_owners_of_their_hashed_ids(story: Story) -> None:
    assert story["stored"]
    for node, molecule in story["stored"]:
        kind = "task" if molecule.parts[0] == Symbol("TASK") else "level"
        id = id_of(kind, molecule.parts[1], molecule.parts[2])
        assert story["following"](id) == node


def test_section_3_1_1_a_level_has_the_form_of_a_level_molecule(story: Story) -> None:
    levels = [m for _, m in story["stored"] if m.parts[0] == Symbol("LEVEL")]
    assert all(isinstance(m.parts[-1], Solution) and m.parts[-1].molecules for m in levels)
    assert all(read_molecule(show(m)) == m for m in levels)


def test_section_3_3_3_levels_turn_ready_one_by_one(story: Story) -> None:
    ready: dict[str, list[int]] = defaultdict(list)
    for _, molecule in story["stored"]:
        if molecule.parts[0] == Symbol("LEVEL") and molecule.parts[3] == Symbol("READY"):
            ready[molecule.parts[1]].append(molecule.parts[2])
    assert all(found == list(range(len(found))) for found in ready.values())
    assert sorted(ready) == sorted(story["home"])


def test_section_3_3_3_no_task_begins_before_the_level_above_has_ended(story: Story) -> None:
    last_end: dict[tuple[str, int], float] = defaultdict(float)
    first: dict[tuple[str, int], float] = {}
    for key, at in story["ended"].items():
        level = (key.workflow, int(key.task.split(".")[0]))
        last_end[level] = max(last_end[level], at)
        first[level] = min(first.get(level, at), story["began"][key])
    for (workflow, level), at in first.items():
        if level:
            assert at > last_end[workflow, level - 1] + STEP_S / 2, "and its holder has heard of it"


def test_section_3_3_3_every_task_runs_once_and_the_entry_gets_the_results(story: Story) -> None:
    assert {(k.workflow, k.task) for k in story["ran"]} == story["tasks"]
    assert set(story["ran"].values()) == {1}
    assert dict(story["results"]) == story["home"]
    assert len(story["results"]) == len(story["home"])


def test_section_3_3_3_map_task_res_deploys_the_task_on_what_was_found_for_it() -> None:
    task = task_molecule("w", "t", 0, ["u"])
    mine, other = read_molecule('RES:"w":"t":"aa":1'), read_molecule('RES:"w":"u":"bb":2')
    found = react("mapTaskRes", task, other, mine)
    assert [type(m) for m in found] == [Call]
    assert isinstance(found[0], Call)
    assert found[0].arguments == (task, mine)


def test_section_3_3_3_a_level_that_is_not_ready_is_not_decomposed() -> None:
    tasks = Solution((task_molecule("w", "a", 1, []), task_molecule("w", "b", 1, [])))
    waiting = Compound((Symbol("LEVEL"), "w", 1, tasks))
    ready = Compound((Symbol("LEVEL"), "w", 1, Symbol("READY"), tasks))
    assert react("levelDecomp", waiting) == [waiting]
    assert react("levelDecomp", ready) == list(tasks.molecules)


def test_section_4_2_messages_are_proportional_to_tasks_and_fall_for_each_node() -> None:
    def measure(nodes: int, workflows: int) -> tuple[float, float]:
        async def scenario() -> tuple[float, float]:
            found = await ChemicalSpace(Experiment(nodes, workflows, "paper")).run()
            return found.per_task, found.messages / nodes

        return run_out(scenario())

    few, many, spread = measure(24, 2), measure(24, 6), measure(96, 6)
    assert many[0] < 2 * few[0]
    assert spread[1] < many[1]
