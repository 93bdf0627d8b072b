"""The messages of the core: frozen, numbered, append-only. A strategy has its own in its folder.

On the wire a message is its number and its fields in order, as msgpack, and so is every value in
it. A field may be added at the end with a default; none is ever removed, reordered or given
another meaning. Everything is validated here, at the edge: sizes, counts and types of what a peer
sent are true afterwards. Values are named tuples: msgpack writes them and pydantic checks them
without a line of Python for each, and a task's way crosses some twenty of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ..data.chunk_manifest import MANIFEST_BYTES_MAX

ID_BYTES = 20

PeerId = Annotated[bytes, Field(min_length=ID_BYTES, max_length=ID_BYTES)]
Key = Annotated[bytes, Field(min_length=ID_BYTES, max_length=ID_BYTES)]
Hash = Annotated[bytes, Field(min_length=32, max_length=32)]
Host = Annotated[str, Field(max_length=255)]
Port = Annotated[int, Field(ge=0, le=65535)]
Natural = Annotated[int, Field(ge=0, le=2**63 - 1)]
Text = Annotated[str, Field(max_length=2000)]
Word = Annotated[str, Field(max_length=100)]
Words = Annotated[tuple[Word, ...], Field(max_length=64)]
#: a `Member`, packed: most that one hears is known already, and is not read once more for that
Packed = Annotated[bytes, Field(max_length=8192)]
TaskName = Annotated[str, Field(max_length=512)]
FileName = Annotated[str, Field(max_length=1024)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    number: ClassVar[int] = -1
    #: may simply run again when it is repeated, so its answer is not kept
    repeatable: ClassVar[bool] = False
    #: an answer that may be large and that a late repeat may ask for once more: not remembered
    forgettable: ClassVar[bool] = False

    @classmethod
    def of(cls, *fields: Any) -> Self:
        """All fields, of values that were checked one by one when they were made: not again."""
        made = cls.__new__(cls)
        values = dict(zip(cls.model_fields, fields, strict=True))
        object.__setattr__(made, "__dict__", values)
        object.__setattr__(made, "__pydantic_fields_set__", set(values))
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", None)
        return made


M = TypeVar("M", bound=type[Message])
BY_NUMBER: dict[int, type[Message]] = {}

#: numbers are handed out here, so that no two ever mean different things; those in between are the
#: core's. A strategy of another distribution takes some from 1,000 on.
RANGES = {
    "tickets": (*range(50, 57), 60),
    "chemical": range(61, 73),
    "pilots": range(79, 87),
    "deadline": range(100, 120),
    "clusters": range(120, 140),
}
FOREIGN_MIN = 1000


def numbered(number: int, repeatable: bool = False) -> Callable[[M], M]:
    def register(cls: M) -> M:
        if number in BY_NUMBER:
            raise ValueError(f"message {number} is {BY_NUMBER[number].__name__} already")
        if not _may_have(cls.__module__, number):
            raise ValueError(f"message {number} is not for {cls.__module__} to take")
        cls.number = number
        cls.repeatable = repeatable
        BY_NUMBER[number] = cls
        return cls

    return register


def _may_have(module: str, number: int) -> bool:
    ours = __name__.rpartition(".wire.")[0]
    if not module.startswith(ours):
        return number >= FOREIGN_MIN
    mine = next((r for name, r in RANGES.items() if f".strategies.{name}." in module), None)
    if mine is not None:
        return number in mine
    return number < FOREIGN_MIN and not any(number in range for range in RANGES.values())


# --------------------------------------------------------------------------- values


class Contact(NamedTuple):
    """Where a peer is. An empty host and port 0 mean: unknown, ask for its member."""

    id: PeerId
    host: Host
    port: Port


class Capacity(NamedTuple):
    """What is used up by running tasks; integers, so that sums are exact."""

    millicores: Natural = 0
    memory_bytes: Natural = 0
    disk_bytes: Natural = 0
    gpus: Natural = 0


class Traits(NamedTuple):
    """What is not used up: must fit, or be at least so much."""

    arch: Word = ""
    os: Word = ""
    site: Word = ""
    speed: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    labels: Words = ()
    software: Words = ()


class Member(NamedTuple):
    """A peer as all know it. `boot` counts its starts, `incarnation` its objections to rumours."""

    contact: Contact
    http: Annotated[str, Field(max_length=300)] = ""
    capacity: Capacity = Capacity()
    traits: Traits = Traits()
    boot: Natural = 0
    incarnation: Natural = 0
    state: Annotated[int, Field(ge=0, le=3)] = 0  # see members.State
    version: Word = ""


class Needs(NamedTuple):
    """A unit's needs, as capacity and traits."""

    capacity: Capacity = Capacity()
    arch: Word | None = None
    os: Word | None = None
    site: Word | None = None
    speed: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    labels: Words = ()
    software: Words = ()


