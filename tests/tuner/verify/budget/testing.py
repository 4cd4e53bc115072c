"""For tests: a machine whose steps are not what the model believes, and time that passes as told.

The truth of a job is its predicted parts (by a model of the machine's own, if it has one) times
factors that a seed decides: one per part, one per set of replicas that sums gradients, one per
candidate and one per job. Steps scatter around it.

Letters: K parts of a step.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tuner.config.train import TrainDecision
from tuner.engines.launchers.shape import launch_shape
from tuner.plans.train import TrainPrediction
from tuner.verify.budget.budget import Spending
from tuner.verify.budget.scale import Scale, scaled_plan
from tuner.verify.launches import WARMUP_STEPS, TrialJobs
from tuner.verify.records import TrialRecord
from tuner.verify.search import PriorSampler
from tuner.verify.space import Price

FACTOR, SYNC, CANDIDATE, JOB, STEP = 0.3, 0.15, 0.04, 0.03, 0.03
"""Standard deviations of the logarithms of the factors, and of a step around its truth."""

TIMED_STEPS: Final = 8

PARTS: Final = ("layers", "collectives", "head", "state", "update")
PART_OF_CAUSE: Final = {
    "tensor_communication": "collectives",
    "expert_communication": "collectives",
    "pipeline_communication": "collectives",
    "tensor": "collectives",
    "context": "collectives",
    "expert": "collectives",
    "embedding": "head",
    "head": "head",
    "data_communication": "state",
    "once": "state",
    "optimizer": "update",
}
"""All other causes are computation inside layers."""


def parts_s(predicted: TrainPrediction) -> dict[str, float]:
    """Split a predicted step into its parts; a bubble waits for layers and their collectives."""
    parts = dict.fromkeys(PARTS, 0.0)
    for cause, seconds in predicted.breakdown_s.items():
        if cause != "bubble":
            parts[PART_OF_CAUSE.get(cause, "layers")] += seconds
    inside = parts["layers"] + parts["collectives"]
    bubble = predicted.breakdown_s.get("bubble", 0.0)
    for part in ("layers", "collectives"):
        parts[part] += bubble * (parts[part] / inside if inside else part == "layers")
    scale = predicted.step_time_s / max(sum(parts.values()), 1e-12)
    return {part: scale * seconds for part, seconds in parts.items()}


@dataclass(kw_only=True, eq=False)
class HiddenMachine:
    """Answers for every job, the same whenever it is asked."""

    jobs: TrialJobs
    price: Price
    """What this machine's own model says."""
    seed: int
    start_up_s: float = 10.0
    num_steps: int = 12
    """Of one launch; its steps and start-up are what a launch takes."""
    clock_s: float = 0.0
    """Launches let it run on."""
    _known: dict[tuple[TrainDecision, Scale | None], TrainPrediction] = field(default_factory=dict)

    def candidates(self) -> list[TrainDecision]:
        """Return what may be launched, the plan's own first."""
        space = self.jobs.space
        named = [space.plan.decision, *(one.decision for one in space.plan.runners_up)]
        return [one for one in named if one is not None and one in space.points()]

    def step_s(self, candidate: TrainDecision, scale: Scale | None) -> float:
        """Return the true step of a job."""
        plan = self.jobs.space.plan
        own = plan if scale is None else scaled_plan(plan, scale)
        launched = candidate if scale is None else scale.decision
        known = self._known.get((candidate, scale))
        if known is None:
            known = self._known[candidate, scale] = self.price(own, launched)
        stage = launched.num_devices // launched.pipeline_model_parallel_size
        sync = (
            launched.data_parallel_size * launched.context_parallel_size,
            launched.expert_data_parallel_size,
            stage > launch_shape(own, launched).devices_per_node,
        )
        seconds = 0.0
        for part, its_s in parts_s(known).items():
            gradients = self._drawn(SYNC, sync) if part == "state" else 1.0
            seconds += its_s * self._drawn(FACTOR, part) * gradients
        name = candidate.model_dump_json()
        at = "" if scale is None else scale.model_dump_json()
        return seconds * self._drawn(CANDIDATE, name) * self._drawn(JOB, name, at)

    def record(self, number: int, candidate: TrainDecision, scale: Scale | None) -> TrialRecord:
        """Launch a job, and let the time pass."""
        job = self.jobs.of_scale(candidate, scale)
        if job is None:
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
            predicted_step_s=job.predicted.step_time_s,
            predicted_communication_s=job.predicted.communication_s,
            predicted_activation_bytes=(),
            measured_steps_s=tuple(np.resize(steps_s, self.num_steps - WARMUP_STEPS).tolist()),
            measured_step_s=float(np.median(steps_s)),
            wall_s=wall_s,
            engine="hidden",
            release="",
            device="hidden",
        )

    def spent(self, spending: Spending, *, trials: int) -> list[TrialRecord]:
        """Launch what the sampler proposes within a budget, as tuner/verify/search.py does."""
        space, records, measured = self.jobs.space, list[TrialRecord](), dict[int, Any]()
        points = space.points()
        sampler = PriorSampler(tuple(points.values()), errors=space.errors)
        places = {decision: place for place, decision in enumerate(points)}
        while len(records) < trials:
            among = spending.affordable(records)
            free = {places[one] for one in among} - measured.keys()
            if not free:
                break
            place = (
                0 if 0 in free else sampler.choose(measured, taken=set(range(len(points))) - free)
            )
            decision = tuple(points)[place]
            records.append(self.record(len(records), decision, among[decision]))
            measured[place] = space.measured(records[-1])
        return records

    def first_ones_s(self, wall_s: float, *, trials: int) -> list[float]:
        """Return the true steps of the plan's first candidates, launched whole while time lasts."""
        result: list[float] = []
        for candidate in self.candidates()[:trials]:
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
