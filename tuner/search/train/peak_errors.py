"""Error band of a predicted peak, and the probability that it is exceeded, from published runs.

The band is the largest error: a peak p is expected between p / (1 + OVER_RATIO) and
p / (1 - UNDER_RATIO).

Each recipe (model, devices, degrees, precision) gives a ratio of measured over predicted peak. A
new run is assumed to err like one of them, blurred by Student's t of four degrees of freedom:

    P(measured / predicted > x) = sum over recipes of weight * T4((ln ratio - ln x) / SCATTER)

so the distribution keeps its own centre: where recipes were predicted too low, as torchtitan's
pipelines, most of the probability lies above the predicted peak. A source with n recipes weighs
sqrt(n), shared by them: recipes of one machine and release share much of their error (one vote a
source), but not all of it (one vote a recipe).

Kinds of runtime are separate where their errors differ: Megatron; PyTorch's modules under FSDP
(torchtitan, DeepSpeed); the same in a pipeline, which gathers whole stages. Nobody published peaks
of Megatron's pipelines of more than two ranks; they take the errors of those of one and two.

A run that starts may still run out later. The growth of its peak is exponentially distributed; see
memory_risk.py for its mean.

`tests/benchmarks/training_memory.py RUNS.csv` prints errors and RATIOS again, and how
well the probabilities are calibrated with each recipe left out.

Letters: C peaks, N published runs, G grid of ratios.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.prices.train.constants import Software

Recipe = tuple[float, ...]
"""Measured over predicted peaks of one recipe's runs."""


class ErrorKind(StrEnum):
    """Runtimes with common peak errors."""

    MEGATRON = "megatron"
    """Megatron-LM and Megatron-Bridge, with a pipeline and without."""
    PYTORCH = "pytorch"
    """torchtitan, DeepSpeed, plain FSDP; no pipeline."""
    PYTORCH_PIPELINE = "pytorch-pipeline"
    """torchtitan, DeepSpeed, plain FSDP; with a pipeline."""


RATIOS: Final[Mapping[ErrorKind, Mapping[str, tuple[Recipe, ...]]]] = {
    ErrorKind.MEGATRON: {
        "simumax-b200": (
            (1.0001, 1.0001),
            (0.9996, 0.9996, 0.9996),
            (0.9997,),
            (1.0063, 1.0063),
            (1.0074, 1.0074),
            (0.9988,),
            (1.0068,),
            (1.0078,),
            (1.0001, 1.0001, 1.0001),
            (1.0003, 1.0003, 1.0003),
            (0.9998, 0.9998),
            (0.9996,),
            (1.0001,),
            (1.0004,),
            (1.0002,),
            (1.0001,),
            (1.0004,),
        ),
        "mbridge-skills": ((1.0954, 1.0954, 1.0954),),
    },
    ErrorKind.PYTORCH: {
        "torchtitan 2024-12, H100": (
            (1.0326, 0.9998),
            (1.0186, 0.9842),
            (0.9810,),
            (0.9767,),
            (0.9802,),
            (1.0639,),
        ),
        "torchtitan 2025-06, H200": ((1.0099,), (1.0296,)),
        "torchtitan-fork-pr": ((1.0384,), (1.041,), (1.0463,), (1.0495,), (1.0588, 1.0631)),
    },
    ErrorKind.PYTORCH_PIPELINE: {
        "torchtitan 2024-12, H100": ((1.1006, 1.014), (1.0045,), (1.1326,)),
    },
}
"""Measured over predicted peaks by kind of error and source, a recipe a tuple, its runs in the
order of the table of published runs."""

SCATTER: Final = 0.02
"""Scatter of ln ratio between recipes of one source. 0.015 to 0.03 miss the same published
peaks."""

GRID_STEP: Final = 5e-4
MOST_LOG: Final = 2.0
"""Ratios from 1 / 7.4 to 7.4; beyond, probabilities are those of the ends."""

GROWTH_QUANTILES: Final = (np.arange(16) + 0.5) / 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeakErrors:
    """Distribution of measured over predicted peaks of some runs."""

    exceeding_G: Floats
    """Probability that a peak lies beyond each point of a grid of ln ratios."""

    @classmethod
    def of(cls, sources: Iterable[Sequence[Recipe]]) -> "PeakErrors":
        """Weigh the recipes of some sources.

        Raises:
            ValueError: there are none.
        """
        logs, weights = [], []
        for recipes in sources:
            for runs in recipes:
                logs += [float(np.log(ratio)) for ratio in runs]
                weights += [len(recipes) ** -0.5 / len(runs)] * len(runs)
        if not logs:
            raise ValueError("no published peak to learn from")
        log_N, weight_N = np.array(logs), np.array(weights)
        weight_N = weight_N / weight_N.sum()
        upper_GN = _student_4((log_N - _grid()[:, None]) / SCATTER)
        return cls(exceeding_G=upper_GN @ weight_N)

    def at_start(self, room_C: Floats) -> Floats:
        """Probability that the first steps take more memory than a device has.

        Args:
            room_C: capacity over predicted peak.
        """
        log_room_C = np.log(np.maximum(room_C, np.finfo(np.float64).tiny))
        probability: Floats = np.interp(log_room_C, _grid(), self.exceeding_G)
        return probability

    def ever(self, room_C: Floats, *, growth_C: Floats) -> Floats:
        """Return the probability of exceeding memory at any time of a long run.

        Its peak grows by `growth_C` on average.
        """
        steps = -np.log1p(-GROWTH_QUANTILES)
        probability: Floats = np.mean(
            [self.at_start(room_C / (1.0 + step * growth_C)) for step in steps], axis=0
        )
        return probability


def error_kind(software: Software, *, has_pipeline: bool) -> ErrorKind:
    """Return the kind of published runs that a run errs like."""
    if software not in (Software.TORCH_FSDP, Software.TORCH_EAGER, Software.TRANSFORMERS):
        return ErrorKind.MEGATRON
    return ErrorKind.PYTORCH_PIPELINE if has_pipeline else ErrorKind.PYTORCH


@cache
def published_errors(kind: ErrorKind) -> PeakErrors:
    """Errors of all published runs of a kind."""
    return PeakErrors.of(RATIOS[kind].values())


def _student_4(t: Floats) -> Floats:
    """Cumulative distribution of Student's t with four degrees of freedom (closed form)."""
    square = 1.0 + t * t / 4.0
    cdf: Floats = 0.5 + 0.375 * t / np.sqrt(square) * (1.0 - t * t / square / 12.0)
    return cdf


def _grid() -> Floats:
    return np.arange(-MOST_LOG, MOST_LOG + GRID_STEP, GRID_STEP)


UNDER_RATIO: Final = 0.12
"""torchtitan's Llama 3.1 405B in a pipeline on 512 H100 (TP 8, PP 8), four rows, 0.4 to 11.7 % low;
without one on H100, H200 and B200, 16 rows, up to 6.0 % low. Megatron-Bridge without one, 3 rows,
8.7 % low. Megatron-LM on one node, 20 rows without and 7 with a pipeline of two ranks, 0.8 %."""

OVER_RATIO: Final = 0.12
"""No published run is more than 2.4 % above its peak; the margin above is set to
that below, for runs in other settings."""


def peak_band(peak_bytes: float) -> tuple[float, float]:
    """Bytes between which a measured peak is expected."""
    return peak_bytes / (1.0 + OVER_RATIO), peak_bytes / (1.0 - UNDER_RATIO)
