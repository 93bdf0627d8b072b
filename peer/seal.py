"""Datagrams sealed under the cluster key: who can't open one can't make one.

`mark, flag, sender, session, counter, [time, payload] sealed`. Each start of a sender is a session
with a key of its own (derived from the cluster key), so a counter is a safe nonce. The receiver's
id is authenticated, so a datagram for one peer is worth nothing at another; a window over counters
drops replays; the time drops what was kept from before the receiver's own start.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from .identity import derive

_HEADER = struct.Struct("!BB20s8sQ")
_TIME = struct.Struct("!I")
_MARK = 0x56
OVERHEAD_BYTES = _HEADER.size + _TIME.size + 16
WINDOW = 4096
#: clocks of one cluster may differ by this; further apart, datagrams are dropped and counted
SKEW_S_MAX = 120
SESSIONS_MAX = 20_000
#: beyond this only every so-manieth stranger is tried; peers that are known are heard all the same
WRONG_PER_S_MAX = 2000
STRANGERS_TRIED = 16
NOBODY = bytes(20)


class Dropped(Exception):
    """Why a datagram was not taken: `garbage`, `key`, `replay`, `clock` or `flood`."""


@dataclass(slots=True)
class _Session:
    cipher: ChaCha20Poly1305
    highest: int = 0
    seen: int = 0  # bit i: counter highest - i was seen

    def fresh(self, counter: int) -> bool:
        if counter > self.highest:
            shift = min(counter - self.highest, WINDOW)
            self.seen = ((self.seen << shift) | 1) & ((1 << WINDOW) - 1)
            self.highest = counter
            return True
        behind = self.highest - counter
        if behind >= WINDOW or self.seen >> behind & 1:
            return False
        self.seen |= 1 << behind
        return True


class Seal:
    def __init__(self, me: bytes, cluster_key: str, clock: Callable[[], float]) -> None:
        self._me = me
        self._clock = clock
        self._root = derive(cluster_key, b"datagrams").hex()
        self._session = os.urandom(8)
        self._cipher = ChaCha20Poly1305(self._key(me, self._session))
        self._counter = 0
        self._second = 0
        self._wrong = 0
        self._passed_over = 0
        self._sessions: OrderedDict[tuple[bytes, bytes], _Session] = OrderedDict()

    def _flooded(self) -> bool:
        """So many could not be opened in this second that strangers are not tried any more."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._wrong = second, 0
        return self._wrong >= WRONG_PER_S_MAX

    def _key(self, sender: bytes, session: bytes) -> bytes:
        return derive(self._root, b"session" + sender + session)

    def seal(self, to: bytes, payload: bytes) -> bytes:
        """For one peer; for whoever is at an address if `to` is NOBODY."""
        self._counter += 1
        flag = 1 if to == NOBODY else 0
        header = _HEADER.pack(_MARK, flag, self._me, self._session, self._counter)
        nonce = self._counter.to_bytes(12, "big")
        body = _TIME.pack(int(self._clock()) & 0xFFFFFFFF) + payload
        return header + self._cipher.encrypt(nonce, body, header + to)

    def open(self, datagram: bytes) -> tuple[bytes, bytes, bool]:
        """Sender, payload, and whether it was addressed to this very peer; or `Dropped`."""
        if len(datagram) < OVERHEAD_BYTES:
            raise Dropped("garbage")
        mark, flag, sender, session, counter = _HEADER.unpack_from(datagram)
        if mark != _MARK or flag > 1:
            raise Dropped("garbage")
        known = self._sessions.get((sender, session))
        if known is None and self._flooded():
            self._passed_over += 1
            if self._passed_over % STRANGERS_TRIED:  # some are: a newcomer gets through in the end
                raise Dropped("flood")
        found = known or _Session(ChaCha20Poly1305(self._key(sender, session)))
        header = datagram[: _HEADER.size]
        to = NOBODY if flag else self._me
        try:
            body = found.cipher.decrypt(
                counter.to_bytes(12, "big"), datagram[_HEADER.size :], header + to
            )
        except InvalidTag:
            self._wrong += known is None
            raise Dropped("key") from None
        skew = abs(int(self._clock()) - _TIME.unpack_from(body)[0])
        if skew > SKEW_S_MAX:
            raise Dropped("clock")
        if known is None:  # only who has the cluster key can make this memory grow
            self._sessions[(sender, session)] = found
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)
        if not found.fresh(counter):
            raise Dropped("replay")
        return sender, body[_TIME.size :], not flag
