"""Models of the two architectures that the paper compares with, as it describes them.

They use no code of ours. In both, each pilot asks the central queue for a task. The queue examines
all queued tasks for the one with most input files on the pilot, and serves one request at a time.
*Centralised*: pilots share files. *pre-DHT*: they do not, and also report each file to the queue.

A request takes 10 ms. A request for a task takes 75 µs more for each runnable task, so that 1,500
pilots that ask at once for one of 5,000 tasks wait ten minutes, as in the paper's Figure 5. Besides
that request, each task has a download, the report of its end, an upload, and heartbeats every 40 s
(the paper: 9 in all, and 12 with the reports of files).
"""

from __future__ import annotations

import asyncio
import heapq
import random
from typing import Any

from .field import SITES, TASK_S, Experiment, Result, document

REQUEST_S = 0.010
EXAMINE_S = 75e-6
HEARTBEAT_S = 40.0
FILE_BYTES = 20_000


class Model:
    def __init__(self, plan: Experiment) -> None:
        self.plan = plan
        self.result = Result(tasks=plan.tasks)
        self.rng = random.Random(plan.seed)
        tasks: dict[str, Any] = document(plan.kind, plan.tasks)["tasks"]
        self.reads = {name: task.get("inputs", []) for name, task in tasks.items()}
        self.makes = {name: task["outputs"][0] for name, task in tasks.items()}
        self.readers: dict[str, list[str]] = {}
        for name, files in self.reads.items():
            for file in files:
                self.readers.setdefault(file, []).append(name)
        self.runnable = {name: None for name, files in self.reads.items() if not files}
        self.missing = {name: len(files) for name, files in self.reads.items()}
        self.caches: list[set[str]] = [set() for _ in range(plan.pilots)]
        self.made_at: dict[str, str] = {}  # file → site
        self.left = plan.tasks
        self.free_at = 0.0  # the queue's server
        self.waiting = 0  # requests that it has not answered
        self.running = 0

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _ask(self, service_s: float) -> None:
        """One request, served after all earlier ones."""
        self.result.requests += 1
        begin = max(self._now(), self.free_at)
        self.free_at = begin + service_s
        self.waiting += 1
        await asyncio.sleep(self.free_at - self._now())
        self.waiting -= 1

    async def run(self) -> Result:
        pilots = [asyncio.ensure_future(self._pilot(n)) for n in range(self.plan.pilots)]
        beats = asyncio.ensure_future(self._heartbeats())
        watch = asyncio.ensure_future(self._watch())
        await asyncio.gather(*pilots)
        beats.cancel()
        watch.cancel()
        self.result.seconds = self._now()
        return self.result

    async def _watch(self) -> None:
        while True:
            self.result.asked.append((self._now(), self.result.requests))
            self.result.queued.append((self._now(), self.waiting))
            await asyncio.sleep(5.0)

    async def _heartbeats(self) -> None:
        due = [self.rng.uniform(0, HEARTBEAT_S) for _ in range(self.plan.pilots)]
        heapq.heapify(due)
        while self.left:
            await asyncio.sleep(max(0.0, due[0] - self._now()))
            heapq.heapreplace(due, due[0] + HEARTBEAT_S)
            self.result.requests += 1
            self.free_at = max(self._now(), self.free_at) + REQUEST_S

    def _best(self, cache: set[str], site: str) -> str | None:
        """The first task with most files in that cache, counting files at the site's own SE."""
        best, most = None, -1
        for name in self.runnable:
            reads = self.reads[name]
            if reads and all(self.made_at[file] != site for file in reads):
                continue
            held = sum(file in cache for file in reads)
            if held > most:
                best, most = name, held
                if reads and held == len(reads):
                    break
        return best

    async def _pilot(self, number: int) -> None:
        rng, cache, site = self.rng, self.caches[number], SITES[number % len(SITES)]
        await self._ask(REQUEST_S)  # registers
        ended: float | None = None
        while self.left:
            await self._ask(REQUEST_S + EXAMINE_S * len(self.runnable))
            name = self._best(cache, site)
            if name is None:
                await asyncio.sleep(30.0)
                continue
            del self.runnable[name]
            await self._ask(REQUEST_S)  # downloads it
            for file in self.reads[name]:
                shared = self.plan.mode == "centralised"
                where = "local" if file in cache else "peer" if shared else "origin"
                self.result.moved[where] += FILE_BYTES
                if shared:
                    cache.add(file)
            if ended is not None:
                self.result.delays.append((self._now(), self._now() - ended))
            self.running += 1
            self.result.running.append((self._now(), self.running))
            await asyncio.sleep(TASK_S * rng.uniform(0.5, 1.5))
            self.running -= 1
            self.result.running.append((self._now(), self.running))
            ended = self._now()
            cache.add(self.makes[name])
            self.made_at[self.makes[name]] = site
            await self._ask(REQUEST_S)  # its end
            await self._ask(REQUEST_S)  # its report
            if self.plan.mode == "pre-DHT":
                for _ in range(3):  # a file came, one was read, one went
                    await self._ask(REQUEST_S)
            self.left -= 1
            for reader in self.readers.get(self.makes[name], ()):
                self.missing[reader] -= 1
                if not self.missing[reader]:
                    self.runnable[reader] = None
