"""Accuracy of profiles on a machine with other load: `python
tests/benchmarks/disturbed_machine.py`.

The machine is simulated, so that the truth is known and the load is reproducible. Its kernels take
the times of the stored profile `epyc-2-ranks`, varied by up to 3 % by a hash of the size. Its speed
is the product of two-state processes: for intervals of exponential length, milliseconds to seconds,
it is divided by a factor.

The real profiler runs on it, in simulated time, once per seed; then sizes are drawn at random and
predicted from its profile. Printed are, per kind of load, for the profiler as it is, with a
sentinel and further sessions of suspicious sizes (profilers/noise/), and for one with a single
session of every size and no sentinel:

    median, p90     of |predicted / undisturbed - 1|, all seeds together
    bias            median of predicted / undisturbed - 1

Not simulated: fitting takes no time, and preparing operands takes an estimate.
"""

import argparse
import hashlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np

from profilers import rank_loop, session
from profilers.clock import HostClock
from profilers.interpolation import Curve, fit_curves
from profilers.kernels import suite
from profilers.kernels.autograd import Prepared
from profilers.noise.cores import Cores
from profilers.noise.policy import NoisePolicy
from profilers.records import AXES, Case, Measurement
from profilers.sampled_sizes import SIZES, drawn, lines
from profilers.series import Series, key_of
from profilers.store import read_profile

STORED = Path(__file__).parents[2] / "examples/profiles/epyc-2-ranks/used/profile"
ODD_RATIO = 0.03
CALL_S = 2e-3
"""Overhead of a visit: deciding, synchronising, collecting..."""
PREPARED_RUNS, MOST_PREPARED_S = 4.0, 0.02
"""...and preparing operands, in runs of the forward."""
SENTINEL_S = 50e-6
"""Seconds of the sentinel's work."""
SUFFERED: Final[Mapping[str, float]] = {"memory_bound": 1.4}
"""Exponent of a factor in an operation's slowdown, where it is not 1
(`python tests/benchmarks/disturbed_kernels.py`, power)."""


class Spells(NamedTuple):
    """One kind of disturbance."""

    mean_s: float
    factor: float
    """What work takes longer by while it lasts."""
    share: float
    """Of the time."""


NEIGHBOURS: Final[Mapping[str, tuple[Spells, ...]]] = {
    "few": (Spells(4e-3, 1.2, 0.05), Spells(0.3, 1.45, 0.02)),
    "some": (Spells(4e-3, 1.2, 0.1), Spells(0.3, 1.45, 0.25), Spells(5.0, 1.3, 0.15)),
    "host": (Spells(8e-3, 1.42, 0.8), Spells(20.0, 1.05, 0.5)),
    "many": (Spells(4e-3, 1.2, 0.2), Spells(0.3, 1.45, 0.4), Spells(20.0, 1.35, 0.4)),
}


