"""`moetune verify --faults`: a plan's reference step runs through faults, policy by policy."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Final

from profilers.steps.config import StepConfig
from tuner.engines.reference.step_config import step_config
from tuner.errors import EnvironmentMissingError, SpecError
from tuner.faults.forecast import save_policy
from tuner.goals.train_folder import read_plan
from tuner.output import write_files
from tuner.paths import AnyPath, plan_folder
from tuner.plans.folder import FEWER_NODES, PLAN_NAME
from tuner.plans.train import Plan
from tuner.verify.faults.comparison import FaultReport
from tuner.verify.faults.runs import has_fewer_nodes, run_scenario
from tuner.verify.faults.scenario import Scenario, StatedPolicy, read_scenario

REPORT_NAME: Final = "faults.json"


def verify_faults(
    folder: AnyPath,
    scenario_file: AnyPath,
    *,
    on_message: Callable[[str], None] = lambda _line: None,
) -> FaultReport:
    """Run a plan's reference step through the faults of a scenario, and compare with predictions.

    Args:
        folder: of the plan; `faults.json` is written into it.
        scenario_file: of the scenario (tuner/verify/faults/scenario.py).
        on_message: gets a line for every run.

    Raises:
        SpecError: the scenario cannot be read, or does not fit the plan.
        PlanUnreadableError: the plan is damaged.
        EnvironmentMissingError: PyTorch is not installed.
        FaultRunError: a run does not reach its end.
        OutputError: the folder cannot be written.
    """
    folder = plan_folder(folder)
    plan, scenario = read_plan(folder), read_scenario(Path(scenario_file))
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentMissingError(
            "runs with faults need PyTorch, which is not installed: pip install 'moetune[torch]'"
        )
    if plan.decision is None:
        raise SpecError("the plan has no decision that could be launched")
    if not scenario.policies:
        scenario = scenario.model_copy(update={"policies": (_planned(plan, scenario),)})
    config = step_config(plan, plan.decision, steps=1, warmup_steps=0)
    report = run_scenario(
        config,
        scenario,
        fewer=_fewer_nodes(folder, config, scenario),
        on_message=on_message,
    )
    write_files(folder, {REPORT_NAME: report.model_dump_json(indent=1) + "\n"})
    return report


def _fewer_nodes(folder: Path, config: StepConfig, scenario: Scenario) -> StepConfig | None:
    """Return the layout of the plan in `fewer-nodes/`.

    None where no run goes on in it, or its nodes are not the scenario's.

    Raises:
        PlanUnreadableError: it is damaged.
    """
    own, ranks_per_node = folder / FEWER_NODES, config.parallelism.world / scenario.nodes
    if not has_fewer_nodes(scenario) or not (own / PLAN_NAME).is_file():
        return None
    plan = read_plan(own)
    sizes = {pool.devices_per_node for pool in plan.cluster.pools}
    if plan.decision is None or sizes != {ranks_per_node}:
        return None
    return step_config(plan, plan.decision, steps=1, warmup_steps=0)


def _planned(plan: Plan, scenario: Scenario) -> StatedPolicy:
    """Return the policy of a plan."""
    run, stated = plan.predicted and plan.predicted.run, plan.goal.reliability
    own = run and stated and save_policy(run, stated)
    if not own:
        raise SpecError("policies: none is stated, and the plan has no goal.reliability")
    policy = StatedPolicy.of(own)
    try:
        scenario.check(policy)
    except ValueError as error:
        raise SpecError(f"the plan's policy: {error}") from error
    return policy
