"""Limits of the HTTP server: number of connections, idle time, request rate.

An idle connection is closed; one address can't take all connections; an address that guesses tokens
has to wait; a client that sends too many requests is told when to retry. All tables are bounded.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

CONNECTIONS_MAX = 4000
CONNECTIONS_PER_ADDRESS_MAX = 1500
FIRST_REQUEST_S = 15.0  # to send the whole head of the first request
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
        """Take one token from the bucket of this name; False if it is empty."""
        bucket = self._filled(name, now)
        if bucket.left < 1:
            return False
        bucket.left -= 1
        return True


class _Connection(asyncio.Protocol):
    """One connection: passes everything on to the inner protocol, and can be closed."""

    def __init__(self, limits: ConnectionLimits, inner: asyncio.Protocol) -> None:
        self._limits = limits
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
        if not self._limits.admit(self):
            self.transport.abort()  # type: ignore[union-attr]
            self._inner = asyncio.Protocol()
            return
        self._inner.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._limits.gone(self)
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
    """The connections of one listening socket, their number and their idle times."""

    def __init__(self, make: Callable[[], asyncio.Protocol], counts: Counter[str]) -> None:
        self._make = make
        self._counts = counts
        self._open: dict[asyncio.BaseProtocol | None, _Connection] = {}
        self._by_address: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self, self._make())

    def admit(self, connection: _Connection) -> bool:
        from_address = self._by_address[connection.address]
        if len(self._open) >= CONNECTIONS_MAX or from_address >= CONNECTIONS_PER_ADDRESS_MAX:
            self._counts["connections_refused"] += 1
            return False
        self._open[connection._inner] = connection
        self._by_address[connection.address] += 1
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        if self._timer is None and not self._closed:
            self._timer = loop.call_later(SWEEP_S, self._sweep)
        return True

    def gone(self, connection: _Connection) -> None:
        if self._open.pop(connection._inner, None) is not None:
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    def begin(self, inner: asyncio.BaseProtocol | None) -> None:
        """The head of a request is complete: from here on it may take its time."""
        connection = self._open.get(inner)
        if connection is not None:
            connection.serving += 1
            connection.served = True

    def end(self, inner: asyncio.BaseProtocol | None) -> None:
        connection = self._open.get(inner)
        if connection is not None:
            connection.serving -= 1
            connection.idle_since = asyncio.get_running_loop().time()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._open.values()):
            limit_s = IDLE_S if connection.served else FIRST_REQUEST_S
            if (
                not connection.serving
                and now - connection.idle_since > limit_s
                and connection.transport is not None
            ):
                self._counts["connections_idle_closed"] += 1
                connection.transport.abort()
        again = bool(self._open) and not self._closed
        self._timer = loop.call_later(SWEEP_S, self._sweep) if again else None

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
