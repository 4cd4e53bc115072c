"""Whether a run through faults trains on the curve of one without, from its losses.

As long as the layout stays, every loss is equal to the last bit. Another layout adds the same terms
in another order, and training amplifies the difference: of the step of
tests/benchmarks/checkpoint_faults.py on two ranks against one, with forced routing, losses in fp32
differ by 3e-8 at first, 8e-8 within 20 steps, 4e-6 within 100 and 1e-2 within 200, in bf16 by 6e-8,
2e-4 within 20 and 1e-2 within 60: seven percent a step or more. In fp64 they differ by 3e-16 within
20 and 3e-11 within 280 (examples/profiles/epyc-faults). No bound that says something holds for a
long run, so that a loss k steps after the first with fewer nodes may differ by a share of

    tolerance                                       k <= strict
    min(tolerance * GROWTH^(k - strict), LARGEST)   later

with 1e-9 for 200 steps in fp64, and for 20 steps 1e-5 in fp32 and 1e-2 in bf16, about a hundred
times what was measured. What the later bound lets pass, repeated steps do not: those between the
checkpoint and a fault are taken twice from the same state, and are compared with the same
tolerance, k counted from the checkpoint, or to the last bit where both launches have one layout.

Not covered: learned routing in less than fp64, which rounding sends to other experts now and then.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import Field

from profilers.records import Record
from tuner.verify.faults.measured import MeasuredRun

STEPS: Final = 20
GROWTH: Final = 1.1
LARGEST: Final = 0.1
TOLERANCE: Final = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 1e-2}
STRICT: Final = {"fp64": 200, "fp32": STEPS, "bf16": STEPS}
"""Steps for which it does not grow."""

Precision = Literal["fp64", "fp32", "bf16"]

Share = Annotated[float, Field(ge=0.0)]


class Curve(Record):
    """Losses of a run against those without faults; differences as shares of a loss."""

    is_exact: bool
    """They are equal to the last bit up to the first step with fewer nodes, and so are repeated
    steps of launches with the same layout."""
    exact_steps: Annotated[int, Field(ge=0)]
    """Before the first step with fewer nodes."""
    near_error: Share = 0.0
    """Largest in the first `STEPS` steps from then on."""
    later_error: Share = 0.0
    """Largest after them."""
    repeats: Annotated[int, Field(ge=0)] = 0
    """Steps that were taken again in another layout."""
    repeat_error: Share = 0.0
    """Largest of them."""
    tolerance: Share = 0.0
    """Of the first steps."""
    is_near: bool = True
    """All are within their tolerance."""

    @property
    def is_kept(self) -> bool:
        """Whether the run trains on the curve."""
        return self.is_exact and self.is_near


def measure_curve(run: MeasuredRun, losses: Sequence[float], *, precision: Precision) -> Curve:
    """Compare the losses of a run with those of one without faults."""
    own = run.losses
    exact = next((place for place, one in enumerate(run.steps) if not one.is_full), len(own))
    later = [
        (place - exact, _error(own[place], losses[place]))
        for place in range(exact, min(len(own), len(losses)))
    ]
    others = [(one.since, _error(one.loss, one.before)) for one in run.repeats if one.is_changed]
    same = [one for one in run.repeats if not one.is_changed]
    return Curve(
        is_exact=len(own) == len(losses)
        and tuple(losses[:exact]) == own[:exact]
        and all(one.loss == one.before for one in same),
        exact_steps=exact,
        near_error=max((error for k, error in later if k < STEPS), default=0.0),
        later_error=max((error for k, error in later if k >= STEPS), default=0.0),
        repeats=len(others),
        repeat_error=max((error for _, error in others), default=0.0),
        tolerance=TOLERANCE[precision],
        is_near=all(
            error <= allowed_error(k, precision=precision)
            for k, error in itertools.chain(later, others)
        ),
    )


def allowed_error(steps: int, *, precision: Precision) -> float:
    """Return by which share a loss may differ so many steps after a change of layout."""
    tolerance, strict = TOLERANCE[precision], STRICT[precision]
    # Beyond the logarithm the power would be too large for a number.
    growth = min((steps - strict) * math.log(GROWTH), math.log(LARGEST / tolerance))
    return tolerance if steps <= strict else tolerance * math.exp(growth)


def _error(loss: float, other: float) -> float:
    share = abs(loss - other) / max(abs(other), sys.float_info.min)
    # A loss that is no number is on no curve; files hold no infinity.
    return share if math.isfinite(share) else sys.float_info.max
