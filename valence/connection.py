"""One HTTP/1.1 connection to a peer, so light that a short request costs little beyond its packets.

`http.client` connects, does TLS and reads bodies. It spends most of a short request on building the
head piece by piece, and on parsing the response's head as if it were an e-mail. Both are done here
in one go: the head and a short body leave in one packet, and the peer wakes up once.
"""

from __future__ import annotations

import http.client
import select
import socket
from collections.abc import Mapping
from typing import Any

PACKET_BYTES_MAX = 1 << 16
LINE_BYTES_MAX = 1 << 16
HEADERS_MAX = 100


class Headers(dict[str, str]):
    """A response's headers, by their names in lower case."""

    def value(self, name: str) -> str:
        return super().get(name.lower(), "")

    @property
    def media_type(self) -> str:
        return self.value("content-type").partition(";")[0].strip().lower()


class Response(http.client.HTTPResponse):
    """`http.client`'s response, with a faster way of reading the head."""

    fields: Headers

    def begin(self) -> None:
        while True:
            version, self.status, self.reason = _status(self._line())
            self.code = self.status
            self.fields = self._fields()
            if self.status != 100:
                break
        self.version = 10 if version == "HTTP/1.0" else 11
        self._frame()

    def _frame(self) -> None:
        """How the body is delimited, and whether the connection closes after it."""
        connection = self.fields.value("connection").lower()
        self.will_close = "close" in connection or (
            self.version == 10 and "keep-alive" not in connection
        )
        self.chunked = self.fields.value("transfer-encoding").lower() == "chunked"
        self.chunk_left = None
        length = self.fields.value("content-length")
        self.length = int(length) if length.isdigit() and not self.chunked else None
        if self.status in (204, 304) or 100 <= self.status < 200:
            self.length = 0
        if self.length is None and not self.chunked:
            self.will_close = True

    def _line(self) -> str:
        raw = self.fp.readline(LINE_BYTES_MAX + 1)
        if len(raw) > LINE_BYTES_MAX:
            raise http.client.LineTooLong("line of a response")
        return raw.decode("latin-1")

    def _fields(self) -> Headers:
        headers = Headers()
        while line := self._line().rstrip("\r\n"):
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
            if len(headers) > HEADERS_MAX:
                raise http.client.HTTPException(f"more than {HEADERS_MAX} headers in a response")
        return headers


def _status(line: str) -> tuple[str, int, str]:
    if not line:
        raise http.client.RemoteDisconnected("the peer closed the connection without a response")
    version, _, rest = line.rstrip("\r\n").partition(" ")
    code, _, reason = rest.partition(" ")
    if not version.startswith("HTTP/1.") or not code.isdigit() or len(code) != 3:
        raise http.client.BadStatusLine(line[:100])
    return version, int(code), reason


def _head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    if any("\r" in line or "\n" in line for line in lines) or " " in target:
        raise ValueError("a request has a line break or a space where none may be")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Connection:
    """Opened by its first request, and kept for the next while both sides agree."""

    def __init__(self, host: str, port: int | None, secure: bool, timeout_s: float) -> None:
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._inner = kind(host, port, timeout=timeout_s)
        shown = f"[{host}]" if ":" in host else host
        self._host = shown if port is None else f"{shown}:{port}"

    def request(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], url_prefix: str = ""
    ) -> Response:
        """`body`: bytes, a file whose length is among the headers, or nothing."""
        short = body if isinstance(body, bytes) else b""
        head = {"Host": self._host, "Accept-Encoding": "identity", **headers}
        if short or (body is None and method != "GET"):
            head["Content-Length"] = str(len(short))
        data = _head(method, url_prefix + path, head)
        if self._inner.sock is None:
            self._inner.connect()
        to: socket.socket = self._inner.sock
        if len(data) + len(short) <= PACKET_BYTES_MAX:
            to.sendall(data + short)
        else:
            to.sendall(data)
            to.sendall(short)
        if body is not None and not isinstance(body, bytes):
            while chunk := body.read(PACKET_BYTES_MAX):
                to.sendall(chunk)
        response = Response(to, method=method)
        response.begin()
        return response

    @property
    def stale(self) -> bool:
        """Whether the other side has closed it, or has sent something that nobody asked for."""
        if self._inner.sock is None:
            return True
        poll = select.poll()
        poll.register(self._inner.sock, select.POLLIN | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._inner.close()
