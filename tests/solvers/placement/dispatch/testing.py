"""Cases for tests and benchmarks of dispatch rules, and draws of their loads."""

from dataclasses import replace
from typing import Final

import numpy as np

from solvers.placement.dispatch import launches
from solvers.placement.dispatch.case import DispatchCase, split_loads
from solvers.placement.dispatch.least_loaded import LeastLoaded, plan
from solvers.placement.dispatch.sampling import PASS_BY_PASS, expected_loads, split_of
from solvers.placement.ranks import Floats, Placement, Ranks
from tests.solvers.placement.dispatch import dynamic, static

RULES: Final = ("even", "static", "dynamic", "lp", "least_loaded")


def rank_loads(rule: str, case: DispatchCase) -> Floats:
    """Return the token copies of each rank under a rule as engines and papers state it."""
    if rule == "static":
        return static.rank_loads(case)
    if rule == "dynamic":
        return dynamic.rank_loads(case)
    if rule == "least_loaded":
        return plan(case, knobs=LeastLoaded()).load_PLG
    return expected_loads(rule, case)


def sample_case(
    *,
    passes: int,
    layers: int,
    experts: int,
    ranks: Ranks,
    seed: int,
    tokens: float = 200.0,
) -> DispatchCase:
    """Return skewed whole-number loads and a shuffled placement whose spare slots hold hot experts.

    Loads are Poisson draws around a log-normal mean (sigma 0.8) per layer and expert.
    """
    rng = np.random.default_rng(seed)
    mean_LE = tokens * np.exp(rng.normal(0.0, 0.8, (layers, experts)))
    load_PLE = rng.poisson(mean_LE, (passes, layers, experts)).astype(np.float64)
    spare = ranks.num_slots - experts
    rows = []
    for mean_E in mean_LE:
        hottest = np.argsort(-mean_E)
        row = np.concatenate((np.arange(experts), np.resize(hottest[: max(spare, 1)], spare)))
        rows.append(rng.permutation(row))
    return DispatchCase(
        load_PLE=load_PLE,
        placement=Placement(expert_LS=np.array(rows, dtype=np.int64)),
        ranks=ranks,
        seed=seed,
    )


def sampled_loads(rule: str, case: DispatchCase) -> Floats:
    """Return one draw of the token copies of each rank, `[P][L][G]`.

    Tokens of `even` take replicas in turn and are not drawn.
    """
    passes = [replace(case, load_PLE=load_LE[None]) for load_LE in case.load_PLE]
    if rule == "static":
        splits = [*launches.splits(case, launches=1)]
    else:
        splits = [split_of(rule)(one) for one in (passes if rule in PASS_BY_PASS else passes[:1])]
    if rule == "even":
        return split_loads(case, splits[0])
    rng = np.random.default_rng(case.seed)
    draws = [draw(one, splits[number % len(splits)], rng) for number, one in enumerate(passes)]
    return np.stack(draws)


def draw(case: DispatchCase, share_LS: Floats, rng: np.random.Generator) -> Floats:
    """Return the token copies of each rank, `[L][G]`, of one draw of one pass by these shares."""
    tokens_LE = np.rint(case.load_PLE[0]).astype(np.int64)
    is_split_LE = case.copies_LE > 1
    is_split_LS = np.take_along_axis(is_split_LE, case.placement.expert_LS, axis=1)
    load_LG: Floats = split_loads(case, (~is_split_LS).astype(np.float64))[0]
    split_LEG = np.zeros((case.num_layers, case.num_experts, case.ranks.num_ranks))
    layer_L1 = np.arange(case.num_layers)[:, None]
    share_LS = np.maximum(share_LS.reshape(is_split_LS.shape), 0.0)
    np.add.at(split_LEG, (layer_L1, case.placement.expert_LS, case.ranks.rank_S), share_LS)
    for layer, is_split_E in enumerate(is_split_LE):
        share_EG = split_LEG[layer, is_split_E]
        share_EG /= share_EG.sum(axis=1, keepdims=True)
        load_LG[layer] += rng.multinomial(tokens_LE[layer, is_split_E], share_EG).sum(axis=0)
    return load_LG
