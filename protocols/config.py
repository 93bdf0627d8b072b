"""The limits and times of the protocols: each with its unit in its name and its reason beside it.

`LAN` holds the defaults; `WAN` is for peers on several continents. A strategy keeps its own limits
in a section of its own, in its folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

#: two ways to find the owners of a key: see protocols/overlay
OVERLAYS = ("kademlia", "chord")

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Config:
    # --- calls
    datagram_bytes_max: int = 1200  # sealing included: fits the MTU of every path
    message_bytes_max: int = 4 * 2**20  # the sender splits anything larger
    call_timeout_s: float = 5.0
    retry_first_s: float = 0.25  # until a round trip to that peer has been measured
    retry_min_s: float = 0.05
    retry_max_s: float = 1.0
    retry_growth: float = 1.6
    stream_retry_s: float = 3.0  # a stream delivers or breaks: only a broken one needs a repeat
    pending_calls_max: int = 4096
    serving_max: int = 1024
    # Answers are kept for repeats, for longer than any caller goes on repeating: without that,
    # "same id, at most one execution" would not be true.
    answer_kept_s: float = 40.0
    answers_kept_max: int = 20_000
    answers_bytes_max: int = 32 * 2**20

    # --- overlay
    overlay: str = "kademlia"  # or chord; all peers of a cluster must use the same one
    bucket_size: int = 16
    lookup_width: int = 3  # calls in flight per lookup
    lookup_wanted: int = 3  # owners of a key
    lookup_timeout_s: float = 1.0  # per peer asked; soft: a slow peer is passed over
    lookup_calls_max: int = 60
    refresh_s: float = 60.0
    stabilise_s: float = 10.0  # Chord: how often a peer questions its successor

    # --- records
    record_bytes_max: int = 900
    records_max: int = 50_000
    owners_per_key_max: int = 256
    record_ttl_s: float = 600.0
    # Every republished record costs a lookup. Beyond this many, the oldest are left to expire:
    # records are hints, and a peer that misses one asks around.
    published_max: int = 2000
    republish_s: float = 200.0  # three chances before a record expires
    # After a peer joins, so that peers that join together are handed their records together. (Each
    # record has two other holders meanwhile.)
    hand_over_s: float = 0.5

    # --- members and failure detection
    members_max: int = 5000
    probe_s: float = 1.0
    probe_quiet_s: float = 2.5  # once no peer has joined, left or been suspected for a while:
    probe_quiet_after_s: float = 10.0  # this long
    probe_timeout_s: float = 0.5
    # When a ping is late, the peer's host is asked by TCP whether anything listens at its port. The
    # kernel answers however busy the peer is, so a process that has ended is noticed at once.
    knock_after_s: float = 0.15
    indirect_probes: int = 3
    farewells_max: int = 32  # sent by a peer that leaves; the others hear of it as a rumour
    self_doubt_max: int = 2  # failed pings in a row that a peer blames on itself, see liveness
    suspicion_s: float = 1.8  # × log10(members), at least × 1: time for the suspect to object
    forget_dead_s: float = 24 * 3600.0
    # Deaths older than this are not passed on, except to a peer that believes the dead one alive.
    news_s: float = 120.0
    gossip_s: float = 0.5  # between two messages that carry nothing but news, while there is any
    gossip_per_message: int = 5
    gossip_per_ping: int = 5  # pings and their answers carry rumours, too
    gossip_repeat: int = 3  # × log2(members): nearly every peer hears of a change for certain
    wave_min: int = 128  # from this many members on, one peer collects the news and tells everybody
    wave_width: int = 8  # peers that each peer passes a wave on to
    wave_news_max: int = 100
    # Between two full exchanges caused by differing digests. Beyond a hundred members the time
    # grows with their number: × members / 100.
    sync_s_min: float = 0.5
    sync_s_max: float = 8.0

    # --- admission
    lease_ttl_s: float = 5.0
    leases_max: int = 4096
    # Work that may be queued at a peer beyond what runs there: enough to hide a round trip, little
    # enough that an idle peer elsewhere is not overlooked for long.
    queue_s_max: float = 0.5
    # Or, if that is more, this share of the peer's cores: in a fifth of their run time, a fifth of
    # the running units ends.
    queue_share: float = 0.2
    queue_units_max: int = 1000
    holds_max: int = 2  # units that a peer may drain for, see admission
    backfill_s_max: float = 2.0  # how long smaller units may overtake the head of the queue
    patience_s: float = 3.0  # a queued unit that has not begun after this is handed back
    vacancy_wishes_max: int = 256
    vacancy_ttl_s: float = 10.0
    turn_s: float = 2.5  # how long an owner that was refused is expected to ask again
    turn_answer_s: float = 0.15  # the same, once its home was told that there is capacity

    # --- promises: see capacity/bookings
    # At every instant so much of a peer is promised at most. The rest is for work without promises.
    promised_share: float = 0.75
    booking_hold_s: float = 15.0  # a hold that nobody confirms
    booking_affirm_s: float = 120.0  # a booking that nobody affirms
    bookings_max: int = 5000  # at one peer
    ways_max: int = 3  # how often a unit makes way for promised ones

    # --- keepers of journals
    keepers: int = 3  # odd: a fourth keeper would survive no more deaths than three do
    keep_timeout_s: float = 2.0
    keep_doubt_s: float = 0.5  # a keeper silent for this long is probed by the failure detector
    keep_bytes_max: int = 512 * 1024  # of entries in one message
    document_part_bytes: int = 256 * 1024  # a document is kept in parts, each an entry of its own
    # A keeper syncs its disk once per message. Under load, messages are this far apart; the first
    # few are not, so that a home that writes little never waits.
    keep_gap_s: float = 0.005
    keep_burst: int = 3
    keep_slices_max: int = 1000
    stand_step_s: float = 0.3  # keepers stand for election one after another, this far apart
    stand_answer_s: float = 0.6
    stand_again_s_max: float = 5.0
    stand_batch_max: int = 500
    # A copy that has heard nothing for this long asks the peer that it follows whether that is
    # still the home. Without this, a keeper that was unreachable while the workflow ended, and did
    # not notice that it was, would wait for ever.
    follow_s: float = 60.0
    follow_batch_max: int = 1000
    tail_entries_max: int = 256  # of a journal, in memory, for keepers that are a little behind
    # How long a lost majority of the keepers is waited for; then a survivor goes on from its own
    # copy. Infinite means for ever: lost keepers may only be cut off, and may go on as well.
    majority_lost_s: float = math.inf
    # Ended journals are looked over this long after a keeper was lost or is back, and regularly
    # anyway.
    archive_after_s: float = 10.0
    archive_s: float = 900.0
    archive_at_once: int = 50
    tombstone_s: float = 7 * 86400.0  # how long a copy that was given up is remembered: see keeping

    # --- homes
    tasks_max: int = 2_000_000  # of all workflows whose home is one peer

    # --- asking for capacity
    offer_s: float = 0.4  # soft: offers that arrive later are given back
    ask_backoff_s_min: float = 0.05
    ask_backoff_s_max: float = 2.0
    ask_batch_max: int = 2000

    # --- gangs: see strategies/gangs
    gang_hold_after_s: float = 3.0  # then peers keep for it what comes free there
    gang_renew_s: float = 1.0  # a fraction of a lease's time: a few chances before it expires
    gang_misses_max: int = 3  # unanswered renewals before another peer is chosen
    gang_check_s: float = 15.0  # how often an executing peer asks whether an attempt is wanted
    gangs_max: int = 64  # at one peer
    gangs_at_once: int = 16  # that one home gathers peers for
    gang_asked_max: int = 200  # peers asked in one try

    # --- strategies: each has a section of its own, in its folder
    sections: tuple[Any, ...] = ()

    def of(self, kind: type[S]) -> S:
        """A strategy's section: as it was set, or its defaults."""
        return next((part for part in self.sections if isinstance(part, kind)), None) or kind()

    def having(self, *sections: Any) -> Config:
        """The same with these sections, which replace those of their kinds."""
        kinds = tuple(map(type, sections))
        others = tuple(part for part in self.sections if not isinstance(part, kinds))
        return replace(self, sections=(*others, *sections))


LAN = Config()
#: for peers on several continents: slower to give up
WAN = Config(
    retry_first_s=0.8,
    retry_min_s=0.1,
    retry_max_s=3.0,
    call_timeout_s=10.0,
    lookup_timeout_s=3.0,
    probe_s=2.0,
    probe_quiet_s=5.0,
    probe_timeout_s=2.0,
    knock_after_s=0.6,
    suspicion_s=6.0,
    offer_s=1.5,
    lease_ttl_s=15.0,
    gang_renew_s=3.0,
)
PRESETS = {"lan": LAN, "wan": WAN}
