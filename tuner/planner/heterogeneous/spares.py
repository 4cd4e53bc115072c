"""How the spare nodes of a spec are shared out over its pools."""

from collections.abc import Sequence

import numpy as np

from tuner.errors import SpecError
from tuner.spec.cluster import Pool


def spares_by_pool(pools: Sequence[Pool], spare_nodes: int) -> tuple[int, ...]:
    """Share out spare nodes by the machines that each pool has.

    One after the other goes to the pool with most machines per 2 n + 1 for the n it keeps back
    already (Sainte-Lague's rule; the first of equals), as failures come in proportion to machines.
    Every pool keeps one that works.

    Raises:
        SpecError: more are kept back than the pools can spare.
    """
    nodes_P = np.array([pool.nodes for pool in pools])
    most = int((nodes_P - 1).sum())
    if spare_nodes > most:
        raise SpecError(
            f"goal.reliability.spare_nodes: {spare_nodes} leaves a pool without nodes; of "
            f"{int(nodes_P.sum())} nodes in {len(pools)} pools keep back {most} at most"
        )
    given_P = np.zeros(len(pools), dtype=np.int64)
    for _ in range(spare_nodes):
        claim_P = np.where(given_P < nodes_P - 1, nodes_P / (2.0 * given_P + 1.0), 0.0)
        given_P[claim_P.argmax()] += 1
    return tuple(given_P.tolist())
