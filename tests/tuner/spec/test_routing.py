import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.routing.store import read_recording, write_recording
from tests.expect import refused
from tests.rows import each_row
from tuner.errors import SpecError
from tuner.spec.goal import Phase
from tuner.spec.routing import read_routing, routing_json

RECORD: dict[str, Any] = {
    "model": "tiny",
    "domain": "c4",
    "num_logical_experts": 4,
    "top_k": 2,
    "layer_ids": [0, 3],
    "tokens": 50,
    "logical_count": [[10, 20, 30, 40], [25, 25, 50, 0]],
}


def written(folder: Path, changes: dict[str, Any]) -> Path:
    file = folder / "routing.json"
    file.write_text(json.dumps(RECORD | changes))
    return file


def test_counts_become_shares_of_their_layer(tmp_path: Path) -> None:
    record = read_routing(written(tmp_path, {}))
    assert record.name == "tiny c4"
    assert record.layer_ids == (0, 3)
    assert record.load_ratios == ((0.1, 0.2, 0.3, 0.4), (0.25, 0.25, 0.5, 0.0))
    assert record.of_phase(Phase.EARLY) == record.load_ratios


def test_passes_are_averaged_by_phase_without_empty_ones(tmp_path: Path) -> None:
    # Eight passes over one layer of two experts; expert 0 takes 8, 7, ... 1 of 10 tokens.
    passes = [[[8 - i, 2 + i]] for i in range(8)]
    changes = {
        "num_logical_experts": 2,
        "layer_ids": [0],
        "logical_count": [[36, 44]],
        "passes": passes,
    }
    record = read_routing(written(tmp_path, changes))
    assert record.of_phase(Phase.EARLY)[0] == pytest.approx((0.75, 0.25))
    assert record.of_phase(Phase.STEADY)[0] == pytest.approx((0.25, 0.75))
    np.save(tmp_path / "load.npy", np.array([[[1, 3], [2, 2]], [[1, 1], [0, 0]]]))
    record = read_routing(tmp_path / "load.npy")
    assert record.passes == (((0.25, 0.75), (0.5, 0.5)),)
    (tmp_path / "load.txt").write_text("hello")
    with pytest.raises(SpecError, match=r"goal.routing.path: .*load.txt is no recording"):
        read_routing(tmp_path / "load.txt")


@given(
    st.lists(
        st.lists(st.integers(0, 10**12), min_size=4, max_size=4).filter(any), min_size=2, max_size=2
    )
)
@settings(deadline=None, max_examples=50)
def test_every_row_sums_to_one(
    tmp_path_factory: pytest.TempPathFactory, counts: list[list[int]]
) -> None:
    record = read_routing(written(tmp_path_factory.mktemp("routing"), {"logical_count": counts}))
    assert [sum(row) for row in record.load_ratios] == pytest.approx([1.0, 1.0])


@each_row(
    ("changes", "said"),
    [
        ({"num_logical_experts": None}, "num_logical_experts: Input should be a valid integer"),
        ({"num_logical_experts": 4.0}, "num_logical_experts: Input should be a valid integer"),
        ({"num_logical_experts": 3}, "logical_count has 2 layers of 4 experts"),
        ({"top_k": 0}, "top_k: Input should be greater than or equal to 1"),
        ({"layer_ids": [0]}, "logical_count has 2 layers of 4 experts"),
        ({"layer_ids": [3, 0]}, "layer ids 3, 0: 2 layers with tokens need as many"),
        ({"layer_ids": [0, -1]}, "layer_ids.1: Input should be greater than or equal to 0"),
        ({"layer_ids": []}, "layer_ids: List should have at least 1 item"),
        ({"logical_count": None}, "logical_count holds object values"),
        ({"logical_count": [[1, 2, -3, 4], [1, 1, 1, 1]]}, "logical_count[0][2] is -3"),
        ({"logical_count": [[1, 2, float("nan"), 4], [1, 1, 1, 1]]}, "holds NaN"),
        ({"logical_count": [[1, 2, "3", 4], [1, 1, 1, 1]]}, "logical_count holds <U21 values"),
        ({"logical_count": [[1, 2, 3, 4], [0, 0, 0, 0]]}, "logical_count: layer 3 has no tokens"),
        ({"passes": 7}, "passes has shape []"),
        ({"passes": [[[1, 1, 1, 1]]]}, "passes has 1 layers of 4 experts"),
    ],
)
def test_a_bad_record_is_refused_by_field_and_value(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = written(tmp_path, changes)
    with refused(SpecError, f"goal.routing.path: {file}: {said}"):
        read_routing(file)


def test_a_stored_recording_and_an_engines_dump_say_the_same(tmp_path: Path) -> None:
    passes = [[[1, 2, 3, 4], [5, 5, 10, 0]], [[3, 2, 1, 4], [0, 5, 10, 5]]]
    plain = written(tmp_path, {"passes": passes, "logical_count": np.sum(passes, axis=0).tolist()})
    write_recording(tmp_path / "stored", read_recording(plain))
    record = read_routing(tmp_path / "stored")
    assert record == read_routing(plain)
    # What a plan keeps of it reads the same again.
    (tmp_path / "kept.json").write_bytes(routing_json(tmp_path / "stored"))
    assert read_routing(tmp_path / "kept.json") == record
    assert routing_json(plain) == plain.read_bytes()
    np.save(tmp_path / "load.npy", np.array(passes))
    assert read_routing(tmp_path / "load.npy").passes == record.passes
