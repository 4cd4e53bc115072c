"""Certainty of the order of two configurations; all ties are decided here.

The measured seconds of another configuration over those of the chosen one lie in

    predicted ratio * [low, high]

for four pairs of five (tuner/costs/train/ratio_bands.py says from which published pairs). If 1
lies inside, the model cannot tell the two apart: a tie. Most of the error of a single time is
common to both, so this band is narrower than that of either time.

Where no band of ratios is known, that of a single time is used, as if no error were common.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.config.knobs import kernel_fields
from tuner.config.train import TrainDecision
from tuner.costs.train.calibration import Residuals
from tuner.costs.train.ratio_bands import ratio_band_among
from tuner.plans.train import Band

KERNEL_FIELDS = (
    *("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"),
    *("expert_tensor_parallel_size", "micro_batch_size", "recompute", *kernel_fields()),
)
"""Fields that are equal in two decisions whose layers run the same kernels; the chunks of any stage
are, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Measured over predicted ratio of two configurations' seconds, lowest and highest."""

    same_kernels: Band
    other_kernels: Band

    def between(self, chosen: TrainDecision, alternative: TrainDecision, *, ratio: float) -> Band:
        """Return what another's seconds over the chosen one's may measure.

        Args:
            chosen: the decision that is compared with.
            alternative: the decision compared with it.
            ratio: predicted seconds of the alternative over the chosen one's.
        """
        low, high = (
            self.same_kernels if has_same_kernels(chosen, alternative) else self.other_kernels
        )
        return ratio * low, ratio * high

    def widened(self, factor: float) -> "Ratios":
        """Return both bands with their edges moved apart."""
        return Ratios(
            same_kernels=_moved(self.same_kernels, factor),
            other_kernels=_moved(self.other_kernels, factor),
        )

    @property
    def farthest(self) -> float:
        """Return how many times slower a tie is predicted to be at most."""
        return 1.0 / min(self.same_kernels[0], self.other_kernels[0])


def is_tie(band: Band) -> bool:
    """Return whether neither of two configurations is known to be faster."""
    return band[0] <= 1.0 <= band[1]


def has_same_kernels(first: TrainDecision, second: TrainDecision) -> bool:
    """Return whether the layers of two decisions run the same kernels, in another arrangement."""
    return set(first.chunks) == set(second.chunks) and all(
        getattr(first, name) == getattr(second, name) for name in KERNEL_FIELDS
    )


def ratios_for(
    residuals: Residuals | None, *, generation: str, has_experts: bool, band: Band
) -> Ratios:
    """Return the bands of ratios of a model on a generation of devices.

    Args:
        residuals: fitted; None: the generic constants.
        generation: of the devices.
        has_experts: whether the model has any.
        band: of a single time, used where no band of ratios is known.
    """
    fallback = uniform_ratios(ties_ratio(band))
    if residuals is None or residuals.ratios is None:
        return fallback
    known = residuals.ratios.bands

    def among(*, same_kernels: bool) -> Band | None:
        return ratio_band_among(
            known, generation=generation, has_experts=has_experts, same_kernels=same_kernels
        )

    return Ratios(
        same_kernels=among(same_kernels=True) or fallback.same_kernels,
        other_kernels=among(same_kernels=False) or fallback.other_kernels,
    )


def turned(band: Band, *, before: float, after: float) -> Band:
    """Return the band of a pair in the opposite direction.

    Args:
        band: of the other's seconds over the chosen one's.
        before: predicted ratio that it belongs to.
        after: predicted seconds of the formerly chosen one over the other's.
    """
    return before / band[1] * after, before / band[0] * after


def uniform_ratios(slower_ratio: float) -> Ratios:
    """Return bands in which whatever is slower by up to a share is a tie."""
    band = (1.0 / (1.0 + slower_ratio), 1.0 + slower_ratio)
    return Ratios(same_kernels=band, other_kernels=band)


def widest(ratios: Sequence[Ratios]) -> Ratios:
    """Return the bands that contain all of some, for a step over heterogeneous machines."""
    return Ratios(
        same_kernels=_hull([machine_ratios.same_kernels for machine_ratios in ratios]),
        other_kernels=_hull([machine_ratios.other_kernels for machine_ratios in ratios]),
    )


def ties_ratio(band: Band) -> float:
    """Return half the width of a band of single times, as a share."""
    return float((band[1] / band[0]) ** 0.5 - 1.0)


def _moved(band: Band, factor: float) -> Band:
    return band[0] / factor, band[1] * factor


def _hull(bands: Sequence[Band]) -> Band:
    return min(low for low, _ in bands), max(high for _, high in bands)
