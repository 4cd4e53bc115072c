"""Prices decisions and scaled-down jobs with the model that a plan was made with.

A plan of the reference step was priced on its profile. One of a production engine was priced on the
analytic model; its inputs are in the plan's folder, except `--uncalibrated`, so the plan's own
choice is priced first, with residuals and without. If neither matches the plan, another release
wrote it, and scaled-down jobs have no price.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from tuner.config.train import TrainDecision
from tuner.errors import OutsideProfileError
from tuner.plans.train import Plan, TrainPrediction
from tuner.spec.routing import read_routing
from tuner.spec.spec import Spec
from tuner.units import format_s
from tuner.verify.space import Price, TrainSpace, measured_prices

SAME_RATIO = 1e-3
"""Tolerance within which two predictions of a decision come from the same model."""


def build_pricer(space: TrainSpace, *, used: Path) -> Price | None:
    """Return a pricer that matches the plan's model; None if there is none.

    Args:
        space: the plan and its decisions.
        used: folder of the plan's inputs.
    """
    if space.machine is not None:
        return measured_prices(space.machine)
    plan = space.plan
    if len(plan.cluster.pools) > 1 or plan.decision is None or plan.predicted is None:
        return None
    # Read on first use: most verifications launch full-scale jobs only.
    decision, whole = plan.decision, plan.predicted
    pricer = cache(lambda: _production(plan, decision, whole, used))
    return lambda smaller, decision: pricer()(smaller, decision)


def _production(plan: Plan, decision: TrainDecision, whole: TrainPrediction, used: Path) -> Price:
    """Return the analytic pricer that reproduces the plan's prediction of its choice.

    Raises:
        OutsideProfileError: none does.
    """
    predictions = []
    for is_calibrated in (True, False):
        price = _priced(plan, whole, used, is_calibrated=is_calibrated)
        step_s = price(plan, decision).step_time_s
        if abs(step_s / whole.step_time_s - 1.0) <= SAME_RATIO:
            return price
        predictions.append(format_s(step_s))
    raise OutsideProfileError(
        f"the plan predicts {format_s(whole.step_time_s)} a step and this release"
        f" {' or '.join(predictions)}: plan anew to launch smaller jobs"
    )


def _priced(
    plan: Plan, whole: TrainPrediction, used: Path, *, is_calibrated: bool
) -> Callable[[Plan, TrainDecision], TrainPrediction]:
    from tuner.costs.train.calibration import shipped
    from tuner.costs.train.measured_profile import read_measured
    from tuner.search.train.build_problem import build_problem, price_pool
    from tuner.verify.budget.production import production_prices

    (pool,) = plan.cluster.pools
    is_measured = pool.name in plan.provenance.profile_sha256
    priced_pool = price_pool(
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
    return production_prices(build_problem(spec, priced_pool), whole)
