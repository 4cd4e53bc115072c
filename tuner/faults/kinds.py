"""One job on nodes of several kinds: a failed node is replaced by one of its own kind only.

Failure rates, writers and bytes add up. The slowest kind's storage bandwidth counts for all, since
a checkpoint is durable when its last part is. Every kind has its own spares:

    w / (1 - w) = sum over kinds of w_k / (1 - w_k)

with w_k the share of time that the job would wait because of kind k only (reliability.py): while
the job runs, each kind uses up its own spares. Exact without spares; with them slightly too high,
since repairs of one kind continue while the job waits for another. tests/tuner/faults/test_kinds.py
solves the Markov chain.
"""

from collections.abc import Sequence
from dataclasses import replace

from tuner.faults.reliability import FailureModel, Jobs


def jobs_together(kinds: Sequence[Jobs], *, checkpoint_bytes: float) -> Jobs:
    """Combine the parts of a job on nodes of each kind; numbers, not arrays.

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


def slowest(kinds: Sequence[FailureModel]) -> FailureModel:
    """Take the slowest storage of the kinds, which are identical in all else.

    A level on hosts is not priced over several kinds of nodes, and left out.
    """
    storages = [one.storage for one in kinds]
    storage = replace(
        storages[0],
        node_write_bytes_per_s=min(one.node_write_bytes_per_s for one in storages),
        node_read_bytes_per_s=min(one.node_read_bytes_per_s for one in storages),
        host_bytes_per_s=min(one.host_bytes_per_s for one in storages),
    )
    host = kinds[0].host if len(kinds) == 1 else None
    return replace(kinds[0], storage=storage, host=host)
