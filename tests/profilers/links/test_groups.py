import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.links.groups import Shape, members, shapes


def test_the_shapes_of_eight_ranks_by_hand() -> None:
    found = [(shape.ranks, shape.stride) for shape in shapes(8)]
    assert found == [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)]


def test_the_groups_of_a_strided_shape_by_hand() -> None:
    groups = members(Shape(ranks=2, stride=2), world=8)
    assert groups == ((0, 2), (1, 3), (4, 6), (5, 7))


@settings(deadline=None, max_examples=60)
@given(world=st.integers(1, 96))
def test_the_groups_of_every_shape_hold_every_rank_once(world: int) -> None:
    for shape in shapes(world):
        groups = members(shape, world=world)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {len(group) for group in groups} == {shape.ranks}


def test_one_rank_has_no_links() -> None:
    assert shapes(1) == ()


def test_a_shape_that_does_not_tile_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="do not tile 6"):
        members(Shape(ranks=4, stride=1), world=6)
    with pytest.raises(ValueError, match="has no links"):
        Shape(ranks=1, stride=1)
