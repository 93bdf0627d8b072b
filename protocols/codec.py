"""Messages ↔ bytes. An envelope is `[version, kind, id, number, *fields]` in msgpack.

Whatever the bytes are, `decode` returns an envelope or raises `Malformed`; nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack
from pydantic import ValidationError

from .messages import BY_NUMBER, Message, Struct

VERSION = 1


class Kind(IntEnum):
    REQUEST = 0
    REPLY = 1
    TELL = 2  # wants no answer
    WORKING = 3  # "I have your request and am at it": the caller waits longer


class Malformed(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class Envelope:
    kind: Kind
    id: int
    message: Message | None


def wire_fields(value: Any) -> Any:
    if isinstance(value, Struct):
        return value.fields()
    raise TypeError(f"{type(value).__name__} has no place in a message")


def encode(kind: Kind, id: int, message: Message | None) -> bytes:
    row: list[Any] = [VERSION, int(kind), id]
    if message is not None:
        row.append(message.number)
        row.extend(message.__dict__.values())
    packed: bytes = msgpack.packb(row, default=wire_fields)
    return packed


def decode(data: bytes) -> Envelope:
    try:
        row = msgpack.unpackb(data, use_list=False, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise Malformed(f"not msgpack: {type(error).__name__}") from None
    if not isinstance(row, tuple) or len(row) < 3 or row[0] != VERSION:
        raise Malformed("not an envelope of this version")
    if type(row[1]) is not int or type(row[2]) is not int or not 0 <= row[1] <= 3:
        raise Malformed("not an envelope")
    kind = Kind(row[1])
    if kind is Kind.WORKING:
        return Envelope(kind, row[2], None)
    cls = BY_NUMBER.get(row[3]) if len(row) > 3 and type(row[3]) is int else None
    if cls is None:
        raise Malformed("unknown message")
    try:
        message = cls.model_validate(row[4:])
    except (ValidationError, RecursionError) as error:
        raise Malformed(f"{cls.__name__}: {_first(error)}") from None
    return Envelope(kind, row[2], message)


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
    return type(error).__name__
