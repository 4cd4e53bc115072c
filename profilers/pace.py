"""Pace at which ranks on one host repeat their runs: one value, held by the `Setting`.

    an accelerator, one rank    each decides by itself how often it repeats
    a core per rank             ranks time a kernel in lockstep (`all_reduce_max`): a repeat beside
                                an idle neighbour differs from one beside a busy one
    fewer cores than ranks      a repeat lasts many turns of the scheduler (`repeat_s`)

Not covered: other load on the host. Warm-up, repeats and their median take care of short
disturbances; the error at hold-out sizes (profilers/held_out.py) says what is left.
"""

from dataclasses import dataclass
from typing import Final

from profilers.team import AllReduceMax, Team

TURNS_S: Final = 0.05
"""Seconds of a repeat where ranks take turns: a dozen of Linux's turns, which end at a tick of
4 ms or less (CONFIG_HZ of 250 and above)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Pace of a rank's repeats; the defaults are those of a rank that decides by itself."""

    all_reduce_max: AllReduceMax = tuple
    """Synchronises ranks that repeat in lockstep; `tuple` for a rank that decides by itself."""
    repeat_s: float = 0.0
    """Least seconds of a repeat."""

    @property
    def shares_cores(self) -> bool:
        """Return whether ranks run in turns on fewer cores."""
        return self.repeat_s > 0.0

    @property
    def cools_caches(self) -> bool:
        """Return whether a message between repeats displaces their code and operands."""
        return self.all_reduce_max is not tuple


BY_ITSELF: Final = Pace()
"""Pace of a rank that waits for no other."""


def choose_pace(device_kind: str, *, team: Team, takes_turns: bool) -> Pace:
    """Choose the pace of this rank.

    Ranks that share cores are not in lockstep: they would find all cores taken all the time, while
    in a step some wait for messages and others compute.

    Args:
        device_kind: as torch names it: `cpu`, `cuda`.
        team: the ranks that measure.
        takes_turns: a host has more ranks than cores.
    """
    if device_kind != "cpu":
        return BY_ITSELF
    if takes_turns:
        return Pace(repeat_s=TURNS_S)
    return BY_ITSELF if team.world == 1 else Pace(all_reduce_max=team.slowest_s)
