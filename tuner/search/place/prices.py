"""Seconds instead of loads: prices of expert layers on the pool that a placement's spec names.

P passes   L layers   G ranks
"""

from dataclasses import dataclass, replace

import numpy as np

from solvers.placement.ranks import Floats, Ints, Placement, Ranks
from tuner.costs.lookups import Lookups, NotedPrices
from tuner.costs.ops import Prices, memory_bound
from tuner.costs.place.expert_layer import (
    ExpertMachine,
    LayerSeconds,
    Reach,
    dispatch_combine_s,
    experts_s,
    grouped_gemms_s,
    layer_seconds,
    rest_s,
    weights_s,
)
from tuner.costs.prices.datasheet import DatasheetPrices
from tuner.costs.train.calibration import Regime, Residuals, band_of, constants_of
from tuner.costs.train.columns_of import PRECISION_OF, hardware_of_pool
from tuner.costs.train.constants import Constants
from tuner.costs.train.measured_profile import DTYPE_OF, MeasuredProfile
from tuner.costs.train.shapes import Hardware
from tuner.plans.place import Band
from tuner.search.place.evaluation import Evaluation, active_PLG
from tuner.search.place.links import slowdown_X
from tuner.search.train.regimes import regime_of
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.model import ModelSpec
from tuner.spec.place import PlaceGoal

ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0}

PRICED_AS = "megatron-bridge"
"""Framework whose residuals price an inference engine's forward pass: grouped GEMMs of the same
libraries; no published forward pass of an engine is fitted yet."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricing:
    """A machine, with the band of its predictions."""

    machine: ExpertMachine
    band: Band
    """Band of measured over predicted seconds."""
    decodes: bool
    context_tokens: float
    merges: bool
    """Dispatch sends a token once per rank and domain."""
    slow_NN: Floats | None = None
    """Cost between two nodes over that of the median pair, where links differ."""

    def price(
        self,
        placement: Placement,
        evaluation: Evaluation,
        *,
        load_PLE: Floats,
        ranks: Ranks,
        token_LTK: Ints | None,
        is_counted: bool = False,
    ) -> LayerSeconds:
        """Price passes whose rank loads are known.

        Args:
            placement: what to price.
            evaluation: its rank loads on the passes.
            load_PLE: token copies of the passes; repeated in turn where `evaluation` has more.
            ranks: with slots and speeds.
            token_LTK: sampled tokens, for a merged all-to-all.
            is_counted: loads are those of recorded passes.
        """
        reach = None
        if self.merges:
            reach = _reach(placement, token_LTK, self.machine, ranks)
        read_PLG = evaluation.active_PLG
        if read_PLG is None:
            read_PLG = active_PLG(placement, load_PLE=load_PLE, ranks=ranks, is_counted=is_counted)
            repeats = len(evaluation.copies_PLG) // len(load_PLE)
            read_PLG = np.tile(read_PLG, (repeats, 1, 1))
        seconds = layer_seconds(
            self.machine,
            copies_PLG=evaluation.copies_PLG,
            active_PLG=read_PLG,
            speed_G=ranks.speed_G,
            reach=reach,
            far_ratio=self._far_ratio(placement, evaluation, ranks=ranks, token_LTK=token_LTK),
        )
        if evaluation.weights_PLG is None:
            return seconds
        sent_PL = weights_s(self.machine, evaluation.weights_PLG.max(axis=2))
        return replace(seconds, all_to_all_PL=seconds.all_to_all_PL + sent_PL)

    def _far_ratio(
        self, placement: Placement, evaluation: Evaluation, *, ranks: Ranks, token_LTK: Ints | None
    ) -> Floats | float:
        """Slowdown of traffic between domains from non-uniform links, by pass and layer."""
        if self.slow_NN is None or (self.slow_NN == 1.0).all():
            return 1.0
        if not self.merges:
            first_N = np.searchsorted(ranks.node_G, np.arange(ranks.num_nodes))
            return slowdown_X(self.slow_NN, np.add.reduceat(evaluation.copies_PLG, first_N, axis=2))
        rank_LTK = _rank_of_choices(placement, token_LTK, ranks)
        touched_LN = np.stack(
            [
                (ranks.node_G[rank_LTK] == node).any(axis=2).sum(axis=1)
                for node in range(ranks.num_nodes)
            ],
            axis=1,
        )
        return slowdown_X(self.slow_NN, touched_LN.astype(np.float64))

    def grouped_gemms_s(self, rows_N: Floats, active_N: Floats) -> Floats:
        """Seconds of the grouped GEMMs of ranks with so many rows and active experts."""
        return grouped_gemms_s(self.machine, copies=rows_N, active=active_N)

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
        """Token copies whose GEMMs take as long as reading one expert's weights."""
        machine = self.machine
        weights_s = float(np.max(machine.prices.seconds(memory_bound(machine.expert_bytes))))
        many = 65_536.0
        computed_s = float(np.max(machine.prices.seconds(machine.grouped_gemms(1.0, many))))
        return weights_s / (computed_s / many)

    def bound_L(self, *, load_LE: Floats, ranks: Ranks) -> Floats:
        """Lower bound on the seconds of each layer of a pass, replicas shared evenly.

        Some rank has at least its speed's share of all copies, and some rank at least that share
        of all active experts, with at least as many copies. Time grows with copies; the minimum is
        taken over the number of experts that share them. In the all-to-all some rank has at least
        the mean, and every token reaches at least one rank.
        """
        machine = self.machine
        total_L = load_LE.sum(axis=1)
        active_L = -np.expm1(-load_LE).sum(axis=1)
        some = [
            (float(speed), float(speed / ranks.speed_G.sum())) for speed in np.unique(ranks.speed_G)
        ]
        by_load_L = np.min(
            [
                experts_s(machine, copies=ratio * total_L, active=np.full_like(total_L, active))
                / speed
                for speed, ratio in some
                for active in range(1, int(ranks.slots_G.max()) + 1)
            ],
            axis=0,
        )
        by_weights_L = np.min(
            [
                experts_s(machine, copies=ratio * active_L, active=ratio * active_L) / speed
                for speed, ratio in some
            ],
            axis=0,
        )
        all_to_all_L = dispatch_combine_s(
            machine,
            most=total_L / ranks.num_ranks,
            reach=Reach(ranks=1.0, domains=1.0) if self.merges else None,
        )
        experts_L = np.maximum(by_load_L, by_weights_L)
        return np.asarray(experts_L + all_to_all_L)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolHardware:
    """A pool as numbers, by datasheet."""

    regime: Regime
    precision: str
    hardware: Hardware
    constants: Constants


