"""Launchable decisions of a plan that cannot be priced again: those that it names.

Plans on datasheets or imported profiles are made for the user's engine, and launched by the user's
own command. Their choice and its alternatives have their predictions in `plan.json`, so no model is
run here; other decisions are not tried.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.config.train import TrainDecision
from tuner.config.train_words import short_decision
from tuner.errors import PlanUnreadableError
from tuner.plans.train import Plan, TrainPrediction
from tuner.verify.neighbourhood import PLANNED, Point


@dataclass(frozen=True, kw_only=True)
class PlanCandidates:
    """The decisions that a plan names, with their predictions."""

    plan: Plan

    @property
    def candidates(self) -> Mapping[str, TrainDecision]:
        """The plan's choice and its runners-up by rank, best first."""
        return {f"choice {place}": one for place, one in enumerate(self._predicted())}

    @property
    def option_names(self) -> tuple[str, ...]:
        """Only the plan's own."""
        return (PLANNED,)

    def decision_at(self, point: Point) -> TrainDecision | None:
        """Return the decision at a point."""
        return self.candidates[point.degrees]

    def find_point(self, decision: TrainDecision) -> Point | None:
        """Return the point of a decision; None when the plan does not name it."""
        places = (name for name, one in self.candidates.items() if one == decision)
        return next((Point(degrees=name, option=PLANNED) for name in places), None)

    def predicted_step_s(self, point: Point) -> float:
        """Return the predicted step time at a point."""
        return self.predicted(self.candidates[point.degrees]).step_time_s

    def predicted(self, decision: TrainDecision) -> TrainPrediction:
        """Return the plan's prediction for a decision.

        Raises:
            PlanUnreadableError: the plan does not name it, so the trial is of another plan.
        """
        known = self._predicted().get(decision)
        if known is None:
            raise PlanUnreadableError(
                f"a trial launched {short_decision(decision)}, which this plan does not name:"
                " delete its record and study.db in trials/, take another database if --storage"
                " names one, and go on with --resume"
            )
        return known

    def excess_bytes(self, decision: TrainDecision) -> int:
        """Bytes by which the decision exceeds the memory limit; negative if it fits."""
        predicted = self.predicted(decision)
        # On heterogeneous pools the plan has checked each device against its own limit.
        limit_bytes = predicted.memory_limit_bytes or max(predicted.peak_memory_bytes)
        return max(predicted.peak_memory_bytes) - limit_bytes

    def seeds(self) -> tuple[Point, ...]:
        """All candidates, in the plan's order."""
        return tuple(Point(degrees=name, option=PLANNED) for name in self.candidates)

    def _predicted(self) -> dict[TrainDecision, TrainPrediction]:
        plan = self.plan
        predictions: dict[TrainDecision, TrainPrediction] = {}
        if plan.decision is not None and plan.predicted is not None:
            predictions[plan.decision] = plan.predicted
        for other in plan.runners_up:
            predictions.setdefault(other.decision, other.predicted)
        return predictions
