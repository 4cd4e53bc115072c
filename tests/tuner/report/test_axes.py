import math

from tests.rows import each_row
from tuner.report.axes import seconds_axis


def test_an_axis_of_seconds_spans_what_is_drawn_and_names_its_ticks() -> None:
    axis = seconds_axis("time", [0.02, 0.4])
    low, high = (10.0**end for end in axis["range"])
    assert low < 0.02 < 0.4 < high < 0.5
    assert axis["ticktext"] == ["20 ms", "50 ms", "100 ms", "200 ms"]
    assert [round(tick, 9) for tick in axis["tickvals"]] == [0.02, 0.05, 0.1, 0.2]


@each_row("strange", [0.0, -1.0, 1e-320, 1e308, math.inf, math.nan])
def test_what_a_logarithm_cannot_show_moves_no_end(strange: float) -> None:
    assert seconds_axis("time", [0.02, strange, 0.4]) == seconds_axis("time", [0.02, 0.4])
    assert all(map(math.isfinite, seconds_axis("time", [strange])["range"]))
