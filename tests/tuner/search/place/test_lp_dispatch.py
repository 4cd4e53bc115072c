"""Plans for the linear program behind near replicas, which an even split does not bound."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from solvers.placement.balance.eplb import eplb
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.sampling import expected_loads
from solvers.placement.ranks import Floats, Placement, Ranks
from tests.expect import present
from tests.solvers.placement.balance.testing import families
from tuner.goals.place_plan import place
from tuner.plans.place import PlacePlan
from tuner.search.place.evaluation import evaluate, scoring_passes
from tuner.search.place.evidence import split_recordings
from tuner.search.place.problem import eplb_baseline
from tuner.search.place.verdict import gain_noise

GOAL = """schema_version: 1
goal:
  kind: place
  objective: balance
  dispatch: lp
  ranks: 8
  ranks_per_node: 2
  slots_per_rank: 9
  workloads: [{name: skewed, path: skewed.json}]
emit: [sglang]
"""
GOAL += f"model: {Path(__file__).parents[4] / 'examples' / 'models' / 'deepseek-v2-lite'}\n"
MACHINE = """\
cluster:
  pools: [{name: h100, device: h100-sxm, nodes: 4, devices_per_node: 2}]
"""


def plan_of_skewed_passes(folder: Path, goal: str = GOAL) -> PlacePlan:
    """Two layers of 64 experts: a steady part of the load is skewed, another varies by pass."""
    rng = np.random.default_rng(1)
    steady_LE = rng.gamma(0.5, size=(2, 64))
    steady_LE /= steady_LE.sum(axis=1, keepdims=True)
    passes = [
        [
            rng.multinomial(8192, 0.7 * share_E + 0.3 * rng.dirichlet(np.full(64, 0.3)))
            for share_E in steady_LE
        ]
        for _ in range(8)
    ]
    (folder / "skewed.json").write_text(
        json.dumps(
            {
                "num_logical_experts": 64,
                "top_k": 6,
                "layer_ids": [1, 2],
                "logical_count": np.sum(passes, axis=0).tolist(),
                "passes": np.array(passes).tolist(),
            }
        )
    )
    spec = folder / "spec.yaml"
    spec.write_text(goal)
    return place(spec, time_limit_s=1.0).plan


def test_the_linear_program_can_load_a_rank_more_than_an_even_split_of_far_tokens() -> None:
    experts = [[0, 4, 0, 0, 3, 2, 4, 2, 1, 1, 1, 4]]
    case = DispatchCase(
        load_PLE=np.array([[[112.0, 40.0, 25.0, 13.0, 85.0]]]),
        placement=Placement(expert_LS=np.array(experts)),
        ranks=Ranks(slots_G=np.full(6, 2), node_G=np.arange(6) // 2, speed_G=np.ones(6)),
    )
    assert expected_loads("near_lp", case).max() > 1.15 * expected_loads("near_dynamic", case).max()


def test_a_plan_under_the_linear_program_is_scored_by_it_and_is_not_above_eplb(
    tmp_path: Path,
) -> None:
    plan = plan_of_skewed_passes(tmp_path)
    certificate = plan.certificate
    assert certificate.dispatch == "near_lp"
    assert certificate.bound == pytest.approx(1.0)
    by_eplb = [one.objective for one in plan.alternatives if one.method.startswith("eplb")]
    assert by_eplb or certificate.method.startswith("eplb")
    assert all(present(certificate.objective) <= value for value in by_eplb)
    # Of the four passes planned from, as the plan's objective says it.
    recording = json.loads((tmp_path / "skewed.json").read_text())
    case = DispatchCase(
        load_PLE=np.array(recording["passes"][:4], dtype=np.float64),
        placement=Placement(expert_LS=np.array(present(plan.decision).physical_to_logical)),
        ranks=Ranks(slots_G=np.full(8, 9), node_G=np.arange(8) // 2, speed_G=np.ones(8)),
    )
    load_PLG = expected_loads("near_lp", case)
    ratio = load_PLG.max(axis=2).sum(axis=1) / load_PLG.mean(axis=2).sum(axis=1)
    assert present(certificate.objective) == pytest.approx(ratio.mean(), rel=1e-3)


def test_replicas_on_one_node_stand_beside_what_searches_find(tmp_path: Path) -> None:
    plan_of_time = plan_of_skewed_passes(
        tmp_path, GOAL.replace("objective: balance", "objective: layer_time") + MACHINE
    )
    for plan, found in (
        (plan_of_skewed_passes(tmp_path), {"local_search"}),
        (plan_of_time, {"local_search", "balance of copies"}),
    ):
        methods = {plan.certificate.method, *(one.method for one in plan.alternatives)}
        assert methods >= {"replicas on one node", *found}


def grouped_goal(folder: Path, seed: int) -> Path:
    """Two layers of 128 experts in 8 groups; counts scatter as in the recordings of 256 experts."""
    rng = np.random.default_rng(seed)
    (load_LE,) = families(rng, num_families=1, num_layers=2, num_experts=128)
    share_LE = load_LE / load_LE.sum(axis=1, keepdims=True)
    passes = np.array(
        [
            [rng.multinomial(16 * 128 * 8, rng.dirichlet(1600.0 * share_E)) for share_E in share_LE]
            for _ in range(32)
        ]
    )
    recorded = {
        "num_logical_experts": 128,
        "top_k": 8,
        "layer_ids": [0, 1],
        "logical_count": passes.sum(axis=0).tolist(),
        "passes": passes.tolist(),
    }
    goal = {
        "kind": "place",
        "dispatch": "lp",
        "ranks": 16,
        "ranks_per_node": 4,
        "slots_per_rank": 9,
        "expert_groups": 8,
        "workloads": [{"name": "all", "path": "recorded.json"}],
    }
    (folder / "recorded.json").write_text(json.dumps(recorded))
    spec = folder / "spec.yaml"
    spec.write_text(json.dumps({"schema_version": 1, "goal": goal, "emit": ["sglang"]}))
    return spec


def near_lp_P(placement: Placement, load_PLE: Floats, ranks: Ranks) -> Floats:
    return evaluate(placement, load_PLE=load_PLE, ranks=ranks, dispatch="near_lp").imbalance_P


@pytest.mark.slow
def test_a_plan_for_the_linear_program_is_above_eplb_s_rule_by_noise_at_most(
    tmp_path: Path,
) -> None:
    above, chosen, by_policy = [], [], set()
    for seed in range(6):
        made = place(grouped_goal(tmp_path, seed), time_limit_s=1.0)
        (evidence,) = split_recordings(made.spec)
        ranks = made.spec.ranks
        rule = eplb_baseline((evidence,), ranks=ranks, groups=8, dispatch="near_lp")
        fit_PLE = scoring_passes(evidence, "near_lp")
        policy_of = {
            near_lp_P(placement, fit_PLE, ranks).mean(): name
            for name, placement in (
                ("eplb", eplb(evidence.fit_LE, ranks=ranks)),
                ("eplb hierarchical", eplb(evidence.fit_LE, ranks=ranks, num_groups=8)),
            )
        }
        assert rule.name == policy_of[min(policy_of)], (seed, policy_of)
        by_policy.add(rule.name)
        placement = Placement(expert_LS=np.array(present(made.plan.decision).physical_to_logical))
        rule_P = near_lp_P(rule.placement, evidence.holdout_PLE, ranks)
        after_P = near_lp_P(placement, evidence.holdout_PLE, ranks)
        chosen.append((made.plan.certificate.method, after_P.mean(), rule_P.mean()))
        if after_P.mean() > rule_P.mean() * (1.0 + gain_noise(rule_P, after_P, counted=math.inf)):
            above.append((seed, *chosen[-1]))
    assert not above
    # Beyond single cases: on average it is below the rule, and the cases tell policies apart.
    assert np.mean([plan for _, plan, _ in chosen]) < np.mean([rule for _, _, rule in chosen])
    assert by_policy == {"eplb", "eplb hierarchical"}, chosen
