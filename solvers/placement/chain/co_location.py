"""Co-location of experts in a layer up to renaming ranks and nodes, and the cost of a layer pair.

    E experts   N nodes   K ranks of a node   S slots of a rank
    R rank sets (S experts)   B node sets (K rank sets)   X states (N node sets)

With the costs of `hierarchy.py` a placement of a layer is a state and a naming of its ranks and
nodes. Only the naming relative to the layer before matters, and it can be chosen anew at every pair
of layers. So the best naming is found per pair: rank sets of two node sets are matched one to one
for the most flow, then the node sets of two states, given what each of their pairs saves. Matchings
are exact (`matching.py`), hence the cost of a pair of states is the least over all namings.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from solvers.placement.chain.hierarchy import Hierarchy
from solvers.placement.matching import best_matchings, best_values
from solvers.placement.ranks import Floats, Ints

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoLocationStates:
    """All states of a layer, with their rank sets and node sets."""

    shape: Hierarchy
    in_set_RE: Floats
    """1 where the expert is in the rank set."""
    set_BK: Ints
    """Rank sets of each node set."""
    block_XN: Ints
    """Node sets of each state."""

    @property
    def set_XNK(self) -> Ints:
        """Rank sets of each state, node by node."""
        return np.asarray(self.set_BK[self.block_XN], dtype=np.int64)

    def savings_XXT(self, flow_TEE: Floats) -> Floats:
        """Return what each two states of every pair of layers save under their best naming."""
        between_TRR = self.in_set_RE @ flow_TEE @ self.in_set_RE.T
        between = _of_members(between_TRR.transpose(1, 2, 0), self.set_BK)
        saved_BBT = self.shape.node_gain * between.sum(axis=(0, 1))
        saved_BBT += self.shape.rank_gain * _best_of_members(between)
        return _best_of_members(_of_members(saved_BBT, self.block_XN))

    def named_LE(self, flow_TEE: Floats, state_L: Ints) -> Ints:
        """Return rank_LE: the states of a chain with the best naming, pair after pair."""
        nodes, per_node = self.shape.num_nodes, self.shape.ranks_per_node
        set_NK = self.set_XNK[state_L[0]]
        named = [self._ranks_E(set_NK)]
        for flow_EE, state in zip(flow_TEE, state_L[1:], strict=True):
            next_NK = self.set_XNK[state]
            between_RR = self.in_set_RE[set_NK.ravel()] @ flow_EE
            between_RR = between_RR @ self.in_set_RE[next_NK.ravel()].T
            between = between_RR.reshape(nodes, per_node, nodes, per_node).transpose(0, 2, 1, 3)
            kept, column = best_matchings(between.reshape(-1, per_node, per_node))
            saved = self.shape.node_gain * between.sum(axis=(2, 3))
            saved += self.shape.rank_gain * kept.reshape(nodes, nodes)
            _, node_1N = best_matchings(saved[None])
            column_NNK = column.reshape(nodes, nodes, per_node)
            set_NK = np.array(
                [next_NK[node][column_NNK[here, node]] for here, node in enumerate(node_1N[0])]
            )
            named.append(self._ranks_E(set_NK))
        return np.array(named)

    def _ranks_E(self, set_NK: Ints) -> Ints:
        return np.asarray(self.in_set_RE[set_NK.ravel()].argmax(axis=0), dtype=np.int64)


def _of_members(value_RRT: Floats, member_BK: Ints) -> Floats:
    """[K][K][B][B][T]: the values between the members of every two sets."""
    rows = np.take(value_RRT, member_BK.T, axis=0)
    return np.take(rows, member_BK.T, axis=2).transpose(0, 2, 1, 3, 4)


def _best_of_members(value_KKBBT: Floats) -> Floats:
    flat = value_KKBBT.reshape(*value_KKBBT.shape[:2], -1)
    return best_values(flat).reshape(value_KKBBT.shape[2:])


def num_states(shape: Hierarchy) -> float:
    """Return how many states a layer has: E! / (S!^(N K) K!^N N!)."""
    nodes, per_node, slots = shape.num_nodes, shape.ranks_per_node, shape.slots_per_rank
    log = math.lgamma(nodes * per_node * slots + 1) - nodes * per_node * math.lgamma(slots + 1)
    log -= nodes * math.lgamma(per_node + 1) + math.lgamma(nodes + 1)
    return math.exp(min(log, 700.0))


def enumerate_states(shape: Hierarchy) -> CoLocationStates:
    """Enumerate the states; check `num_states` first."""
    experts = tuple(range(shape.num_nodes * shape.slots_per_node))
    number_of_set: dict[Group, int] = {}
    number_of_block: dict[tuple[Group, ...], int] = {}
    rows = []
    for nodes in _groupings(experts, shape.slots_per_node):
        inside = [tuple(_groupings(node, shape.slots_per_rank)) for node in nodes]
        rows += [
            [number_of_block.setdefault(block, len(number_of_block)) for block in blocks]
            for blocks in itertools.product(*inside)
        ]
    set_BK = [
        [number_of_set.setdefault(one, len(number_of_set)) for one in block]
        for block in number_of_block
    ]
    in_set_RE = np.zeros((len(number_of_set), len(experts)))
    for members, number in number_of_set.items():
        in_set_RE[number, list(members)] = 1.0
    return CoLocationStates(
        shape=shape, in_set_RE=in_set_RE, set_BK=np.array(set_BK), block_XN=np.array(rows)
    )


def _groupings(items: Group, size: int) -> Iterator[tuple[Group, ...]]:
    """Every split of the items into unnamed groups of a size, the lowest item first in each."""
    if not items:
        yield ()
        return
    first, *rest = items
    for others in itertools.combinations(rest, size - 1):
        left = tuple(item for item in rest if item not in others)
        for groups in _groupings(left, size):
            yield ((first, *others), *groups)
