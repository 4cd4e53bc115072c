from typing import Any

import pytest

from solvers.partition.check import memory_bytes, objective, violations
from solvers.partition.problem import Partition, PartitionProblem, PartitionStage
from tests.solvers.refusals import unrefused


def make(**changes: Any) -> PartitionProblem:
    """Three layers, a fast pool of two stages and a slow one of one; any field can be replaced."""
    given: dict[str, Any] = {
        "pools": ("fast", "slow"),
        "max_stages_P": (2, 1),
        "time_s_PL": [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]],
        "static_bytes_PL": [[10, 20, 30], [11, 21, 31]],
        "saved_bytes_PL": [[1, 2, 3], [1, 2, 3]],
        "memory_limit_bytes_P": [100, 100],
        "hop_s_PP": [[0.5, 1.5], [7.0, 0.25]],
        "num_microbatches": 4,
    }
    return PartitionProblem(**(given | changes))


def chain(*stages: tuple[int, int]) -> Partition:
    return Partition(stages=tuple(PartitionStage(pool=p, layers=n) for p, n in stages))


def test_a_step_by_hand() -> None:
    # Stages of 2 (slow, layer 0), 2 and 3 s (fast); hops of 7 (slow to fast) and 0.5 s.
    # 2 + 2 + 3 + 2 (7 + 0.5) + 3 * 7
    assert objective(make(), chain((1, 1), (0, 1), (0, 1))) == pytest.approx(43.0)
    # Without a slow hop the slowest stage sets the pace: 1 + 5 + 2 * 0.5 + 3 * 5
    assert objective(make(), chain((0, 1), (0, 2))) == pytest.approx(22.0)


def test_memory_by_hand() -> None:
    # Three, two and one micro-batches are in flight: 11 + 3, 20 + 2 * 2, 30 + 3
    assert memory_bytes(make(), chain((1, 1), (0, 1), (0, 1))) == (14, 24, 33)
    # Two micro-batches in all are never three in flight.
    assert memory_bytes(make(num_microbatches=2), chain((1, 1), (0, 1), (0, 1))) == (13, 24, 33)
    # Three stages hold three micro-batches at most, however many there are.
    heavy = [[60_000_000_000] * 3] * 2
    assert memory_bytes(
        make(static_bytes_PL=heavy, num_microbatches=1_000_000, memory_limit_bytes_P=[2e11, 2e11]),
        chain((0, 2), (1, 1)),
    ) == (120_000_000_006, 60_000_000_003)


def test_every_broken_rule_is_named() -> None:
    for partition, changes, complaint in (
        (chain(), {}, "there is no stage"),
        (chain((0, 2)), {}, "the model has 3 layers, 2 are placed"),
        (chain((0, 3), (0, 0)), {}, "stage 1 holds 0 layers"),
        (chain((2, 3)), {}, "stage 0 is in pool 2, there are 2"),
        (chain((1, 1), (1, 2)), {}, "pool 'slow' runs 2 stages, it has devices for 1"),
        (chain((0, 1), (1, 1), (0, 1)), {}, "pool 'fast' takes part in 2 stretches"),
        (
            chain((0, 3)),
            {"memory_limit_bytes_P": [65, 100]},
            "stage 0 in pool 'fast' needs 66 bytes, its devices have 65",
        ),
        (
            chain((0, 1), (1, 2)),
            {"hop_s_PP": [[0.5, float("inf")], [7.0, 0.25]]},
            "no link joins stages 0 and 1",
        ),
    ):
        broken = violations(make(**changes), partition)
        assert any(complaint in line for line in broken), (complaint, broken)


def test_an_allowed_partition_breaks_nothing() -> None:
    assert violations(make(), chain((0, 1), (0, 1), (1, 1))) == ()
    assert violations(make(memory_limit_bytes_P=[66, 0]), chain((0, 3))) == ()


def test_an_impossible_problem_cannot_be_made() -> None:
    rows: tuple[tuple[dict[str, Any], str], ...] = (
        ({"pools": ("a", "a")}, "must be distinct names"),
        ({"pools": ()}, "at least one"),
        ({"max_stages_P": (1,)}, "must be a count for each pool"),
        ({"max_stages_P": (1, -1)}, "must be a count for each pool"),
        ({"num_microbatches": 0}, "must be at least 1"),
        ({"time_s_PL": [[1.0]]}, r"must be \[2, layers\]"),
        ({"time_s_PL": [[1.0, 2.0, float("nan")]] * 2}, "time_s_PL must be finite"),
        ({"hop_s_PP": [[0.0, -1.0], [0.0, 0.0]]}, "hop_s_PP must be numbers"),
        ({"static_bytes_PL": [[1, 2], [1, 2]]}, "static_bytes_PL must be bytes"),
        ({"saved_bytes_PL": [[-1, 2, 3], [1, 2, 3]]}, "saved_bytes_PL must be bytes"),
        ({"static_bytes_PL": [[1e16, 2, 3], [1, 2, 3]]}, "static_bytes_PL must be bytes in"),
    )
    assert unrefused(make, rows) == []


def test_arrays_are_frozen_and_rounded_against_the_plan() -> None:
    problem = make(saved_bytes_PL=[[0.1] * 3] * 2, memory_limit_bytes_P=[9.9, 9.9])
    assert problem.saved_bytes_PL.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert problem.memory_limit_bytes_P.tolist() == [9, 9]
    with pytest.raises(ValueError, match="read-only"):
        problem.time_s_PL[0, 0] = 0.0
