"""Calibrates on a table of serving runs and stores the factors."""

from pathlib import Path

from profilers.records import Record
from tuner.backtest.rows import table_digest
from tuner.backtest.serving.backtest import predict_pairs
from tuner.backtest.serving.records import Metric
from tuner.backtest.serving.residuals import ServingResiduals
from tuner.backtest.serving.rows import read_cells
from tuner.backtest.serving.scores import summarise_metric, tpot, ttft
from tuner.calibrate.serving import fit, held_out
from tuner.calibrate.stored import DATASHEETS
from tuner.errors import SpecError
from tuner.output import write_files


class ServingCalibration(Record):
    """The factors, and how well those of other models predict each model."""

    residuals: ServingResiduals
    held_out_tpot: Metric
    held_out_ttft: Metric


def calibrate_serving(profile: str, runs: Path, out: Path) -> ServingCalibration:
    """Fit a table's rows and write the factors to a file.

    Args:
        profile: folder of a profile or of tables, or `datasheets` for the installed tables.
        runs: the table.
        out: where to write; a file that ends in .json.

    Raises:
        SpecError: the place is no such file, or no row can be predicted.
        OutputError: the place cannot be written to.
    """
    if out.suffix != ".json":
        raise SpecError(f"{str(out)!r}: factors of serving runs go into a file; end it in .json")
    folders = [] if profile == DATASHEETS else [Path(profile)]
    pairs = predict_pairs(read_cells(runs), profiles=folders).pairs
    if not pairs:
        raise SpecError(f"{str(runs)!r}: no row can be predicted; 'moetune backtest' says why")
    residuals = fit(pairs, origin=f"fitted to {runs.name}, SHA-256 {table_digest(runs)}")
    without = held_out(pairs)
    write_files(out.parent, {out.name: residuals.model_dump_json(indent=1) + "\n"}, option="-o")
    return ServingCalibration(
        residuals=residuals,
        held_out_tpot=summarise_metric(without, read=tpot, refused=()),
        held_out_ttft=summarise_metric(without, read=ttft, refused=()),
    )
