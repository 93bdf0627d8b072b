"""The messages of the core: frozen, numbered, append-only. A strategy has its own in its folder.

On the wire a message is its number and its fields in order, as msgpack, and so is every value in
it. A field may be added at the end with a default; none is ever removed, reordered or given
another meaning. Everything is validated here, at the edge: all other code may rely on the sizes,
counts and types of what a peer sent. Values are named tuples: msgpack writes them and pydantic
checks them without a line of Python for each, and some twenty of them are made for every task.
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
#: a packed `Member`: most rumours are known already, and need not be unpacked again
Packed = Annotated[bytes, Field(max_length=8192)]
TaskName = Annotated[str, Field(max_length=512)]
FileName = Annotated[str, Field(max_length=1024)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    number: ClassVar[int] = -1
    names: ClassVar[tuple[str, ...]] = ()  # of its fields
    #: it may simply run again when it is repeated, so its answer is not kept
    repeatable: ClassVar[bool] = False
    #: an answer that may be large, and may be made again for a late repeat: it is not kept
    forgettable: ClassVar[bool] = False

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        cls.names = tuple(cls.model_fields)

    @classmethod
    def of(cls, *fields: Any) -> Self:
        """A message of all its fields, whose values were checked when they were made: not again."""
        made = cls.__new__(cls)
        values = dict(zip(cls.names, fields, strict=True))
        object.__setattr__(made, "__dict__", values)
        object.__setattr__(made, "__pydantic_fields_set__", set(values))
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", None)
        return made


M = TypeVar("M", bound=type[Message])
BY_NUMBER: dict[int, type[Message]] = {}

#: the message numbers of each strategy, so that no number ever has two meanings. All others below
#: 1,000 are the core's; a strategy of another distribution takes its numbers from 1,000 on.
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
            raise ValueError(f"message {number} is already {BY_NUMBER[number].__name__}")
        if not _may_have(cls.__module__, number):
            raise ValueError(
                f"message number {number} is reserved: {cls.__module__} may not use it"
            )
        cls.number = number
        cls.repeatable = repeatable
        BY_NUMBER[number] = cls
        return cls

    return register


def _may_have(module: str, number: int) -> bool:
    protocols = __name__.rpartition(".wire.")[0]
    if not module.startswith(protocols):
        return number >= FOREIGN_MIN
    for strategy, numbers in RANGES.items():
        if f".strategies.{strategy}." in module:
            return number in numbers
    return number < FOREIGN_MIN and not any(number in numbers for numbers in RANGES.values())


# --------------------------------------------------------------------------- values


class Contact(NamedTuple):
    """A peer's address. An empty host and port 0 mean that it is unknown: ask for its member."""

    id: PeerId
    host: Host
    port: Port


class Capacity(NamedTuple):
    """The resources that running tasks use up; integers, so that sums are exact."""

    millicores: Natural = 0
    memory_bytes: Natural = 0
    disk_bytes: Natural = 0
    gpus: Natural = 0


class Traits(NamedTuple):
    """Properties that tasks do not use up: they must match, or be at least what a task needs."""

    arch: Word = ""
    os: Word = ""
    site: Word = ""
    speed: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    labels: Words = ()
    software: Words = ()


class Member(NamedTuple):
    """A peer as all others know it. `boot` counts its starts, `incarnation` its objections."""

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
    ttl_s: Seconds  # the time left: no clocks are compared
    value: Annotated[bytes, Field(max_length=1024)]


class AttemptKey(NamedTuple):
    """One run of one task. `number` makes a stale result harmless."""

    workflow: Word
    task: TaskName
    number: Natural

    def __str__(self) -> str:
        return f"{self.workflow}/{self.task}#{self.number}"


class File(NamedTuple):
    """A file of a task: its name there, its content, and the peers known to hold it."""

    name: FileName
    hash: Hash
    size: Natural
    holders: Annotated[tuple[PeerId, ...], Field(max_length=16)] = ()
    url: Annotated[str, Field(max_length=2000)] = ""  # its origin, for when no peer has it


