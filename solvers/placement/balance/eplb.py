"""DeepSeek's EPLB: what serving engines run today, the baseline of every other method.

    L layers   E experts   M groups of experts   N nodes   G ranks   S slots of a layer

Own code after the published description (https://github.com/deepseek-ai/EPLB), equal in result:

    pack(weights, packs)    heaviest first, each to the lightest pack that is not full
    copies(weights, slots)  the next copy to the largest weight / copies
    hierarchical            groups are packed on nodes; each node copies its own experts and packs
                            its copies on its ranks
    global                  the same with one node and one group

The hierarchical policy is taken when the groups are a multiple of the nodes, as the original does.
Sums are in single precision, ties go to the lowest index, copies of one expert may share a rank:
all as the original. Several workloads are planned as their weighted mean, as an engine that sums
its counters would. `solve` is the global policy; ranks may differ in slots there, and their speed
is ignored. Proves nothing. Keeps no limit on migration: such problems return
UNKNOWN.
"""

import numpy as np

from solvers.placement.balance.bound import bound
from solvers.placement.balance.objective import planning_loads
from solvers.placement.balance.packing import Weights, copied, packed
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.ranks import Floats, Ints, Placement, Ranks
from solvers.result import Claim, Status


def solve(problem: BalanceProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return the global policy's placement; it takes milliseconds, whatever the limit."""
    del time_limit_s, threads
    least = bound(problem)
    if problem.migration is not None:
        return Claim(status=Status.UNKNOWN, solution=None, bound=least)
    placement = eplb(planning_loads(problem), ranks=problem.ranks)
    return Claim(status=Status.FEASIBLE, solution=placement, bound=least)


def eplb(load_LE: Floats, *, ranks: Ranks, num_groups: int = 1) -> Placement:
    """Return what EPLB places for these loads.

    Raises:
        ValueError: the hierarchical policy meets experts that do not divide into the groups, or
            ranks or slots that differ from node to node.
    """
    weight_LE = load_LE.astype(np.float32)
    if num_groups % ranks.num_nodes or ranks.num_nodes == 1:
        return Placement(expert_LS=_on_ranks(weight_LE, ranks.slots_G))
    return Placement(expert_LS=_hierarchical(weight_LE, ranks, num_groups))


def _hierarchical(weight_LE: Weights, ranks: Ranks, num_groups: int) -> Ints:
    num_layers, num_experts = weight_LE.shape
    num_nodes = ranks.num_nodes
    if num_experts % num_groups:
        raise ValueError(f"{num_experts} experts do not divide into {num_groups} groups")
    if (ranks.slots_G != ranks.slots_G[0]).any() or ranks.num_ranks % num_nodes:
        raise ValueError("the hierarchical policy needs equal ranks, as many on every node")
    per_group, per_node = num_experts // num_groups, num_experts // num_nodes
    weight_LM = weight_LE.reshape(num_layers, num_groups, per_group).sum(axis=2)
    group_LM = _packed(weight_LM, np.full(num_nodes, num_groups // num_nodes))
    expert_LE = (group_LM[:, :, None] * per_group + np.arange(per_group)).reshape(num_layers, -1)
    moved_LE = np.take_along_axis(weight_LE, expert_LE, axis=1)
    slots_G = ranks.slots_G[: ranks.num_ranks // num_nodes]
    local_LNS = _on_ranks(moved_LE.reshape(-1, per_node), slots_G).reshape(
        num_layers, num_nodes, -1
    )
    position_LS = local_LNS + per_node * np.arange(num_nodes)[None, :, None]
    return np.take_along_axis(expert_LE, position_LS.reshape(num_layers, -1), axis=1)


def _on_ranks(weight_LE: Weights, slots_G: Ints) -> Ints:
    """Copy and pack the experts of one node, or of all: the global policy, [L][S]."""
    expert_LS, share_LS = copied(weight_LE, num_slots=int(slots_G.sum()))
    return np.take_along_axis(expert_LS, _packed(share_LS, slots_G), axis=1)


def _packed(weight_LX: Weights, slots_G: Ints) -> Ints:
    """Pack items; packs of one item each hold them in order, as the original has it."""
    if (slots_G == 1).all():
        return np.tile(np.arange(len(slots_G), dtype=np.int64), (len(weight_LX), 1))
    return packed(weight_LX, slots_G)
