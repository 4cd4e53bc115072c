from tests.expect import present
from tuner.cli.backtest_text import LONGEST_ID, MOST_REASONS, left_out


def test_each_reason_names_its_first_row_and_where_all_are() -> None:
    rows = [
        ("a", "lab", "tp is blank"),
        ("b", "lab", "gbs is blank"),
        ("c", "lab", "gbs is blank"),
        ("d", "page", "gbs is blank"),
        ("e", "page", None),
    ]
    head, *lines = present(left_out(rows)).notes
    assert "--json has every row" in head
    assert lines == [
        "2 of lab: gbs is blank (first 'b')",
        "1 of lab: tp is blank ('a')",
        "1 of page: gbs is blank ('d')",
    ]


def test_a_table_with_a_reason_per_row_stays_short() -> None:
    found = present(left_out((f"{i}" + "y" * 500, "lab", f"reason {i}") for i in range(1000)))
    assert len(found.notes) == MOST_REASONS + 2
    assert found.notes[-1] == f"... and {1000 - MOST_REASONS} further reasons"
    assert max(map(len, found.notes)) < LONGEST_ID + 40


def test_nothing_is_said_where_nothing_is_left_out() -> None:
    assert left_out([]) is None