def pool_hardware(
    pool: Pool,
    goal: PlaceGoal,
    *,
    residuals: Residuals | None,
    measured: MeasuredProfile | None,
) -> PoolHardware:
    """Return a pool as numbers.

    Raises:
        UnknownDeviceError: no description of the pool's device.
    """
    sheet = measured.sheet(pool) if measured is not None else pool.sheet
    precision = "fp8-tensorwise" if goal.quantization == "fp8" else "bf16"
    regime = regime_of((PRICED_AS,), sheet, precision=precision, has_experts=True)
    return PoolHardware(
        regime=regime,
        precision=precision,
        hardware=hardware_of_pool(sheet, pool, precision=PRECISION_OF[precision]),
        constants=constants_of((regime,), residuals),
    )


def pricing_of(
    model: ModelSpec | None,
    cluster: Cluster | None,
    goal: PlaceGoal,
    *,
    residuals: Residuals | None,
    measured: MeasuredProfile | None,
    lookups: Lookups | None = None,
) -> Pricing | None:
    """Return the pricing of a spec; None where it names no model or no cluster.

    Args:
        model: of the spec.
        cluster: of the spec.
        goal: of the spec.
        residuals: that correct a datasheet; None: none.
        measured: profile of the pool; None: its datasheet.
        lookups: filled with the kernels whose prices are looked up.

    Raises:
        UnknownDeviceError: no description of the pool's device.
    """
    if model is None or cluster is None:
        return None
    own = pool_hardware(cluster.pools[0], goal, residuals=residuals, measured=measured)
    regime, hardware, constants = own.regime, own.hardware, own.constants
    precision = own.precision
    prices: Prices = DatasheetPrices(hardware=hardware, constants=constants)
    if measured is not None:
        hardware = measured.linked(hardware, constants)
        prices = measured.prices(hardware, constants, precision=precision)
    if lookups is not None:
        prices = NotedPrices(own=prices, lookups=lookups, dtype=DTYPE_OF[precision])
    machine = ExpertMachine(
        model=model,
        prices=prices,
        hardware=hardware,
        constants=constants,
        ranks=goal.ranks,
        element_bytes=ELEMENT_BYTES[goal.quantization],
        ranks_per_node=goal.ranks_per_node,
    )
    return Pricing(
        machine=machine,
        band=band_of(regime, residuals).edges,
        decodes=goal.phase == "decode",
        context_tokens=float(goal.context_tokens),
        merges=goal.is_merged,
    )


def _reach(
    placement: Placement, token_LTK: Ints | None, machine: ExpertMachine, ranks: Ranks
) -> Reach:
    """Count the ranks and domains that sampled tokens touch."""
    inside = int(machine.group.inside)
    rank_LTK = _rank_of_choices(placement, token_LTK, ranks)
    return Reach(ranks=_distinct(rank_LTK), domains=_distinct(rank_LTK // inside))


def _rank_of_choices(placement: Placement, token_LTK: Ints | None, ranks: Ranks) -> Ints:
    """Return the rank of each choice of sampled tokens; replicas are taken round-robin."""
    if token_LTK is None:
        raise ValueError("a merged all-to-all needs sampled tokens")
    num_tokens = token_LTK.shape[1]
    rank_LTK = np.empty_like(token_LTK)
    for layer, expert_S in enumerate(placement.expert_LS):
        order_S = np.argsort(expert_S, kind="stable")
        first_E, copies_E = np.unique(expert_S[order_S], return_index=True, return_counts=True)[1:]
        chosen_TK = token_LTK[layer]
        turn_TK = np.arange(num_tokens)[:, None] % copies_E[chosen_TK]
        rank_LTK[layer] = ranks.rank_S[order_S[first_E[chosen_TK] + turn_TK]]
    return rank_LTK


def _distinct(place_LTK: Ints) -> float:
    ordered = np.sort(place_LTK, axis=2)
    return float(1.0 + (ordered[:, :, 1:] != ordered[:, :, :-1]).sum(axis=2).mean())
