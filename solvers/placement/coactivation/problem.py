"""Co-activation: the experts that a token chooses together should be on few ranks and nodes.

    L layers   T sampled tokens   K experts of a token   E experts   G ranks   H levels   S slots

A dispatch that sends one copy of a token to each group (rank, node) that holds any of its experts,
whatever their number there (DeepEP, HierMoE's de-duplication), costs in layer l

    sum over levels h of  total_cost_h * sum_j w_h(j) p_h(j)
                        + busiest_cost_h * groups_h * max_j w_h(j) p_h(j)

with p_h(j) the tokens that touch group j of level h, and w_h(j) how much more a copy into that
group costs than the level says: 1, unless the links of groups differ. The first term is traffic in
all, the second HierMoE's padded all-to-all (arXiv 2508.09591, eq. 1 to 5, one hop a level). Every
expert is in one slot, and a largest rank load per layer keeps the balance.

True for runtimes that de-duplicate; a plain all-to-all sends K copies wherever experts stand.
"""

from dataclasses import dataclass

import numpy as np

from solvers.placement.ranks import Floats, Ints, Ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """One step of the hierarchy: ranks, nodes, or what lies between.

    Raises:
        ValueError: weights are not one positive number a group.
    """

    group_G: Ints
    """Group of each rank, counted from 0."""
    total_cost: float
    """Cost of one token copy into any group."""
    peak_cost: float = 0.0
    """Cost of one token copy into the most-loaded group, before the factor of the number of
    groups."""
    weight_J: Floats | None = None
    """Weight of a copy into each group, a factor on both costs; None: 1 for all."""

    def __post_init__(self) -> None:
        weights_J = self.weights_J
        if weights_J.shape != (self.num_groups,):
            raise ValueError(f"{len(weights_J)} weights for {self.num_groups} groups of a level")
        if not np.isfinite(weights_J).all() or (weights_J <= 0.0).any():
            raise ValueError("weights of groups must be positive numbers")
        weights_J.setflags(write=False)

    @property
    def num_groups(self) -> int:
        """Groups of the level."""
        return int(self.group_G.max()) + 1

    @property
    def weights_J(self) -> Floats:
        """The weights of the groups, the default filled in."""
        return np.ones(self.num_groups) if self.weight_J is None else self.weight_J


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoactivationProblem:
    """Tokens with the experts that they chose.

    Raises:
        ValueError: a shape is wrong, an expert does not exist, a token chose one expert twice, or
            slots differ from experts.
    """

    expert_LTK: Ints
    """Chosen experts of sampled tokens."""
    load_LE: Floats
    """Token copies of each expert, for the limit; of the whole recording, not of the sample."""
    ranks: Ranks
    levels: tuple[Level, ...]
    most_load_L: Floats | None = None
    """Largest load that a rank may have in each layer; None: no limit."""

    def __post_init__(self) -> None:
        num_layers, num_experts = self.load_LE.shape
        if self.expert_LTK.ndim != 3 or self.expert_LTK.shape[0] != num_layers:
            raise ValueError("sampled tokens must be [layers][tokens][experts of a token]")
        if 0 in self.expert_LTK.shape or not self.levels:
            raise ValueError("a co-activation problem needs tokens and a level")
        if self.expert_LTK.min() < 0 or self.expert_LTK.max() >= num_experts:
            raise ValueError(f"sampled tokens must name experts 0..{num_experts - 1}")
        ordered = np.sort(self.expert_LTK, axis=2)
        if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
            raise ValueError("a token chose one expert twice")
        if self.ranks.num_slots != num_experts:
            raise ValueError(f"{self.ranks.num_slots} slots for {num_experts} experts")
        if any(level.group_G.shape != (self.ranks.num_ranks,) for level in self.levels):
            raise ValueError("every level must give each rank its group")
        limits = np.zeros(num_layers) if self.most_load_L is None else self.most_load_L
        if limits.shape != (num_layers,) or not np.isfinite(limits).all():
            raise ValueError("load limits must be one number a layer")
        if not np.isfinite(self.load_LE).all() or (self.load_LE < 0.0).any():
            raise ValueError("every load must be a non-negative number")
        for array in (self.expert_LTK, self.load_LE, limits):
            array.setflags(write=False)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.load_LE.shape[0])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.load_LE.shape[1])
