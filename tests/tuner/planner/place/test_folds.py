"""Methods weighed on planned passes that they did not see."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from solvers.placement.ranks import Placement
from tuner.planner.place.evidence import WorkloadEvidence, evidence_of
from tuner.planner.place.folds import fold_costs, sure_costs
from tuner.planner.place.judging import judge
from tuner.spec.place_read import PlaceSpec, read_place_spec


def spec_of(folder: Path, *, passes: int) -> PlaceSpec:
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 90, (passes, 1, 8))
    recorded = {
        "num_logical_experts": 8,
        "top_k": 2,
        "layer_ids": [0],
        "logical_count": counts.sum(axis=0).tolist(),
        "passes": counts.tolist(),
    }
    (folder / "recorded.json").write_text(json.dumps(recorded))
    goal = {
        "kind": "place",
        "dispatch": "lp",
        "ranks": 4,
        "ranks_per_node": 2,
        "slots_per_rank": 3,
        "workloads": [{"name": "all", "path": "recorded.json"}],
    }
    spec = folder / "spec.yaml"
    spec.write_text(json.dumps({"schema_version": 1, "goal": goal, "emit": ["sglang"]}))
    return read_place_spec(spec)


FIXED = Placement(expert_LS=np.array([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]))


def test_every_planned_pass_is_weighed_once_by_what_was_made_of_the_others(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, passes=16)
    evidence = evidence_of(spec)
    seen: list[np.ndarray] = []

    def make(fold: Sequence[WorkloadEvidence]) -> Mapping[str, Placement]:
        (one,) = fold
        seen.append(one.judged_PLE)
        other_PLE = evidence[0].whole_PLE[:8]
        together = one.planned_LE * one.planned_passes + one.judged_PLE.sum(axis=0)
        assert np.allclose(together, other_PLE.sum(axis=0))
        return {"fixed": FIXED}

    cost_P = fold_costs(spec, evidence, make, dispatch="near_lp")["fixed"]
    weighed_PLE = np.concatenate(seen)
    order = [
        int(np.abs(evidence[0].whole_PLE[:8] - one).sum(axis=(1, 2)).argmin())
        for one in weighed_PLE
    ]
    assert sorted(order) == list(range(8))
    by_hand = judge(FIXED, load_PLE=weighed_PLE, ranks=spec.ranks, dispatch="near_lp")
    assert np.allclose(cost_P, by_hand.imbalance_P)


def test_few_passes_are_not_parted(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, passes=6)
    assert fold_costs(spec, evidence_of(spec), lambda _: {"fixed": FIXED}, dispatch="near_lp") == {}


def test_a_search_must_beat_the_best_rule_by_more_than_its_error() -> None:
    rule_P = np.array([1.10, 1.20, 1.10, 1.20])
    lucky_P = rule_P + np.array([-0.09, 0.07, 0.06, -0.06])
    better_P = rule_P - np.array([0.05, 0.04, 0.05, 0.04])
    costs = sure_costs(
        {"eplb": rule_P, "other": rule_P + 0.01, "lucky": lucky_P, "better": better_P},
        ["eplb", "other"],
    )
    assert lucky_P.mean() < rule_P.mean()
    assert costs["better"] < costs["eplb"] < min(costs["lucky"], costs["other"])
    assert costs["eplb"] == rule_P.mean()
