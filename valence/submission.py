"""A document before it is sent to a peer: checked, with the files that it names by `path`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from valence.protocols.engine.policies import policy_problem
from valence.workflow import document, tree, wfformat
from valence.workflow.problems import DocumentError, DocumentProblem

from .client import hash_file


def prepare(source: str | Path | dict[str, Any]) -> tuple[bytes, str, list[tuple[Path, str]]]:
    """The text to send, its media type, and the files to upload first."""
    if isinstance(source, dict):
        text = json.dumps(source).encode()
        if not source.get("inputs"):  # nothing to upload; the peer checks the rest
            return text, "application/json", []
        base = Path()
    else:
        path = Path(source)
        text, base = path.read_bytes(), path.parent
    return prepare_text(text, base)


def prepare_text(text: bytes, base: Path) -> tuple[bytes, str, list[tuple[Path, str]]]:
    value, lines = tree.read(text)
    if wfformat.is_instance(value):
        return text, "application/json", []
    document.from_value(value, lines, client=True, policy_problem=policy_problem)
    uploads = []
    problems = []
    for name, source in (value.get("inputs") or {}).items():
        if source.get("path") is None:
            continue
        path = base / source["path"]
        if not path.is_file():
            problems.append(DocumentProblem(f"/inputs/{name}/path", f"{path}: file not found"))
            continue
        digest = hash_file(path)
        value["inputs"][name] = {"blob": digest}
        uploads.append((path, digest))
    if problems:
        raise DocumentError(tuple(problems))
    if uploads:
        return json.dumps(value).encode(), "application/json", uploads
    return text, "application/yaml", []
