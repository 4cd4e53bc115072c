"""Backtests as functions, for the command line and for notebooks.

Reading tables needs pandas, which is imported on use only.
"""

from collections.abc import Sequence
from pathlib import Path

from tuner.backtest.records import Backtest
from tuner.backtest.serving.records import ServingBacktest
from tuner.paths import AnyPath, to_paths


def backtest(
    runs: AnyPath, *, profiles: AnyPath | Sequence[AnyPath] = (), uncalibrated: bool = False
) -> Backtest:
    """Predict measured training runs and report the errors.

    Args:
        runs: table of measured runs, CSV.
        profiles: what `moetune calibrate` wrote; none: the residuals that ship.
        uncalibrated: generic constants, no residuals.

    Raises:
        SpecError: the table is unreadable.
    """
    runs = Path(runs)
    profiles = to_paths(profiles)
    from tuner.backtest.knowledge import read_residual_set
    from tuner.backtest.prediction import backtest as backtest_rows
    from tuner.backtest.rows import read_rows, table_digest

    residual_set = read_residual_set(tuple(profiles), uncalibrated=uncalibrated)
    return backtest_rows(read_rows(runs), residual_set=residual_set, data_sha256=table_digest(runs))


def backtest_serving(
    runs: AnyPath, *, profiles: AnyPath | Sequence[AnyPath] = ()
) -> ServingBacktest:
    """Predict measured serving runs and report the errors.

    Args:
        runs: table of measured runs, CSV.
        profiles: profiles with kernels, or folders of aiconfigurator's tables; none: datasheets.

    Raises:
        SpecError: the table is unreadable.
    """
    runs = Path(runs)
    profiles = to_paths(profiles)
    from tuner.backtest.serving.backtest import backtest_serving as backtest_cells
    from tuner.backtest.serving.rows import read_cells

    return backtest_cells(read_cells(runs), profiles=list(profiles))
