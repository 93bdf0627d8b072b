"""Elections: when a workflow's home is gone, the keepers of its journal agree on another one.

As in Raft, with a trial round before each election (its pre-vote): home = leader, keeper = voter,
epoch = term, `Elect` = RequestVote (docs/glossary.md).

Rules:
- A keeper stands for a journal when it has reason to believe that the journal has no home: the
  failure detector doubts the home or reports that it was restarted, or this peer itself has just
  started. The keepers stand one after another, so that mostly nobody disturbs the first.
- A candidate first asks whether it *would* be elected. Only then does it make a promise of its own
  and ask the others for theirs: a keeper that alone sees a fault disturbs nobody.
- Nobody votes against a home that it believes to be alive, nor for a copy that is behind its own,
  even if it has given up its own since. That holds for a candidate's vote for itself, too.
- An elected home writes an entry of its own epoch. When a majority has that entry, it has all the
  entries before it; only then does the home go on with the workflow.
- Journals that lost their home together are asked for in one message to each keeper.
- Nobody stands, or is voted for, in an era that its log is not in (`in_era`).
- If a majority of keepers is lost for longer than a limit, and one is set, the best copy that is
  left goes on by itself, under an epoch far above the others, and says so. A copy with only a part
  of the submission does not: others may have all of it, and may have told its user so. How the two
  lines of a workflow meet again, if the lost keepers were only cut off: `lines`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from ..membership.members import State
from ..wire.entries import HomeElected, HomeForced
from ..wire.messages import (
    Candidacy,
    Contact,
    Elect,
    Elected,
    FindHome,
    FoundHome,
    NotHome,
    StillHome,
    Vote,
)
from ..wire.rpc import CallFailed
from .keeping import Keeping
from .replica import Replica, forced, forced_epoch, in_era, majority, next_epoch, odd, shown
from .storage import Write

CHECK_S = 5.0

ASK_AT_ONCE = 64


async def _nobody(replica: Replica) -> None:
    pass


@dataclass(slots=True)
class _Due:
    at: float
    tries: int = 0


def standstill(away: list[Contact], count: int, how: str) -> str:
    """In words: which keepers are missing, and how many of them are needed."""
    needed = majority(count) - (count - len(away))
    named = [
        f"{c.id.hex()[:8]} ({f'{c.host}:{c.port}' if c.port else 'address unknown'})" for c in away
    ]
    return (
        f"{len(away)} of the {count} peers that keep its journal {how}: {', '.join(named)}. "
        f"It goes on when {needed} of them {'is' if needed == 1 else 'are'} back; nothing that was "
        f"acknowledged is lost"
    )


class Elections:
    def __init__(self, keeping: Keeping, on_home: Callable[[str], None]) -> None:
        self._keeping = keeping
        self._on_home = on_home
        self._due: dict[str, _Due] = {}
        self._wake = asyncio.Event()
        self._seen: dict[str, int] = {}  # the highest epoch that another keeper has promised
        self._lost_since: dict[str, float] = {}
        self._started = False
        self.closed = False  # this peer is leaving: it stands for nothing any more
        self.meet: Callable[[Replica], Awaitable[None]] = _nobody  # the other lines of a forced one
        keeping.on_vacant = self.vacant
        keeping.on_followed = self.followed
        keeping.on_keeper_back = self.back
        self._heard: dict[str, float] = {}  # when each copy last heard of its home
        keeping.rpc.on(Elect, self._elect)
        keeping.rpc.on(StillHome, self._still_home)

    def start(self) -> None:
        """The other peers are known now: stand for the journals from before the restart."""
        self._started = True
        for workflow, replica in self._keeping.replicas.items():
            if workflow not in self._keeping.leads and replica.count:
                self.vacant(workflow)

    def vacant(self, workflow: str) -> None:
        """Its home may be gone: stand for it when it is this peer's turn."""
        replica = self._keeping.replicas.get(workflow)
        if not self._started or replica is None or not replica.count or workflow in self._due:
            return
        self._due[workflow] = _Due(self._now() + self._turn_s(replica))
        self._wake.set()

    def back(self, workflow: str) -> None:
        """One of its keepers is back: perhaps now there is a majority."""
        due, replica = self._due.get(workflow), self._keeping.replicas.get(workflow)
        if due is not None and replica is not None:
            due.tries = 0
            due.at = min(due.at, self._now() + self._turn_s(replica))
            self._wake.set()

    def followed(self, workflow: str) -> None:
        """It has a home, or this peer has no copy any more: there is nothing to stand for."""
        self._heard[workflow] = self._now()
        self._due.pop(workflow, None)
        self._seen.pop(workflow, None)
        self._lost_since.pop(workflow, None)

    def stir(self) -> None:
        """There is one more journal to look after."""
        if len(self._keeping.replicas) <= 1:
            self._wake.set()

    def reason(self, workflow: str) -> str:
        """In words: why nothing happens, as far as this peer's copy shows."""
        replica = self._keeping.replicas.get(workflow)
        if replica is None:
            return ""
        return self.stuck(workflow) or "the peers that keep its journal are electing a new leader"

    def stuck(self, workflow: str) -> str:
        """In words: which keepers are away, if a majority is, as this peer's copy knows them."""
        replica = self._keeping.replicas.get(workflow)
        if replica is None or not replica.keepers:
            return ""
        members = self._keeping.members
        away = [k for k in replica.keepers if not members.is_here(k)]
        count = len(replica.keepers)
        if count - len(away) >= majority(count):
            return ""
        contacts = [members.contact(k) or Contact(k, "?", 0) for k in away]
        lost_s = self._keeping.config.majority_lost_s
        forced_then = "" if math.isinf(lost_s) else f"; after {lost_s:g} s it goes on without them"
        return standstill(contacts, count, "are away") + forced_then

    def _turn_s(self, replica: Replica) -> float:
        """How long this peer lets the keepers before it go first."""
        config, rng = self._keeping.config, self._keeping.rng
        members, me = self._keeping.members, self._keeping.rpc.me.id
        before = 0
        for keeper in replica.keepers:
            if keeper == me:
                break
            member = members.get(keeper)
            before += member is not None and member.state == State.ALIVE
        return config.stand_step_s * (before + rng.random() / 3)

    # ----------------------------------------------------------------- driving

    async def run(self) -> None:
        check_at = self._now() + CHECK_S
        while True:
            await self._next_due(check_at)
            self._wake.clear()
            now = self._now()
            for workflow in [w for w in self._due if w not in self._keeping.replicas]:
                del self._due[workflow]
            batch = [w for w, due in self._due.items() if due.at <= now]
            if batch:
                await self._stand(batch[: self._keeping.config.stand_batch_max])
            if now >= check_at:
                check_at = self._now() + CHECK_S
                await self._ask_homes(now)
                await self._look_for_lost(now)

    async def _next_due(self, check_at: float) -> None:
        """Returns when a journal may be due, or at `check_at`."""
        soonest = min((due.at for due in self._due.values()), default=math.inf)
        idle = not self._keeping.replicas  # nothing to look at, until `stir`
        wait_s = max(0.0, min(soonest, check_at) - self._now())
        try:
            async with asyncio.timeout(None if idle else wait_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _stand(self, batch: list[str]) -> None:
        if self.closed:
            for workflow in batch:
                self._due.pop(workflow, None)
            return
        epochs = self._next_epochs(batch)
        # keepers that stayed behind must not go on with a line that was given up elsewhere
        copies = [self._keeping.replicas[w] for w in epochs]
        await asyncio.gather(*(self.meet(copy) for copy in copies if forced(copy.last_epoch)))
        epochs = self._still_open(epochs)
        would = self._counted(epochs, await self._poll(epochs, trial=True))
        epochs = self._still_open({w: e for w, e in epochs.items() if w in would})
        if epochs:
            await self._stand_in_earnest(epochs)
        self._put_off(batch)

    def _next_epochs(self, batch: list[str]) -> dict[str, int]:
        """The epoch that this peer would ask for, for each journal that it may stand for."""
        replicas, me = self._keeping.replicas, self._keeping.rpc.me.id
        known = {w: max(self._seen.get(w, 0), replicas[w].promised) for w in batch}
        epochs = {w: next_epoch(known[w], me) for w in batch}
        return {w: e for w, e in epochs.items() if in_era(e, replicas[w].last_epoch)}

    async def _stand_in_earnest(self, epochs: dict[str, int]) -> None:
        """After the trial round. This peer's own promises get onto its disk before it asks."""
        keeping = self._keeping
        writes = []
        for workflow, epoch in epochs.items():
            replica = keeping.replicas[workflow]
            replica.promised, replica.home = epoch, b""
            writes.append(Write(workflow, epoch))
        await keeping.storage.write(writes)
        elected = self._counted(epochs, await self._poll(epochs, trial=False))
        for workflow in elected:
            copy = keeping.replicas.get(workflow)
            promise_holds = copy is not None and copy.promised == epochs[workflow]
            if promise_holds and workflow not in keeping.leads:
                self._take_office(
                    workflow, epochs[workflow], "the peers that keep its journal elected it"
                )

    def _put_off(self, batch: list[str]) -> None:
        """The journals that still have no home: stand for them again after a while that grows."""
        keeping, now = self._keeping, self._now()
        for workflow in batch:
            due = self._due.get(workflow)
            if due is None or workflow in keeping.leads:
                self._due.pop(workflow, None)
                continue
            due.tries += 1
            pause_s = min(keeping.config.stand_again_s_max, 0.3 * 2 ** min(due.tries, 10))
            due.at = now + pause_s * (0.5 + keeping.rng.random())

    def _still_open(self, epochs: dict[str, int]) -> dict[str, int]:
        """Those for which nothing has happened meanwhile that keeps this peer from asking."""
        return {w: e for w, e in epochs.items() if self._is_open(w, e)}

    def _is_open(self, workflow: str, epoch: int) -> bool:
        replica = self._keeping.replicas.get(workflow)
        if replica is None or self._keeping.is_closing(workflow):
            return False
        return workflow in self._due and replica.promised < epoch

    def _take_office(
        self, workflow: str, epoch: int, why: str, keepers: tuple[bytes, ...] = ()
    ) -> None:
        """`keepers`: those that are left, if this home goes on without a majority."""
        keeping = self._keeping
        self._due.pop(workflow, None)
        if keeping.is_closing(workflow):
            return  # this copy was given up meanwhile: another keeper stands for it
        self._seen.pop(workflow, None)
        self._lost_since.pop(workflow, None)
        keeping.lead(workflow, epoch)
        me, number = keeping.rpc.me.id, shown(epoch)
        entry: HomeElected | HomeForced = HomeElected(home=me, epoch=number, why=why)
        if keepers:
            committed = keeping.replicas[workflow].committed
            entry = HomeForced(home=me, epoch=number, why=why, keepers=keepers, committed=committed)
        keeping.append(workflow, entry, then=lambda: self._in_office(workflow, epoch))

    def _in_office(self, workflow: str, epoch: int) -> None:
        if self._keeping.epoch(workflow) == epoch:
            self._on_home(workflow)
            self._keeping.on_news(workflow)

    async def _poll(self, epochs: dict[str, int], trial: bool) -> dict[str, list[Vote]]:
        keeping = self._keeping
        by_keeper: dict[bytes, list[Candidacy]] = {}
        for workflow, epoch in epochs.items():
            replica = keeping.replicas.get(workflow)
            if replica is None:
                continue
            asked = _candidacy(replica, epoch, trial)
            for keeper in replica.keepers:
                if keeper != keeping.rpc.me.id and keeping.members.is_here(keeper):
                    by_keeper.setdefault(keeper, []).append(asked)
        votes: dict[str, list[Vote]] = {}
        calls = [self._ask(keeper, asks, votes) for keeper, asks in by_keeper.items()]
        await asyncio.gather(*calls)
        return votes

    async def _ask(
        self, keeper: bytes, asks: list[Candidacy], votes: dict[str, list[Vote]]
    ) -> None:
        """Adds this keeper's answers to `votes`."""
        contact = self._keeping.members.contact(keeper)
        if contact is None:
            return
        limit_s = self._keeping.config.stand_answer_s
        try:
            message = Elect(candidacies=tuple(asks))
            answer = await self._keeping.rpc.call(contact, message, Elected, limit_s, probing=True)
        except CallFailed:
            return
        for asked, vote in zip(asks, answer.votes, strict=False):
            if vote.workflow == asked.workflow:
                votes.setdefault(vote.workflow, []).append(vote)

    def _counted(self, epochs: dict[str, int], votes: dict[str, list[Vote]]) -> set[str]:
        """The journals for which a majority votes for this peer, its own vote among them."""
        keeping = self._keeping
        won: set[str] = set()
        for workflow, epoch in epochs.items():
            replica = keeping.replicas.get(workflow)
            if replica is None:
                continue
            # (a keeper that promised a home without a majority has no vote here, see `lines`)
            cast = votes.get(workflow, [])
            valid = [vote for vote in cast if forced(vote.epoch) <= forced(epoch)]
            replica.outrun = len(cast) - len(valid) >= majority(len(replica.keepers))
            self._note_epochs(workflow, valid)
            if any(vote.outsider for vote in valid):
                keeping.drop(workflow)
            elif self._is_elected(replica, valid):
                won.add(workflow)
            else:
                self._learn_home(replica, valid)
        return won

    def _note_epochs(self, workflow: str, votes: list[Vote]) -> None:
        for vote in votes:
            self._seen[workflow] = max(self._seen.get(workflow, 0), vote.epoch)

    def _is_elected(self, replica: Replica, votes: list[Vote]) -> bool:
        # A copy on a peer that is no keeper (the set was changed back) asks, but is not elected;
        # nor is a copy that this peer itself would not vote for.
        able = self._keeping.rpc.me.id in replica.keepers and replica.caught_up
        granted = 1 + sum(vote.granted for vote in votes)
        return able and granted >= majority(len(replica.keepers))

    def _learn_home(self, replica: Replica, votes: list[Vote]) -> None:
        keeping = self._keeping
        home = next((v.home for v in votes if v.home and v.home != keeping.rpc.me.id), b"")
        if home and keeping.members.is_here(home) and not replica.home:
            replica.home = home  # it will be heard of; if not, the failure detector reports it

    # ----------------------------------------------------------------- voting

    async def _elect(self, sender: Contact, message: Elect) -> Elected:
        writes: list[Write] = []
        votes = [self._vote(sender.id, asked, writes) for asked in message.candidacies]
        if writes:
            await self._keeping.storage.write(writes)
        return Elected(votes=tuple(votes))

    def _vote(self, candidate: bytes, asked: Candidacy, writes: list[Write]) -> Vote:
        keeping = self._keeping
        workflow = asked.workflow
        replica = keeping.copy(workflow)
        if replica is None:  # a keeper that has got nothing yet; or that had a copy and gave it up
            replica = keeping.storage.remains(workflow)
        promised = replica.promised
        namesake = bool(asked.entries and replica.count and asked.birth != replica.birth)
        if namesake:
            keeping.makes_way(replica)
        if keeping.is_closing(workflow):  # a promise made now would be forgotten with the copy
            return Vote(
                workflow, False, promised, "this peer's copy is being removed", replica.home
            )
        if replica.excludes(candidate, asked):
            why = "the candidate does not keep it any more"
            return Vote(workflow, False, promised, why, replica.home, outsider=True)
        why = replica.why_not(asked) or self._loyal(replica, candidate)
        if why:
            self._doubt(replica, candidate, namesake)
            return Vote(workflow, False, promised, why, replica.home)
        if not asked.trial:
            self._promise(replica, asked.epoch, writes)
        return Vote(workflow, True, replica.promised)

    def _doubt(self, replica: Replica, candidate: bytes, namesake: bool) -> None:
        """What this peer learns from a candidate that it does not vote for."""
        keeping, workflow = self._keeping, replica.workflow
        if candidate == replica.home and workflow in keeping.replicas:
            # It asks to be elected, so it is not in office: the message that made this copy follow
            # it was sent before it fell. (Nobody else would stand, as it is alive.)
            replica.home = b""
            self.vacant(workflow)
        if replica.over and workflow not in keeping.leads and not namesake:
            keeping.replicas[workflow] = replica  # it was away when this ended: tell it how
            self.vacant(workflow)

    def _promise(self, replica: Replica, epoch: int, writes: list[Write]) -> None:
        """To follow no lower epoch from now on; the answer waits until that is on the disk."""
        keeping, workflow = self._keeping, replica.workflow
        keeping.replicas[workflow] = replica
        replica.promised = epoch
        replica.home = b""
        keeping.depose(workflow)
        writes.append(Write(workflow, epoch))
        if replica.count:  # in case the candidate does not become home
            due = self._due.setdefault(workflow, _Due(0.0))
            due.at = self._now() + keeping.config.stand_again_s_max
        self._wake.set()  # there is a home to look after from now on

    def _loyal(self, replica: Replica, candidate: bytes) -> str:
        """Why this peer wants no other home; empty if it does."""
        home = replica.home
        if replica.workflow in self._keeping.leads:
            return "this peer is its home already"
        if not home or home == candidate:
            return ""
        member = self._keeping.members.get(home)
        if member is not None and member.state == State.ALIVE:
            return f"peer {home.hex()[:8]} is its home, and alive"
        return ""

    # ----------------------------------------------------------------- silent homes

    async def _ask_homes(self, now: float) -> None:
        keeping, silent_s = self._keeping, self._keeping.config.follow_s
        self._heard = {w: self._heard.get(w, now) for w in keeping.replicas}
        asked: dict[bytes, list[str]] = {}
        for workflow, replica in keeping.replicas.items():
            silent = now - self._heard[workflow] >= silent_s
            if silent and replica.home and workflow not in keeping.leads:
                asked.setdefault(replica.home, []).append(workflow)
        await asyncio.gather(*(self._ask_home(home, listed) for home, listed in asked.items()))

    async def _ask_home(self, home: bytes, workflows: list[str]) -> None:
        keeping = self._keeping
        asked = workflows[: keeping.config.follow_batch_max]
        contact = keeping.members.contact(home)
        try:
            if contact is None:
                raise CallFailed("the home is not known any more")
            message = StillHome(workflows=tuple(asked))
            answer = await keeping.rpc.call(contact, message, NotHome, probing=True)
        except CallFailed:
            return  # the failure detector watches it
        for workflow in asked:
            self._heard[workflow] = self._now()
        for workflow in answer.workflows:
            replica = keeping.replicas.get(workflow)
            if replica is not None and replica.home == home and workflow not in keeping.leads:
                replica.home = b""
                self.vacant(workflow)

    def _still_home(self, sender: Contact, message: StillHome) -> NotHome:
        leads = self._keeping.leads
        return NotHome(workflows=tuple(w for w in message.workflows if w not in leads))

    # ----------------------------------------------------------------- a majority is lost

    async def _look_for_lost(self, now: float) -> None:
        keeping = self._keeping
        limit_s = keeping.config.majority_lost_s
        for workflow, replica in list(keeping.replicas.items()):
            here = [k for k in replica.keepers if keeping.members.is_here(k)]
            if len(here) >= majority(len(replica.keepers)) or keeping.rpc.me.id not in here:
                self._lost_since.pop(workflow, None)
                continue
            since = self._lost_since.setdefault(workflow, now)
            if now - since >= limit_s and replica.whole:
                await self._force(workflow, replica, here)

    async def _force(self, workflow: str, replica: Replica, here: Iterable[bytes]) -> None:
        """This copy goes on without a majority, if all the keepers that are left agree to it and
        none of them has a better copy.

        Each of them promises the new epoch first, so if two try it at once, one fails; both can
        succeed only if they don't hear each other, and then in eras of their own."""
        keeping, me = self._keeping, self._keeping.rpc.me.id
        if await self._goes_on_elsewhere(workflow, replica):
            self._lost_since[workflow] = self._now()
            return
        known = max(self._seen.get(workflow, 0), replica.promised)
        epoch = forced_epoch(known, me)
        if epoch is None:
            return
        others = [k for k in here if k != me]
        agreed = await self._all_promise(workflow, replica, known, epoch, others)
        if not agreed or workflow in keeping.leads:
            return
        keeping.counts["homes_forced"] += 1
        lost = len(replica.keepers) - 1 - len(others)
        why = (
            f"{lost} of the {len(replica.keepers)} peers that keep its journal were away for more "
            f"than {keeping.config.majority_lost_s:g} s: it goes on from this peer's copy alone, "
            "and runs again the tasks that this copy does not show to be finished"
        )
        left = (me, *others)
        self._take_office(workflow, epoch, why, left[: odd(len(left))])

    async def _all_promise(
        self, workflow: str, replica: Replica, known: int, epoch: int, others: list[bytes]
    ) -> bool:
        """First a trial round, then this peer's own promise, then those of the others."""
        keeping = self._keeping
        if not await self._all_grant(workflow, _candidacy(replica, epoch, True), others):
            return False
        if replica.promised > known or workflow not in keeping.replicas:
            return False
        keeping.depose(workflow)
        replica.promised = epoch
        if others:  # (alone, it promises and begins in one write: both get onto the disk, or none)
            await keeping.storage.write([Write(workflow, epoch)])
        if not await self._all_grant(workflow, _candidacy(replica, epoch, False), others):
            return False
        return replica.promised <= epoch and workflow in keeping.replicas

    async def _all_grant(self, workflow: str, asked: Candidacy, others: list[bytes]) -> bool:
        """If not, another keeper has a better copy or did not answer: this one tries again later,
        or another keeper does."""
        votes: dict[str, list[Vote]] = {}
        await asyncio.gather(*(self._ask(keeper, [asked], votes) for keeper in others))
        answers = votes.get(workflow, [])
        self._note_epochs(workflow, answers)
        return sum(vote.granted for vote in answers) >= len(others)

    async def _goes_on_elsewhere(self, workflow: str, replica: Replica) -> bool:
        """Other peers may keep the journal by now: this copy was away when they began, and is
        outdated."""
        keeping = self._keeping
        slots = asyncio.Semaphore(ASK_AT_ONCE)

        async def ask(contact: Contact) -> bool:
            async with slots:
                try:
                    message = FindHome(workflow=workflow)
                    limit_s = keeping.config.stand_answer_s
                    answer = await keeping.rpc.call(contact, message, FoundHome, limit_s)
                except CallFailed:
                    return False
                return (answer.here or answer.kept) and answer.epoch > replica.promised

        me = keeping.rpc.me.id
        others = [m.contact for m in keeping.members.here() if m.contact.id != me]
        return any(await asyncio.gather(*map(ask, others)))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _candidacy(replica: Replica, epoch: int, trial: bool) -> Candidacy:
    count, last = replica.count, replica.last_epoch
    return Candidacy(replica.workflow, epoch, count, last, trial, replica.birth)
