"""A sentinel: a fixed piece of work, run between repeats, that shows how fast the core is just now.

Other guests on the second hyperthread and in the caches of a shared host slow a core down for
milliseconds to minutes. A few small GEMMs between repeats see it, and what they see is taken out of
the repeats:

    undisturbed repeat = repeat / exp(p (c x + (1 - c) u))
    c                  = s + (1 - s) (2 d / T) tanh(T / 2 d)

    p    exponent of the operation: how much it slows down for a given slowdown of the GEMMs
    x    ln of the GEMMs' time over their undisturbed one, mean of right before and right after
    u    the same, averaged over the last second or more
    T    how long the repeat lasted
    s, d share of the disturbance that outlasts any repeat; correlation time of the rest

The state between two readings follows from them as long as the repeat is short: for a disturbance
with exponentially decaying correlation, c is the regression of its mean over T on both ends (an
Ornstein-Uhlenbeck process). On the machine where s and d were fitted, cores took 1.4 times as long
for a fifth to four fifths of the time, in spells of 6 to 8 ms and longer waves; repeats of 1 to 4,
4 to 16 and 16 to 64 ms were longer by the power 0.9, 0.7 and 0.6 of the GEMMs' slowdown. Beside
slow neighbours GEMMs and attention took 21 to 28 % longer and memory-bound kernels 53 %; -9 to -3 %
and -2 % were left, so too much is taken out. Of 19 % on copies -16 % were left
(`python tests/benchmarks/disturbed_kernels.py --seed 3`).

The undisturbed time is a low quantile of the readings. Old readings are thinned out as new ones
come, so a processor boost that ended minutes ago is forgotten; one of a quarter of a minute is not,
and what follows it counts as disturbed.

When the core of a single rank is slow, the sentinel reads every core that the rank may use and
moves to the fastest (profilers/noise/cores.py). It cannot otherwise notice a core that stays slow.

Not seen: neighbours that only take memory bandwidth.
"""

import math
import statistics
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from profilers.clock import Clock
from profilers.noise.cores import Cores

CHECK_CORE_EVERY_S = 1.0
"""Between checks whether the core is slow."""
SAMPLES = 3
"""Of a reading, which is their median: a single interrupt is no state of the machine."""
UNDISTURBED_QUANTILE = 0.05
"""Of the readings: undisturbed, but not the boost of a processor that was idle before."""
MAX_READINGS = 2**16
"""That are kept, those of about a minute; then every second one is dropped."""
SAME_RATIO = 1.03
"""Undisturbed readings differ by 1 or 2 %."""
LASTING_SHARE = 0.5
CORRELATION_S = 1.2e-3
"""s and d."""
EXPONENTS: Final[Mapping[str, float]] = {"memory_bound": 1.4, "kv_conversion": 1.4}
"""p where it is not 1. In samples of one morning these lay between 1.2 and 1.6 (six) and between
1.0 and 1.75 (five), those of all other operations between 0.6 and 1.4 (`disturbed_kernels.py`)."""
AVERAGED_S = 1.0
"""Time constant of the average u..."""
LONGEST_WEIGHT_S = 0.02
"""...and the most time that one reading stands for in it, so that hundreds make an average."""


def slowdown_exponent(operation: str) -> float:
    """How much an operation slows down: p, the exponent of the GEMMs' slowdown."""
    return EXPONENTS.get(operation, 1.0)


@dataclass(slots=True, kw_only=True)
class Sentinel:
    """Readings between repeats, on the core that measures: neighbours differ from core to core."""

    work: Callable[[], object]
    """Takes some tens of microseconds."""
    clock: Clock
    cores: Cores = field(default_factory=Cores)
    """The cores to choose from."""
    _checked_core_s: float = field(init=False)
    """When it last checked whether the core is slow."""
    _last_read_s: float = field(init=False)
    _readings_s: list[float] = field(init=False, default_factory=list)
    """Sorted, the fastest first."""
    _average: float = field(init=False, default=0.0)
    """u."""
    _exponent: float = field(init=False, default=1.0)
    """p of this case."""
    _slowdowns: list[float] = field(init=False, default_factory=list)
    """Of the repeats of this session."""

    def __post_init__(self) -> None:
        self._checked_core_s = self._last_read_s = self.clock.now_s()

    def calibrate(self, *, seconds: float) -> None:
        """Learn the undisturbed time, before the first case, and start on a fast core."""
        start_s = self.clock.now_s()
        self._move_to_fastest_core()
        while self.clock.now_s() - start_s < seconds:
            self._move_to_fastest_core()

    def begin_case(self, operation: str) -> None:
        """Begin a session of a case; about once a second, leave a slow core first."""
        self._exponent = slowdown_exponent(operation)
        self._slowdowns.clear()
        if self.cores.count > 1 and self.clock.now_s() - self._checked_core_s >= CHECK_CORE_EVERY_S:
            self._checked_core_s = self.clock.now_s()
            if self._log_slowdown(self.read_s()) > 0.0:
                self._move_to_fastest_core()

    @property
    def session_undisturbed_s(self) -> float:
        """Seconds of the work undisturbed, as known so far; 0 if it was not read this session."""
        return self._undisturbed_s if self._slowdowns else 0.0

    @property
    def session_slowdown(self) -> float:
        """How many times longer than undisturbed this session took."""
        return statistics.fmean(self._slowdowns) if self._slowdowns else 1.0

    def read_s(self) -> float:
        """Seconds that the work takes just now."""
        # What was measured in between displaced its code and operands from the caches.
        self.work()
        pairs = []
        for _ in range(SAMPLES):
            first = self.clock.mark()
            self.work()
            pairs.append((first, self.clock.mark()))
        work_s = statistics.median(self.clock.between_s(pairs))
        if len(self._readings_s) >= MAX_READINGS:
            del self._readings_s[::2]
        insort(self._readings_s, work_s)
        now_s = self.clock.now_s()
        weight_s = min(now_s - self._last_read_s, LONGEST_WEIGHT_S)
        self._average -= math.expm1(-weight_s / AVERAGED_S) * (
            self._log_slowdown(work_s) - self._average
        )
        self._last_read_s = now_s
        return work_s

    def slowdown(self, before_s: float, after_s: float, *, lasted_s: float) -> float:
        """How many times longer than undisturbed something took between two readings."""
        lengths = max(lasted_s / CORRELATION_S, 1e-9)
        known = LASTING_SHARE + (1.0 - LASTING_SHARE) * 2.0 / lengths * math.tanh(lengths / 2.0)
        adjacent = (self._log_slowdown(before_s) + self._log_slowdown(after_s)) / 2.0
        ratio = math.exp(self._exponent * (known * adjacent + (1.0 - known) * self._average))
        self._slowdowns.append(ratio)
        return ratio

    @property
    def _undisturbed_s(self) -> float:
        return self._readings_s[int(UNDISTURBED_QUANTILE * len(self._readings_s))]

    def _log_slowdown(self, work_s: float) -> float:
        """Natural logarithm of the work's time over its undisturbed one; 0 if undisturbed."""
        ratio = work_s / self._undisturbed_s
        return math.log(ratio) if ratio > SAME_RATIO else 0.0

    def _move_to_fastest_core(self) -> None:
        """Read on every core and go to the fastest."""
        latest_s = {}
        for number in range(self.cores.count):
            self.cores.enter(number)
            latest_s[number] = self.read_s()
        self.cores.enter(min(latest_s, key=lambda core: latest_s[core]))
