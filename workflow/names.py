"""Rules for names from outside: tasks, files, labels, calls and environment variables.

A file's name is a relative path that stays inside the directory it is put in, wherever that is: no
root, no `..`, no control characters. The executor checks again on the real disk, where links can
lie. Here a bad name is refused before anything runs.
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
        return f"a task's name can have at most {TASK_NAME_MAX} characters"
    if not _TASK.fullmatch(name):
        return "a task's name must consist of letters, digits, '_', '-' and '.'"
    return None


def file_problem(name: str) -> str | None:
    if not name:
        return "a file must have a name"
    if len(name.encode("utf-8", "replace")) > FILE_NAME_BYTES_MAX:
        return f"a file's name can have at most {FILE_NAME_BYTES_MAX:,} bytes"
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        return "a file's name must not contain control characters"
    if name.startswith("/"):
        return "a file's name must be relative to the task's directory: remove the leading '/'"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"a file's name must stay in the task's directory: no part of it can be {part!r}"
        if len(part.encode("utf-8", "replace")) > FILE_PART_BYTES_MAX:
            return f"each part of a file's name can have at most {FILE_PART_BYTES_MAX} bytes"
    return None


def label_problem(label: str) -> str | None:
    if not _LABEL.fullmatch(label):
        return "a label must consist of 1 to 100 letters, digits or '_.+-=@:'"
    return None


def call_problem(call: str) -> str | None:
    if len(call) > 500 or not _CALL.fullmatch(call):
        return "write a call as module:function, such as operator:mul"
    return None


def environment_problem(name: str) -> str | None:
    if len(name) > 200 or not _ENVIRONMENT.fullmatch(name):
        return "a variable's name must consist of letters, digits and '_'"
    if name.startswith("VALENCE_"):
        return "names that begin with VALENCE_ are reserved: the peer sets them"
    return None


def item_name(item: object, index: int) -> str:
    """An item's name in its task's id: its text, or its position if an id can't contain that."""
    text = str(item)
    return text if _ITEM.fullmatch(text) else str(index)


def is_glob(name: str) -> bool:
    return any(c in name for c in "*?[")
