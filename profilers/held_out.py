"""How well a table knows the sizes between its measured ones: by sizes that its fit has not seen.

They are drawn at random while the table is measured (profilers/adaptive.py), predicted from all
other rows when it is done, and rows like any other afterwards. So the stored table knows slightly
more than it states of itself, and what it states contains the noise of measuring those sizes.
"""

from collections.abc import Collection, Sequence

import numpy as np

from profilers.drawing import listed
from profilers.interpolation import Series, fit_rows
from profilers.records import AXES, Case, Checked, Measurement, Status


def checked(rows: Sequence[Measurement], *, left_out: Collection[str]) -> Checked | None:
    """Compare the cases `left_out`, by their ids as listed, with the curves of all other rows.

    The slowest rank's time counts, as it does in a curve. None: nothing was left out.
    """
    curves = fit_rows([row for row in rows if listed(row.case).id not in left_out])
    truth_s: dict[str, tuple[Case, float]] = {}
    for row in rows:
        if listed(row.case).id in left_out and row.status is Status.OK and row.expected_s > 0.0:
            slowest = truth_s.get(row.case.id, (row.case, 0.0))[1]
            truth_s[row.case.id] = row.case, max(slowest, row.expected_s)
    errors = []
    for case, seconds in truth_s.values():
        series = Series(case.operation, case.kind, case.dtype, case.direction)
        if series in curves:
            place = [float(case.axes[axis]) for axis in AXES[case.operation]]
            predicted_s = float(curves[series].predict(np.array([place]))[0][0])
            errors.append(abs(predicted_s / seconds - 1.0))
    if not errors:
        return None
    return Checked(
        sizes=len({listed(case).id for case, _ in truth_s.values()}),
        median_ratio=float(np.median(errors)),
        p90_ratio=float(np.quantile(errors, 0.9)),
    )
