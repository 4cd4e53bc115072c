"""Scans of linear attention on a processor: sizes that were not measured, from those that were.

    python tests/benchmarks/linear_scans.py [--measure]

examples/profiles/epyc-linear-scan/ holds Mamba-2, the gated delta rule and Kimi delta attention in
PyTorch (profilers/kernels/linear_scan.py), forward and backward, on one core. `KNOWN` sizes are the
profile; the others (`OTHERS` and those that the profiler added) are predicted from them.
`--measure` measures again: three minutes on an idle machine. Exit code 1: the median error of a
kind and direction exceeds `BOUND`.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
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

ROWS: Final = Path(__file__).parents[2] / "examples/profiles/epyc-linear-scan/linear_scan.jsonl"
SHAPES: Final = {
    # Heads, key heads, widths of keys and values, tokens of a chunk.
    MAMBA2: (8, 2, 64, 64, 64),
    GATED_DELTA: (8, 4, 64, 64, 64),
    KDA: (8, 8, 64, 64, 64),
}
KNOWN: Final = ((1, 256), (1, 1024), (1, 4096), (4, 1024))
"""Sequences and their tokens."""
OTHERS: Final = ((1, 512), (1, 2048), (2, 768), (4, 512), (2, 2048), (3, 1280))
BOUND: Final = 0.10
"""Of the median error of a kind and direction: what held-out kernels of a profile have."""
BUDGET_S: Final = 150.0


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="measure the rows again")
    if parser.parse_args().measure:
        ROWS.parent.mkdir(parents=True, exist_ok=True)
        ROWS.write_text("".join(f"{row.model_dump_json()}\n" for row in measured()))
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    missed = False
    for series, errors in held_out_errors(
        [Measurement.model_validate_json(line) for line in lines]
    ):
        median, largest = np.median(np.abs(errors)), np.max(np.abs(errors))
        line = f"{series.kind:12} {series.direction:9} {median:6.1%} {largest:6.1%}\n"
        sys.stdout.write(line)
        missed |= bool(median > BOUND)
    return int(missed)


def measured() -> Sequence[Measurement]:
    """Measure every size of every kind on one core."""
    names = ("heads", "key_heads", "key_dim", "value_dim", "chunk")
    wanted = tuple(
        Case(
            operation="linear_scan",
            kind=kind,
            dtype="bf16",
            direction="forward",
            axes={"batch": batch, "sequence": sequence, **dict(zip(names, shape, strict=True))},
        )
        for kind, shape in SHAPES.items()
        for batch, sequence in KNOWN + OTHERS
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
        return read_profile(folder).table("linear_scan")


def held_out_errors(
    rows: Sequence[Measurement],
) -> Iterator[tuple[Series, np.ndarray]]:
    """Return each series with predicted over measured, less one, of the sizes held out."""
    known = [row for row in rows if size(row) in KNOWN]
    curves = fit_rows(known)
    for series, curve in curves.items():
        others = [row for row in rows if size(row) not in KNOWN and key_of(row.case)[0] == series]
        axes = np.array([[row.case.axes[one] for one in AXES["linear_scan"]] for row in others])
        seconds_N, _ = curve.predict(axes.astype(float))
        yield series, seconds_N / [row.expected_s for row in others] - 1.0


def size(row: Measurement) -> tuple[int, int]:
    """Return sequences and their tokens."""
    return row.case.axes["batch"], row.case.axes["sequence"]


if __name__ == "__main__":
    raise SystemExit(main())
