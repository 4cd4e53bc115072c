"""Time one callable: warm-up, repeats until the median is settled or the budget is spent.

A repeat is the stretch between two marks of a `Clock`. The clock is passed in: a processor's marks
are readings of a monotonic counter, an accelerator's are events in its stream, read only once the
whole batch of repeats is queued, so that waiting for the device never enters a repeat.

Where ranks take turns on too few cores, a repeat has to last many turns (`repeat_s`): a short run
is either not interrupted at all or waits for a whole turn of somebody else, and a median would see
the former alone.

Ranks that share a node's memory, with a core for each, go in step: a repeat beside an idle
neighbour is another one than beside a busy one. They begin every batch of repeats together, run as
often and end together; all decisions are taken by the slowest of them (`Agreed`). Each keeps its
own times.

A machine that others disturb is watched: a sentinel is read between repeats, and what it says the
machine was slower is taken out of them (profilers/sentinel.py).

Neither a reading nor a word from the others leaves much of a run's code and operands in the caches,
where the runs of a step find theirs. So those that are watched or in step are looped up to
`LOOPED_S`; the many forwards that a looped backward needs push each other's results out instead.

Repeats that waited for the kernel to map pages are left out as long as others are there. The heap
of a step has stopped growing (profilers/heap.py); that of a process that measures one size after
the other grows now and then. A gradient of 16 MB, 4096 pages, made 85 ms out of 3.

The median's relative standard error is judged from the interquartile range: for normal noise the
standard deviation is IQR / 1.349 and the median's standard error 1.2533 standard deviations over
the root of the number of repeats.
"""

import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

SHORT_S = 50e-6
"""Below this a run is looped inside one repeat: the marks themselves would be seen. With a watch or
in step all below `LOOPED_S` are: on an AMD EPYC kernels of 20 us took 50 to 60 right after a
reading, and 40 to 50 right after ranks agreed on something."""
LOOPED_S = 1e-3
"""How long a looped repeat lasts at least, as far as so many runs may be alive at once: long beside
what an interrupt costs."""
PAGE_S = 1e-5
"""What mapping a page costs in a virtual machine (5 to 20 us on an AMD EPYC)..."""
PAGES_RATIO = 0.02
"""...and how much of a repeat that may make up. Neither pages that come back from a disk are seen
nor that 512 of them may be mapped at once, as huge ones."""
LEAST_USUAL = 2
"""Repeats that did not wait for pages; below it all count, as one says nothing of their spread."""
UNSETTLED = 1.0
"""A spread that no target allows."""
TURNS_S = 0.05
"""How long a repeat lasts where ranks take turns: a dozen of Linux's turns, which end at a tick of
4 ms or less (CONFIG_HZ of 250 and above)."""
LONG_S = 5e-3
"""A run that lasts longer averages over short disturbances by itself, and a few repeats do."""
MAX_WARMUPS = 3
MAX_LOOPS = 1000

Agreed = Callable[[Sequence[float]], Sequence[float]]
"""Element by element the largest over the ranks that measure in step; all of them call it, and no
rank goes on before the last one has. `tuple` is that of a rank by itself."""


class PeerFailedError(Exception):
    """Another rank cannot go on with what is measured in step."""


def in_step(agreed: Agreed, told: tuple[float, float]) -> tuple[float, float]:
    """Agree on two numbers; one that fails tells the others by a second one that is endless.

    All that ranks tell each other while they measure has this form, so that a rank that fails need
    not know what its peers ask next.
    """
    one, other = agreed(told)
    if other == math.inf:
        raise PeerFailedError
    return one, other


class Clock(Protocol):
    """Where time comes from."""

    def now_s(self) -> float:
        """Read the host's clock, to keep to a budget."""

    def mark(self) -> object:
        """Mark the present point on the device."""

    def between_s(self, pairs: Sequence[tuple[object, object]]) -> tuple[float, ...]:
        """Wait until all marks are passed; seconds between each pair."""

    def page_faults(self) -> int:
        """Pages that were mapped for this process by now; 0 where that is not what takes time."""


