"""Sizes of linear programs by hand; by the engine's own functions in test_lp_engine.py."""

import numpy as np

from tests.expect import present
from tests.rows import each_row
from tuner.spec.lp_memory import (
    BLOCK_BYTES,
    BUDGET_BYTES,
    checked_bytes,
    launched_bytes,
    lp_misfit,
    program_shape,
    smallest_lp_misfit,
)


def test_sizes_by_hand() -> None:
    # Experts 0 and 2 have two and three of the eight slots, on four ranks.
    assert program_shape((0, 1, 0, 2, 2, 2, 3, 4), ranks=4) == (2 + 4, 5 + 4 + 2)
    assert program_shape((0, 1, 2, 3), ranks=2) == (2, 4)
    # Floats: 6 x 11 + 6 x 6 + 3 x 11 + 6, and 256 bytes; 2 x 6 x 11 + 6 x 6 + 2 x 6 + 4 x 11 + 2.
    assert checked_bytes(6, 11) == 4 * 141 + 256
    assert launched_bytes(6, 11) == 4 * 226
    # 256 experts on 128 ranks of 3 slots, as the engine's own line has it: 404.5 KiB.
    assert f"{checked_bytes(196, 326) / 1024:.1f}" == "404.5"


def in_order(ranks: int, slots: int, experts: int) -> list[int]:
    return [slot % experts for slot in range(ranks * slots)]


def test_each_of_the_two_sizes_can_be_the_one_that_does_not_fit() -> None:
    # 32 x 9 fits; 64 x 5 passes the check and not the launch; 128 x 3 passes neither.
    assert lp_misfit([in_order(32, 9, 256)], ranks=32) is None
    shape = program_shape(in_order(64, 5, 256), ranks=64)
    assert checked_bytes(*shape) <= BUDGET_BYTES
    assert launched_bytes(*shape) > BLOCK_BYTES
    said = present(lp_misfit([in_order(64, 5, 256)], ranks=64))
    assert said.endswith("and a thread block has 227.0 KiB")
    said = present(lp_misfit([in_order(128, 3, 256)], ranks=128))
    assert said.endswith("and its check allows 223.0 KiB")
    # One row that does not fit is enough, wherever it is.
    few = [0] * 64 + list(range(256))
    assert lp_misfit([few], ranks=64) is None
    assert lp_misfit([few, in_order(64, 5, 256), few], ranks=64) is not None


@each_row(
    ("ranks", "slots", "experts"),
    ((4, 3, 8), (64, 5, 256), (96, 4, 256), (128, 3, 256), (8, 4, 32)),
)
def test_a_shape_is_refused_only_where_no_placement_fits(
    ranks: int, slots: int, experts: int
) -> None:
    rng = np.random.default_rng(3)
    refused = smallest_lp_misfit(num_slots=ranks * slots, num_experts=experts, ranks=ranks)
    redundant = ranks * slots - experts
    rows = [
        [*range(experts), *rng.integers(0, most, redundant)]
        for most in (1, 2, experts // 2, experts)
    ]
    fits = [lp_misfit([row], ranks=ranks) is None for row in rows]
    # The first has all redundant slots on one expert.
    assert fits[0] == any(fits) == (refused is None), fits
