"""Corrections of steps of reinforcement learning beyond serving and training of their own.

Engines of a rollout return the log-probability of every token, so that the host works between two
decode steps and cannot schedule ahead. Passes of varying packed sequences, with losses over whole
vocabularies, stay behind the tuned pre-training recipes that the analytic model is fitted to.

    rollout    k (seconds with `decode_gap_s` more between two steps)
    passes     k `pass_factor` (seconds of the analytic model)

k is a release's. The figures that ship are fitted by `moetune backtest` to the published steps of
NeMo-RL 0.4 to 0.6 (four models, colocated and disaggregated); none is of one model or of one row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class RlResiduals:
    """Corrections of a step, fitted to published ones."""

    decode_gap_s: float
    """Seconds of the host between two decode steps of a rollout, beyond serving's."""
    pass_factor: float
    """Seconds of training and forward passes over those of tuned pre-training recipes."""
    release_factors: Mapping[str, float] = field(default_factory=dict)
    """Factor of both by release of the framework, `NeMo-RL 0.5`; others have 1."""

    def release_factor(self, release: str) -> float:
        """Return a release's factor."""
        return self.release_factors.get(release, 1.0)


PLAIN: Final = RlResiduals(decode_gap_s=0.0, pass_factor=1.0)
"""Steps as serving and training alone price them."""
GENERIC: Final = RlResiduals(decode_gap_s=3e-3, pass_factor=1.3)
"""Residuals that fits start at and are held to."""
SHIPPED: Final = RlResiduals(
    decode_gap_s=3.5e-3,
    pass_factor=1.55,
    release_factors={"NeMo-RL 0.4": 1.15, "NeMo-RL 0.5": 1.03, "NeMo-RL 0.6": 1.0},
)
BAND_FACTORS: Final[Mapping[str, float]] = {"colocated": 1.16, "disaggregated": 1.29}
"""Factor on a predicted step, up and down, that held four of five steps of models left out of the
fit, by placement."""
