"""Calls between peers: retry with the same id, at most one execution per id.

Rules:
- A request is repeated, with the same id, until it is answered or its time is over. The receiver
  remembers (sender, id) and answers a repeat from memory, or says that it is still working;
  a *repeatable* message may simply run again.
- An answer is remembered for longer than any caller repeats (config). When the memory is full of
  younger answers, new requests are refused: forgetting an answer early would break "at most once".
- The time before a repeat adapts to the peer's measured round trips (Jacobson's estimator, and
  Karn's rule: a repeated request measures nothing).
- Everything is bounded: calls waiting, requests being served, answers remembered.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

from ..config import Config
from .codec import FrameKind, Malformed, decode, encode
from .messages import Contact, Message, Refusal

R = TypeVar("R", bound=Message)
Handler = Callable[[Contact, R], Message | Awaitable[Message | None] | None]


class Wire(Protocol):
    """Carries bytes to a peer, by datagram or stream, depending on their size. May lose them."""

    def send(self, to: Contact, payload: bytes) -> None: ...

    async def knock(self, to: Contact) -> bool:
        """True only if its host answers that nothing listens there."""
        ...

    def line(self, to: Contact) -> None:
        """Keep a stream to it open: if its process ends, this is known at once."""
        ...


class CallFailed(Exception):
    """A call that brought no answer: the base of all its failures."""


class PeerUnreachable(CallFailed):
    """No answer came: the request may have been carried out, or not."""


class Refused(CallFailed):
    """The peer answered that it did not carry out the request."""

    def __init__(self, code: str, text: str = "") -> None:
        super().__init__(f"{code}: {text}" if text else code)
        self.code = code
        self.text = text


@dataclass(slots=True)
class _Pending:
    future: asyncio.Future[Message]
    to: Contact
    payload: bytes
    sent_at: float
    retry_s: float
    sends: int = 1
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Served:
    at: float
    answer: bytes | None = None  # None while the request is being served


@dataclass(slots=True)
class RoundTrip:
    """Jacobson's estimator: from the smoothed time and its deviation, when to repeat."""

    smoothed_s: float = 0.0
    deviation_s: float = 0.0

    def measured(self, sample_s: float) -> None:
        if self.smoothed_s == 0.0:
            self.smoothed_s, self.deviation_s = sample_s, sample_s / 2
            return
        self.deviation_s += (abs(sample_s - self.smoothed_s) - self.deviation_s) / 4
        self.smoothed_s += (sample_s - self.smoothed_s) / 8

    def retry_s(self, config: Config) -> float:
        if self.smoothed_s == 0.0:
            return config.retry_first_s
        wanted = self.smoothed_s + 4 * self.deviation_s
        return min(config.retry_max_s, max(config.retry_min_s, wanted))


@dataclass(slots=True)
class Counts:
    """Counters that the metrics read."""

    calls: int = 0
    tells: int = 0
    repeats: int = 0
    unanswered: int = 0
    refused: int = 0
    served: int = 0
    repeats_answered: int = 0
    malformed: int = 0
    overload: int = 0
    failures: int = 0
    bytes_sent: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)


