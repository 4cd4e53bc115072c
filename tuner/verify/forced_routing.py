"""Recorded routing in trials of Megatron-LM: random routing with the recorded imbalance.

An untrained router routes at random, and a few steps do not train it, so a short trial does not
show the imbalance that a plan was priced with. Megatron-LM can force it:

    --moe-router-force-biased=-s        logits n_te + b_e; n ~ N(0, 1) for every token, b ~ N(0, s)
                                        once a layer, the same on all ranks
    --moe-router-force-load-balancing   the same with b = 0

s is chosen so that the most-loaded expert rank's load over the mean, expected over the draws of b,
equals that of the recording at the decision's expert degree. Which experts are hot, how layers
differ and how loads change from pass to pass are not reproduced. (A positive value would draw b
anew in every forward pass, so that recomputation would route differently from the first pass.)

    p_e   expert e is among the k largest: integral over x of phi(x - b_e) P(N_e(x) < k); N_e(x) is
          the number of other experts above x, its mean and variance the sums of Phi(b_j - x) and
          of Phi(b_j - x) Phi(x - b_j), taken for normal with a correction of 1/2 for whole numbers
    d     expert ranks of E / d consecutive experts;  most-loaded = d max_r sum_{e on r} p_e / k

Letters: B draws of biases, E experts, X places of the integral, R ranks. Source of the flags:
TransformerConfig, moe_utils.py (`apply_biased_logits`) and router.py of core_v0.18.0 and
core_v0.19.0, github.com/NVIDIA/Megatron-LM; arguments of those releases are made from that class.
They exist from core 0.17 on, so the target `megatron-lm-0.16` gets none. The error of p is
compared with counted draws in tests/tuner/verify/test_forced_routing.py.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.config.train import TrainDecision
from tuner.costs.train.expert_imbalance import expert_imbalances
from tuner.engines.capabilities import programs
from tuner.plans.train import Plan
from tuner.spec.routing import RoutingRecord

TARGET: Final = "megatron-lm"
"""The target whose releases all have both flags."""
REFERENCE: Final = "reference"

DRAWS: Final = 32
LARGEST_DEVIATION: Final = 8.0
"""Of the biases: at 8 times the spread of the tokens' own logits the same k experts always win."""
HALVINGS: Final = 14
"""Bisection steps for the deviation: to 5e-4."""
GRID: Final = 256
"""Places where the sums over all experts are taken."""
LEAST_RATIO: Final = 1.005
"""Below this, routing counts as balanced."""

_PLACES_X: Final[Floats] = np.linspace(-5.0, 5.0, 65)
_TABLE: Final[Floats] = np.linspace(-8.0, 8.0, 4097)
_DENSITY: Final[Floats] = np.exp(-(_TABLE**2) / 2.0) / np.sqrt(2.0 * np.pi)
_CUMULATED: Final[Floats] = np.concatenate(
    ([0.0], np.cumsum((_DENSITY[1:] + _DENSITY[:-1]) / 2.0 * np.diff(_TABLE)))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedRouting:
    """Arguments that force a trial's routing, and a note for its record."""

    arguments: tuple[str, ...] = ()
    note: str = ""


def forced_routing(
    plan: Plan, decision: TrainDecision, record: RoutingRecord | None
) -> ForcedRouting:
    """Return the arguments that give a trial the imbalance of the plan's recording.

    Args:
        plan: whose goal names the phase of the recording.
        decision: to launch.
        record: that the plan was priced with; None if it assumed balance, then the router is free.

    Raises:
        SpecError: the recording is of another model.
    """
    moe, workload_routing = plan.model.moe, plan.goal.routing
    if record is None or moe is None or workload_routing is None:
        return ForcedRouting()
    if TARGET not in plan.emit:
        engine = programs(plan.emit)[0]
        note_text = f"expert loads are the router's own: {engine} cannot force recorded loads"
        # The reference step routes as recorded by itself.
        return ForcedRouting(note="" if engine == REFERENCE else note_text)
    degree = decision.expert_model_parallel_size
    wanted, _ = expert_imbalances(plan.model, record, workload_routing.phase).of_degree(degree)
    if wanted < LEAST_RATIO:
        return ForcedRouting(
            arguments=("--moe-router-force-load-balancing",),
            note=f"balanced routing forced: {degree} expert ranks are as balanced as recorded",
        )
    deviation, reached = bias_deviation(
        wanted, num_experts=moe.num_experts, top_k=moe.top_k, degree=degree
    )
    return ForcedRouting(
        arguments=(f"--moe-router-force-biased=-{deviation:.4f}",),
        note=(
            f"random routing forced, the most-loaded of {degree} expert ranks {reached:.2f} times"
            f" the mean (recorded: {wanted:.2f}); which experts are hot is not reproduced"
        ),
    )


@cache
def bias_deviation(
    wanted: float, *, num_experts: int, top_k: int, degree: int
) -> tuple[float, float]:
    """Return the deviation of the biases, and the imbalance that it reaches.

    Args:
        wanted: most-loaded expert rank's load over the mean.
        num_experts: of a layer.
        top_k: experts per token.
        degree: expert ranks; divides the experts.
    """
    draw_BE = np.random.default_rng(0).standard_normal((DRAWS, num_experts))

    def reached(deviation: float) -> float:
        share_BE = expert_shares(deviation * draw_BE, top_k=top_k)
        load_BR = share_BE.reshape(DRAWS, degree, -1).sum(axis=2)
        return float(degree * load_BR.max(axis=1).mean())

    low, high = 0.0, LARGEST_DEVIATION
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if reached(middle) < wanted else (low, middle)
    return high, reached(high)


def expert_shares(bias_BE: Floats, *, top_k: int) -> Floats:
    """Return the expected share of the token copies that each expert gets; rows sum to 1."""
    if top_k >= bias_BE.shape[1]:
        return np.full_like(bias_BE, 1.0 / bias_BE.shape[1])
    chosen_BE = np.empty_like(bias_BE)
    for row, bias_E in enumerate(bias_BE):
        # [X, E]: places around the expert's own bias, so that each integral covers its own mass.
        place_XE = bias_E[None, :] + _PLACES_X[:, None]
        chosen_BE[row] = _chosen(place_XE, bias_E, top_k=top_k)
    share_BE: Floats = chosen_BE / chosen_BE.sum(axis=1, keepdims=True)
    return share_BE


def _chosen(place_XE: Floats, bias_E: Floats, *, top_k: int) -> Floats:
    """Integrate over an expert's own logit that fewer than k others are above it."""
    # One grid for the sums over all experts, read at the places of each.
    grid_G = np.linspace(place_XE.min(), place_XE.max(), GRID)
    above_GE = _phi(bias_E[None, :] - grid_G[:, None])
    mean_XE = np.interp(place_XE, grid_G, above_GE.sum(axis=1))
    variance_XE = np.interp(place_XE, grid_G, (above_GE * (1.0 - above_GE)).sum(axis=1))
    own_X = _phi(-_PLACES_X)[:, None]
    mean_XE = mean_XE - own_X
    variance_XE = np.maximum(variance_XE - own_X * (1.0 - own_X), 1e-9)
    wins_XE = _phi((top_k - 0.5 - mean_XE) / np.sqrt(variance_XE))
    weight_X = np.interp(_PLACES_X, _TABLE, _DENSITY)
    result: Floats = (weight_X[:, None] * wins_XE).sum(axis=0)
    return result


def _phi(x: Floats) -> Floats:
    """Return the normal distribution function, to 1e-6."""
    result: Floats = np.interp(x, _TABLE, _CUMULATED)
    return result
