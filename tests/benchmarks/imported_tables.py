"""Whether curves over imported tables predict rows of them that they have not seen.

    python tests/benchmarks/imported_tables.py TABLES

TABLES is a folder of aiconfigurator's systems. A tenth of the rows of every series is predicted
from the others; printed is the median error of each operation. Exit code 1: one exceeds its bound.
"""

import sys
from pathlib import Path

import numpy as np

from profilers.imports.registry import import_measurements
from profilers.interpolation import fit_rows
from profilers.records import AXES
from profilers.series import key_of

LARGEST_MEDIAN = {"latent_attention": 0.06, "latent_decode": 0.05, "expert_all_to_all": 0.08}
MOST_HELD_OUT = 300


def main(tables: str) -> int:
    """Print the median error of each operation beside its bound."""
    operations = ",".join(("collective", *LARGEST_MEDIAN))
    options = {"system": "h200_sxm", "framework": "sglang", "operations": operations}
    found = import_measurements("aiconfigurator", Path(tables), options=options, created="now")
    rng = np.random.default_rng(0)
    errors: dict[str, list[float]] = {operation: [] for operation in LARGEST_MEDIAN}
    for series in sorted({key_of(row.case)[0] for row in found.profile.measurements}):
        rows = [row for row in found.profile.measurements if key_of(row.case)[0] == series]
        operation = rows[0].case.operation
        if operation not in errors:
            continue
        order = rng.permutation(len(rows))
        num_held_out = min(MOST_HELD_OUT, max(1, len(rows) // 10))
        curve = fit_rows([rows[i] for i in order[num_held_out:]])[series]
        held_out = [rows[i] for i in order[:num_held_out]]
        axes = [[row.case.axes[axis] for axis in AXES[operation]] for row in held_out]
        seconds, extrapolated = curve.predict(np.array(axes, dtype=np.float64))
        truth = np.array([row.median_s for row in held_out])
        errors[operation] += np.abs(seconds / truth - 1.0)[~extrapolated].tolist()
    medians = {operation: float(np.median(of)) for operation, of in errors.items()}
    for operation, median in medians.items():
        sys.stdout.write(f"{operation}: {median:.1%}, at most {LARGEST_MEDIAN[operation]:.0%}\n")
    return int(any(median > LARGEST_MEDIAN[name] for name, median in medians.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
