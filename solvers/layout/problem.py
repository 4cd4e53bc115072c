"""Consecutive layers that each pipeline stage holds, and the option under which it runs them.

A model is R runs of identical consecutive layers (3 of one kind, then 58 of another). Stages come
in execution order; each takes a contiguous, possibly empty, interval of layers and one option, for
example how much is recomputed in the backward pass and in how many chunks. More recomputation
costs time and saves memory.

Objective (to be minimised): seconds that the pipeline takes for one optimizer step,

    step = (m - 1/v) * max_d D_d + (1/v) * sum_d D_d

with T_s = fixed_time_s[s] + sum_r layers[s, r] * time_s[r, option[s]], the time of one micro-batch
on stage s, forward and backward, and D_d the sum of T_s over the stages of device d. Derivation:
the slowest device works for m * max_d D_d in any case. The first micro-batch must reach it and the
last one must drain from it, which keeps it idle while every *other* device works on one model chunk
of one micro-batch, D_d / v on average: the bubble is (sum_d D_d - max_d D_d) / v. With one stage
per device (v = 1) this is the familiar sum_s T_s + (m - 1) * max_s T_s, and for p equal devices it
is (m + (p - 1) / v) * D, the interleaved schedule of Narayanan et al., SC 2021 (arXiv:2104.04473,
section 2.2). It is exact for equal stages and an estimate otherwise.

Memory of a device: the sum over its stages of what stays (weights, optimizer state, activations of
the micro-batches in flight), plus the largest transient of its stages: only one layer at a time is
recomputed. Bytes are whole numbers, so that every sum is exact; fractions are rounded against
the plan (needs up, limits down) when the problem is made.

Letters: R runs, O options, S stages, D devices. Not covered: different options inside one stage,
options whose time depends on the stage, layers out of model order.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.arrays import LARGEST_BYTES, freeze_bytes, freeze_numbers

Seconds = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A solution: what every stage holds and how it runs it."""

    layers_SR: tuple[tuple[int, ...], ...]
    """Layers of each run on each stage."""
    option_S: tuple[int, ...]
    """Index of the option of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutProblem:
    """One instance; array arguments may be anything numpy can turn into an array."""

    run_lengths: tuple[int, ...]
    """Layers in each run, in model order."""
    device_of_stage: tuple[int, ...]
    """Device that runs each stage; every device runs the same number v of stages."""
    options: tuple[str, ...]
    """Names of the options, for messages."""
    time_s_RO: Seconds
    """Seconds of forward and backward of one layer for one micro-batch."""
    fixed_time_s_S: Seconds
    """Seconds of a stage per micro-batch besides its layers."""
    static_bytes_R: Bytes
    """Resident bytes of one layer."""
    fixed_bytes_S: Bytes
    """Resident bytes of a stage besides its layers."""
    saved_bytes_RO: Bytes
    """Bytes that one layer saves for the backward pass, per micro-batch in flight."""
    fixed_saved_bytes_S: Bytes
    """Bytes that a stage saves besides its layers, per micro-batch in flight."""
    transient_bytes_RO: Bytes
    """Additional bytes while one layer is recomputed."""
    in_flight_S: tuple[int, ...]
    """Micro-batches whose activations a stage holds at once."""
    memory_limit_bytes_D: Bytes
    """Memory of each device, bytes; more than 2^52 counts as 2^52, which no layout can need."""
    num_microbatches: int
    uniform_option: bool = False
    """Every stage must run under the same option."""
    fixed_layout: tuple[int, ...] | None = None
    """Layers that each stage must hold; only the options are then free."""
    min_layers_per_stage: int = 0
    """Fewest layers of a stage, 0 or 1."""

    def __post_init__(self) -> None:
        runs, options, stages = len(self.run_lengths), len(self.options), len(self.device_of_stage)
        self._check_counts()
        per_layer, per_stage = (runs, options), (stages,)
        freeze_numbers(self, "time_s_RO", per_layer)
        freeze_numbers(self, "fixed_time_s_S", per_stage)
        freeze_bytes(self, "static_bytes_R", (runs,))
        freeze_bytes(self, "fixed_bytes_S", per_stage)
        freeze_bytes(self, "saved_bytes_RO", per_layer)
        freeze_bytes(self, "fixed_saved_bytes_S", per_stage)
        freeze_bytes(self, "transient_bytes_RO", per_layer)
        freeze_bytes(self, "memory_limit_bytes_D", (self.num_devices,), is_limit=True)
        self._check_layout_rules()
        self._check_sums_are_exact()

    @property
    def num_runs(self) -> int:
        """R."""
        return len(self.run_lengths)

    @property
    def num_options(self) -> int:
        """O."""
        return len(self.options)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.device_of_stage)

    @property
    def num_devices(self) -> int:
        """D."""
        return max(self.device_of_stage) + 1

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return sum(self.run_lengths)

    @property
    def stages_per_device(self) -> int:
        """The v of the objective."""
        return self.num_stages // self.num_devices

    def stages_of_device(self, device: int) -> tuple[int, ...]:
        """Stages of one device, in execution order."""
        return tuple(s for s, owner in enumerate(self.device_of_stage) if owner == device)

    def _check_counts(self) -> None:
        if not self.run_lengths or min(self.run_lengths) < 1:
            raise ValueError(f"run_lengths {self.run_lengths} must be positive counts")
        if not self.options:
            raise ValueError("options must name at least one way to run a layer")
        stages_of = Counter(self.device_of_stage)
        if sorted(stages_of) != list(range(len(stages_of))) or len(set(stages_of.values())) != 1:
            raise ValueError(
                f"device_of_stage {self.device_of_stage} must give every device from 0 on "
                "the same number of stages"
            )
        if len(self.in_flight_S) != self.num_stages or min(self.in_flight_S) < 0:
            raise ValueError(f"in_flight_S {self.in_flight_S} needs {self.num_stages} counts >= 0")
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches {self.num_microbatches} must be at least 1")

    def _check_layout_rules(self) -> None:
        fewest = self.min_layers_per_stage
        if fewest not in (0, 1):
            raise ValueError(f"min_layers_per_stage {fewest} must be 0 or 1")
        if fewest * self.num_stages > self.num_layers:
            raise ValueError(
                f"{self.num_layers} layers cannot give each of {self.num_stages} stages a layer"
            )
        fixed = self.fixed_layout
        if fixed is None:
            return
        if len(fixed) != self.num_stages or sum(fixed) != self.num_layers or min(fixed) < fewest:
            raise ValueError(
                f"fixed_layout {fixed} must place {self.num_layers} layers on {self.num_stages} "
                f"stages, at least {fewest} on each"
            )

    def _check_sums_are_exact(self) -> None:
        most_in_flight = max(self.in_flight_S)
        largest = (
            self.num_layers * int(self.static_bytes_R.max())
            + self.num_stages * int(self.fixed_bytes_S.max())
            + self.num_layers * most_in_flight * int(self.saved_bytes_RO.max())
            + self.num_stages * most_in_flight * int(self.fixed_saved_bytes_S.max())
            + int(self.transient_bytes_RO.max())
        )
        if largest > LARGEST_BYTES:
            raise ValueError(f"a device could need {largest} bytes, sums must stay below 2^52")
