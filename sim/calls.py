"""The calls of a simulated peer: the product's own, and a look at each request carried out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from valence.protocols.config import Config
from valence.protocols.wire.codec import FrameKind, decode
from valence.protocols.wire.messages import Contact, Message
from valence.protocols.wire.rpc import Handler, R, Rpc, Wire


class ObservedRpc(Rpc):
    """Only public methods are overridden: `received` puts the bytes aside, and the handler that
    they reach, if any, takes them. So nothing is decoded twice unless somebody looks."""

    def __init__(self, me: Contact, wire: Wire, rng: random.Random, config: Config) -> None:
        super().__init__(me, wire, rng, config)
        #: told of each request that is carried out: its sender, its id and the message
        self.on_request: Callable[[Contact, int, Message], None] | None = None
        self.handlers: dict[type[Message], Handler[Any]] = {}
        self._payload = b""

    def on(self, kind: type[R], handler: Handler[R]) -> None:
        self.handlers[kind] = handler

        def observed(sender: Contact, message: R) -> Any:
            payload, self._payload = self._payload, b""
            if payload and self.on_request is not None:
                frame = decode(payload)
                if frame.kind is FrameKind.REQUEST:
                    self.on_request(sender, frame.id, message)
            return handler(sender, message)

        super().on(kind, observed)

    def received(self, sender: Contact, payload: bytes) -> None:
        self._payload = payload
        super().received(sender, payload)
        self._payload = b""
