"""Whatever the layout, the recomputation and the chunks: the same model, losses and gradients."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch

from tests.rows import each_row

Fields = dict[str, Any]
Observed = dict[str, dict[str, Any]]

SKEW = [0.3, 0.25, 0.15, 0.1, 0.1, 0.05, 0.05, 0.0]
FORCED = {"mode": "forced", "load_ratio": [SKEW, SKEW[::-1], SKEW]}
LOSS_FREE = {"mode": "learned", "balancing": "loss_free", "coefficient": 0.01}
LIMITED = {"recompute": "selective", "max_chunk_tokens": 60}

# Name -> (ranks, changes to the single-process run, that run's own name).
CASES: Mapping[str, tuple[int, Fields, str]] = {
    "selective": (1, {"stage": {"recompute": "selective"}}, "learned"),
    "selective in 2 chunks": (1, {"stage": {"recompute": "selective", "chunks": 2}}, "learned"),
    "selective in 8 chunks": (1, {"stage": {"recompute": "selective", "chunks": 8}}, "learned"),
    "full": (1, {"stage": {"recompute": "full"}}, "learned"),
    "full in 4 chunks": (1, {"stage": {"recompute": "full", "chunks": 4}}, "learned"),
    "zero 0": (1, {"zero": 0}, "learned"),
    "one micro-batch": (1, {"micro_batch_size": 8}, "learned"),
    "data 2, zero 0": (2, {"data": 2, "zero": 0}, "learned"),
    "data 2, zero 1": (2, {"data": 2}, "learned"),
    "data 2, zero 3, full": (2, {"data": 2, "zero": 3, "stage": {"recompute": "full"}}, "learned"),
    "expert 2": (2, {"data": 2, "expert": 2}, "learned"),
    "expert 2, forced": (2, {"data": 2, "expert": 2}, "forced"),
    "expert 2, loss-free": (2, {"data": 2, "expert": 2}, "loss-free"),
    "expert 2, chunks at run time": (2, {"data": 2, "expert": 2, "stage": LIMITED}, "forced"),
    "tensor 2": (2, {"tensor": 2}, "learned"),
    "tensor 2 folded into expert 2": (2, {"tensor": 2, "expert": 2}, "forced"),
    "pipeline 2": (2, {"pipeline": 2}, "learned"),
    "pipeline 2, one micro-batch": (2, {"pipeline": 2, "micro_batch_size": 8}, "learned"),
    "pipeline 2, virtual 2, full": (
        2,
        {"pipeline": 2, "virtual": 2, "stage": {"recompute": "full", "chunks": 2}},
        "learned",
    ),
    "data 2, pipeline 2, expert 2": (
        4,
        {"data": 2, "pipeline": 2, "expert": 2, "stage": LIMITED},
        "forced",
    ),
    "expert 4": (4, {"data": 4, "expert": 4}, "learned"),
    "expert 8 of 8 over 4 ranks, zero 3": (4, {"data": 4, "expert": 2, "zero": 3}, "learned"),
    "tensor 2, data 2, expert 4": (
        4,
        {"tensor": 2, "data": 2, "expert": 4, "stage": {"recompute": "full", "chunks": 2}},
        "forced",
    ),
    "2 nodes of 2, forced": (4, {"data": 4, "expert": 4, "nodes_of": 2}, "forced"),
    "2 nodes of 2, chunks at run time": (
        4,
        {"data": 4, "expert": 4, "nodes_of": 2, "stage": LIMITED},
        "learned",
    ),
    "2 nodes of 2, tensor 2, full": (
        4,
        {
            "tensor": 2,
            "data": 2,
            "expert": 4,
            "nodes_of": 2,
            "stage": {"recompute": "full", "chunks": 2},
        },
        "learned",
    ),
    "4 nodes of 1": (4, {"data": 4, "expert": 4, "nodes_of": 1}, "loss-free"),
    "2 nodes of 2, expert 2 inside them": (
        4,
        {"data": 4, "expert": 2, "nodes_of": 2},
        "learned",
    ),
    "tensor 2, pipeline 2, zero 0": (4, {"tensor": 2, "pipeline": 2, "zero": 0}, "learned"),
}
# Every kind of parallelism and recomputation once or twice; the others are slow.
ESSENTIAL = frozenset(
    {
        "selective in 2 chunks",
        "full in 4 chunks",
        "zero 0",
        "data 2, zero 1",
        "data 2, zero 3, full",
        "expert 2, loss-free",
        "expert 2, chunks at run time",
        "tensor 2 folded into expert 2",
        "pipeline 2",
        "pipeline 2, virtual 2, full",
        "data 2, pipeline 2, expert 2",
        "tensor 2, data 2, expert 4",
        "2 nodes of 2, forced",
        "2 nodes of 2, tensor 2, full",
        "4 nodes of 1",
    }
)
OTHERS = [name for name in CASES if name not in ESSENTIAL]
ROUTING: Mapping[str, Fields] = {"learned": {}, "forced": FORCED, "loss-free": LOSS_FREE}


Observe = Callable[[Iterable[str]], Observed]


@pytest.fixture(scope="module")
def observe(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_config: Callable[..., Fields],
    observe_cases: Callable[..., Observed],
) -> Observe:
    """Run the named cases and the single-process runs: observe(names)."""

    def run(names: Iterable[str]) -> Observed:
        directory, wanted = tmp_path_factory.mktemp("layouts"), frozenset(names)
        found: Observed = {}
        for ranks in (1, 2, 4):
            cases = {
                name: tiny_config(routing=ROUTING[reference], **changes)
                for name, (needed, changes, reference) in CASES.items()
                if needed == ranks and name in wanted
            }
            if ranks == 1:
                cases |= {name: tiny_config(routing=routing) for name, routing in ROUTING.items()}
            found |= observe_cases(directory, cases, ranks=ranks)
        return found

    return run


@pytest.fixture(scope="module")
def observed(observe: Observe) -> Observed:
    return observe(ESSENTIAL)


def _check_losses(observed: Observed, name: str) -> None:
    reference = observed[CASES[name][2]]
    assert observed[name]["losses"] == pytest.approx(reference["losses"], rel=1e-5)


def _check_gradients(observed: Observed, name: str) -> None:
    reference = observed[CASES[name][2]]["gradients"]
    gradients = observed[name]["gradients"]
    assert gradients.keys() == reference.keys()
    for weight, expected in reference.items():
        error = torch.linalg.vector_norm(gradients[weight] - expected)
        assert error <= 2e-5 * torch.linalg.vector_norm(expected), weight


def _check_loads(observed: Observed, name: str) -> None:
    for load_LE in observed[name]["loads"]:
        assert [sum(load_E) for load_E in load_LE] == [8 * 32 * 2] * 3
    assert observed[name]["loads"][0] == observed[CASES[name][2]]["loads"][0]


@each_row("name", sorted(ESSENTIAL))
def test_losses_agree_with_the_single_process_run(observed: Observed, name: str) -> None:
    _check_losses(observed, name)


@each_row("name", sorted(ESSENTIAL))
def test_gradients_agree_with_the_single_process_run(observed: Observed, name: str) -> None:
    _check_gradients(observed, name)


@each_row("name", sorted(ESSENTIAL))
def test_every_token_copy_is_counted_once(observed: Observed, name: str) -> None:
    _check_loads(observed, name)


@pytest.mark.slow
def test_other_layouts_agree_with_the_single_process_run(observe: Observe) -> None:
    others = observe(OTHERS)

    @each_row("name", OTHERS)
    @each_row("check", [_check_losses, _check_gradients, _check_loads])
    def agree(name: str, check: Callable[[Observed, str], None]) -> None:
        check(others, name)

    agree()


def test_forced_loads_are_reproduced_exactly(observed: Observed) -> None:
    # 64 copies a sequence, 8 sequences: 0.3 * 64 = 19.2, 16, 9.6, 6.4, 6.4, 3.2, 3.2, 0; the
    # floors leave 2, which go to the remainders 0.6 and, of the two of 0.4, the lower expert's.
    row = [8 * copies for copies in (19, 16, 10, 7, 6, 3, 3, 0)]
    for load_LE in observed["forced"]["loads"]:
        assert load_LE[0] == load_LE[2] == row
        assert sorted(load_LE[1]) == sorted(row)


def test_ranks_with_unequal_loads_agree_on_the_larger_chunk_count(observed: Observed) -> None:
    # 2 sequences of 64 copies from each of 2 ranks: the rank with experts 0 to 3 receives 52 of 64,
    # so 4 * 52 = 208 copies; ceil(208 / 60) = 4. The other gets 48 and would have taken 1.
    assert observed["expert 2, chunks at run time"]["chunks"][0] == [4, 4, 4]
