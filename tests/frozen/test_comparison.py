from typing import Any

import pytest

from tests.frozen.comparison import differences, largest_first


def _fields(old: Any, new: Any) -> list[str]:
    return [one.where for one in differences("case", old, new)]


@pytest.mark.parametrize(
    ("name", "old", "new", "is_equal"),
    [
        ("rate_per_s", 3.0, 3.0 * (1.0 + 5e-13), True),
        ("rate_per_s", 3.0, 3.0 * (1.0 + 5e-12), False),
        ("bubble_s", 1e-9, 1e-9 + 5e-12, True),  # of a step of 10 s
        ("bubble_s", 1e-9, 1e-9 + 5e-11, False),
        ("gap_ratio", 1e-9, 1.0001e-9, True),
        ("is_kept", True, 1, False),
        ("devices", None, 0, False),
        ("why", "3 nodes", "4 nodes", False),
        ("lines", ["a", "b"], ["a", "c", "b"], False),
    ],
)
def test_numbers_agree_within_their_room_and_words_to_the_letter(
    name: str, old: Any, new: Any, is_equal: bool
) -> None:
    found = _fields({"step_s": 10.0, name: old}, {"step_s": 10.0, name: new})
    assert found == ([] if is_equal else [name])


def test_fields_that_come_or_go_are_told_first() -> None:
    found = differences("case", {"a": 1.0, "b": 1.0, "c": 0.0}, {"a": 2.0, "b": 1.5, "d": 0.0})
    assert [one.where for one in largest_first(found)] == ["c", "d", "a", "b"]


def test_rows_that_are_drawn_otherwise_are_told_instead_of_their_figures() -> None:
    old = {"drawn": {"pp": [1, 2]}, "figures": {"x": [1.0, 2.0]}}
    found = differences("case", old, {"drawn": {"pp": [1, 4]}, "figures": {"x": [9.0, 9.0]}})
    assert [(one.recorded, one.now) for one in found] == [
        ('{"pp": 2}', "nothing"),
        ("nothing", '{"pp": 4}'),
    ]
