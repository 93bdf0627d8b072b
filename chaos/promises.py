"""Workflows with deadlines on real peers: beside endless other work, with deaths, with overruns."""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from valence.client import FINAL, Client, Problem, WorkflowHandle

from .processes import PeerProcesses, until

PEERS, CPUS = 8, 4
WIDE, TASK_S = 4, 1.0
WORKFLOWS = 200
#: of all cores, what promises may take; the test asks for so much of it
PROMISED_SHARE = 0.7
BOOKED_S = 1.1 * TASK_S + 0.2
KILL_EVERY_S, KILLS_S, BACK_S = 20.0, 300.0, 4.0
LIMIT_S = 240.0
MANY_PEERS, REFUSALS = 100, 100


def fork_join(
    name: str, deadline_s: float, wide: int = WIDE, takes: Callable[[], float] = lambda: TASK_S
) -> dict[str, Any]:
    """One task, some after it, one after them; each says that it takes `TASK_S`."""

    def task(command: str, **more: Any) -> dict[str, Any]:
        return {"command": f"sleep {takes():g}; {command}", "runtime": TASK_S, **more}

    tasks = {"fork": task("echo > f", outputs=["f"])}
    middle = [f"m{i}" for i in range(wide)]
    tasks |= {m: task(f"cat f > {m}", inputs=["f"], outputs=[m]) for m in middle}
    tasks["join"] = task("cat m* > j", inputs=middle, outputs=["j"])
    return {"name": name, "deadline": f"{deadline_s:g}s", "tasks": tasks}


class Endless:
    """Work without deadlines, always more of it than there is room for."""

    def __init__(self, client: Client, slots: int, seconds: float) -> None:
        self._client, self._slots, self._seconds = client, slots, seconds
        self.workflows: list[WorkflowHandle] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def _feed(self) -> None:
        while not self._over.is_set():
            nap = {"foreach": 2 * self._slots, "command": ["sleep", f"{self._seconds:g}"]}
            with contextlib.suppress(Exception):
                self.workflows.append(self._client.submit({"name": "naps", "tasks": {"nap": nap}}))
                while not self._over.is_set() and self._waiting() < self._slots:
                    break
            while not self._over.wait(0.5):
                with contextlib.suppress(Exception):
                    if self._waiting() < self._slots:
                        break

    def _waiting(self) -> int:
        """Tasks that could begin now if there were room."""
        counts = [w.view()["counts"] for w in self.workflows[-4:]]
        return sum(c.get("pending", 0) + c.get("waiting", 0) for c in counts)

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)
        for workflow in self.workflows:
            with contextlib.suppress(Exception):
                workflow.cancel()


def _ends(promised: list[WorkflowHandle], within_s: float) -> list[dict[str, Any]]:
    """The last views of workflows, once they are over."""
    views = []
    deadline = time.monotonic() + within_s
    for workflow in promised:

        def view(workflow: WorkflowHandle = workflow) -> dict[str, Any] | None:
            seen = workflow.view()
            return seen if seen["state"] in FINAL else None

        views.append(until(view, max(1.0, deadline - time.monotonic()), every_s=0.2))
    return views


def _outcome(views: list[dict[str, Any]]) -> dict[str, Any]:
    states = Counter(view["promise"]["state"] for view in views)
    causes = Counter(v["promise"]["cause"] for v in views if v["promise"]["state"] == "broken")
    kept = 100 * states["kept"] / max(1, len(views))
    broken = {f"broken_by_{cause}": count for cause, count in causes.items()}
    return {"promised": len(views), "kept_percent": kept, **broken}


def _attempts(workflow: WorkflowHandle) -> Iterator[dict[str, Any]]:
    for row in workflow.tasks():
        if row["attempts"]:
            yield from workflow.task(row["id"])["history"]


def _slot_s(workflows: list[WorkflowHandle], start: float, end: float) -> float:
    used_s = 0.0
    for workflow in workflows:
        for attempt in _attempts(workflow):
            began, ended = attempt["started_at"], attempt["ended_at"] or end
            if began:
                used_s += max(0.0, min(ended, end) - max(began, start))
    return used_s


