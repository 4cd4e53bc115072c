"""The model that a plan rests on, asked again: for its decisions and for smaller jobs.

A plan of the reference step was priced on its profile. One of a production engine was priced on the
analytic model; what that rested on is in the plan's folder but for `--uncalibrated`, so the plan's
own choice is priced first, with residuals and without. Where neither says what the plan says,
another release wrote it, and smaller jobs have no price.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from tuner.errors import OutsideProfileError
from tuner.plan import Plan, TrainDecision, TrainPrediction
from tuner.spec.routing import read_routing
from tuner.spec.spec import Spec
from tuner.units import format_s
from tuner.verify.budget.measured import measured_prices
from tuner.verify.budget.possible import Price
from tuner.verify.neighbourhood import Around, Neighbourhood

SAME_RATIO = 1e-3
"""Within which two predictions of one decision are of one model."""


def prices_of(around: Around, *, used: Path) -> Price | None:
    """Return what prices jobs as the plan was priced; None where nothing can.

    Args:
        around: the plan and its decisions.
        used: folder of what the plan used.
    """
    if isinstance(around, Neighbourhood):
        return measured_prices(around.machine)
    plan = around.plan
    if len(plan.cluster.pools) > 1 or plan.decision is None or plan.predicted is None:
        return None
    # Read when first asked: most verifications launch whole jobs alone.
    asked = cache(lambda: _production(plan, used))
    return lambda smaller, decision: asked()(smaller, decision)


def _production(plan: Plan, used: Path) -> Price:
    """Return the analytic prices that say of the plan's choice what the plan says.

    Raises:
        OutsideProfileError: none does.
    """
    decision, whole = plan.decision, plan.predicted
    assert decision is not None
    assert whole is not None
    said = []
    for is_calibrated in (True, False):
        price = _priced(plan, whole, used, is_calibrated=is_calibrated)
        step_s = price(plan, decision).step_time_s
        if abs(step_s / whole.step_time_s - 1.0) <= SAME_RATIO:
            return price
        said.append(format_s(step_s))
    raise OutsideProfileError(
        f"the plan predicts {format_s(whole.step_time_s)} a step and this release"
        f" {' or '.join(said)}: plan anew to launch smaller jobs"
    )


def _priced(
    plan: Plan, whole: TrainPrediction, used: Path, *, is_calibrated: bool
) -> Callable[[Plan, TrainDecision], TrainPrediction]:
    from tuner.costs.analytic.calibration import shipped
    from tuner.costs.analytic.measured_profile import read_measured
    from tuner.planner.analytic.build_problem import question_of, site_of
    from tuner.verify.budget.production import production_prices

    (pool,) = plan.cluster.pools
    is_measured = pool.name in plan.provenance.profile_sha256
    site = site_of(
        pool,
        residuals=shipped() if is_calibrated else None,
        measured=read_measured(used / "profile", calibrated=is_calibrated) if is_measured else None,
    )
    routing = read_routing(used / "routing.json") if plan.goal.routing is not None else None
    spec = Spec(
        path=used / "spec.yaml",
        model_path=used / "config.json",
        model=plan.model,
        cluster=plan.cluster,
        goal=plan.goal,
        routing=routing,
        search=plan.search,
        emit=plan.emit,
    )
    return production_prices(question_of(spec, site), whole)
