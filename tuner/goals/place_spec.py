"""Reader of a spec whose goal is `place`: from its path to a `PlaceSpec` with all files loaded."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from profilers.routing.store import read_recording
from solvers.placement.ranks import Ranks, contiguous
from tuner.catalog.place_rules import dispatch_refusal, program_refusal, shape_refusals
from tuner.engines.placement.targets import PLACE_TARGETS
from tuner.errors import SpecError, UnknownTargetError
from tuner.spec.current_placement import read_placement
from tuner.spec.files import shown_path
from tuner.spec.huggingface.read import read_model
from tuner.spec.place import Objective, PlaceGoal
from tuner.spec.place_dispatch import least_loaded_refusal
from tuner.spec.place_recordings import check_model, check_passes, check_recordings
from tuner.spec.place_spec import PlaceSpec, PlaceSpecFile
from tuner.spec.spec_file import read_spec_keys, validate_spec


def read_place_spec(path: Path) -> PlaceSpec:
    """Read a placement's spec and its files.

    Raises:
        SpecError: one line: the file, the field's path, its value, the rule.
        UnknownTargetError: an engine that no placement can be written for.
        RecordingUnreadableError: a recording is damaged.
    """
    source = shown_path(path)
    file = validate_spec(read_spec_keys(path), path, PlaceSpecFile)
    unknown = next((name for name in file.emit if name not in PLACE_TARGETS), None)
    if unknown is not None:
        raise UnknownTargetError(
            f"emit: {unknown!r} takes no placement; those that do are {', '.join(PLACE_TARGETS)}"
        )
    goal = _on_machines(file, source)
    recordings = {workload.name: read_recording(workload.path) for workload in goal.workloads}
    model = None if file.model is None else read_model(file.model)
    first = next(iter(recordings.values()))
    layers, experts = first.layer_ids, first.num_experts
    if model is not None:
        check_model(model, experts=experts, layers=layers, source=source)
    num_layers = check_recordings(recordings, model=model, source=source)
    ranks = _ranks(goal, experts=experts, source=source)
    current = contiguous(num_layers=len(layers), num_experts=experts, num_slots=ranks.num_slots)
    current_ranks = ranks
    if goal.current is not None:
        current, current_ranks = read_placement(
            goal.current, layer_ids=layers, num_experts=experts, ranks=ranks
        )
    spec = PlaceSpec(
        path=path,
        model_path=file.model,
        model=model,
        cluster=file.cluster,
        goal=goal,
        recordings=recordings,
        num_layers=num_layers,
        ranks=ranks,
        current=current,
        current_ranks=current_ranks,
        emit=file.emit,
        main_target=PLACE_TARGETS[next(iter(file.emit), "eplb")],
        targets={name: PLACE_TARGETS[name] for name in file.emit},
    )
    refused = next(chain(_goal_refusals(spec), _engine_refusals(spec)), None)
    if refused is not None:
        raise SpecError(f"{source}: {refused}")
    is_priced = None not in (model, file.cluster)
    check_passes(goal, recordings, is_priced=is_priced, source=source)
    return spec


def _goal_refusals(spec: PlaceSpec) -> Iterator[str]:
    """Yield why the goal cannot be planned for on any engine."""
    goal = spec.goal
    for name in spec.recordings:
        if not name.isprintable():
            yield f"goal.workloads: {name!r} holds characters that cannot be printed on one line"
    if goal.objective is Objective.LAYER_TIME or goal.max_moved_bytes is not None:
        why = "objective layer_time" if goal.max_moved_bytes is None else "max_moved_bytes"
        if spec.model is None:
            yield f"model: missing; goal.{why} needs the sizes of the experts"
        if goal.objective is Objective.LAYER_TIME and spec.cluster is None:
            yield "cluster: missing; goal.objective layer_time needs the devices"
    if (spec.ranks.slots_G != spec.current_ranks.slots_G).any():
        before, after = spec.current_ranks.num_slots, spec.ranks.num_slots
        change = f"goal.current: from {before} slots to {after}"
        if (goal.max_moved_experts, goal.max_moved_bytes) != (None, None):
            yield (
                f"{change}, every rank is refilled; drop the limit on moved experts, or plan for"
                " the current slots"
            )
        if goal.is_about_traffic:
            yield (
                f"{change}; {goal.objective.value} compares placements of the same slots, each"
                " expert once"
            )


def _engine_refusals(spec: PlaceSpec) -> Iterator[str]:
    """Yield why the named engines cannot run the goal's rule, or take its layers and slots."""
    goal, model, ranks = spec.goal, spec.model, spec.ranks
    dispatch = goal.dispatch and goal.dispatch.value
    least_loaded = least_loaded_refusal(
        goal, emit=spec.emit, num_slots=ranks.num_slots, num_experts=spec.num_experts
    )
    yield from filter(None, [least_loaded])
    with_backend = [name for name, target in PLACE_TARGETS.items() if target.a2a_backends]
    if goal.a2a_backend is not None and not set(with_backend) & set(spec.emit):
        yield (
            "goal.a2a_backend: no engine under emit asks for one"
            f" ({', '.join(with_backend)} does); leave it out"
        )
    for target in spec.targets.values():
        launch = dispatch_refusal(
            target,
            dispatch=dispatch,
            a2a_backend=goal.a2a_backend,
            architecture=None if model is None else model.architecture,
            pool=None if spec.cluster is None else spec.cluster.pools[0],
        )
        program = program_refusal(
            target,
            dispatch=dispatch,
            num_slots=ranks.num_slots,
            num_experts=spec.num_experts,
            ranks=ranks.num_ranks,
        )
        yield from filter(None, (launch, program))
        for refused in shape_refusals(
            target,
            slots_per_rank=ranks.slots_G.tolist(),
            num_experts=spec.num_experts,
            num_layers=spec.num_layers,
        ):
            yield f"emit: {refused} (or emit: [] for the plan alone)"
        layers = len(spec.layer_ids)
        if target.every_moe_layer and model is not None and layers != model.num_moe_layers:
            yield (
                f"emit: {target.name} needs a row for each of the {model.num_moe_layers} MoE layers"
                f" of {model.name}, the recordings have {layers}; record all of them"
            )


