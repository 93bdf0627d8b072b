"""`python -m sim`: one simulated disaster, or many; each is its seed."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

from valence.protocols.config import LAN, OVERLAYS
from valence.workflow import strategies

from .loop import run_out, with_fixed_hashes
from .mutants import EXPECTED, MUTANTS, WORLDS, applied
from .plan import CROWD, CROWD_PEERS, FAULTS, Plan, WorldReport
from .world import simulate

#: a run that takes so long in real time goes round in circles
REAL_S_MAX = 120
CROWD_REAL_S_MAX = 3600
RUNS_PER_PROCESS = 4
SHRINK_RUNS_MAX = 150


class TooLong(BaseException):
    pass


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
        return WorldReport(plan.seed, f"it does not come to an end within {limit_s} s of real time")
    finally:
        signal.alarm(0)


def _silently() -> None:
    """In a process of its own: coroutines of a world that is over have nothing more to say."""
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
    """Worlds with a little less in them, the boldest cuts first."""
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
    """A run that goes wrong with less happening in it, if there is one among a few tries."""
    tries = SHRINK_RUNS_MAX
    while tries > 0:
        listed = [p for p in smaller(plan) if p.faults or not plan.faults][:tries]
        tries -= len(listed)
        found = [(p, r) for p, r in many(listed, jobs) if r.violation]
        found = [(p, r) for p, r in found if len(r.trace) < len(report.trace)]
        if not found:
            break
        plan, report = min(found, key=lambda row: len(row[1].trace))
    return plan, report


def hunt(options: argparse.Namespace) -> int:
    """For each rule, the first run that notices that it is broken."""
    survived = []
    for name in MUTANTS:
        for plan, report in many(plans(options, name), options.jobs):
            if report.violation and EXPECTED.get(name, "") in report.violation:
                print(f"{name}: noticed by seed {plan.seed}: {report.violation[:100]}")
                break
        else:
            survived.append(name)
            print(f"{name}: NOT NOTICED in {options.seeds} runs")
        sys.stdout.flush()
    print(f"{len(MUTANTS) - len(survived)} of {len(MUTANTS)} mutants noticed")
    return 1 if survived else 0


def main() -> int:
    with_fixed_hashes("sim")
    default = Plan(0)
    parser = argparse.ArgumentParser(prog="python -m sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the run, or the first of them")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs")
    parser.add_argument("--first", action="store_true", help="stop at the first violation")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side")
    parser.add_argument("--peers", type=int, default=default.peers)
    parser.add_argument("--workflows", type=int, default=default.workflows)
    parser.add_argument("--seconds", type=float, default=default.seconds, help="of faults")
    parser.add_argument("--every-s", type=float, default=default.every_s, help="a fault")
    parser.add_argument("--keepers", type=int, default=default.keepers)
    parser.add_argument("--replaced", type=float, default=0.0, help="share of peers, each minute")
    share = "of tasks that need several peers at once"
    parser.add_argument("--gangs", type=float, default=default.gangs, help=share)
    parser.add_argument("--majority-lost", type=float, default=default.majority_lost_s)
    known = [name for name in strategies.names() if name != strategies.AUTO]
    parser.add_argument("--strategy", choices=known, default=default.strategy)
    parser.add_argument("--queue", action="store_true", help="a task queue, too: for pilots")
    parser.add_argument("--overlay", choices=OVERLAYS, default=default.overlay)
    few = "of a journal in one message; 1: an entry at a time; 0: as the seed says"
    parser.add_argument("--slice-bytes", type=int, default=default.slice_bytes, help=few)
    names = f"some of {','.join(FAULTS)}; or perish, halve; or none"
    parser.add_argument("--faults", default="", help=names)
    parser.add_argument("--mutant", choices=sorted(MUTANTS), default="", help="break a rule")
    parser.add_argument("--mutants", action="store_true", help="break each: all must be noticed")
    parser.add_argument("--whole", action="store_true", help="a violation's run as it is")
    parser.add_argument("--verbose", action="store_true", help="as it happens")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.CRITICAL)
    if options.verbose:
        logging.getLogger("valence.sim").setLevel(logging.INFO)
    if options.mutants:
        return hunt(options)
    listed = plans(options, options.mutant)
    start = time.monotonic()
    bad = 0
    if len(listed) == 1:
        plan = listed[0]
        report = next(iter(many([plan], 1)))[1] if not options.verbose else one(plan)
        if report.violation and not (options.verbose or options.whole or plan.crowded):
            print(f"seed {plan.seed} goes wrong; looking for a shorter run that does …")
            plan, report = shrink(plan, report, options.jobs)
        tell(report, plan, trace=not options.verbose)
        sys.stdout.flush()
        os._exit(1 if report.violation else 0)  # nobody of that world wakes up once more
    for plan, report in many(listed, options.jobs):
        bad += bool(report.violation)
        if report.violation:
            tell(report, plan, trace=False)
            sys.stdout.flush()
            if options.first:
                break
    print(f"{len(listed)} runs, {bad} violations, {time.monotonic() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
