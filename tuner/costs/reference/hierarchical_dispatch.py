"""Rows that the hierarchical dispatcher moves and keeps, by hop; rows of both between nodes.

A token is sent once to every node that it needs, and is copied there (profilers/steps/dispatch.py;
the idea is HierMoE's, arXiv 2508.09591). On a rank of node n, for one chunk of a micro-batch,

    needed_n    min(copies_n, S)                    tokens of a sequence that need node n
    C           sum_n needed_n q                    rows sent across, own node's among them
    R_n         N needed_n q                        rows received across
    M_n         N copies_n q                        copies sent inside the node
    received    as with flat dispatch               rows computed

with copies_n token copies of a sequence for the experts of node n, S tokens of a sequence, q
sequences of the rank in a chunk, N nodes of the expert group. `needed_n` is exact for forced
routing, which deals a sequence's copies to its tokens in turn; no routing of the same loads saves
less.

Bytes that cross nodes are counted here by sender, from what is priced; a test counts them by
receiver, from the inputs of the step (tests/profilers/steps/crossing.py).

Letters: N nodes, H hidden size, K experts per token, D bytes of an element.

Not covered: learned routing, whose duplicates are at least as many.
"""

from dataclasses import dataclass

from tuner.costs.reference.workload import StepDegrees, Workload

ID_BYTES = 8
"""Row indices and counts are 64-bit integers."""

EXPERT_ID_BYTES = 4
"""Expert numbers travel as 32-bit integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRows:
    """Rows of one rank and one chunk of a micro-batch."""

    sent: int
    """Rows sent across nodes, own node's among them (C)."""
    received: int
    """Rows received across nodes (R_n)."""
    copies: int
    """Copies sent inside the node (M_n)."""


def rows_by_node(
    work: Workload, degrees: StepDegrees, *, moe_layer: int, chunks: int
) -> tuple[DispatchRows, ...]:
    """Count the rows of a rank on each node of an expert group.

    Raises:
        ValueError: dispatch is flat.
    """
    if degrees.ranks_per_node is None:
        raise ValueError("flat dispatch has no hops")
    copies_N = _copies_by_node(work, degrees, moe_layer, degrees.ranks_per_node)
    needed_N = [min(copies, work.sequence_length) for copies in copies_N]
    nodes = len(copies_N)
    share = degrees.micro_batch_size / degrees.tensor / chunks
    return tuple(
        DispatchRows(
            sent=_whole(sum(needed_N) * share),
            received=_whole(nodes * needed * share),
            copies=_whole(nodes * copies * share),
        )
        for copies, needed in zip(copies_N, needed_N, strict=True)
    )


def kept_bytes(
    work: Workload, degrees: StepDegrees, *, moe_layer: int, chunks: int, expert_rank: int
) -> int:
    """Count the bytes that dispatch, experts and combine of one chunk save for the backward pass.

    R       8 K                 the copies' order
    M       H D + D + 8         results before their weights, the weights, their rows
    C       16                  node and token of every row
    rows    (H + 3 F) D         as with flat dispatch
            16                  where rows are re-sorted by expert
    """
    moe = work.model.moe
    assert moe is not None
    assert degrees.ranks_per_node is not None
    rows = rows_by_node(work, degrees, moe_layer=moe_layer, chunks=chunks)[
        expert_rank // degrees.ranks_per_node
    ]
    received = work.received(degrees, moe_layer)[expert_rank]
    computed = -(-sum(received) // chunks)
    sort_bytes = 2 * ID_BYTES if min(degrees.ranks_per_node, len(received)) > 1 else 0
    hidden, element = work.model.hidden_size, work.element_bytes
    return (
        rows.received * moe.top_k * ID_BYTES
        + rows.copies * (hidden * element + element + ID_BYTES)
        + rows.sent * 2 * ID_BYTES
        + computed * ((hidden + 3 * moe.expert_ffn_size) * element + sort_bytes)
    )


def far_rows(
    work: Workload, degrees: StepDegrees, *, moe_layer: int, stage_rank: int, ranks_per_node: int
) -> float:
    """Count the rows that one pass of a micro-batch sends to other nodes, all ranks of a stage.

    `stage_rank` is the pipeline rank that holds the layer. Every data rank runs its micro-batch.
    """
    share = degrees.micro_batch_size / degrees.tensor
    local = [sum(work.copies_LE[moe_layer][place]) for place in _blocks(work, degrees)]
    first = stage_rank * degrees.ranks_per_stage
    far = 0.0
    for rank in range(first, first + degrees.ranks_per_stage):
        group = rank - rank % degrees.expert
        by_node: dict[int, int] = {}
        for place, copies in enumerate(local):
            node = (group + place) // ranks_per_node
            by_node[node] = by_node.get(node, 0) + copies
        by_node.pop(rank // ranks_per_node)
        if degrees.ranks_per_node is not None:
            by_node = {node: min(rows, work.sequence_length) for node, rows in by_node.items()}
        far += sum(by_node.values()) * share
    return far


def row_bytes(work: Workload, degrees: StepDegrees, *, forwards: int) -> int:
    """Count the bytes of a row that crosses, in all forward passes and the backward one.

    Source: tests/profilers/steps/crossing.py. Dispatch and combine carry H elements each; the
    hierarchical one K gates beside a row both ways, and K expert numbers forwards.
    """
    moe = work.model.moe
    assert moe is not None
    round_trip_bytes = 2 * work.model.hidden_size * work.element_bytes
    if degrees.ranks_per_node is None:
        return (forwards + 1) * round_trip_bytes
    gates = moe.top_k * work.element_bytes
    return (forwards + 1) * (round_trip_bytes + gates) + forwards * moe.top_k * EXPERT_ID_BYTES


def _copies_by_node(
    work: Workload, degrees: StepDegrees, moe_layer: int, ranks_per_node: int
) -> tuple[int, ...]:
    nodes = degrees.expert // ranks_per_node
    copies_E = work.copies_LE[moe_layer]
    per_node = len(copies_E) // nodes
    return tuple(sum(copies_E[node * per_node : (node + 1) * per_node]) for node in range(nodes))


def _blocks(work: Workload, degrees: StepDegrees) -> list[slice]:
    """The experts of every rank of a group."""
    moe = work.model.moe
    assert moe is not None
    local = moe.num_experts // degrees.expert
    return [slice(rank * local, (rank + 1) * local) for rank in range(degrees.expert)]


def _whole(rows: float) -> int:
    """Round up, sums of parts of a sequence being exact but for the last bit."""
    return -int(-rows // 1)
