"""Costs of one candidate (parallel degrees): of each layer, the embedding and the head.

`layout_problem` turns `CandidateCosts` into a `LayoutProblem`, and
tuner/search/reference/predict.py reads the same numbers for a finished decision, so the objective
of the solver and the predicted step time are one model.

Costs once per step (gradient reduction, parameter all-gather, optimizer) are spread over the step's
micro-batches: the slowest device then pays them in full, and it ends the step.

Letters: R runs of identical layers, O options, S stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from solvers.arrays import LARGEST_BYTES
from solvers.layout.problem import LayoutProblem
from tuner.catalog.manifest import Capabilities
from tuner.costs.reference.layer_time import (
    PartSeconds,
    PassTime,
    layer_time,
    pass_time,
    scale_parts,
    sum_parts,
)
from tuner.costs.reference.memory import (
    LayerActivations,
    ModelStates,
    head_saved,
    layer_activations,
    token_ids_bytes,
    unit_state,
)
from tuner.costs.reference.operations import (
    COMMUNICATION,
    boundary_ops,
    embedding_ops,
    head_ops,
)
from tuner.costs.reference.temporaries import (
    UNCOUNTED_RATIO,
    boundary_bytes,
    head_gradients,
    head_workspace,
    layer_workspace,
    optimizer_workspace,
    reduction_workspace,
    zero3_gathered_bytes,
)
from tuner.costs.reference.update import (
    GRADIENT_BYTES,
    Unit,
    UpdateTime,
    embedding_units,
    head_units,
    layer_units,
    update_time,
)
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.costs.residuals import Residual
from tuner.prices.profile import ProfilePrices
from tuner.search.reference.decisions import RecomputeOption
from tuner.search.reference.schedule import in_flight, most_in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedMachine:
    """Devices that a plan may use, with their memory and measured speed."""

    num_devices: int
    memory_limit_bytes: int
    """Usable bytes of one device."""
    prices: ProfilePrices
    residual: Residual
    ranks_per_node: int | None = None
    """Consecutive devices that share a node; None: all of them."""
    cores_per_rank: float = 1.0
    """CPU cores per rank; below 1 where processes that emulate devices share too few."""
    measured_ranks: int | None = None
    """Ranks that the profile's collectives were measured over; None: as many as there are."""
    measured_nodes: int | None = None
    """Nodes that the profile's collectives were measured on; None: as many as there are."""


