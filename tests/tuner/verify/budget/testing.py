"""For tests: a machine whose steps are not what the model believes, and time that passes as told.

The truth of a job is its predicted parts (by a model of the machine's own, if it has one) times
factors that a seed decides: one per part, one per set of replicas that sums gradients, one per
candidate and one per job. Steps scatter around it.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tuner.config.train import TrainDecision
from tuner.plans.train import TrainPrediction
from tuner.verify.budget.scale import Scale, scaled_plan
from tuner.verify.budget.scheduler import Spending
from tuner.verify.budget.trial_options import PARTS, STATE, Price, TrialOptions, build_job
from tuner.verify.records import TrialRecord

FACTOR, SYNC, CANDIDATE, JOB, STEP = 0.3, 0.15, 0.04, 0.03, 0.03
"""Standard deviations of the logarithms of the factors, and of a step around its truth."""

TIMED_STEPS: Final = 8


@dataclass(kw_only=True, eq=False)
class HiddenMachine:
    """Answers for every job, the same whenever it is asked."""

    possible: TrialOptions
    price: Price
    """What this machine's own model says."""
    seed: int
    start_up_s: float = 10.0
    num_steps: int = 12
    """Of one launch; its steps and start-up are what a launch takes."""
    clock_s: float = 0.0
    """Launches let it run on."""
    _known: dict[tuple[TrainDecision, Scale | None], TrainPrediction] = field(default_factory=dict)

    def step_s(self, candidate: TrainDecision, scale: Scale | None) -> float:
        """Return the true step of a job."""
        plan = self.possible.space.plan
        own = plan if scale is None else scaled_plan(plan, scale)
        launched = candidate if scale is None else scale.decision
        known = self._known.get((candidate, scale))
        if known is None:
            known = self._known[candidate, scale] = self.price(own, launched)
        job = build_job(plan, candidate, scale, known, whole_s=known.step_time_s)
        parts_K = job.parts_s_K * [self._drawn(FACTOR, part) for part in PARTS]
        parts_K[STATE] *= self._drawn(SYNC, job.sync)
        name = candidate.model_dump_json()
        at = "" if scale is None else scale.model_dump_json()
        return float(parts_K.sum()) * self._drawn(CANDIDATE, name) * self._drawn(JOB, name, at)

    def record(self, number: int, candidate: TrainDecision, scale: Scale | None) -> TrialRecord:
        """Launch a job, and let the time pass."""
        option = self.possible.option(candidate, scale)
        if option is None:
            raise ValueError("the job has no price")
        step_s = self.step_s(candidate, scale)
        rng = np.random.default_rng([self.seed, number])
        steps_s = step_s * np.maximum(0.1, 1.0 + rng.normal(0.0, STEP, TIMED_STEPS))
        wall_s = self.start_up_s + self.num_steps * step_s
        self.clock_s += wall_s
        return TrialRecord(
            number=number,
            origin="plan",
            decision=candidate,
            scale=scale,
            status="ok",
            predicted_step_s=option.predicted.step_time_s,
            predicted_communication_s=option.predicted.communication_s,
            predicted_activation_bytes=(),
            measured_steps_s=tuple(float(one) for one in steps_s),
            measured_step_s=float(np.median(steps_s)),
            wall_s=wall_s,
            engine="hidden",
            release="",
            device="hidden",
        )

    def spent(self, spending: Spending, *, trials: int) -> list[TrialRecord]:
        """Launch what a budget is spent on."""
        records: list[TrialRecord] = []
        while (left := trials - len(records)) > 0:
            chosen = spending.next(records, running=(), trials=left)
            if chosen is None:
                break
            records.append(self.record(len(records), chosen.job.candidate, chosen.job.scale))
        return records

    def first_ones_s(self, wall_s: float, *, trials: int) -> list[float]:
        """Return the true steps of the plan's first candidates, launched whole while time lasts."""
        result: list[float] = []
        for candidate in self.possible.candidates()[:trials]:
            step_s = self.step_s(candidate, None)
            wall_s -= self.start_up_s + self.num_steps * step_s
            if wall_s < 0.0:
                break
            result.append(step_s)
        return result

    def _drawn(self, spread: float, *what: object) -> float:
        """Return a factor that only the seed and what it is of decide."""
        words = np.frombuffer(repr(what).encode(), dtype=np.uint8)
        rng = np.random.default_rng([self.seed, *words.tolist()])
        return float(np.exp(rng.normal(0.0, spread)))