class Rpc:
    def __init__(self, me: Contact, wire: Wire, rng: random.Random, config: Config) -> None:
        self.me = me
        self.counts = Counts()
        self.on_error: Callable[[str, BaseException], None] = lambda where, error: None
        self.on_unreachable: Callable[[Contact], None] = lambda contact: None
        self.on_heard: Callable[[Contact], None] = lambda contact: None
        self._wire = wire
        self._config = config
        self._next_id = rng.getrandbits(62)
        self._handlers: dict[type[Message], Handler[Message]] = {}
        self._pending: dict[int, _Pending] = {}
        self._served: OrderedDict[tuple[bytes, int], _Served] = OrderedDict()
        self._served_bytes = 0
        self._trips: OrderedDict[bytes, RoundTrip] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def on(self, kind: type[R], handler: Handler[R]) -> None:
        self._handlers[kind] = cast(Handler[Message], handler)

    @property
    def calls_pending(self) -> int:
        return len(self._pending)

    @property
    def answers_kept(self) -> int:
        return len(self._served)

    # ----------------------------------------------------------------- calling

    async def call(
        self,
        to: Contact,
        message: Message,
        answer: type[R],
        timeout_s: float | None = None,
        *,
        probing: bool = False,
    ) -> R:
        """The answer, or `CallFailed`. `probing`: the failure detector is not told of silence."""
        if to.id == self.me.id:
            reply = await self._call_self(message)
        else:
            limit_s = timeout_s or self._config.call_timeout_s
            reply = await self._call_far(to, message, limit_s, probing)
        if isinstance(reply, answer):
            return reply
        if isinstance(reply, Refusal):
            self.counts.refused += 1
            raise Refused(reply.code, reply.text)
        raise Refused("protocol", f"{type(reply).__name__} does not answer this")

    async def knock(self, to: Contact) -> bool:
        return await self._wire.knock(to)

    def line(self, to: Contact) -> None:
        self._wire.line(to)

    def tell(self, to: Contact, message: Message) -> None:
        """Send once, without an answer: for messages that may be lost."""
        if to.id == self.me.id:
            self._handle(to, message)
            return
        self.counts.tells += 1
        self._count(message)
        self._send(to, encode(FrameKind.TELL, 0, message))

    async def _call_self(self, message: Message) -> Message:
        result = self._handle(self.me, message)
        if result is not None and not isinstance(result, Message):
            result = await result
        return result or Refusal(code="nothing")

    def ask_self(self, message: Message, answer: type[R]) -> R | None:
        """This very peer's answer, on the spot; None if it refuses or needs time."""
        result = self._handle(self.me, message)
        return result if isinstance(result, answer) else None

    async def _call_far(
        self, to: Contact, message: Message, timeout_s: float, probing: bool
    ) -> Message:
        if self._closed:
            raise PeerUnreachable("this peer is closing")
        if len(self._pending) >= self._config.pending_calls_max:
            self.counts.overload += 1
            raise Refused("overload", "too many calls are waiting for answers here")
        loop = asyncio.get_running_loop()
        self._next_id += 1
        call_id = self._next_id
        payload = encode(FrameKind.REQUEST, call_id, message)
        if len(payload) > self._config.message_bytes_max:
            raise Refused("size", f"{type(message).__name__} has {len(payload):,} bytes")
        streamed = len(payload) > self._config.datagram_bytes_max
        retry_s = self._trip(to.id).retry_s(self._config)
        if streamed:
            retry_s = max(retry_s, self._config.stream_retry_s)
        pending = _Pending(loop.create_future(), to, payload, loop.time(), retry_s)
        self._pending[call_id] = pending
        self.counts.calls += 1
        self._count(message)
        self._send(to, payload)
        pending.timer = loop.call_later(retry_s, self._repeat, call_id)
        try:
            async with asyncio.timeout(timeout_s):
                return await pending.future
        except TimeoutError:
            self.counts.unanswered += 1
            if not probing:
                self.on_unreachable(to)
            where = f"{to.host}:{to.port}"
            raise PeerUnreachable(f"no answer from {where} within {timeout_s:g} s") from None
        finally:
            if pending.timer:
                pending.timer.cancel()
            del self._pending[call_id]

    def gone(self, peer: bytes) -> None:
        """Fail all calls to a peer that has left or died."""
        for pending in list(self._pending.values()):
            if pending.to.id == peer and not pending.future.done():
                pending.future.set_exception(PeerUnreachable("the peer is gone"))

    def _repeat(self, call_id: int) -> None:
        pending = self._pending.get(call_id)
        if pending is None or pending.future.done():
            return
        pending.sends += 1
        pending.retry_s = min(
            max(self._config.retry_max_s, pending.retry_s),
            pending.retry_s * self._config.retry_growth,
        )
        self.counts.repeats += 1
        self._send(pending.to, pending.payload)
        loop = asyncio.get_running_loop()
        pending.timer = loop.call_later(pending.retry_s, self._repeat, call_id)

    def _send(self, to: Contact, payload: bytes) -> None:
        self.counts.bytes_sent += len(payload)
        self._wire.send(to, payload)

    def _count(self, message: Message) -> None:
        name = type(message).__name__
        self.counts.by_kind[name] = self.counts.by_kind.get(name, 0) + 1

    def _trip(self, peer: bytes) -> RoundTrip:
        trip = self._trips.get(peer)
        if trip is None:
            trip = self._trips[peer] = RoundTrip()
            if len(self._trips) > self._config.members_max:
                self._trips.popitem(last=False)
        return trip

    # ----------------------------------------------------------------- being called

    def received(self, sender: Contact, payload: bytes) -> None:
        """Take bytes from a peer whose id the wire vouches for. Never raises."""
        if self._closed:
            return
        try:
            envelope = decode(payload)
        except Malformed:
            self.counts.malformed += 1
            return
        self.on_heard(sender)
        if envelope.kind is FrameKind.REQUEST and envelope.message is not None:
            self._request(sender, envelope.id, envelope.message)
        elif envelope.kind is FrameKind.TELL and envelope.message is not None:
            self._start(sender, None, envelope.message)
        else:
            self._answered(sender, envelope.id, envelope.message)

    def _answered(self, sender: Contact, call_id: int, message: Message | None) -> None:
        pending = self._pending.get(call_id)
        # only the peer that was called may answer (or any peer, while its id is not known yet)
        if pending is None or pending.future.done():
            return
        if any(pending.to.id) and pending.to.id != sender.id:
            return
        if message is None:  # the peer is still working: repeat only to stay in touch
            pending.retry_s = self._config.retry_max_s
            return
        if pending.sends == 1:
            elapsed = asyncio.get_running_loop().time() - pending.sent_at
            if len(pending.payload) <= self._config.datagram_bytes_max:
                self._trip(sender.id).measured(elapsed)
        pending.future.set_result(message)

    def _request(self, sender: Contact, call_id: int, message: Message) -> None:
        if message.repeatable:
            self._start(sender, call_id, message)
            return
        now = asyncio.get_running_loop().time()
        key = (sender.id, call_id)
        served = self._served.get(key)
        if served is not None:
            self.counts.repeats_answered += 1
            self._send(sender, served.answer or encode(FrameKind.WORKING, call_id, None))
            return
        self._forget(now)
        full = len(self._served) >= self._config.answers_kept_max
        if full or self._served_bytes >= self._config.answers_bytes_max:
            self._overloaded(sender, call_id)
            return
        self._served[key] = _Served(now)
        if not self._start(sender, call_id, message, remember=key):
            self._served.pop(key, None)

    def _overloaded(self, sender: Contact, call_id: int) -> None:
        self.counts.overload += 1
        refusal = Refusal(code="overload", text="this peer is serving too many requests")
        self._send(sender, encode(FrameKind.REPLY, call_id, refusal))

    def _forget(self, now: float) -> None:
        while self._served:
            key, oldest = next(iter(self._served.items()))
            if oldest.answer is None or now - oldest.at < self._config.answer_kept_s:
                return
            self._served_bytes -= len(oldest.answer)
            del self._served[key]

    def _start(
        self,
        sender: Contact,
        call_id: int | None,
        message: Message,
        remember: tuple[bytes, int] | None = None,
    ) -> bool:
        """Run the handler, or begin to; False if too many are running. No `call_id`: no answer."""
        if len(self._tasks) >= self._config.serving_max:
            if call_id is None:
                self.counts.overload += 1
            else:
                self._overloaded(sender, call_id)
            return False
        self.counts.served += 1
        result = self._handle(sender, message)
        if result is None or isinstance(result, Message):
            self._finish(sender, call_id, result, remember)
            return True
        task = asyncio.ensure_future(self._work(sender, call_id, message, result, remember))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def _handle(
        self, sender: Contact, message: Message
    ) -> Message | Awaitable[Message | None] | None:
        handler = self._handlers.get(type(message))
        if handler is None:
            return Refusal(code="unsupported", text=type(message).__name__)
        try:
            result = handler(sender, message)
        except Refused as error:
            return Refusal(code=error.code, text=error.text[:2000])
        except Exception as error:
            return self._failed(message, error)
        if result is None or isinstance(result, Message):
            return result
        return self._guard(message, result)

    async def _guard(self, message: Message, work: Awaitable[Message | None]) -> Message | None:
        try:
            return await work
        except Refused as error:
            return Refusal(code=error.code, text=error.text[:2000])
        except CallFailed as error:
            return Refusal(code="unreachable", text=str(error)[:2000])
        except Exception as error:
            return self._failed(message, error)

    def _failed(self, message: Message, error: Exception) -> Refusal:
        self.counts.failures += 1
        self.on_error(type(message).__name__, error)
        return Refusal(code="error", text=f"{type(error).__name__} while serving")

    async def _work(
        self,
        sender: Contact,
        call_id: int | None,
        message: Message,
        work: Awaitable[Message | None],
        remember: tuple[bytes, int] | None,
    ) -> None:
        self._finish(sender, call_id, await work, remember)

    def _finish(
        self,
        sender: Contact,
        call_id: int | None,
        answer: Message | None,
        remember: tuple[bytes, int] | None,
    ) -> None:
        if call_id is None:
            return
        payload = encode(FrameKind.REPLY, call_id, answer or Refusal(code="nothing"))
        if len(payload) > self._config.message_bytes_max:
            text = f"the answer has {len(payload):,} bytes"
            payload = encode(FrameKind.REPLY, call_id, Refusal(code="size", text=text))
        large = len(payload) > self._config.datagram_bytes_max
        if remember is not None and large and isinstance(answer, Message) and answer.forgettable:
            # It goes by stream, which delivers or breaks: a repeat that comes before that is known
            # is only impatient, and is not served again.
            loop = asyncio.get_running_loop()
            wait_s = 3 * self._config.stream_retry_s
            self._served[remember] = _Served(loop.time())
            loop.call_later(wait_s, self._served.pop, remember, None)
        elif remember is not None:
            now = asyncio.get_running_loop().time()
            self._served[remember] = _Served(now, payload)
            self._served.move_to_end(remember)
            self._served_bytes += len(payload)
        self._send(sender, payload)

    async def close(self) -> None:
        self._closed = True
        for pending in list(self._pending.values()):
            if not pending.future.done():
                pending.future.set_exception(PeerUnreachable("this peer is closing"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
