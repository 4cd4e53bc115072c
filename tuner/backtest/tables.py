"""Backtests as functions, for the command line and for notebooks."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.backtest.records import Backtest
from tuner.backtest.serving.records import ServingBacktest
from tuner.paths import AnyPath, to_paths

if TYPE_CHECKING:
    from pandas import DataFrame

    from tuner.backtest.rl.records import RlBacktest


def backtest(
    runs: "AnyPath | DataFrame",
    *,
    profiles: AnyPath | Sequence[AnyPath] = (),
    uncalibrated: bool = False,
) -> Backtest:
    """Predict measured training runs and report the errors.

    Args:
        runs: table of measured runs, CSV or a data frame.
        profiles: what `moetune calibrate` wrote; none: the residuals that ship.
        uncalibrated: generic constants, no residuals.

    Raises:
        SpecError: the table is unreadable.
    """
    from tuner.backtest.knowledge import read_residual_set
    from tuner.backtest.prediction import backtest as backtest_rows
    from tuner.backtest.rows import read_rows, table_digest

    residual_set = read_residual_set(to_paths(profiles), uncalibrated=uncalibrated)
    with _file(runs) as file:
        rows, digest = read_rows(file), table_digest(file)
    return backtest_rows(rows, residual_set=residual_set, data_sha256=digest)


def backtest_serving(
    runs: "AnyPath | DataFrame", *, profiles: AnyPath | Sequence[AnyPath] = ()
) -> ServingBacktest:
    """Predict measured serving runs and report the errors.

    Args:
        runs: table of measured runs, CSV or a data frame.
        profiles: profiles with kernels, or folders of aiconfigurator's tables; none: datasheets.

    Raises:
        SpecError: the table is unreadable.
    """
    from tuner.backtest.serving.backtest import backtest_serving as backtest_cells
    from tuner.backtest.serving.rows import read_cells

    with _file(runs) as file:
        rows = read_cells(file)
    return backtest_cells(rows, profiles=to_paths(profiles))


def backtest_rl(runs: "AnyPath | DataFrame") -> "RlBacktest":
    """Predict measured steps of reinforcement learning and report the errors.

    Args:
        runs: table of measured steps, CSV or a data frame.

    Raises:
        SpecError: the table is unreadable.
    """
    from tuner.backtest.rl.prediction import backtest_steps
    from tuner.backtest.serving.rows import read_cells

    with _file(runs) as file:
        rows = read_cells(file)
    return backtest_steps(rows)


@contextmanager
def _file(runs: "AnyPath | DataFrame") -> Iterator[Path]:
    """Give the table that is named, or one with the rows of a data frame."""
    if isinstance(runs, str | os.PathLike):
        yield Path(runs)
        return
    with tempfile.TemporaryDirectory() as folder:
        runs.to_csv(file := Path(folder) / "data frame", index=False)
        yield file
