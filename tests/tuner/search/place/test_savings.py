"""What a plan saves, and how certain that is over several workloads."""

import json
from pathlib import Path

import numpy as np
import pytest

from solvers.placement.balance.eplb import eplb
from tuner.search.place.candidates import EplbBaseline
from tuner.search.place.comparison import compare_loads
from tuner.search.place.evidence import mean_load_LE, split_recordings
from tuner.search.place.savings import Gain, load_gain
from tuner.spec.place_read import read_place_spec


def gain_of(folder: Path, names: list[str], dispatch: str) -> Gain:
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
    evidence = split_recordings(spec)
    placement = eplb(mean_load_LE(evidence), ranks=spec.ranks)
    baseline = EplbBaseline(placement=placement, name="eplb", largest_L=np.ones(1))
    return load_gain(evidence, compare_loads(spec, evidence, placement, baseline, dispatch))


def test_workloads_that_share_the_tables_of_a_launch_are_no_more_certain_than_one(
    tmp_path: Path,
) -> None:
    ratio = {}
    for dispatch in ("static", "dynamic"):
        one, two = (gain_of(tmp_path, names, dispatch) for names in (["a"], ["a", "b"]))
        assert two.gain_ratio == pytest.approx(one.gain_ratio)
        ratio[dispatch] = two.noise_ratio / one.noise_ratio
    assert ratio == pytest.approx({"static": 1.0, "dynamic": 0.5**0.5})
