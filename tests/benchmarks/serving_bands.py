"""Error bands of TTFT and TPOT: writes tuner/costs/serve/bands.json.

    python tests/benchmarks/serving_bands.py RUNS.csv [TABLES] [-o tuner/costs/serve/bands.json]

Reads a published table (published_serving.py) and predicts every launch on Hopper and Blackwell
that states what is needed: from kernels (TABLES) and, without
any table, from the datasheet only; each once with everything known and once as if no row of its
model and engine were known. Prints and stores the bands of tests/benchmarks/serving_band_fit.py,
and their coverage of held-out pairs.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from tests.benchmarks.bars import say
from tests.benchmarks.published_serving import read_published
from tests.benchmarks.serving_band_fit import (
    STATED,
    ratio_band,
    ratios_of,
    regimes_of,
    stored_bands,
    widenings,
)
from tests.benchmarks.serving_unseen import datasheet_rows, unseen_rows
from tuner.backtest.rows import table_digest
from tuner.backtest.serving.backtest import predict_pairs
from tuner.costs.serve.bands import StoredBands
from tuner.output import entries_json
from tuner.spec.serving.goal import EngineName


def main(arguments: Sequence[str]) -> int:
    """Print the bands, and store them if requested."""
    inputs, out = list(arguments), None
    if "-o" in inputs:
        at = inputs.index("-o")
        out = Path(inputs[at + 1])
        del inputs[at : at + 2]
    runs, folders = Path(inputs[0]), [Path(one) for one in inputs[1:]]
    predicted = predict_pairs(read_published(runs), profiles=folders)
    rows = [*unseen_rows(predicted, folders), *datasheet_rows(predicted)]
    regimes = regimes_of(rows)
    made = [stored_bands(regime) for regime in regimes]
    result = StoredBands(
        origin=f"{runs.name}: published launches on Hopper and Blackwell",
        data_sha256=table_digest(runs),
        stated_ratio=STATED,
        coverages=tuple(coverage for _, coverage in made),
        bands=tuple(band for bands, _ in made for band in bands),
        widenings=widenings(regimes),
        releases={
            engine: tuple(
                sorted({row.launch.release for row in rows if row.launch.engine == engine})
            )
            for engine in get_args(EngineName)
        },
        ratios=ratio_band(ratios_of(rows)),
    )
    for band in result.bands:
        say(
            f"{band.kernels} {band.mode} {band.engine}"
            f" {band.network or 'new'}: ttft {band.ttft}, tpot {band.tpot}, {band.rows} rows"
        )
    for held in result.coverages:
        say(
            f"{held.kernels} {held.mode}: {held.pairs} pairs left out one by one, inside"
            f" {held.ttft:.1%} of ttft, {held.tpot:.1%} of tpot"
        )
    for one in result.widenings:
        say(
            f"{one.kernels} without the {one.lacking}: edges times {one.ttft} of ttft,"
            f" {one.tpot} of tpot, from {one.groups} left out in turn"
        )
    say(f"ratios: {result.ratios}")
    if out is not None:
        out.write_text(entries_json(result.model_dump(mode="json")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