def _on_machines(file: PlaceSpecFile, source: str) -> PlaceGoal:
    """Return the goal with the ranks per machine of the first pool."""
    goal = file.goal
    if file.cluster is None:
        return goal
    pool = file.cluster.pools[0]
    per_node = goal.ranks_per_node or min(goal.ranks, pool.devices_per_node)
    if per_node > pool.devices_per_node or goal.ranks > per_node * pool.nodes:
        raise SpecError(
            f"{source}: goal.ranks: {goal.ranks} ranks, {per_node} a node, do not go on"
            f" {pool.nodes} nodes of {pool.devices_per_node} devices of pool {pool.name!r},"
            f" the first, which has them; say {pool.num_devices} ranks or fewer, or the pool's true"
            " nodes"
        )
    if goal.ranks % per_node:
        raise SpecError(
            f"{source}: goal.ranks: {goal.ranks} ranks fill no nodes of {per_node} devices evenly;"
            " say goal.ranks_per_node"
        )
    return goal.model_copy(update={"ranks_per_node": per_node})


def _ranks(goal: PlaceGoal, *, experts: int, source: str) -> Ranks:
    redundant = goal.redundant_experts
    total = experts + (-experts % goal.ranks if redundant is None else redundant)
    slots = goal.slots_per_rank or (total // goal.ranks,)
    slots_G = np.array(slots * (goal.ranks // len(slots)), dtype=np.int64)
    speeds = goal.rank_speeds or (1.0,)
    if goal.slots_per_rank is None and total % goal.ranks:
        below = total // goal.ranks * goal.ranks - experts
        legal = " and ".join(str(number) for number in (below, below + goal.ranks) if number >= 0)
        raise SpecError(
            f"{source}: goal.redundant_experts: {redundant} makes {total} slots, which"
            f" {goal.ranks} ranks cannot share evenly; the nearest legal: {legal}"
        )
    if slots_G.sum() < experts:
        raise SpecError(
            f"{source}: goal.slots_per_rank: {slots_G.sum()} slots on {goal.ranks} ranks cannot"
            f" hold {experts} experts; {-(-experts // goal.ranks)} a rank can"
        )
    if slots_G.max() > experts:
        raise SpecError(
            f"{source}: goal: {slots_G.max()} slots on one rank for {experts} experts; more than"
            f" {experts} can only repeat what the rank holds"
        )
    if goal.expert_groups is not None and experts % goal.expert_groups:
        raise SpecError(
            f"{source}: goal.expert_groups: {experts} experts do not divide into"
            f" {goal.expert_groups} groups"
        )
    return Ranks(
        slots_G=slots_G,
        node_G=np.arange(goal.ranks, dtype=np.int64) // (goal.ranks_per_node or goal.ranks),
        speed_G=np.array(speeds * (goal.ranks // len(speeds)), dtype=float),
    )
