"""The wire and the disk stay as they are: goldens, as `goldens/README.md` says."""

from __future__ import annotations

import re
import shutil
import sqlite3
import time
import types
import typing
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgpack
import pytest
from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.conftest import Cluster
from valence.protocols.engine.journal import Journal, recorded
from valence.protocols.engine.runs import rebuilt
from valence.protocols.strategies import registry
from valence.protocols.wire import codec
from valence.protocols.wire.codec import FrameKind
from valence.protocols.wire.entries import BY_KIND, read
from valence.protocols.wire.messages import BY_NUMBER, Entry, Message

GOLDENS = Path(__file__).parent / "goldens"
MESSAGES = GOLDENS / "messages.txt"
_LINE = re.compile(r"(\d+) (\w+) ([0-9a-f]+)")


# --------------------------------------------------------------------------- the wire


def sample(kind: Any, name: str) -> Any:
    """A value of that type, always the same for the same name, and another for another: two fields
    of one type that change places are noticed."""
    seed = zlib.crc32(name.encode())
    if get_origin(kind) is Annotated:
        inner, *limits = get_args(kind)
        return _limited(inner, [m for limit in limits for m in _metadata(limit)], name)
    if get_origin(kind) in (typing.Union, types.UnionType):
        return sample(next(k for k in get_args(kind) if k is not type(None)), name)
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return (sample(inner[0], f"{name}.0"), sample(inner[0], f"{name}.1"))
        return tuple(sample(one, f"{name}.{i}") for i, one in enumerate(inner))
    if hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(*(sample(hints[field], f"{name}.{field}") for field in kind._fields))
    simple: dict[Any, Any] = {
        bool: True,
        int: seed % 100_000,
        float: seed % 1000 + 0.5,
        str: f"{seed:08x}",
        bytes: seed.to_bytes(4, "big"),
    }
    return simple[kind]


def _metadata(limit: Any) -> list[Any]:
    return list(getattr(limit, "metadata", [limit]))


def _limited(kind: Any, limits: list[Any], name: str) -> Any:
    seed = zlib.crc32(name.encode())
    by_kind = {type(limit): limit for limit in limits}
    patterns = [p for limit in limits if (p := getattr(limit, "pattern", None))]
    if patterns:  # such as ^(ok|failed)$
        words = re.findall(r"\w+", patterns[0])
        return words[seed % len(words)]
    if kind is bytes and MinLen in by_kind:
        return (seed.to_bytes(4, "big") * 20)[: by_kind[MinLen].min_length]
    if kind in (int, float):
        least = max([by_kind[Ge].ge] if Ge in by_kind else [0])
        most = by_kind[Le].le if Le in by_kind else 100_000
        span = max(1, min(100_000, int(most) - int(least)))
        found = int(least) + seed % (span + (Gt not in by_kind)) + (Gt in by_kind)
        return kind(found)
    if kind is str and MaxLen in by_kind:
        return f"{seed:08x}"[: by_kind[MaxLen].max_length]
    return sample(kind, name)


def message(cls: type[Message]) -> Message:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {name: sample(hints[name], f"{cls.__name__}.{name}") for name in cls.model_fields}
    return cls(**fields)


def ours() -> list[type[Message]]:
    """The product's own: an experiment that is imported here, too, has messages of its own."""
    assert registry.MADE_BY, "with these come their messages"
    listed = sorted(BY_NUMBER.items())
    return [cls for _, cls in listed if cls.__module__.startswith("valence.protocols.")]


def encoded(cls: type[Message]) -> bytes:
    return codec.encode(FrameKind.REQUEST, 7, message(cls))


def goldens() -> list[tuple[int, str, bytes]]:
    found = []
    for line in MESSAGES.read_text().splitlines():
        match = _LINE.fullmatch(line)
        assert match, f"not a golden: {line[:80]}"
        found.append((int(match[1]), match[2], bytes.fromhex(match[3])))
    return found


def begins_with(now: Any, before: Any) -> bool:
    """Fields were added at the ends, and nowhere else."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(name in now and begins_with(now[name], before[name]) for name in before)
    if isinstance(before, list) and isinstance(now, list):
        return len(now) >= len(before) and all(map(begins_with, now, before))
    return type(now) is type(before) and now == before


def test_every_message_has_a_golden_with_all_its_fields() -> None:
    known = {data for _, _, data in goldens()}
    missing = [cls.__name__ for cls in ours() if encoded(cls) not in known]
    assert not missing, "is the change meant? then: python -m tests.test_goldens"


@pytest.mark.parametrize(("number", "name", "data"), goldens(), ids=lambda v: str(v)[:20])
def test_a_message_is_written_and_read_as_ever(number: int, name: str, data: bytes) -> None:
    cls = BY_NUMBER[number]
    assert cls.__name__ == name
    now, before = msgpack.unpackb(encoded(cls)), msgpack.unpackb(data)
    assert begins_with(now, before), "a field was moved, removed, or changed its type"
    read = codec.decode(data)
    assert read.message is not None
    for field, value in zip(cls.model_fields, before[4:], strict=False):
        assert begins_with(_plain(getattr(read.message, field)), value), field


def _plain(value: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(value))


@pytest.mark.parametrize("change", ["renumber", "swap", "insert", "retype"])
def test_goldens_notice(change: str) -> None:
    """What was possible before there were any, on one message's bytes."""
    number, _, data = next(row for row in goldens() if row[1] == "Commit")
    row = msgpack.unpackb(data)
    work = row[4][0]
    if change == "renumber":
        row[3] = number + 1
    elif change == "swap":
        work[9], work[4] = work[4], work[9]
    elif change == "insert":
        work.insert(3, 0)
    else:
        work[1] = str(work[1])
    assert not begins_with(msgpack.unpackb(encoded(BY_NUMBER[number])), row)


