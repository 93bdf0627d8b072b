"""Who is home, when the one before is gone: the keepers agree on one of them.

Rules:
- A keeper stands for a journal when it has reason to believe that nobody is its home: the failure
  detector doubts the home or says it was started anew, or this peer itself has just started. The
  keepers stand one after another, so that mostly the first one is not disturbed.
- It first asks whether it *would* be elected. Only then does it make promises of its own and asks
  for those of others: a keeper who sees things that others do not see disturbs nobody.
- Nobody votes against a home that it believes to be there, nor for a copy that is behind its own,
  also if it has given up its own since. That holds for a candidate's own vote, too.
- Elected, a home writes an entry of its own epoch. When a majority has that, it has all before it:
  only then does it go on with the workflow.
- All journals that lost their home together are asked for in one message to each keeper.
- Nobody stands, or is voted for, in an era that its log is not in (`in_era`).
- Where a majority of keepers is lost for longer than a limit, if one is set, the best copy that is
  left goes on by itself, under an epoch far above, and says so; but not one that has only a part of
  the submission: others may have all of it, and may have told its user so. How the two lines of a
  workflow meet again, if the lost were only cut off: `lines`.
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
    """In words: which keepers are lacking, and what is needed."""
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
        self._seen: dict[str, int] = {}  # the highest epoch heard of, where it was above ours
        self._lost_since: dict[str, float] = {}
        self._started = False
        self.closed = False  # this peer leaves: it stands for nothing any more
        self.meet: Callable[[Replica], Awaitable[None]] = _nobody  # other lines of a forced one
        keeping.on_vacant = self.vacant
        keeping.on_followed = self.followed
        keeping.on_keeper_back = self.back
        self._heard: dict[str, float] = {}  # of its home, by each copy
        keeping.rpc.on(Elect, self._elect)
        keeping.rpc.on(StillHome, self._still_home)

    def start(self) -> None:
        """The others are known: see to what is here from before."""
        self._started = True
        for workflow, replica in self._keeping.replicas.items():
            if workflow not in self._keeping.leads and replica.count:
                self.vacant(workflow)

    def vacant(self, workflow: str) -> None:
        """Its home may be gone: stand for it, in turn."""
        replica = self._keeping.replicas.get(workflow)
        if not self._started or replica is None or not replica.count or workflow in self._due:
            return
        self._due[workflow] = _Due(self._now() + self._turn_s(replica))
        self._wake.set()

    def back(self, workflow: str) -> None:
        """One of its keepers is here again: perhaps that is what was lacking."""
        due, replica = self._due.get(workflow), self._keeping.replicas.get(workflow)
        if due is not None and replica is not None:
            due.tries = 0
            due.at = min(due.at, self._now() + self._turn_s(replica))
            self._wake.set()

    def followed(self, workflow: str) -> None:
        """There is a home, or no copy: nothing to stand for."""
        self._heard[workflow] = self._now()
        self._due.pop(workflow, None)
        self._seen.pop(workflow, None)
        self._lost_since.pop(workflow, None)

    def stir(self) -> None:
        """There is a journal more to look after."""
        if len(self._keeping.replicas) <= 1:
            self._wake.set()

    def reason(self, workflow: str) -> str:
        """In words, for who asks why nothing happens: what a copy here waits for."""
        replica = self._keeping.replicas.get(workflow)
        if replica is None:
            return ""
        return self.stuck(workflow) or "its keepers are agreeing on a new home"

    def stuck(self, workflow: str) -> str:
        """In words: which keepers are away, if a majority is, as a copy here knows them."""
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
        forced_then = "" if math.isinf(lost_s) else f"; after {lost_s:g} s it goes on without"
        return standstill(contacts, count, "are away") + forced_then

    def _turn_s(self, replica: Replica) -> float:
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
            soonest = min((due.at for due in self._due.values()), default=math.inf)
            idle = not self._keeping.replicas  # nothing to look at, until `stir`
            wait_s = max(0.0, min(soonest, check_at) - self._now())
            try:
                async with asyncio.timeout(None if idle else wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
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

    async def _stand(self, batch: list[str]) -> None:
        keeping = self._keeping
        if self.closed:
            for workflow in batch:
                self._due.pop(workflow, None)
            return
        known = {w: max(self._seen.get(w, 0), keeping.replicas[w].promised) for w in batch}
        epochs = {w: next_epoch(known[w], keeping.rpc.me.id) for w in batch}
        epochs = {w: e for w, e in epochs.items() if in_era(e, keeping.replicas[w].last_epoch)}
        # a line that was given up elsewhere does not begin anew with who had stayed behind
        lines = [keeping.replicas[w] for w in epochs if forced(keeping.replicas[w].last_epoch)]
        await asyncio.gather(*map(self.meet, lines))
        epochs = {w: e for w, e in epochs.items() if self._still(w, e)}
        would = self._counted(epochs, await self._poll(epochs, trial=True))
        epochs = {w: e for w, e in epochs.items() if w in would and self._still(w, e)}
        if epochs:
            writes = []
            for workflow, epoch in epochs.items():
                replica = keeping.replicas[workflow]
                replica.promised, replica.home = epoch, b""
                writes.append(Write(workflow, epoch))
            await keeping.storage.write(writes)
            elected = self._counted(epochs, await self._poll(epochs, trial=False))
            for workflow in elected:
                copy = keeping.replicas.get(workflow)
                mine = copy is not None and copy.promised == epochs[workflow]
                if mine and workflow not in keeping.leads:
                    self._take_office(workflow, epochs[workflow], "its keepers chose it")
        now = self._now()
        for workflow in batch:
            due = self._due.get(workflow)
            if due is None or workflow in keeping.leads:
                self._due.pop(workflow, None)
                continue
            due.tries += 1
            pause_s = min(keeping.config.stand_again_s_max, 0.3 * 2 ** min(due.tries, 10))
            due.at = now + pause_s * (0.5 + keeping.rng.random())

    def _still(self, workflow: str, epoch: int) -> bool:
        """Nothing has come between the question and this."""
        replica = self._keeping.replicas.get(workflow)
        here = replica is not None and not self._keeping.is_closing(workflow)
        return here and workflow in self._due and self._keeping.replicas[workflow].promised < epoch

    def _take_office(
        self, workflow: str, epoch: int, why: str, keepers: tuple[bytes, ...] = ()
    ) -> None:
        """`keepers`: those that are left, where this goes on without a majority."""
        keeping = self._keeping
        self._due.pop(workflow, None)
        if keeping.is_closing(workflow):
            return  # the copy here was given up meanwhile: another keeper stands for it
        self._seen.pop(workflow, None)
        self._lost_since.pop(workflow, None)
        keeping.lead(workflow, epoch)
        me, number = keeping.rpc.me.id, shown(epoch)
        said: HomeElected | HomeForced = HomeElected(home=me, epoch=number, why=why)
        if keepers:
            committed = keeping.replicas[workflow].committed
            said = HomeForced(home=me, epoch=number, why=why, keepers=keepers, committed=committed)
        keeping.append(workflow, said, then=lambda: self._in_office(workflow, epoch))

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
        found: dict[str, list[Vote]] = {}
        calls = [self._ask(keeper, asks, found) for keeper, asks in by_keeper.items()]
        await asyncio.gather(*calls)
        return found

    async def _ask(
        self, keeper: bytes, asks: list[Candidacy], found: dict[str, list[Vote]]
    ) -> None:
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
                found.setdefault(vote.workflow, []).append(vote)

    def _counted(self, epochs: dict[str, int], votes: dict[str, list[Vote]]) -> set[str]:
        """Those that a majority is for, this peer's own vote among them."""
        keeping = self._keeping
        won: set[str] = set()
        for workflow, epoch in epochs.items():
            replica = keeping.replicas.get(workflow)
            if replica is None:
                continue
            mine = votes.get(workflow, [])
            # (who promised a home that went on without a majority has no vote here, see `lines`)
            mine = [vote for vote in mine if forced(vote.epoch) <= forced(epoch)]
            for vote in mine:
                self._seen[workflow] = max(self._seen.get(workflow, 0), vote.epoch)
            if any(vote.outsider for vote in mine):
                keeping.drop(workflow)
                continue
            # a copy that is no keeper's (the set was changed back) asks, but is not elected; nor is
            # one that this peer itself would not vote for
            able = keeping.rpc.me.id in replica.keepers and replica.caught_up
            granted = 1 + sum(vote.granted for vote in mine)
            if able and granted >= majority(len(replica.keepers)):
                won.add(workflow)
                continue
            home = next((v.home for v in mine if v.home and v.home != keeping.rpc.me.id), b"")
            if home and keeping.members.is_here(home) and not replica.home:
                replica.home = home  # it will be heard of; if not, the detector says so
        return won

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
        replica = keeping.replicas.get(workflow) or keeping.storage.replica(workflow)
        if replica is None:  # chosen as a keeper, but has got nothing yet; or had, and gave it up
            replica = keeping.storage.remains(workflow)
        promised = replica.promised
        another = bool(asked.entries and replica.count and asked.birth != replica.birth)
        if another:
            keeping.makes_way(replica)
        if keeping.is_closing(workflow):  # with what is promised now it would be forgotten, too
            return Vote(workflow, False, promised, "the copy here is being put away", replica.home)
        if replica.excludes(candidate, asked):
            why = "you are no keeper of it any more"
            return Vote(workflow, False, promised, why, replica.home, outsider=True)
        why = replica.why_not(asked) or self._loyal(replica, candidate)
        if why and candidate == replica.home and workflow in keeping.replicas:
            # It asks to be elected, so it is not in office: what made this copy follow it was on
            # its way since before it fell. (Nobody else would stand, as it is there.)
            replica.home = b""
            self.vacant(workflow)
        if why and replica.over and workflow not in keeping.leads and not another:
            keeping.replicas[workflow] = replica  # it was away when this ended: tell it how
            self.vacant(workflow)
        if why:
            return Vote(workflow, False, promised, why, replica.home)
        if not asked.trial:
            keeping.replicas[workflow] = replica
            replica.promised = asked.epoch
            replica.home = b""
            keeping.depose(workflow)
            writes.append(Write(workflow, asked.epoch))
            if replica.count:  # should nothing come of it
                due = self._due.setdefault(workflow, _Due(0.0))
                due.at = self._now() + keeping.config.stand_again_s_max
            self._wake.set()  # there is a home to look after from now on
        return Vote(workflow, True, replica.promised)

    def _loyal(self, replica: Replica, candidate: bytes) -> str:
        """Why no other home is wanted; empty if one is."""
        home = replica.home
        if replica.workflow in self._keeping.leads:
            return "this peer is its home"
        if not home or home == candidate:
            return ""
        member = self._keeping.members.get(home)
        if member is not None and member.state == State.ALIVE:
            return f"peer {home.hex()[:8]} is its home, and there"
        return ""

    # ----------------------------------------------------------------- homes that say nothing

    async def _ask_homes(self, now: float) -> None:
        keeping, silent_s = self._keeping, self._keeping.config.follow_s
        self._heard = {w: self._heard.get(w, now) for w in keeping.replicas}
        asked: dict[bytes, list[str]] = {}
        for workflow, replica in keeping.replicas.items():
            silent = now - self._heard[workflow] >= silent_s
            if silent and replica.home and workflow not in keeping.leads:
                asked.setdefault(replica.home, []).append(workflow)
        await asyncio.gather(*(self._ask_home(home, some) for home, some in asked.items()))

    async def _ask_home(self, home: bytes, workflows: list[str]) -> None:
        keeping = self._keeping
        some = workflows[: keeping.config.follow_batch_max]
        contact = keeping.members.contact(home)
        try:
            if contact is None:
                raise CallFailed("it is not known any more")
            message = StillHome(workflows=tuple(some))
            answer = await keeping.rpc.call(contact, message, NotHome, probing=True)
        except CallFailed:
            return  # the failure detector has its eye on it
        for workflow in some:
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
        """This copy goes on, if all keepers that are left agree to it, and none has a better one.

        Each of them promises the new epoch first, so of two that try it at once one fails; both
        may succeed only if they don't hear each other, and then in eras of their own."""
        keeping, me = self._keeping, self._keeping.rpc.me.id
        if await self._goes_on_elsewhere(workflow, replica):
            self._lost_since[workflow] = self._now()
            return
        known = max(self._seen.get(workflow, 0), replica.promised)
        epoch = forced_epoch(known, me)
        if epoch is None:
            return
        others = [k for k in here if k != me]
        for trial in (True, False):
            votes: dict[str, list[Vote]] = {}
            asked = _candidacy(replica, epoch, trial)
            await asyncio.gather(*(self._ask(keeper, [asked], votes) for keeper in others))
            mine = votes.get(workflow, [])
            for vote in mine:
                self._seen[workflow] = max(self._seen.get(workflow, 0), vote.epoch)
            if sum(vote.granted for vote in mine) < len(others):
                return  # one is better, or did not answer: later, or by another one
            if replica.promised > (known if trial else epoch) or workflow not in keeping.replicas:
                return
            if trial:
                keeping.depose(workflow)
                replica.promised = epoch
            if trial and others:  # (alone, it promises and begins in one write: or did neither)
                await keeping.storage.write([Write(workflow, epoch)])
        if workflow in keeping.leads:
            return
        keeping.counts["homes_forced"] += 1
        lost = len(replica.keepers) - 1 - len(others)
        why = (
            f"{lost} of its {len(replica.keepers)} keepers were gone for longer than "
            f"{keeping.config.majority_lost_s:g} s: it goes on from this copy alone, and runs "
            "again what this copy does not show to be finished"
        )
        left = (me, *others)
        self._take_office(workflow, epoch, why, left[: odd(len(left))])

    async def _goes_on_elsewhere(self, workflow: str, replica: Replica) -> bool:
        """Others may keep it by now, and this copy be one of before: it was away when they
        began."""
        keeping = self._keeping
        slots = asyncio.Semaphore(ASK_AT_ONCE)

        async def ask(contact: Contact) -> bool:
            async with slots:
                try:
                    message = FindHome(workflow=workflow)
                    limit_s = keeping.config.stand_answer_s
                    found = await keeping.rpc.call(contact, message, FoundHome, limit_s)
                except CallFailed:
                    return False
                return (found.here or found.kept) and found.epoch > replica.promised

        me = keeping.rpc.me.id
        others = [m.contact for m in keeping.members.here() if m.contact.id != me]
        return any(await asyncio.gather(*map(ask, others)))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _candidacy(replica: Replica, epoch: int, trial: bool) -> Candidacy:
    count, last = replica.count, replica.last_epoch
    return Candidacy(replica.workflow, epoch, count, last, trial, replica.birth)
