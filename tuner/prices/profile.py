"""Seconds of one operation at one size, from the stored profile.

The curves interpolate inside the measured range and say when a size lies outside of it. A kind of
operation that was never measured has no price, which is an error.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from profilers.interpolation import Curve, fit_curves
from profilers.records import AXES, Profile
from profilers.series import Key, Series
from tuner.errors import OutsideProfileError
from tuner.prices.ops import RAGGED, Op


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfilePrices:
    """Prices of operations on one kind of device; sizes are whole numbers."""

    curves: Mapping[Series, Curve]
    _known: dict[Key, tuple[float, bool]] = field(default_factory=dict, repr=False)

    @classmethod
    def from_profile(cls, profile: Profile) -> "ProfilePrices":
        """Fit one curve to every operation of the profile."""
        return cls(curves=fit_curves(profile))

    def seconds(self, op: Op) -> float:
        """Predict the wall time of one call, in seconds.

        Raises:
            OutsideProfileError: no call of this kind was ever measured.
        """
        return self._price(op)[0]

    def extrapolated(self, ops: Iterable[Op]) -> tuple[str, ...]:
        """Name the kinds that are priced outside the measured range."""
        return tuple(sorted({op.name for op in ops if self._price(op)[1]}))

    def _price(self, op: Op) -> tuple[float, bool]:
        series = Series(op.operation, op.kind, op.dtype, op.direction)
        place = tuple(int(op.axes[axis]) for axis in AXES[op.operation])
        known = self._known.get((series, place))
        if known is None:
            known = self._known[series, place] = self._lookup((series, place))
        return known

    def _lookup(self, key: Key) -> tuple[float, bool]:
        series, place = key
        curve = self.curves.get(series)
        if curve is None and series.kind == RAGGED:
            # Only profiles of `--for` have it; whole blocks are the nearest.
            curve = self.curves.get(series._replace(kind=""))
        if curve is None:
            name = "/".join(part for part in series if part)
            raise OutsideProfileError(
                f"the profile has no {name}: measure it with `moetune profile --for SPEC.yaml`"
            )
        seconds, outside = curve.predict(np.array([place], dtype=np.float64))
        return float(seconds[0]), bool(outside[0])
