"""Limits at the HTTP door: how many connections, how long idle, how often.

A connection that says nothing is closed; one address can't take all of them; who guesses tokens
waits; who asks too fast is told when to come back. All tables are bounded.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

CONNECTIONS_MAX = 4000
CONNECTIONS_PER_ADDRESS_MAX = 1500
FIRST_REQUEST_S = 15.0  # to send a whole first request's head
IDLE_S = 75.0  # between requests
SWEEP_S = 5.0
BUCKETS_MAX = 10_000


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class Rates:
    """Token buckets by name: `per_s` on average, `burst` at once."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def _filled(self, name: str, now: float) -> _Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = _Bucket(self._burst, now)
            if len(self._buckets) > BUCKETS_MAX:
                self._buckets.popitem(last=False)
        bucket.left = min(self._burst, bucket.left + (now - bucket.at) * self._per_s)
        bucket.at = now
        return bucket

    def take(self, name: str, now: float) -> bool:
        """One of its share; False if that is used up."""
        bucket = self._filled(name, now)
        if bucket.left < 1:
            return False
        bucket.left -= 1
        return True


class _Door(asyncio.Protocol):
    """One connection: passes everything on, and can be shut."""

    def __init__(self, doors: ConnectionLimits, inner: asyncio.Protocol) -> None:
        self._doors = doors
        self._inner = inner
        self.transport: asyncio.Transport | None = None
        self.address = ""
        self.serving = 0
        self.served = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        if not self._doors.admit(self):
            self.transport.abort()  # type: ignore[union-attr]
            self._inner = asyncio.Protocol()
            return
        self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._doors.gone(self)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class ConnectionLimits:
    """All connections of one listening socket."""

    def __init__(self, make: Callable[[], asyncio.Protocol], counts: Counter[str]) -> None:
        self._make = make
        self._counts = counts
        self._open: dict[asyncio.BaseProtocol | None, _Door] = {}
        self._by_address: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __call__(self) -> asyncio.Protocol:
        return _Door(self, self._make())

    def admit(self, door: _Door) -> bool:
        mine = self._by_address[door.address]
        if len(self._open) >= CONNECTIONS_MAX or mine >= CONNECTIONS_PER_ADDRESS_MAX:
            self._counts["connections_refused"] += 1
            return False
        self._open[door._inner] = door
        self._by_address[door.address] += 1
        loop = asyncio.get_running_loop()
        door.idle_since = loop.time()
        if self._timer is None and not self._closed:
            self._timer = loop.call_later(SWEEP_S, self._sweep)
        return True

    def gone(self, door: _Door) -> None:
        if self._open.pop(door._inner, None) is not None:
            self._by_address[door.address] -= 1
            if not self._by_address[door.address]:
                del self._by_address[door.address]

    def begin(self, inner: asyncio.BaseProtocol | None) -> None:
        """A request's head has come whole: it may take its time now."""
        door = self._open.get(inner)
        if door is not None:
            door.serving += 1
            door.served = True

    def end(self, inner: asyncio.BaseProtocol | None) -> None:
        door = self._open.get(inner)
        if door is not None:
            door.serving -= 1
            door.idle_since = asyncio.get_running_loop().time()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for door in list(self._open.values()):
            limit_s = IDLE_S if door.served else FIRST_REQUEST_S
            if not door.serving and now - door.idle_since > limit_s and door.transport is not None:
                self._counts["connections_idle_closed"] += 1
                door.transport.abort()
        again = bool(self._open) and not self._closed
        self._timer = loop.call_later(SWEEP_S, self._sweep) if again else None

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
