"""One job on nodes of several kinds: a failed node is replaced by one of its own kind only.

Rates of failure, writers and bytes add up. The slowest kind's way to storage is taken for all,
since a checkpoint is safe when its last part is. Of the spares every kind has its own,

    w / (1 - w) = sum over kinds of w_k / (1 - w_k)

with w_k the share of time that kind k alone would make the job wait (reliability.py): while the job
runs, each kind empties its own spares. Exact without spares; with them slightly too high, since
repairs of one kind go on while the job waits for another. tests/tuner/faults/test_kinds.py solves
the Markov chain.
"""

from collections.abc import Sequence
from dataclasses import replace

from tuner.faults.reliability import Jobs, Reliability


def jobs_together(kinds: Sequence[Jobs], *, checkpoint_bytes: float) -> Jobs:
    """Make one job of the parts that run on nodes of each kind; numbers, not columns.

    Args:
        kinds: devices, nodes, writers and spares of each.
        checkpoint_bytes: of the whole model.
    """
    return Jobs(
        devices=sum(float(one.devices) for one in kinds),
        nodes=sum(float(one.nodes) for one in kinds),
        checkpoint_bytes=checkpoint_bytes,
        writers=sum(float(one.writers) for one in kinds),
        spare_nodes=sum(float(one.spare_nodes) for one in kinds),
        kinds=tuple(kinds),
    )


def slowest(kinds: Sequence[Reliability]) -> Reliability:
    """Take the slowest way to storage of the kinds, which are alike in all else."""
    storages = [one.storage for one in kinds]
    storage = replace(
        storages[0],
        node_write_bytes_per_s=min(one.node_write_bytes_per_s for one in storages),
        node_read_bytes_per_s=min(one.node_read_bytes_per_s for one in storages),
        host_bytes_per_s=min(one.host_bytes_per_s for one in storages),
    )
    return replace(kinds[0], storage=storage)
