"""Every limit and time of the protocols, with its unit in its name and its reason beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

#: two ways to find who owns a key: see protocols/overlay
OVERLAYS = ("kademlia", "chord")

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Config:
    # --- calls
    datagram_bytes_max: int = 1200  # with the seal around it: fits every path's MTU
    message_bytes_max: int = 4 * 2**20  # anything larger is split by its sender
    call_timeout_s: float = 5.0
    retry_first_s: float = 0.25  # before a round trip to that peer has been measured
    retry_min_s: float = 0.05
    retry_max_s: float = 1.0
    retry_growth: float = 1.6
    stream_retry_s: float = 3.0  # a stream delivers or breaks; repeat only for a broken one
    pending_calls_max: int = 4096
    serving_max: int = 1024
    # An answer is kept for repeats for longer than any caller goes on repeating: only then does
    # "same id, at most one execution" hold.
    answer_kept_s: float = 40.0
    answers_kept_max: int = 20_000
    answers_bytes_max: int = 32 * 2**20

    # --- overlay
    overlay: str = "kademlia"  # or chord: the same for all peers of a cluster
    bucket_size: int = 16
    lookup_width: int = 3  # calls in flight in one lookup
    lookup_wanted: int = 3  # owners of a key
    lookup_timeout_s: float = 1.0  # per peer asked: soft, a slow peer is passed over
    lookup_calls_max: int = 60
    refresh_s: float = 60.0
    stabilise_s: float = 10.0  # on the ring: between two questions to the next peer

    # --- records
    record_bytes_max: int = 900
    records_max: int = 50_000
    owners_per_key_max: int = 256
    record_ttl_s: float = 600.0
    # Each is looked up anew when it is republished. The oldest beyond this are left to expire:
    # records are hints, and who needs one that is gone asks around.
    published_max: int = 2000
    republish_s: float = 200.0  # three chances before a record expires
    hand_over_s: float = 0.5  # after a peer came: others come along, and it has two others' copies

    # --- members and failure detection
    members_max: int = 5000
    probe_s: float = 1.0
    probe_quiet_s: float = 2.5  # when no peer came, went or was suspected for a while
    probe_quiet_after_s: float = 10.0
    probe_timeout_s: float = 0.5
    # A ping that is late: the peer's host is asked by TCP whether anybody listens there. Its kernel
    # answers, however busy the peer is; a process that ended is so known at once.
    knock_after_s: float = 0.15
    indirect_probes: int = 3
    farewells_max: int = 32  # by a peer that leaves; the others hear it as a rumour
    self_doubt_max: int = 2  # failed pings in a row that a peer blames on itself, see liveness
    suspicion_s: float = 1.8  # times log10(members) above ten: time for the suspect to object
    forget_dead_s: float = 24 * 3600.0
    news_s: float = 120.0  # who died longer ago is not told about, unless it is believed alive
    gossip_s: float = 0.5  # while there is news, between two messages that carry nothing else
    gossip_per_message: int = 5
    gossip_per_ping: int = 5  # they travel along with pings and their answers, too
    gossip_repeat: int = 3  # times log2(members): every peer hears of a change with near certainty
    wave_min: int = 128  # from so many members on, news go to one of them, who has all told at once
    wave_width: int = 8  # each passes it on to so many
    wave_news_max: int = 100
    # Between two full exchanges caused by differing digests; beyond a hundred members so many
    # times longer as they are hundreds.
    sync_s_min: float = 0.5
    sync_s_max: float = 8.0

    # --- admission
    lease_ttl_s: float = 5.0
    leases_max: int = 4096
    # How much work may wait at a peer beyond what runs: enough to hide a round trip, little enough
    # that an idle peer elsewhere is not missed for long.
    queue_s_max: float = 0.5
    # Or for so much of its cores: of what runs, as much ends in a fifth of its time.
    queue_share: float = 0.2
    queue_units_max: int = 1000
    holds_max: int = 2  # units that may wait for a peer to drain for them, see admission
    backfill_s_max: float = 2.0  # how long a unit at the queue's head may be overtaken
    patience_s: float = 3.0  # a queued unit that has not begun by then is handed back
    vacancy_wishes_max: int = 256
    vacancy_ttl_s: float = 10.0
    turn_s: float = 2.5  # for so long an owner that was refused is expected to ask again
    turn_answer_s: float = 0.15  # and once its home was told that there is room

    # --- keepers of journals
    keepers: int = 3  # odd: an even one more outlives no more deaths
    keep_timeout_s: float = 2.0
    keep_doubt_s: float = 0.5  # a keeper silent for so long is looked at by the failure detector
    keep_bytes_max: int = 512 * 1024  # of entries in one message
    document_part_bytes: int = 256 * 1024  # a document is kept in pieces, each an entry
    # A keeper syncs once for each message: under load they are this far apart, after a few that
    # are not, so that who writes little waits for nothing.
    keep_gap_s: float = 0.005
    keep_burst: int = 3
    keep_slices_max: int = 1000
    stand_step_s: float = 0.3  # between the keepers, in their order, who want to be home
    stand_answer_s: float = 0.6
    stand_again_s_max: float = 5.0
    stand_batch_max: int = 500
    # A copy that heard nothing for so long asks the peer it follows whether that is still home: if
    # it could not be reached while its workflow ended, and did not notice, it would wait for ever.
    follow_s: float = 60.0
    follow_batch_max: int = 1000
    tail_entries_max: int = 256  # of a journal, in memory, for keepers that are a little behind
    # A majority of keepers lost for longer than this is not waited for any more: a survivor goes on
    # from its own copy. Infinite: never, as the lost may be only cut off, and go on as well.
    majority_lost_s: float = math.inf
    # Ended journals: looked over so long after a peer was lost, and so often anyway
    archive_after_s: float = 10.0
    archive_s: float = 900.0
    archive_at_once: int = 50
    tombstone_s: float = 7 * 86400.0  # a copy that was given up is remembered: see keeping

    # --- homes
    tasks_max: int = 2_000_000  # of all workflows that run from one peer

    # --- asking for room
    offer_s: float = 0.4  # soft: offers that come later are given back
    ask_backoff_s_min: float = 0.05
    ask_backoff_s_max: float = 2.0
    ask_batch_max: int = 2000

    # --- gangs: see strategies/gangs
    gang_hold_after_s: float = 3.0  # one that waited so long has peers keep room for it
    gang_renew_s: float = 1.0  # of a lease's time: a few chances before it expires
    gang_misses_max: int = 3  # renewals without an answer before another peer is taken
    gang_check_s: float = 15.0  # between two questions of an executing peer: is it still wanted?
    gangs_max: int = 64  # at one peer
    gangs_at_once: int = 16  # that one home gathers peers for
    gang_asked_max: int = 200  # peers, in one try

    # --- strategies: each has a section of its own, in its folder
    sections: tuple[Any, ...] = ()

    def of(self, kind: type[S]) -> S:
        """A strategy's section: as it was set, or its defaults."""
        return next((one for one in self.sections if isinstance(one, kind)), None) or kind()

    def having(self, *sections: Any) -> Config:
        """With these in place of what was set of their kinds."""
        kinds = tuple(map(type, sections))
        others = tuple(one for one in self.sections if not isinstance(one, kinds))
        return replace(self, sections=(*others, *sections))


LAN = Config()
#: peers across continents: slower to despair
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
