"""Access tokens of the HTTP API, each with an owner, a scope and an expiry date.

The cluster's own token (a setting, the same at every peer) allows everything. Everybody who has it
can make further tokens from it, for people and programs. They are signed, so every peer can check
one without asking another, and they reveal nothing about the token that signed them. Such a token
ends at its date, when its id is listed in the setting `revoked`, or when the cluster's token is
changed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

#: each scope includes those before it
SCOPES = ("read", "submit", "admin")
#: between a task queue and its sites: allows to exchange work and to read blobs, nothing else
PILOT = "pilot"
PILOT_S = 86400.0
EVERYBODY = ""  # all owners, whose workflows an admin sees
ADMIN = "admin"
TOKEN_CHARS_MAX = 1000
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MARK = "v1"
_INVALID = "the token is not valid in this cluster"


class BadToken(ValueError):
    """Why a token is not accepted; the text may be shown to its sender."""


@dataclass(frozen=True, slots=True)
class Access:
    """The access that a token gives."""

    owner: str
    scope: str
    id: str = ""

    def may(self, scope: str, pilots: bool = False) -> bool:
        """Whether this scope is allowed. `pilots`: the route is open to pilots, too."""
        if PILOT in (self.scope, scope):
            return self.scope == "admin" or (self.scope == PILOT and (pilots or scope == PILOT))
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    @property
    def sees(self) -> str:
        """The owner whose workflows the token shows, or everybody."""
        return EVERYBODY if self.scope == "admin" else self.owner


def _sign(root: str, payload: str) -> str:
    key = hmac.digest(root.encode(), b"valence tokens 1", hashlib.sha256)
    return _pack(hmac.digest(key, payload.encode(), hashlib.sha256))


def _pack(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unpack(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def make(root: str, owner: str, scope: str, ends_at: float) -> tuple[str, str]:
    """A new token and its id."""
    if not _OWNER.fullmatch(owner):
        raise ValueError(
            f"invalid owner {owner!r}: use 1 to 64 letters, digits and . _ @ -, the first a letter "
            "or digit"
        )
    if owner == ADMIN and scope != "admin":
        raise ValueError(f"the owner {ADMIN!r} is reserved for the cluster's own token")
    if scope not in SCOPES:
        raise ValueError(f"unknown scope {scope!r}: use one of {', '.join(SCOPES)}")
    return _signed(root, owner, scope, ends_at)


class PilotToken:
    """The token between a site and its queue, in place of the cluster's own: whoever steals it can
    exchange work and read blobs with a known hash, for a day at most."""

    def __init__(self, root: str, clock: Callable[[], float]) -> None:
        self._root = root
        self._clock = clock
        self._token, self._ends_at = "", 0.0

    def __str__(self) -> str:
        now = self._clock()
        if now > self._ends_at - PILOT_S / 2:
            self._ends_at = now + PILOT_S
            self._token, _ = _signed(self._root, PILOT, PILOT, self._ends_at)
        return self._token


def _signed(root: str, owner: str, scope: str, ends_at: float) -> tuple[str, str]:
    token_id = secrets.token_hex(6)
    row = [token_id, owner, scope, int(ends_at)]
    payload = _pack(json.dumps(row, separators=(",", ":")).encode())
    return f"{_MARK}.{payload}.{_sign(root, payload)}", token_id


class Tokens:
    """Checks tokens against the cluster's own."""

    def __init__(self, root: str, revoked: Iterable[str], clock: Callable[[], float]) -> None:
        self._root = root
        self._root_bytes = root.encode()
        self._revoked = frozenset(revoked)
        self._clock = clock

    def check(self, token: str) -> Access:
        """The access that a token gives, or `BadToken`."""
        if hmac.compare_digest(token.encode("utf-8", "replace"), self._root_bytes):
            return Access(ADMIN, "admin")
        mark, _, rest = token.partition(".")
        payload, _, signature = rest.partition(".")
        if mark != _MARK or not signature or len(token) > TOKEN_CHARS_MAX or not token.isascii():
            raise BadToken(_INVALID)
        expected = _sign(self._root, payload)
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode()):
            raise BadToken(_INVALID)
        try:
            token_id, owner, scope, ends_at = json.loads(_unpack(payload))
        except (ValueError, binascii.Error):
            raise BadToken(_INVALID) from None
        if ends_at < self._clock():
            raise BadToken("the token has expired; ask for a new one")
        if token_id in self._revoked:
            raise BadToken("the token has been revoked; ask for a new one")
        return Access(owner, scope, token_id)
