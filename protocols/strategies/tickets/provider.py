"""The ticket of a peer: posts its free capacity, and redeems the claims that the ticket meets.

Rules:
- Only this peer decides about its capacity: to redeem a claim is to grant a lease by its own
  admission, and to offer it to the claim's home. The owner is told of units without capacity.
- While a cell has claims that wait, a ticket is posted as soon as there is more free capacity than
  in the last one (capacity that comes free together goes in one ticket), and every so often; at
  other times nothing is posted.
- One ticket is on its way at a time: its answer says what to redeem with it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

from ...config import Config
from ...membership.members import Members
from ...wire.messages import Capacity, Contact, Grant, Member, Room, Ticket
from ...wire.rpc import CallFailed, Rpc
from ..advertise import is_more
from .config import TicketsConfig
from .messages import Offer, PostTicket, Redeem, Redeemed, Redemption, TicketPosted
from .space import Space

Reserve = Callable[[bytes, Room], Grant]
SHORT_MAX = 1000
FAILURES_MAX = 10
AGAIN_S = 0.1


class TicketProvider:
    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        space: Space,
        rng: random.Random,
        config: Config,
        reserve: Reserve,
        ticket: Callable[[], Ticket],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._rpc = rpc
        self._members = members
        self._space = space
        self._rng = rng
        self._config = config
        self._own = config.of(TicketsConfig)
        self._reserve = reserve
        self._ticket = ticket
        self._told = Ticket(ticket().free)  # what the cell's owner knows
        self._posted_to: dict[bytes, tuple[bytes, ...]] = {}
        self._wanted_until = 0.0
        self._short: list[tuple[bytes, bytes, int, int]] = []
        self._failures = 0  # in a row
        self._wake = asyncio.Event()
        rpc.on(Redeem, self._redeem)
        members.listen(self._member_changed, at_stake=self._posted_to)

    def changed(self) -> None:
        """There may be more free capacity than before."""
        if self._own.ticket_on_change and self._is_wanted() and self._is_more():
            self._wake.set()

    def _is_wanted(self) -> bool:
        return self._wanted_until > 0.0 and self._now() < self._wanted_until

    def _is_more(self) -> bool:
        all_of_it = self._members.me.capacity.millicores
        return is_more(self._told, self._ticket(), all_of_it, self._config)

    async def run(self) -> None:
        own, rng = self._own, self._rng
        while True:
            if not own.ticket_on_change:  # as in the paper
                await asyncio.sleep(rng.expovariate(1 / own.ticket_refresh_s))
                await self._post()
                continue
            wait_s = own.ticket_refresh_s * (0.75 + 0.5 * rng.random())
            try:
                async with asyncio.timeout(wait_s if self._is_wanted() else None):
                    await self._wake.wait()
                await asyncio.sleep(own.ticket_gather_s)
            except TimeoutError:
                pass
            self._wake.clear()
            if self._is_wanted():
                await self._post()

    async def _post(self) -> None:
        wanted_s = 0.0
        owners = self._owners()
        self._posted_to.clear()
        self._posted_to.update(owners)
        for owner, keys in owners.items():
            contact = self._members.contact(owner)
            if contact is not None:
                wanted_s = max(wanted_s, await self._post_to(contact, keys))
        self._wanted_until = self._now() + wanted_s
        if self._is_more():
            self._wake.set()  # capacity came free meanwhile

    async def _post_to(self, owner: Contact, keys: tuple[bytes, ...]) -> float:
        """Posts the ticket to the owner of these cells; how long that wants to hear of more."""
        self._told = self._ticket()
        short, self._short = tuple(self._short[:SHORT_MAX]), self._short[SHORT_MAX:]
        message = PostTicket.of(keys, self._told, short)
        self.counts["tickets"] += 1
        try:
            answer = await self._rpc.call(owner, message, TicketPosted, self._own.claim_answer_s)
        except CallFailed:
            # posted again soon, to this owner or to its successor; but not for ever
            self._short = [*short, *self._short][:SHORT_MAX]
            self._told = Ticket(Capacity())
            self._failures += 1
            again = self._failures <= FAILURES_MAX
            await asyncio.sleep(AGAIN_S)
            return self._own.ticket_refresh_s if again else 0.0
        self._failures = 0
        if not answer.taken:
            self._told = Ticket(Capacity())
            await asyncio.sleep(AGAIN_S)
        for row in answer.redemptions:
            offered = self._offer(row)
            if offered < row.count and len(self._short) < SHORT_MAX:
                self._short.append((row.cell, row.home, row.claim, row.count - offered))
        if answer.redemptions:
            self._told = self._ticket()
        return answer.wanted_s

    def _redeem(self, sender: Contact, message: Redeem) -> Redeemed:
        offered = tuple(map(self._offer, message.redemptions))
        if message.waits or sum(offered) < sum(row.count for row in message.redemptions):
            self._wanted_until = max(self._wanted_until, self._now() + message.wanted_s)
        self._told = self._ticket()
        self._wake.set()  # from here on the ticket is posted every so often
        return Redeemed.of(offered, self._told)

    def _offer(self, row: Redemption) -> int:
        home = self._members.contact(row.home)
        if home is None:
            return 0
        queue = row.runtime_s is not None
        room = Room(row.needs, row.count, row.runtime_s, row.deadline_in_s, queue, row.hold)
        grant = self._reserve(row.home, room)
        if grant.leases:
            self.counts["offers"] += 1
            self._rpc.tell(home, Offer.of(row.claim, row.cell, grant.leases, grant.queued))
        return len(grant.leases)

    def _owners(self) -> dict[bytes, tuple[bytes, ...]]:
        """The owners of this peer's cells, and the cells of each; mostly there is one of either."""
        owners: dict[bytes, tuple[bytes, ...]] = {}
        for cell in self._space.cells_of(self._members.me):
            owner = self._space.owner(cell.key)
            owners[owner] = (*owners.get(owner, ()), cell.key)
        return owners

    def _member_changed(self, old: Member | None, new: Member) -> None:
        """A cell may have a new owner now, which needs the ticket."""
        if self._is_wanted() and self._owners() != self._posted_to:
            self._told = Ticket(Capacity())
            self.changed()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