@dataclass(frozen=True, kw_only=True)
class CandidateCosts:
    """The costs of one set of degrees; computed on demand and cached."""

    work: Workload
    degrees: StepDegrees
    machine: PricedMachine

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first layer, length) of each run of layers that cost the same."""
        groups: list[tuple[int, int]] = []
        previous: object = None
        for layer in range(self.work.model.num_layers):
            signature = self._signature(layer)
            if groups and signature == previous:
                first, length = groups[-1]
                groups[-1] = (first, length + 1)
            else:
                groups.append((layer, 1))
            previous = signature
        return tuple(groups)

    def time(self, layer: int, option: RecomputeOption) -> PassTime:
        """Seconds of a layer for one micro-batch, corrected by the residual."""
        known = self._times.get((self._signature(layer), option))
        if known is None:
            raw = layer_time(
                self.work,
                self.degrees,
                self.machine.prices,
                layer=layer,
                recompute=option.recompute,
                chunks=option.chunks,
            )
            known = self._times[self._signature(layer), option] = self._corrected(raw)
        return known

    def update(self, layer: int) -> UpdateTime:
        """Seconds of a layer's data-parallel state, corrected by the residual."""
        return self._layer_updates[self._update_kind(layer)]

    def activations(
        self, layer: int, option: RecomputeOption, *, expert_rank: int | None = None
    ) -> LayerActivations:
        """Bytes of a layer on an expert rank; None: on its most-loaded one."""
        key = (self._signature(layer), option, expert_rank)
        if key not in self._activations:
            self._activations[key] = layer_activations(
                self.work,
                self.degrees,
                layer=layer,
                recompute=option.recompute,
                chunks=option.chunks,
                expert_rank=expert_rank,
            )
        return self._activations[key]

    def state(self, layer: int) -> ModelStates:
        """Bytes of a layer's parameters, gradients and optimizer state."""
        return unit_state(
            layer_units(self.work, self.degrees, layer=layer), self.work, self.degrees
        )

    def workspace(self, layer: int, option: RecomputeOption) -> int:
        """Bytes that a layer's backward adds to what is saved, on its most-loaded rank."""
        index = self.work.moe_index[layer]
        loads = (
            [0] if index is None else [sum(row) for row in self.work.received(self.degrees, index)]
        )
        return layer_workspace(
            self.work,
            self.degrees,
            layer=layer,
            recompute=option.recompute,
            chunks=option.chunks,
            expert_rank=loads.index(max(loads)),
        )

    def static_bytes(self, layer: int, *, saved: int) -> int:
        """Bytes of a layer's state, at least what the optimizer step needs less `saved`.

        The optimizer runs when no activations are saved.
        """
        units = layer_units(self.work, self.degrees, layer=layer)
        return max(self.state(layer).total, self._updated_bytes(units) - saved)

    def fixed_bytes(self, stage: int, *, in_flight: int, least: int) -> int:
        """Bytes of a stage besides its layers.

        The loss, the layers and the gradient reduction run one after the other; `least` is the
        least workspace of a layer.
        """
        work, degrees, non_layer = self.work, self.degrees, self.non_layer_units(stage)
        layers = range(work.model.num_layers)
        fixed = max(unit_state(non_layer, work, degrees).total, self._updated_bytes(non_layer))
        fixed += self.non_layer_resident_bytes(stage) + zero3_gathered_bytes(
            work, degrees, layers=layers
        )
        fixed += boundary_bytes(work, degrees, stage=stage, in_flight=in_flight)
        if degrees.zero_stage == 3:
            fixed += (work.element_bytes + GRADIENT_BYTES) * sum(
                unit.parameters for unit in non_layer
            )
            fixed += work.element_bytes * sum(unit.frozen for unit in non_layer)
        units = [
            *non_layer,
            *(unit for at in layers for unit in layer_units(work, degrees, layer=at)),
        ]
        largest = max(units, key=lambda unit: unit.parameters)
        turns = [reduction_workspace(largest, work, degrees, has_gradients=True) - least, 0]
        if stage == degrees.num_stages - 1:
            loss = self.non_layer_transient_bytes(stage) + head_workspace(work, degrees)
            turns += [head_gradients(work), loss - least]
        return fixed + max(turns)

    def non_layer_time(self, stage: int) -> PassTime:
        """Seconds per micro-batch of a stage besides its layers."""
        ops = list(boundary_ops(self.work, self.degrees))
        if stage == 0:
            ops += embedding_ops(self.work, self.degrees)
        if stage == self.degrees.num_stages - 1:
            ops += head_ops(self.work, self.degrees)
        return self._corrected(pass_time(ops, self.machine.prices))

    def non_layer_update(self, stage: int) -> UpdateTime:
        """Seconds of the state of a stage's embedding and head."""
        return self._corrected_update(self.non_layer_units(stage))

    def non_layer_units(self, stage: int) -> tuple[Unit, ...]:
        """Parameter units of a stage besides its layers."""
        units: tuple[Unit, ...] = ()
        if stage == 0:
            units += embedding_units(self.work, self.degrees)
        if stage == self.degrees.num_stages - 1:
            units += head_units(self.work, self.degrees)
        return units

    def non_layer_resident_bytes(self, stage: int) -> int:
        """Bytes besides the layers that are resident while any layer of a stage runs backward.

        Token ids stay until the step ends, for the gradient of the embedding. Targets and head
        activations stay while the loss of another micro-batch waits for its backward, as with
        fewer micro-batches than ranks.
        """
        ids = token_ids_bytes(self.work, self.degrees)
        resident = ids if stage == 0 and self.work.tune is None else 0
        waiting = self.in_flight[stage] - 1
        if stage == self.degrees.num_stages - 1 and waiting:
            resident += ids + waiting * head_saved(self.work, self.degrees)
        return resident

    def non_layer_transient_bytes(self, stage: int) -> int:
        """Bytes of the last loss and its head, released before any layer's backward."""
        if stage != self.degrees.num_stages - 1:
            return 0
        targets = token_ids_bytes(self.work, self.degrees) if self.in_flight[stage] == 1 else 0
        return head_saved(self.work, self.degrees) + targets

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches whose activations each stage holds at once."""
        return in_flight(self.degrees, num_microbatches=self.num_microbatches)

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches per pipeline and step."""
        return self.work.num_microbatches(self.degrees)

    @cached_property
    def core_sharing_ratio(self) -> float:
        """Factor on kernel times that were measured while every rank computed.

        1 unless ranks share cores. Of the ranks of a pipeline m v / (m v + P - 1) compute at a time
        (Narayanan et al., SC 2021, section 2.2), the others wait and leave them their cores; no
        rank is faster than with a core of its own.
        """
        if self.machine.cores_per_rank >= 1.0:
            return 1.0
        passes = self.num_microbatches * self.degrees.virtual_pipeline
        workspace = passes / (passes + self.degrees.pipeline - 1)
        return max(workspace, self.machine.cores_per_rank)

    def per_microbatch(self, time: PassTime, update: UpdateTime) -> PartSeconds:
        """All costs of one micro-batch, with its share of the costs once per step."""
        once = scale_parts(update.once_s, 1.0 / self.num_microbatches)
        return sum_parts((time.by_part(), update.every_microbatch_s, once))

    @cached_property
    def _times(self) -> dict[tuple[object, RecomputeOption], PassTime]:
        return {}

    @cached_property
    def _activations(self) -> dict[tuple[object, RecomputeOption, int | None], LayerActivations]:
        return {}

    @cached_property
    def _layer_updates(self) -> Mapping[object, UpdateTime]:
        first: dict[object, int] = {}
        for layer in range(self.work.model.num_layers):
            first.setdefault(self._update_kind(layer), layer)
        return {
            kind: self._corrected_update(layer_units(self.work, self.degrees, layer=layer))
            for kind, layer in first.items()
        }

    def _update_kind(self, layer: int) -> object:
        """Return a key that layers share whose state costs the same."""
        return self.work.model.layers[layer], self.work.trainings[layer].has_input_gradient

    def _updated_bytes(self, units: tuple[Unit, ...]) -> int:
        """Bytes of some units' state while the optimizer steps."""
        state = unit_state(units, self.work, self.degrees)
        # Gradients are reduced by then, and as large as AdamW's square roots.
        return state.parameters + state.optimizer + 2 * optimizer_workspace(units, self.degrees)

    def _signature(self, layer: int) -> object:
        index = self.work.moe_index[layer]
        load = None if index is None else self.work.copies_LE[index]
        return load, self.work.trainings[layer].has_input_gradient

    def _corrected(self, time: PassTime) -> PassTime:
        return PassTime(
            forward_s=self._with_core_sharing(time.forward_s),
            backward_s=self._with_core_sharing(time.backward_s),
            recompute_s=self._with_core_sharing(time.recompute_s),
        )

    def _with_core_sharing(self, seconds: PartSeconds) -> PartSeconds:
        corrected = self.machine.residual.applied(seconds)
        if self.core_sharing_ratio == 1.0:
            return corrected
        return {
            part: value if part in COMMUNICATION else value * self.core_sharing_ratio
            for part, value in corrected.items()
        }

    def _corrected_update(self, units: tuple[Unit, ...]) -> UpdateTime:
        residual = self.machine.residual
        raw = update_time(units, self.work, self.degrees, self.machine.prices)
        return UpdateTime(
            once_s=residual.applied(raw.once_s),
            every_microbatch_s=residual.applied(raw.every_microbatch_s),
        )


