"""Reader of training specs: from a file to a `Spec` with its model and recorded routing."""

from pathlib import Path
from typing import Any, Final

from profilers.steps.config import LayerKind
from tuner.engines.targets import programs
from tuner.errors import SpecError
from tuner.spec.cluster import Cluster
from tuner.spec.failure_log import FailureLog, read_failure_log
from tuner.spec.files import shown_path, shown_value
from tuner.spec.goal import TrainGoal
from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec
from tuner.spec.routing import RoutingRecord, read_routing
from tuner.spec.spec import Spec, SpecFile
from tuner.spec.spec_file import read_spec_keys, validate_spec
from tuner.spec.tune import Adapters, adapted

OTHER_GOALS: Final = ("place", "serve")
"""Goals of `moetune plan` other than training, with specs of their own."""


def read_spec(path: Path) -> Spec:
    """Read a spec file and the files that it names.

    Raises:
        SpecError: one line: the file, the field's path, its value, the rule.
    """
    source = shown_path(path)
    raw = read_spec_keys(path)
    _check_goal_kind(raw, source)
    file = validate_spec(raw, path, SpecFile)
    model = read_model(file.model)
    wanted = file.goal.routing
    routing = None if wanted is None else read_routing(wanted.path)
    if routing is not None:
        _check_routing(routing, model, source)
    if file.goal.moe_aux_loss_coeff is not None and not model.num_moe_layers:
        raise SpecError(
            f"{source}: goal.moe_aux_loss_coeff: {model.name} has no experts; leave it out"
        )
    if file.goal.adapters is not None:
        _check_adapters(file.goal.adapters, model, source)
    goal, failures = _with_failures(file.goal, file.cluster, source)
    return Spec(
        path=path,
        model_path=file.model,
        model=model,
        cluster=file.cluster,
        goal=goal,
        routing=routing,
        failures=failures,
        search=file.search,
        programs=programs(file.emit),
    )


def _check_goal_kind(raw: dict[str, Any], source: str) -> None:
    """Refuse other goals by name, before their fields are reported as unknown."""
    goal = raw.get("goal")
    kind = goal.get("kind") if isinstance(goal, dict) else None
    if kind in OTHER_GOALS:
        raise SpecError(
            f"{source}: goal.kind: {kind!r} is a goal of `moetune plan`; here a 'train' goal is"
            " needed"
        )
    if kind is not None and kind != "train":
        known = ", ".join(("train", *OTHER_GOALS))
        raise SpecError(f"{source}: goal.kind: {shown_value(kind)} is none of {known}")


def _with_failures(
    goal: TrainGoal, cluster: Cluster, source: str
) -> tuple[TrainGoal, FailureLog | None]:
    """Fill in the rates that a failure log shows, by default of machines like the cluster's."""
    stated = goal.reliability
    if stated is None or stated.log is None:
        return goal, None
    if (stated.device_mtbf, stated.node_mtbf_s, stated.process_mtbf) != (None, None, None):
        raise SpecError(
            f"{source}: goal.reliability: the log says how often devices and machines fail; leave"
            " out device_mtbf, node_mtbf, nodes_lost and process_mtbf"
        )
    stated_log, sizes = stated.log, {pool.devices_per_node for pool in cluster.pools}
    if stated_log.devices_per_node is None and len(sizes) == 1:
        stated_log = stated_log.model_copy(update={"devices_per_node": sizes.pop()})
    log = read_failure_log(stated_log)
    rates = {
        "device_mtbf": log.device_mtbf_s,
        "node_mtbf": log.node_mtbf_s,
        "process_mtbf": log.mtbf_s("software"),
    }
    return goal.model_copy(update={"reliability": stated.model_copy(update=rates)}), log


def _check_adapters(tune: Adapters, model: ModelSpec, source: str) -> None:
    try:
        adapted(tune, model)
    except ValueError as error:
        raise SpecError(f"{source}: goal.tune.{error}") from error


def _check_routing(routing: RoutingRecord, model: ModelSpec, source: str) -> None:
    where = f"{source}: goal.routing.path"
    if model.moe is None:
        raise SpecError(f"{where}: {model.name} has no experts; leave routing out")
    if routing.num_experts != model.moe.num_experts:
        raise SpecError(
            f"{where}: recorded with {routing.num_experts} experts, but {model.name} has"
            f" {model.moe.num_experts}"
        )
    if routing.top_k not in (None, model.moe.top_k):
        raise SpecError(
            f"{where}: recorded with top_k {routing.top_k}, but {model.name} has {model.moe.top_k}"
        )
    for layer in routing.layer_ids:
        if layer >= model.num_layers or model.layers[layer] is not LayerKind.MOE:
            raise SpecError(f"{where}: layer {layer} is not a MoE layer of {model.name}")
