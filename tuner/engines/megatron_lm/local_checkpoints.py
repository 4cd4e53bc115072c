"""Checkpoints on hosts of Megatron-LM and Bridge: "local" ones, by NVIDIA's resiliency extension.

Read from `checkpoint_and_decide_exit`, `save_checkpoint` and `_load_base_checkpoint` of
core_v0.16.1 to core_v0.19.0, their counterparts in Bridge v0.3.0 to v0.5.0, and
`LocalCheckpointManager` and `CliqueReplicationStrategy` of nvidia-resiliency-ext 0.5:

- Every rank writes files of its own below one folder, which lies in the memory of a node (tmpfs)
  here and outlives the processes. The newest iteration of which every rank has its files is loaded,
  unless the shared checkpoint is newer.
- In a step that both are due, only the shared one is written.
- Replicas are broadcast within groups of `replication_factor` ranks that lie `replication_jump`
  apart, a node here, while training waits. The number of ranks must be a multiple of both together.
- Files belong to a rank, not to a layout: after a restart with other degrees, or of nodes in
  another order, those of another rank would be read.
- With `--async-save` another process writes them, and reads what is no sharded tensor while
  training goes on: the count of steps of PyTorch's Adam, a tensor, is then a later one. That of
  Transformer Engine's and Apex's Adam is a plain number (examples/profiles/h200-megatron-lm).
- `torch.load` reads them, which runs what a file says: only their owner may write to the folder.
"""

from collections.abc import Iterator
from typing import Final

from tuner.engines.checkpoints import CheckpointSchedule
from tuner.engines.launchers.shape import LaunchShape

LOCAL_NOTE: Final = (
    "  LOCAL_CHECKPOINTS        a folder in the memory of every node, e.g. below /dev/shm, that",
    "                           this run alone writes to; needed where CHECKPOINTS is named",
)

NOTES: Final = (
    "Checkpoints on hosts need the package nvidia-resiliency-ext, and belong to the ranks that",
    "wrote them: restart every node with its own NODE_RANK, and a replacement with that of the",
    "lost one. Before a restart on fewer nodes, with other degrees or in another order, empty",
    "LOCAL_CHECKPOINTS: the run then goes on from CHECKPOINTS.",
    "A run that ends before the time limit of its job does not save a step to CHECKPOINTS that it",
    "has just saved to hosts.",
)


def has_local(schedule: CheckpointSchedule | None) -> bool:
    """Return whether a plan saves to hosts."""
    return schedule is not None and schedule.host_steps is not None


def local_settings(
    schedule: CheckpointSchedule, shape: LaunchShape
) -> Iterator[tuple[str, str | int | bool]]:
    """Yield when and where to save to hosts, as fields of Megatron's CheckpointConfig.

    The folder is a variable of the shell that is to start the ranks.

    Raises:
        ValueError: the ranks cannot be divided into groups that hold each other's replicas.
    """
    assert schedule.host_steps is not None
    group = schedule.replicas + 1
    yield "non_persistent_ckpt_type", "local"
    yield "non_persistent_save_interval", schedule.host_steps
    yield "non_persistent_local_ckpt_dir", "${LOCAL_CHECKPOINTS:-}"
    if group == 1:
        return
    if shape.nodes % group:
        raise ValueError(f"{shape.nodes} nodes cannot be divided into groups of {group}")
    yield "replication", True
    yield "replication_jump", shape.devices_per_node
    yield "replication_factor", group
