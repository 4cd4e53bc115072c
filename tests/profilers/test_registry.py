from pathlib import Path

import pytest

from profilers.benchmark import Setting
from profilers.clock import HostClock
from profilers.errors import UnknownNameError
from profilers.records import AXES
from profilers.registry import SUITES, load_suite
from profilers.team import SingleRank
from tests.rows import each_row


@each_row("name", SUITES)
def test_every_suite_offers_benchmarks_of_known_tables(name: str) -> None:
    setting = Setting(
        device="cpu", dtypes=("fp32",), team=SingleRank(), clock=HostClock(), directory=Path()
    )
    for benchmark in load_suite(name)(setting):
        assert benchmark.weight > 0.0
        assert set(benchmark.refined_axes) <= set(AXES[benchmark.operation])
        assert all(case.operation == benchmark.operation for case in benchmark.cases())


def test_unknown_and_former_suites_are_answered() -> None:
    with pytest.raises(UnknownNameError, match="'kernel' is not one of kernels, links"):
        load_suite("kernel")
    with pytest.raises(UnknownNameError, match=r"'restart' is no more: state goal.reliability"):
        load_suite("restart")