class Record(NamedTuple):
    key: Key
    owner: PeerId
    version: Natural
    ttl_s: Seconds  # what is left: no clocks are compared
    value: Annotated[bytes, Field(max_length=1024)]


class AttemptKey(NamedTuple):
    """One run of one task. `number` makes a stale result harmless."""

    workflow: Word
    task: TaskName
    number: Natural

    def __str__(self) -> str:
        return f"{self.workflow}/{self.task}#{self.number}"


class File(NamedTuple):
    """A file of a task: its name there, its content, and who is known to hold it."""

    name: FileName
    hash: Hash
    size: Natural
    holders: Annotated[tuple[PeerId, ...], Field(max_length=16)] = ()
    url: Annotated[str, Field(max_length=2000)] = ""  # where it came from, should no peer have it


class Value(NamedTuple):
    """A call's value. Peers never look inside a pickle: only worker processes do."""

    encoding: Annotated[str, Field(pattern="^(json|pickle)$")]
    data: Annotated[bytes, Field(max_length=2**20)] = b""
    file: File | None = None  # where the value is too large to travel in messages


class Argument(NamedTuple):
    """What `{result: name}` stands for: one value, or those of a `foreach` in order."""

    name: TaskName
    many: bool
    values: tuple[Value, ...]


class Placing(NamedTuple):
    """What a queue knows of a task beyond what runs it: how a site is to place it."""

    rank_s: float = 0.0  # of work that hangs on it
    deadline_in_s: float | None = None
    ranked_by: Annotated[str, Field(max_length=200)] = ""
    avoid: Annotated[tuple[PeerId, ...], Field(max_length=8)] = ()  # it failed at these pilots


