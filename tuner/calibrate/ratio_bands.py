"""Bands of ratios, from pairs of published runs of one setting that were predicted unseen.

A setting is one model on one machine: source, software and release, device, precision. Its runs
differ in layout, micro-batch, recomputation, batch, and some in sequence length or number of
devices, which a plan's runner-ups do not; their errors are no larger. For two of them

    e = log(measured_i / measured_j) - log(predicted_i / predicted_j)

both predicted by a fit without any run of their setting. Pairs of one setting are not independent:
all pairs of the same two recipes together count as one, and a setting with g such pairs of recipes
weighs sqrt(g), as near-repeats do in the fit (`calibration.pair_weights`).

Few settings have pairs. A class (generation of devices, experts or none, same kernels or not) is
therefore shrunk towards all others: its own settings weigh 1 each, those of other classes
`PRIOR_SETTINGS` together, and the band is [exp(-q), exp(q)] with q the quantile of |e| so weighted
that covers the stated share of a new setting (see bands.py).

Letters: C runs, P pairs.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats
from tuner.backtest.columns import PublishedRun
from tuner.calibrate.fit import Places
from tuner.config.columns import Strategies
from tuner.costs.train.ratio_bands import STATED_RATIO, RatioBand, RatioBands

FEWEST_SETTINGS: Final = 12
"""Settings that a band needs."""
PRIOR_SETTINGS: Final = float(FEWEST_SETTINGS)
"""Total weight of all other classes, where each own setting weighs 1."""

ARRANGEMENT: Final = frozenset(
    {
        *("pipeline", "virtual_pipeline", "data", "num_microbatches", "embedding_loss_as_layers"),
        *("zero_bubble", "expert_imbalance", "expert_imbalance_p99"),
    }
)
"""Fields of a strategy that leave a layer's kernels as they are."""


class PairClass(NamedTuple):
    """The class that selects a pair's band."""

    generation: str
    has_experts: bool
    same_kernels: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """Pairs of runs of one setting, those of the smallest error first."""

    kinds: tuple[PairClass, ...]
    settings: tuple[str, ...]
    error_P: Floats
    """Size of e."""
    kind_P: Places
    setting_P: Places
    recipes_P: Places
    """One number for all pairs of the same two recipes with the same `same_kernels`."""

    def without(self, setting: int) -> "Pairs":
        """Return all but the pairs of one setting."""
        return self.taken(self.setting_P != setting)

    def with_kernels(self, *, same_kernels: bool) -> "Pairs":
        """Return the pairs with the same kernels, or the others."""
        has = np.array([kind.same_kernels == same_kernels for kind in self.kinds], dtype=bool)
        return self.taken(has[self.kind_P])

    def taken(self, chosen_P: npt.NDArray[np.bool_]) -> "Pairs":
        """Return some of the pairs."""
        return Pairs(
            kinds=self.kinds,
            settings=self.settings,
            error_P=self.error_P[chosen_P],
            kind_P=self.kind_P[chosen_P],
            setting_P=self.setting_P[chosen_P],
            recipes_P=self.recipes_P[chosen_P],
        )


def setting_key(run: PublishedRun) -> str:
    """Return the key of a setting: one model on one machine."""
    machine = (run.row.source, run.family, run.release, run.device.name)
    return "|".join((*machine, run.row.text("model"), run.row.text("precision")))


