"""Kernel curves that are formulas, for prices worked out by hand, and closed forms of papers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profilers.interpolation import Bools, Curve
from profilers.records import AXES, Case
from profilers.series import Series
from tuner.costs.serve.queueing import mean_wait_s
from tuner.prices.ops import Op

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Formula:
    """A curve that was not fitted."""

    series: Series
    seconds: Callable[[Case], float]

    def predict(self, axes_NA: Floats) -> tuple[Floats, Bools]:
        operation, kind, dtype, direction = self.series
        times = [
            self.seconds(
                Case.model_validate(
                    {
                        "operation": operation,
                        "kind": kind,
                        "dtype": dtype,
                        "direction": direction,
                        "axes": dict(zip(AXES[operation], map(int, sizes), strict=True)),
                    }
                )
            )
            for sizes in axes_NA
        ]
        return np.array(times), np.zeros(len(times), dtype=np.bool_)


class Formulas(Mapping[Series, Curve]):
    """A curve for every series that anybody asks for."""

    def __init__(self, seconds: Callable[[Case], float]) -> None:
        self._seconds = seconds

    def __getitem__(self, series: Series) -> Curve:
        return _Formula(series, self._seconds)

    def __iter__(self) -> Iterator[Series]:
        return iter(())

    def __len__(self) -> int:
        return 0


def op_of(case: Case) -> Op:
    """An operation of the size that was measured."""
    return Op(
        operation=case.operation,
        kind=case.kind,
        dtype=case.dtype,
        direction=case.direction,
        axes=case.axes,
    )


def prefill_ttft_s(
    *, rate_per_s: float, prefill_s: float, stages: int = 1, speed_up: float = 1.0
) -> float:
    """Mean time to the first token of equal prompts, one at a time, in seconds.

    Model:   R D^2 / (2 p K (p K - R D)) + D / K: a stage is free again after D / (p K)
    Source:  DistServe (arXiv:2401.09670), section 3.1, for p = 2 or K; any p by the same steps.
    Valid:   Poisson arrivals; p pipeline stages, or K times the speed by tensor parallelism.
    """
    wait_s = mean_wait_s(
        rate_per_s=rate_per_s, service_s=prefill_s / (stages * speed_up), service_cv2=0.0
    )
    return wait_s + prefill_s / speed_up


def crossover_load(speed_up: float) -> float:
    """Load R D above which two pipeline stages beat two tensor-parallel ranks; of one device.

    Model:   both times of `prefill_ttft_s` equal; found by bisection, since the wait of tensor
             parallelism grows faster in R D all the way to its limit K < 2.
    Source:  DistServe (arXiv:2401.09670), section 3.1 and figure 4.
    """
    low, high = 0.0, speed_up
    while high - low > 1e-12 * speed_up:
        load = 0.5 * (low + high)
        tensor = prefill_ttft_s(rate_per_s=load, prefill_s=1.0, speed_up=speed_up)
        pipeline = prefill_ttft_s(rate_per_s=load, prefill_s=1.0, stages=2)
        low, high = (low, load) if tensor > pipeline else (load, high)
    return high
