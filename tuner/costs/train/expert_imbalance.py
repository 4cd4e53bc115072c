"""Imbalance of expert-parallel ranks under recorded routing: mean for time, P99 for memory.

Rank r of an expert degree d holds the experts r E / d .. (r + 1) E / d of every layer. Its load in
one pass is the sum of their shares of the layer's token copies; the most-loaded rank over the mean
rank is the ratio by which its GEMMs, its part of the all-to-all and its buffers exceed balance.

    imbalance_PL = d * max_r sum_{e on r} share_PLe

Time adds up over passes and layers, so it uses the mean of each layer over the passes. A buffer
must hold the peak, so it uses the P99 over passes (the largest of fewer than 100) on the layer
where that is largest. Layers that were not recorded are taken to be like the mean of those that
were, as in serving (tuner/costs/serve/expert_loads.py): of one recorded layer after the other left
out, the mean of the rest is nearer than the nearest layer in 16 of 18 recordings, 12.9 % off at the
median instead of 15.3 %.

Letters: P passes, L recorded layers, E experts, R ranks, D degrees. Not covered:
placements other than blocks of consecutive experts. A recording without passes has no spread: its
P99 is its mean.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats
from tuner.errors import SpecError
from tuner.spec.goal import Phase
from tuner.spec.model import ModelSpec
from tuner.spec.routing import RoutingRecord

BUFFER_QUANTILE = 0.99
"""Share of the passes whose copies a buffer must hold."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertImbalance:
    """Copies on the most-loaded expert rank over the mean rank's, by expert degree."""

    degrees: tuple[int, ...]
    """Every divisor of the number of experts, ascending."""
    mean_D: Floats
    """Imbalance by degree, averaged over passes and layers."""
    p99_D: Floats
    """P99 of the imbalance over passes by degree, on the worst layer."""

    def of_degree(self, degree: int) -> tuple[float, float]:
        """Return the mean over layers and the P99 of one expert degree.

        Raises:
            ValueError: the degree does not divide the experts.
        """
        if degree not in self.degrees:
            raise ValueError(f"expert degree {degree} is not one of {self.degrees}")
        index = self.degrees.index(degree)
        return float(self.mean_D[index]), float(self.p99_D[index])

    def columns(self, expert: Floats | npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return `expert_imbalance` and `expert_imbalance_p99` for columns of expert degrees."""
        index = np.searchsorted(np.array(self.degrees), expert)
        return self.mean_D[index], self.p99_D[index]


def expert_imbalances(model: ModelSpec, record: RoutingRecord, phase: Phase) -> ExpertImbalance:
    """Read the ratios of every expert degree off a recording.

    Raises:
        SpecError: the recording is of another number of experts, or the model has none.
    """
    if model.moe is None or model.moe.num_experts != record.num_experts:
        has = "no experts" if model.moe is None else f"{model.moe.num_experts} experts"
        raise SpecError(
            f"goal.routing: {record.name!r} was recorded with {record.num_experts} experts, "
            f"{model.name!r} has {has}; record this model or leave routing out"
        )
    share_PLE = _pass_shares(record, phase)
    degrees = tuple(d for d in range(1, record.num_experts + 1) if record.num_experts % d == 0)
    mean_D = np.empty(len(degrees))
    p99_D = np.empty(len(degrees))
    for index, degree in enumerate(degrees):
        load_PLR = share_PLE.reshape(*share_PLE.shape[:2], degree, -1).sum(axis=3)
        imbalance_PL = degree * load_PLR.max(axis=2)
        mean_D[index] = imbalance_PL.mean()
        worst_L = np.quantile(imbalance_PL, BUFFER_QUANTILE, axis=0, method="higher")
        p99_D[index] = worst_L.max()
    return ExpertImbalance(degrees=degrees, mean_D=mean_D, p99_D=p99_D)


def _pass_shares(record: RoutingRecord, phase: Phase) -> Floats:
    """Shares pass by pass; as for means, `early` is the first quarter, `steady` the second half."""
    if not record.passes:
        return np.array(record.load_ratios)[None]
    count = len(record.passes)
    chosen = slice(0, max(1, count // 4)) if phase is Phase.EARLY else slice(count // 2, None)
    return np.array(record.passes[chosen])
