"""Messages ↔ bytes. An envelope is `[version, kind, id, number, *fields]` in msgpack.

Whatever the bytes are, `decode` returns an envelope or raises `Malformed`; nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from .messages import BY_NUMBER, CHECKED_MEMBER, Member, Message

VERSION = 2
#: how deep values are nested in values, at most
VALUES_DEEP_MAX = 8

T = TypeVar("T")


class FrameKind(IntEnum):
    REQUEST = 0
    REPLY = 1
    TELL = 2  # needs no answer
    WORKING = 3  # "I have your request and am serving it": the caller waits longer


class Malformed(ValueError):
    """Bytes that are no envelope of this version."""


@dataclass(frozen=True, slots=True)
class Envelope:
    kind: FrameKind
    id: int
    message: Message | None


def encode(kind: FrameKind, call_id: int, message: Message | None) -> bytes:
    row: list[Any] = [VERSION, int(kind), call_id]
    if message is not None:
        row.append(message.number)
        row.extend(message.__dict__.values())
    packed: bytes = msgpack.packb(row)
    return packed


def decode(data: bytes) -> Envelope:
    row = _unpacked(data)
    kind = FrameKind(row[1])
    if kind is FrameKind.WORKING:
        return Envelope(kind, row[2], None)
    cls = BY_NUMBER.get(row[3]) if len(row) > 3 and type(row[3]) is int else None
    if cls is None:
        raise Malformed("unknown message")
    fields = dict(zip(cls.names, row[4:], strict=False))
    try:
        return Envelope(kind, row[2], _checked(cls.model_validate, fields))
    except (ValidationError, RecursionError) as error:
        raise Malformed(f"{cls.__name__}: {_first(error)}") from None


def _unpacked(data: bytes) -> tuple[Any, ...]:
    """An envelope's row: its version, kind and id are as they should be."""
    try:
        row = msgpack.unpackb(data, use_list=False, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise Malformed(f"not msgpack: {type(error).__name__}") from None
    if not isinstance(row, tuple) or len(row) < 3 or row[0] != VERSION:
        raise Malformed("not an envelope of this version")
    if type(row[1]) is not int or type(row[2]) is not int or not 0 <= row[1] <= 3:
        raise Malformed("not an envelope")
    return row


def pack_member(member: Member) -> bytes:
    packed: bytes = msgpack.packb(member)
    return packed


def read_member(packed: bytes) -> Member:
    try:
        row = msgpack.unpackb(packed, use_list=False, strict_map_key=True, max_ext_len=0)
        return _checked(CHECKED_MEMBER.validate_python, row)
    except (ValidationError, ValueError, msgpack.UnpackException, RecursionError) as error:
        raise Malformed(f"not a member: {type(error).__name__}") from None


def _checked(check: Callable[[Any], T], value: Any) -> T:
    """Check a value, without the fields that a newer version has added at the end of values."""
    for _ in range(VALUES_DEEP_MAX):
        try:
            return check(value)
        except ValidationError as error:
            ends = _longer(error)
            if not ends:
                raise
            for at in sorted(ends, key=len, reverse=True):  # the innermost first
                value = _shortened(value, at, ends[at])
    return check(value)


def _longer(error: ValidationError) -> dict[tuple[Any, ...], int]:
    """Values longer than this version knows, and their known length; none if more is wrong."""
    ends: dict[tuple[Any, ...], int] = {}
    for problem in error.errors(include_url=False, include_input=False):
        place, context = problem["loc"], problem.get("ctx", {})
        if problem["type"] == "too_long" and context.get("field_type") == "NamedTuple":
            at, end = place, int(context["max_length"])
        elif problem["type"] == "unexpected_positional_argument":  # pydantic before 2.14
            at, end = place[:-1], int(place[-1])
        else:
            return {}
        ends[at] = min(ends.get(at, end), end)
    return ends


def _shortened(value: Any, place: tuple[Any, ...], end: int) -> Any:
    if not place:
        return value[:end]
    if isinstance(value, dict):
        return {**value, place[0]: _shortened(value[place[0]], place[1:], end)}
    at = int(place[0])
    return (*value[:at], _shortened(value[at], place[1:], end), *value[at + 1 :])


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    return type(error).__name__
