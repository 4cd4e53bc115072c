"""Input of a dispatch rule: token copies of every pass, and the replicas that may take them.

    P passes   L layers   E experts   G ranks   S slots of a layer   H source ranks, H = G

A dispatch rule turns a case into the share of its expert's token copies that every slot takes,
`[L][S]`, or `[P][L][S]` where it acts pass by pass, and shares into loads `[P][L][G]`. Every rule
knows one pass and layer at a time, as engines do, and is written for all of them at once.

Not covered: which token goes where, dropped tokens, and traffic; a rule is evaluated by its loads.
"""

from dataclasses import dataclass

import numpy as np

from solvers.placement.ranks import Floats, Ints, Placement, Ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchCase:
    """Routed tokens and a placement.

    Raises:
        ValueError: a shape is wrong, a number is negative or not finite, an expert has no replica
            or an id does not exist.
    """

    load_PLE: Floats
    """Token copies of each expert in each pass."""
    placement: Placement
    ranks: Ranks
    seed: int = 0
    """Seed of the rule's random draws."""

    def __post_init__(self) -> None:
        if self.load_PLE.ndim != 3 or 0 in self.load_PLE.shape:
            raise ValueError("loads are [passes][layers][experts], none of them empty")
        shape = (self.num_layers, self.ranks.num_slots)
        if self.placement.expert_LS.shape != shape:
            raise ValueError(
                f"placement has shape {self.placement.expert_LS.shape}, expected {shape}"
            )
        experts = self.placement.expert_LS
        if experts.min() < 0 or experts.max() >= self.num_experts:
            raise ValueError(f"expert ids must be in 0..{self.num_experts - 1}")
        if (self.copies_LE == 0).any():
            raise ValueError("every expert needs a replica in every layer")
        if not np.isfinite(self.load_PLE).all() or (self.load_PLE < 0.0).any():
            raise ValueError("loads must be non-negative numbers")
        self.load_PLE.setflags(write=False)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.load_PLE.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.load_PLE.shape[2])

    @property
    def copies_LE(self) -> Ints:
        """Replicas of each expert."""
        return self.placement.copies_LE(self.num_experts)

    @property
    def copies_LEG(self) -> Ints:
        """Replicas of each expert on each rank."""
        count = np.zeros((self.num_layers, self.num_experts, self.ranks.num_ranks), dtype=np.int64)
        layer_LS = np.arange(self.num_layers)[:, None]
        np.add.at(count, (layer_LS, self.placement.expert_LS, self.ranks.rank_S[None, :]), 1)
        return count


def split_loads(case: DispatchCase, share_PLS: Floats) -> Floats:
    """Return the loads `[P][L][G]` of slots that take these shares of their experts' tokens."""
    load_PLS = np.take_along_axis(case.load_PLE, case.placement.expert_LS[None], axis=2)
    return np.add.reduceat(load_PLS * share_PLS, case.ranks.first_slot_G, axis=2)
