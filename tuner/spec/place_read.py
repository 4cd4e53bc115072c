"""Reader of a spec whose goal is `place`: from its path to a `PlaceSpec` with all files loaded."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator

from profilers.records import Record
from profilers.routing.recording import Recording
from profilers.routing.store import read_recording
from solvers.placement.ranks import Placement, Ranks, contiguous
from tuner.engines.place_capabilities import PLACE_TARGETS
from tuner.engines.place_rules import dispatch_refusal, program_refusal, shape_refusals
from tuner.errors import SpecError, UnknownTargetError
from tuner.spec.cluster import Cluster
from tuner.spec.current_placement import read_placement
from tuner.spec.fields import FilePath, Name, one_or_many
from tuner.spec.files import shown_path
from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec
from tuner.spec.place import Objective, PlaceGoal
from tuner.spec.place_dispatch import least_loaded_refusal
from tuner.spec.place_recordings import (
    check_model,
    check_passes,
    check_top_k,
    common_shape,
    decoder_layers,
)
from tuner.spec.spec_file import read_spec_keys, validate_spec

Targets = Annotated[tuple[Name, ...], BeforeValidator(one_or_many)]


class PlaceSpecFile(Record):
    """The YAML file of a placement; paths are relative to it."""

    schema_version: Literal[1]
    """Version of this layout."""
    model: FilePath | None = None
    """A Hugging Face `config.json`; needed to price time."""
    cluster: Cluster | None = None
    """Needed to price time; its first pool has the ranks."""
    goal: PlaceGoal
    emit: Targets = ("eplb",)
    """Names of the engines to write the placement for; an empty list writes the plan only."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaceSpec:
    """A placement's spec with its model, recordings and current placement loaded."""

    path: Path
    model_path: Path | None
    model: ModelSpec | None
    cluster: Cluster | None
    goal: PlaceGoal
    recordings: Mapping[str, Recording]
    """Recordings by workload, in the order of the spec; all of the same layers and experts."""
    num_layers: int | None
    """Decoder layers of the model, dense ones included; None if not known."""
    ranks: Ranks
    current: Placement
    """The current placement; experts in order if the spec names none."""
    current_ranks: Ranks
    """Ranks with the slots of the current placement."""
    emit: tuple[str, ...]

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Indices of the placed decoder layers."""
        return next(iter(self.recordings.values())).layer_ids

    @property
    def num_experts(self) -> int:
        """Logical experts of a layer."""
        return next(iter(self.recordings.values())).num_experts


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
    _refuse_names(file.goal, source)
    goal = _on_machines(file, source)
    recordings = {one.name: read_recording(one.path) for one in goal.workloads}
    layers, experts = common_shape(recordings, source)
    ranks = _ranks(goal, experts=experts, source=source)
    model = None if file.model is None else read_model(file.model)
    refused = least_loaded_refusal(
        goal, emit=file.emit, num_slots=ranks.num_slots, num_experts=experts
    )
    _refuse(source, refused, *_launch_refusals(file, model))
    _check_priced(file, goal, source)
    if model is not None:
        check_model(model, experts=experts, layers=layers, source=source)
    check_top_k(model, recordings, source)
    check_passes(goal, recordings, is_priced=None not in (model, file.cluster), source=source)
    num_layers = decoder_layers(model, recordings, source)
    _refuse(source, *_shape_refusals(file, model, ranks, layers, experts, num_layers))
    current = contiguous(num_layers=len(layers), num_experts=experts, num_slots=ranks.num_slots)
    current_ranks = ranks
    if goal.current is not None:
        current, current_ranks = read_placement(
            goal.current, layer_ids=layers, num_experts=experts, ranks=ranks
        )
        _refuse_other_slots(goal, ranks, current_ranks, source)
    return PlaceSpec(
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
    )


def _refuse_names(goal: PlaceGoal, source: str) -> None:
    for workload in goal.workloads:
        if not workload.name.isprintable():
            raise SpecError(
                f"{source}: goal.workloads: {workload.name!r} holds characters that cannot be"
                " printed on one line"
            )


def _refuse_other_slots(goal: PlaceGoal, ranks: Ranks, current_ranks: Ranks, source: str) -> None:
    if (ranks.slots_G == current_ranks.slots_G).all():
        return
    change = f"from {current_ranks.num_slots} slots to {ranks.num_slots}"
    if (goal.max_moved_experts, goal.max_moved_bytes) != (None, None):
        raise SpecError(
            f"{source}: goal.current: {change}, every rank is refilled; drop the limit on moved"
            " experts, or plan for the current slots"
        )
    if goal.objective in (Objective.CO_ACTIVATION, Objective.LAYER_CHAIN):
        raise SpecError(
            f"{source}: goal.current: {change}; {goal.objective.value} compares placements of the"
            " same slots, each expert once"
        )


def _refuse(source: str, *refusals: str | None) -> None:
    refused = next(filter(None, refusals), None)
    if refused is not None:
        raise SpecError(f"{source}: {refused}")


def _launch_refusals(file: PlaceSpecFile, model: ModelSpec | None) -> Iterator[str | None]:
    """Yield why the named engines cannot run the goal's dispatch rule and backend."""
    goal = file.goal
    for name in file.emit:
        yield dispatch_refusal(
            PLACE_TARGETS[name],
            dispatch=goal.dispatch and goal.dispatch.value,
            a2a_backend=goal.a2a_backend,
            architecture=None if model is None else model.architecture,
            pool=None if file.cluster is None else file.cluster.pools[0],
        )
    with_backend = [name for name, target in PLACE_TARGETS.items() if target.a2a_backends]
    if goal.a2a_backend is not None and not set(with_backend) & set(file.emit):
        yield (
            "goal.a2a_backend: no engine under emit asks for one"
            f" ({', '.join(with_backend)} does); leave it out"
        )


