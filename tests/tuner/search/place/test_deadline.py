"""A plan is made by its deadline, and says what it looked at less for that."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from tests.expect import present
from tuner.goals.place_plan import place
from tuner.goals.place_spec import read_place_spec
from tuner.search.place.evidence import limit_passes, split_recordings
from tuner.search.place.plan_place import lost_by
from tuner.search.settings import Deadline
from tuner.spec.place_spec import PlaceSpec


def spec_of(folder: Path, *, layers: int, experts: int, ranks: int, passes: int) -> Path:
    rng = np.random.default_rng(2)
    shares = rng.dirichlet(np.full(experts, 0.6), size=layers)
    counts = [[rng.multinomial(40_000, share_E) for share_E in shares] for _ in range(passes)]
    recorded = {
        "num_logical_experts": experts,
        "top_k": 8,
        "layer_ids": list(range(layers)),
        "logical_count": np.sum(counts, axis=0).tolist(),
        "passes": np.array(counts).tolist(),
    }
    (folder / "recorded.json").write_text(json.dumps(recorded))
    goal = {
        "kind": "place",
        "dispatch": "lp",
        "ranks": ranks,
        "ranks_per_node": ranks // 4,
        "slots_per_rank": experts // ranks + 1,
        "workloads": [{"name": "all", "path": "recorded.json"}],
    }
    path = folder / "spec.yaml"
    path.write_text(json.dumps({"schema_version": 1, "goal": goal, "emit": ["sglang"]}))
    return path


def small(folder: Path) -> PlaceSpec:
    return read_place_spec(spec_of(folder, layers=2, experts=8, ranks=4, passes=16))


@pytest.mark.slow
def test_linear_programs_of_58_layers_keep_to_the_time_limit(tmp_path: Path) -> None:
    """Worth its 4 s: the one plan that its time limit cuts short."""
    path = spec_of(tmp_path, layers=58, experts=128, ranks=32, passes=64)
    limit_s = 4.0
    started_s = time.perf_counter()
    plan = place(path, time_limit_s=limit_s).plan
    wall_s = time.perf_counter() - started_s
    (one,) = present(plan.predicted).outcomes
    notes = [note for note in plan.provenance.notes if note.startswith("evaluated on ")]
    # Twice as long at most on a quiet machine; the bound is for a busy one.
    assert wall_s < 3.0 * limit_s
    assert one.passes_planned_from == 32
    assert 2 <= one.passes_judged < 32
    assert notes == [
        f"evaluated on {one.passes_judged} of 32 passes of 'all', evenly spaced: no more linear"
        " programs fit in the time limit; give more with --time-limit"
    ]


def test_passes_that_are_kept_are_recorded_ones_of_both_parts(tmp_path: Path) -> None:
    (one,) = split_recordings(small(tmp_path))
    known = {load_LE.tobytes() for load_LE in (*one.fit_PLE, *one.holdout_PLE)}
    for most in (2, 3, 100):
        few = limit_passes(one, most)
        assert (len(few.fit_PLE), len(few.holdout_PLE)) == (min(most, 8), min(most, 8))
        assert (few.num_fit_passes, few.fit_LE.tolist()) == (8, one.fit_LE.tolist())
        assert all(load_LE.tobytes() in known for load_LE in (*few.fit_PLE, *few.holdout_PLE))


def test_nothing_is_left_after_the_deadline() -> None:
    now = [0.0]
    due = Deadline(begun_s=0.0, limit_s=10.0, clock=lambda: now[0])
    assert due.left_s == 10.0
    now[0] = 8.0
    assert due.left_s == 2.0
    now[0] = 12.0
    assert due.left_s == 0.0


def test_a_better_alternative_lost_to_the_method_of_the_goal() -> None:
    assert lost_by(1.225, 1.25) == "2.00 % less of the objective, but the goal names its method"
    assert lost_by(1.25, 1.25) == "as much of the objective"
