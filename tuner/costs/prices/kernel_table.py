"""Seconds of one operation at one size, from the stored profile.

The curves interpolate inside the measured range and say when a size lies outside of it. A kind of
operation that was never measured has no price, which is an error.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from profilers.interpolation import Curve, fit_curves
from profilers.records import Case, Profile
from profilers.series import Series, key_of
from tuner.errors import OutsideProfileError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelTable:
    """Prices of operations on one kind of device."""

    curves: Mapping[Series, Curve]
    _memo: dict[str, tuple[float, bool]] = field(default_factory=dict, repr=False)

    @classmethod
    def from_profile(cls, profile: Profile) -> "KernelTable":
        """Fit one curve to every operation of the profile."""
        return cls(curves=fit_curves(profile))

    def seconds(self, case: Case) -> float:
        """Predict the wall time of one call, in seconds.

        Raises:
            OutsideProfileError: no call of this kind was ever measured.
        """
        return self._price(case)[0]

    def is_extrapolated(self, case: Case) -> bool:
        """Whether the size lies outside the measured range."""
        return self._price(case)[1]

    def extrapolated(self, cases: Iterable[Case]) -> tuple[str, ...]:
        """Name the kinds among `cases` that are priced outside the measured range."""
        outside = {
            "/".join(part for part in (case.operation, case.kind) if part)
            for case in cases
            if self.is_extrapolated(case)
        }
        return tuple(sorted(outside))

    def _price(self, case: Case) -> tuple[float, bool]:
        known = self._memo.get(case.id)
        if known is None:
            known = self._memo[case.id] = self._lookup(case)
        return known

    def _lookup(self, case: Case) -> tuple[float, bool]:
        series, place = key_of(case)
        curve = self.curves.get(series)
        if curve is None:
            name = "/".join(part for part in series if part)
            raise OutsideProfileError(
                f"the profile has no {name}: measure it with `moetune profile --for SPEC.yaml`"
            )
        seconds, outside = curve.predict(np.array([place], dtype=np.float64))
        return float(seconds[0]), bool(outside[0])