class HostClock:
    """The processor's monotonic counter."""

    def now_s(self) -> float:
        return time.perf_counter()

    def mark(self) -> object:
        return time.perf_counter()

    def between_s(self, pairs: Sequence[tuple[object, object]]) -> tuple[float, ...]:
        return tuple(float(last) - float(first) for first, last in pairs)  # type: ignore[arg-type]  # marks are our own floats

    def page_faults(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Watch(Protocol):
    """Who tells how fast the machine is just now (profilers/sentinel.py)."""

    def read(self) -> float:
        """Seconds that the sentinel takes."""

    def slowness(self, before_s: float, after_s: float, *, lasted_s: float) -> float:
        """How many times longer than undisturbed something took between two readings."""


def measure(
    run: Callable[[], object],
    *,
    clock: Clock,
    budget_s: float,
    repeat_s: float = 0.0,
    min_repeats: int = 5,
    settled_repeats: int = 0,
    long_repeats: int = 0,
    max_repeats: int = 50,
    target_spread: float = 0.02,
    agreed: Agreed = tuple,
    watch: Watch | None = None,
) -> tuple[float, ...]:
    """Time `run`; one entry per repeat, in seconds of one run.

    At least `min_repeats` are taken whatever the budget; warm-ups come on top. Those that waited
    for pages are left out, so that fewer may come back, though two at least. Repeats last
    `repeat_s` as far as the budget allows. Fewer than `settled_repeats` do not count as settled. Of
    runs beyond `LONG_S`, whose repeats need not last any time, `long_repeats` do, after one
    warm-up. Where mapping pages leaves fewer than two, twice as many are taken, and all count if
    that does not help.

    With a `watch`, repeats are what they would take undisturbed.
    """
    return measure_fresh(
        lambda: run,
        clock=clock,
        budget_s=budget_s,
        repeat_s=repeat_s,
        min_repeats=min_repeats,
        settled_repeats=settled_repeats,
        long_repeats=long_repeats,
        max_repeats=max_repeats,
        target_spread=target_spread,
        agreed=agreed,
        watch=watch,
    )


def measure_fresh(
    fresh: Callable[[], Callable[[], object]],
    *,
    clock: Clock,
    budget_s: float,
    repeat_s: float = 0.0,
    max_loops: int = MAX_LOOPS,
    min_repeats: int = 5,
    settled_repeats: int = 0,
    long_repeats: int = 0,
    max_repeats: int = 50,
    target_spread: float = 0.02,
    agreed: Agreed = tuple,
    watch: Watch | None = None,
) -> tuple[float, ...]:
    """Time what `fresh` returns; `fresh` itself, called before every run, is not timed.

    What `fresh` returns for all runs of a repeat, at most `max_loops`, is alive at once.

    A backward pass is such a thing: each one consumes the graph of a forward of its own.
    """
    start_s = clock.now_s()
    most_warm_s = LONG_S if long_repeats and repeat_s == 0.0 else math.inf
    warm_s, whole_s = _warm_up(fresh, clock=clock, agreed=agreed, most_s=most_warm_s)
    if warm_s >= most_warm_s:
        min_repeats = long_repeats
    begins_cold = watch is not None or agreed is not tuple
    short_s = LOOPED_S if begins_cold else SHORT_S
    loops = min(max_loops, loops_per_repeat(warm_s, short_s=short_s, repeat_s=repeat_s))
    if repeat_s > 0.0:
        # Preparing a run can take far longer than the run.
        loops = max(1, min(loops, int(budget_s / min_repeats / max(whole_s, warm_s, 1e-9))))
    elif begins_cold and loops > 1:
        # The first runs found neither their code nor all operands in the caches.
        (looped,) = _repeats(fresh, clock=clock, count=1, loops=loops)
        looped_s, _ = in_step(agreed, (looped.seconds, 0.0))
        loops = min(max_loops, loops_per_repeat(min(warm_s, looped_s), short_s=short_s))
    repeats: list[_Repeat] = []
    while len(repeats) < max_repeats:
        count = 1 if watch else min(min_repeats, max_repeats - len(repeats))
        repeats += _repeats(fresh, clock=clock, count=count, loops=loops, watch=watch)
        counting_s = _counting_s(repeats)
        spread = min(spread_of_median(counting_s), UNSETTLED)
        if len(counting_s) < settled_repeats:
            spread = UNSETTLED
        if len(repeats) < 2 * min_repeats and _usual(repeats) < LEAST_USUAL:
            # No rank stops before this one has more.
            spread = math.inf
        spread, spent_s = in_step(agreed, (spread, clock.now_s() - start_s))
        is_over = spread <= target_spread or spent_s >= budget_s
        if len(repeats) >= min_repeats and spread < math.inf and is_over:
            break
    return _counting_s(repeats)


def loops_per_repeat(run_s: float, *, short_s: float = SHORT_S, repeat_s: float = 0.0) -> int:
    """How many runs one repeat holds.

    One that lasts `short_s` and `repeat_s`; of shorter ones as many as last `LOOPED_S` and
    `repeat_s`.
    """
    if run_s >= max(short_s, repeat_s):
        return 1
    wanted_s = max(LOOPED_S, repeat_s)
    return min(MAX_LOOPS, math.ceil(wanted_s / max(run_s, wanted_s / MAX_LOOPS)))


def spread_of_median(times_s: Sequence[float]) -> float:
    """Relative standard error of the median; infinite when it cannot be judged."""
    if len(times_s) < 2:
        return math.inf
    median_s = statistics.median(times_s)
    if median_s <= 0.0:
        return math.inf
    lower_s, _, upper_s = statistics.quantiles(times_s, n=4, method="inclusive")
    deviation_s = (upper_s - lower_s) / 1.349
    return 1.2533 * deviation_s / math.sqrt(len(times_s)) / median_s


def _warm_up(
    fresh: Callable[[], Callable[[], object]], *, clock: Clock, agreed: Agreed, most_s: float
) -> tuple[float, float]:
    """Run until two runs in a row are within a factor 2; the last one's seconds.

    Then also what it lasted with what prepared it. One run of at least `most_s` is enough.
    """

    def once() -> tuple[float, float]:
        start_s = clock.now_s()
        (run,) = _repeats(fresh, clock=clock, count=1, loops=1)
        if run.waited_for_pages:
            (run,) = _repeats(fresh, clock=clock, count=1, loops=1)
        return in_step(agreed, (run.seconds, clock.now_s() - start_s))

    last_s, whole_s = once()
    for _ in range(MAX_WARMUPS - 1):
        if last_s >= most_s:
            break
        now_s, whole_s = once()
        alike = last_s <= 2.0 * now_s and now_s <= 2.0 * last_s
        last_s = now_s
        if alike:
            break
    return last_s, whole_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repeat:
    seconds: float
    """Of one run."""
    waited_for_pages: bool


def _usual(repeats: Sequence[_Repeat]) -> int:
    """How many did not wait for pages."""
    return sum(not repeat.waited_for_pages for repeat in repeats)


def _counting_s(repeats: Sequence[_Repeat]) -> tuple[float, ...]:
    """Seconds of those that did not wait for pages; of all where these are too few."""
    all_count = _usual(repeats) < LEAST_USUAL
    return tuple(repeat.seconds for repeat in repeats if all_count or not repeat.waited_for_pages)


def _repeats(
    fresh: Callable[[], Callable[[], object]],
    *,
    clock: Clock,
    count: int,
    loops: int,
    watch: Watch | None = None,
) -> tuple[_Repeat, ...]:
    """Repeat, and take out what a `watch` says the machine was slower.

    Watched repeats come one by one, as the watch also judges by what it saw last.
    """
    pairs, mapped, beside_s = [], [], []
    for _ in range(count):
        runs = [fresh() for _ in range(loops)]
        before_s = watch.read() if watch else 0.0
        faults = clock.page_faults()
        first = clock.mark()
        for run in runs:
            run()
        pairs.append((first, clock.mark()))
        mapped.append(clock.page_faults() - faults)
        beside_s.append((before_s, watch.read() if watch else 0.0))
    return tuple(
        _Repeat(
            seconds=lasted_s
            / (watch.slowness(*beside, lasted_s=lasted_s) if watch else 1.0)
            / loops,
            waited_for_pages=pages * PAGE_S > PAGES_RATIO * lasted_s,
        )
        for lasted_s, pages, beside in zip(clock.between_s(pairs), mapped, beside_s, strict=True)
    )
