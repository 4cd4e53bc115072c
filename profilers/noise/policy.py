"""How timing on this rank reacts to other load on its host: one value, held by the `Setting`.

    QUIET                 an accelerator, which runs nothing else: times count as measured
    a shared CPU host     a virtual machine whose host runs other guests
      one rank            a sentinel reads the core's speed between repeats (sentinel.py) and
                          moves to the fastest core (cores.py)
      a core per rank     ranks time a kernel in lockstep (`all_reduce_max`)
      fewer cores         a repeat lasts many turns of the scheduler (`repeat_s`), and no size is
                          measured in a second session

Whatever the policy, sizes that look too slow are measured again where `revisits` allows it
(revisits.py), and the rows that count are chosen among all sessions (selection.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from profilers.clock import Clock
from profilers.noise.cores import Cores
from profilers.noise.sentinel import Sentinel
from profilers.team import AllReduceMax, Team

TURNS_S: Final = 0.05
"""How long a repeat lasts where ranks take turns: a dozen of Linux's turns, which end at a tick of
4 ms or less (CONFIG_HZ of 250 and above)."""
CALIBRATION_S: Final = 2.0
"""For learning how fast the machine is undisturbed..."""
CALIBRATION_RATIO: Final = 0.03
"""...but no more of the budget than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisePolicy:
    """What is done about noise; the defaults do nothing but measure slow sizes again."""

    sentinel: Sentinel | None = None
    """Reads the speed of the core between repeats; what it sees is taken out of them."""
    all_reduce_max: AllReduceMax = tuple
    """Synchronises ranks that repeat in lockstep; `tuple` for a rank that decides by itself."""
    repeat_s: float = 0.0
    """The least seconds of a repeat."""
    revisits: bool = True
    """Whether sizes that look too slow, and hold-out sizes, are measured in further sessions. Not
    where ranks share cores: there a session is slow by what its peers did, which belongs to it."""

    @property
    def shares_cores(self) -> bool:
        """Whether ranks run in turns on fewer cores."""
        return self.repeat_s > 0.0

    @property
    def cools_caches(self) -> bool:
        """Whether a reading or a message between repeats displaces their code and operands."""
        return self.sentinel is not None or self.all_reduce_max is not tuple

    def batch(self, repeats: int) -> int:
        """How many repeats are queued before their times are read: one with a sentinel."""
        return 1 if self.sentinel else repeats

    def begin_run(self, *, budget_s: float) -> None:
        """Learn how fast the machine is undisturbed, before the first case."""
        if self.sentinel:
            self.sentinel.calibrate(seconds=min(CALIBRATION_S, CALIBRATION_RATIO * budget_s))

    def end_run(self) -> None:
        """Give back what was taken for the run: the thread may use all its cores again."""
        if self.sentinel:
            self.sentinel.cores.leave()

    def begin_case(self, operation: str) -> None:
        """Begin a session of a case."""
        if self.sentinel:
            self.sentinel.begin_case(operation)

    def read_s(self) -> float:
        """Read the speed of the core: seconds of the sentinel's work, 0 without one."""
        return self.sentinel.read_s() if self.sentinel else 0.0

    def slowdown(self, before_s: float, after_s: float, *, lasted_s: float) -> float:
        """How many times longer than undisturbed a repeat took between two readings."""
        return (
            self.sentinel.slowdown(before_s, after_s, lasted_s=lasted_s) if self.sentinel else 1.0
        )

    @property
    def session_undisturbed_s(self) -> float:
        """Seconds of the sentinel's work undisturbed; 0 if it was not read in this session."""
        return self.sentinel.session_undisturbed_s if self.sentinel else 0.0

    @property
    def session_slowdown(self) -> float:
        """How many times longer than undisturbed this session took; it is taken out of the rows."""
        return self.sentinel.session_slowdown if self.sentinel else 1.0


QUIET: Final = NoisePolicy()
"""Of accelerators."""


def choose_policy(
    device_kind: str,
    *,
    team: Team,
    clock: Clock,
    takes_turns: bool,
    make_work: Callable[[], Callable[[], object]],
) -> NoisePolicy:
    """Choose the policy of this rank.

    What disturbs several ranks disturbs them in a step as well and stays in their times, so only a
    single rank gets a sentinel. Ranks that share cores are not in lockstep: they would find all
    cores taken all the time, while in a step some wait for messages and others compute.

    Args:
        device_kind: as torch names it: `cpu`, `cuda`.
        team: the ranks that measure.
        clock: the one that times the kernels.
        takes_turns: a host has more ranks than cores.
        make_work: makes the sentinel's work.
    """
    if device_kind != "cpu":
        return QUIET
    is_single = team.world == 1
    return NoisePolicy(
        sentinel=Sentinel(work=make_work(), clock=clock, cores=Cores.of_this_thread())
        if is_single
        else None,
        all_reduce_max=tuple if is_single or takes_turns else team.slowest_s,
        repeat_s=TURNS_S if takes_turns else 0.0,
        revisits=not takes_turns,
    )