class Value(NamedTuple):
    """A call's value. Peers never unpickle: only worker processes do."""

    encoding: Annotated[str, Field(pattern="^(json|pickle)$")]
    data: Annotated[bytes, Field(max_length=2**20)] = b""
    file: File | None = None  # holds the value if it is too large for messages


class Argument(NamedTuple):
    """The value of `{result: name}`: one value, or those of a `foreach` in order."""

    name: TaskName
    many: bool
    values: tuple[Value, ...]


class Placing(NamedTuple):
    """How a site is to place a task that it pulled from a queue."""

    rank_s: float = 0.0  # of work that depends on it
    deadline_in_s: float | None = None
    ranked_by: Annotated[str, Field(max_length=200)] = ""
    avoid: Annotated[tuple[PeerId, ...], Field(max_length=8)] = ()  # pilots at which it failed


class Work(NamedTuple):
    """Everything that an executing peer needs to run an attempt."""

    key: AttemptKey
    lease: Natural
    needs: Needs
    command: tuple[str, ...] | None = None
    call: Annotated[str, Field(max_length=500)] | None = None
    arguments: bytes = b""  # msgpack of [args, kwargs], with references in them
    references: tuple[Argument, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    inputs: tuple[File, ...] = ()
    outputs: tuple[FileName, ...] = ()
    timeout_s: Seconds | None = None
    runtime_s: Seconds | None = None
    network: bool = False  # let it use the network, even in a sandbox
    epoch: Natural = 0  # of the home that sends it
    gang: bool = False  # other tasks run at the same time, at other peers
    owner: Annotated[str, Field(max_length=64)] = (
        ""  # tasks of two owners share no process and no user
    )
    placing: Placing | None = None  # for a site that pulls it from a queue
    ways: Natural = 0  # how often it has made way for tasks that were promised its place


class Moved(NamedTuple):
    """Bytes of inputs, by their source: the peer's own disk, other peers, their origin."""

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
    # small outputs travel along, so that they have a second holder before they are committed
    enclosed: Annotated[tuple[tuple[Hash, bytes], ...], Field(max_length=256)] = ()
    epoch: Natural = 0  # of the home that sent the attempt: number and epoch make it unique
    cause: Word = ""  # of a failure, in a word: memory, timeout, exit or signal
    moved: Moved = Moved()  # the inputs that it read
    # inputs that nobody has any more: every peer said to hold them has answered that it does not
    missing: Annotated[tuple[Hash, ...], Field(max_length=1000)] = ()
    by: PeerId | None = None  # the pilot that ran it, if a queue gave it to a site
    speed: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # of the peer that ran it


class GangTag(NamedTuple):
    """The order of tasks that each need several peers at once: which of two goes first at a peer.
    It is the same at every peer, so that no two of them wait for each other."""

    since: Annotated[float, Field(allow_inf_nan=False)]  # by its home's clock
    id: Natural  # the home's own number for it


class Room(NamedTuple):
    """A request for capacity, for up to `count` units of the same needs."""

    needs: Needs
    count: Annotated[int, Field(ge=1, le=100_000)]  # type: ignore[assignment]
    runtime_s: Seconds | None = None
    deadline_in_s: float | None = None
    queue: bool = False  # a place in the queue is enough
    hold: bool = False  # it has waited long: a place in the queue, however long the queue is
    gang: GangTag | None = None  # asking again with the same tag renews the lease
    owner: Annotated[str, Field(max_length=64)] | None = (
        None  # of the first unit; None: of several owners
    )


class Grant(NamedTuple):
    leases: Annotated[tuple[Natural, ...], Field(max_length=10_000)] = ()
    queued: Natural = 0  # how many of the leases, from the last backwards, wait in the queue
    wait_s: Seconds = 0.0  # until the last of them begins, as the peer estimates
    refusal: Text = ""  # why there are not more
    held: bool = False  # capacity that comes free here is kept for this gang


class Ticket(NamedTuple):
    """A peer's free capacity, and the free places in its queue: for `queue_s` of work in up to
    `queue_units` units; or for units of `queue_cores` millicores in sum, however long they run."""

    free: Capacity
    queue_s: Seconds = 0.0
    queue_units: Natural = 0
    queue_cores: Natural = 0


class Entry(NamedTuple):
    """One entry of a workflow's journal. `seq` and `epoch` together identify it for ever."""

    seq: Natural
    epoch: Natural
    at: float
    kind: Word
    body: bytes  # msgpack of a mapping; keepers read only those about keepers


class Slice(NamedTuple):
    """Consecutive entries of one journal, from where its keeper's copy is believed to end."""

    workflow: Word
    epoch: Natural
    before: Natural  # how many entries precede these
    before_epoch: Natural  # of the last entry before these
    committed: Natural  # how many entries, from the first on, a majority has
    entries: tuple[Entry, ...] = ()
    last: bool = False  # the receiver is no keeper any more, and a majority has agreed to that


class Stored(NamedTuple):
    """A keeper's copy of one journal on its disk, as far as it agrees with the sender's."""

    workflow: Word
    epoch: Natural  # the highest it has promised to follow
    entries: Natural  # with a `refusal`: how many the sender may continue from
    refusal: Word = ""


class Candidacy(NamedTuple):
    """A keeper stands for election. `trial`: would you vote for it? Nothing is promised, so a
    keeper that stands in vain disturbs nobody."""

    workflow: Word
    epoch: Natural
    entries: Natural
    last_epoch: Natural
    trial: bool
    birth: Natural = 0  # the first entry's epoch: two journals may have one name


class Vote(NamedTuple):
    workflow: Word
    granted: bool
    epoch: Natural  # the highest this keeper has promised to follow
    why: Text = ""  # it was not granted
    home: bytes = b""  # the peer it follows
    outsider: bool = False  # the candidate is no keeper any more: a majority has agreed on that


#: these check values that did not come in a message
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
    """The first message to an address whose id is unknown. All peers use the same overlay."""

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
    """Ask another peer to ping the target: one lossy link must not get a peer declared dead."""

    target: Contact


@numbered(7)
class PingedFor(Message):
    alive: bool
    refused: bool = False  # its host says that nothing listens there


@numbered(8, repeatable=True)
class Sync(Message):
    """The sender's view of the members, as digests: one for each part of the id space."""

    digests: Annotated[bytes, Field(min_length=4, max_length=4096)]


@numbered(9)
class Synced(Message):
    """The parts that differ, as the sender knows them: in brief (id, boot, incarnation, state), or
    in full where the receiver knows nobody."""

    parts: Annotated[tuple[Annotated[int, Field(ge=0, le=1023)], ...], Field(max_length=1024)]
    known: tuple[tuple[PeerId, Natural, Natural, Natural], ...] = ()
    members: tuple[Packed, ...] = ()


@numbered(49, repeatable=True)
class Exchange(Message):
    """Members that the receiver lacks, and the ids of those that the sender wants."""

    members: tuple[Packed, ...]
    wanted: tuple[PeerId, ...] = ()


@numbered(10)
class Rumours(Message):
    members: tuple[Packed, ...]


@numbered(59)
class Wave(Message):
    """News for all peers from the receiver's id up to `end`: the receiver passes them on. `digest`:
    the view of a peer that has heard all of it."""

    members: tuple[Packed, ...]
    end: Key
    digest: int
    about: Annotated[bytes, Field(max_length=4096)] = b""  # an announcement to all peers


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
    # for the chemical strategy: the molecule of the peer that is asked was consumed; and which
    # version of it, if a rest of it is left
    consumed: bool = False
    molecule: Natural = 0


@numbered(21)
class Offers(Message):
    """One grant for each of `asks`, in the same order."""

    grants: tuple[Grant, ...]
    free: Capacity
    ttl_s: Seconds


@numbered(22)
class ReturnLeases(Message):
    leases: tuple[Natural, ...]
    gangs: tuple[Natural, ...] = ()  # gangs that need nothing here any more


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
    """`kept` are on the home's disk; `unknown` are of workflows that this peer does not know."""

    kept: tuple[AttemptKey, ...]
    unknown: tuple[AttemptKey, ...] = ()
    moved: tuple[tuple[Word, bytes], ...] = ()  # workflow → its home, as far as this peer knows


@numbered(27, repeatable=True)
class Inquire(Message):
    keys: tuple[AttemptKey, ...]
    epochs: tuple[tuple[Word, Natural], ...] = ()  # of the sender, as home of the workflows


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
    """To a home that was refused a while ago: there is free capacity now."""

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
    """Read small blobs whole; the answer has as many of them as fit."""

    hashes: Annotated[tuple[Hash, ...], Field(max_length=500)]


@numbered(48)
class BlobsRead(Message):
    blobs: Annotated[tuple[tuple[Hash, bytes], ...], Field(max_length=500)]


@numbered(33)
class Ask(Message):
    """A user's question about a workflow, forwarded to its home."""

    workflow: Word
    question: Word
    arguments: bytes = b""
    owner: Word = ""  # the user who asks; empty: an admin


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
    rows: tuple[bytes, ...]  # one JSON object each


@numbered(39, repeatable=True)
class FindHome(Message):
    workflow: Word


@numbered(40)
class FoundHome(Message):
    here: bool
    epoch: Natural = 0
    home: bytes = b""  # the home that this peer follows as a keeper, if it is not the home itself
    kept: bool = False  # there is a copy here, whichever peer is its home
    birth: Natural = 0  # of the journal, if this peer is its home
    void: bool = False  # only a part of a submission, which was never acknowledged
    stuck: Text = ""  # the keepers that are away, if too many are
    keepers: Annotated[tuple[PeerId, ...], Field(max_length=64)] = ()  # according to a copy here


@numbered(41)
class Keep(Message):
    """From a home to a keeper of its journals: write these slices to disk, then answer."""

    slices: Annotated[tuple[Slice, ...], Field(max_length=2000)]


@numbered(42)
class Kept(Message):
    """One for each slice."""

    stored: Annotated[tuple[Stored, ...], Field(max_length=2000)]


@numbered(43)
class Elect(Message):
    """From a keeper that wants to be the home of these journals."""

    candidacies: Annotated[tuple[Candidacy, ...], Field(max_length=2000)]


@numbered(44)
class Elected(Message):
    votes: Annotated[tuple[Vote, ...], Field(max_length=2000)]


@numbered(45)
class CopyBlobs(Message):
    """Fetch these files and keep them, so that they outlive their present holders."""

    files: Annotated[tuple[File, ...], Field(max_length=500)]
    hold: Word = ""  # the workflow that wants them
    announce: bool = False  # add them to the catalog, however small they are


@numbered(46)
class CopiedBlobs(Message):
    """The files that are here now."""

    hashes: Annotated[tuple[Hash, ...], Field(max_length=500)]


@numbered(73, repeatable=True)
class OpenBlob(Message):
    """Sent before chunks of a blob are read."""

    hash: Hash


@numbered(74)
class OpenedBlob(Message):
    """`have`: one bit for each chunk, set if it is here; empty: all are."""

    size: Natural
    sheet: Annotated[bytes, Field(max_length=MANIFEST_BYTES_MAX)]  # the chunk manifest
    have: Annotated[bytes, Field(max_length=MANIFEST_BYTES_MAX)] = b""


@numbered(75)
class ReadChunk(Message):
    """`insist`: the peers that the caller was told to ask instead do not have it."""

    hash: Hash
    index: Natural
    insist: bool = False


@numbered(76)
class Chunk(Message):
    """The chunk's bytes; or, if `data` is empty, the peers that are about to have it (`ask`)."""

    forgettable: ClassVar[bool] = True

    data: bytes
    have: Annotated[bytes, Field(max_length=MANIFEST_BYTES_MAX)] = b""  # as in `OpenedBlob`
    ask: Annotated[tuple[PeerId, ...], Field(max_length=8)] = ()


@numbered(77, repeatable=True)
class StillHeld(Message):
    """To a workflow's home, from a peer short of disk space: which of these are still wanted?"""

    workflow: Word
    hashes: Annotated[tuple[Hash, ...], Field(max_length=2000)]


@numbered(78)
class Unheld(Message):
    """The files that are not wanted any more."""

    hashes: Annotated[tuple[Hash, ...], Field(max_length=2000)]


@numbered(91)
class HandOn(Message):
    """To a workflow's home, from a leaving peer that holds these files of it."""

    workflow: Word
    files: Annotated[tuple[File, ...], Field(max_length=500)]


@numbered(92)
class HandedOn(Message):
    """The files that other peers hold by now, or that nobody wants."""

    hashes: Annotated[tuple[Hash, ...], Field(max_length=500)]


@numbered(87)
class PullTasks(Message):
    """From a site's master pilot to a task queue, in bulk: the pilots, the attempts that ended or
    were lost, and how many more tasks the site has capacity for. A repeat has the same `request`
    number, and gets the same answer. `anew`: this master has just begun, or the queue has; `held`
    lists all attempts at the site."""

    site: Word
    token: Natural  # of this master's term
    request: Natural
    pilots: Annotated[tuple[Member, ...], Field(max_length=5000)] = ()  # only if they have changed
    dead: Annotated[tuple[PeerId, ...], Field(max_length=5000)] = ()
    outcomes: Annotated[tuple[tuple[PeerId, Outcome], ...], Field(max_length=2000)] = ()
    lost: Annotated[tuple[tuple[AttemptKey, Text], ...], Field(max_length=20_000)] = ()
    want: Natural = 0
    anew: bool = False
    held: Annotated[tuple[AttemptKey, ...], Field(max_length=50_000)] = ()
    #: now and then, in words: where attempts at the site are, or why they wait; None: not this time
    whereabouts: (
        Annotated[
            tuple[tuple[Text, Annotated[tuple[AttemptKey, ...], Field(max_length=2000)]], ...],
            Field(max_length=200),
        ]
        | None
    ) = None


@numbered(88)
class PulledTasks(Message):
    """`again`: the site must begin anew. `kept`: outcomes that are committed now."""

    works: Annotated[tuple[Work, ...], Field(max_length=2000)] = ()
    kept: Annotated[tuple[AttemptKey, ...], Field(max_length=2000)] = ()
    ended: Annotated[tuple[AttemptKey, ...], Field(max_length=20_000)] = ()  # not wanted any more
    again: bool = False


@numbered(89, repeatable=True)
class AskHeld(Message):
    """From a new master to a pilot: which attempts of a queue's workflows do you have?"""


@numbered(90)
class HeldHere(Message):
    """The attempts that the pilot has, in any state."""

    keys: Annotated[tuple[AttemptKey, ...], Field(max_length=20_000)]


@numbered(57, repeatable=True)
class StillWanted(Message):
    """From an executing peer to a home: are these attempts of gangs still wanted? They might wait
    for others that never come. Each has the epoch of the home that sent it."""

    attempts: Annotated[tuple[tuple[AttemptKey, Natural], ...], Field(max_length=1000)]


@numbered(58)
class Wanted(Message):
    """`unwanted` attempts may be ended; this peer is not the home of the `unknown` ones."""

    unwanted: tuple[AttemptKey, ...] = ()
    unknown: tuple[AttemptKey, ...] = ()


# 63 and 64 were a query that every node answered; they are never used again


@numbered(93, repeatable=True)
class Meet(Message):
    """From a copy of a journal whose home went on without a majority: is there another line of it?
    One of the two lines is given up (consensus/lines)."""

    workflow: Word
    birth: Natural
    epoch: Natural  # the highest that the copy has promised or written
    era: Natural  # of its last entry
    over: bool
    void: bool = False  # it has only a part of its submission


@numbered(94)
class Met(Message):
    known: bool  # a copy of another line was here
    over: bool = False
    era: Natural = 0
    epoch: Natural = 0
    void: bool = False


@numbered(95, repeatable=True)
class StillHome(Message):
    """From a keeper to the home that its copies follow, and that it has long not heard of."""

    workflows: Annotated[tuple[Word, ...], Field(max_length=1000)]


@numbered(96)
class NotHome(Message):
    """The workflows, of those asked about, whose home the peer is not."""

    workflows: Annotated[tuple[Word, ...], Field(max_length=1000)]
