"""The limits and times of `probe`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    asked_min: int = 4  # peers
    asked_max: int = 24
    hold_after_s: float = 3.0  # a unit that waited this long asks for a place in a queue
