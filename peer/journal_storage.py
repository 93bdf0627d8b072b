"""Stores replicas of journals on this peer's disk, for `protocols.consensus`.

While one batch is being written, the next one gathers, so a busy peer pays one sync for many
entries of many journals. A write that nothing waits for (`soon`) joins the next write that is
waited for, or is written after a moment. A failed write is retried, in order, and nothing is
acknowledged meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from valence.protocols.consensus.replica import CONFIGS, Replica, first_of, forced
from valence.protocols.consensus.storage import Write
from valence.protocols.ports import DatabaseError, Listed
from valence.protocols.wire.entries import VOID, Ended, Submitted, keepers_in, read_as
from valence.protocols.wire.messages import Entry

from .database import Disk, Statement

log = logging.getLogger("valence.journal")

RETRY_S_MIN, RETRY_S_MAX = 0.05, 5.0
SOON_S = 0.02


class SqliteJournalStorage:
    """The journals of one peer, in its database."""

    def __init__(self, database: Disk, clock: Callable[[], float]) -> None:
        self.trouble = ""
        self._database = database
        self._clock = clock
        self._waiting: list[Statement] = []
        self._next: asyncio.Future[None] | None = None
        self._current: asyncio.Future[None] | None = None
        self._batch: list[Statement] = []
        self._busy = False
        self._delay_s = RETRY_S_MIN
        self._timer: asyncio.TimerHandle | None = None
        self._ends: dict[str, tuple[str, float]] = {}  # journals whose end is not committed yet
        self._promised: dict[str, int] = {}  # on disk, or being written

    # ----------------------------------------------------------------- writing

    def write(self, writes: Sequence[Write], soon: bool = False) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        for write in writes:
            self._waiting.extend(self._statements(write))
        if not self._waiting:
            if self._current is not None:
                return self._current
            done = loop.create_future()
            done.set_result(None)
            return done
        if self._next is None:
            self._next = loop.create_future()
        batch_done = self._next
        if not soon:
            self._start()
        elif self._timer is None:
            self._timer = loop.call_later(SOON_S, self._start)
        return batch_done

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and not self._busy:
            self._busy = True  # more writes of this round of the loop join the batch
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._batch, self._waiting = self._waiting, []
        self._current, self._next = self._next, None
        self._delay_s = RETRY_S_MIN
        self._try()

    def _try(self) -> None:
        try:
            written = self._database.begin(self._batch)
        except DatabaseError as error:
            self._refused(error)
            return
        if written.done():  # the database has written it on the spot
            self._written(written)
        else:
            written.add_done_callback(self._written)

    def _written(self, written: asyncio.Future[None]) -> None:
        error = None if written.cancelled() else written.exception()
        if error is not None:
            self._refused(error)
            return
        self.trouble = ""
        done, self._current = self._current, None
        self._busy = False
        assert done is not None
        done.set_result(None)
        self._start()

    def _refused(self, error: BaseException) -> None:
        self.trouble = str(error)
        log.error("can't write workflow journals, trying again: %s", error)
        asyncio.get_running_loop().call_later(self._delay_s, self._try)
        self._delay_s = min(RETRY_S_MAX, self._delay_s * 2)

    def first(self, write: Write, patient: bool) -> asyncio.Future[None]:
        """The first write of a new journal: if it fails, its caller gets the error."""
        return self._database.begin(self._statements(write), patient)

    def _statements(self, write: Write) -> list[Statement]:
        removes = write.forget or write.voided or write.cut_at is not None
        promises = write.back_to is not None or self._promised.get(write.workflow) != write.promised
        if removes or promises:
            statements = [*self._removals(write), *self._promise(write), *self._additions(write)]
        else:  # as nearly always
            statements = self._additions(write)
        if write.over:
            statements.append(self._over(write.workflow))
        return statements

    def _removals(self, write: Write) -> list[Statement]:
        workflow = write.workflow
        statements: list[Statement] = []
        known = self._promised.get(workflow, 0)
        if write.promised != known and forced(write.promised) > forced(known):
            # on entering a later era, and before anything is cut off: the journal's length in the
            # era before
            era = {"id": workflow, "first": first_of(forced(write.promised))}
            statements.append((_LEAVE, era))
        if write.forget:
            self._ends.pop(workflow, None)
            statements.append(("delete from entries where workflow = ?", (workflow,)))
            statements.append(("delete from workflows where id = ?", (workflow,)))
        if write.voided:
            sql = "insert or ignore into voided values (?, ?)"
            statements.append((sql, (workflow, write.voided)))
        if write.cut_at is not None:
            self._ends.pop(workflow, None)
            sql = "delete from entries where workflow = ? and seq >= ?"
            statements.append((sql, (workflow, write.cut_at)))
            sql = (
                "update workflows set keepers = (select body from entries where workflow = id and "
                "kind in ('keepers', 'forced') order by seq desc limit 1) where id = ?"
            )
            statements.append((sql, (workflow,)))
        return statements

    def _promise(self, write: Write) -> list[Statement]:
        """The row of this replica in `copies`, if it changes."""
        workflow = write.workflow
        if write.back_to is not None:
            era = {"id": workflow, "first": first_of(write.back_to + 1), "now": self._clock()}
            self._promised.pop(workflow, None)
            return [(_RETURN, era), (_FORGET_LATER, era)]
        if not write.forget and self._promised.get(workflow) == write.promised:
            return []
        sql = (
            "insert into copies values (?, ?, ?, ?, ?, ?) on conflict (workflow) do update set "
            "promised = excluded.promised, here = excluded.here, at = excluded.at"
        )
        here = 1
        self._promised[workflow] = write.promised
        if write.forget:
            sql += ", last_epoch = excluded.last_epoch, count = excluded.count"
            here = 0
            del self._promised[workflow]
        return [(sql, (workflow, write.promised, here, self._clock(), *write.position))]

    def _additions(self, write: Write) -> list[Statement]:
        workflow = write.workflow
        statements: list[Statement] = []
        keepers: bytes | None = None
        for seq, epoch, at, kind, body in write.entries:
            # the entries that the rules have accepted replace those of an earlier home
            sql = "insert or replace into entries values (?, ?, ?, ?, ?, ?)"
            statements.append((sql, (workflow, seq, epoch, at, kind, body)))
            if kind == "submitted":
                entry = read_as(Submitted, body)
                name, owner, tasks = entry.name, entry.owner, entry.tasks
                statements.append(_row(workflow, name, owner, "running", at, tasks, keepers))
            elif kind in CONFIGS:
                keepers = body
                if seq:
                    sql = "update workflows set keepers = ? where id = ?"
                    statements.append((sql, (body, workflow)))
            elif kind == "ended":
                state = _end_in(body)
                self._ends[workflow] = state, at
                if state == VOID:
                    statements.append(_row(workflow, "", "", VOID, at, 0, keepers))
        return statements

    def _over(self, workflow: str) -> Statement:
        end = self._ends.pop(workflow, None)
        state, ended_at = self._end(workflow) if end is None else end
        self._promised.pop(workflow, None)
        sql = "update workflows set state = ?, ended_at = ? where id = ?"
        return sql, (state, ended_at, workflow)

    def _end(self, workflow: str) -> tuple[str, float]:
        sql = "select body, at from entries where workflow = ? and kind = 'ended'"
        body, at = self._database.read(sql, (workflow,))[-1]
        return _end_in(body), at

    # ----------------------------------------------------------------- reading

    def entries(self, workflow: str, start: int, end: int, bytes_max: int) -> list[Entry]:
        sql = (
            "select seq, epoch, at, kind, body from entries "
            "where workflow = ? and seq >= ? and seq < ? order by seq limit 1000"
        )
        entries: list[Entry] = []
        for row in self._database.read(sql, (workflow, start, end)):
            entry = Entry(*row)
            bytes_max -= len(entry.body) + 60
            if entries and bytes_max < 0:
                break
            entries.append(entry)
        return entries

    def unfinished(self) -> list[Replica]:
        sql = (
            "select copies.workflow from copies left join workflows on workflows.id = workflow "
            "where here = 1 and ended_at is null"
        )
        rows = self._database.read(sql)
        replicas = [self.replica(workflow) for (workflow,) in rows]
        return [replica for replica in replicas if replica is not None]

    def ended(self, after: str, limit: int) -> list[tuple[str, tuple[bytes, ...], int]]:
        sql = (
            "select id, keepers, (select epoch from entries where workflow = id order by seq desc "
            "limit 1) from workflows where id > ? and ended_at is not null order by id limit ?"
        )
        rows = self._database.read(sql, (after, limit))
        return [(workflow, keepers_in(body), epoch or 0) for workflow, body, epoch in rows]

    def replica(self, workflow: str) -> Replica | None:
        sql = "select 1 from copies where workflow = ? and here = 1"
        if not self._database.read(sql, (workflow,)):
            return None
        replica = self.remains(workflow)
        sql = (
            "select epoch, min(seq), max(seq) from entries where workflow = ? "
            "group by epoch order by min(seq)"
        )
        for epoch, first, last in self._database.read(sql, (workflow,)):
            replica.starts.append((first, epoch))
            replica.count = last + 1
        sql = (
            "select seq, epoch, at, kind, body from entries where workflow = ? "
            "and kind in ('keepers', 'forced', 'home', 'submitted', 'ended') order by seq"
        )
        for row in self._database.read(sql, (workflow,)):
            replica.note(Entry(*row))
        sql = "select 1 from workflows where id = ? and ended_at is not null"
        if self._database.read(sql, (workflow,)):
            replica.committed = replica.ended_at_count
        return replica

    def is_void(self, workflow: str) -> bool:
        sql = "select 1 from workflows where id = ? and state = ?"
        return bool(self._database.read(sql, (workflow, VOID)))

    def listed(self, before: str, limit: int, state: str, owner: str) -> list[Listed]:
        where, values = "", list[Any]()
        if before:
            at, _, workflow = before.partition(",")
            where += " and (submitted_at, id) < (?, ?)"
            values += [float(at), workflow]
        for column, wanted in (("state", state), ("owner", owner)):
            if wanted:
                where += f" and {column} = ?"
                values.append(wanted)
        columns = ", ".join(field.name for field in fields(Listed))
        sql = (
            f"select {columns} from workflows where state != '{VOID}'{where} "
            "order by submitted_at desc, id desc limit ?"
        )
        return [Listed(*row) for row in self._database.read(sql, (*values, limit))]

    def keepers(self, workflow: str) -> tuple[bytes, ...]:
        rows = self._database.read("select keepers from workflows where id = ?", (workflow,))
        return keepers_in(rows[0][0]) if rows else ()

    def is_over(self, workflow: str) -> bool:
        sql = "select 1 from workflows where id = ? and ended_at is not null and state != ?"
        return bool(self._database.read(sql, (workflow, VOID)))

    async def forget(self, before: float, tombstones_before: float) -> int:
        rows = self._database.read(
            "select id from workflows where ended_at is not null and ended_at < ? limit 1000",
            (before,),
        )
        statements: list[Statement] = [
            ("delete from copies where here = 0 and at < ?", (tombstones_before,)),
            ("delete from eras where workflow not in (select workflow from copies)", ()),
            ("delete from voided where workflow not in (select workflow from copies)", ()),
        ]
        for (workflow,) in rows:
            for table, key in (
                ("entries", "workflow"),
                ("workflows", "id"),
                ("copies", "workflow"),
                ("eras", "workflow"),
            ):
                statements.append((f"delete from {table} where {key} = ?", (workflow,)))
        await asyncio.shield(self._database.begin(statements))
        return len(rows)

    def remains(self, workflow: str) -> Replica:
        sql = "select promised, last_epoch, count from copies where workflow = ?"
        rows = self._database.read(sql, (workflow,))
        promised, last_epoch, count = rows[0] if rows else (0, 0, 0)
        sql = "select birth from voided where workflow = ?"
        voided = frozenset(birth for (birth,) in self._database.read(sql, (workflow,)))
        floor = last_epoch, count
        return Replica(workflow, promised=promised, floor=floor, voided=voided)


_LEAVE = """
insert or replace into eras
select workflow, promised,
    case when newest > last_epoch or (newest = last_epoch and length > count)
        then newest else last_epoch end,
    case when newest > last_epoch or (newest = last_epoch and length > count)
        then length else count end
