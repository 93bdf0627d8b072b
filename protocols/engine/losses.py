"""Attempts that will not report: their peer died, left, or does not answer.

Rules:
- A peer that died or left has lost its attempts; tasks whose results only it had run once more.
- A peer that was restarted is asked which attempts it still has.
- A peer that does not answer may just be slow: attempts that have not run for long begin at another
  peer too, and the first result wins.
- A home that is leaving takes nothing for lost: others may be leaving with it, and come back too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from ..membership.members import Members, State
from ..wire.messages import AttemptKey, Member
from .outstanding import Outstanding
from .performer import Decide
from .runs import Runs

YOUNG_S = 60.0


class Losses:
    def __init__(
        self,
        runs: Runs,
        outstanding: Outstanding,
        members: Members,
        deciding: Decide,
        clock: Callable[[], float],
        is_closed: Callable[[], bool],
    ) -> None:
        self._runs = runs
        self._outstanding = outstanding
        self._members = members
        self._deciding = deciding
        self._clock = clock
        self._is_closed = is_closed

    def lost(self, rows: list[tuple[AttemptKey, str]], begun: bool = True) -> None:
        """Attempts that will not report. Those that never began don't count against the task."""
        by_run: dict[str, list[tuple[AttemptKey, str]]] = defaultdict(list)
        for key, reason in list(rows):
            by_run[key.workflow].append((key, reason))
        self._outstanding.drop_anywhere(key for key, _ in rows)
        for workflow_id, lost in by_run.items():
            run = self._runs.active.get(workflow_id)
            if run is not None:
                with self._deciding(run) as decide:
                    decide.lose(lost, begun)

    def member_changed(self, old: Member | None, new: Member) -> None:
        if self._is_closed():
            return
        peer = new.contact.id
        if new.state >= State.DEAD:
            self._peer_is_gone(peer, "died" if new.state == State.DEAD else "left")
        elif old is not None and old.boot != new.boot:
            self._outstanding.doubt(peer)  # it was restarted: ask which attempts it still has
        elif new.state == State.SUSPECT:
            self.run_elsewhere(peer)
        if new.state == State.ALIVE and (old is None or old.state >= State.DEAD):
            self._place_ready()

    def _peer_is_gone(self, peer: bytes, verb: str) -> None:
        lost = [(key, f"its peer {peer.hex()[:8]} {verb}") for key in self._outstanding.to(peer)]
        if lost:
            self.lost(lost)
        for run in list(self._runs.active.values()):
            with self._deciding(run) as decide:
                decide.reopen_lost(peer)

    def _place_ready(self) -> None:
        """Tasks that waited for a new peer's files, or for a peer of its kind."""
        for run in list(self._runs.active.values()):
            with self._deciding(run) as decide:
                decide.place_ready()

    def run_elsewhere(self, peer: bytes) -> None:
        """This peer may be dead, or just slow: its young attempts begin at another peer too. Should
        it come back with a result, that result is as good as any."""
        now = self._clock()
        reason = f"its peer {peer.hex()[:8]} does not answer"
        keys = [key for key in self._outstanding.to(peer) if self._may_run_twice(key, now)]
        self.lost([(key, reason) for key in keys], begun=False)

    def _may_run_twice(self, key: AttemptKey, now: float) -> bool:
        run = self._runs.active.get(key.workflow)
        attempt = run.tasks[key.task].attempt(key.number) if run is not None else None
        if run is None or attempt is None:
            return False
        return (
            now - attempt.at < YOUNG_S
            and key not in self._outstanding.on_the_way
            and not run.workflow.tasks[key.task].gang  # the whole gang would begin again
        )

    def begin_beside(self, key: AttemptKey, why: str) -> None:
        """Begin a second attempt and leave the first one running: the first result wins."""
        self.lost([(key, why)], begun=False)

    def speed_of(self, peer: bytes) -> float:
        member = self._members.get(peer)
        return max(1e-3, member.traits.speed) if member is not None else 1.0
