"""What a plan saves, and how certain that is over several workloads."""

import json
from pathlib import Path

import numpy as np
import pytest

from tuner.goals.place_spec import read_place_spec
from tuner.search.place.cost import evaluate_workload
from tuner.search.place.plan_place import state_problem
from tuner.search.place.verdict import Gain, gain_of
from tuner.search.settings import SearchSettings


def gain_for(folder: Path, names: list[str], dispatch: str) -> Gain:
    """Several workloads of one recording, placed by EPLB on ranks with replicas."""
    rng = np.random.default_rng(4)
    share_E = rng.dirichlet(np.full(64, 0.6))
    passes = [[rng.multinomial(60_000, share_E)] for _ in range(20)]
    recorded = {
        "num_logical_experts": 64,
        "top_k": 8,
        "layer_ids": [0],
        "logical_count": np.sum(passes, axis=0).tolist(),
        "passes": np.array(passes).tolist(),
    }
    (folder / "recorded.json").write_text(json.dumps(recorded))
    goal = {
        "kind": "place",
        "dispatch": dispatch,
        "ranks": 16,
        "ranks_per_node": 4,
        "slots_per_rank": 6,
        "workloads": [{"name": name, "path": "recorded.json"} for name in names],
    }
    (folder / "spec.yaml").write_text(json.dumps({"schema_version": 1, "goal": goal, "emit": []}))
    spec = read_place_spec(folder / "spec.yaml")
    problem = state_problem(spec, settings=SearchSettings())
    before, after = (
        [evaluate_workload(problem, one, placement) for one in problem.evidence]
        for placement in (spec.current, problem.baseline.placement)
    )
    return gain_of(problem, list(zip(before, after, after, strict=True)))


def test_workloads_that_share_the_tables_of_a_launch_are_no_more_certain_than_one(
    tmp_path: Path,
) -> None:
    ratio = {}
    for dispatch in ("static", "dynamic"):
        one, two = (gain_for(tmp_path, names, dispatch) for names in (["a"], ["a", "b"]))
        assert two.gain_ratio == pytest.approx(one.gain_ratio)
        ratio[dispatch] = two.noise_ratio / one.noise_ratio
    assert ratio == pytest.approx({"static": 1.0, "dynamic": 0.5**0.5})
