"""A piece of work that never changes, to tell how fast the machine is just now.

Neighbours on the other hyperthread and in the caches of a shared host slow a processor down for
milliseconds to minutes, all kernels about alike; heat does so for longer. A few small matrix
products between repeats see it, and what they see is taken out of the repeats:

    repeat undisturbed = repeat / exp(c x + (1 - c) u)
    c                  = s + (1 - s) (2 d / T) tanh(T / 2 d)

    x    ln of what the products took over their quickest, mean of right before and right after
    u    the same in general, over the last second or so
    T    how long the repeat lasted
    s, d share of disturbances that outlast any repeat; how long the others last

What lies between two readings is known from them as far as it is short: for a disturbance that
forgets itself exponentially, c is how the mean over T follows from that of both ends (regression of
an Ornstein-Uhlenbeck process). On the machine where s and d were found, cores took 1.4 times as
long for a fifth to four fifths of the time, in spells of 6 to 8 ms and longer waves; repeats of
0.5, 2, 8 and 30 ms took exp(0.98 x), exp(0.85 x), exp(0.67 x) and exp(0.49 x) times as long there
(`python tests/benchmarks/disturbed_kernels.py`).

Where a rank is alone, all cores that it may use are looked at now and then, and it goes to the
quickest (profilers/cores.py): nothing else would tell on a core that stays slow.

Not seen: neighbours that only take memory bandwidth, and what accelerators do.
"""

import math
import statistics
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from profilers.cores import Cores
from profilers.timing import Clock

LOOK_EVERY_S = 1.0
"""Between looks at all cores."""
TIMES = 3
"""That a reading is taken of, their median: a single interrupt is no state of the machine."""
QUICK_QUANTILE = 0.05
"""Of all readings: undisturbed, though not the boost of a processor that was idle before."""
LASTING_SHARE = 0.5
SPELL_S = 3e-3
"""s and d."""
USUAL_S = 1.0
"""How far back u looks."""


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
    """When all cores were last looked at, and when it was last read."""
    _readings_s: list[float] = field(init=False, default_factory=list)
    """All of them, the quickest first."""
    _usual: float = field(init=False, default=0.0)
    _taken_out: list[float] = field(init=False, default_factory=list)
    """Of the repeats of this visit."""

    def __post_init__(self) -> None:
        self._looked_s = self._read_s = self.clock.now_s()

    def look_around(self, *, seconds: float) -> None:
        """Learn what is quick on every core, before the first visit, and begin on a quick one."""
        start_s = self.clock.now_s()
        self._look()
        while self.clock.now_s() - start_s < seconds:
            self._look()

    def begin(self) -> None:
        """Begin a visit; now and then all cores are looked at before."""
        self._taken_out.clear()
        if self.cores.count > 1 and self.clock.now_s() - self._looked_s >= LOOK_EVERY_S:
            self._look()

    @property
    def visit_quickest_s(self) -> float:
        """Seconds of the work undisturbed, as far as is known; 0 if nobody asked in this visit."""
        return self._quickest_s if self._taken_out else 0.0

    @property
    def visit_slowness(self) -> float:
        """How many times slower than undisturbed the machine was in this visit."""
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
        insort(self._readings_s, work_s)
        now_s = self.clock.now_s()
        share = -math.expm1((self._read_s - now_s) / USUAL_S)
        self._usual += share * (self._slow(work_s) - self._usual)
        self._read_s = now_s
        return work_s

    def slowness(self, before_s: float, after_s: float, *, lasted_s: float) -> float:
        """How many times longer than undisturbed something took between two readings."""
        spells = max(lasted_s / SPELL_S, 1e-9)
        known = LASTING_SHARE + (1.0 - LASTING_SHARE) * 2.0 / spells * math.tanh(spells / 2.0)
        beside = (self._slow(before_s) + self._slow(after_s)) / 2.0
        ratio = math.exp(known * beside + (1.0 - known) * self._usual)
        self._taken_out.append(ratio)
        return ratio

    @property
    def _quickest_s(self) -> float:
        return self._readings_s[int(QUICK_QUANTILE * len(self._readings_s))]

    def _slow(self, work_s: float) -> float:
        """Take ln of what the work took over its quickest."""
        return max(0.0, math.log(work_s / self._quickest_s))

    def _look(self) -> None:
        """Read on every core and go to the quickest."""
        latest_s = {}
        for number in range(self.cores.count):
            self.cores.enter(number)
            latest_s[number] = self.read()
        self.cores.enter(min(latest_s, key=lambda core: latest_s[core]))
        self._looked_s = self.clock.now_s()
