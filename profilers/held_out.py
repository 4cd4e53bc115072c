"""The interpolation error of a table at its hold-out sizes.

They are drawn at random while the table is measured (profilers/adaptive.py), predicted from all
other rows when it is done, and rows like any other afterwards. So the stored table is slightly
better than the stated error, which also contains the noise of measuring those sizes.
"""

from collections.abc import Collection, Sequence

import numpy as np

from profilers.interpolation import fit_rows
from profilers.records import Checked, Measurement
from profilers.sampled_sizes import listed
from profilers.series import key_of, together_s


def checked(rows: Sequence[Measurement], *, left_out: Collection[str]) -> Checked | None:
    """Compare the cases `left_out`, by their ids as listed, with the curves of all other rows.

    None: nothing was left out, or none of it could be measured.
    """
    curves = fit_rows([row for row in rows if listed(row.case).id not in left_out])
    unseen = {key_of(row.case): row.case for row in rows if listed(row.case).id in left_out}
    errors: list[float] = []
    sizes: set[str] = set()
    for series, measured in together_s(rows, shared=False).items():
        for place, seconds in measured.items():
            case = unseen.get((series, place))
            if case is None or not seconds:
                continue
            sizes.add(listed(case).id)
            if series in curves:
                predicted_s, _ = curves[series].predict(np.array([place], dtype=np.float64))
                errors.append(abs(float(predicted_s[0]) / seconds - 1.0))
    if not errors:
        return None
    return Checked(
        sizes=len(sizes),
        median_ratio=float(np.median(errors)),
        p90_ratio=float(np.quantile(errors, 0.9)),
    )
