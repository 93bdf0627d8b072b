"""Does a peer meet a unit's needs, and if not, which one it fails."""

from __future__ import annotations

from collections.abc import Iterable

from valence.workflow.quantities import show_bytes

from ..wire.messages import Capacity, Member, Needs, Traits


def plus(a: Capacity, b: Capacity, times: int = 1) -> Capacity:
    return Capacity(
        millicores=a.millicores + times * b.millicores,
        memory_bytes=a.memory_bytes + times * b.memory_bytes,
        disk_bytes=a.disk_bytes + times * b.disk_bytes,
        gpus=a.gpus + times * b.gpus,
    )


def slots(free: Capacity, needs: Capacity) -> int:
    """How many units with these needs fit."""
    count = 1_000_000
    for have, need in zip(free, needs, strict=True):
        if need:
            count = min(count, max(0, have) // need)
    return count


def unmet(capacity: Capacity, traits: Traits, needs: Needs) -> list[str]:
    """What this peer could not give even when idle, in words."""
    found = []
    need = needs.capacity
    if need.millicores > capacity.millicores:
        found.append(f"{need.millicores / 1000:g} cpus")
    if need.memory_bytes > capacity.memory_bytes:
        found.append(f"{show_bytes(need.memory_bytes)} of memory")
    if need.disk_bytes > capacity.disk_bytes:
        found.append(f"{show_bytes(need.disk_bytes)} of disk")
    if need.gpus > capacity.gpus:
        found.append(f"{need.gpus} gpu{'s' * (need.gpus > 1)}")
    for name in ("arch", "os", "site"):
        wanted = getattr(needs, name)
        if wanted is not None and wanted != getattr(traits, name):
            found.append(f"{name} {wanted}")
    if needs.speed is not None and needs.speed > traits.speed:
        found.append(f"speed {needs.speed:g}")
    found.extend(f"label {label}" for label in needs.labels if label not in traits.labels)
    found.extend(f"software {name}" for name in needs.software if name not in traits.software)
    return found


def explain(members: Iterable[Member], needs: Needs) -> str | None:
    """None if some peer meets the needs when idle; else which need no peer meets."""
    counts: dict[str, int] = {}
    total = 0
    for member in members:
        missing = unmet(member.capacity, member.traits, needs)
        if not missing:
            return None
        total += 1
        for need in missing:
            counts[need] = counts.get(need, 0) + 1
    if not total:
        return "no peer is here"
    hopeless = [need for need, count in counts.items() if count == total]
    if hopeless:
        listed = " and ".join(hopeless)
        one = len(hopeless) == 1
        return f"needs {listed}: no peer of {total} has {'that' if one else 'those'}"
    return f"needs {', '.join(counts)}: no peer of {total} has all of these together"
