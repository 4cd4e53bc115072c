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

from solvers.placement.ranks import Floats, Ints
from solvers.placement.single import SingleProblem


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
class CoactivationProblem(SingleProblem):
    """Tokens with the experts that they chose.

    Loads are those of the whole recording, not of the sample.

    Raises:
        ValueError: a shape is wrong, an expert does not exist, a token chose one expert twice, or
            slots differ from experts.
    """

    expert_LTK: Ints
    """Chosen experts of sampled tokens."""
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        SingleProblem.__post_init__(self)
        if self.expert_LTK.ndim != 3 or self.expert_LTK.shape[0] != self.num_layers:
            raise ValueError("sampled tokens must be [layers][tokens][experts of a token]")
        if 0 in self.expert_LTK.shape or not self.levels:
            raise ValueError("a co-activation problem needs tokens and a level")
        if self.expert_LTK.min() < 0 or self.expert_LTK.max() >= self.num_experts:
            raise ValueError(f"sampled tokens must name experts 0..{self.num_experts - 1}")
        if (np.diff(np.sort(self.expert_LTK, axis=2), axis=2) == 0).any():
            raise ValueError("a token chose one expert twice")
        if any(level.group_G.shape != (self.ranks.num_ranks,) for level in self.levels):
            raise ValueError("every level must give each rank its group")
        self.expert_LTK.setflags(write=False)
