"""One job on nodes of several kinds: a failed node is replaced by one of its own kind only.

Failure rates, writers and bytes add up. The slowest storage bandwidth and restart count for all,
since a checkpoint is durable when its last part is, and training goes on when the last rank
does. Every kind has its own spares:

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
        checkpoint_bytes: of the whole job.
    """
    return Jobs(
        devices=sum(float(kind.devices) for kind in kinds),
        nodes=sum(float(kind.nodes) for kind in kinds),
        checkpoint_bytes=checkpoint_bytes,
        reread_bytes=max(float(kind.reread_bytes) for kind in kinds),
        writers=sum(float(kind.writers) for kind in kinds),
        spare_nodes=sum(float(kind.spare_nodes) for kind in kinds),
        kinds=tuple(kinds),
    )


def slowest(kinds: Sequence[FailureModel]) -> FailureModel:
    """Take the slowest of what profiles and datasheets say of the kinds; a spec says the rest.

    That is what a node and a device reach to storage and to memory, what writing takes from
    computation, and restarts; the order of the kinds does not matter. A level on hosts is not
    priced over several kinds of nodes, and left out.
    """
    storage = replace(
        kinds[0].storage,
        node_write_bytes_per_s=min(kind.storage.node_write_bytes_per_s for kind in kinds),
        node_read_bytes_per_s=min(kind.storage.node_read_bytes_per_s for kind in kinds),
        host_bytes_per_s=min(kind.storage.host_bytes_per_s for kind in kinds),
        fresh_bytes_per_s=min(kind.storage.fresh_bytes_per_s for kind in kinds),
    )
    restart_s = max(kind.restart_s for kind in kinds)
    inside_s = [
        kind.in_process_restart_s for kind in kinds if kind.in_process_restart_s is not None
    ]
    host = kinds[0].host if len(kinds) == 1 else None
    return replace(
        kinds[0],
        storage=storage,
        restart_s=restart_s,
        in_process_restart_s=max(inside_s) if len(inside_s) == len(kinds) else None,
        host=host,
    )
