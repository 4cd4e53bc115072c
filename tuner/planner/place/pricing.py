"""Seconds instead of loads: the machine that a placement's spec names, and what it makes of ranks.

P passes   L layers   G ranks
"""

from dataclasses import dataclass

import numpy as np

from profilers.routing.recording import Recording
from solvers.placement.ranks import Floats, Placement, Ranks
from tuner.costs.analytic.calibration import Residuals, band_of, constants_of
from tuner.costs.analytic.columns_of import PRECISION_OF, hardware_of_pool
from tuner.costs.analytic.kernels import DatasheetKernels
from tuner.costs.analytic.measured_profile import MeasuredProfile
from tuner.costs.expert_layer import (
    ExpertMachine,
    LayerSeconds,
    Reach,
    layer_seconds,
    products_s,
    rest_s,
)
from tuner.devices.catalogue import find_device
from tuner.place_plan import Band
from tuner.planner.analytic.regimes import regime_of
from tuner.planner.place.judging import Judged, active_PLG
from tuner.spec.cluster import Cluster
from tuner.spec.model import ModelSpec
from tuner.spec.place import PlaceGoal

ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0}

PRICED_AS = "megatron-bridge"
"""Whose kernels an inference engine's forward pass is priced as: grouped products of the same
libraries; no published forward pass of an engine is fitted yet."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricing:
    """A machine, with the band of its predictions."""

    machine: ExpertMachine
    band: Band
    """Measured over predicted seconds."""
    decodes: bool
    context_tokens: float
    merges: bool
    """Dispatch sends a token once to each rank and domain."""

    def price(
        self,
        placement: Placement,
        judged: Judged,
        *,
        load_PLE: Floats,
        ranks: Ranks,
        recording: Recording,
    ) -> LayerSeconds:
        """Price the passes that were judged."""
        reach = _reach(placement, recording, self.machine, ranks) if self.merges else None
        return layer_seconds(
            self.machine,
            copies_PLG=judged.copies_PLG / ranks.speed_G,
            active_PLG=active_PLG(placement, load_PLE=load_PLE, ranks=ranks),
            reach=reach,
        )

    def products_s(self, rows_N: Floats, active_N: Floats) -> Floats:
        """Seconds of the expert products alone, of ranks with so many rows and active experts."""
        return products_s(self.machine, copies=rows_N, active=active_N)

    def whole_pass_s(self, *, tokens: float) -> float:
        """Seconds of a pass without routed experts."""
        return rest_s(
            self.machine,
            tokens=tokens,
            context_tokens=self.context_tokens,
            decodes=self.decodes,
        )

    @property
    def active_load(self) -> float:
        """Token copies that take as long as reading one expert's weights."""
        machine = self.machine
        weights_s = float(np.max(machine.kernels.memory_bound_s(machine.expert_bytes)))
        many = 65_536.0
        moe = machine.moe
        inner = (2.0 if machine.model.ffn_is_gated else 1.0) * moe.expert_ffn_size
        products = machine.kernels.experts_s(
            1.0,
            many,
            hidden=float(machine.model.hidden_size),
            width=float(moe.expert_ffn_size),
            inner=inner,
        )
        return weights_s / (float(np.max(products.forward_s)) / many)

    def bound_s(self, *, load_PLE: Floats, ranks: Ranks) -> float:
        """Seconds of all layers, mean over passes, that no placement goes below.

        The busiest rank has at least the mean copies and the fullest at least the mean active
        experts. Time at given copies is least over how many experts share them, and grows with
        copies; reading weights grows with active experts.
        """
        total_PL = load_PLE.sum(axis=2)
        mean_PL = total_PL / ranks.speed_G.sum()
        shape = (len(load_PLE), load_PLE.shape[1], 1)
        by_load = np.min(
            [
                self._even(mean_PL.reshape(shape), np.full(shape, float(active))).pass_P
                for active in range(1, int(ranks.slots_G.max()) + 1)
            ],
            axis=0,
        )
        active_PL = -np.expm1(-load_PLE).sum(axis=2) / ranks.num_ranks
        by_weights = self._even(
            np.minimum(mean_PL, active_PL).reshape(shape), active_PL.reshape(shape)
        ).pass_P
        return float(np.maximum(by_load, by_weights).mean())

    def _even(self, copies_PLG: Floats, active: Floats) -> LayerSeconds:
        least = Reach(ranks=1.0, domains=1.0) if self.merges else None
        return layer_seconds(self.machine, copies_PLG=copies_PLG, active_PLG=active, reach=least)


def pricing_of(
    model: ModelSpec | None,
    cluster: Cluster | None,
    goal: PlaceGoal,
    *,
    residuals: Residuals | None,
    measured: MeasuredProfile | None,
) -> Pricing | None:
    """Return the machine of a spec, None where it names no model or no cluster.

    Raises:
        UnknownDeviceError: no description of the pool's device.
    """
    if model is None or cluster is None:
        return None
    pool = cluster.pools[0]
    sheet = measured.sheet(pool) if measured is not None else find_device(pool.device or "")
    precision = "fp8-tensorwise" if goal.quantization == "fp8" else "bf16"
    regime = regime_of((PRICED_AS,), sheet, precision=precision)
    constants = constants_of((regime,), residuals)
    hardware = hardware_of_pool(sheet, pool, precision=PRECISION_OF[precision])
    kernels = DatasheetKernels(hardware=hardware, constants=constants)
    if measured is not None:
        hardware = measured.linked(hardware, constants)
    machine = ExpertMachine(
        model=model,
        kernels=kernels
        if measured is None
        else measured.kernels(hardware, constants, precision=precision),
        hardware=hardware,
        constants=constants,
        ranks=goal.ranks,
        element_bytes=ELEMENT_BYTES[goal.quantization],
    )
    return Pricing(
        machine=machine,
        band=band_of(regime, residuals),
        decodes=goal.phase == "decode",
        context_tokens=float(goal.context_tokens),
        merges=goal.exchange == "merged",
    )


def _reach(
    placement: Placement, recording: Recording, machine: ExpertMachine, ranks: Ranks
) -> Reach:
    """Count the ranks and domains that sampled tokens touch; each replica alike where several."""
    tokens_LTK = recording.token_LTK
    if tokens_LTK is None:
        raise ValueError("a merged exchange needs sampled tokens")
    inside = int(machine.group.inside)
    num_layers, num_experts = len(tokens_LTK), recording.num_experts
    rank_LE = np.zeros((num_layers, num_experts), dtype=np.int64)
    rows = np.arange(num_layers)[:, None]
    # Of several replicas the last slot's stands for all: a token goes to one of them.
    rank_LE[rows, placement.expert_LS] = ranks.rank_S[None, :]
    rank_LTK = np.take_along_axis(rank_LE[:, None, :], tokens_LTK.astype(np.int64), axis=2)
    return Reach(ranks=_distinct(rank_LTK), domains=_distinct(rank_LTK // inside))


def _distinct(place_LTK: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
    ordered = np.sort(place_LTK, axis=2)
    return float(1.0 + (ordered[:, :, 1:] != ordered[:, :, :-1]).sum(axis=2).mean())
