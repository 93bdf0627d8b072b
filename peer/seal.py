"""Seals datagrams with the cluster key: only a peer that has it can make one, or open one.

`mark, flag, sender, session, counter, [time, payload] sealed`. Each start of a sender is a session
with a key of its own (derived from the cluster key), so a counter is a safe nonce. The receiver's
id is authenticated, so a datagram for one peer is useless at another. Replays are dropped: by a
window of counters, and by the time if they were recorded before the receiver's own start.
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
#: clocks of one cluster may differ by this much; beyond it, datagrams are dropped and counted
SKEW_S_MAX = 120
SESSIONS_MAX = 20_000
#: after so many failures in a second, only one datagram of each STRANGERS_TRIED from unknown
#: senders is tried; datagrams of known peers are always opened
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
    """Seals this peer's datagrams, and opens those of others."""

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
        """True if so many datagrams could not be opened in this second that strangers must wait."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._wrong = second, 0
        return self._wrong >= WRONG_PER_S_MAX

    def _key(self, sender: bytes, session: bytes) -> bytes:
        return derive(self._root, b"session" + sender + session)

    def seal(self, to: bytes, payload: bytes) -> bytes:
        """Seal a payload for one peer, or for any peer at an address if `to` is NOBODY."""
        self._counter += 1
        flag = 1 if to == NOBODY else 0
        header = _HEADER.pack(_MARK, flag, self._me, self._session, self._counter)
        nonce = self._counter.to_bytes(12, "big")
        body = _TIME.pack(int(self._clock()) & 0xFFFFFFFF) + payload
        return header + self._cipher.encrypt(nonce, body, header + to)

    def open(self, datagram: bytes) -> tuple[bytes, bytes, bool]:
        """The sender, the payload, and whether it was sent to this peer by its id; or `Dropped`."""
        if len(datagram) < OVERHEAD_BYTES:
            raise Dropped("garbage")
        mark, flag, sender, session, counter = _HEADER.unpack_from(datagram)
        if mark != _MARK or flag > 1:
            raise Dropped("garbage")
        known = self._sessions.get((sender, session))
        opener = known or self._new_session(sender, session)
        header = datagram[: _HEADER.size]
        to = NOBODY if flag else self._me
        try:
            body = opener.cipher.decrypt(
                counter.to_bytes(12, "big"), datagram[_HEADER.size :], header + to
            )
        except InvalidTag:
            self._wrong += known is None
            raise Dropped("key") from None
        skew = abs(int(self._clock()) - _TIME.unpack_from(body)[0])
        if skew > SKEW_S_MAX:
            raise Dropped("clock")
        if known is None:  # only a sender with the cluster key can make this memory grow
            self._remember(sender, session, opener)
        if not opener.fresh(counter):
            raise Dropped("replay")
        return sender, body[_TIME.size :], not flag

    def _new_session(self, sender: bytes, session: bytes) -> _Session:
        if self._flooded():
            self._passed_over += 1
            if self._passed_over % STRANGERS_TRIED:  # some pass, so a new peer gets through in time
                raise Dropped("flood")
        return _Session(ChaCha20Poly1305(self._key(sender, session)))

    def _remember(self, sender: bytes, session: bytes, opener: _Session) -> None:
        self._sessions[(sender, session)] = opener
        if len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
