import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.adaptive import Point, left_out_error, propose, propose_case
from profilers.records import Case, Measurement
from profilers.testing import gemm_row

KNEE_BYTES = 2**20


def knee_s(size: float) -> float:
    """A latency floor up to 1 MiB, then a bandwidth."""
    return 1e-4 * max(1.0, size / KNEE_BYTES)


def worst_error(sizes: list[int]) -> float:
    """Largest relative error of interpolating the knee from these sizes, in log space."""
    worst = 0.0
    for low, high in pairwise(sorted(sizes)):
        for step in range(1, 20):
            share = step / 20
            size = low ** (1 - share) * high**share
            guess_s = knee_s(low) ** (1 - share) * knee_s(high) ** share
            worst = max(worst, abs(math.log(guess_s / knee_s(size))))
    return worst


def refined(sizes: list[int], *, count: int) -> list[int]:
    sizes = list(sizes)
    for _ in range(count):
        proposal = propose([Point(size=size, seconds=knee_s(size)) for size in sizes])
        if proposal is None:
            break
        sizes.append(proposal.size)
    return sizes


def test_added_points_gather_at_the_knee_and_beat_a_uniform_grid() -> None:
    coarse = [2**power for power in (10, 15, 22, 26)]
    sizes = refined(coarse, count=6)
    added = sizes[len(coarse) :]
    near = [size for size in added if KNEE_BYTES / 32 <= size <= KNEE_BYTES * 32]
    assert len(near) >= 5
    steps = len(sizes) - 1
    uniform = [round(2 ** (10 + 16 * index / steps)) for index in range(steps + 1)]
    assert worst_error(sizes) < 0.6 * worst_error(uniform)


def test_a_straight_stretch_needs_no_point() -> None:
    assert propose([Point(size=2**power, seconds=2.0**power) for power in range(10)]) is None


def test_two_points_say_nothing() -> None:
    assert propose([Point(size=1, seconds=1.0), Point(size=100, seconds=9.0)]) is None


def test_the_wider_gap_beside_the_worst_point_is_split() -> None:
    # left out, 64 is predicted 1.0 but took 4.0; the gap to 1024 is the wider one: sqrt(64 * 1024)
    points = [Point(size=16, seconds=1.0), Point(size=64, seconds=4.0), Point(size=1024, seconds=1)]
    proposal = propose(points)
    assert proposal is not None
    assert proposal.size == 256
    assert proposal.error == pytest.approx(math.log(4.0))


def test_a_point_left_out_half_way_is_predicted_by_the_geometric_mean() -> None:
    left, middle, right = (Point(size=s, seconds=t) for s, t in ((1, 1.0), (4, 2.0), (16, 16.0)))
    assert left_out_error(left, middle, right) == pytest.approx(math.log(2.0))


@settings(deadline=None, max_examples=100)
@given(
    points=st.dictionaries(st.integers(1, 2**30), st.floats(1e-6, 10.0), max_size=8).map(
        lambda found: [Point(size=size, seconds=seconds) for size, seconds in found.items()]
    )
)
def test_a_proposal_is_new_and_inside(points: list[Point]) -> None:
    proposal = propose(points)
    if proposal is not None:
        sizes = [point.size for point in points]
        assert proposal.size not in sizes
        assert min(sizes) < proposal.size < max(sizes)


def test_a_table_is_refined_on_its_worst_line() -> None:
    straight = [gemm_row(m, float(m)) for m in (16, 64, 256)]
    bent = [
        Measurement(
            case=row.case.model_copy(update={"dtype": "bf16"}),
            times_s=(math.log(row.case.axes["m"]),),
        )
        for row in (gemm_row(m, 1.0) for m in (16, 64, 4096))
    ]
    case = propose_case([*straight, *bent], refined_axes=("m",))
    assert case is not None
    assert case.dtype == "bf16"
    assert case.axes["m"] == 512
    assert case.direction == "forward"
    assert propose_case(straight, refined_axes=("m",)) is None


def test_refined_expert_loads_stay_possible() -> None:
    def row(tokens: int, seconds: float) -> Measurement:
        axes = {"experts": 3, "tokens": tokens, "largest": tokens // 3 * 2, "hidden": 8, "ffn": 8}
        case = Case(operation="grouped_gemm", direction="backward", dtype="fp32", axes=axes)
        return Measurement(case=case, times_s=(seconds,))

    case = propose_case([row(30, 1.0), row(300, 1.0), row(3000, 9.0)], refined_axes=("tokens",))
    assert case is not None
    assert case.axes["tokens"] % 3 == 0
    assert case.axes["largest"] == case.axes["tokens"] // 3 * 2
