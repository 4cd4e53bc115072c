"""Tables that one test goes through: every row is checked, and each that fails is named."""

import inspect
from pathlib import Path

import pytest

from tests.rows import each_row


def test_every_row_is_checked_and_those_that_fail_are_named() -> None:
    seen = []

    @each_row(("one", "other"), [(1, 1), (2, 3), ("a", ValueError)])
    def check(one: object, other: object) -> None:
        seen.append(one)
        if one == "a":
            pytest.fail("never")
        assert one == other

    with pytest.raises(AssertionError) as error:
        check()
    assert seen == [1, 2, "a"]
    count, *failures = str(error.value).splitlines()
    assert count == "2 of 3 rows fail"
    assert any(line.startswith("(2, 3): AssertionError") for line in failures)
    assert any(line.startswith("('a', <class 'ValueError'>): Failed: never") for line in failures)


def test_a_table_without_rows_checks_nothing_and_fails() -> None:
    @each_row("one", [])
    def check(one: int) -> None:
        del one

    with pytest.raises(AssertionError, match="no row"):
        check()


@each_row("factor", (1, 2))
@each_row("text", ("a", "bc"))
def test_tables_multiply_and_leave_the_fixtures(tmp_path: Path, text: str, factor: int) -> None:
    assert tmp_path.is_dir()
    assert len(text * factor) == len(text) * factor


def test_a_case_asks_for_the_fixtures_alone() -> None:
    asked = inspect.signature(test_tables_multiply_and_leave_the_fixtures)
    assert list(asked.parameters) == ["tmp_path"]
