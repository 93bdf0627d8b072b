"""Sends and receives messages: small ones in sealed datagrams, others over mutual-TLS streams.

The caller does not see which. Streams are pooled, one for each peer, opened by the peer that needs
it first; a frame is a length and its bytes. Every buffer is bounded: a message that does not fit is
dropped and counted, and the call that sent it retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from valence.protocols.config import Config
from valence.protocols.wire.codec import Malformed, decode
from valence.protocols.wire.messages import Contact, Hello

from .identity import TlsContexts, id_of_certificate
from .seal import NOBODY, OVERHEAD_BYTES, Dropped, Seal

_LENGTH = struct.Struct("!I")
BUFFERED_BYTES_MAX = 16 * 2**20
WAITING_FRAMES_MAX = 256
STREAMS_MAX = 1024
STREAM_IDLE_S = 300.0
HANDSHAKE_S = 5.0
KNOCK_S = 0.5
LINE_AGAIN_S = 5.0
SOCKET_BUFFER_BYTES = 4 * 2**20

Receive = Callable[[Contact, bytes], None]


@dataclass(slots=True)
class _Stream:
    """One pooled connection; frames wait here while it is being opened."""

    writer: asyncio.StreamWriter | None = None
    waiting: deque[bytes] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, link: Link) -> None:
        self._link = link

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._link.datagram_received(data, addr)

    def error_received(self, exc: Exception) -> None:
        self._link.counts["datagram_errors"] += 1


class Link:
    """One peer's UDP and TCP port, and its streams to other peers."""

    def __init__(self, seal: Seal, tls: TlsContexts, me: bytes, config: Config) -> None:
        self.counts: Counter[str] = Counter()
        self.receive: Receive = lambda sender, payload: None
        self.on_broken: Callable[[bytes], None] = lambda peer: None  # its stream has broken
        self._seal = seal
        self._tls = tls
        self._me = me
        self._config = config
        self._udp: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None
        self._streams: dict[bytes, _Stream] = {}
        self._line_again: dict[bytes, float] = {}
        self._accepted: set[asyncio.Task[None]] = set()
        self._closing = False

    async def open(self, host: str, port: int) -> int:
        """Listen on the same UDP and TCP port; returns its number."""
        loop = asyncio.get_running_loop()
        for attempt in range(20):
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                with contextlib.suppress(OSError):
                    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
                udp.bind((host, port))
                udp.setblocking(False)
                number: int = udp.getsockname()[1]
                self._server = await asyncio.start_server(
                    self._accept,
                    host,
                    number,
                    ssl=self._tls.server,
                    ssl_handshake_timeout=HANDSHAKE_S,
                    backlog=512,
                )
            except OSError:
                udp.close()
                if port or attempt == 19:
                    raise
                continue
            self._udp, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), sock=udp)
            return number
        raise AssertionError("unreachable")

    # ----------------------------------------------------------------- sending

    def send(self, to: Contact, payload: bytes) -> None:
        if self._closing:
            return
        # port 0: an answer to a message that arrived by a stream goes back by that stream
        if to.port and len(payload) + OVERHEAD_BYTES <= self._config.datagram_bytes_max:
            self._send_datagram(to, payload)
        else:
            self._send_frame(to, payload)

    def _send_datagram(self, to: Contact, payload: bytes) -> None:
        if self._udp is None:
            return
        self.counts["datagrams_sent"] += 1
        try:
            self._udp.sendto(self._seal.seal(to.id, payload), (to.host, to.port))
        except (OSError, ValueError):
            self.counts["datagram_errors"] += 1

    def _send_frame(self, to: Contact, payload: bytes) -> None:
        stream = self._streams.get(to.id)
        if stream is None:
            if len(self._streams) >= STREAMS_MAX or not to.port:
                self.counts["frames_dropped"] += 1
                return
            stream = self._streams[to.id] = _Stream()
            stream.task = asyncio.ensure_future(self._dial(to, stream))
        if stream.writer is None:
            if len(stream.waiting) >= WAITING_FRAMES_MAX:
                self.counts["frames_dropped"] += 1
                return
            stream.waiting.append(payload)
        else:
            self._write(stream.writer, payload)

    def line(self, to: Contact) -> None:
        """Keep a stream to a peer open, so that the end of its process is noticed at once."""
        now = asyncio.get_running_loop().time()
        if to.id in self._streams or self._line_again.get(to.id, 0.0) > now:
            return
        if len(self._streams) < STREAMS_MAX // 2:
            while len(self._line_again) >= STREAMS_MAX:
                del self._line_again[next(iter(self._line_again))]
            self._line_again[to.id] = now + LINE_AGAIN_S  # a peer that refuses is not dialled often
            stream = self._streams[to.id] = _Stream()
            stream.task = asyncio.ensure_future(self._dial(to, stream))

    def _write(self, writer: asyncio.StreamWriter, payload: bytes) -> None:
        if writer.transport.get_write_buffer_size() > BUFFERED_BYTES_MAX:
            self.counts["frames_dropped"] += 1
            return
        self.counts["frames_sent"] += 1
        writer.write(_LENGTH.pack(len(payload)) + payload)

    async def _dial(self, to: Contact, stream: _Stream) -> None:
        writer = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                reader, writer = await asyncio.open_connection(
                    to.host, to.port, ssl=self._tls.client, server_hostname="valence"
                )
            if to.id not in (NOBODY, _peer_of(writer)):  # NOBODY: any peer of the cluster
                self.counts["stream_strangers"] += 1
                return
            stream.writer = writer
            while stream.waiting:
                self._write(writer, stream.waiting.popleft())
            await self._read(Contact(id=_peer_of(writer), host=to.host, port=to.port), reader)
        except (TimeoutError, ValueError):
            self.counts["stream_failures"] += 1
        except (OSError, EOFError):
            self._broke(to.id)
        finally:
            self._streams.pop(to.id, None)
            if writer is not None:
                await _shut(writer)

    def _broke(self, peer: bytes) -> None:
        """The peer or the network has broken a stream: is the peer still alive?"""
        self.counts["stream_failures"] += 1
        if not self._closing:
            self.on_broken(peer)

    async def knock(self, to: Contact) -> bool:
        """True only if the peer's host refuses the connection: the process has ended."""
        self.counts["knocks"] += 1
        try:
            async with asyncio.timeout(KNOCK_S):
                _, writer = await asyncio.open_connection(to.host, to.port)
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        await _shut(writer)
        return False

    # ----------------------------------------------------------------- receiving

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self.counts["datagrams_received"] += 1
        try:
            sender, payload, for_me = self._seal.open(data)
        except Dropped as reason:
            self.counts[f"dropped_{reason}"] += 1
            return
        if sender == self._me:
            self.counts["dropped_own"] += 1
            return
        if not for_me and not _is_hello(payload):
            self.counts["dropped_garbage"] += 1
            return
        self.receive(Contact(id=sender, host=address[0], port=address[1]), payload)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._accepted) >= STREAMS_MAX or self._closing:
            self.counts["streams_refused"] += 1
            writer.close()
            return
        self._accepted.add(task)
        sender = NOBODY
        try:
            sender = _peer_of(writer)
            stream = self._streams.get(sender)
            if stream is None:  # answers may go back by the stream of the question
                stream = self._streams[sender] = _Stream(writer=writer)
            host = writer.get_extra_info("peername")[0]
            await self._read(Contact(id=sender, host=host, port=0), reader, writer)
        except (TimeoutError, ValueError):
            self.counts["stream_failures"] += 1
        except (OSError, EOFError):
            self._broke(sender)
        except asyncio.CancelledError:
            if not self._closing:
                raise
        finally:
            self._accepted.discard(task)
            self._forget_stream(writer)
            await _shut(writer)

    def _forget_stream(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ValueError):
            peer = _peer_of(writer)
            stream = self._streams.get(peer)
            if stream is not None and stream.writer is writer:
                del self._streams[peer]

    async def _read(
        self,
        sender: Contact,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter | None = None,
    ) -> None:
        while True:
            async with asyncio.timeout(STREAM_IDLE_S):
                head = await reader.readexactly(_LENGTH.size)
            (length,) = _LENGTH.unpack(head)
            if length > self._config.message_bytes_max + 1024:
                self.counts["dropped_oversized"] += 1
                return
            async with asyncio.timeout(STREAM_IDLE_S):
                payload = await reader.readexactly(length)
            self.counts["frames_received"] += 1
            self.receive(sender, payload)

    async def close(self) -> None:
        self._closing = True
        if self._server is not None:
            self._server.close()
        tasks = [s.task for s in self._streams.values() if s.task] + list(self._accepted)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._udp is not None:
            self._udp.close()


def _is_hello(payload: bytes) -> bool:
    try:
        return isinstance(decode(payload).message, Hello)
    except Malformed:
        return False


def _peer_of(writer: asyncio.StreamWriter) -> bytes:
    tls = writer.get_extra_info("ssl_object")
    der = tls.getpeercert(binary_form=True) if tls else None
    if not der:
        raise ValueError("no certificate")
    return id_of_certificate(der)


async def _shut(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(Exception):
        writer.transport.abort()


__all__ = ["NOBODY", "Link"]
