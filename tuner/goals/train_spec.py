"""Reader of training specs: from a file to a `Spec` with its model and recorded routing."""

from pathlib import Path
from typing import Any, Final

from profilers.steps.config import LayerKind
from tuner.engines.targets import programs
from tuner.errors import SpecError
from tuner.search.train.build_problem import packed_rows
from tuner.spec.cluster import Cluster
from tuner.spec.documents import BatchSize, Documents, documents_of_law
from tuner.spec.failure_log import FailureLog, read_failure_log
from tuner.spec.files import shown_path, shown_value
from tuner.spec.goal import StatedTrainGoal, TrainGoal
from tuner.spec.huggingface.read import read_model
from tuner.spec.kind import ONLY_ESTIMATED
from tuner.spec.length_files import read_documents
from tuner.spec.model import ModelSpec
from tuner.spec.routing import RoutingRecord, read_routing
from tuner.spec.serving.lengths import LengthLaw
from tuner.spec.spec import Spec, SpecFile
from tuner.spec.spec_file import read_spec_keys, validate_spec
from tuner.spec.tune import Adapters, adapted

NEAR_RATIO: Final = 0.05
"""Share by which a batch stated in documents or tokens may be off, so that ranks divide it."""
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
    goal, failures = _with_failures(_in_sequences(file.goal), file.cluster, source)
    spec = Spec(
        path=path,
        model_path=file.model,
        model=model,
        cluster=file.cluster,
        goal=goal,
        documents=_documents(goal, model, source),
        routing=routing,
        failures=failures,
        search=file.search,
        programs=programs(file.emit),
    )
    return _with_rows(spec, file.goal.global_batch_size)


def _check_goal_kind(raw: dict[str, Any], source: str) -> None:
    """Refuse other goals by name, before their fields are reported as unknown."""
    goal = raw.get("goal")
    kind = goal.get("kind") if isinstance(goal, dict) else None
    if kind in OTHER_GOALS:
        raise SpecError(
            f"{source}: goal.kind: {kind!r} is a goal of `moetune plan`; here a 'train' goal is"
            " needed"
        )
    if kind == ONLY_ESTIMATED:
        raise SpecError(
            f"{source}: goal.kind: {kind!r} is not planned; `moetune estimate` prices a launch of"
            " it, with --launch"
        )
    if kind is not None and kind != "train":
        known = ", ".join(("train", *OTHER_GOALS))
        raise SpecError(f"{source}: goal.kind: {shown_value(kind)} is none of {known}")


def _in_sequences(stated: StatedTrainGoal) -> TrainGoal:
    """Return the goal with a batch in sequences; `_with_rows` fills in one of another unit."""
    values = {name: getattr(stated, name) for name in TrainGoal.model_fields}
    if not isinstance(stated.global_batch_size, int):
        values["global_batch_size"] = 1
    return TrainGoal(**values)


def _documents(goal: TrainGoal, model: ModelSpec, source: str) -> Documents | None:
    """Read the documents that the goal states."""
    stated = goal.sequence_lengths
    if stated is None:
        return None
    if isinstance(stated, LengthLaw):
        documents = documents_of_law(stated)
    else:
        documents = read_documents(stated)
    longest = min(documents.longest, goal.sequence_length)
    if longest > model.max_position:
        raise SpecError(
            f"{source}: goal.sequence_lengths: documents of up to {longest:,} tokens are kept, and"
            f" {model.name} has {model.max_position:,} positions; state a shorter sequence_length"
        )
    return documents


def _with_rows(spec: Spec, stated: BatchSize) -> Spec:
    """Return the spec with a global batch in sequences or rows, whatever unit it is stated in."""
    if isinstance(stated, int):
        return spec
    rows = stated.rows
    if rows is None:
        packed = packed_rows(spec) if stated.documents else None
        in_a_row = 1.0 if packed is None else packed.documents_per_row
        exact = (stated.documents or 0) / in_a_row + (
            stated.tokens or 0
        ) / spec.goal.sequence_length
        if exact < 0.5:
            raise SpecError(
                f"goal.global_batch_size: {stated.documents or stated.tokens:,} is {exact:.2f} of a"
                f" row of {spec.goal.sequence_length:,} tokens; state at least one row"
            )
        rows = _even(exact)
    goal = spec.goal.model_copy(update={"global_batch_size": rows})
    return spec.model_copy(update={"goal": goal})


def _even(exact: float) -> int:
    """Return the number within 5 % that the highest power of two divides, else the nearest."""
    powers = (2**exponent for exponent in range(31, -1, -1))
    multiples = (round(exact / power) * power for power in powers)
    close = (number for number in multiples if abs(number - exact) <= NEAR_RATIO * exact)
    return next(close, max(1, round(exact)))


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
