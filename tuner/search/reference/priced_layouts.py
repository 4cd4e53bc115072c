"""Failures of runs, and layouts of fewer nodes, priced on a profile of the reference step.

The step and its layouts come from the profile; how often what fails, and what saving and restoring
cost, from the formulas that the analytic model uses (tuner/faults/).
"""

import math
from dataclasses import dataclass, replace

from profilers.records import Profile
from tuner.config.candidates import strategies_of
from tuner.config.train import TrainDecision
from tuner.devices.catalogue import find_device
from tuner.errors import SpecError
from tuner.faults.measured import sent_bytes_per_s
from tuner.faults.reliability import FailureModel, Jobs
from tuner.plans.train import Plan, Provenance
from tuner.search.reference.layer_costs import PricedMachine
from tuner.search.reference.plan_profiled import make_plan, profiled_problem
from tuner.search.reference.predict import predict
from tuner.search.settings import SearchSettings
from tuner.search.train.build_problem import planned_devices
from tuner.search.train.plan_fields import (
    failures_on_pool,
    forecast_run,
    refuse_impossible_checkpoints,
)
from tuner.search.train.priced_layouts import Fastest
from tuner.spec.cluster import Pool
from tuner.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceLayouts:
    """Layouts on a pool that a profile of the reference step prices."""

    pool: Pool
    profile: Profile
    machine: PricedMachine
    """Priced machine of the whole pool."""

    def plan(self, spec: Spec, *, settings: SearchSettings, provenance: Provenance) -> Plan:
        """Plan a spec with its forecast of failures.

        Raises:
            SpecError: spare nodes leave none, or the decision no room for the stated checkpoints.
        """
        made = make_plan(spec, self._used(spec), settings=settings, provenance=provenance)
        return _with_forecast(made, spec, self)

    def fastest(self, spec: Spec, settings: SearchSettings) -> Fastest | None:
        """Find the fastest layout of a spec; None: none is legal, or none fits."""
        kind = self.profile.header.machine.device_kind
        problem = profiled_problem(spec, self._used(spec), device_kind=kind)
        result = problem.search(settings)
        if not result.solved:
            return None
        best = result.solved[0]
        return Fastest(
            step_s=predict(best.costs, best.decision).step_time_s, decision=best.decision
        )

    def failure_model(
        self, spec: Spec, decision: TrainDecision
    ) -> tuple[Jobs, FailureModel | None]:
        """Jobs of one decision that can fail, and how often they do."""
        return failures_on_pool(
            spec,
            strategies_of(
                decision,
                sequence_length=spec.goal.sequence_length,
                global_batch_size=spec.goal.global_batch_size,
            ),
            pool=self.pool,
            profile=self.profile,
            nic_bytes_per_s=self._nic_bytes_per_s(spec),
            host_bytes_per_s=self._host_bytes_per_s(spec),
        )

    def _used(self, spec: Spec) -> PricedMachine:
        """Return the pool without its spare nodes."""
        return replace(self.machine, num_devices=planned_devices(spec, self.pool))

    def _nic_bytes_per_s(self, spec: Spec) -> float:
        """Bandwidth of one NIC, where copies of checkpoints are sent over it."""
        stated = spec.goal.reliability
        if self.pool.nic is not None:
            return self.pool.nic
        keeps_copies = stated is not None and stated.checkpoint.keeps_host_copies
        if keeps_copies and sent_bytes_per_s(self.profile) is None:
            raise SpecError(
                f"cluster.pools.{self.pool.name}.nic is missing, and the profile has no rate at"
                " which checkpoints are sent to other machines: state it, or measure it with"
                " `moetune profile --suite storage`"
            )
        return math.inf

    def _host_bytes_per_s(self, spec: Spec) -> float:
        """Between a device and the memory of its host; processors compute in that memory."""
        machine = self.profile.header.machine
        if machine.device_kind == "cpu" or spec.goal.reliability is None:
            return math.inf
        sheet = find_device(machine.device) if self.pool.device is None else self.pool.sheet
        return sheet.host_bytes_per_s


def _with_forecast(plan: Plan, spec: Spec, priced: ReferenceLayouts) -> Plan:
    """Add what failures make of the run to a plan, where the spec states it."""
    decision, predicted, goal = plan.decision, plan.predicted, spec.goal
    if decision is None or predicted is None:
        return plan
    jobs, reliability = priced.failure_model(spec, decision)
    run = forecast_run(
        goal,
        jobs,
        reliability,
        step_s=predicted.step_time_s,
        devices_per_node=priced.pool.devices_per_node,
        price_per_device_hour=priced.pool.price_per_device_hour,
    )
    predicted = predicted.model_copy(update={"run": run})
    refuse_impossible_checkpoints(goal, predicted)
    return plan.model_copy(update={"predicted": predicted})
