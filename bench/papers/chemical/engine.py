"""The paper's own space (sections 3.1 and 3.3): molecules act where their ids are owned.

There is one engine per node, and everything goes over the wire. A workflow arrives at its entry
node, which decomposes it into levels. Each level is stored at the owner of its hashed id, and so is
each task once its level is READY. The holder of a task looks for a resource. The holder of a level
counts the tasks of it that have ended, then fetches the next level and makes it READY. The holder
of the last level gives all results to the entry. The rules are the paper's Algorithm 2, on
`protocols.chemistry`. (Valence itself has a journal at a home and its keepers: here a molecule is
lost with its node, a case that the paper does not discuss.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any

from pydantic import Field

from valence.protocols.chemistry.expressions import Function
from valence.protocols.chemistry.molecules import Call, Compound, Molecule, Solution, Symbol
from valence.protocols.chemistry.notation import read_molecule, read_rules, show
from valence.protocols.chemistry.reactor import Reactor
from valence.protocols.membership.members import Members
from valence.protocols.wire.messages import (
    AttemptKey,
    Contact,
    Done,
    Key,
    Message,
    Natural,
    Word,
    numbered,
)
from valence.protocols.wire.rpc import Rpc

CALL_S = 30.0
ALGORITHM_2 = read_rules(
    """
    let workflowDecomp = replace WORKFLOW:<?tasks> by levels(<?tasks>)
    let levelDecomp = replace-one LEVEL:workflow:num:READY:<?tasks> by ?tasks
    let mapTaskRes = replace task::TASK, res::RES by system.deploy(task, res)
                     if task.isCompatibleWith(res)
    """
)
Program = Annotated[str, Field(max_length=1_000_000)]


@numbered(1000)
class Store(Message):
    """A molecule whose id this node owns."""

    molecule: Program


@numbered(1001)
class Fetch(Message):
    """Takes a level that is not READY out of the space."""

    id: Key


@numbered(1002)
class Fetched(Message):
    molecule: Program


@numbered(1003)
class TaskEnded(Message):
    key: AttemptKey


@numbered(1004)
class LevelTaskEnded(Message):
    workflow: Word
    level: Natural
    task: Word


@numbered(1005)
class Results(Message):
    workflow: Word


def id_of(kind: str, workflow: str, which: object) -> bytes:
    """A cryptographic hash (3.1)."""
    return hashlib.blake2b(f"{kind} {workflow} {which}".encode(), digest_size=20).digest()


def task_molecule(workflow: str, task: str, level: int, dests: list[str]) -> Compound:
    """TASK:id:<command:res_desc>:<DEST:…> (3.1.2), with the level that counts it."""
    work = Solution((Compound(("work", Symbol("CPU"))),))
    to = Solution(tuple(Compound((Symbol("DEST"), dest)) for dest in dests))
    return Compound((Symbol("TASK"), workflow, task, level, work, to))


def _levels(tasks: Solution) -> list[Molecule]:
    """One molecule for each level, none of them READY yet."""
    levels: dict[int, list[Molecule]] = {}
    for task in tasks.molecules:
        assert isinstance(task, Compound)
        levels.setdefault(int(task.parts[3]), []).append(task)  # type: ignore[arg-type]
    return [
        Compound((Symbol("LEVEL"), part[0].parts[1], number, Solution(tuple(part))))  # type: ignore[union-attr]
        for number, part in sorted(levels.items())
    ]


def _fits(task: Compound, resource: Compound) -> bool:
    """A resource that was captured for one task does not fit another."""
    return task.parts[1:3] == resource.parts[1:3]


def react(rule: str, *molecules: Molecule) -> list[Molecule]:
    """The result of a rule on these molecules, in a solution of their own."""
    functions: dict[str, Function] = {"levels": _levels, "isCompatibleWith": _fits}
    reactor = Reactor([ALGORITHM_2[rule], *molecules], functions)
    reactor.react()
    calls: list[Molecule] = list(reactor.take("system.deploy"))
    return calls or [m for m in reactor.molecules() if isinstance(m, Compound)]


class Engine:
    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        locate: Callable[[bytes], Awaitable[bytes]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        look_for: Callable[[AttemptKey], None],
        on_results: Callable[[str], None],
    ) -> None:
        self.held: dict[bytes, Compound] = {}  # id → a molecule that waits here
        self.tasks: dict[tuple[str, str], Compound] = {}
        self._rpc = rpc
        self._members = members
        self._locate = locate
        self._spawn = spawn
        self._look_for = look_for
        self._on_results = on_results
        self._open: dict[tuple[str, int], set[str]] = {}  # level → tasks that have not ended
        self._last: dict[str, int] = {}
        self._entry: dict[str, bytes] = {}
        rpc.on(Store, self._store)
        rpc.on(Fetch, self._fetch)
        rpc.on(TaskEnded, self._task_ended)
        rpc.on(LevelTaskEnded, self._level_task_ended)
        rpc.on(Results, self._results)

    async def submit(self, workflow: str, tasks: list[Compound]) -> None:
        """As the entry: stores each of its levels at the level's owner; the first is READY."""
        levels = react("workflowDecomp", Compound((Symbol("WORKFLOW"), Solution(tuple(tasks)))))
        levels.sort(key=lambda level: int(level.parts[2]))  # type: ignore[union-attr, arg-type]
        last = len(levels) - 1
        for number, level in enumerate(levels):
            assert isinstance(level, Compound)
            entry = self._rpc.me.id.hex()
            head = Compound((*level.parts[:3], Symbol("OF"), last, entry, level.parts[3]))
            if number:
                self._spawn(self._put(id_of("level", workflow, number), head))
            else:
                first = head
        await self._put(id_of("level", workflow, 0), _ready(first))

    async def _put(self, molecule_id: bytes, molecule: Compound) -> None:
        owner = self._members.contact(await self._locate(molecule_id))
        assert owner is not None
        await self._rpc.call(owner, Store(molecule=show(molecule)), Done, CALL_S)

    def _store(self, sender: Contact, message: Store) -> Done:
        molecule = read_molecule(message.molecule)
        assert isinstance(molecule, Compound)
        head, workflow, which = molecule.parts[0], str(molecule.parts[1]), molecule.parts[2]
        if head == Symbol("TASK"):
            self.tasks[workflow, str(which)] = molecule
            self._look_for(AttemptKey(workflow, str(which), 1))
        elif molecule.parts[3] == Symbol("READY"):
            self._activate(workflow, int(which), molecule)  # type: ignore[arg-type]
        else:
            self.held[id_of("level", workflow, which)] = molecule
        return Done()

    def _activate(self, workflow: str, number: int, level: Compound) -> None:
        """levelDecomp: one molecule per task, each sent to the owner of its id."""
        self._last[workflow], self._entry[workflow] = level.parts[5], bytes.fromhex(level.parts[6])  # type: ignore[assignment, arg-type]
        plain = Compound((*level.parts[:3], Symbol("READY"), level.parts[7]))
        tasks = react("levelDecomp", plain)
        self._open[workflow, number] = {str(t.parts[2]) for t in tasks}  # type: ignore[union-attr]
        for task in tasks:
            assert isinstance(task, Compound)
            self._spawn(self._put(id_of("task", workflow, task.parts[2]), task))

    def map_to_resource(self, key: AttemptKey, resource: bytes, lease: int) -> Call:
        """mapTaskRes: a task and the resource that was captured for it."""
        task = self.tasks[key.workflow, key.task]
        res = Compound((Symbol("RES"), key.workflow, key.task, resource.hex(), lease))
        deploy = react("mapTaskRes", task, res)[0]
        assert isinstance(deploy, Call)
        return deploy

    def _task_ended(self, sender: Contact, message: TaskEnded) -> Done:
        key = message.key
        task = self.tasks.pop((key.workflow, key.task), None)
        if task is not None:
            self._spawn(self._tell_level(key.workflow, int(task.parts[3]), key.task))  # type: ignore[arg-type]
        return Done()

    async def _tell_level(self, workflow: str, level: int, task: str) -> None:
        holder = self._members.contact(await self._locate(id_of("level", workflow, level)))
        assert holder is not None
        message = LevelTaskEnded(workflow=workflow, level=level, task=task)
        await self._rpc.call(holder, message, Done, CALL_S)

    def _level_task_ended(self, sender: Contact, message: LevelTaskEnded) -> Done:
        workflow, level = message.workflow, message.level
        left = self._open.get((workflow, level))
        if left is not None:
            left.discard(message.task)
            if not left:
                del self._open[workflow, level]
                self._spawn(self._next_level(workflow, level + 1))
        return Done()

    async def _next_level(self, workflow: str, number: int) -> None:
        if number > self._last[workflow]:
            entry = self._members.contact(self._entry[workflow])
            assert entry is not None
            await self._rpc.call(entry, Results(workflow=workflow), Done, CALL_S)
            return
        level_id = id_of("level", workflow, number)
        holder = self._members.contact(await self._locate(level_id))
        assert holder is not None
        answer = await self._rpc.call(holder, Fetch(id=level_id), Fetched, CALL_S)
        level = read_molecule(answer.molecule)
        assert isinstance(level, Compound)
        message = Store(molecule=show(_ready(level)))  # under the same id, so at the same node
        await self._rpc.call(holder, message, Done, CALL_S)

    def _fetch(self, sender: Contact, message: Fetch) -> Fetched:
        return Fetched(molecule=show(self.held.pop(message.id)))

    def _results(self, sender: Contact, message: Results) -> Done:
        self._on_results(message.workflow)
        return Done()


def _ready(level: Compound) -> Compound:
    return Compound((*level.parts[:3], Symbol("READY"), *level.parts[3:]))
