"""Input of a dispatch rule: token copies of every pass, and the replicas that may take them.

    P passes   L layers   E experts   G ranks   S slots of a layer   H source ranks, H = G

A dispatch rule turns a case into loads `[P][L][G]`: token copies that each rank computes. Every
rule knows one pass and layer at a time, as engines do, and is written for all of them at once.

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
    source_HLE: Floats | None = None
    """Token copies by the rank that holds the token, in any unit: only shares are used. None, or an
    expert without any: every rank sends the same."""
    seed: int = 0
    """Of a rule's random draws."""

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
        sources = self.source_HLE
        if sources is not None and sources.shape != self._source_shape:
            raise ValueError(f"sources have shape {sources.shape}, expected {self._source_shape}")
        for array in (self.load_PLE, *(() if sources is None else (sources,))):
            if not np.isfinite(array).all() or (array < 0.0).any():
                raise ValueError("loads and sources must be non-negative numbers")
            array.setflags(write=False)

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

    @property
    def source_ratio_HLE(self) -> Floats:
        """Share of an expert's token copies that each source rank sends."""
        if self.source_HLE is None:
            return np.full(self._source_shape, 1.0 / self.ranks.num_ranks)
        total_LE = self.source_HLE.sum(axis=0)
        seen_LE = total_LE > 0.0
        return np.where(
            seen_LE, self.source_HLE / np.where(seen_LE, total_LE, 1.0), 1.0 / self.ranks.num_ranks
        )

    @property
    def _source_shape(self) -> tuple[int, int, int]:
        return (self.ranks.num_ranks, self.num_layers, self.num_experts)


def split_loads(case: DispatchCase, split_LEG: Floats) -> Floats:
    """Return the loads `[P][L][G]` where each rank takes a fixed share of each expert's tokens."""
    load_LPG = np.matmul(case.load_PLE.transpose(1, 0, 2), split_LEG)
    return np.ascontiguousarray(load_LPG.transpose(1, 0, 2))
