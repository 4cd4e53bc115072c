"""Seconds instead of loads: prices of expert layers on the pool that a placement's spec names.

P passes   L layers   G ranks
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from profilers.imports.link_matrix import LinkMatrix
from profilers.links.matrix import MeasuredLink, links_of
from profilers.store import read_profile
from solvers.placement.ranks import Floats, Ints, Placement, Ranks
from tuner.config.shapes import Hardware
from tuner.costs.place import (
    ExpertMachine,
    LayerSeconds,
    Reach,
    dispatch_combine_s,
    experts_s,
    layer_seconds,
    weights_s,
)
from tuner.costs.train.calibration import (
    Regime,
    Residuals,
    band_of,
    constants_of,
    kind_of_model,
)
from tuner.costs.train.columns_of import PRECISION_OF, hardware_of_pool
from tuner.costs.train.measured_profile import DTYPE_OF, MeasuredProfile
from tuner.plans.place import Band
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.lookups import Lookups, NotedPrices
from tuner.prices.ops import Prices, memory_bound
from tuner.prices.train.constants import Constants, Software
from tuner.search.nodes.node_order import read_links
from tuner.search.place.evaluation import Evaluation, active_PLG
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.model import ModelSpec
from tuner.spec.place import PlaceGoal

ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0}

PRICED_AS = "nemo"
"""Framework whose residuals price an inference engine's forward pass: grouped GEMMs of the same
libraries; no published forward pass of an engine is fitted yet."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricing:
    """A machine, with the band of its predictions."""

    machine: ExpertMachine
    band: Band
    """Band of measured over predicted seconds."""
    merges: bool
    """Dispatch sends a token once per rank and domain."""

    def price(
        self,
        placement: Placement,
        evaluation: Evaluation,
        *,
        load_PLE: Floats,
        ranks: Ranks,
        token_LTK: Ints | None,
        is_counted: bool = False,
        slow_NN: Floats | None = None,
    ) -> LayerSeconds:
        """Price passes whose rank loads are known.

        Args:
            placement: what to price.
            evaluation: its rank loads on the passes.
            load_PLE: token copies of the passes; repeated in turn where `evaluation` has more.
            ranks: with slots and speeds.
            token_LTK: sampled tokens, for a merged all-to-all.
            is_counted: loads are those of recorded passes.
            slow_NN: cost between two nodes over that of the median pair; None: links are uniform.
        """
        read_PLG, copies_PLG = evaluation.active_PLG, evaluation.copies_PLG
        if read_PLG is None:
            read_PLG = active_PLG(placement, load_PLE=load_PLE, ranks=ranks, is_counted=is_counted)
            read_PLG = np.tile(read_PLG, (len(copies_PLG) // len(load_PLE), 1, 1))
        reach = None
        nodes, node_G = range(ranks.num_nodes), ranks.node_G
        weight_XN = np.add.reduceat(copies_PLG, np.searchsorted(node_G, nodes), axis=2)
        if self.merges:
            rank_LTK = rank_of_choices(placement, token_LTK, ranks)
            reach = Reach(
                ranks=_distinct(rank_LTK),
                domains=_distinct(rank_LTK // int(self.machine.group.inside)),
            )
            touched_NL = [(node_G[rank_LTK] == node).any(axis=2).sum(axis=1) for node in nodes]
            weight_XN = np.stack(touched_NL, axis=1).astype(np.float64)
        is_even = slow_NN is None or bool((slow_NN == 1.0).all())
        seconds = layer_seconds(
            self.machine,
            copies_PLG=copies_PLG,
            active_PLG=read_PLG,
            speed_G=ranks.speed_G,
            reach=reach,
            far_ratio=1.0 if is_even or slow_NN is None else slowdown_X(slow_NN, weight_XN),
        )
        if evaluation.weights_PLG is None:
            return seconds
        sent_PL = weights_s(self.machine, evaluation.weights_PLG.max(axis=2))
        return replace(seconds, all_to_all_PL=seconds.all_to_all_PL + sent_PL)

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
            max_copies=total_L / ranks.num_ranks,
            reach=Reach(ranks=1.0, domains=1.0) if self.merges else None,
        )
        experts_L = np.maximum(by_load_L, by_weights_L)
        return np.asarray(experts_L + all_to_all_L)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacePool:
    """Prices and links of the pool of the ranks; all unknown by default."""

    pool: Pool | None = None
    hardware: Hardware | None = None
    """Rates of datasheet and collectives; None: only single links are measured."""
    constants: Constants | None = None
    prices: Prices | None = None
    band: Band = (1.0, 1.0)
    matrix: LinkMatrix | None = None
    pairs: tuple[MeasuredLink, ...] = ()
    """Links between ranks, measured by the pool's profile."""
    pairs_per_node: int = 1
    """Ranks per node of that profile."""


def place_pool(
    cluster: Cluster,
    goal: PlaceGoal,
    *,
    profile: Path | None = None,
    residuals: Residuals | None = None,
    measured: MeasuredProfile | None = None,
    lookups: Lookups | None = None,
) -> PlacePool:
    """Collect what is known of the first pool, from the spec and its profile.

    Args:
        cluster: of the spec.
        goal: of the placement.
        profile: of the pool, if any.
        residuals: that correct a datasheet; None: none.
        measured: the same profile, where it is of accelerators; None: the pool's datasheet.
        lookups: filled with the kernels whose prices are looked up.

    Raises:
        SpecError: a link matrix is of more or fewer nodes than the pool.
        ProfileUnreadableError: a profile or a link matrix is missing or damaged.
        UnknownDeviceError: no description of the pool's device.
    """
    pool = cluster.pools[0]
    known = PlacePool(
        pool=pool, matrix=read_links(cluster.model_copy(update={"pools": (pool,)})).get(pool.name)
    )
    if profile is not None:
        stored = read_profile(profile, operations=("link",))
        per_node = max(stored.header.machine.ranks_per_node, 1)
        known = replace(known, pairs=links_of(stored), pairs_per_node=per_node)
    if pool.device is None and measured is None:
        # A CPU profile: no datasheet covers what it did not measure.
        return known
    sheet = measured.sheet(pool) if measured is not None else pool.sheet
    precision = "fp8-tensorwise" if goal.quantization == "fp8" else "bf16"
    regime = Regime(
        device=sheet.name,
        generation=sheet.generation,
        precision=PRECISION_OF[precision],
        software=Software.MEGATRON_2026,
        family=PRICED_AS,
        model_kind=kind_of_model(has_experts=True),
    )
    constants = constants_of((regime,), residuals)
    hardware = hardware_of_pool(sheet, pool, precision=PRECISION_OF[precision])
    prices: Prices = DatasheetPrices(hardware=hardware, constants=constants)
    if measured is not None:
        hardware = measured.linked(hardware, constants)
        prices = measured.prices(hardware, constants, precision=precision)
    if lookups is not None:
        prices = NotedPrices(source=prices, lookups=lookups, dtype=DTYPE_OF[precision])
    band = band_of(regime, residuals).edges
    return replace(known, hardware=hardware, constants=constants, prices=prices, band=band)


def pricing_of(model: ModelSpec | None, pool: PlacePool, goal: PlaceGoal) -> Pricing | None:
    """Return the pricing of a spec; None where it names no model or no devices."""
    if model is None or pool.hardware is None or pool.constants is None or pool.prices is None:
        return None
    machine = ExpertMachine(
        model=model,
        prices=pool.prices,
        hardware=pool.hardware,
        constants=pool.constants,
        ranks=goal.ranks,
        element_bytes=ELEMENT_BYTES[goal.quantization],
        ranks_per_node=goal.ranks_per_node,
    )
    return Pricing(machine=machine, band=pool.band, merges=goal.is_merged)


def rank_of_choices(placement: Placement, token_LTK: Ints | None, ranks: Ranks) -> Ints:
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


def slowdown_X(slow_NN: Floats, weight_XN: Floats) -> Floats:
    """Return the slowdown of an all-to-all between nodes, relative to uniform links.

    The slowest node sets its time, by what it sends or receives; all nodes send equally, to each
    node by its weight. Links faster than the median gain nothing.
    """
    between_NN = 1.0 - np.eye(len(slow_NN))

    def longest_X(cost_NN: Floats) -> Floats:
        sent_XN = weight_XN @ cost_NN.T
        got_XN = weight_XN * cost_NN.sum(axis=0)
        return np.asarray(np.maximum(sent_XN, got_XN).max(axis=-1))

    uniform_X = longest_X(between_NN)
    ratio_X = longest_X(slow_NN * between_NN) / np.where(uniform_X > 0.0, uniform_X, 1.0)
    return np.where(uniform_X > 0.0, np.maximum(ratio_X, 1.0), 1.0)
