"""`moetune backtest`: compare predictions with measured runs, as errors per source."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tuner.cli.text import print_result
from tuner.output import write_csv


def command(
    runs: Annotated[
        Path, typer.Argument(help="Table of measured runs, CSV; columns below.", show_default=False)
    ],
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="Output of 'moetune calibrate'; repeatable. A folder with a profile applies to "
            "its device, bare residuals to all. Default: the residuals that ship. Serving runs: "
            "profiles with kernels, or a folder of aiconfigurator tables; default: datasheets.",
        ),
    ] = None,
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="Generic constants, no residuals.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Also write every row of it to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, every row of it.")] = False,
) -> None:
    """Predict measured runs and report the errors.

    A table with the columns silicon_ttft_ms and silicon_tpot_ms is one of serving runs, one with
    step_s and rollout_layout one of steps of reinforcement learning.
    """
    from tuner.backtest.rl.layout import MEASURED
    from tuner.backtest.rows import has_columns
    from tuner.backtest.serving.rows import is_serving_table
    from tuner.backtest.tables import backtest, backtest_rl, backtest_serving
    from tuner.cli.backtest_text import backtest_text, rl_text, serving_text
    from tuner.cli.progress import planning_progress

    result: Any
    is_serving, profiles = is_serving_table(runs), tuple(profile or ())
    is_rl = has_columns(runs, MEASURED)
    with planning_progress("backtest", text=f"predicting the rows of {runs.name}"):
        if is_rl:
            result = backtest_rl(runs)
        elif is_serving:
            result = backtest_serving(runs, profiles=profiles)
        else:
            result = backtest(runs, profiles=profiles, uncalibrated=uncalibrated)
    if csv is not None:
        write_csv(csv, result.rows())
    text = rl_text if is_rl else serving_text if is_serving else backtest_text
    print_result(result, text, as_json=as_json)
    errors = result.shipped.total if is_rl else result.tpot if is_serving else result.total
    if not errors.predicted:
        raise typer.Exit(1)


def _columns() -> str:
    from tuner.backtest.layout import COLUMNS
    from tuner.backtest.rl.layout import COLUMNS as RL_COLUMNS
    from tuner.backtest.serving.layout import COLUMNS as SERVING_COLUMNS

    listed, serving, rl = (
        "\n\n".join(f"{name}: {meaning}" for name, meaning in columns.items())
        for columns in (COLUMNS, SERVING_COLUMNS, RL_COLUMNS)
    )
    return (
        f"Columns of RUNS (any may be missing or blank, others are ignored):\n\n{listed}\n\n"
        f"Columns of a table of serving runs:\n\n{serving}\n\n"
        f"Columns of a table of steps of reinforcement learning:\n\n{rl}"
    )


command.__doc__ = f"{command.__doc__}\n\n{_columns()}"
