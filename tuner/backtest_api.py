"""Backtests as functions: what the command line calls and a notebook can call too.

Reading tables takes pandas, which is imported by those who ask for it only.
"""

from collections.abc import Sequence
from pathlib import Path

from tuner.backtest.records import Backtest
from tuner.backtest.serving.records import ServingBacktest
from tuner.paths import AnyPath, paths_of


def backtest(
    runs: AnyPath, *, profiles: AnyPath | Sequence[AnyPath] = (), uncalibrated: bool = False
) -> Backtest:
    """Predict measured training runs and say how far off the predictions are.

    Args:
        runs: table of measured runs, CSV.
        profiles: what `moetune calibrate` wrote; none: the residuals that ship.
        uncalibrated: generic constants, no residuals.

    Raises:
        SpecError: the table is unreadable.
    """
    runs = Path(runs)
    profiles = paths_of(profiles)
    from tuner.backtest.knowledge import knowledge_of
    from tuner.backtest.prediction import backtest as backtest_rows
    from tuner.backtest.rows import digest_of, read_rows

    knowledge = knowledge_of(tuple(profiles), uncalibrated=uncalibrated)
    return backtest_rows(read_rows(runs), knowledge=knowledge, data_sha256=digest_of(runs))


def backtest_serving(
    runs: AnyPath, *, profiles: AnyPath | Sequence[AnyPath] = ()
) -> ServingBacktest:
    """Predict measured serving runs and say how far off the predictions are.

    Args:
        runs: table of measured runs, CSV.
        profiles: profiles with kernels, or folders of aiconfigurator's tables; none: the installed
            aiconfigurator-core.

    Raises:
        SpecError: the table is unreadable.
    """
    runs = Path(runs)
    profiles = paths_of(profiles)
    from tuner.backtest.serving.backtest import backtest_serving as backtest_cells
    from tuner.backtest.serving.rows import read_cells

    return backtest_cells(read_cells(runs), profiles=list(profiles))
