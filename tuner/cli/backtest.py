"""`moetune backtest`: predictions beside measured runs, as errors per source."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    runs: Annotated[
        Path, typer.Argument(help="Table of measured runs, CSV; columns below.", show_default=False)
    ],
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="What 'moetune calibrate' wrote; repeatable. A folder with a profile holds for "
            "its device, bare residuals for all. Default: the residuals that ship.",
        ),
    ] = None,
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="Generic constants, no residuals.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, every row of it.")] = False,
) -> None:
    """Predict published training runs and say how far off the predictions are."""
    from tuner.backtest.knowledge import knowledge_of
    from tuner.backtest.prediction import backtest
    from tuner.backtest.rows import digest_of, read_rows
    from tuner.cli.backtest_text import backtest_text

    knowledge = knowledge_of(tuple(profile or ()), uncalibrated=uncalibrated)
    judged = backtest(read_rows(runs), knowledge=knowledge, data_sha256=digest_of(runs))
    print(judged.model_dump_json(indent=2) if as_json else backtest_text(judged))
    if not judged.total.predicted:
        raise typer.Exit(1)


def _columns() -> str:
    from tuner.backtest.layout import COLUMNS

    listed = "\n\n".join(f"{name}: {meaning}" for name, meaning in COLUMNS.items())
    return f"Columns of RUNS (any may be missing or blank, others are ignored):\n\n{listed}"


command.__doc__ = f"{command.__doc__}\n\n{_columns()}"
