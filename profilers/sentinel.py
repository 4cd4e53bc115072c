"""A piece of work that never changes, to tell how fast the machine is just now.

Neighbours on the other hyperthread and in the caches of a shared host slow a processor down for
milliseconds to minutes. A few small matrix products between repeats see it, and what they see is
taken out of the repeats:

    repeat undisturbed = repeat / exp(p (c x + (1 - c) u))
    c                  = s + (1 - s) (2 d / T) tanh(T / 2 d)

    p    by which power of what the products suffer an operation suffers
    x    ln of what the products took over their quickest, mean of right before and right after
    u    the same in general, over the last second or more
    T    how long the repeat lasted
    s, d share of what disturbs that outlasts any repeat; correlation time of the rest

What lies between two readings is known from them as far as it is short: for a disturbance that
forgets itself exponentially, c is how the mean over T follows from that of both ends (regression of
an Ornstein-Uhlenbeck process). On the machine where s and d were found, cores took 1.4 times as
long for a fifth to four fifths of the time, in spells of 6 to 8 ms and longer waves; repeats of 1
to 4, 4 to 16 and 16 to 64 ms were longer by the power 0.9, 0.7 and 0.6 of what the products were.
Beside slow neighbours products and attention took 21 to 28 % longer, memory-bound kernels 53 %, of
which -9 to -3 and -2 % stayed, so too much was taken out; of 19 % on copies -16 % did
(`python tests/benchmarks/disturbed_kernels.py --seed 3`).

The quickest is a low quantile of the readings. As they come, old ones are thinned out, so that a
boost which is over for minutes is forgotten; one of a quarter of a minute is not, and what follows
counts as disturbed.

Where a rank is alone and its core is slow, all cores that it may use are looked at now and then,
and it goes to the quickest (profilers/cores.py): nothing else would tell on one that stays slow.

Not seen: neighbours that only take memory bandwidth, and what accelerators do.
"""

import math
import statistics
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from profilers.cores import Cores
from profilers.timing import Clock

LOOK_EVERY_S = 1.0
"""Between looks at whether the core is slow."""
TIMES = 3
"""That a reading is taken of, their median: a single interrupt is no state of the machine."""
QUICK_QUANTILE = 0.05
"""Of the readings: undisturbed, though not the boost of a processor that was idle before."""
MOST_READINGS = 2**16
"""That are kept, a minute's or so; then every second one goes."""
SAME_RATIO = 1.03
"""Undisturbed readings differ by 1 or 2 %."""
LASTING_RATIO = 0.5
FORGETS_S = 1.2e-3
"""s and d."""
POWERS: Final[Mapping[str, float]] = {"memory_bound": 1.4, "kv_conversion": 1.4}
"""p where it is not 1. In samples of one morning these lay between 1.2 and 1.6 (six) and between
1.0 and 1.75 (five), those of all other operations between 0.6 and 1.4 (`disturbed_kernels.py`)."""
USUAL_S = 1.0
"""How far back u looks..."""
LONGEST_S = 0.02
"""...and for how long a reading stands at most, as hundreds make a mean."""


def power_of(operation: str) -> float:
    """By which power of what the products suffer an operation suffers."""
    return POWERS.get(operation, 1.0)


@dataclass(slots=True, kw_only=True)
class Sentinel:
    """Read between repeats, on the core that measures: neighbours differ from core to core."""

    work: Callable[[], object]
    """Some tens of microseconds of it."""
    clock: Clock
    cores: Cores = field(default_factory=Cores)
    """To choose from."""
    _looked_s: float = field(init=False)
    _read_s: float = field(init=False)
    """When it last looked whether the core is slow, and when it was last read."""
    _readings_s: list[float] = field(init=False, default_factory=list)
    """The quickest first."""
    _usual: float = field(init=False, default=0.0)
    _power: float = field(init=False, default=1.0)
    """p of this visit."""
    _taken_out: list[float] = field(init=False, default_factory=list)
    """Of the repeats of this visit."""

    def __post_init__(self) -> None:
        self._looked_s = self._read_s = self.clock.now_s()

    def look_around(self, *, seconds: float) -> None:
        """Learn what is quick, before the first visit, and begin on a core that is."""
        start_s = self.clock.now_s()
        self._choose()
        while self.clock.now_s() - start_s < seconds:
            self._choose()

    def begin(self, operation: str) -> None:
        """Begin a visit; now and then a slow core is left before."""
        self._power = power_of(operation)
        self._taken_out.clear()
        if self.cores.count > 1 and self.clock.now_s() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = self.clock.now_s()
            if self._slow(self.read()) > 0.0:
                self._choose()

    @property
    def visit_quickest_s(self) -> float:
        """Seconds of the work undisturbed, as far as is known; 0 if nobody asked in this visit."""
        return self._quickest_s if self._taken_out else 0.0

    @property
    def visit_slowness(self) -> float:
        """How many times longer than undisturbed this visit took."""
        return statistics.fmean(self._taken_out) if self._taken_out else 1.0

    def read(self) -> float:
        """Seconds that the work takes just now."""
        # What was measured in between took the caches.
        self.work()
        pairs = []
        for _ in range(TIMES):
            first = self.clock.mark()
            self.work()
            pairs.append((first, self.clock.mark()))
        work_s = statistics.median(self.clock.between_s(pairs))
        if len(self._readings_s) >= MOST_READINGS:
            del self._readings_s[::2]
        insort(self._readings_s, work_s)
        now_s = self.clock.now_s()
        stands_s = min(now_s - self._read_s, LONGEST_S)
        self._usual -= math.expm1(-stands_s / USUAL_S) * (self._slow(work_s) - self._usual)
        self._read_s = now_s
        return work_s

    def slowness(self, before_s: float, after_s: float, *, lasted_s: float) -> float:
        """How many times longer than undisturbed something took between two readings."""
        times = max(lasted_s / FORGETS_S, 1e-9)
        known = LASTING_RATIO + (1.0 - LASTING_RATIO) * 2.0 / times * math.tanh(times / 2.0)
        beside = (self._slow(before_s) + self._slow(after_s)) / 2.0
        ratio = math.exp(self._power * (known * beside + (1.0 - known) * self._usual))
        self._taken_out.append(ratio)
        return ratio

    @property
    def _quickest_s(self) -> float:
        return self._readings_s[int(QUICK_QUANTILE * len(self._readings_s))]

    def _slow(self, work_s: float) -> float:
        """Take ln of what the work took over its quickest; 0 undisturbed."""
        ratio = work_s / self._quickest_s
        return math.log(ratio) if ratio > SAME_RATIO else 0.0

    def _choose(self) -> None:
        """Read on every core and go to the quickest."""
        latest_s = {}
        for number in range(self.cores.count):
            self.cores.enter(number)
            latest_s[number] = self.read()
        self.cores.enter(min(latest_s, key=lambda core: latest_s[core]))
