"""Whether curves over imported tables predict rows of them that they have not seen."""

from pathlib import Path

import numpy as np
import pytest

from profilers.imports.registry import import_measurements
from profilers.interpolation import fit_rows
from profilers.records import AXES, Measurement
from profilers.series import Series, key_of
from tests.rows import each_row

TABLES = Path(__file__).parents[3] / "shared" / "data" / "aiconfigurator"
NUM_HELD_OUT = 300


@pytest.fixture(scope="module")
def measured() -> tuple[Measurement, ...]:
    if not TABLES.is_dir():
        pytest.skip("aiconfigurator's tables do not lie beside the checkout")
    options = {
        "system": "h200_sxm",
        "framework": "sglang",
        "operations": "latent_attention,latent_decode,collective,expert_all_to_all",
    }
    found = import_measurements("aiconfigurator", TABLES, options=options, created="now")
    return found.profile.measurements


@each_row(
    ("operation", "largest_median_ratio"),
    [("latent_attention", 0.06), ("latent_decode", 0.05), ("expert_all_to_all", 0.08)],
)
def test_a_tenth_of_the_rows_is_predicted_from_the_others(
    measured: tuple[Measurement, ...], operation: str, largest_median_ratio: float
) -> None:
    rng = np.random.default_rng(0)
    of_operation = [row for row in measured if row.case.operation == operation]
    errors: list[float] = []
    for series in sorted({_series(row) for row in of_operation}):
        rows = [row for row in of_operation if _series(row) == series]
        order = rng.permutation(len(rows))
        num_held_out = min(NUM_HELD_OUT, max(1, len(rows) // 10))
        curve = fit_rows([rows[i] for i in order[num_held_out:]])[series]
        held_out = [rows[i] for i in order[:num_held_out]]
        axes = [[row.case.axes[axis] for axis in AXES[operation]] for row in held_out]
        seconds, extrapolated = curve.predict(np.array(axes, dtype=np.float64))
        truth = np.array([row.median_s for row in held_out])
        errors += np.abs(seconds / truth - 1.0)[~extrapolated].tolist()
    assert len(errors) > 50
    assert np.median(errors) < largest_median_ratio


def _series(row: Measurement) -> Series:
    return key_of(row.case)[0]
