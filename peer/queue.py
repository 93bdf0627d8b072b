"""A peer's client of a task queue: it posts one packed message, and gets one back."""

from __future__ import annotations

import json
import time

import aiohttp

from valence.protocols.wire.codec import FrameKind, Malformed, decode, encode
from valence.protocols.wire.messages import Message
from valence.protocols.wire.rpc import CallFailed, PeerUnreachable, Refused

from .settings import Settings
from .tokens import PilotToken

ANSWER_S = 15.0
CONNECT_S = 3.0
ANSWER_BYTES_MAX = 32 << 20


class QueueClient:
    """One HTTP session with the task queue of this peer's site."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.queue.rstrip("/") + "/v1/queue"
        self._token = PilotToken(settings.token, time.time)
        self._session: aiohttp.ClientSession | None = None

    async def exchange(self, message: Message) -> Message:
        if self._session is None or self._session.closed:
            limit = aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
            self._session = aiohttp.ClientSession(timeout=limit)
        body = encode(FrameKind.REQUEST, 0, message)
        try:
            headers = {"Authorization": f"Bearer {self._token}"}
            send = self._session.post(self._url, data=body, headers=headers, allow_redirects=False)
            async with send as response:
                data = await response.content.read(ANSWER_BYTES_MAX)
                while not response.content.at_eof() and len(data) < ANSWER_BYTES_MAX:
                    data += await response.content.read(ANSWER_BYTES_MAX - len(data))
                if response.status != 200:
                    raise Refused("queue", _refusal(response.status, data))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise PeerUnreachable(str(error) or type(error).__name__) from None
        try:
            answer = decode(data).message
        except Malformed as error:
            raise Refused("protocol", f"the task queue's answer can't be read: {error}") from None
        if answer is None:
            raise CallFailed("the task queue's answer is empty")
        return answer

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {json.loads(body).get('detail', '')}"[:300]
    except (ValueError, AttributeError):
        return f"HTTP {status}"
