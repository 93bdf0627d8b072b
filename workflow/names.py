"""Names from outside: which may be a task, which may be a file, and why the others may not.

A file name is a relative path that stays inside the directory it is put in, wherever that is:
no root, no `..`, no control characters. The executor checks again on the real disk, where links
can lie; here a bad name is refused before anything runs.
"""

from __future__ import annotations

import re

TASK_NAME_MAX = 200
FILE_NAME_BYTES_MAX = 1024
FILE_PART_BYTES_MAX = 255
_TASK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_ITEM = re.compile(r"[A-Za-z0-9_.+\-=@:]{1,80}")
_LABEL = re.compile(r"[A-Za-z0-9_.+\-=@:]{1,100}")
_CALL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ENVIRONMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def task_problem(name: str) -> str | None:
    if len(name) > TASK_NAME_MAX:
        return f"a task's name has at most {TASK_NAME_MAX} characters"
    if not _TASK.fullmatch(name):
        return "a task's name is made of letters, digits, '_', '-' and '.'"
    return None


def file_problem(name: str) -> str | None:
    if not name:
        return "a file needs a name"
    if len(name.encode("utf-8", "replace")) > FILE_NAME_BYTES_MAX:
        return f"a file's name has at most {FILE_NAME_BYTES_MAX} bytes"
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        return "a file's name has no control characters"
    if name.startswith("/"):
        return "a file's name is relative to the task's directory: no leading '/'"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"a file's name stays in the task's directory: no part of it is {part!r}"
        if len(part.encode("utf-8", "replace")) > FILE_PART_BYTES_MAX:
            return f"each part of a file's name has at most {FILE_PART_BYTES_MAX} bytes"
    return None


def label_problem(label: str) -> str | None:
    if not _LABEL.fullmatch(label):
        return "1 to 100 letters, digits or '_.+-=@:'"
    return None


def call_problem(call: str) -> str | None:
    if len(call) > 500 or not _CALL.fullmatch(call):
        return "a call is written module:function, such as operator:mul"
    return None


def environment_problem(name: str) -> str | None:
    if len(name) > 200 or not _ENVIRONMENT.fullmatch(name):
        return "a variable's name is made of letters, digits and '_'"
    if name.startswith("VALENCE_"):
        return "names beginning with VALENCE_ are set by the peer"
    return None


def item_name(item: object, index: int) -> str:
    """How an item stands in its task's id; one that can't stand there is named by its position."""
    text = str(item)
    return text if _ITEM.fullmatch(text) else str(index)


def is_glob(name: str) -> bool:
    return any(c in name for c in "*?[")
