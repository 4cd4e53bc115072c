"""Traces are written here line by line, as Megatron's tracer does."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profilers.errors import RecordingUnreadableError
from profilers.routing import megatron_trace
from profilers.routing.formats import read_as
from profilers.routing.store import read_recording
from tests.expect import present
from tests.rows import each_row

Refusal = Callable[[Path], str]


def line(step: int, layer: int, chosen: list[list[int]], *, rank: int = 0, **more: Any) -> str:
    record = {
        "step": step,
        "stage": "pre_dispatch",
        "block": "decoder",
        "layer": layer,
        "rank": rank,
        "num_tokens": len(chosen),
        "topk": len(chosen[0]) if chosen else 0,
        "top_indices": chosen,
    }
    return json.dumps(record | more)


def trace(folder: Path, lines: list[str], *, rank: int = 0) -> Path:
    file = folder / f"router_trace_rank{rank}.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_steps_are_passes_and_microbatches_of_a_step_are_summed(tmp_path: Path) -> None:
    trace(
        tmp_path,
        [
            line(0, 1, [[0, 1], [1, 2]]),
            line(0, 3, [[0, 1], [0, 2]]),
            # The second microbatch of the step.
            line(0, 1, [[2, 3]]),
            line(0, 3, [[0, 3]]),
            line(1, 1, [[0, 3]]),
            line(1, 3, [[1, 3]]),
        ],
    )
    found = read_recording(tmp_path / "router_trace_rank0.jsonl")
    assert (found.layer_ids, found.top_k) == ((1, 3), 2)
    assert found.count_PLE.tolist() == [
        [[1, 2, 2, 1], [3, 1, 1, 1]],
        [[1, 0, 0, 1], [0, 1, 0, 1]],
    ]
    # {0,1}->{0,1}, {1,2}->{0,2}, {2,3}->{0,3} and {0,3}->{1,3}.
    assert present(found.transition_MEE)[0].tolist() == [
        [1, 2, 0, 1],
        [2, 1, 1, 0],
        [2, 0, 1, 1],
        [1, 1, 0, 2],
    ]
    assert present(found.token_LTK)[0].tolist() == [[0, 1], [1, 2], [2, 3], [0, 3]]


def test_ranks_are_summed_in_one_recording(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace(tmp_path, [line(7, 0, [[rank, 2]], rank=rank)], rank=rank)
    assert read_recording(tmp_path).count_PLE.tolist() == [[[1, 1, 2]]]


def test_other_blocks_are_left_out_and_experts_and_layers_may_be_said(tmp_path: Path) -> None:
    lines = [line(0, 1, [[0]]), line(0, 0, [[5]], block="mtp", mtp_idx=0), line(1, 1, [[1]])]
    stated = {"num_experts": 4, "layer_ids": (31,), "workload": "pretraining"}
    found = read_as("megatron-trace", trace(tmp_path, lines), **stated)
    assert found.count_PLE.tolist() == [[[1, 0, 0, 0]], [[0, 1, 0, 0]]]
    assert (found.layer_ids, found.workload) == ((31,), "pretraining")


def test_a_record_without_block_is_of_the_decoder(tmp_path: Path) -> None:
    # Earlier releases of the tracer.
    bare = {"step": 0, "layer": 1, "rank": 0, "num_tokens": 1, "topk": 1, "top_indices": [[2]]}
    assert read_recording(trace(tmp_path, [json.dumps(bare)])).count_PLE.tolist() == [[[0, 0, 1]]]


@each_row(
    ("lines", "reason"),
    [
        ([line(0, 1, [[0]]), line(1, 1, [[0]])[:-9]], "line 2: Invalid JSON"),
        ([line(0, 1, [[0], [1, 2]])], "line 1: top_indices: rows differ in length"),
        ([line(0, 1, [[-2]])], "line 1: top_indices[0][0] is -2"),
        ([line(0, 1, [[2**40]])], "[0][0] is 1099511627776"),
        ([line(0, 1, [[20_000]])], "number from -1 to 16383"),
        ([line(0, -1, [[0]])], "line 1: layer: Input should be greater than or equal to 0"),
        (
            [line(0, 1, [[0]]).replace('"step": 0', '"step": "x"')],
            "line 1: step: Input should be a valid integer",
        ),
        ([line(0, 1, [])], "holds no token"),
        ([line(0, 1, [[0.5]])], "is 0.5; it must be a whole number"),  # type: ignore[list-item]  # what is refused
        ([line(0, 1, [[0]]), "[]"], "line 2: Input should be an object"),
    ],
)
def test_each_wrong_line_is_named(
    tmp_path: Path, refusal: Refusal, lines: list[str], reason: str
) -> None:
    assert reason in refusal(trace(tmp_path, lines))


def test_an_expert_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingUnreadableError, match="has 5 experts, not 4"):
        read_as("megatron-trace", trace(tmp_path, [line(0, 1, [[4]])]), num_experts=4)


def test_choices_that_the_user_miscounts_are_named(tmp_path: Path) -> None:
    file = trace(tmp_path, [line(0, 1, [[4, 1]])])
    with pytest.raises(RecordingUnreadableError, match="top_k 3, yet its tokens chose 2"):
        read_as("megatron-trace", file, top_k=3)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_trace, "MOST_LINE_BYTES", 1000)
    file = tmp_path / "router_trace_rank0.jsonl"
    file.write_text(line(0, 1, [[0]] * 1000))
    assert "more than 1000 bytes" in refusal(file)


def _long_trace(file: Path, *, steps: int) -> int:
    rng = np.random.default_rng(0)
    with file.open("w") as stream:
        for step in range(steps):
            for layer in range(4):
                chosen = rng.integers(0, 32, (64, 4))
                chosen[0, 0] = 31
                stream.write(line(step, layer, chosen.tolist()) + "\n")
    return file.stat().st_size


@pytest.mark.slow
def test_memory_does_not_grow_with_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held has a bound, six times the trace or not, and no token is lost."""
    monkeypatch.setattr(megatron_trace, "MOST_CELLS", 2**13)
    file = tmp_path / "router_trace_rank0.jsonl"
    peaks = []
    for steps in (150, 900):
        size = _long_trace(file, steps=steps)
        tracemalloc.start()
        found = read_recording(file)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.count_LE.sum(axis=1).tolist() == [steps * 64 * 4] * 4
        # Passes became coarser until 2**13 counts hold them: at most 64 of 4 x 32.
        assert found.num_passes <= 64
    assert size > 2_000_000
    assert peaks[1] < 2 * peaks[0]
    assert peaks[1] < size / 2


def test_coarser_passes_keep_the_order_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One expert a step; 2 x 8 counts hold two passes, so eight steps become two of four.
    monkeypatch.setattr(megatron_trace, "MOST_CELLS", 16)
    lines = [line(step, 0, [[step]]) for step in range(8)]
    found = read_as("megatron-trace", trace(tmp_path, lines), **{"num_experts": 8})
    assert found.count_PLE[:, 0].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]]
    assert found.transition_MEE is None


def test_a_trace_of_many_layers_and_steps_gets_no_room_that_it_does_not_fill(
    tmp_path: Path, refusal: Refusal
) -> None:
    # A layer of its own in every step: 10,000 lines would be a table of 10,000 x 10,000.
    lines = [line(number, number, [[0]]) for number in range(10_000)]
    assert "10000 x 10000 x 1 numbers" in refusal(trace(tmp_path, lines))
    # Pairs of few experts, and then one whose id asks for a square of 16,384.
    lines = [line(0, 0, [[0]]), line(0, 1, [[0]]), line(1, 0, [[16_383]])]
    assert read_recording(trace(tmp_path, lines)).transition_MEE is None
