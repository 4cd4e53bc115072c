"""Seconds under static dispatch are those of a mean launch, not of the engine's own table."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from solvers.placement.balance.check import LAUNCH_SEED, objective
from solvers.placement.balance.eplb import eplb
from solvers.placement.dispatch.case import DispatchCase
from tests.expect import present
from tests.solvers.placement.dispatch.static import rank_loads
from tuner.goals.place_spec import read_place_spec
from tuner.search.place.cost import evaluate_workload, fit_cost
from tuner.search.place.evaluation import Evaluation
from tuner.search.place.evidence import Split
from tuner.search.place.plan_place import state_problem
from tuner.search.place.prices import place_pool
from tuner.search.settings import SearchSettings
from tuner.spec.place import Objective

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
    known = place_pool(present(spec.cluster), spec.goal)
    problem = state_problem(spec, pool=known, settings=SearchSettings())
    pricing = present(problem.pricing)
    (evidence,) = problem.evidence
    placement = eplb(evidence.fit_LE, ranks=spec.ranks)
    load_PLE = evidence.fit_LE[None]

    def seconds_of(seed: int) -> float:
        case = DispatchCase(load_PLE=load_PLE, placement=placement, ranks=spec.ranks, seed=seed)
        load_PLG = rank_loads(case)
        ones_PL = np.ones(load_PLG.shape[:2])
        evaluation = Evaluation(copies_PLG=load_PLG, ratio_PL=ones_PL, imbalance_P=ones_PL[:, 0])
        return float(
            pricing.price(
                placement, evaluation, load_PLE=load_PLE, ranks=spec.ranks, token_LTK=None
            ).pass_P[0]
        )

    tables = np.array([seconds_of(1000 + seed) for seed in range(64)])
    assert tables.std() > 0.01 * tables.mean()
    error = tables.std() * np.sqrt(1.0 / 64 + 1.0 / 10)
    chosen_by = fit_cost(problem, placement)
    assert chosen_by == pytest.approx(tables.mean(), abs=4.0 * error)
    cost = evaluate_workload(problem, evidence, placement, split=Split.FIT, seed=LAUNCH_SEED)
    assert (
        cost.value
        == present(cost.seconds).layer_L.sum()
        == pytest.approx(tables.mean(), abs=4.0 * error)
    )
    # What a placement is chosen by must not certify it.
    assert chosen_by != cost.value
    even = spec.goal.model_copy(update={"objective": Objective.BALANCE})
    unpriced = fit_cost(replace(problem, spec=replace(spec, goal=even)), placement)
    proven = objective(problem.balance(), placement)
    assert unpriced != proven
    assert unpriced == pytest.approx(proven, rel=0.1)