from (
    select *, coalesce((select epoch from entries where entries.workflow = copies.workflow
            order by seq desc limit 1), 0) as newest,
        coalesce((select max(seq) + 1 from entries where entries.workflow = copies.workflow), 0)
            as length
    from copies where workflow = :id and promised > 0 and promised < :first
)
"""
_RETURN = """
insert or replace into copies
select :id, coalesce(max(promised), 0), 0, :now, coalesce(last_epoch, 0), coalesce(count, 0)
from eras where workflow = :id and promised < :first
"""
_FORGET_LATER = "delete from eras where workflow = :id and promised >= :first"


@functools.lru_cache(100)  # most workflows end in the same way
def _end_in(body: bytes) -> str:
    """The state in which a journal ends, by its last entry."""
    return read_as(Ended, body).state


def _row(
    workflow: str, name: str, owner: str, state: str, at: float, tasks: int, keepers: bytes | None
) -> Statement:
    """The row of one workflow. `keepers`: an earlier entry of this write; None: of another one."""
    if keepers is not None:
        sql = "insert or replace into workflows values (?, ?, ?, ?, ?, null, ?, ?)"
        return sql, (workflow, name, owner, state, at, tasks, keepers)
    sql = (
        "insert or replace into workflows values (?, ?, ?, ?, ?, null, ?, (select body from "
        "entries where workflow = ? and kind in ('keepers', 'forced') order by seq desc limit 1))"
    )
    return sql, (workflow, name, owner, state, at, tasks, workflow)
