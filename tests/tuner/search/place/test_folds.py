"""Two-fold cross-validation of placement methods."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from solvers.placement.ranks import Placement
from tuner.search.place.evaluation import evaluate
from tuner.search.place.evidence import WorkloadEvidence, split_recordings
from tuner.search.place.folds import fold_costs, penalised_costs
from tuner.spec.place_read import PlaceSpec, read_place_spec


def spec_of(
    folder: Path,
    *,
    passes: int,
    counts: np.ndarray | None = None,
    judge_ratio: float = 0.5,
) -> PlaceSpec:
    rng = np.random.default_rng(1)
    if counts is None:
        counts = rng.integers(1, 90, (passes, 1, 8))
    layers, experts = counts.shape[1:]
    recorded = {
        "num_logical_experts": experts,
        "top_k": 2,
        "layer_ids": list(range(layers)),
        "logical_count": counts.sum(axis=0).tolist(),
        "passes": counts.tolist(),
    }
    (folder / "recorded.json").write_text(json.dumps(recorded))
    goal = {
        "kind": "place",
        "dispatch": "lp",
        "ranks": 4,
        "ranks_per_node": 2,
        "slots_per_rank": experts // 4 + 1,
        "judge_ratio": judge_ratio,
        "workloads": [{"name": "all", "path": "recorded.json"}],
    }
    spec = folder / "spec.yaml"
    spec.write_text(json.dumps({"schema_version": 1, "goal": goal, "emit": ["sglang"]}))
    return read_place_spec(spec)


FIXED = Placement(expert_LS=np.array([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]))


def test_every_fit_pass_is_scored_once_by_a_placement_of_the_other_half(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, passes=16)
    evidence = split_recordings(spec)
    seen: list[np.ndarray] = []

    def make(fold: Sequence[WorkloadEvidence]) -> Mapping[str, Placement]:
        (one,) = fold
        seen.append(one.holdout_PLE)
        other_PLE = evidence[0].whole_PLE[:8]
        together = one.fit_LE * one.num_fit_passes + one.holdout_PLE.sum(axis=0)
        assert np.allclose(together, other_PLE.sum(axis=0))
        return {"fixed": FIXED}

    cost_P = fold_costs(spec, evidence, make, dispatch="near_lp")["fixed"]
    weighed_PLE = np.concatenate(seen)
    order = [
        int(np.abs(evidence[0].whole_PLE[:8] - one).sum(axis=(1, 2)).argmin())
        for one in weighed_PLE
    ]
    assert sorted(order) == list(range(8))
    by_hand = evaluate(FIXED, load_PLE=weighed_PLE, ranks=spec.ranks, dispatch="near_lp")
    assert np.allclose(cost_P, by_hand.imbalance_P)


def test_variance_of_a_half_does_not_depend_on_the_holdout_share(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    share_E = rng.dirichlet(np.full(32, 2.0))
    copies = 4_000
    wide = Placement(expert_LS=np.array([[*range(32), *range(4)]] * 20))
    wrong = []
    for judge_ratio in (0.2, 0.5, 0.8):
        counts = rng.multinomial(copies, share_E, size=(80, 20))
        spec = spec_of(tmp_path, passes=80, counts=counts, judge_ratio=judge_ratio)
        (one,) = split_recordings(spec)
        seen: list[WorkloadEvidence] = []

        def make(
            fold: Sequence[WorkloadEvidence], seen: list[WorkloadEvidence] = seen
        ) -> Mapping[str, Placement]:
            seen.extend(fold)
            return {"fixed": wide}

        assert not fold_costs(spec, [one], make, dispatch="near_lp", most_passes=1)
        for half in seen:
            # Independent copies: counts of n vary by n, in both means.
            passes = 1.0 / half.num_fit_passes + 1.0 / len(half.holdout_PLE)
            variance_ratio = half.variance_LE.sum() / (20 * copies * passes)
            if not 0.95 < variance_ratio < 1.35:
                wrong.append((judge_ratio, variance_ratio))
    assert not wrong


def test_no_fold_is_scored_without_time_for_a_pass_of_each(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, passes=16)
    made = {"fixed": FIXED, "again": FIXED}
    for most_passes, is_weighed in ((3, False), (4, True), (8, True)):
        by_method = fold_costs(
            spec,
            split_recordings(spec),
            lambda _: made,
            dispatch="near_lp",
            most_passes=most_passes,
        )
        assert bool(by_method) is is_weighed
        assert all(len(cost_P) == most_passes // 2 for cost_P in by_method.values())


def test_few_passes_are_not_parted(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, passes=6)
    assert (
        fold_costs(spec, split_recordings(spec), lambda _: {"fixed": FIXED}, dispatch="near_lp")
        == {}
    )


def test_a_search_must_beat_the_best_rule_by_more_than_its_error() -> None:
    rule_P = np.array([1.10, 1.20, 1.10, 1.20])
    lucky_P = rule_P + np.array([-0.09, 0.07, 0.06, -0.06])
    better_P = rule_P - np.array([0.05, 0.04, 0.05, 0.04])
    costs = penalised_costs(
        {"eplb": rule_P, "other": rule_P + 0.01, "lucky": lucky_P, "better": better_P},
        ["eplb", "other"],
    )
    assert lucky_P.mean() < rule_P.mean()
    assert costs["better"] < costs["eplb"] < min(costs["lucky"], costs["other"])
    assert costs["eplb"] == rule_P.mean()
