"""The match of a unit's needs with a peer's capacity and traits; in words if it fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from valence.workflow.quantities import show_bytes

from ..wire.messages import Capacity, Member, Needs, Traits

ONE_GPU = "1 GPU"


def plus(a: Capacity, b: Capacity, times: int = 1) -> Capacity:
    millicores, memory_bytes, disk_bytes, gpus = b
    return Capacity(
        a.millicores + times * millicores,
        a.memory_bytes + times * memory_bytes,
        a.disk_bytes + times * disk_bytes,
        a.gpus + times * gpus,
    )


def slots(free: Capacity, needs: Capacity) -> int:
    """How many units with these needs fit."""
    count = 1_000_000
    for have, need in zip(free, needs, strict=True):
        if need and have < count * need:
            count = max(0, have) // need
    return count


def unmet(capacity: Capacity, traits: Traits, needs: Needs) -> list[str]:
    """The needs that this peer could not meet even when idle, in words."""
    return [*_too_small(capacity, needs.capacity), *_missing(traits, needs)]


def _too_small(capacity: Capacity, need: Capacity) -> Iterator[str]:
    if need.millicores > capacity.millicores:
        cores = need.millicores / 1000
        yield f"{cores:g} CPU{'s' * (cores != 1)}"
    if need.memory_bytes > capacity.memory_bytes:
        yield f"{show_bytes(need.memory_bytes)} of memory"
    if need.disk_bytes > capacity.disk_bytes:
        yield f"{show_bytes(need.disk_bytes)} of disk"
    if need.gpus > capacity.gpus:
        yield f"{need.gpus} GPU{'s' * (need.gpus > 1)}"


def _missing(traits: Traits, needs: Needs) -> Iterator[str]:
    for name in ("arch", "os", "site"):
        wanted = getattr(needs, name)
        if wanted is not None and wanted != getattr(traits, name):
            yield f"{name} {wanted}"
    if needs.speed is not None and needs.speed > traits.speed:
        yield f"speed {needs.speed:g}"
    yield from (f"label {label}" for label in needs.labels if label not in traits.labels)
    yield from (f"software {name}" for name in needs.software if name not in traits.software)


def explain(members: Iterable[Member], needs: Needs) -> str | None:
    """None if some peer meets the needs when idle; else, in words, which needs no peer meets."""
    counts: dict[str, int] = {}
    total = 0
    for member in members:
        missing = unmet(member.capacity, member.traits, needs)
        if not missing:
            return None
        total += 1
        for need in missing:
            counts[need] = counts.get(need, 0) + 1
    return _nobody_has(counts, total) if total else "no peer is here"


def _nobody_has(counts: dict[str, int], total: int) -> str:
    """`counts`: how many of the peers lack each need; none has all of them."""
    hopeless = [need for need, count in counts.items() if count == total]
    listed = " and ".join(hopeless or counts)
    if total == 1:
        return f"needs {listed}, which the only peer does not have"
    lacking = "all of these"
    if hopeless:
        lacking = "one" if hopeless == [ONE_GPU] else "that" if len(hopeless) == 1 else "those"
    return f"needs {listed}, but none of the {total} peers has {lacking}"
