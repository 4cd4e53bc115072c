import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from profilers.routing.formats import read_as
from profilers.routing.store import read_recording
from tests.expect import present
from tests.rows import each_row

Refusal = Callable[[Path], str]

RECORD: dict[str, Any] = {
    "model": "tiny",
    "domain": "c4",
    "num_logical_experts": 3,
    "top_k": 2,
    "layer_ids": [0, 7],
    "tokens": 30,
    "logical_count": [[10, 20, 30], [25, 25, 10]],
    "transition_top1": {"0->7": [[1, 2, 3], [4, 5, 6], [7, 1, 1]]},
}
EXAMPLE = Path(__file__).parents[3] / "examples/routing/tiny-moe-python.json"


def written(folder: Path, changes: dict[str, Any]) -> Path:
    file = folder / "routing.json"
    file.write_text(json.dumps(RECORD | changes))
    return file


def test_totals_are_one_pass(tmp_path: Path) -> None:
    found = read_recording(written(tmp_path, {}))
    assert (found.model, found.workload, found.top_k) == ("tiny", "c4", 2)
    assert found.layer_ids == (0, 7)
    assert found.count_PLE.tolist() == [RECORD["logical_count"]]
    assert found.transition_kind == "top1"
    assert present(found.transition_MEE).tolist() == [RECORD["transition_top1"]["0->7"]]


def test_passes_go_before_totals_and_all_pairs_before_best_choices(tmp_path: Path) -> None:
    passes = [[[1, 0, 1], [2, 0, 0]], [[0, 2, 0], [0, 1, 1]]]
    pairs = {"0->7": np.eye(3).tolist()}
    found = read_recording(written(tmp_path, {"passes": passes, "transition_all_pairs": pairs}))
    assert found.count_PLE.tolist() == passes
    assert found.transition_kind == "all_pairs"


def test_what_the_user_says_goes_before_the_file(tmp_path: Path) -> None:
    stated = {"model": "m", "workload": "w", "layer_ids": (1, 2), "top_k": 3}
    found = read_as("routing-json", written(tmp_path, {}), **stated)
    assert (found.model, found.workload, found.layer_ids, found.top_k) == ("m", "w", (1, 2), 3)


def test_the_example_that_ships_is_read_pass_by_pass() -> None:
    assert read_recording(EXAMPLE).count_PLE.shape == (20, 4, 8)


@each_row(
    ("changes", "reason"),
    [
        ({"logical_count": [[1, 2, 3]]}, "1 layers of 3 experts"),
        ({"logical_count": [[1, 2], [3, 4]]}, "2 layers of 2 experts"),
        ({"logical_count": [[1, 2, 3], [4, 5]]}, "differ in length"),
        ({"logical_count": [1, 2, 3]}, "must be [layers][experts]"),
        ({"logical_count": None}, "logical_count holds object values"),
        ({"logical_count": [[1, 2, "3"], [4, 5, 6]]}, "counts are numbers"),
        ({"logical_count": [[1, 2, -3], [4, 5, 6]]}, "logical_count[0][2] is -3"),
        ({"logical_count": [[1, 2, 0.5], [4, 5, 6]]}, "logical_count[0][2] is 0.5"),
        ({"logical_count": [[1, 2, float("nan")], [4, 5, 6]]}, "holds NaN"),
        ({"logical_count": [[1, 2, 1e300], [4, 5, 6]]}, "logical_count[0][2] is 1e+300"),
        ({"logical_count": [[1, 2, 3], [0, 0, 0]]}, "layer 7 has no tokens"),
        ({"passes": [[[1, 2, 3]]]}, "passes has 1 layers"),
        ({"layer_ids": [7, 0]}, "need as many ascending ids"),
        ({"layer_ids": []}, "layer_ids"),
        (
            {"num_logical_experts": 0},
            "num_logical_experts: Input should be greater than or equal to 1",
        ),
        ({"top_k": 4}, "top_k 4 is more than the 3 experts"),
        ({"transition_top1": {"0->7": [[1]]}}, "transitions (1, 1, 1) of 2 layers"),
        ({"transition_top1": {"0->7": [[-1] * 3] * 3}}, "transition_top1[0][0][0] is -1"),
    ],
)
def test_each_wrong_field_is_one_line(
    tmp_path: Path, refusal: Refusal, changes: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(written(tmp_path, changes))


def test_a_file_cut_short_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    file = written(tmp_path, {})
    file.write_text(file.read_text()[:-10])
    assert "cut short" in refusal(file)
    file.write_text('{"a":' * 100_000)
    assert "nested too deep" in refusal(file)


def test_what_is_unknown_or_absent_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    # The counts that SGLang's first recorder wrote: the refusal names the way out.
    (tmp_path / "a").write_text("layer_id,expert_id,count\n3,0,12\n")
    assert "before 0.4.6.post5, are read no more: convert them" in refusal(tmp_path / "a")
    assert "before 0.4.6.post5, are read no more: convert them" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "b")
    (tmp_path / "c").write_text('{"goal": 1}')
    assert "no recording of routing that is known" in refusal(tmp_path / "c")
