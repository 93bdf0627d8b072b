"""Whether a peer has so much more free capacity than it last announced that it should say so."""

from __future__ import annotations

from ..config import Config
from ..wire.messages import Ticket

QUEUED_S_MIN = 0.001


def is_more(told: Ticket, now: Ticket, millicores: int, config: Config) -> bool:
    """`millicores`: all cores of the peer."""
    if any(new > old for new, old in zip(now.free, told.free, strict=True)):
        return True
    # half of its queue has started: announce that before the queue is empty
    queued_s = config.queue_s_max - now.queue_s
    queued_before_s = config.queue_s_max - told.queue_s
    if queued_s < queued_before_s / 2 and queued_before_s > QUEUED_S_MIN:
        return True
    most = int(config.queue_share * millicores)
    return most - now.queue_cores < (most - told.queue_cores) / 2