class Work(NamedTuple):
    """All an executing peer needs to run an attempt."""

    key: AttemptKey
    lease: Natural
    needs: Needs
    command: tuple[str, ...] | None = None
    call: Annotated[str, Field(max_length=500)] | None = None
    arguments: bytes = b""  # msgpack of [args, kwargs], references and all
    references: tuple[Argument, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    inputs: tuple[File, ...] = ()
    outputs: tuple[FileName, ...] = ()
    timeout_s: Seconds | None = None
    runtime_s: Seconds | None = None
    network: bool = False  # wanted, where a sandbox would keep it from that
    epoch: Natural = 0  # of the home that gives it
    gang: bool = False  # others run at the same time, at other peers
    owner: Annotated[str, Field(max_length=64)] = ""  # no two share a process, or a user
    placing: Placing | None = None  # for a site that pulls it from a queue, and places it


class Moved(NamedTuple):
    """Bytes of inputs, by where they were: on the peer's own disk, elsewhere, at their origin."""

    local: Natural = 0
    peer: Natural = 0
    origin: Natural = 0


class Outcome(NamedTuple):
    """How an attempt ended. `kind`: ok, failed (the task's fault), or returned (the peer's)."""

    key: AttemptKey
    kind: Annotated[str, Field(pattern="^(ok|failed|returned)$")]
    reason: Text = ""
    exit_code: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    queued_at: float = 0.0
    started_at: float = 0.0
    ended_at: float = 0.0
    outputs: tuple[File, ...] = ()
    value: Value | None = None
    log: File | None = None
    log_tail: Annotated[str, Field(max_length=8192)] = ""
    log_truncated: bool = False
    max_rss_bytes: Natural = 0
    # small outputs travel along, so that they have a second holder before they count
    enclosed: Annotated[tuple[tuple[Hash, bytes], ...], Field(max_length=256)] = ()
    epoch: Natural = 0  # of the home that gave the attempt: no other attempt has number and epoch
    cause: Word = ""  # of a failure, in a word: memory, timeout, exit or signal
    moved: Moved = Moved()  # what it read
    # inputs that nobody has any more, as all who were said to hold them have answered
    missing: Annotated[tuple[Hash, ...], Field(max_length=1000)] = ()
    by: PeerId | None = None  # the pilot, where a queue gave the attempt to its site
    speed: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # of the peer that ran it


class GangTag(NamedTuple):
    """Of a task that needs several peers at once: which of two such tasks goes first at a peer.
    The same at every peer, so that no two of them wait for each other."""

    since: Annotated[float, Field(allow_inf_nan=False)]  # by its home's clock
    id: Natural  # the home's own number for it


class Room(NamedTuple):
    """Room for up to `count` units of the same needs."""

    needs: Needs
    count: Annotated[int, Field(ge=1, le=100_000)]  # type: ignore[assignment]
    runtime_s: Seconds | None = None
    deadline_in_s: float | None = None
    queue: bool = False  # a place in the queue will do
    hold: bool = False  # it waited long: a place in the queue however long that is
    gang: GangTag | None = None  # asked again with the same tag, its lease is renewed
    owner: Annotated[str, Field(max_length=64)] | None = None  # of the first of them; None: many's


class Grant(NamedTuple):
    leases: Annotated[tuple[Natural, ...], Field(max_length=10_000)] = ()
    queued: Natural = 0  # how many of them, the last ones, wait in the queue
    wait_s: Seconds = 0.0  # the peer's guess until the last of them begins
    refusal: Text = ""  # why not more
    held: bool = False  # for a gang: what comes free here is kept for it


class Ticket(NamedTuple):
    """What a peer has free; and the places in its queue: for so much work, and so many units; or
    for units of so many thousandths of cores, however long they take."""

    free: Capacity
    queue_s: Seconds = 0.0
    queue_units: Natural = 0
    queue_cores: Natural = 0


class Entry(NamedTuple):
    """One line of a workflow's journal. `seq` and `epoch` together name it for ever."""

    seq: Natural
    epoch: Natural
    at: float
    kind: Word
    body: bytes  # msgpack of a mapping; keepers look into none but those about themselves


class Slice(NamedTuple):
    """A stretch of one journal, behind what its keeper is believed to have."""

    workflow: Word
    epoch: Natural
    before: Natural  # entries that come before these
    before_epoch: Natural  # of the last of those
    committed: Natural  # entries, from the first on, that a majority has
    entries: tuple[Entry, ...] = ()
    last: bool = False  # the keeper is none any more, and a majority has agreed to that


class Stored(NamedTuple):
    """What a keeper has of one journal, on disk, as far as it is the sender's."""

    workflow: Word
    epoch: Natural  # the highest it has promised to follow
    entries: Natural  # `refusal`: how many the sender may go on from
    refusal: Word = ""


class Candidacy(NamedTuple):
    """`trial`: would you? Nothing is promised, so an idle wish disturbs nobody."""

    workflow: Word
    epoch: Natural
    entries: Natural
    last_epoch: Natural
    trial: bool
    birth: Natural = 0  # the first entry's epoch: one name may have been given twice


class Vote(NamedTuple):
    workflow: Word
    granted: bool
    epoch: Natural  # the highest this keeper has promised to follow
    why: Text = ""  # not granted
    home: bytes = b""  # whom it follows
    outsider: bool = False  # the candidate is no keeper any more: a majority agreed on that


#: check what did not come in a message: what a task asks for, what became of it
STRICT = ConfigDict(strict=True)
CHECKED_MEMBER = TypeAdapter(Member, config=STRICT)
CHECKED_NEEDS = TypeAdapter(Needs, config=STRICT)
CHECKED_WORK = TypeAdapter(Work, config=STRICT)
CHECKED_OUTCOME = TypeAdapter(Outcome, config=STRICT)


# --------------------------------------------------------------------------- messages


@numbered(0)
class Refusal(Message):
    """The answer to a request that was not carried out."""

    code: Word
    text: Text = ""


@numbered(1)
class Done(Message):
    pass


@numbered(2, repeatable=True)
class Hello(Message):
    """The first word to an address whose id is not known yet. All peers have the same overlay."""

    member: Member
    overlay: Word = "kademlia"


@numbered(3)
class Welcome(Message):
    member: Member


@numbered(4, repeatable=True)
class Ping(Message):
    digest: Natural
    rumours: Annotated[tuple[Packed, ...], Field(max_length=64)] = ()


@numbered(5)
class Ack(Message):
    digest: Natural
    rumours: Annotated[tuple[Packed, ...], Field(max_length=64)] = ()


@numbered(6, repeatable=True)
class PingFor(Message):
    """Ask another peer to ping: one lossy link must not kill a peer."""

    target: Contact


@numbered(7)
class PingedFor(Message):
    alive: bool
    refused: bool = False  # its host says that nobody listens there


@numbered(8, repeatable=True)
class Sync(Message):
    """What I know of the members, as digests: one for each part of the space of ids."""

    digests: Annotated[bytes, Field(min_length=4, max_length=4096)]


@numbered(9)
class Synced(Message):
    """Of the parts that differ: what I know, in brief (id, boot, incarnation, state); or, where you
    know nobody, in full."""

    parts: Annotated[tuple[Annotated[int, Field(ge=0, le=1023)], ...], Field(max_length=1024)]
    known: tuple[tuple[PeerId, Natural, Natural, Natural], ...] = ()
    members: tuple[Packed, ...] = ()


@numbered(49, repeatable=True)
class Exchange(Message):
    """What you lack, and whom I lack."""

    members: tuple[Packed, ...]
    wanted: tuple[PeerId, ...] = ()


@numbered(10)
class Rumours(Message):
    members: tuple[Packed, ...]


@numbered(59)
class Wave(Message):
    """News for all peers from the one that is told up to `end`: it passes them on. `digest`: what a
    peer believes that has heard them all."""

    members: tuple[Packed, ...]
    end: Key
    digest: int
    about: Annotated[bytes, Field(max_length=4096)] = b""  # what else all are to know


@numbered(11)
class Leave(Message):
    member: Member


@numbered(12, repeatable=True)
class FindPeers(Message):
    target: Key


@numbered(13)
class FoundPeers(Message):
    contacts: Annotated[tuple[Contact, ...], Field(max_length=64)]


@numbered(14)
class StoreRecords(Message):
    records: tuple[Record, ...]


@numbered(15)
class StoredRecords(Message):
    refused: Natural = 0


@numbered(16, repeatable=True)
class FetchRecords(Message):
    keys: Annotated[tuple[Key, ...], Field(max_length=1000)]


@numbered(17)
class FetchedRecords(Message):
    records: tuple[Record, ...]


@numbered(20)
class Reserve(Message):
    asks: Annotated[tuple[Room, ...], Field(max_length=64)]
    # the chemical layer's own: the molecule of the peer that is asked was consumed; and which
    # version of it, if what is asked for was taken of it and a rest is left
    consumed: bool = False
    molecule: Natural = 0


@numbered(21)
class Offers(Message):
    """One grant per ask, in the same order."""

    grants: tuple[Grant, ...]
    free: Capacity
    ttl_s: Seconds


@numbered(22)
class ReturnLeases(Message):
    leases: tuple[Natural, ...]
    gangs: tuple[Natural, ...] = ()  # that want nothing here any more


@numbered(23)
class Commit(Message):
    works: tuple[Work, ...]


@numbered(24)
class Committed(Message):
    refused: tuple[tuple[AttemptKey, Text], ...] = ()


@numbered(25)
class Report(Message):
    outcomes: tuple[Outcome, ...]
    free: Capacity = Capacity()


@numbered(26)
class Reported(Message):
    """These are on the home's disk; `unknown` are of workflows this peer knows nothing of."""

    kept: tuple[AttemptKey, ...]
    unknown: tuple[AttemptKey, ...] = ()
    moved: tuple[tuple[Word, bytes], ...] = ()  # workflow → its home, as this peer knows


@numbered(27, repeatable=True)
class Inquire(Message):
    keys: tuple[AttemptKey, ...]
    epochs: tuple[tuple[Word, Natural], ...] = ()  # of the sender, as the workflows' home


@numbered(28)
class Inquired(Message):
    """`queued`, `running`, `reporting` or `unknown`, for each key."""

    states: tuple[Word, ...]


@numbered(29)
class Abort(Message):
    keys: tuple[AttemptKey, ...]
    reason: Text = ""
    epochs: tuple[tuple[Word, Natural], ...] = ()


@numbered(30)
class Vacancy(Message):
    """To those who were refused a while ago: there is room now."""

    free: Capacity


@numbered(31, repeatable=True)
class ReadBlob(Message):
    hash: Hash
    offset: Natural
    length: Annotated[int, Field(ge=1, le=2**20)]


@numbered(32)
class BlobPart(Message):
    size: Natural
    data: bytes


@numbered(47, repeatable=True)
class ReadBlobs(Message):
    """Small ones, whole; as many of them as fit into an answer."""

    hashes: Annotated[tuple[Hash, ...], Field(max_length=500)]


@numbered(48)
class BlobsRead(Message):
    blobs: Annotated[tuple[tuple[Hash, bytes], ...], Field(max_length=500)]


@numbered(33)
class Ask(Message):
    """A user's question about a workflow, sent on to its home."""

    workflow: Word
    question: Word
    arguments: bytes = b""
    owner: Word = ""  # whose question it is; empty: an admin's


@numbered(34)
class Answer(Message):
    forgettable: ClassVar[bool] = True

    status: Annotated[int, Field(ge=100, le=599)]
    body: bytes


@numbered(35, repeatable=True)
class Describe(Message):
    pass


@numbered(36)
class Described(Message):
    free: Capacity
    running: Natural
    queued: Natural
    pid: Natural = 0
    state: Word = "up"


@numbered(37, repeatable=True)
class ListWorkflows(Message):
    """A page of the workflows whose home is the peer asked, newest first."""

    before: Text = ""
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    state: Word = ""
    owner: Word = ""


@numbered(38)
class ListedWorkflows(Message):
    rows: tuple[bytes, ...]  # JSON, one each


@numbered(39, repeatable=True)
class FindHome(Message):
    workflow: Word


@numbered(40)
class FoundHome(Message):
    here: bool
    epoch: Natural = 0
    home: bytes = b""  # whom this peer follows as a keeper, if it is not the home itself
    kept: bool = False  # there is a copy here, whoever is its home
    birth: Natural = 0  # of the journal that this peer goes on with, as its home
    void: bool = False  # a part of its submission, which was never acknowledged
    stuck: Text = ""  # which of its keepers are away, if too many are
    keepers: Annotated[tuple[PeerId, ...], Field(max_length=64)] = ()  # as a copy here says


@numbered(41)
class Keep(Message):
    """From a home to a keeper of its journals: write these to disk, then answer."""

    slices: Annotated[tuple[Slice, ...], Field(max_length=2000)]


@numbered(42)
class Kept(Message):
    """One for each slice."""

    stored: Annotated[tuple[Stored, ...], Field(max_length=2000)]


@numbered(43)
class Elect(Message):
    """From a keeper who wants to be the home of these."""

    candidacies: Annotated[tuple[Candidacy, ...], Field(max_length=2000)]


@numbered(44)
class Elected(Message):
    votes: Annotated[tuple[Vote, ...], Field(max_length=2000)]


@numbered(45)
class CopyBlobs(Message):
    """Fetch these and keep them, so that they outlive who holds them now."""

    files: Annotated[tuple[File, ...], Field(max_length=500)]
    hold: Word = ""  # the workflow that wants them
    announce: bool = False  # in the catalog, however small they are


@numbered(46)
class CopiedBlobs(Message):
    """Those that are here now."""

    hashes: Annotated[tuple[Hash, ...], Field(max_length=500)]


@numbered(73, repeatable=True)
class OpenBlob(Message):
    """Before chunks of it are read."""

    hash: Hash


@numbered(74)
class OpenedBlob(Message):
    """`have`: a bit for each chunk that is here; empty: all are."""

    size: Natural
    sheet: Annotated[bytes, Field(max_length=MANIFEST_BYTES_MAX)]  # the chunk manifest
    have: Annotated[bytes, Field(max_length=MANIFEST_BYTES_MAX)] = b""


@numbered(75)
class ReadChunk(Message):
    """`insist`: those it was told to ask instead do not have it."""

    hash: Hash
    index: Natural
    insist: bool = False


@numbered(76)
class Chunk(Message):
    """Its bytes; or, if there are none, who is about to have it."""

    forgettable: ClassVar[bool] = True

    data: bytes
    have: Annotated[bytes, Field(max_length=MANIFEST_BYTES_MAX)] = b""  # as in `OpenedBlob`
    ask: Annotated[tuple[PeerId, ...], Field(max_length=8)] = ()


@numbered(77, repeatable=True)
class StillHeld(Message):
    """To a workflow's home, by a peer that is short of room: what of this is wanted?"""

    workflow: Word
    hashes: Annotated[tuple[Hash, ...], Field(max_length=2000)]


@numbered(78)
class Unheld(Message):
    """Those that are not wanted any more."""

    hashes: Annotated[tuple[Hash, ...], Field(max_length=2000)]


@numbered(91)
class HandOn(Message):
    """To a workflow's home, by a peer that leaves with these files of it."""

    workflow: Word
    files: Annotated[tuple[File, ...], Field(max_length=500)]


@numbered(92)
class HandedOn(Message):
    """Those that are held elsewhere by now, or that nobody wants."""

    hashes: Annotated[tuple[Hash, ...], Field(max_length=500)]


@numbered(87)
class PullTasks(Message):
    """From a site's master pilot to a task queue, in bulk: who is there, what has ended, what was
    lost, and how many more tasks there is room for. The same `request` is the same request: it is
    answered with what it was answered before. `anew`: this master has just begun, or the queue;
    all attempts that are at the site are `held`, and there are no others."""

    site: Word
    token: Natural  # of this master's time in office
    request: Natural
    pilots: Annotated[tuple[Member, ...], Field(max_length=5000)] = ()  # if that has changed
    dead: Annotated[tuple[PeerId, ...], Field(max_length=5000)] = ()
    outcomes: Annotated[tuple[tuple[PeerId, Outcome], ...], Field(max_length=2000)] = ()
    lost: Annotated[tuple[tuple[AttemptKey, Text], ...], Field(max_length=20_000)] = ()
    want: Natural = 0
    anew: bool = False
    held: Annotated[tuple[AttemptKey, ...], Field(max_length=50_000)] = ()
    #: in words, now and then: where attempts at the site are, or what they wait for; None: not now
    whereabouts: (
        Annotated[
            tuple[tuple[Text, Annotated[tuple[AttemptKey, ...], Field(max_length=2000)]], ...],
            Field(max_length=200),
        ]
        | None
    ) = None


@numbered(88)
class PulledTasks(Message):
    """`again`: who asks is to begin anew. `kept`: outcomes that count now."""

    works: Annotated[tuple[Work, ...], Field(max_length=2000)] = ()
    kept: Annotated[tuple[AttemptKey, ...], Field(max_length=2000)] = ()
    ended: Annotated[tuple[AttemptKey, ...], Field(max_length=20_000)] = ()  # not wanted any more
    again: bool = False


@numbered(89, repeatable=True)
class AskHeld(Message):
    """From a new master to a pilot: attempts of a queue's workflows that are here, in any state."""


@numbered(90)
class HeldHere(Message):
    keys: Annotated[tuple[AttemptKey, ...], Field(max_length=20_000)]


@numbered(57, repeatable=True)
class StillWanted(Message):
    """From an executing peer to a home: attempts of gangs, which might wait for others that never
    come; and the epochs in which they were given."""

    attempts: Annotated[tuple[tuple[AttemptKey, Natural], ...], Field(max_length=1000)]


@numbered(58)
class Wanted(Message):
    """`unwanted` may be ended; of `unknown` this peer is not the home."""

    unwanted: tuple[AttemptKey, ...] = ()
    unknown: tuple[AttemptKey, ...] = ()


# 63 and 64 were a question that came back from every node; they are not used again


@numbered(93, repeatable=True)
class Meet(Message):
    """From a copy of a journal whose home went on without a majority: is there another line of it?
    Of the two one side is given up (keeping/lines)."""

    workflow: Word
    birth: Natural
    epoch: Natural  # the highest it has promised or written
    era: Natural  # that its last entry is of
    over: bool
    void: bool = False  # it ended as half a submission


@numbered(94)
class Met(Message):
    known: bool  # a copy of another line was here
    over: bool = False
    era: Natural = 0
    epoch: Natural = 0
    void: bool = False


@numbered(95, repeatable=True)
class StillHome(Message):
    """From a keeper to the home that its copies follow, and of which it has not heard for long."""

    workflows: Annotated[tuple[Word, ...], Field(max_length=1000)]


@numbered(96)
class NotHome(Message):
    workflows: Annotated[tuple[Word, ...], Field(max_length=1000)]  # of those asked about
