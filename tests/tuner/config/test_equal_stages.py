"""Equal stages are printed once, under numbers that name each stage exactly once."""

import re

from hypothesis import given
from hypothesis import strategies as st

from tuner.config.equal_stages import equal_stages, number_ranges


def numbers_of(label: str) -> list[int]:
    """Read a label back, as a person would."""
    result: list[int] = []
    words = label.split(", ")
    for place, word in enumerate(words):
        if match := re.fullmatch(r"(\d+)-(\d+)", word):
            result += range(int(match[1]), int(match[2]) + 1)
        elif match := re.fullmatch(r"\.\.\. (\d+)", word):
            first, second = int(words[place - 2]), int(words[place - 1])
            result += range(second + second - first, int(match[1]) + 1, second - first)
        else:
            result.append(int(word))
    return result


def test_numbers_are_written_as_ranges() -> None:
    wanted = {
        (0,): "0",
        (0, 1): "0-1",
        (2, 5): "2, 5",
        (0, 2, 4): "0, 2, ... 4",
        tuple(range(2, 16)): "2-15",
        (0, *range(2, 16)): "0, 2-15",
        (1, 5, 9, 13): "1, 5, ... 13",
        (0, 3, 4, 5, 9): "0, 3-5, 9",
    }
    assert {numbers: number_ranges(numbers) for numbers in wanted} == wanted


@given(st.sets(st.integers(0, 200)))
def test_a_label_names_every_number_once(numbers: set[int]) -> None:
    ordered = sorted(numbers)
    assert numbers_of(number_ranges(ordered)) == ordered if ordered else True


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40))
def test_every_stage_lies_in_one_group_of_its_row(rows: list[str]) -> None:
    groups = equal_stages(rows)
    assert sorted(stage for one in groups for stage in one.stages) == list(range(len(rows)))
    assert all(rows[stage] == one.row for one in groups for stage in one.stages)
    assert len(groups) == len(set(rows))
    assert [one.stages[0] for one in groups] == sorted(one.stages[0] for one in groups)


def test_many_equal_stages_are_one_row() -> None:
    groups = equal_stages(["first", *["middle"] * 14, "last"])
    assert [(one.label, one.row) for one in groups] == [
        ("0", "first"),
        ("1-14", "middle"),
        ("15", "last"),
    ]
