"""How many chunks, and of which size."""

from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.moe import chunks_needed, even_parts


def test_chunks_are_the_smallest_power_of_two_that_fits() -> None:
    needed = [chunks_needed(received, limit=100, most=8) for received in (0, 100, 101, 201, 400)]
    assert needed == [1, 1, 2, 4, 4]
    assert chunks_needed(10_000, limit=100, most=8) == 8


@settings(deadline=None, max_examples=80)
@given(total=st.integers(0, 500), parts=st.integers(1, 16))
def test_parts_are_even_and_add_up(total: int, parts: int) -> None:
    sizes = even_parts(total, parts=parts)
    assert len(sizes) == parts
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
