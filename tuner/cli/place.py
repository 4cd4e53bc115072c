"""Options and output of the commands where the goal is to place experts."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tuner.cli.goals import EstimateOptions, VerifyOptions

if TYPE_CHECKING:
    from tuner.verify.placement_records import PlaceVerified

VERIFY_OPTIONS: Final[tuple[str, ...]] = ()
PURPOSE: Final = "for plans that place experts"
OTHER_LAUNCHER: Final = "a placement is measured here; leave it out"
BUDGET_S: Final = 30.0
"""Seconds for measuring a placement and its alternatives."""


def estimate(spec: Path, options: EstimateOptions) -> None:
    """Refuse: no launch file states a placement; what reads training specs says so."""
    from tuner.cli import train

    train.estimate(spec, options)


def verify(folder: Path, _options: VerifyOptions) -> "PlaceVerified":
    """Measure a placement and its alternatives here and return the conclusion."""
    from tuner.goals.place_plan import verify_place

    return verify_place(folder, budget_s=BUDGET_S)
