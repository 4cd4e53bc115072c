"""Distribution of a spec's spare nodes over its pools."""

from collections.abc import Sequence

import numpy as np

from tuner.errors import SpecError
from tuner.spec.cluster import Pool


def spares_by_pool(pools: Sequence[Pool], spare_nodes: int) -> tuple[int, ...]:
    """Distribute spare nodes in proportion to the nodes of each pool.

    Each goes to the pool with most nodes per 2 n + 1, n being its spares so far (Sainte-Lague; the
    first of equals), since failures are proportional to nodes. Every pool keeps one working node.

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
