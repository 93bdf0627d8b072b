"""Durations, sizes and cores: parsed from the forms people write, and shown in such forms."""

from __future__ import annotations

import math
import re

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000 ** (n + 1) for n, letter in enumerate("kmgtp")},
    **{f"{letter}ib": 1024 ** (n + 1) for n, letter in enumerate("kmgtp")},
    **{letter: 1024 ** (n + 1) for n, letter in enumerate("kmgtp")},
}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|s|m|h|d)")
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]{0,3})")

DURATION_S_MAX = 10 * 365 * 86400.0
BYTES_MAX = 2**60
MILLICORES_MAX = 1_000_000_000


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return math.inf
    return number if math.isfinite(number) else math.inf


def seconds(value: object) -> float:
    """`90`, `"90s"`, `"1m30s"`, `"250ms"` → seconds."""
    number = _number(value)
    if number is None and isinstance(value, str):
        text = value.strip()
        parts = _DURATION.findall(text)
        if parts and "".join(a + b for a, b in parts) == text:
            number = sum(float(amount) * _SECONDS[unit] for amount, unit in parts)
    if number is None:
        raise ValueError("not a duration: write seconds as a number, or 250ms, 90s, 1m30s, 2h, 1d")
    if not 0 <= number <= DURATION_S_MAX:
        raise ValueError("a duration must be between 0 and ten years")
    return number


def size_bytes(value: object) -> int:
    """`1024`, `"128MiB"`, `"1.5GB"` → bytes."""
    number = _number(value)
    if number is None and isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match and match[2].lower() in _BYTES:
            number = float(match[1]) * _BYTES[match[2].lower()]
    if number is None:
        raise ValueError("not a size: write bytes as a number, or 64KiB, 128MiB, 2GB")
    if not 0 <= number <= BYTES_MAX:
        raise ValueError("a size must be between 0 and 1 EiB")
    return math.ceil(number)


def millicores(value: object) -> int:
    """`1`, `0.5`, `"500m"` → thousandths of a core."""
    number = _number(value)
    if number is not None:
        number *= 1000
    elif isinstance(value, str) and re.fullmatch(r"\d{1,9}m", value):
        number = float(value[:-1])
    if number is None:
        raise ValueError("not a number of cores: write 1, 0.5 or 500m")
    if not 1 <= number <= MILLICORES_MAX:
        raise ValueError("the number of cores must be between 0.001 and 1,000,000")
    return math.ceil(number)


def show_bytes(count: int) -> str:
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            return f"{amount:.0f} {unit}" if amount == int(amount) else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")


def show_seconds(amount: float) -> str:
    if amount < 0.9995:
        return f"{amount * 1000:.0f} ms"
    if amount < 60:
        return f"{amount:.1f} s"
    minutes, rest = divmod(int(amount), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m{rest:02d}s" if hours else f"{minutes}m{rest:02d}s"
