"""Data parallelism by FSDP2: the ranks that share and reduce each parameter.

zero_stage 0 replicates parameters and all-reduces gradients (a mesh of N x 1), 1 shards optimizer
state and gradients and gathers parameters once a step, 3 gathers them unit by unit. Gradients are
reduced to sums, never means: the loss is already a share of the global mean. Frozen weights are
sharded by 3 alone, and otherwise left out: each rank has them as they are.

Units: one per layer over the stage's ranks; inside it the routed experts over the ranks with the
same ones; and, with tensor parallelism, what is split by it over the data ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from profilers.steps.config import StepConfig
from profilers.steps.layout import ParallelState
from profilers.steps.model import StageModel, TransformerLayer
from profilers.steps.moe import MoeLayer
from profilers.steps.weights import trained_type


def shard_stage(module: StageModel, config: StepConfig, layout: ParallelState) -> None:
    """Apply FSDP2 to a model chunk, in place."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.precision == "bf16" else None,
        reduce_dtype=trained_type(config),
        cast_forward_inputs=False,
    )
    reshard = layout.degrees.zero_stage == 3
    replicas = layout.replica_mesh.size()
    left_out = (
        set()
        if reshard
        else {parameter for parameter in module.parameters() if not parameter.requires_grad}
    )

    def evenly(weight: nn.Parameter) -> Shard:
        """Shard experts along the width where there are fewer of them than replicas."""
        split = len(weight) % replicas != 0 and weight.shape[1] % replicas == 0
        return Shard(1 if split else 0)

    def unit(part: nn.Module, mesh: Any, placement: Any = None) -> None:
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=reshard and part is not module,
            mp_policy=policy,
            shard_placement_fn=placement,
            ignored_params=left_out or None,
        )

    for layer in module.layers:
        assert isinstance(layer, TransformerLayer)
        split_parts: list[nn.Module] = [layer.attention]
        if isinstance(layer.ffn, MoeLayer):
            unit(layer.ffn.routed, layout.replica_mesh, evenly)
            if layer.ffn.shared is not None:
                split_parts.append(layer.ffn.shared)
        else:
            split_parts.append(layer.ffn)
        if layout.degrees.tensor > 1:
            for part in split_parts:
                unit(part, layout.data_mesh)
        unit(layer, layout.stage_mesh)
    unit(module, layout.stage_mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def trained(module: nn.Module) -> Iterator[nn.Parameter]:
    """Every parameter that is not frozen."""
    return (weight for weight in module.parameters() if weight.requires_grad)


def local_shards(module: nn.Module) -> list[nn.Parameter]:
    """Alias this rank's trained shards as plain parameters, for an optimizer without meshes."""
    return [nn.Parameter(_local(weight.detach())) for weight in trained(module)]


def local_gradients(module: nn.Module) -> list[Tensor | None]:
    """This rank's shards of the gradients, in the order of `local_shards`."""
    return [None if weight.grad is None else _local(weight.grad) for weight in trained(module)]


def owned_bytes(module: nn.Module) -> int:
    """Bytes of this rank's shards, those of frozen weights included."""
    return sum(_local(weight.detach()).nbytes for weight in module.parameters())


def weights_now(module: nn.Module) -> Iterator[Tensor]:
    """Every tensor that is a parameter or constant table right now: shards, gathered or cast."""
    for weight in module.parameters():
        yield _local(weight.detach())
    yield from module.buffers()
    for record in _held_by_fsdp(module):
        gathered = getattr(record, "_unsharded_param", None)
        if gathered is not None:
            yield gathered.detach()


def gradients_now(module: nn.Module) -> Iterator[Tensor]:
    """Every gradient tensor in memory right now: shards, and what is not yet reduced."""
    for record in _held_by_fsdp(module):
        gathered = getattr(record, "_unsharded_param", None)
        for gradient in (
            record.sharded_param.grad,
            record.unsharded_accumulated_grad,
            None if gathered is None else gathered.grad,
        ):
            if gradient is not None:
                yield _local(gradient)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _held_by_fsdp(module: nn.Module) -> Iterator[Any]:
    """FSDP2's private records; gradients awaiting reduction are visible nowhere else."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            # torch 2.11 has one, or none.
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from group.fsdp_params if group else ()