def build_pairs(runs: Sequence[PublishedRun], residual_C: Floats) -> Pairs:
    """Pair the runs of every setting; those without a residual are left out."""
    by_setting: dict[str, list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        if math.isfinite(residual_C[place]):
            by_setting[setting_key(run)].append(place)
    kernels = [_kernels(run) for run in runs]
    kinds: dict[PairClass, int] = {}
    recipes: dict[tuple[str, frozenset[str], bool], int] = {}
    entries = []
    for number, (setting, places) in enumerate(by_setting.items()):
        for first, second in combinations(places, 2):
            kind = PairClass(
                generation=str(runs[first].device.generation),
                has_experts=bool(runs[first].shape.experts),
                same_kernels=kernels[first] == kernels[second],
            )
            both = frozenset((runs[first].row.group, runs[second].row.group))
            entries.append(
                (
                    abs(float(residual_C[first] - residual_C[second])),
                    kinds.setdefault(kind, len(kinds)),
                    number,
                    recipes.setdefault((setting, both, kind.same_kernels), len(recipes)),
                )
            )
    table = np.array(sorted(entries), dtype=np.float64).reshape(-1, 4)
    codes = table[:, 1:].astype(np.intp)
    return Pairs(
        kinds=tuple(kinds),
        settings=tuple(by_setting),
        error_P=table[:, 0],
        kind_P=codes[:, 0],
        setting_P=codes[:, 1],
        recipes_P=codes[:, 2],
    )


def build_ratio_bands(pairs: Pairs) -> RatioBands | None:
    """Return a band for every kind of pairs, and a general one; None with too few."""
    bands = tuple(_bands(pairs))
    if not bands:
        return None
    return RatioBands(covered_ratio=_covered_ratio(pairs), bands=bands)


def is_covered(pairs: Pairs) -> npt.NDArray[np.bool_]:
    """Return whether each pair lies inside the band that was made without its setting."""
    inside_P = np.zeros(len(pairs.error_P), dtype=bool)
    for setting in np.unique(pairs.setting_P):
        others, own_P = pairs.without(int(setting)), pairs.setting_P == setting
        for number in np.unique(pairs.kind_P[own_P]):
            size = band_width(others, pairs.kinds[number])
            here_P = own_P & (pairs.kind_P == number)
            inside_P[here_P] = size is not None and pairs.error_P[here_P] <= size
    return inside_P


def pair_weights(pairs: Pairs) -> Floats:
    """Return what each pair weighs: those of a setting together the root of its recipe pairs."""
    pairs_in_R = np.bincount(pairs.recipes_P)
    _, first = np.unique(pairs.recipes_P, return_index=True)
    recipes_in_S = np.bincount(pairs.setting_P[first], minlength=len(pairs.settings))
    weight_P: Floats = 1.0 / pairs_in_R[pairs.recipes_P] / np.sqrt(recipes_in_S[pairs.setting_P])
    return weight_P


def band_width(pairs: Pairs, kind: PairClass, *, share: float = STATED_RATIO) -> float | None:
    """Return the quantile of errors of a kind, shrunk to all pairs with the same `same_kernels`."""
    comparable = pairs.with_kernels(same_kernels=kind.same_kernels)
    if len(np.unique(comparable.setting_P)) < FEWEST_SETTINGS:
        return None
    weight_P = pair_weights(comparable)
    is_own = np.array([pair_kind == kind for pair_kind in comparable.kinds], dtype=bool)
    own_P = is_own[comparable.kind_P]
    num_own = len(np.unique(comparable.setting_P[own_P]))
    for chosen_P, total in ((own_P, float(num_own)), (~own_P, PRIOR_SETTINGS)):
        if chosen_P.any():
            weight_P[chosen_P] *= total / weight_P[chosen_P].sum()
    total = float(weight_P.sum())
    needed = min(1.0, share * (1.0 + 1.0 / total)) * total
    place = int(np.searchsorted(np.cumsum(weight_P), needed - 1e-9))
    return float(comparable.error_P[min(place, len(weight_P) - 1)])


def _bands(pairs: Pairs) -> Iterator[RatioBand]:
    for same in (True, False):
        size = band_width(pairs, PairClass(generation="", has_experts=False, same_kernels=same))
        if size is not None:
            yield _band(size, pairs.with_kernels(same_kernels=same), same_kernels=same)
    for kind in sorted(pairs.kinds):
        size, number = band_width(pairs, kind), pairs.kinds.index(kind)
        if size is not None:
            kind_pairs = pairs.taken(pairs.kind_P == number)
            yield _band(size, kind_pairs, **kind._asdict())


def _band(size: float, pairs: Pairs, **kind: object) -> RatioBand:
    return RatioBand.model_validate(
        {
            **kind,
            "low": round(math.exp(-size), 4),
            "high": round(math.exp(size), 4),
            "settings": len(np.unique(pairs.setting_P)),
            "pairs": len(pairs.error_P),
        }
    )


def _covered_ratio(pairs: Pairs) -> float:
    return float(np.average(is_covered(pairs), weights=pair_weights(pairs)))


def _kernels(run: PublishedRun) -> tuple[float, ...]:
    return tuple(
        float(np.asarray(getattr(run.strategy, field.name)))
        for field in fields(Strategies)
        if field.name not in ARRANGEMENT
    )
