"""Linear attention and an indexer on a processor: sizes measured predict those that were not.

    python tests/benchmarks/token_mixers.py [--measure TABLE ...]

examples/profiles/epyc-token-mixers/ holds, in PyTorch and on one core, scans of Mamba-2, the gated
delta rule and Kimi delta attention (profilers/kernels/linear_scan.py), forward and backward, the
updates of their states in decode (linear_update.py), and an indexer's scores and choice
(index_scores.py), of one new token and of prompts. `KNOWN` sizes are the profile; the others
(`OTHERS` and those that the profiler added) are predicted from them. `--measure` measures tables
again: three minutes on an idle machine. Exit code 1: the median error of a kind and direction
exceeds `BOUND`.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")

from profilers.interpolation import fit_rows
from profilers.kernels.linear_scan import GATED_DELTA, KDA, MAMBA2
from profilers.records import AXES, Case, Measurement
from profilers.series import Series, key_of
from profilers.session import measure_profile
from profilers.store import read_profile

FOLDER: Final = Path(__file__).parents[2] / "examples/profiles/epyc-token-mixers"
LINEAR_SHAPES: Final = {
    # Heads, key heads, widths of keys and values, tokens of a chunk.
    MAMBA2: (8, 2, 64, 64, 64),
    GATED_DELTA: (8, 4, 64, 64, 64),
    KDA: (8, 8, 64, 64, 64),
}
SHAPES: Final[Mapping[str, Mapping[str, tuple[int, ...]]]] = {
    "linear_scan": LINEAR_SHAPES,
    "linear_update": {kind: shape[:-1] for kind, shape in LINEAR_SHAPES.items()},
    # Heads, their width, tokens that are chosen.
    "index_scores": {"": (16, 128, 512)},
}
"""By table and kind: the axes after those of `KNOWN`."""
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
OTHERS: Final[Mapping[str, tuple[tuple[int, ...], ...]]] = {
    "linear_scan": ((1, 512), (1, 2048), (2, 768), (4, 512), (2, 2048), (3, 1280)),
    "linear_update": ((2,), (24,), (96,)),
    "index_scores": (
        *((1, 1, 2048), (1, 1, 8192), (8, 1, 3000)),
        *((1, 768, 768), (1, 1500, 1500), (2, 1024, 1024)),
    ),
}
BOUND: Final = 0.10
"""Of the median error of a kind and direction: what held-out kernels of a profile have."""
BUDGET_S: Final = 150.0


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", nargs="+", choices=sorted(KNOWN), default=(), metavar="TABLE")
    tables = parser.parse_args().measure
    if tables:
        for table, rows in measured(tables).items():
            path_of(table).write_text("".join(f"{row.model_dump_json()}\n" for row in rows))
    missed = False
    for table in KNOWN:
        for series, errors in held_out_errors(stored(table)):
            median, largest = np.median(np.abs(errors)), np.max(np.abs(errors))
            name = f"{table:13} {series.kind:12} {series.direction:9}"
            sys.stdout.write(f"{name} {median:6.1%} {largest:6.1%} {len(errors)}\n")
            missed |= bool(median > BOUND)
    return int(missed)


def measured(tables: Sequence[str]) -> Mapping[str, Sequence[Measurement]]:
    """Measure every size of every kind of these tables on one core."""
    wanted = tuple(
        Case(
            operation=table,
            kind=kind,
            dtype="bf16",
            direction="forward" if table == "linear_scan" else "",
            axes=dict(zip(AXES[table], (*place, *shape), strict=True)),
        )
        for table in tables
        for kind, shape in SHAPES[table].items()
        for place in KNOWN[table] + OTHERS[table]
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "profile"
        measure_profile(
            folder,
            suites=("kernels",),
            budget_s=BUDGET_S,
            ranks=1,
            device="cpu",
            extra_cases=wanted,
        )
        profile = read_profile(folder)
        return {table: profile.rows(table) for table in tables}


def stored(table: str) -> Sequence[Measurement]:
    """Return the rows of a table as they were measured."""
    lines = path_of(table).read_text(encoding="utf-8").splitlines()
    return [Measurement.model_validate_json(line) for line in lines]


def path_of(table: str) -> Path:
    """Return where the rows of a table are."""
    return FOLDER / f"{table}.jsonl"


def held_out_errors(
    rows: Sequence[Measurement],
) -> Iterator[tuple[Series, np.ndarray]]:
    """Return each series with predicted over measured, less one, of the sizes held out."""
    known = [row for row in rows if is_known(row)]
    curves = fit_rows(known)
    for series, curve in curves.items():
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
