"""The users of a simulated world: they submit workflows, follow them, and cancel some.

A user asks any peer that is up, tries again as a client would, and tells the ledger all that it was
told. All choices are drawn from the world's own generator.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from valence.protocols.consensus.placement import is_queued
from valence.protocols.engine.answers import ApiError
from valence.protocols.engine.gateway import Gateway

from .host import Host
from .ledger import FINAL

if TYPE_CHECKING:
    from .world import World

OWNER = "somebody"
SUBMISSIONS_MAX = 30  # of one workflow, until it is acknowledged
ANSWER_S = 15.0
RETRIED = (404, 409, 503, 507)  # statuses after which a user tries again

Position = tuple[int, int]  # of an event: its entry, its index in that


class Users:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        # how often the home that has just acknowledged a submission dies
        self._betrayal = self._rng.choice((0.0, 0.3))
        if world.plan.replaced:
            self._betrayal = 0.0  # so many die already
        self.following: set[str] = set()
        self.problem = "no answer"  # the last one that a user was told

    async def run(self) -> None:
        plan = self._world.plan
        for number in range(plan.workflows):
            self._world.spawn(self._submit(number))
            await asyncio.sleep(self._rng.random() * 1.2 * plan.seconds / plan.workflows)

    async def ask(self, host: Host, work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
        """The answer; None if none comes, or a problem after which a user would try again."""
        if not host.up:
            work.close()
            return None
        try:
            return await host.do(work, limit_s)
        except ApiError as problem:
            self.problem = f"{problem.status}: {problem.detail}"
            if problem.status not in RETRIED:
                self._world.fail(f"a user is told {problem.status}: {problem.detail}")
            return None

    # ----------------------------------------------------------------- submitting

    def _document(self, number: int, gangs: float) -> dict[str, Any]:
        """A few layers of tasks; some take files from the layer above."""
        rng, plan = self._rng, self._world.plan
        tasks: dict[str, Any] = {}
        above: list[str] = ["words"]
        for layer in range(rng.randint(1, 4)):
            made = []
            for i in range(rng.randint(1, plan.width)):
                size = rng.randint(2, 3) if rng.random() < gangs else 1
                name = f"t{layer}.{i}" if size == 1 else f"t{layer}.{i}-{size}"
                output = f"{'large' if rng.random() < 0.2 else 'small'}.{layer}.{i}"
                tasks[name] = {
                    "command": ["work", f"{rng.choice((0.05, 0.3, 1.0, 3.0)):g}"],
                    "inputs": rng.sample(above, min(len(above), rng.randint(1, 2))),
                    "outputs": [output if size == 1 else f"{output}.{{rank}}"],
                    "peers": size,
                    "retries": 5,
                }
                made += [output] if size == 1 else [f"{output}.{rank}" for rank in range(size)]
            above = made
        document = {
            "name": f"w{number}",
            "strategy": plan.strategy,
            "levels": "strict" if rng.random() < 0.2 else None,
            "inputs": {"words": {"text": "hello"}},
            "tasks": tasks,
        }
        if plan.strategy == "deadline":
            self._ask_for_a_promise(document, number)
        return document

    def _wants_promise(self, number: int) -> bool:
        """(Such a workflow has no tasks that need several peers.)"""
        plan = self._world.plan
        drawn = random.Random(f"promise {plan.seed} {number}").random()
        return plan.strategy == "deadline" and drawn < 0.9

    def _ask_for_a_promise(self, document: dict[str, Any], number: int) -> None:
        """Most workflows want to be done by a deadline; some deadlines can't be met."""
        rng = random.Random(f"deadline {self._world.plan.seed} {number}")
        for task in document["tasks"].values():
            task["runtime"] = float(task["command"][1])
            cpus, memory = rng.choice((1, 1, 0.5)), rng.choice((0, 0, 100, 400))
            task["needs"] = {"cpus": cpus, "memory": f"{memory}MiB"}
        if self._wants_promise(number):
            document["levels"] = None
            document["deadline"] = rng.choice((3.0, 10.0, 30.0, 90.0))
            terms = {
                "infeasible": rng.choice(("refuse", "refuse", "refuse", "earliest", "best-effort")),
                "survive": rng.choice((None, None, 0, 1)),
                "on_broken": rng.choice(("go-on", "go-on", "cancel")),
            }
            document["promise"] = {name: term for name, term in terms.items() if term is not None}

    async def _submit(self, number: int) -> None:
        rng, queue = self._rng, self._queue_sometimes()
        alone = queue is not None or self._wants_promise(number)
        document = self._document(number, 0.0 if alone else self._world.plan.gangs)
        text = json.dumps(document).encode()
        tasks = sum(task["peers"] for task in document["tasks"].values())
        key = f"key-{number}" if rng.random() < 0.3 else None
        if "deadline" in document:
            key = None  # (it may be changed on the way)
        for _ in range(SUBMISSIONS_MAX):
            host = self._any()  # (drawn even if the queue is asked)
            host = queue or host
            refusal: dict[str, Any] = {}
            workflow = await self._submit_at(host, text, tasks, key, refusal=refusal)
            if workflow is None and refusal:
                workflow = await self._after_refusal(host, document, tasks, refusal)
                text = json.dumps(document).encode()
            if workflow is not None:
                await self._acknowledged(host, workflow, tasks)
                if key is not None and rng.random() < 0.5:  # again: did that get through?
                    await self._submit_at(queue or self._any(), text, tasks, key)
                await self._follow(workflow)
                return
            await asyncio.sleep(rng.random())

    async def _after_refusal(
        self, host: Host, document: dict[str, Any], tasks: int, refusal: dict[str, Any]
    ) -> str | None:
        """The deadline can't be met: its user takes the offer, or has more time next time."""
        text = json.dumps(document).encode()
        self._world.ledger.counts["refused"] += 1
        if refusal.get("offer") and self._rng.random() < 0.5:
            await asyncio.sleep(self._rng.random())
            accepted = await self._submit_at(host, text, tasks, None, refusal["offer"])
            if accepted is not None:
                self._world.ledger.counts["offers_accepted"] += 1
                return accepted
        document["deadline"] = 2.0 * max(document["deadline"], refusal.get("earliest_in_s") or 0.0)
        return None

    def _queue_sometimes(self) -> Host | None:
        """The task queue, if there is one and this workflow goes there."""
        queue = self._world.queue
        return queue if queue is not None and self._rng.random() < 0.7 else None

    async def _submit_at(
        self,
        host: Host,
        text: bytes,
        tasks: int,
        key: str | None,
        offer: str = "",
        refusal: dict[str, Any] | None = None,
    ) -> str | None:
        """The workflow's id, once it is acknowledged."""
        options: dict[str, Any] = {"idempotency": key} if key else {}
        if offer:
            options["accept"] = offer
        submission = host.enactment.gateway.submit(text, options, OWNER, False)
        answer = await self.ask(host, _refusable(submission, refusal), ANSWER_S)
        if not isinstance(answer, tuple):
            return None
        workflow: str = answer[0]
        promised = _is_promised(json.loads(text))
        self._world.guard(lambda: self._world.ledger.accepts(workflow, tasks, key, promised))
        return workflow

    async def _acknowledged(self, host: Host, workflow: str, tasks: int) -> None:
        world = self._world
        world.say(f"peer {host.index} acknowledges {workflow}, {tasks} tasks")
        if host is world.queue:
            return  # the only one that has it: see the fault `queue`
        if self._rng.random() < self._betrayal and not world.faults.over.is_set():
            await world.faults.betray(host)

    # ----------------------------------------------------------------- following

    async def _follow(self, workflow: str) -> None:
        """Watch it through this peer or that one; now and then, cancel it."""
        rng = self._rng
        self.following.add(workflow)
        position: Position = (-1, -1)
        cancel, over = rng.random() < 0.15, False
        while not over:
            host = self._host_for(workflow)
            gateway = host.enactment.gateway
            await asyncio.sleep(rng.random())
            if cancel and rng.random() < 0.1 and host.up:
                cancel = not await self._cancel(host, gateway, workflow)
            elif not host.up:
                continue
            elif rng.random() < 0.2:
                await self._look_at(host, gateway, workflow)
            else:
                position, over = await self._read_events(host, gateway, workflow, position)
        state = ""
        while state not in FINAL:  # a home that was cut off may not know of the end yet
            host = self._host_for(workflow)
            question = host.enactment.gateway.ask("", workflow, "workflow")
            view = await self.ask(host, question, ANSWER_S)
            state = view["state"] if isinstance(view, dict) else ""
            await asyncio.sleep(0.5)
        self._tells(workflow, state)
        self.following.discard(workflow)

    async def _cancel(self, host: Host, gateway: Gateway, workflow: str) -> bool:
        view = await self.ask(host, gateway.ask("", workflow, "cancel"), ANSWER_S)
        if not isinstance(view, dict):
            return False
        self._world.ledger.cancelled.add(workflow)
        self._world.say(f"peer {host.index} acknowledges the cancel of {workflow}")
        return True

    async def _look_at(self, host: Host, gateway: Gateway, workflow: str) -> None:
        view = await self.ask(host, gateway.ask("", workflow, "workflow"), ANSWER_S)
        if isinstance(view, dict):
            self._tells(workflow, view["state"])

    async def _read_events(
        self, host: Host, gateway: Gateway, workflow: str, position: Position
    ) -> tuple[Position, bool]:
        """Read the next events: the position behind them, and whether that is the end."""
        question = gateway.ask("", workflow, "events", after=position, wait_s=3.0)
        page = await self.ask(host, question, 20.0)
        if not isinstance(page, dict):
            return position, False
        for event in page["events"]:
            seq, _, index = event["id"].partition(".")
            place = (int(seq), int(index))
            if place <= position:
                self._world.fail(f"{workflow}: event {event['id']} comes after {position}")
            position = place
            if event.get("final"):
                self._tells(workflow, event["state"])
        return position, page["over"]

    def _tells(self, workflow: str, state: str) -> None:
        self._world.guard(lambda: self._world.ledger.tells(workflow, state))

    def _host_for(self, workflow: str) -> Host:
        queue = self._world.queue
        return queue if queue is not None and is_queued(workflow) else self._any()

    def _any(self) -> Host:
        """A host that is up, unless all have crashed at once: then nobody answers."""
        for _ in range(1000):
            host = self._rng.choice(self._world.hosts)
            if host.up:
                break
        return host


def _is_promised(document: dict[str, Any]) -> bool:
    """Whether such a workflow is only accepted with a promise."""
    terms = document.get("promise", {})
    wanted = "deadline" in document and terms.get("infeasible") != "best-effort"
    return bool(document["strategy"] == "deadline" and wanted)


async def _refusable(submission: Coroutine[Any, Any, Any], refusal: dict[str, Any] | None) -> Any:
    """Notes what is said of a deadline that can't be met."""
    try:
        return await submission
    except ApiError as problem:
        if problem.status == 409 and refusal is not None:
            refusal.update(problem.more)
        raise