class Disturbed:
    """A machine whose time passes only when it works."""

    def __init__(self, spells: Sequence[Spells], *, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.now_s = 0.0
        self._spells = spells
        self._is_on = [bool(self._rng.random() < one.share) for one in spells]
        self._until_s = [
            self._length_s(one, is_on=on) for one, on in zip(spells, self._is_on, strict=True)
        ]

    def work(self, quiet_s: float, *, power: float = 1.0) -> None:
        """Advance time by an undisturbed duration, slowed by a power of the factors."""
        while quiet_s > 0.0:
            for place, spell in enumerate(self._spells):
                while self._until_s[place] <= self.now_s:
                    self._is_on[place] = not self._is_on[place]
                    self._until_s[place] += self._length_s(spell, is_on=self._is_on[place])
            on = [one.factor for one, is_on in zip(self._spells, self._is_on, strict=True) if is_on]
            factor = math.prod(on) ** power
            done_s = min(quiet_s, (min(self._until_s) - self.now_s) / factor)
            self.now_s += max(done_s * factor, 1e-12)
            quiet_s -= done_s

    def _length_s(self, spell: Spells, *, is_on: bool) -> float:
        off_s = spell.mean_s * (1.0 - spell.share) / spell.share
        return float(self._rng.exponential(spell.mean_s if is_on else off_s))


def undisturbed_s(case: Case, curves: Mapping[Series, Curve]) -> float:
    """Return the true time on the simulated machine."""
    series, _ = key_of(case)
    digest = hashlib.sha256(case.id.encode()).digest()
    odd = 2.0 * int.from_bytes(digest[:4]) / 2**32 - 1.0
    return _predicted_s(case, curves[series]) * (1.0 + ODD_RATIO * odd)


@contextmanager
def simulated(machine: Disturbed, curves: Mapping[Series, Curve]) -> Iterator[None]:
    """Run the profiler on the machine, in its time."""

    def measured(
        case: Case, *, prepare: Callable[[], Prepared], **settings: Any
    ) -> tuple[Measurement, ...]:
        del prepare
        forward_s = undisturbed_s(case, curves)
        backward = case.model_copy(update={"direction": "backward"})
        backward_s = undisturbed_s(backward, curves) if case.direction else 0.0
        work = partial(machine.work, power=SUFFERED.get(case.operation, 1.0))

        def fresh() -> Callable[[], object]:
            work(forward_s)
            return partial(work, backward_s)

        def prepared() -> Prepared:
            machine.work(min(PREPARED_RUNS * forward_s, MOST_PREPARED_S))
            return Prepared(
                forward=partial(work, forward_s),
                backward=fresh if case.direction else None,
            )

        machine.work(CALL_S)
        return real(case, prepare=prepared, **(settings | {"free_bytes": 2**50}))

    def now(_clock: HostClock) -> float:
        return machine.now_s

    def small_gemms() -> Callable[[], object]:
        return partial(machine.work, SENTINEL_S)

    real = suite.measure_kernel
    stored = {series.operation for series in curves}
    known = {name: module for name, module in suite.KERNELS.items() if name in stored}
    with ExitStack() as stack:
        # The stored profile is the true machine; it says nothing of kernels that came later.
        stack.enter_context(patch.object(suite, "KERNELS", known))
        stack.enter_context(patch.object(suite, "measure_kernel", measured))
        stack.enter_context(patch.object(HostClock, "now_s", now))
        stack.enter_context(patch.object(HostClock, "mark", now))
        stack.enter_context(patch.object(HostClock, "page_faults", lambda _clock: 0))
        stack.enter_context(patch.object(rank_loop, "small_gemms", small_gemms))
        # The simulated machine has one core.
        stack.enter_context(patch.object(Cores, "of_this_thread", Cores))
        yield


def errors(
    curves: Mapping[Series, Curve],
    cases: Sequence[Case],
    *,
    spells: Sequence[Spells],
    seed: int,
    budget_s: float,
    is_once: bool,
) -> list[float]:
    """Profile the machine and predict the cases: predicted over undisturbed, less one."""
    machine = Disturbed(spells, seed=seed)
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch, ExitStack() as stack:
        stack.enter_context(simulated(machine, curves))
        if is_once:
            stack.enter_context(patch.object(rank_loop, "choose_policy", _single_session))
        session.measure_profile(
            Path(scratch), suites=("kernels",), budget_s=budget_s, ranks=1, device="cpu"
        )
        known = fit_curves(read_profile(Path(scratch)))
    result = []
    for listed in cases:
        directions = ("forward", "backward") if listed.direction else ("",)
        for direction in directions:
            case = listed.model_copy(update={"direction": direction})
            series, _ = key_of(case)
            predicted_s = _predicted_s(case, known[series])
            result.append(predicted_s / undisturbed_s(case, curves) - 1.0)
    return result


def some_sizes(*, count: int, seed: int) -> tuple[Case, ...]:
    """Draw sizes of the stored profile's kernels, evenly over its lines."""
    profile = read_profile(STORED)
    rng = np.random.default_rng(seed)
    on_lines = [
        cases
        for name in suite.KERNELS
        if name in SIZES
        for cases in lines(profile.rows(name)).values()
    ]
    return tuple(drawn(on_lines[n % len(on_lines)], rng=rng) for n in range(count))


def _single_session(*_ignored: object, **_also: object) -> NoisePolicy:
    """No sentinel, and one session of every size."""
    return NoisePolicy(revisits=False)


def _predicted_s(case: Case, curve: Curve) -> float:
    place = [float(case.axes[axis]) for axis in AXES[case.operation]]
    return float(curve.predict(np.array([place]))[0][0])


def main() -> int:
    """Profile each kind of machine, with and without the noise policy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--sizes", type=int, default=400)
    parser.add_argument("--budget", type=float, default=45.0, help="simulated seconds")
    options = parser.parse_args()
    curves = fit_curves(read_profile(STORED))
    cases = some_sizes(count=options.sizes, seed=0)
    titles = "".join(f"{title:>22}" for title in ("as it is", "visited once"))
    sys.stdout.write(f"{'neighbours':10}{titles}   (median, p90, bias)\n")
    for name, spells in NEIGHBOURS.items():
        cells = ""
        for is_once in (False, True):
            found_N = np.concatenate(
                [
                    errors(
                        curves,
                        cases,
                        spells=spells,
                        seed=seed,
                        budget_s=options.budget,
                        is_once=is_once,
                    )
                    for seed in range(options.seeds)
                ]
            )
            printed = (*np.quantile(np.abs(found_N), (0.5, 0.9)), np.median(found_N))
            cells += "   " + "".join(f"{100.0 * float(one):6.1f}" for one in printed) + "%"
        sys.stdout.write(f"{name:10}{cells}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