def _shape_refusals(
    file: PlaceSpecFile,
    model: ModelSpec | None,
    ranks: Ranks,
    layers: tuple[int, ...],
    experts: int,
    num_layers: int | None,
) -> Iterator[str | None]:
    """Yield why the named engines cannot take a placement of these layers and slots."""
    for target in map(PLACE_TARGETS.__getitem__, file.emit):
        yield program_refusal(
            target,
            dispatch=file.goal.dispatch and file.goal.dispatch.value,
            num_slots=ranks.num_slots,
            num_experts=experts,
            ranks=ranks.num_ranks,
        )
        for refused in shape_refusals(
            target,
            slots_per_rank=ranks.slots_G.tolist(),
            num_experts=experts,
            num_layers=num_layers,
        ):
            yield f"emit: {refused} (or emit: [] for the plan alone)"
        if target.every_moe_layer and model is not None and len(layers) != model.num_moe_layers:
            yield (
                f"emit: {target.name} needs a row for each of the {model.num_moe_layers} MoE layers"
                f" of {model.name}, the recordings have {len(layers)}; record all of them"
            )


def _on_machines(file: PlaceSpecFile, source: str) -> PlaceGoal:
    """Return the goal with the ranks per machine of the first pool."""
    goal = file.goal
    if file.cluster is None:
        return goal
    pool = file.cluster.pools[0]
    if goal.ranks > pool.num_devices:
        raise SpecError(
            f"{source}: goal.ranks: {goal.ranks} ranks on the {pool.num_devices} devices of pool"
            f" {pool.name!r}, the first, which has them; say {pool.num_devices} ranks or fewer,"
            " or the pool's true nodes"
        )
    per_node = goal.ranks_per_node or min(goal.ranks, pool.devices_per_node)
    if per_node > pool.devices_per_node or goal.ranks > per_node * pool.nodes:
        raise SpecError(
            f"{source}: goal.ranks_per_node: {goal.ranks} ranks, {per_node} a node, do not go on"
            f" {pool.nodes} nodes of {pool.devices_per_node} devices (pool {pool.name!r})"
        )
    if goal.ranks % per_node:
        raise SpecError(
            f"{source}: goal.ranks: {goal.ranks} ranks fill no nodes of {per_node} devices evenly;"
            " say goal.ranks_per_node"
        )
    return goal.model_copy(update={"ranks_per_node": per_node})


def _ranks(goal: PlaceGoal, *, experts: int, source: str) -> Ranks:
    slots = _slots(goal, experts=experts, source=source)
    if int(slots.max()) > experts:
        raise SpecError(
            f"{source}: goal: {int(slots.max())} slots on one rank for {experts} experts; more than"
            f" {experts} can only repeat what the rank holds"
        )
    if goal.expert_groups is not None and experts % goal.expert_groups:
        raise SpecError(
            f"{source}: goal.expert_groups: {experts} experts do not divide into"
            f" {goal.expert_groups} groups"
        )
    per_node = goal.ranks_per_node or goal.ranks
    speeds = goal.rank_speeds or (1.0,)
    return Ranks(
        slots_G=slots,
        node_G=np.arange(goal.ranks, dtype=np.int64) // per_node,
        speed_G=np.array(speeds * (goal.ranks // len(speeds)), dtype=float),
    )


def _slots(goal: PlaceGoal, *, experts: int, source: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    ranks = goal.ranks
    if goal.slots_per_rank is not None:
        stated = goal.slots_per_rank * (ranks // len(goal.slots_per_rank))
        if sum(stated) < experts:
            each = f"{stated[0]} on each" if len(set(stated)) == 1 else "unevenly shared"
            raise SpecError(
                f"{source}: goal.slots_per_rank: {sum(stated)} slots ({ranks} ranks, {each}) cannot"
                f" hold {experts} experts; {-(-experts // ranks)} a rank can"
            )
        return np.array(stated, dtype=np.int64)
    redundant = goal.redundant_experts
    if redundant is None:
        redundant = -experts % ranks
    total = experts + redundant
    if total % ranks:
        below = total // ranks * ranks - experts
        above = below + ranks
        legal = " and ".join(str(one) for one in (below, above) if one >= 0)
        raise SpecError(
            f"{source}: goal.redundant_experts: {redundant} makes {total} slots, which {ranks}"
            f" ranks cannot share evenly; the nearest legal: {legal}"
        )
    return np.full(ranks, total // ranks, dtype=np.int64)


def _check_priced(file: PlaceSpecFile, goal: PlaceGoal, source: str) -> None:
    needs_model = goal.objective is Objective.LAYER_TIME or goal.max_moved_bytes is not None
    if needs_model and file.model is None:
        why = "objective layer_time" if goal.max_moved_bytes is None else "max_moved_bytes"
        raise SpecError(f"{source}: model: missing; goal.{why} needs the sizes of the experts")
    if goal.objective is Objective.LAYER_TIME and file.cluster is None:
        raise SpecError(f"{source}: cluster: missing; goal.objective layer_time needs the devices")
