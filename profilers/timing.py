"""Time one callable: warm-up, repeats until the median is settled or the budget is spent.

A repeat is the time between two marks of a `Clock`. A processor's marks are readings of a monotonic
counter; an accelerator's are events in its stream, read only once the whole batch of repeats is
queued, so waiting for the device never enters a repeat. Short runs are looped inside one repeat.
The accelerator is held (`Clock.hold`) while the host queues a repeat: a backward takes the host 100
to 300 us, and kernels that are shorter would be timed as what the host needs to start them (an
H200: 31 us instead of 2 for a small GEMM). In a step the host runs ahead of the device.

On an accelerator, and of a single rank, that is all. Several ranks on one host keep a `Pace`:

    repeat_s           Where ranks take turns on too few cores, a repeat lasts many turns: a short
                       run is either not interrupted at all or waits for a whole turn of another
                       rank, and a median would see only the former.
    all_reduce_max     Ranks that share a node's memory, with a core for each, repeat in lockstep: a
                       repeat beside an idle neighbour differs from one beside a busy one. They
                       start every batch of repeats together, run equally often and stop together;
                       the slowest decides. Each keeps its own times.

Messages displace most of a run's code and operands from the caches, where the runs of a step find
theirs. With them, runs are looped up to `LOOPED_S`. (The many forwards that a looped backward needs
displace each other's results instead.)

Repeats that waited for the kernel to map pages are left out while others remain. The heap of a step
has stopped growing (profilers/heap.py); that of a process that measures one size after the other
grows now and then. A gradient of 16 MB, 4096 pages, turned 3 ms into 85.

The median's relative standard error is estimated from the interquartile range: for normal noise the
standard deviation is IQR / 1.349 and the median's standard error 1.2533 standard deviations over
the root of the number of repeats.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from profilers.clock import MAX_LOOPS, Clock
from profilers.pace import BY_ITSELF, Pace
from profilers.team import AllReduceMax

SHORT_S = 50e-6
"""Shorter runs are looped inside one repeat: the marks themselves would be seen. With messages
between repeats all below `LOOPED_S` are: on an AMD EPYC kernels of 20 us took 40 to 50 right after
a message."""
LOOPED_S = 1e-3
"""Shortest looped repeat in seconds, as far as that many runs fit in memory at once and can be
queued (`Clock.most_queued`): long compared with an interrupt."""
PAGE_S = 1e-5
"""Seconds that mapping a page costs in a virtual machine (5 to 20 us on an AMD EPYC)..."""
PAGES_RATIO = 0.02
"""...and the share of a repeat that this may take. Pages that come back from a disk are not seen,
nor that 512 of them may be mapped at once, as huge ones."""
MIN_WITHOUT_FAULTS = 2
"""Repeats that did not wait for pages; if there are fewer, all count, as one says nothing of their
spread."""
UNSETTLED = 1.0
"""A spread that no target allows."""
LONG_S = 5e-3
"""A longer run averages over short disturbances by itself, and a few repeats are enough."""
MAX_WARMUPS = 3
HOLD_RATIO = 2.0
"""An accelerator is held so many times longer than the host took to queue the run before..."""
MAX_HOLD_S = 0.02
"""...but no longer."""


class PeerFailedError(Exception):
    """Another rank cannot go on with what is measured in lockstep."""


def in_step(all_reduce_max: AllReduceMax, numbers: tuple[float, float]) -> tuple[float, float]:
    """All-reduce (max) two numbers; a failing rank sends inf as the second one.

    All messages between ranks that measure have this form, so a rank that fails need not know what
    its peers send next.

    Raises:
        PeerFailedError: a rank failed; raised on every rank.
    """
    first, second = all_reduce_max(numbers)
    if second == math.inf:
        raise PeerFailedError
    return first, second


def measure(
    run: Callable[[], object],
    *,
    clock: Clock,
    budget_s: float,
    pace: Pace = BY_ITSELF,
    min_repeats: int = 5,
    settled_repeats: int = 0,
    long_repeats: int = 0,
    max_repeats: int = 50,
    target_spread: float = 0.02,
) -> tuple[float, ...]:
    """Time `run`; one entry per repeat, in seconds of one run.

    At least `min_repeats` are taken whatever the budget; warm-ups come on top. Those that waited
    for pages are left out, so fewer may be returned, but at least two. Fewer than `settled_repeats`
    do not count as settled. For runs longer than `LONG_S`, `long_repeats` are enough after one
    warm-up, unless the pace sets a length of repeats. If mapping pages leaves fewer than two, twice
    as many are taken, and all count if that does not help.
    """
    return measure_fresh(
        lambda: run,
        clock=clock,
        budget_s=budget_s,
        pace=pace,
        min_repeats=min_repeats,
        settled_repeats=settled_repeats,
        long_repeats=long_repeats,
        max_repeats=max_repeats,
        target_spread=target_spread,
    )


def measure_fresh(
    fresh: Callable[[], Callable[[], object]],
    *,
    clock: Clock,
    budget_s: float,
    pace: Pace = BY_ITSELF,
    max_loops: int = MAX_LOOPS,
    min_repeats: int = 5,
    settled_repeats: int = 0,
    long_repeats: int = 0,
    max_repeats: int = 50,
    target_spread: float = 0.02,
) -> tuple[float, ...]:
    """Time the callable that `fresh` returns; `fresh`, called before every run, is not timed.

    What `fresh` returns for all runs of a repeat, at most `max_loops`, is in memory at once.

    A backward pass needs this: each one consumes the graph of a forward of its own.
    """
    start_s = clock.now_s()
    most_warm_s = LONG_S if long_repeats and not pace.shares_cores else math.inf
    warm_s, whole_s, queued_s = _warm_up(fresh, clock=clock, pace=pace, most_s=most_warm_s)
    if warm_s >= most_warm_s:
        min_repeats = long_repeats
    short_s = LOOPED_S if pace.cools_caches else SHORT_S
    max_loops = min(max_loops, clock.most_queued)
    loops = min(max_loops, loops_per_repeat(warm_s, short_s=short_s, repeat_s=pace.repeat_s))
    if pace.shares_cores:
        # Preparing a run can take far longer than the run.
        loops = max(1, min(loops, int(budget_s / min_repeats / max(whole_s, warm_s, 1e-9))))
    elif pace.cools_caches and loops > 1:
        # The first runs found neither their code nor all operands in the caches.
        (looped,) = _repeats(fresh, clock=clock, count=1, loops=loops, queued_s=queued_s)
        looped_s, _ = in_step(pace.all_reduce_max, (looped.seconds, 0.0))
        loops = min(max_loops, loops_per_repeat(min(warm_s, looped_s), short_s=short_s))
    repeats: list[_Repeat] = []
    while len(repeats) < max_repeats:
        count = min(min_repeats, max_repeats - len(repeats))
        repeats += _repeats(fresh, clock=clock, count=count, loops=loops, queued_s=queued_s)
        # One that waits for the device, as `.item()` does, takes as long as it is held.
        queued_s = min(queued_s, *(repeat.queued_s for repeat in repeats))
        counting_s = _counting_s(repeats)
        spread = min(spread_of_median(counting_s), UNSETTLED)
        if len(counting_s) < settled_repeats:
            spread = UNSETTLED
        if len(repeats) < 2 * min_repeats and _without_faults(repeats) < MIN_WITHOUT_FAULTS:
            # No rank stops before this one has more.
            spread = math.inf
        spread, spent_s = in_step(pace.all_reduce_max, (spread, clock.now_s() - start_s))
        is_over = spread <= target_spread or spent_s >= budget_s
        if len(repeats) >= min_repeats and spread < math.inf and is_over:
            break
    return _counting_s(repeats)


def loops_per_repeat(run_s: float, *, short_s: float = SHORT_S, repeat_s: float = 0.0) -> int:
    """Return how many runs one repeat holds.

    One that lasts `short_s` and `repeat_s`; of shorter ones as many as last `LOOPED_S` and
    `repeat_s`.
    """
    if run_s >= max(short_s, repeat_s):
        return 1
    wanted_s = max(LOOPED_S, repeat_s)
    return min(MAX_LOOPS, math.ceil(wanted_s / max(run_s, wanted_s / MAX_LOOPS)))


def spread_of_median(times_s: Sequence[float]) -> float:
    """Return the relative standard error of the median; infinite when it cannot be estimated."""
    if len(times_s) < 2:
        return math.inf
    median_s = statistics.median(times_s)
    if median_s <= 0.0:
        return math.inf
    lower_s, _, upper_s = statistics.quantiles(times_s, n=4, method="inclusive")
    deviation_s = (upper_s - lower_s) / 1.349
    return 1.2533 * deviation_s / math.sqrt(len(times_s)) / median_s


def _warm_up(
    fresh: Callable[[], Callable[[], object]], *, clock: Clock, pace: Pace, most_s: float
) -> tuple[float, float, float]:
    """Run until two runs in a row are within a factor 2; the last one's seconds.

    Then also its seconds including its preparation, and the fewest that the host took to queue one.
    One run of at least `most_s` is enough.
    """
    queued_s = 0.0

    def once() -> tuple[float, float]:
        nonlocal queued_s
        start_s = clock.now_s()
        (run,) = _repeats(fresh, clock=clock, count=1, loops=1, queued_s=queued_s)
        if run.waited_for_pages:
            (run,) = _repeats(fresh, clock=clock, count=1, loops=1, queued_s=queued_s)
        queued_s = min(queued_s or run.queued_s, run.queued_s)
        return in_step(pace.all_reduce_max, (run.seconds, clock.now_s() - start_s))

    last_s, whole_s = once()
    for _ in range(MAX_WARMUPS - 1):
        if last_s >= most_s:
            break
        now_s, whole_s = once()
        is_steady = last_s <= 2.0 * now_s and now_s <= 2.0 * last_s
        last_s = now_s
        if is_steady:
            break
    return last_s, whole_s, queued_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repeat:
    seconds: float
    """Seconds of one run."""
    queued_s: float
    """Seconds that the host took to queue one run."""
    waited_for_pages: bool


def _without_faults(repeats: Sequence[_Repeat]) -> int:
    """Count the repeats that did not wait for pages."""
    return sum(not repeat.waited_for_pages for repeat in repeats)


def _counting_s(repeats: Sequence[_Repeat]) -> tuple[float, ...]:
    """Return the seconds of repeats that did not wait for pages; of all if these are too few."""
    all_count = _without_faults(repeats) < MIN_WITHOUT_FAULTS
    return tuple(repeat.seconds for repeat in repeats if all_count or not repeat.waited_for_pages)


def _repeats(
    fresh: Callable[[], Callable[[], object]],
    *,
    clock: Clock,
    count: int,
    loops: int,
    queued_s: float,
) -> tuple[_Repeat, ...]:
    """Repeat; the host is expected to queue a run in `queued_s`."""
    pairs, mapped, queues_s = [], [], []
    for _ in range(count):
        runs = [fresh() for _ in range(loops)]
        faults = clock.page_faults()
        clock.hold(min(HOLD_RATIO * queued_s * loops, MAX_HOLD_S))
        begin_s = clock.now_s()
        first = clock.mark()
        for run in runs:
            run()
        pairs.append((first, clock.mark()))
        queues_s.append((clock.now_s() - begin_s) / loops)
        mapped.append(clock.page_faults() - faults)
    return tuple(
        _Repeat(
            seconds=lasted_s / loops,
            queued_s=queue_s,
            waited_for_pages=pages * PAGE_S > PAGES_RATIO * lasted_s,
        )
        for lasted_s, pages, queue_s in zip(clock.between_s(pairs), mapped, queues_s, strict=True)
    )
