"""The owner of cells: takes claims and tickets, and tells tickets' peers what to redeem.

Every peer is one, for the cells whose control points are closest to its id. Rules:
- A cell where no claim waits is silent: no ticket is posted to it, and who lives there (its owner
  knows them from the members) is taken for idle, or for what must have ended there since it was
  heard of. What a claim meets of that is redeemed, or comes back short; a claim that must wait has
  all that are silent asked: each answers with what it really has, and says when it has more for as
  long as claims wait.
- A ticket is not matched while its peer has not yet answered what it was to redeem before: what it
  says meanwhile may be older than that.
- Nothing here is on disk, or copied: a cell whose owner dies begins anew at the next closest peer,
  with what homes and peers post there as soon as they hear of the death.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict

from ...config import Config
from ...membership.members import Members, State
from ...tasks import Tasks
from ...wire.messages import Capacity, Contact, Member, Ticket
from ...wire.rpc import CallFailed, Rpc
from .config import TicketsConfig
from .market import ClaimKey, Market, Match
from .messages import (
    ClaimsPosted,
    PostClaims,
    PostTicket,
    Prospect,
    Redeem,
    Redeemed,
    Redemption,
    Shortfall,
    TicketPosted,
)
from .space import Space

TICK_S = 0.5
MARKETS_MAX = 4096


class Owner:
    def __init__(
        self, rpc: Rpc, members: Members, space: Space, rng: random.Random, config: Config
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.markets: dict[bytes, Market] = {}
        self._rpc = rpc
        self._members = members
        self._space = space
        self._rng = rng
        self._config = config
        self._own = config.of(TicketsConfig)
        # cell and peer: so many answers are on their way
        self._asked: Counter[tuple[bytes, bytes]] = Counter()
        self._tasks = Tasks()
        self._some = asyncio.Event()
        rpc.on(PostClaims, self._post_claims)
        rpc.on(PostTicket, self._post_ticket)
        members.listen(self._member_changed, at_stake=self.markets)

    # ----------------------------------------------------------------- claims

    def _post_claims(self, sender: Contact, message: PostClaims) -> ClaimsPosted:
        now = self._now()
        room = self._own.claims_max - sum(map(len, self.markets.values()))
        prospects = []
        matches: dict[bytes, list[Match]] = defaultdict(list)
        for claim in message.claims:
            market = self.markets.get(claim.cell)
            known = market is not None and market.has(sender.id, claim.id)
            if claim.wanted > claim.offered and not known:
                market = market or self._open(claim.cell)
                room -= 1
                if room < 0 or market is None:
                    self.counts["overload"] += 1
                    market = None
            if market is None:  # it wants nothing; or it is said again, perhaps to another owner
                prospects.append(Prospect(claim.offered))
                continue
            prospect, found = market.post(sender.id, claim, now)
            prospects.append(prospect)
            matches[claim.cell].extend(found)
        self.counts["claims"] += len(message.claims)
        for cell, found in matches.items():
            self._redeem(cell, found)
        return ClaimsPosted.of(tuple(prospects))

    def _open(self, cell: bytes) -> Market | None:
        """None: this peer has more cells already than it can see to."""
        if len(self.markets) >= MARKETS_MAX:
            return None
        market = self.markets[cell] = Market(cell, self._config, self._rng)
        self._some.set()
        self._look_for(cell, market)
        return market

    def _look_for(self, cell: bytes, market: Market) -> None:
        """Who lives there and has no ticket: a newcomer, or one whose answer was lost."""
        if self._own.ticket_on_change:
            for member in self._space.members_of(cell):
                if member.state == State.ALIVE and member.contact.id not in market.tickets:
                    market.expect(member)

    # ----------------------------------------------------------------- tickets

    def _post_ticket(self, sender: Contact, message: PostTicket) -> TicketPosted:
        now = self._now()
        self.counts["tickets"] += 1
        member = self._members.get(sender.id)
        rows: list[Redemption] = []
        wanted_s = 0.0
        ticket = message.ticket
        short: dict[bytes, list[ClaimKey]] = defaultdict(list)
        for cell, home, claim, count in message.short:
            market = self.markets.get(cell)
            if market is not None:
                market.short(home, claim, count)
                short[cell].append((home, claim))
        taken = True
        for cell in message.cells:
            market = self.markets.get(cell)
            if market is None and not self._own.ticket_on_change:
                market = self._open(cell)
            if market is None or member is None:
                continue
            if self._asked[cell, sender.id]:
                taken = False
            else:
                rows += market.ticket(member, ticket, now)
                ticket = market.left_of(sender.id)
            wanted_s = max(wanted_s, market.tell(sender.id, now))
        self.counts["notifications"] += sum(row.count for row in rows)
        for cell, claims in short.items():
            self._serve_again(cell, claims, sender.id)
        return TicketPosted.of(tuple(rows), wanted_s, taken)

    def _serve_again(self, cell: bytes, claims: list[ClaimKey], but: bytes) -> None:
        """Elsewhere in this cell; for what is left, their homes look into other cells."""
        market = self.markets.get(cell)
        if market is None:
            return  # nobody wants anything there any more
        self._redeem(cell, market.serve_again(claims, but, self._now()))
        for home, claim in dict.fromkeys(claims):
            promised, contact = market.promised(home, claim), self._members.contact(home)
            if promised is not None and contact is not None and self._own.ticket_on_change:
                self._rpc.tell(contact, Shortfall(claim=claim, cell=cell, promised=promised))

    def _redeem(self, cell: bytes, found: list[Match]) -> None:
        """Ask those that were matched; and, if that was not enough, those that are silent."""
        market = self.markets.get(cell)
        by_peer: dict[bytes, list[Redemption]] = defaultdict(list)
        for peer, row in found:
            by_peer[peer].append(row)
        for peer, rows in by_peer.items():
            self._tasks.spawn(self._ask(cell, peer, tuple(rows)))
        if market is not None and self._own.ticket_on_change and market.waits():
            for peer in market.unheard(self._now()):
                if peer not in by_peer:
                    self._tasks.spawn(self._ask(cell, peer, ()))

    async def _ask(self, cell: bytes, peer: bytes, rows: tuple[Redemption, ...]) -> None:
        """Until there is nothing more for it to redeem."""
        while True:
            market, contact = self.markets.get(cell), self._members.contact(peer)
            if market is None or contact is None:
                return
            self._asked[cell, peer] += 1
            sent_at, waits = self._now(), bool(market.tell(peer, self._now()))
            self.counts["redeems"] += 1
            self.counts["notifications"] += sum(row.count for row in rows)
            message = Redeem.of(rows, self._own.ticket_wanted_s, waits)
            try:
                answer = await self._rpc.call(contact, message, Redeemed, self._own.claim_answer_s)
            except CallFailed:
                answer = None
            finally:
                self._asked[cell, peer] -= 1
                if not self._asked[cell, peer]:
                    del self._asked[cell, peer]
            offered = 0
            short = []
            for index, row in enumerate(rows):
                done = answer.offered[index] if answer and index < len(answer.offered) else 0
                offered += done
                if done < row.count:
                    market.short(row.home, row.claim, row.count - done)
                    short.append((row.home, row.claim))
            member = self._members.get(peer)
            if answer is None or member is None:
                market.tickets.pop(peer, None)  # it is looked for again in a while
            elif short:
                market.told(peer, sent_at + self._own.ticket_wanted_s)
            if short:
                self._serve_again(cell, short, peer)
            if answer is None or member is None:
                return
            if self._asked[cell, peer]:
                return  # it was asked more meanwhile: that answer says what is left
            if rows and not offered:  # whatever it says: it has nothing for these
                answer = Redeemed.of((), Ticket(Capacity()))
            rows = tuple(market.ticket(member, answer.ticket, self._now()))
            if not rows:
                return

    # ----------------------------------------------------------------- as time goes by

    async def run(self) -> None:
        look_at = 0.0
        while True:
            await self._some.wait()
            await asyncio.sleep(TICK_S)
            now = self._now()
            look = now >= look_at
            look_at = now + self._own.ticket_refresh_s if look else look_at
            for cell, market in list(self.markets.items()):
                if look:
                    self._look_for(cell, market)
                self._redeem(cell, market.tick(now))
                if not market.active(now):
                    del self.markets[cell]
            if not self.markets:
                self._some.clear()

    def _member_changed(self, old: Member | None, new: Member) -> None:
        anew = old is not None and old.boot != new.boot
        for market in self.markets.values():
            if new.state >= State.DEAD or anew:
                market.forget_home(new.contact.id)
            if new.state != State.ALIVE or anew:
                market.tickets.pop(new.contact.id, None)
        came = new.state == State.ALIVE and (old is None or old.state != State.ALIVE or anew)
        if came and self._own.ticket_on_change:
            for cell in self._space.cells_of(new):
                found = self.markets.get(cell.key)
                if found is not None and new.contact.id not in found.tickets:
                    found.expect(new)  # and asked with the next tick

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def close(self) -> None:
        await self._tasks.close()
