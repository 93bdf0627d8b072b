"""The owner of cells: matches claims with tickets, and has the tickets' peers redeem the claims.

Every peer owns the cells whose control points are closest to its id. Rules:
- A cell where no claim waits is silent: no ticket is posted to it. Its owner knows the peers of the
  cell from the members, and assumes that they are idle, or guesses what must have ended there since
  it last heard of them. A claim that is matched with such a guess is redeemed, or comes back short.
  When a claim must wait, all silent peers are asked: each answers with its real capacity, and
  announces when it has more for as long as claims wait.
- A ticket is not matched while its peer has redemptions to answer: its ticket may be older than
  those.
- Nothing here is on disk, or replicated: a cell whose owner dies starts empty at the next closest
  peer, with the claims and tickets that are posted there as soon as the death is known.
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
        # outstanding answers by cell and peer
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
            if market is None:  # it wants nothing; or is posted again, perhaps to another owner
                prospects.append(Prospect(claim.offered))
                continue
            prospect, met = market.post(sender.id, claim, now)
            prospects.append(prospect)
            matches[claim.cell].extend(met)
        self.counts["claims"] += len(message.claims)
        for cell, met in matches.items():
            self._redeem(cell, met)
        return ClaimsPosted.of(tuple(prospects))

    def _open(self, cell: bytes) -> Market | None:
        """None: this peer has too many cells already."""
        if len(self.markets) >= MARKETS_MAX:
            return None
        market = self.markets[cell] = Market(cell, self._config, self._rng)
        self._some.set()
        self._look_for(cell, market)
        return market

    def _look_for(self, cell: bytes, market: Market) -> None:
        """Add peers of a cell that have no ticket: newcomers, or those whose answer was lost."""
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
        short = self._note_short(message)
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

    def _note_short(self, message: PostTicket) -> dict[bytes, list[ClaimKey]]:
        """The claims that came up short at this peer, by cell."""
        short: dict[bytes, list[ClaimKey]] = defaultdict(list)
        for cell, home, claim, count in message.short:
            market = self.markets.get(cell)
            if market is not None:
                market.short(home, claim, count)
                short[cell].append((home, claim))
        return short

    def _serve_again(self, cell: bytes, claims: list[ClaimKey], but: bytes) -> None:
        """Match these claims with other peers of this cell; their homes look for the rest in other
        cells."""
        market = self.markets.get(cell)
        if market is None:
            return  # no claim is left there
        self._redeem(cell, market.serve_again(claims, but, self._now()))
        for home, claim in dict.fromkeys(claims):
            promised, contact = market.promised(home, claim), self._members.contact(home)
            if promised is not None and contact is not None and self._own.ticket_on_change:
                self._rpc.tell(contact, Shortfall(claim=claim, cell=cell, promised=promised))

    def _redeem(self, cell: bytes, matches: list[Match]) -> None:
        """Ask the peers that were matched; and the silent ones, if claims still wait."""
        market = self.markets.get(cell)
        by_peer: dict[bytes, list[Redemption]] = defaultdict(list)
        for peer, row in matches:
            by_peer[peer].append(row)
        for peer, rows in by_peer.items():
            self._tasks.spawn(self._ask(cell, peer, tuple(rows)))
        if market is not None and self._own.ticket_on_change and market.waits():
            for peer in market.unheard(self._now()):
                if peer not in by_peer:
                    self._tasks.spawn(self._ask(cell, peer, ()))

    async def _ask(self, cell: bytes, peer: bytes, rows: tuple[Redemption, ...]) -> None:
        """Have a peer redeem these; and again, until there is nothing more for it to redeem."""
        while True:
            market, contact = self.markets.get(cell), self._members.contact(peer)
            if market is None or contact is None:
                return
            sent_at, waits = self._now(), bool(market.tell(peer, self._now()))
            message = Redeem.of(rows, self._own.ticket_wanted_s, waits)
            answer = await self._call(cell, contact, message)
            rows = self._next_rows(cell, market, peer, rows, answer, sent_at)
            if not rows:
                return

    def _next_rows(
        self,
        cell: bytes,
        market: Market,
        peer: bytes,
        rows: tuple[Redemption, ...],
        answer: Redeemed | None,
        sent_at: float,
    ) -> tuple[Redemption, ...]:
        """Takes the answer to these; what the peer is to redeem next."""
        offered, short = _outcome(market, rows, answer)
        member = self._members.get(peer)
        if answer is None or member is None:
            market.tickets.pop(peer, None)  # `_look_for` finds it again in a while
        elif short:
            market.told(peer, sent_at + self._own.ticket_wanted_s)
        if short:
            self._serve_again(cell, short, peer)
        if answer is None or member is None:
            return ()
        if self._asked[cell, peer]:
            return ()  # it was asked for more meanwhile: that answer says what is left
        if rows and not offered:  # whatever its ticket says, it has nothing for these
            answer = Redeemed.of((), Ticket(Capacity()))
        return tuple(market.ticket(member, answer.ticket, self._now()))

    async def _call(self, cell: bytes, contact: Contact, message: Redeem) -> Redeemed | None:
        """The answer; None if there was none."""
        pair = (cell, contact.id)
        self._asked[pair] += 1
        self.counts["redeems"] += 1
        self.counts["notifications"] += sum(row.count for row in message.redemptions)
        try:
            return await self._rpc.call(contact, message, Redeemed, self._own.claim_answer_s)
        except CallFailed:
            return None
        finally:
            self._asked[pair] -= 1
            if not self._asked[pair]:
                del self._asked[pair]

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
        restarted = old is not None and old.boot != new.boot
        for market in self.markets.values():
            if new.state >= State.DEAD or restarted:
                market.forget_home(new.contact.id)
            if new.state != State.ALIVE or restarted:
                market.tickets.pop(new.contact.id, None)
        was_alive = old is not None and old.state == State.ALIVE and not restarted
        if not was_alive:
            self._expect(new)

    def _expect(self, newcomer: Member) -> None:
        """The cells of a peer that came alive assume that it is idle, and ask it with the next
        tick."""
        if newcomer.state != State.ALIVE or not self._own.ticket_on_change:
            return
        for cell in self._space.cells_of(newcomer):
            market = self.markets.get(cell.key)
            if market is not None and newcomer.contact.id not in market.tickets:
                market.expect(newcomer)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def close(self) -> None:
        await self._tasks.close()


def _outcome(
    market: Market, rows: tuple[Redemption, ...], answer: Redeemed | None
) -> tuple[int, list[ClaimKey]]:
    """The units that were offered, and the claims that came up short."""
    offered = 0
    short = []
    for index, row in enumerate(rows):
        count = answer.offered[index] if answer and index < len(answer.offered) else 0
        offered += count
        if count < row.count:
            market.short(row.home, row.claim, row.count - count)
            short.append((row.home, row.claim))
    return offered, short
