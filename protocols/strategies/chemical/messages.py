"""Messages of the chemical layer: 61 to 72."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from ...wire.messages import Capacity, Message, Natural, Needs, PeerId, Seconds, numbered

Order = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Scale(NamedTuple):
    """Where values lie on the ring: orders that divide what there is into equal parts."""

    version: Natural
    points: Annotated[tuple[Order, ...], Field(max_length=64)]


class Meta(NamedTuple):
    """A resource, as the layer of the chemical space has it: `order` is its value and a tie."""

    peer: PeerId
    order: Order
    version: Natural = 0
    free: Capacity = Capacity()
    queues: bool = False  # units of a known run time may wait there


@numbered(61)
class Publish(Message):
    """Resources whose place is here; and which of them are here no more, by their versions."""

    metas: Annotated[tuple[Meta, ...], Field(max_length=64)]
    gone: Annotated[tuple[tuple[PeerId, Natural], ...], Field(max_length=64)] = ()
    scale: Natural = 0
    hops: Natural = 0
    kind: Needs = Needs()


@numbered(62)
class Published(Message):
    scale: Scale | None = None  # a newer one


@numbered(65)
class Appeared(Message):
    """To one that waits: this resource has room for so many of its units."""

    meta: Meta
    needs: Needs
    count: Natural


@numbered(66)
class Arouse(Message):
    """To the speaker: somebody wants the layer, for peers of this kind. It has all peers told. Or a
    question met many nodes in a row without anything where this scale has many."""

    kind: Needs = Needs()
    stale: Natural = 0  # its version, and one more


@numbered(67, repeatable=True)
class Sample(Message):
    """Where do you stand?"""


@numbered(68)
class Sampled(Message):
    order: Order


Found = tuple[Meta, Natural]  # a resource, and units it should have room for


@numbered(69)
class Range(Message):
    """Resources from one order on to below another, that have room for units of these needs: so
    many units of it. It goes on from node to node, with what it has found so far; the last one
    answers `home`. If there is too little, `home` is told for `wait_s` of what appears."""

    home: PeerId
    id: Natural  # it may come twice: then it is answered as before
    low: Order
    high: Order
    kind: Needs
    needs: Needs
    count: Annotated[int, Field(ge=1, le=100_000)]
    each: Annotated[int, Field(ge=1, le=100_000)]  # at most, of one resource
    queue: bool
    wait_s: Seconds
    scale: Natural
    top: Order  # up to here they are alike, if only `high` were not less
    leg: Annotated[int, Field(ge=0, le=2)]  # see `questions`
    nodes: Natural  # it may still visit, on this leg
    empty: Natural  # in a row, that had nothing
    again: bool = False  # all round the ring: of the node where it begins, what is its last stretch
    careful: bool = False  # each node makes sure that the next one has it
    part: Natural = 0  # parts of the answer that were sent
    dry: bool = False  # no resource was idle
    stale: bool = False  # there was less than the scale says
    avoid: Annotated[tuple[PeerId, ...], Field(max_length=64)] = ()  # not these
    rows: Annotated[tuple[Found, ...], Field(max_length=64)] = ()
    owner: Annotated[str, Field(max_length=64)] = ""  # of the first of these units


@numbered(70)
class Ranged(Message):
    """A part of the answer to a `Range`."""

    id: Natural
    part: Natural
    last: bool
    rows: Annotated[tuple[Found, ...], Field(max_length=64)]
    dry: bool = False
    scale: Scale | None = None  # a newer one
    stale: bool = False


@numbered(72)
class Unwished(Message):
    """To a node that told of what appeared: there is enough of it."""

    needs: Needs


@numbered(71)
class InUse(Message):
    """To all peers, in a wave: which kinds of peers are asked for on the layer, and for how long
    from now on; and where they lie on it."""

    scale: Scale
    kinds: Annotated[tuple[tuple[Needs, Seconds], ...], Field(max_length=16)]
