"""`python -m sim` runs one simulated disaster, or many; a run is its seed."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

from valence.protocols.config import LAN, OVERLAYS
from valence.workflow import strategies

from .loop import run_out, with_fixed_hashes
from .mutants import EXPECTED, MUTANTS, SEEN_BY, WORLDS, applied
from .plan import CROWD, CROWD_PEERS, FAULTS, Plan, WorldReport
from .world import simulate

#: a run that takes this long in real time is taken for an endless loop
REAL_S_MAX = 120
CROWD_REAL_S_MAX = 3600
RUNS_PER_PROCESS = 4
SHRINK_RUNS_MAX = 150


class TooLong(BaseException):
    """A run has taken too long in real time."""


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooLong


def one(plan: Plan) -> WorldReport:
    signal.signal(signal.SIGALRM, _too_long)
    limit_s = CROWD_REAL_S_MAX if plan.crowded else REAL_S_MAX
    signal.alarm(limit_s)
    try:
        with applied(plan.mutant):
            return run_out(simulate(plan))
    except TooLong:
        return WorldReport(plan.seed, f"the run does not end within {limit_s} s of real time")
    finally:
        signal.alarm(0)


def _silently() -> None:
    """Silence the warnings of coroutines that a world leaves behind; for a process of its own."""
    sys.unraisablehook = lambda _: None
    warnings.simplefilter("ignore", RuntimeWarning)


def many(listed: list[Plan], jobs: int | None) -> Iterator[tuple[Plan, WorldReport]]:
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, _silently, maxtasksperchild=RUNS_PER_PROCESS) as pool:
        yield from zip(listed, pool.imap(one, listed), strict=True)


def plans(options: argparse.Namespace, mutant: str) -> list[Plan]:
    faults = tuple(options.faults.split(",")) if options.faults else FAULTS
    faults = () if faults == ("none",) else faults
    listed = [
        Plan(
            seed=seed,
            peers=options.peers,
            workflows=options.workflows,
            seconds=options.seconds,
            every_s=options.every_s,
            keepers=options.keepers,
            replaced=options.replaced,
            gangs=options.gangs,
            majority_lost_s=options.majority_lost,
            strategy="pilots" if options.queue else options.strategy,
            queue=options.queue,
            overlay=options.overlay,
            slice_bytes=options.slice_bytes,
            faults=faults,
            config=CROWD if options.peers >= CROWD_PEERS else LAN,
            mutant=mutant,
        )
        for seed in range(options.seed, options.seed + options.seeds)
    ]
    return [replace(plan, **WORLDS.get(mutant, {})) for plan in listed]


def tell(report: WorldReport, plan: Plan, trace: bool) -> None:
    if trace or report.violation:
        print("\n".join(report.trace[-200:]))
    counts = ", ".join(f"{v:,} {k}" for k, v in sorted(report.counts.items()))
    print(f"seed {plan.seed}: {report.virtual_s:.0f} s, {report.messages:,} messages, {counts}")
    if report.violation:
        print(f"VIOLATION: {report.violation}\nreplay it: {plan.command()}")


def smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with a little less in them, the boldest cuts first."""
    for seconds in (plan.seconds / 2, plan.seconds * 0.8):
        if seconds >= 5:
            yield replace(plan, seconds=round(seconds, 1))
    for workflows in (1, plan.workflows // 2, plan.workflows - 1):
        if 1 <= workflows < plan.workflows:
            yield replace(plan, workflows=workflows)
    for fault in plan.faults:
        yield replace(plan, faults=tuple(f for f in plan.faults if f != fault))
    if plan.peers > 4:
        yield replace(plan, peers=plan.peers - 1)


def shrink(plan: Plan, report: WorldReport, jobs: int | None) -> tuple[Plan, WorldReport]:
    """A smaller run that goes wrong, too, if a few tries find one."""
    tries = SHRINK_RUNS_MAX
    while tries > 0:
        listed = [p for p in smaller(plan) if p.faults or not plan.faults][:tries]
        tries -= len(listed)
        broken = [(p, r) for p, r in many(listed, jobs) if r.violation]
        shorter = [(p, r) for p, r in broken if len(r.trace) < len(report.trace)]
        if not shorter:
            break
        plan, report = min(shorter, key=lambda row: len(row[1].trace))
    return plan, report


def hunt(options: argparse.Namespace) -> int:
    """Break each rule in turn, until a run notices it. Returns the exit code."""
    survived = []
    for name in MUTANTS:
        if name in SEEN_BY:
            print(f"{name}: too rare for random worlds; seen by {SEEN_BY[name]}")
            continue
        for plan, report in many(plans(options, name), options.jobs):
            if report.violation and EXPECTED.get(name, "") in report.violation:
                print(f"{name}: noticed by seed {plan.seed}: {report.violation[:100]}")
                break
        else:
            survived.append(name)
            print(f"{name}: NOT NOTICED in {options.seeds} runs")
        sys.stdout.flush()
    hunted = len(MUTANTS) - len(SEEN_BY)
    print(f"{hunted - len(survived)} of {hunted} mutants noticed, {len(SEEN_BY)} left to tests")
    return 1 if survived else 0


def main() -> int:
    with_fixed_hashes("sim")
    options = _options()
    logging.basicConfig(format="%(message)s", level=logging.CRITICAL)
    if options.verbose:
        logging.getLogger("valence.sim").setLevel(logging.INFO)
    if options.mutants:
        return hunt(options)
    listed = plans(options, options.mutant)
    if len(listed) == 1:
        broken = run_one(listed[0], options)
        sys.stdout.flush()
        os._exit(int(broken))  # without it, tasks of that world would wake up once more
    return run_all(listed, options)


def run_one(plan: Plan, options: argparse.Namespace) -> bool:
    """Run one plan, and tell all about it; True if it broke a rule."""
    report = next(iter(many([plan], 1)))[1] if not options.verbose else one(plan)
    if report.violation and not (options.verbose or options.whole or plan.crowded):
        print(f"seed {plan.seed} goes wrong; looking for a shorter run that does …")
        plan, report = shrink(plan, report, options.jobs)
    tell(report, plan, trace=not options.verbose)
    return bool(report.violation)


def run_all(listed: list[Plan], options: argparse.Namespace) -> int:
    """Run many plans, and tell of those that break a rule. Returns the exit code."""
    start = time.monotonic()
    bad = 0
    totals: Counter[str] = Counter()
    for plan, report in many(listed, options.jobs):
        bad += bool(report.violation)
        totals.update(report.counts)
        if report.violation:
            tell(report, plan, trace=False)
            sys.stdout.flush()
            if options.first:
                break
    print("in all: " + ", ".join(f"{v:,} {k}" for k, v in sorted(totals.items())))
    print(f"{len(listed)} runs, {bad} violations, {time.monotonic() - start:.0f} s")
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    default = Plan(0)
    parser = argparse.ArgumentParser(prog="python -m sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the run, or the first of several")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs")
    parser.add_argument("--first", action="store_true", help="stop at the first violation")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs in parallel")
    parser.add_argument("--peers", type=int, default=default.peers)
    parser.add_argument("--workflows", type=int, default=default.workflows)
    faulty = "how long faults occur"
    parser.add_argument("--seconds", type=float, default=default.seconds, help=faulty)
    often = "seconds between two faults, on average"
    parser.add_argument("--every-s", type=float, default=default.every_s, help=often)
    parser.add_argument("--keepers", type=int, default=default.keepers)
    replaced = "share of the peers that are replaced each minute"
    parser.add_argument("--replaced", type=float, default=default.replaced, help=replaced)
    gangs = "share of the tasks that need several peers at once"
    parser.add_argument("--gangs", type=float, default=default.gangs, help=gangs)
    lost = "seconds after which a lost majority is not waited for any more"
    parser.add_argument("--majority-lost", type=float, default=default.majority_lost_s, help=lost)
    known = [name for name in strategies.names() if name != strategies.AUTO]
    parser.add_argument("--strategy", choices=known, default=default.strategy)
    queue = "with a task queue; implies --strategy pilots"
    parser.add_argument("--queue", action="store_true", help=queue)
    parser.add_argument("--overlay", choices=OVERLAYS, default=default.overlay)
    few = "bytes of a journal in one message; 1: one entry at a time; 0: the seed decides"
    parser.add_argument("--slice-bytes", type=int, default=default.slice_bytes, help=few)
    names = f"a selection of {','.join(FAULTS)}; also perish, halve; or none"
    parser.add_argument("--faults", default="", help=names)
    parser.add_argument(
        "--mutant", choices=sorted(MUTANTS), default="", metavar="RULE",
        help="break this rule (`--mutant ?` lists them)",
    )  # fmt: skip
    every = "break each rule: every time, a run must notice it"
    parser.add_argument("--mutants", action="store_true", help=every)
    parser.add_argument("--whole", action="store_true", help="do not look for a shorter run")
    parser.add_argument("--verbose", action="store_true", help="show the run as it happens")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
