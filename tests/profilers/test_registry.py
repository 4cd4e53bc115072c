from pathlib import Path

import pytest

from profilers.benchmark import Setting
from profilers.errors import UnknownNameError
from profilers.records import AXES
from profilers.registry import SUITES, load_suite
from profilers.team import Alone
from profilers.timing import HostClock
from tests.rows import each_row


@each_row("name", SUITES)
def test_every_suite_offers_benches_of_known_tables(name: str) -> None:
    setting = Setting(
        device="cpu", dtypes=("fp32",), team=Alone(), clock=HostClock(), directory=Path()
    )
    for bench in load_suite(name)(setting):
        assert bench.weight > 0.0
        assert set(bench.refined_axes) <= set(AXES[bench.operation])
        assert all(case.operation == bench.operation for case in bench.cases())


def test_an_unknown_suite_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="'kernel' is not one of kernels, links"):
        load_suite("kernel")
