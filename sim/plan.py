"""The plan of one simulated run: its size, its faults and its settings.

A plan is its seed and a few numbers; `Plan.command` is the command that replays it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from valence.protocols.config import LAN, Config

#: the faults that a world draws its own from; `perish` and `halve` only where a plan names them
FAULTS = (
    "crash", "power", "leave", "ambush", "turncoat", "die", "stop", "island", "cut", "one-way",
    "clog", "lossy", "slow-disk", "full-disk",
)  # fmt: skip

#: settings for thousands of peers in one process: each pings less often, and says more at a time
CROWD = replace(
    LAN,
    probe_s=10.0,
    probe_quiet_s=10.0,
    probe_timeout_s=1.0,
    gossip_s=8.0,
    gossip_per_message=80,
    self_doubt_max=0,
    indirect_probes=1,
    retry_first_s=0.7,
    retry_min_s=0.7,
    sync_s_min=3.0,
    sync_s_max=16.0,
    refresh_s=900.0,
    forget_dead_s=240.0,  # no rumour is that old
)
CROWD_PEERS = 200


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    peers: int = 7
    workflows: int = 4
    seconds: float = 50.0  # during which faults occur
    faults: tuple[str, ...] = FAULTS
    every_s: float = 3.0  # between two faults, on average
    majority_lost_s: float = float("inf")
    keepers: int = 3
    replaced: float = 0.0  # share of the peers that die for good and are replaced, per minute
    width: int = 6  # tasks in one layer of a workflow, at most
    gangs: float = 0.1  # share of the tasks that need two or three peers at once
    strategy: str = "probe"
    queue: bool = False  # there is a task queue, and most workflows are submitted to it
    overlay: str = "kademlia"
    # bytes of a journal in one message: 1 sends one entry at a time; 0 lets the seed decide
    slice_bytes: int = 0
    config: Config = LAN
    mutant: str = ""  # a rule that is broken on purpose

    @property
    def crowded(self) -> bool:
        """So many peers that they run with other settings and are checked less often."""
        return self.peers >= CROWD_PEERS

    def command(self) -> str:
        """The command line that replays this run."""
        default = Plan(self.seed)
        words = [f"python -m sim --seed {self.seed}"]
        numbers = ("peers", "workflows", "seconds", "every_s", "keepers", "replaced", "gangs")
        for name in (*numbers, "slice_bytes"):
            value = getattr(self, name)
            if value != getattr(default, name):
                words.append(f"--{name.replace('_', '-')} {value:g}")
        options = {
            f"--strategy {self.strategy}": self.strategy != default.strategy,
            "--queue": self.queue,
            f"--overlay {self.overlay}": self.overlay != default.overlay,
            "--faults " + (",".join(self.faults) or "none"): self.faults != FAULTS,
            f"--majority-lost {self.majority_lost_s:g}": (
                self.majority_lost_s != default.majority_lost_s
            ),
            f"--mutant {self.mutant}": bool(self.mutant),
        }
        return " ".join([*words, *(option for option, differs in options.items() if differs)])


@dataclass(slots=True)
class WorldReport:
    seed: int
    violation: str = ""
    virtual_s: float = 0.0
    messages: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)
