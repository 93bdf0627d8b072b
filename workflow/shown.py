"""Texts of others, for terminals and logs: what would steer a terminal is shown, not sent."""

from __future__ import annotations

_BIDIRECTIONAL = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
} | {code: f"\\u{code:04x}" for code in _BIDIRECTIONAL}


def plain(text: str) -> str:
    return text.translate(_CONTROLS)
