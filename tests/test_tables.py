"""A table is gone through to its end, and every row that fails is named."""

from pathlib import Path

import pytest

from tests.tables import for_each


def test_every_row_that_fails_is_named_and_the_others_are_not() -> None:
    seen: list[int] = []

    @for_each("outer", ["a"])
    @for_each(("one", "other"), [(1, 1), (2, 3), (4, 4), (5, 6)])
    def equal(one: int, other: int, outer: str) -> None:
        seen.append(one)
        if one == 5:
            with pytest.raises(ValueError, match="never"):
                pass
        assert one == other, outer

    with pytest.raises(AssertionError) as failed:
        equal()
    assert seen == [1, 2, 4, 5]
    said = str(failed.value)
    assert "2 of 4 rows" in said
    assert "(2, 3): AssertionError" in said
    assert "(5, 6): Failed: DID NOT RAISE" in said
    assert "(4, 4)" not in said


def test_a_table_without_a_row_fails() -> None:
    @for_each("one", [])
    def never(one: int) -> None:
        raise NotImplementedError

    with pytest.raises(AssertionError, match="no row"):
        never()


@for_each("name", ["a", "b"])
def test_fixtures_are_handed_through(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert (tmp_path / name).is_dir()
