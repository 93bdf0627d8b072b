"""Copies of journals on this peer's disk: what `protocols.consensus` writes and reads again.

While one batch is being written the next gathers, so a busy peer pays one sync for many entries of
many journals; what nobody waits for (`soon`) goes with the next that somebody does, or after a
moment. A disk that refuses is tried again, in order, and nothing is acknowledged meanwhile.
"""

from __future__ import annotations

import asyncio
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
        self._ends: dict[str, tuple[str, float]] = {}  # journals whose end is not agreed on yet
        self._promised: dict[str, int] = {}  # as it is on disk, or on its way there

    # ----------------------------------------------------------------- writing

    def write(self, writes: Sequence[Write], soon: bool = False) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        for one in writes:
            self._waiting.extend(self._statements(one))
        if not self._waiting:
            if self._current is not None:
                return self._current
            done = loop.create_future()
            done.set_result(None)
            return done
        if self._next is None:
            self._next = loop.create_future()
        found = self._next
        if not soon:
            self._start()
        elif self._timer is None:
            self._timer = loop.call_later(SOON_S, self._start)
        return found

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and not self._busy:
            self._busy = True  # what is written in this round of the loop goes along
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
        if written.done():  # it was done on the spot
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
        log.error("journals can't be written, trying again: %s", error)
        asyncio.get_running_loop().call_later(self._delay_s, self._try)
        self._delay_s = min(RETRY_S_MAX, self._delay_s * 2)

    def first(self, write: Write, patient: bool) -> asyncio.Future[None]:
        """Of a journal that is born here: a disk that refuses it says so."""
        return self._database.begin(self._statements(write), patient)

    def _statements(self, one: Write) -> list[Statement]:
        workflow = one.workflow
        found: list[Statement] = []
        known = self._promised.get(workflow, 0)
        if one.promised != known and forced(one.promised) > forced(known):
            # into a later era, and before anything is cut off: how far it was in the one before
            found.append((_LEAVE, {"id": workflow, "first": first_of(forced(one.promised))}))
        if one.forget:
            self._ends.pop(workflow, None)
            found.append(("delete from entries where workflow = ?", (workflow,)))
            found.append(("delete from workflows where id = ?", (workflow,)))
        if one.voided:
            sql = "insert or ignore into voided values (?, ?)"
            found.append((sql, (workflow, one.voided)))
        if one.cut_at is not None:
            self._ends.pop(workflow, None)
            sql = "delete from entries where workflow = ? and seq >= ?"
            found.append((sql, (workflow, one.cut_at)))
            sql = (
                "update workflows set keepers = (select body from entries where workflow = id and "
                "kind in ('keepers', 'forced') order by seq desc limit 1) where id = ?"
            )
            found.append((sql, (workflow,)))
        if one.back_to is not None:
            here = {"id": workflow, "first": first_of(one.back_to + 1), "now": self._clock()}
            found += [(_RETURN, here), (_FORGET_LATER, here)]
            self._promised.pop(workflow, None)
        elif one.forget or self._promised.get(workflow) != one.promised:
            sql = (
                "insert into copies values (?, ?, ?, ?, ?, ?) on conflict (workflow) do update set "
                "promised = excluded.promised, here = excluded.here, at = excluded.at"
            )
            if one.forget:
                sql += ", last_epoch = excluded.last_epoch, count = excluded.count"
            row = (workflow, one.promised, 0 if one.forget else 1, self._clock(), *one.position)
            found.append((sql, row))
            self._promised[workflow] = one.promised
            if one.forget:
                del self._promised[workflow]
        keepers: bytes | None = None
        for seq, epoch, at, kind, body in one.entries:
            # what the rules have taken stands, whatever an earlier home had written there
            sql = "insert or replace into entries values (?, ?, ?, ?, ?, ?)"
            found.append((sql, (workflow, seq, epoch, at, kind, body)))
            if kind == "submitted":
                said = read_as(Submitted, body)
                name, owner, tasks = said.name, said.owner, said.tasks
                found.append(_row(workflow, name, owner, "running", at, tasks, keepers))
            elif kind in CONFIGS:
                keepers = body
                if seq:
                    sql = "update workflows set keepers = ? where id = ?"
                    found.append((sql, (body, workflow)))
            elif kind == "ended":
                state = read_as(Ended, body).state
                self._ends[workflow] = state, at
                if state == VOID:
                    found.append(_row(workflow, "", "", VOID, at, 0, keepers))
        if one.over:
            end = self._ends.pop(workflow, None)
            state, ended_at = self._end(workflow) if end is None else end
            sql = "update workflows set state = ?, ended_at = ? where id = ?"
            found.append((sql, (state, ended_at, workflow)))
            self._promised.pop(workflow, None)
        return found

    def _end(self, workflow: str) -> tuple[str, float]:
        sql = "select body, at from entries where workflow = ? and kind = 'ended'"
        body, at = self._database.read(sql, (workflow,))[-1]
        return read_as(Ended, body).state, at

    # ----------------------------------------------------------------- reading

    def entries(self, workflow: str, start: int, end: int, bytes_max: int) -> list[Entry]:
        sql = (
            "select seq, epoch, at, kind, body from entries "
            "where workflow = ? and seq >= ? and seq < ? order by seq limit 1000"
        )
        found: list[Entry] = []
        for row in self._database.read(sql, (workflow, start, end)):
            entry = Entry(*row)
            bytes_max -= len(entry.body) + 60
            if found and bytes_max < 0:
                break
            found.append(entry)
        return found

    def unfinished(self) -> list[Replica]:
        sql = (
            "select copies.workflow from copies left join workflows on workflows.id = workflow "
            "where here = 1 and ended_at is null"
        )
        rows = self._database.read(sql)
        found = [self.replica(workflow) for (workflow,) in rows]
        return [replica for replica in found if replica is not None]

    def ended(self, after: str, limit: int) -> list[tuple[str, tuple[bytes, ...], int]]:
        sql = (
            "select id, keepers, (select epoch from entries where workflow = id order by seq desc "
            "limit 1) from workflows where id > ? and ended_at is not null order by id limit ?"
        )
        rows = self._database.read(sql, (after, limit))
        return [(id, keepers_in(body), epoch or 0) for id, body, epoch in rows]

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
            at, _, id = before.partition(",")
            where += " and (submitted_at, id) < (?, ?)"
            values += [float(at), id]
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


def _row(
    id: str, name: str, owner: str, state: str, at: float, tasks: int, keepers: bytes | None
) -> Statement:
    """Of one workflow. Who keeps it was said in an entry before; None: in an earlier write."""
    if keepers is not None:
        sql = "insert or replace into workflows values (?, ?, ?, ?, ?, null, ?, ?)"
        return sql, (id, name, owner, state, at, tasks, keepers)
    sql = (
        "insert or replace into workflows values (?, ?, ?, ?, ?, null, ?, (select body from "
        "entries where workflow = ? and kind in ('keepers', 'forced') order by seq desc limit 1))"
    )
    return sql, (id, name, owner, state, at, tasks, id)
