"""A piece of work that never changes, to tell how fast the machine is just now.

Neighbours on the other hyperthread and in the caches of a shared host slow a processor down for
milliseconds to minutes, all kernels together; heat does so for longer. A few small matrix products
between repeats see it, as calls lose the most. On one virtual machine, where they took 1.5
times their fastest for half of the time, two visits to one size differed by 15 % in the median with
no regard to that, and by 4 % where the products were quick before and after both.

So repeats wait until the machine is undisturbed, within bounds: undisturbed is what is as quick as
the quickest of the last `WINDOW_S`, as a machine that stays slow is as it is, and no more than
`MOST_WAITING_RATIO` of the time goes to waiting, times the share of waits that ended well. Before
that and meanwhile it looks for a quiet core (profilers/cores.py), which costs a reading each. What
the products took beside a visit tells later which visits to doubt (profilers/revisits.py).

Not seen: neighbours that only take memory bandwidth, and what accelerators do.
"""

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from profilers.cores import Cores
from profilers.timing import SLOW_RATIO, Clock

WINDOW_S = 5.0
"""How far back the quickest reading is looked for."""
LOOK_EVERY_S = 1.0
"""Between looks at all cores."""
MOST_WAITING_RATIO = 0.5
"""Of all the time."""
TIMES = 3
"""That a reading is taken of, their median: a single interrupt is no state of the machine."""


@dataclass(slots=True, kw_only=True)
class Sentinel:
    """Read between repeats, on the core that measures: neighbours differ from core to core."""

    work: Callable[[], object]
    """Some tens of microseconds of it."""
    clock: Clock
    cores: Cores = field(default_factory=Cores)
    """To choose from."""
    _begun_s: float = field(init=False)
    _looked_s: float = field(init=False)
    _waited_s: float = field(init=False, default=0.0)
    _waits: int = field(init=False, default=0)
    _ended_well: int = field(init=False, default=0)
    """Of the waits."""
    _patience_s: float = field(init=False, default=0.0)
    _beside_s: float = field(init=False, default=0.0)
    _quickest: deque[tuple[float, float]] = field(init=False, default_factory=deque)
    """(when, seconds of the work) of readings that no later one undercuts, oldest first: the first
    is the quickest of the window."""

    def __post_init__(self) -> None:
        self._begun_s = self._looked_s = self.clock.now_s()

    def look_around(self, *, seconds: float) -> None:
        """Learn what is quick on every core, before the first visit, and begin on a quick one."""
        start_s = self.clock.now_s()
        self._look()
        while self.clock.now_s() - start_s < seconds:
            self._look()

    def begin(self, *, patience_s: float) -> None:
        """Begin a visit, in which so long may be waited.

        Now and then all cores are looked at: on a core that stays slow nothing else would tell.
        """
        self._patience_s = patience_s
        self._beside_s = 0.0
        if self.cores.count > 1 and self.clock.now_s() - self._looked_s >= LOOK_EVERY_S:
            self._look()

    @property
    def beside_s(self) -> float:
        """What the work took beside what was kept of this visit; 0 if nobody looked."""
        return self._beside_s

    def note(self, sentinel_s: float) -> None:
        """Take note of what it took beside repeats that are kept."""
        self._beside_s = max(self._beside_s, sentinel_s)

    def wait(self, settle: Callable[[], object] = lambda: None) -> float:
        """Wait until the machine is undisturbed, within bounds; seconds of the work by then.

        Every core is tried once, whatever the bounds; where all stay slow it ends on the one that
        was the least so. On another core than before the caches are cold, and `settle` is called.
        """
        begun_at = self.cores.at
        latest_s = {begun_at: self.read()}
        while self.is_slow(latest_s[self.cores.at]) and len(latest_s) < self.cores.count:
            self._try_next(latest_s)
        start_s, waited_s = self.clock.now_s(), 0.0
        while self.is_slow(latest_s[self.cores.at]):
            if waited_s >= min(self._allowed_s(), self._patience_s):
                self.cores.enter(min(latest_s, key=lambda core: latest_s[core]))
                break
            self._try_next(latest_s)
            waited_s = self.clock.now_s() - start_s
        work_s = latest_s[self.cores.at]
        if waited_s > 0.0:
            self._waits += 1
            self._ended_well += not self.is_slow(work_s)
        self._waited_s += waited_s
        self._patience_s -= waited_s
        if self.cores.at != begun_at:
            settle()
        return work_s

    def is_slow(self, sentinel_s: float) -> bool:
        """Whether that is slow beside the quickest of the window."""
        return sentinel_s > SLOW_RATIO * self._quickest[0][1]

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
        now_s = self.clock.now_s()
        while self._quickest and self._quickest[-1][1] >= work_s:
            self._quickest.pop()
        self._quickest.append((now_s, work_s))
        while self._quickest[0][0] < now_s - WINDOW_S:
            self._quickest.popleft()
        return work_s

    def _look(self) -> None:
        """Read on every core and go to the quickest."""
        self.cores.enter(self.cores.at)
        latest_s = {self.cores.at: self.read()}
        while len(latest_s) < self.cores.count:
            self._try_next(latest_s)
        self.cores.enter(min(latest_s, key=lambda core: latest_s[core]))
        self._looked_s = self.clock.now_s()

    def _try_next(self, latest_s: dict[int, float]) -> None:
        """Go to the next core and note what the work takes there."""
        self.cores.enter((self.cores.at + 1) % self.cores.count)
        latest_s[self.cores.at] = self.read()

    def _allowed_s(self) -> float:
        """Seconds that a wait may have taken by now, by what came of the others."""
        share = MOST_WAITING_RATIO * (1 + self._ended_well) / (1 + self._waits)
        return share * (self.clock.now_s() - self._begun_s) - self._waited_s
