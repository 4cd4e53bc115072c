"""Prices a decision on a measured profile, like plans of the reference step."""

from collections.abc import Callable
from dataclasses import replace

from tuner.config.train import TrainDecision
from tuner.costs.reference.workload import Workload
from tuner.plans.train import Plan, TrainPrediction
from tuner.search.reference.decisions import degrees_of
from tuner.search.reference.engine_workload import engine_workload
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.predict import predict


def measured_prices(machine: PricedMachine) -> Callable[[Plan, TrainDecision], TrainPrediction]:
    """Return the pricer of decisions of a plan and of scaled-down plans."""

    def priced(plan: Plan, decision: TrainDecision) -> TrainPrediction:
        own = replace(machine, num_devices=decision.num_devices)
        degrees = degrees_of(decision, ranks_per_node=machine.ranks_per_node)
        costs = CandidateCosts(work=work_of(plan), degrees=degrees, machine=own)
        limit = {"memory_limit_bytes": machine.memory_limit_bytes}
        return predict(costs, decision).model_copy(update=limit)

    return priced


def work_of(made: Plan) -> Workload:
    """Return the workload of a plan."""
    return engine_workload(made.model, made.goal, made.emit, load_ratio=made.load_ratio)
