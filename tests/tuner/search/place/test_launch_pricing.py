"""Seconds under static dispatch are those of a mean launch, not of the engine's own table."""

import json
from pathlib import Path

import numpy as np
import pytest

from solvers.placement.balance.check import objective
from solvers.placement.balance.eplb import eplb
from solvers.placement.dispatch.case import DispatchCase
from tests.solvers.placement.dispatch.static import rank_loads
from tuner.search.place.candidates import balance_problem
from tuner.search.place.cost import (
    fit_cost,
    fit_seconds,
)
from tuner.search.place.evaluation import evaluate_loads
from tuner.search.place.evidence import split_recordings
from tuner.search.place.prices import pricing_of
from tuner.spec.place_read import read_place_spec

MODELS = Path(__file__).parents[4] / "examples" / "models"


def test_a_candidate_is_priced_by_the_mean_over_launches_whatever_the_engine_s_seed_draws(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(4)
    share_E = rng.dirichlet(np.full(64, 0.6))
    passes = [[rng.multinomial(60_000, share_E)] for _ in range(4)]
    recorded = {
        "num_logical_experts": 64,
        "top_k": 8,
        "layer_ids": [0],
        "logical_count": np.sum(passes, axis=0).tolist(),
        "passes": np.array(passes).tolist(),
    }
    (tmp_path / "recorded.json").write_text(json.dumps(recorded))
    goal = {
        "kind": "place",
        "objective": "layer_time",
        "dispatch": "static",
        "ranks": 16,
        "ranks_per_node": 4,
        "slots_per_rank": 6,
        "workloads": [{"name": "all", "path": "recorded.json"}],
    }
    pool = {"name": "h", "device": "h100-sxm", "nodes": 4, "devices_per_node": 4}
    (tmp_path / "spec.yaml").write_text(
        json.dumps(
            {
                "schema_version": 1,
                "model": str(MODELS / "olmoe-1b-7b"),
                "cluster": {"pools": [pool]},
                "goal": goal,
                "emit": [],
            }
        )
    )
    spec = read_place_spec(tmp_path / "spec.yaml")
    pricing = pricing_of(spec.model, spec.cluster, spec.goal, residuals=None, measured=None)
    assert pricing is not None
    (evidence,) = split_recordings(spec)
    placement = eplb(evidence.fit_LE, ranks=spec.ranks)
    load_PLE = evidence.fit_LE[None]

    def seconds_of(seed: int) -> float:
        case = DispatchCase(load_PLE=load_PLE, placement=placement, ranks=spec.ranks, seed=seed)
        evaluation = evaluate_loads(rank_loads(case), ranks=spec.ranks)
        return float(
            pricing.price(
                placement, evaluation, load_PLE=load_PLE, ranks=spec.ranks, token_LTK=None
            ).pass_P[0]
        )

    tables = np.array([seconds_of(1000 + seed) for seed in range(64)])
    assert tables.std() > 0.01 * tables.mean()
    error = tables.std() * np.sqrt(1.0 / 64 + 1.0 / 32)
    chosen_by = fit_cost(spec, [evidence], placement, pricing, "static")
    assert chosen_by == pytest.approx(tables.mean(), abs=4.0 * error)
    (certified,) = fit_seconds(spec, [evidence], placement, pricing, "static")
    assert certified.layer_L.sum() == pytest.approx(tables.mean(), abs=4.0 * error)
    # What a placement is chosen by must not certify it.
    assert chosen_by != certified.layer_L.sum()
    unpriced = fit_cost(spec, [evidence], placement, None, "static")
    problem = balance_problem([evidence], goal=spec.goal, ranks=spec.ranks, dispatch="static")
    assert unpriced != objective(problem, placement)
    assert unpriced == pytest.approx(objective(problem, placement), rel=0.1)
