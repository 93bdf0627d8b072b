"""Tracks the attempts that are outstanding at other peers, and asks those peers about them.

An outstanding attempt ends with its report, with its peer's death, or when the peer says that it
does not know the attempt (`Inquire`). Peers are asked now and then, and at once when in doubt. So
the two sides never disagree for long about whether a task is running.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable

from ..membership.members import Members
from ..wire.messages import AttemptKey, Inquire, Inquired
from ..wire.rpc import CallFailed, Rpc

CHECK_S, CHECK_S_MAX = 5.0, 30.0
CHECK_TICK_S = 1.0
CHECK_KEYS_MAX = 2000

Lost = Callable[[list[tuple[AttemptKey, str]]], None]


class Outstanding:
    def __init__(
        self, rpc: Rpc, members: Members, epoch: Callable[[str], int], on_lost: Lost
    ) -> None:
        self.on_first: Callable[[], None] = lambda: None  # work went to a peer that had none
        self.on_the_way: set[AttemptKey] = set()  # and the peer has not answered yet
        # A peer that has just started does not know the others yet: until it does, an unknown peer
        # is not a lost one
        self.settled = False
        self._rpc = rpc
        self._members = members
        self._epoch = epoch
        self._on_lost = on_lost
        self._at: dict[bytes, dict[AttemptKey, None]] = defaultdict(dict)
        self._check_at: dict[bytes, float] = {}
        self._some = asyncio.Event()
        self._doubted = asyncio.Event()  # a peer must be asked now

    def add(self, peer: bytes, key: AttemptKey) -> None:
        first = not self._at[peer]
        self._at[peer][key] = None
        if first:
            now = asyncio.get_running_loop().time()
            self._check_at[peer] = min(self._check_at.get(peer, math.inf), now + CHECK_S)
            self._some.set()
            if peer != self._rpc.me.id:
                self.on_first()

    def drop(self, peer: bytes, keys: Iterable[AttemptKey]) -> None:
        outstanding = self._at[peer]
        for key in keys:
            outstanding.pop(key, None)

    def drop_anywhere(self, keys: Iterable[AttemptKey]) -> None:
        for key in keys:
            for outstanding in self._at.values():
                outstanding.pop(key, None)

    def forget(self, workflow: str) -> None:
        for outstanding in self._at.values():
            for key in [key for key in outstanding if key.workflow == workflow]:
                del outstanding[key]

    def __len__(self) -> int:
        return sum(map(len, self._at.values()))

    def to(self, peer: bytes) -> list[AttemptKey]:
        return list(self._at.get(peer, ()))

    def peers(self) -> list[bytes]:
        """The peers that have outstanding attempts."""
        return [peer for peer, keys in self._at.items() if keys]

    def doubt(self, peer: bytes) -> None:
        """Has the peer asked at once, as it may not know its attempts."""
        self._check_at[peer] = 0.0
        self._doubted.set()

    async def watch(self) -> None:
        interval: dict[bytes, float] = {}
        while True:
            if not self._at:
                self._some.clear()
                await self._some.wait()
            self._doubted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_TICK_S):
                    await self._doubted.wait()
            if not self.settled:
                continue
            await asyncio.gather(*(self._check(peer) for peer in self._due(interval)))

    def _due(self, interval: dict[bytes, float]) -> list[bytes]:
        """The peers to ask now. `interval`: of each, the time until it is asked again, which
        grows."""
        now = asyncio.get_running_loop().time()
        for peer in [p for p, keys in self._at.items() if not keys]:
            self._at.pop(peer)
            self._check_at.pop(peer, None)
            interval.pop(peer, None)
        due = [p for p in self._at if self._check_at.get(p, 0.0) <= now]
        for peer in due:
            interval[peer] = min(CHECK_S_MAX, 1.5 * interval.get(peer, CHECK_S))
            self._check_at[peer] = now + interval[peer]
        return due

    async def _check(self, peer: bytes) -> None:
        keys = [k for k in self._at.get(peer, ()) if k not in self.on_the_way][:CHECK_KEYS_MAX]
        if not keys:
            return
        contact = self._members.contact(peer)
        if not self._members.is_here(peer) or contact is None:
            self._lose(keys, f"peer {peer.hex()[:8]} is gone")
            return
        homes = {key.workflow: self._epoch(key.workflow) for key in keys}
        message = Inquire(keys=tuple(keys), epochs=tuple(homes.items()))
        try:
            answer = await self._rpc.call(contact, message, Inquired)
        except CallFailed:
            self._check_at[peer] = 0.0
            return
        unknown = self._unknown(peer, keys, answer)
        if unknown:
            self._lose(unknown, f"peer {peer.hex()[:8]} does not know this attempt")

    def _unknown(self, peer: bytes, keys: list[AttemptKey], answer: Inquired) -> list[AttemptKey]:
        states = zip(keys, answer.states, strict=False)
        outstanding = self._at.get(peer, {})
        return [key for key, state in states if state == "unknown" and key in outstanding]

    def _lose(self, keys: list[AttemptKey], why: str) -> None:
        self._on_lost([(key, why) for key in keys])
