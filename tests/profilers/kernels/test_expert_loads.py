"""Expert networks at exact rows."""

import pytest

from profilers.errors import RankError
from profilers.kernels.expert_loads import time_expert_loads
from tests.profilers.testing import UnmappedClock


def test_every_load_is_timed_several_times() -> None:
    for is_gated in (True, False):
        name, times = time_expert_loads(
            [[8, 0, 3], [0, 0, 0], [64, 64]],
            hidden=16,
            ffn=32,
            is_gated=is_gated,
            budget_s=0.05,
            device_kind="cpu",
            clock=UnmappedClock(),
        )
        assert name == "cpu"
        assert len(times) == 3
        assert all(len(repeats) >= 5 and min(repeats) > 0.0 for repeats in times)


def test_more_rows_take_longer() -> None:
    _, (few, many) = time_expert_loads(
        [[16] * 4, [2048] * 4], hidden=64, ffn=128, budget_s=0.2, device_kind="cpu"
    )
    assert sorted(many)[len(many) // 2] > 4.0 * sorted(few)[len(few) // 2]


def test_what_a_processor_would_take_minutes_for_is_refused() -> None:
    with pytest.raises(RankError, match="with an accelerator"):
        time_expert_loads([[40_000]], hidden=4096, ffn=1024, budget_s=1.0, device_kind="cpu")


def test_weights_that_do_not_fit_are_refused_before_anything_is_made() -> None:
    # 512 experts of three matrices, or of two without a gate, of 65,536 x 65,536 in fp32.
    for is_gated, needed in ((True, "2.64e"), (False, "1.76e")):
        with pytest.raises(RankError, match=rf"about {needed}\+13 bytes, .* are free"):
            time_expert_loads(
                [[1] * 512],
                hidden=65_536,
                ffn=65_536,
                is_gated=is_gated,
                budget_s=1.0,
                device_kind="cpu",
            )
