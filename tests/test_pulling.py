"""What the task queue makes of a master pilot's requests, whatever comes late, twice or side by
side. Simulated: the queue's own code, asked directly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sim.host import QueueHost
from sim.loop import run_out
from sim.network import Network
from valence.master.queue import OTHERS_S, Sites
from valence.protocols.config import LAN
from valence.protocols.engine.home import Home
from valence.protocols.engine.run import Run
from valence.protocols.wire.messages import (
    Capacity,
    Contact,
    Member,
    Outcome,
    PulledTasks,
    PullTasks,
    Traits,
    Work,
)
from valence.protocols.wire.rpc import Refused

SITE = "here"
ANN, BOB = b"a" * 20, b"b" * 20


def pilot(id: bytes) -> Member:
    return Member(Contact(id, "10.0.0.1", 7000), "", Capacity(1000), Traits("x86_64", "linux"), 1)


class Asked:
    """A queue with one workflow, and a site's master that asks."""

    def __init__(self, home: Home, sites: Sites, run: Run) -> None:
        self.home = home
        self.sites = sites
        self.run = run
        self.number = 0

    async def pull(self, token: int = 7, request: int | None = None, **more: object) -> PulledTasks:
        self.number += 1
        number = self.number if request is None else request
        message = PullTasks(site=SITE, token=token, request=number, **more)  # type: ignore[arg-type]
        return await self.sites.pull(message)

    async def given(self) -> Work:
        """The next attempt of the only task."""
        for _ in range(100):
            works = (await self.pull(want=1)).works
            if works:
                return works[0]
            await asyncio.sleep(0.1)
        raise AssertionError("nothing was given")


def asked(story: Callable[[Asked], Awaitable[None]], **needs: int) -> None:
    async def tell() -> None:
        host = QueueHost(Network(1), LAN, 0.0)
        host.start([])
        await asyncio.sleep(5.0)
        document: dict[str, Any] = {
            "name": "w",
            "strategy": "pilots",
            "tasks": {"x": {"command": "true"}},
        }
        document["tasks"]["x"]["needs"] = needs
        text = json.dumps(document).encode()
        id, _ = await host.enactment.gateway.submit(text, {}, "somebody", False)
        home = host.enactment.home
        run = home.remembered(id)
        assert run is not None
        await story(Asked(home, host.sites, run))

    run_out(tell())


def ended(work: Work, kind: str) -> Outcome:
    return Outcome(work.key, kind, epoch=work.epoch, started_at=1.0, ended_at=2.0)


def test_a_late_result_counts_beside_a_failure_of_a_newer_attempt() -> None:
    async def story(queue: Asked) -> None:
        await queue.pull(anew=True)
        first = await queue.given()
        await queue.pull(lost=((first.key, "its peer died"),))
        second = await queue.given()
        assert second.key.number == first.key.number + 1
        rows = ((BOB, ended(second, "failed")), (ANN, ended(first, "ok")))
        answer = await queue.pull(outcomes=rows)
        assert set(answer.kept) == {first.key, second.key}
        assert queue.run.tasks["x"].state == "succeeded"

    asked(story)


def test_a_repeat_is_answered_as_before_and_one_of_before_gets_nothing() -> None:
    async def story(queue: Asked) -> None:
        await queue.pull(anew=True)
        answer = await queue.pull(want=1)
        assert len(answer.works) == 1
        assert await queue.pull(request=queue.number, want=1) == answer
        again = await queue.pull(request=1, anew=True)
        assert again == PulledTasks(), "it was long on its way"
        assert queue.run.counts["running"] == 1, "and what was given stays given"

    asked(story)


def test_who_begins_anew_gets_no_tasks_as_it_may_be_of_long_ago() -> None:
    async def story(queue: Asked) -> None:
        answer = await queue.pull(anew=True, want=1)
        assert not answer.works
        assert (await queue.pull(token=8, want=1)).again, "another master, that has not begun"
        work = await queue.given()
        await queue.pull(token=8, anew=True, held=(work.key,))
        assert queue.run.counts["running"] == 1
        await queue.pull(token=9, anew=True)
        assert queue.run.tasks["x"].attempts[-1].state == "lost", "nobody holds it"

    asked(story)


def test_two_clusters_of_one_name_do_not_take_each_others_tasks() -> None:
    async def story(queue: Asked) -> None:
        await queue.pull(anew=True, pilots=(pilot(ANN),))
        work = await queue.given()
        with pytest.raises(Refused, match="another --site"):
            await queue.pull(token=8, anew=True, pilots=(pilot(BOB),))
        assert queue.run.counts["running"] == 1
        await queue.pull(token=8, anew=True, pilots=(pilot(ANN), pilot(BOB)), held=(work.key,))
        assert queue.run.counts["running"] == 1, "another master of the same pilots is no stranger"
        await asyncio.sleep(OTHERS_S + 1)
        await queue.pull(token=9, anew=True, pilots=(pilot(b"c" * 20),))
        assert queue.run.tasks["x"].attempts[-1].state == "lost", "the others are gone"

    asked(story)


def test_what_no_pilot_of_a_site_could_run_stays_in_the_queue_and_says_so() -> None:
    async def story(queue: Asked) -> None:
        await queue.pull(anew=True, pilots=(pilot(ANN),))
        assert not (await queue.pull(want=5)).works
        said = queue.home.waiting_for(queue.run, queue.run.tasks["x"])
        assert "needs 1 GPU, which the only peer does not have" in said
        equipped = pilot(BOB)._replace(capacity=Capacity(1000, gpus=1))
        answer = await queue.pull(want=5, pilots=(pilot(ANN), equipped))
        assert len(answer.works) == 1

    asked(story, gpus=1)