def promises(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """200 promised workflows, 70 % of the cores promised, beside endless other work."""
    rng = random.Random(options.seed)
    each_s = BOOKED_S * (WIDE + 2)
    every_s = each_s / (PROMISED_SHARE * PEERS * CPUS)
    with contextlib.closing(PeerProcesses(home, PEERS, "--cpus", str(CPUS))) as cluster:
        clients = [cluster.client(row) for row in cluster.rows()]
        other = Endless(clients[0], PEERS * CPUS, 2.0)
        time.sleep(3.0)
        promised: list[WorkflowHandle] = []
        refused, start = 0, time.time()
        for number in range(options.times or WORKFLOWS):
            time.sleep(max(0.0, start + number * every_s - time.time()))
            document = fork_join(f"p{number}", 30.0)
            try:
                promised.append(rng.choice(clients).submit(document))
            except Problem as problem:
                refused += problem.infeasible
        end = time.time()
        views = _ends(promised, LIMIT_S)
        other.close()
        stopped = sum("made way" in attempt["reason"] for w in promised for attempt in _attempts(w))
        room_s = PEERS * CPUS * (end - start)
        best_effort = 100 * _slot_s(other.workflows, start, end) / room_s
        outcome = _outcome(views)
        return {
            "right": outcome["kept_percent"] == 100 and not stopped and best_effort >= 20,
            **outcome,
            "refused": refused,
            "promised_tasks_stopped": stopped,
            "promised_percent_of_cores": 100 * len(promised) * each_s / room_s,
            "other_work_percent_of_cores": best_effort,
        }


def promise_deaths(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """A peer is killed every 20 s for five minutes; workflows want to survive one death."""
    rng = random.Random(options.seed)
    seconds = float(options.times or KILLS_S)
    with contextlib.closing(PeerProcesses(home, PEERS, "--cpus", str(CPUS))) as cluster:
        promised: list[WorkflowHandle] = []
        refused = unanswered = kills = 0
        start = time.monotonic()
        kill_at, back = start + KILL_EVERY_S / 2, (0.0, "")
        while time.monotonic() < start + seconds:
            document = {**fork_join(f"p{len(promised)}", 60.0), "promise": {"survive": 1}}
            try:
                promised.append(cluster.client(rng.choice(cluster.up())).submit(document))
            except Problem as problem:
                refused += problem.infeasible
                unanswered += not problem.infeasible
            except Exception:
                unanswered += 1
            if back[1] and time.monotonic() > back[0]:
                cluster.restart(back[1])
                back = (0.0, "")
            if time.monotonic() > kill_at:
                victim = rng.choice(cluster.up())["id"]
                cluster.kill(victim)
                kills += 1
                kill_at += KILL_EVERY_S
                back = (time.monotonic() + BACK_S, victim)
            time.sleep(1.0)
        if back[1]:
            cluster.restart(back[1])
        anyone = cluster.anyone()
        views = _ends([anyone.workflow(w.id) for w in promised], LIMIT_S)
        rebooked = sum(view["promise"]["rebooked"] for view in views)
        outcome = _outcome(views)
        stands_s = _home_killed(cluster)
        return {
            "right": outcome["kept_percent"] >= 99 and max(stands_s) <= 5.0,
            **outcome,
            "kills": kills,
            "refused": refused,
            "not_acknowledged": unanswered,
            "tasks_rebooked": rebooked,
            "new_home_affirms_after_s": max(stands_s),
        }


def _home_killed(cluster: PeerProcesses, times: int = 5) -> list[float]:
    """The home is killed right after its 201: how long until another has all slots confirmed."""
    took = []
    until(lambda: len(cluster.anyone().peers()) == PEERS and len(cluster.up()) == PEERS, 60)
    for turn in range(times):
        row = cluster.up()[turn % PEERS]
        client = cluster.client(row)
        client.peers()
        workflow = client.submit(fork_join(f"h{turn}", 60.0))
        cluster.kill(row["id"])
        killed = time.monotonic()
        other = cluster.anyone(row["id"])

        def confirmed() -> bool:
            view = other.workflow(workflow.id).view()  # noqa: B023
            promise = view["promise"]
            return bool(promise["confirmed"] or promise["state"] == "kept")

        until(confirmed, 60, every_s=0.05)
        took.append(time.monotonic() - killed)
        (view,) = _ends([other.workflow(workflow.id)], 90)
        assert view["promise"]["state"] == "kept", view["promise"]
        cluster.restart(row["id"])
        until(lambda: len(cluster.up()) == PEERS, 30)
        time.sleep(2.0)
    return took


def refusals(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """100 peers: deadlines that can't be met, each asked for again with the earliest that can."""
    count = options.times or REFUSALS
    with contextlib.closing(PeerProcesses(home, MANY_PEERS, "--cpus", "1")) as cluster:
        client = cluster.anyone()
        took: list[float] = []
        again = offers = 0
        for number in range(count):
            document = fork_join(f"r{number}", 2.0, wide=8)
            start = time.monotonic()
            try:
                client.submit(document)
                raise AssertionError("it can't be done in that time")
            except Problem as problem:
                refusal = problem
            if not refusal.infeasible:
                raise refusal
            took.append(time.monotonic() - start)
            if number % 2:
                document["deadline"] = f"{refusal.earliest_in_s or 0.0:.3f}s"
            with contextlib.suppress(Problem):
                accept = None if number % 2 else refusal.offer
                workflow = client.submit(document, accept=accept)
                again += number % 2
                offers += 1 - number % 2
                workflow.cancel()
        took.sort()
        asked = count // 2
        return {
            "right": took[int(0.99 * count) - 1] <= 1.0 and again >= 0.99 * asked,
            "refused": len(took),
            "median_ms": 1000 * statistics.median(took),
            "99_percent_ms": 1000 * took[int(0.99 * count) - 1],
            "earliest_accepted_percent": 100 * again / asked,
            "offers_accepted_percent": 100 * offers / (count - asked),
        }


def plans(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """How long a promise takes on eight peers: of 10 tasks, and of 1,000."""
    with contextlib.closing(PeerProcesses(home, PEERS, "--cpus", str(CPUS))) as cluster:
        client = cluster.anyone()
        small = [_accepted_s(client, 8, 600.0) for _ in range(options.times or 50)]
        large = [_accepted_s(client, 998, 3600.0) for _ in range(5)]
        return {
            "right": statistics.median(small) <= 0.05 and statistics.median(large) <= 2.0,
            "10_tasks_median_ms": 1000 * statistics.median(small),
            "1000_tasks_median_s": statistics.median(large),
        }


def _accepted_s(client: Client, wide: int, deadline_s: float) -> float:
    document = fork_join("timed", deadline_s, wide)
    start = time.monotonic()
    workflow = client.submit(document)
    took_s = time.monotonic() - start
    workflow.cancel()
    return took_s


def overruns(options: argparse.Namespace, home: Path) -> dict[str, Any]:
    """A fifth of the tasks takes three times as long as was said: nobody else pays for it."""
    rng = random.Random(options.seed)
    every_s = BOOKED_S * (WIDE + 2) / (PROMISED_SHARE * PEERS * CPUS)
    innocent: set[str] = set()
    with contextlib.closing(PeerProcesses(home, PEERS, "--cpus", str(CPUS))) as cluster:
        clients = [cluster.client(row) for row in cluster.rows()]
        promised: list[WorkflowHandle] = []
        for number in range(options.times or WORKFLOWS // 2):
            slow = number % 2 == 0

            def takes(slow: bool = slow) -> float:
                return 3 * TASK_S if slow and rng.random() < 0.4 else TASK_S

            with contextlib.suppress(Problem):
                document = fork_join(f"p{number}", 12.0, takes=takes)
                promised.append(rng.choice(clients).submit(document))
                innocent |= set() if slow else {promised[-1].id}
            time.sleep(every_s)
        views = _ends(promised, LIMIT_S)
        outcome = _outcome(views)
        hurt = sum(v["id"] in innocent and v["promise"]["state"] == "broken" for v in views)
        return {"right": not hurt, **outcome, "others_promises_broken": hurt}