# --------------------------------------------------------------------------- journals


def journals() -> dict[str, list[Entry]]:
    """Those that peers of simulated worlds have written, and those of the directory of before."""
    found: dict[str, list[Entry]] = {}
    for line in (GOLDENS / "entries.txt").read_text().splitlines():
        id, seq, epoch, at, kind, body = line.split()
        entry = Entry(int(seq), int(epoch), float(at), kind, bytes.fromhex(body))
        found.setdefault(id, []).append(entry)
    made = sqlite3.connect(":memory:")
    made.executescript((GOLDENS / "before" / "peer.sql").read_text())
    for id, *row in made.execute("select * from entries order by workflow, seq"):
        found.setdefault(id, []).append(Entry(*row))
    made.close()
    return found


class Kept:
    """A directory that has just these."""

    def __init__(self, rows: list[Entry]) -> None:
        self._rows = rows

    def entries(self, workflow: str, start: int, end: int, bytes_max: int) -> list[Entry]:
        return self._rows[start:end]


def replayed(id: str, rows: list[Entry]) -> list[str]:
    """In words, where a journal leads to."""
    journal = Journal.__new__(Journal)
    journal.storage = Kept(rows)  # type: ignore[assignment]
    document = journal.document(id)
    assert document is not None
    run = rebuilt((id, document, [recorded(row) for row in rows]))
    assert run is not None
    told = [f"{id} {run.state} {run.reason or '-'} of {run.owner}, home {run.home.hex()[:8]}"]
    told.append(f"  keepers {' '.join(k.hex()[:8] for k in run.keepers)}")
    for task in run.tasks.values():
        tries = " ".join(f"{a.number}:{a.peer.hex()[:8]}:{a.state}" for a in task.attempts)
        told.append(f"  {task.id} {task.state} {task.reason or '-'} [{tries}]")
    for name in sorted({*run.staged, *run.workflow.producers}):
        file = run.file(name)
        if file is not None:
            holders = " ".join(h.hex()[:8] for h in file.holders)
            told.append(f"  {name} {file.hash.hex()[:8]} {file.size} held by {holders or '-'}")
    if run.promise is not None:
        told.append(f"  promise {run.promise.state} {run.promise.cause or '-'} {run.promise.why}")
        told += [f"  slot of {t} at {s.peer.hex()[:8]}" for t, s in run.promise.slots.items()]
    told += [f"  delivered {name}: {how or 'done'}" for name, how in sorted(run.delivered.items())]
    return told


def test_journals_lead_where_they_did() -> None:
    told = [line for id, rows in journals().items() for line in replayed(id, rows)]
    assert told == (GOLDENS / "entries.out").read_text().splitlines()


def test_every_kind_of_entry_is_in_some_journal() -> None:
    assert {e.kind for rows in journals().values() for e in rows} == set(BY_KIND)


def test_every_entry_is_written_as_it_was_read() -> None:
    for rows in journals().values():
        for entry in rows:
            before = msgpack.unpackb(entry.body, strict_map_key=False)
            now = msgpack.unpackb(read(entry.kind, entry.body).packed(), strict_map_key=False)
            assert begins_with(now, before), (entry.kind, before, now)


# --------------------------------------------------------------------------- the disk


def test_a_data_directory_of_before_is_read_and_its_workflows_go_on(
    own_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    data = tmp_path / "cluster-0" / "peer-000"
    shutil.copytree(GOLDENS / "before" / "blobs", data / "blobs")
    data.chmod(0o700)
    raw = bytes.fromhex((GOLDENS / "before" / "identity.txt").read_text())
    key = Ed25519PrivateKey.from_private_bytes(raw)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (data / "identity.pem").touch(0o600)
    (data / "identity.pem").write_bytes(pem)
    made = sqlite3.connect(data / "peer.db")
    made.executescript((GOLDENS / "before" / "peer.sql").read_text())
    # what ended long ago is not kept for ever
    made.execute("update workflows set ended_at = ? where ended_at is not null", (time.time(),))
    made.commit()
    made.close()
    client = own_cluster(1, "--site", "later").client()
    listed = {row["name"]: client.workflow(row["id"]) for row in client.workflows()}
    assert len(listed) == 4
    assert listed["failed before"].view()["state"] == "failed"
    assert listed["failed before"].task("bad")["exit_code"] == 3
    assert listed["failed before"].values()["fine"] == 42
    assert listed["cancelled before"].view()["counts"] == {"cancelled": 3}
    assert listed["done before"].read("both") == b"to be or notto be or not"
    assert listed["done before"].log("both") == b"joined\n"
    begun = listed["begun before"]
    assert begun.wait() == "succeeded", begun.view()
    assert begun.read("total") == b"3\n"
    assert begun.values()["eight"] == 8
    attempts = {task["id"]: task["attempts"] for task in begun.tasks()}
    assert attempts == dict.fromkeys(("count", "seven", "eight", "gate", "last"), 1)


def _append() -> None:
    known = {data for _, _, data in goldens()} if MESSAGES.exists() else set()
    with MESSAGES.open("a") as file:
        for cls in ours():
            if encoded(cls) not in known:
                file.write(f"{cls.number} {cls.__name__} {encoded(cls).hex()}\n")
    states = GOLDENS / "entries.out"
    if not states.exists():
        told = [line for id, rows in journals().items() for line in replayed(id, rows)]
        states.write_text("\n".join(told) + "\n")


if __name__ == "__main__":
    _append()
