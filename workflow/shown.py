"""Foreign text made safe to show in terminals and logs.

Characters that would steer a terminal are shown as escapes, and never sent. An error of the
operating system is named in words, without its number.
"""

from __future__ import annotations

_BIDIRECTIONAL = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
} | {code: f"\\u{code:04x}" for code in _BIDIRECTIONAL}


def plain(text: str) -> str:
    return text.translate(_CONTROLS)


def os_reason(error: OSError) -> str:
    """`x.yaml: file not found`: the file, if it concerns one, and what went wrong."""
    if isinstance(error, FileNotFoundError):
        reason = "file not found"
    else:
        reason = str(error.strerror or error) or type(error).__name__
        reason = reason[:1].lower() + reason[1:]
    return f"{error.filename}: {reason}" if error.filename is not None else reason
