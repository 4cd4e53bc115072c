"""Token copies to the ranks of their experts and back: at once, or node by node.

`dispatch_flat` sends a row for every copy. `dispatch_hierarchical` is HierMoE's de-duplicated
all-to-all (arXiv 2508.09591, equation 7, two levels), which leaves the combine open; here it is the
mirror image, with the sums taken before the slow link:

    1. one row for every node that a token needs, to the rank at this rank's place on that node,
       with its gates and the numbers of the experts that it wants there;
    2. inside the node a copy for every expert, computed and brought back;
    3. the copies of a row weighted and summed, and one row a node sent back, and summed.

Both give the same values but for the order of the sums. Gates travel beside the row, in its type,
so that they get their gradient from the node that uses them.

Letters: T tokens of this rank, H hidden size, K experts per token, E experts, P ranks, N nodes,
C rows sent to nodes, R rows received, M copies.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from profilers.steps.collectives import Peers, all_to_all_counts, all_to_all_rows
from profilers.steps.functional import (
    expert_order,
    inverse_order,
    permute,
    reorder,
    sum_rows,
    unpermute,
)

ExpertFfn = Callable[[Tensor, Sequence[int]], Tensor]
"""Rows that lie by expert [R, H], and how many each expert has, to rows [R, H]."""


def dispatch_flat(
    x_TH: Tensor,
    experts_TK: Tensor,
    weight_TK: Tensor,
    *,
    copies_PE: Tensor,
    peers: Peers,
    ffn: ExpertFfn,
) -> Tensor:
    """Send every copy straight to its expert's rank: [T, H] -> [T, H]."""
    order_M = expert_order(experts_TK)
    # The rows get no name here, so that they are let go of as soon as they are sent.
    y_MH = _through_experts(
        permute(x_TH, order_M, top_k=experts_TK.shape[1]), copies_PE, peers=peers, ffn=ffn
    )
    return unpermute(y_MH, order_M, weight_TK)


def dispatch_hierarchical(
    x_TH: Tensor,
    experts_TK: Tensor,
    weight_TK: Tensor,
    *,
    num_experts: int,
    across: Peers,
    inside: Peers,
    ffn: ExpertFfn,
) -> Tensor:
    """Send every token once to each node that it needs: [T, H] -> [T, H].

    Args:
        x_TH: the tokens.
        experts_TK: their experts; node n holds the n-th block of them.
        weight_TK: their gates.
        num_experts: E, of the whole group.
        across: one rank of every node, in the order of nodes.
        inside: the ranks of this node.
        ffn: this rank's experts.
    """
    nodes, (hidden, top_k) = across.group.size(), (x_TH.shape[1], experts_TK.shape[1])
    per_node = num_experts // nodes
    needs_TN = torch.zeros(len(x_TH), nodes, dtype=torch.bool, device=x_TH.device)
    needs_TN.scatter_(1, experts_TK // per_node, value=True)
    node_C, token_C = needs_TN.t().nonzero(as_tuple=True)
    sent_N = needs_TN.sum(dim=0)
    received_N = all_to_all_counts(sent_N.unsqueeze(1), across.group).squeeze(1)
    send, receive = torch.stack((sent_N, received_N)).tolist()

    # An expert of another node gets the number behind the last one of this node.
    wanted_CK = experts_TK.index_select(0, token_C) - per_node * node_C.unsqueeze(1)
    is_elsewhere_CK = (wanted_CK < 0) | (wanted_CK >= per_node)
    wanted_CK = wanted_CK.masked_fill(is_elsewhere_CK, per_node).int()
    wanted_RK = all_to_all_rows(wanted_CK, across, send=send, receive=receive)
    gated_TG = torch.cat((x_TH, weight_TK.to(x_TH.dtype)), dim=1)
    gated_RG = all_to_all_rows(
        gated_TG.index_select(0, token_C), across, send=send, receive=receive
    )
    x_RH, weight_RK = torch.split_with_sizes(gated_RG, (hidden, top_k), dim=1)

    copies_E = wanted_RK.flatten().bincount(minlength=per_node + 1)[:per_node]
    order_M = expert_order(wanted_RK)[: int(copies_E.sum())]
    row_M = order_M // top_k
    copies_PE = copies_E.view(inside.group.size(), -1)
    y_MH = _through_experts(x_RH.index_select(0, row_M), copies_PE, peers=inside, ffn=ffn)
    y_MH = y_MH * weight_RK.flatten().index_select(0, order_M).unsqueeze(1)
    y_RH = sum_rows(y_MH, row_M, num_rows=len(x_RH))

    y_CH = all_to_all_rows(y_RH, across, send=receive, receive=send)
    return sum_rows(y_CH, token_C, num_rows=len(x_TH))


def _through_experts(rows: Tensor, sent_PE: Tensor, *, peers: Peers, ffn: ExpertFfn) -> Tensor:
    """Send rows that lie by expert to the experts' ranks, compute, and bring them back [M, H]."""
    received_PE = all_to_all_counts(sent_PE, peers.group)
    # Copied to the host at once: on a device each copy waits for all work before it.
    sent, received = torch.stack((sent_PE, received_PE)).tolist()
    send, receive = [sum(row) for row in sent], [sum(row) for row in received]
    counts = [sum(column) for column in zip(*received, strict=True)]
    rows = all_to_all_rows(rows, peers, send=send, receive=receive)
    if min(received_PE.shape) == 1:
        # One source or one expert: the rows already lie by expert.
        rows = ffn(rows, counts)
    else:
        by_expert_R = _expert_of_row(received_PE).argsort(stable=True)
        by_source_R = inverse_order(by_expert_R)
        rows = reorder(rows, by_expert_R, by_source_R)
        rows = ffn(rows, counts)
        rows = reorder(rows, by_source_R, by_expert_R)
    return all_to_all_rows(rows, peers, send=receive, receive=send)


def _expert_of_row(received_PE: Tensor) -> Tensor:
    sources, experts = received_PE.shape
    expert = torch.arange(experts, device=received_PE.device).repeat(sources)
    return expert.repeat_interleave(received_PE.flatten())
