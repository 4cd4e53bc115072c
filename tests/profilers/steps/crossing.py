"""What a forced step sends between nodes, told from its configuration alone.

A row that crosses is sent by dispatch and by combine, in every forward pass and in the backward:

    flat           (F + 1) * 2 H v          for every copy whose expert is on another node
    hierarchical   (F + 1) * (2 H + K) v + 4 F K      for every other node that a token needs

with F forward passes, one, or two where the layer is computed again (profilers/steps/recompute.py).
The K gates travel with a row and their gradients come back; the K expert ids, four bytes each, go
forwards only (profilers/steps/dispatch.py).

HierMoE (arXiv 2508.09591, equation 7) counts the tokens that need a node. A forced step deals the
copies of a sequence, sorted by expert, to its S tokens in turn (profilers/steps/loads.py), and a
node's experts are consecutive: a run of c cards meets min(c, S) tokens. So

    tokens of a sequence that need node n = min(copies of its experts, S)

which no deal exceeds: forced routing has the fewest duplicates that its loads allow, so what
de-duplication saves here is the least that it saves under these loads.

Letters: H hidden size, K experts per token, v bytes of an element, S tokens of a sequence.

Free of torch. Exact where every rank of an expert group holds the same sequences' tokens in equal
parts and tensor ranks share a node; where a sequence is split over nodes, an expectation. Not
covered: learned routing; the counts that announce the rows, 8 bytes per expert or node and peer.
"""

from collections.abc import Iterator
from fractions import Fraction

from profilers.steps.config import Dispatcher, LayerKind, Recompute, Stage, StepConfig
from profilers.steps.loads import forced_copies

ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
EXPERT_ID_BYTES = 4


def inter_node_bytes(config: StepConfig, *, ranks_per_node: int) -> float:
    """Predict the bytes that dispatch and combine send between nodes in one step, all ranks.

    Raises:
        ValueError: routing is learned, or the dispatcher cannot work on such nodes.
    """
    model, degrees = config.model, config.parallelism
    if config.routing.mode != "forced":
        raise ValueError("learned routing has no loads to predict from: use mode forced")
    if not degrees.spans_nodes_evenly(ranks_per_node):
        raise ValueError(
            f"ranks_per_node {ranks_per_node} does not fit dispatcher hierarchical over"
            f" {degrees.expert} expert ranks"
        )
    experts = model.num_experts
    loads = config.routing.load_ratio
    total = 0.0
    for moe_layer, (pipeline_rank, stage) in enumerate(_moe_stages(config)):
        row = loads[moe_layer] if loads else (1.0 / experts,) * experts
        copies = forced_copies(row, tokens=config.sequence_length, top_k=model.top_k)
        rows = _far_rows(config, copies, pipeline_rank=pipeline_rank, ranks_per_node=ranks_per_node)
        total += float(rows) * _row_bytes(config, stage)
    return total


def _moe_stages(config: StepConfig) -> Iterator[tuple[int, Stage]]:
    """Pipeline rank and stage of every MoE layer."""
    kinds = iter(config.model.layers)
    for index, stage in enumerate(config.stages):
        for _ in range(stage.num_layers):
            if next(kinds) is LayerKind.MOE:
                yield index % config.parallelism.pipeline, stage


def _row_bytes(config: StepConfig, stage: Stage) -> int:
    """Bytes of one row that crosses, over all passes of a step."""
    model, element = config.model, ELEMENT_BYTES[config.precision]
    forwards = 1 if stage.recompute is Recompute.NONE else 2
    both_ways = 2 * model.hidden_size * element
    if config.parallelism.dispatcher is Dispatcher.FLAT:
        return (forwards + 1) * both_ways
    gates, ids = model.top_k * element, model.top_k * EXPERT_ID_BYTES
    return (forwards + 1) * (both_ways + gates) + forwards * ids


def _far_rows(
    config: StepConfig, copies_E: tuple[int, ...], *, pipeline_rank: int, ranks_per_node: int
) -> Fraction:
    """Rows of one MoE layer that cross, in one pass over the global batch."""
    degrees = config.parallelism
    inside = degrees.tensor * degrees.data
    local = config.model.num_experts // degrees.expert
    # The tokens that one rank holds, in sequences.
    share = Fraction(config.global_batch_size, inside)
    far = Fraction(0)
    for first in range(pipeline_rank * inside, (pipeline_rank + 1) * inside, degrees.expert):
        nodes = [(first + rank) // ranks_per_node for rank in range(degrees.expert)]
        for node in set(nodes):
            copies = sum(
                sum(copies_E[rank * local : (rank + 1) * local])
                for rank, at in enumerate(nodes)
                if at == node
            )
            if degrees.dispatcher is Dispatcher.HIERARCHICAL:
                copies = min(copies, config.sequence_length)
            far += copies * share * (len(nodes) - nodes.count(node))
    return far
