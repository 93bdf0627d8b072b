"""The messages of `chemical`, numbered 61 to 72."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from ...wire.messages import Capacity, Message, Natural, Needs, PeerId, Seconds, numbered

Order = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class Scale(NamedTuple):
    """The mapping of values to the ring: orders that divide all molecules into equal parts."""

    version: Natural
    points: Annotated[tuple[Order, ...], Field(max_length=64)]


class Meta(NamedTuple):
    """A resource, as a molecule of the layer: `order` is its value and a tie."""

    peer: PeerId
    order: Order
    version: Natural = 0
    free: Capacity = Capacity()
    queues: bool = False  # units of a known run time may wait there


@numbered(61)
class Publish(Message):
    """Resources whose place is here; and those that have left, by their versions."""

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
    """To a home that waits: this resource has capacity for so many of its units."""

    meta: Meta
    needs: Needs
    count: Natural


@numbered(66)
class Arouse(Message):
    """To the speaker: a home needs the layer, for peers of this kind; the speaker tells all peers.
    Or a question met many empty nodes in a row where the scale promises many molecules."""

    kind: Needs = Needs()
    stale: Natural = 0  # the version of that scale, plus one


@numbered(67, repeatable=True)
class Sample(Message):
    """Asks for the order of a peer's molecule."""


@numbered(68)
class Sampled(Message):
    order: Order


Found = tuple[Meta, Natural]  # a resource, and the units it should have capacity for


@numbered(69)
class Range(Message):
    """Asks for resources from the order `low` to below `high`, with capacity for `count` units of
    these needs. It goes from node to node, with the resources found so far; the last node answers
    `home`. If there is too little, `home` is told for `wait_s` of resources that appear."""

    home: PeerId
    id: Natural  # a repeated question is answered as before
    low: Order
    high: Order
    kind: Needs
    needs: Needs
    count: Annotated[int, Field(ge=1, le=100_000)]
    each: Annotated[int, Field(ge=1, le=100_000)]  # units of one resource, at most
    queue: bool
    wait_s: Seconds
    scale: Natural
    top: Order  # the end of the stretch, of which `high` may cut off a part
    leg: Annotated[int, Field(ge=0, le=2)]  # see `questions`
    nodes: Natural  # that it may still visit on this leg
    empty: Natural  # nodes in a row that had nothing
    again: bool = False  # it is back where the ring begins: asks for the last stretch there
    careful: bool = False  # each node makes sure that the next one has the question
    part: Natural = 0  # parts of the answer that have been sent
    dry: bool = False  # no resource was idle
    stale: bool = False  # there was less than the scale promises
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
    """To a node that told of a resource that appeared: the home has enough."""

    needs: Needs


@numbered(71)
class InUse(Message):
    """To all peers, in a wave: the kinds of peers that are asked for on the layer, and for how long
    from now on; and the scale of the layer."""

    scale: Scale
    kinds: Annotated[tuple[tuple[Needs, Seconds], ...], Field(max_length=16)]
