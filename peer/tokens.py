"""Who may ask over HTTP: tokens with an owner, a scope and an end.

The cluster's own token (a setting, the same at every peer) may do everything. From it anybody who
has it makes further tokens, for people and programs: signed, so that every peer can check one
without asking anybody, and telling nothing of what signed them. Such a token ends by its date, when
its id is listed in the setting `revoked`, or when the cluster's token is changed.
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

#: each may what the ones before it may
SCOPES = ("read", "submit", "admin")
#: between a task queue and its sites: to exchange work, and to read blobs; nothing else
PILOT = "pilot"
PILOT_S = 86400.0
EVERYBODY = ""  # what an admin's questions are about: all owners
ADMIN = "admin"
TOKEN_CHARS_MAX = 1000
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MARK = "v1"


class BadToken(ValueError):
    """Why a token is not taken; its text may be shown to who sent it."""


@dataclass(frozen=True, slots=True)
class Access:
    owner: str
    scope: str
    id: str = ""

    def may(self, scope: str, pilots: bool = False) -> bool:
        """`pilots`: of what is asked for, pilots may have it, too."""
        if PILOT in (self.scope, scope):
            return self.scope == "admin" or (self.scope == PILOT and (pilots or scope == PILOT))
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    @property
    def sees(self) -> str:
        """Whose workflows: its owner's, or everybody's."""
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
        raise ValueError(f"{owner!r}: an owner's name has 1 to 64 letters, digits, and . _ @ -")
    if owner == ADMIN and scope != "admin":
        raise ValueError(f"{ADMIN} is the owner of what the cluster's own token submits")
    if scope not in SCOPES:
        raise ValueError(f"{scope!r}: a scope is one of {', '.join(SCOPES)}")
    return _made(root, owner, scope, ends_at)


class PilotToken:
    """What a site shows to its queue, and a queue to its sites, in place of the cluster's own
    token: who takes it down can read blobs whose hash he knows, until tomorrow."""

    def __init__(self, root: str, clock: Callable[[], float]) -> None:
        self._root = root
        self._clock = clock
        self._made, self._ends_at = "", 0.0

    def __str__(self) -> str:
        now = self._clock()
        if now > self._ends_at - PILOT_S / 2:
            self._ends_at = now + PILOT_S
            self._made, _ = _made(self._root, PILOT, PILOT, self._ends_at)
        return self._made


def _made(root: str, owner: str, scope: str, ends_at: float) -> tuple[str, str]:
    id = secrets.token_hex(6)
    payload = _pack(json.dumps([id, owner, scope, int(ends_at)], separators=(",", ":")).encode())
    return f"{_MARK}.{payload}.{_sign(root, payload)}", id


class Tokens:
    def __init__(self, root: str, revoked: Iterable[str], clock: Callable[[], float]) -> None:
        self._root = root
        self._root_bytes = root.encode()
        self._revoked = frozenset(revoked)
        self._clock = clock

    def check(self, given: str) -> Access:
        """Whose it is and what it may, or `BadToken`."""
        if hmac.compare_digest(given.encode("utf-8", "replace"), self._root_bytes):
            return Access(ADMIN, "admin")
        mark, _, rest = given.partition(".")
        payload, _, signature = rest.partition(".")
        if mark != _MARK or not signature or len(given) > TOKEN_CHARS_MAX or not given.isascii():
            raise BadToken("the token is wrong")
        expected = _sign(self._root, payload)
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode()):
            raise BadToken("the token is wrong")
        try:
            id, owner, scope, ends_at = json.loads(_unpack(payload))
        except (ValueError, binascii.Error):
            raise BadToken("the token is wrong") from None
        if ends_at < self._clock():
            raise BadToken("the token has expired; ask for a new one")
        if id in self._revoked:
            raise BadToken("the token has been revoked")
        return Access(owner, scope, id)