def layout_problem(
    costs: CandidateCosts,
    *,
    options: Sequence[RecomputeOption],
    capabilities: Capabilities,
    uniform_chunks: bool = True,
) -> LayoutProblem:
    """Build the layout problem of a candidate.

    Args:
        costs: of the candidate.
        options: recomputation options of a layer.
        capabilities: of the targets.
        uniform_chunks: count micro-batches in flight as if all model chunks of a rank saved equal
            bytes (exact then); otherwise use an upper bound for any layout.

    Memory is that of the most-loaded rank of every layer: an upper bound where different layers
    have different most-loaded ranks, or peaks at different moments.
    """
    degrees = costs.degrees
    stages = range(degrees.num_stages)
    count = in_flight if uniform_chunks else most_in_flight
    flying = count(degrees, num_microbatches=costs.num_microbatches)
    # More than any device has; capped so that sums over a whole model stay exact.
    entries = 4 * (costs.work.model.num_layers + len(stages)) * (1 + max(flying))
    most_bytes = LARGEST_BYTES // entries

    def capped(needs: Sequence[int] | Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
        return np.array(np.minimum(np.array(needs, dtype=object), most_bytes), dtype=np.int64)

    firsts = [first for first, _ in costs.runs]
    activations = [[costs.activations(first, option) for option in options] for first in firsts]
    workspace = [[costs.workspace(first, option) for option in options] for first in firsts]
    least = min(min(row) for row in workspace)
    limit_bytes = int(costs.machine.memory_limit_bytes / (1.0 + UNCOUNTED_RATIO))
    return LayoutProblem(
        run_lengths=tuple(length for _, length in costs.runs),
        device_of_stage=tuple(stage % degrees.pipeline for stage in stages),
        options=tuple(option.name for option in options),
        time_s_RO=np.array(
            [
                [
                    sum(
                        costs.per_microbatch(
                            costs.time(first, option), costs.update(first)
                        ).values()
                    )
                    for option in options
                ]
                for first in firsts
            ]
        ),
        fixed_time_s_S=np.array(
            [
                sum(
                    costs.per_microbatch(
                        costs.non_layer_time(stage), costs.non_layer_update(stage)
                    ).values()
                )
                for stage in stages
            ]
        ),
        static_bytes_R=capped(
            [
                costs.static_bytes(
                    first, saved=min(flying) * min(activation.saved for activation in row)
                )
                for first, row in zip(firsts, activations, strict=True)
            ]
        ),
        fixed_bytes_S=capped(
            [costs.fixed_bytes(stage, in_flight=flying[stage], least=least) for stage in stages]
        ),
        saved_bytes_RO=capped([[activation.saved for activation in row] for row in activations]),
        fixed_saved_bytes_S=np.zeros(len(stages), dtype=np.int64),
        transient_bytes_RO=capped(workspace),
        in_flight_S=flying,
        memory_limit_bytes_D=np.full(degrees.pipeline, limit_bytes),
        num_microbatches=costs.num_microbatches,
        uniform_option=not (capabilities.recompute_per_stage and capabilities.chunks_per_stage),
        fixed_layout=None if capabilities.uneven_layout else _equal_layout(costs.work, degrees),
        min_layers_per_stage=1,
    )


def _equal_layout(work: Workload, degrees: StepDegrees) -> tuple[int, ...]:
    return (work.model.num_layers // degrees.num_stages,) * degrees.num_stages
