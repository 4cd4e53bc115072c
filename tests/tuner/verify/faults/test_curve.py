"""Losses of a run that changed its layout against those of one that did not."""

import math

from tests.rows import Failures
from tuner.verify.faults.curve import (
    GROWTH,
    LARGEST,
    STEPS,
    STRICT,
    TOLERANCE,
    Curve,
    Precision,
    allowed_error,
    measure_curve,
)
from tuner.verify.faults.measured import MeasuredRun, Repeat, Step

LOSSES = tuple(4.0 / (1 + number) for number in range(60))
FEWER = 10
"""Steps before those with fewer nodes."""


def curve(
    *changes: tuple[int, float], repeats: tuple[Repeat, ...] = (), fewer: int = FEWER
) -> Curve:
    """That of a run some of whose losses are larger by a share."""
    losses = list(LOSSES)
    for place, share in changes:
        losses[place] *= 1.0 + share
    run = MeasuredRun(
        wall_s=60.0,
        training_s=60.0,
        saving_s=0.0,
        recovery_s=0.0,
        restarts=(),
        steps=tuple(
            Step(number=place + 1, seconds=1.0, loss=loss, end_s=place, is_full=place < fewer)
            for place, loss in enumerate(losses)
        ),
        repeats=repeats,
    )
    return measure_curve(run, LOSSES, precision="fp64")


def repeat(*, share: float, is_changed: bool) -> Repeat:
    return Repeat(since=0, loss=1.0 + share, before=1.0, is_changed=is_changed)


def test_what_is_on_the_curve() -> None:
    late = FEWER + STEPS + 5
    cases = {
        "the same": (curve(), True),
        "rounding with fewer nodes": (curve((FEWER, 1e-13), (late, 1e-12)), True),
        "rounding before": (curve((FEWER - 1, 1e-13)), False),
        "rounding with all nodes to the end": (curve((late, 1e-13), fewer=60), False),
        "more than rounding": (curve((FEWER, 1e-8)), False),
        "more than that later": (curve((late, 1.3e-9)), False),
        "no number": (curve((FEWER, math.nan)), False),
        "a repeated step": (curve(repeats=(repeat(share=1e-13, is_changed=True),)), True),
        "a repeated step that differs": (
            curve(repeats=(repeat(share=1e-8, is_changed=True),)),
            False,
        ),
        "a repeated step of the same layout": (
            curve(repeats=(repeat(share=1e-13, is_changed=False),)),
            False,
        ),
    }
    failures = Failures()
    for name, (made, is_kept) in cases.items():
        with failures.of(name):
            assert made.is_kept is is_kept
            assert Curve.model_validate_json(made.model_dump_json()) == made
    failures.check()
    made = curve((FEWER, 1e-13), (late, 1e-12))
    assert made.exact_steps == FEWER
    assert 0.9e-13 < made.near_error < 1.1e-13
    assert 0.9e-12 < made.later_error < 1.1e-12


def test_a_run_with_other_steps_is_not_on_the_curve() -> None:
    run = MeasuredRun(
        wall_s=1.0, training_s=1.0, saving_s=0.0, recovery_s=0.0, restarts=(), steps=()
    )
    assert measure_curve(run, (), precision="fp32").is_kept
    assert not measure_curve(run, LOSSES, precision="fp32").is_kept


def test_the_allowed_error_grows_up_to_its_largest() -> None:
    precisions: tuple[Precision, ...] = ("fp64", "fp32", "bf16")
    for precision in precisions:
        allowed = [allowed_error(steps, precision=precision) for steps in range(100_000)[::7]]
        last = allowed_error(STRICT[precision], precision=precision)
        assert allowed[0] == last == TOLERANCE[precision]
        assert allowed == sorted(allowed)
        assert math.isclose(allowed[-1], LARGEST)
    assert math.isclose(allowed_error(201, precision="fp64"), 1e-9 * GROWTH)
