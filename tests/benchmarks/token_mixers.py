"""Linear attention and an indexer on a processor: sizes measured predict those that were not.

    python tests/benchmarks/token_mixers.py

examples/profiles/epyc-token-mixers/ holds, in PyTorch and on one core, scans of Mamba-2, the gated
delta rule and Kimi delta attention (profilers/kernels/linear_scan.py), forward and backward, the
updates of their states in decode (linear_update.py), and an indexer's scores and choice
(index_scores.py), of one new token and of prompts. `KNOWN` sizes are the profile; the others are
predicted from them. Exit code 1: the median error of a kind and direction exceeds `BOUND`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from profilers.interpolation import fit_rows
from profilers.records import AXES, Measurement
from profilers.series import Series, key_of

FOLDER: Final = Path(__file__).parents[2] / "examples/profiles/epyc-token-mixers"
KNOWN: Final[Mapping[str, tuple[tuple[int, ...], ...]]] = {
    # Sequences and their tokens.
    "linear_scan": ((1, 256), (1, 1024), (1, 4096), (4, 1024)),
    # Sequences.
    "linear_update": ((1,), (4,), (8,), (16,), (32,), (64,), (128,), (256,)),
    # Sequences, their new tokens, and what the last of these sees.
    "index_scores": (
        *((1, 1, 1024), (1, 1, 4096), (1, 1, 16384), (8, 1, 1024), (8, 1, 8192)),
        *((2, 1, 2048), (2, 1, 8192), (4, 1, 4096)),
        *((1, 256, 256), (1, 512, 512), (1, 1024, 1024), (1, 2048, 2048), (4, 512, 512)),
    ),
}
BOUND: Final = 0.10
"""Of the median error of a kind and direction: what held-out kernels of a profile have."""


def main() -> int:
    """Print a table; return the exit code."""
    missed = False
    for table in KNOWN:
        for series, errors in held_out_errors(stored(table)):
            median, largest = np.median(np.abs(errors)), np.max(np.abs(errors))
            name = f"{table:13} {series.kind:12} {series.direction:9}"
            sys.stdout.write(f"{name} {median:6.1%} {largest:6.1%} {len(errors)}\n")
            missed |= bool(median > BOUND)
    return int(missed)


def stored(table: str) -> Sequence[Measurement]:
    """Return the rows of a table as they were measured."""
    lines = (FOLDER / f"{table}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Measurement.model_validate_json(line) for line in lines]


def held_out_errors(
    rows: Sequence[Measurement],
) -> Iterator[tuple[Series, np.ndarray]]:
    """Return each series with predicted over measured, less one, of the sizes held out."""
    for series, curve in fit_rows([row for row in rows if is_known(row)]).items():
        others = [row for row in rows if not is_known(row) and key_of(row.case)[0] == series]
        names = AXES[series.operation]
        axes = np.array([[row.case.axes[one] for one in names] for row in others])
        seconds_N, _ = curve.predict(axes.astype(float))
        yield series, seconds_N / [row.expected_s for row in others] - 1.0


def is_known(row: Measurement) -> bool:
    """Whether a row's size is one of those that predict the others."""
    case = row.case
    places = KNOWN[case.operation]
    return tuple(case.axes[axis] for axis in AXES[case.operation][: len(places[0])]) in places


if __name__ == "__main__":
    raise SystemExit(main())
