"""What `moetune profile show` says of the sizes between the measured ones."""

from profilers.records import Checked, TableInfo
from tests.expect import contains
from tests.profilers.testing import fake_profile, gemm_row
from tuner.cli.profile_text import summary_text


def test_the_error_at_sizes_left_out_is_printed_beside_its_table() -> None:
    header = fake_profile([gemm_row(64, 1.0)]).header
    assert "interpolation:" not in summary_text(header)
    result = Checked(sizes=40, median_ratio=0.0312, p90_ratio=0.1049)
    table = TableInfo(rows=300, complete=True, seconds=9.0, checked=result)
    text = summary_text(header.model_copy(update={"tables": {"gemm": table}}))
    contains(text, "3.1 % / 10.5 % of 40", "interpolation: error on random held-out sizes")
