"""Bands of TTFT and TPOT by what is known: writes what tuner/costs/serving/bands.json holds.

    python tests/benchmarks/serving_bands.py RUNS.csv [TABLES] [-o tuner/costs/serving/bands.json]

Reads a table in the layout of `moetune backtest` and predicts every launch on Hopper and Blackwell
that states what is needed: from kernels (TABLES or the installed aiconfigurator-core) and, with
every table left out, from the datasheet alone; each once with all that is known and once as if no
row of its model and engine had been looked at. Prints and stores the bands of
tests/benchmarks/serving_band_fit.py, and how many rows of pairs that were left out they hold.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.serving_band_fit import (
    STATED,
    ratio_band,
    ratios_of,
    regimes_of,
    stored_bands,
)
from tests.benchmarks.serving_unseen import datasheet_rows, unseen_rows
from tuner.backtest.rows import digest_of
from tuner.backtest.serving.backtest import pairs_of
from tuner.backtest.serving.rows import read_cells
from tuner.costs.serving.bands import StoredBands


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main(arguments: Sequence[str]) -> int:
    """Print the bands, and store them where asked."""
    inputs, out = list(arguments), None
    if "-o" in inputs:
        at = inputs.index("-o")
        out = Path(inputs[at + 1])
        del inputs[at : at + 2]
    runs, folders = Path(inputs[0]), [Path(one) for one in inputs[1:]]
    judged = pairs_of(read_cells(runs), profiles=folders)
    rows = [*unseen_rows(judged, folders), *datasheet_rows(judged)]
    made = [stored_bands(regime) for regime in regimes_of(rows)]
    found = StoredBands(
        origin=f"{runs.name}: published launches on Hopper and Blackwell",
        data_sha256=digest_of(runs),
        stated_ratio=STATED,
        held=tuple(held for _, held in made),
        bands=tuple(band for bands, _ in made for band in bands),
        ratios=ratio_band(ratios_of(rows)),
    )
    for band in found.bands:
        _say(
            f"{band.kernels} {band.mode} {band.load.value} {band.engine.value}"
            f" {band.network or 'new'}: ttft {band.ttft}, tpot {band.tpot}, {band.rows} rows"
        )
    for held in found.held:
        _say(
            f"{held.kernels} {held.mode}: {held.pairs} pairs left out one by one, inside"
            f" {held.ttft:.1%} of ttft, {held.tpot:.1%} of tpot"
        )
    _say(f"ratios: {found.ratios}")
    if out is not None:
        out.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
