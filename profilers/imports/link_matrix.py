"""How fast every two nodes reach each other, from nccl-tests runs on pairs of nodes.

One file per pair, of `sendrecv_perf` with one rank on each node or of `alltoall_perf` with equally
many on both. In the first each rank sends the whole size to the other; in the second half of what
the g ranks of a node send, g size / 2, crosses to the other node. The bandwidth of a pair is the
best of its sizes, in each direction and over all cards that took part: test with as many ranks per
node as the job will have.

A profile holds times by group shape and cannot tell one pair of nodes from another, so this is a
value of its own. Letters: N nodes.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from profilers.errors import ProfileUnreadableError
from profilers.imports.nccl_tests import Log, read_logs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkMatrix:
    """Measured bandwidths between nodes."""

    nodes: tuple[str, ...]
    """Host names, sorted."""
    bytes_per_s_NN: npt.NDArray[np.float64]
    """From the row's node to the column's; `inf` on the diagonal."""


def read_link_matrix(path: Path) -> LinkMatrix:
    """Read a folder of pairwise tests.

    Raises:
        UnknownNameError: a file does not say its collective.
        ProfileUnreadableError: a file is no test of a pair, or a pair was not tested.
    """
    best: dict[tuple[str, str], float] = {}
    for log in read_logs(path):
        pair, rate = _rate(log)
        best[pair] = max(best.get(pair, 0.0), rate)
    nodes = tuple(sorted({host for pair in best for host in pair}))
    bytes_per_s_NN = np.full((len(nodes), len(nodes)), np.inf)
    for row, one in enumerate(nodes):
        for column, two in enumerate(nodes[:row]):
            if (two, one) not in best:
                raise ProfileUnreadableError(
                    f"{path}: no test of the nodes {two} and {one}; run one for every pair"
                )
            bytes_per_s_NN[row, column] = bytes_per_s_NN[column, row] = best[two, one]
    bytes_per_s_NN.setflags(write=False)
    return LinkMatrix(nodes=nodes, bytes_per_s_NN=bytes_per_s_NN)


def _rate(log: Log) -> tuple[tuple[str, str], float]:
    count = Counter(rank.host for rank in log.ranks)
    kind = log.rows[0].case.kind
    each = max(count.values())
    if len(count) != 2 or min(count.values()) != each:
        raise ProfileUnreadableError(
            f"{log.path}: runs on {dict(count)}; a test of a pair has two nodes with equal ranks"
        )
    if kind == "send_recv" and each == 1:
        crossing_ratio = 1.0
    elif kind == "all_to_all":
        crossing_ratio = each / 2.0
    else:
        raise ProfileUnreadableError(
            f"{log.path}: {kind} of {each} ranks per node says nothing about the link; run "
            "sendrecv_perf with one rank per node, or alltoall_perf"
        )
    one, two = sorted(count)
    rate = max(crossing_ratio * row.case.axes["bytes"] / row.median_s for row in log.rows)
    return (one, two), rate
