"""Problems in which every expert is in one slot, and a load limit keeps the ranks even.

L layers   E experts   G ranks   S = E slots of a layer
"""

from dataclasses import dataclass

import numpy as np

from solvers.placement.ranks import Floats, Ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SingleProblem:
    """Loads and ranks of such a problem.

    Raises:
        ValueError: a shape is wrong, a number is negative or not finite, or slots differ from
            experts.
    """

    load_LE: Floats
    """Token copies of each expert."""
    ranks: Ranks
    most_load_L: Floats | None = None
    """Largest load that a rank may have in each layer; None: no limit."""

    def __post_init__(self) -> None:
        limits = np.zeros(self.num_layers) if self.most_load_L is None else self.most_load_L
        if limits.shape != (self.num_layers,):
            raise ValueError("load limits must be one number a layer")
        if self.ranks.num_slots != self.num_experts:
            raise ValueError(f"{self.ranks.num_slots} slots for {self.num_experts} experts")
        for array in (self.load_LE, limits):
            if not np.isfinite(array).all() or (array < 0.0).any():
                raise ValueError("loads and limits must be non-negative numbers")
            array.setflags(write=False)

    @property
    def limit_L(self) -> Floats:
        """The load limits, infinite where there are none."""
        return np.full(self.num_layers, np.inf) if self.most_load_L is None else self.most_load_L

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.load_LE.shape[0])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.load_LE.shape[1])
