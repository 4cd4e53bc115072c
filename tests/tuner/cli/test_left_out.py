from tuner.cli.left_out import LONGEST_ID, MOST_REASONS, UnpredictedRow, left_out_text


def test_each_reason_names_its_first_row_and_where_all_are() -> None:
    rows = [
        UnpredictedRow(id="a", source="lab", reason="tp is blank"),
        UnpredictedRow(id="b", source="lab", reason="gbs is blank"),
        UnpredictedRow(id="c", source="lab", reason="gbs is blank"),
        UnpredictedRow(id="d", source="page", reason="gbs is blank"),
    ]
    head, *lines = left_out_text(rows).splitlines()
    assert "--json has every row" in head
    assert lines == [
        "  2 of lab: gbs is blank (first 'b')",
        "  1 of lab: tp is blank ('a')",
        "  1 of page: gbs is blank ('d')",
    ]


def test_a_table_with_a_reason_per_row_stays_short() -> None:
    rows = [UnpredictedRow(id=str(i), source="lab", reason=f"reason {i}") for i in range(1000)]
    lines = left_out_text(rows).splitlines()
    assert len(lines) == MOST_REASONS + 2
    assert lines[-1] == f"  ... and {1000 - MOST_REASONS} further reasons"


def test_no_id_breaks_a_line_or_a_terminal() -> None:
    result = left_out_text(
        [UnpredictedRow(id="x\n\x1b[2J" + "y" * 500, source="lab", reason="blank")]
    )
    assert len(result.splitlines()) == 2
    assert "\x1b" not in result
    assert len(result.splitlines()[1]) < LONGEST_ID + 40


def test_nothing_is_said_where_nothing_is_left_out() -> None:
    assert left_out_text([]) == ""
