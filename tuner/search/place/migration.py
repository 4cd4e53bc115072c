"""Cost of moving from the current placement to another one.

A rank loads the experts that it does not hold yet; their slots do not matter. The rank that loads
most sets the transfer time: over the network if there are several nodes (an expert may come from
anywhere), over the scale-up links otherwise.
"""

import numpy as np

from solvers.placement.ranks import Ints, Placement, Ranks
from tuner.costs.place.expert_layer import ExpertMachine
from tuner.plans.place import MigrationCost


def loaded_G(
    current: Placement, new: Placement, *, ranks: Ranks, current_ranks: Ranks | None = None
) -> Ints:
    """Experts that each rank must load, over all layers; `current_ranks` None: the same slots."""
    loaded = np.zeros(ranks.num_ranks, dtype=np.int64)
    rank_S = ranks.rank_S
    before_rank_S = rank_S if current_ranks is None else current_ranks.rank_S
    num_experts = int(max(current.expert_LS.max(), new.expert_LS.max())) + 1
    for before_S, after_S in zip(current.expert_LS, new.expert_LS, strict=True):
        had = np.unique(before_rank_S * num_experts + before_S)
        has = np.unique(rank_S * num_experts + after_S)
        np.add.at(loaded, np.setdiff1d(has, had) // num_experts, 1)
    return loaded


def migration_cost(
    current: Placement,
    new: Placement,
    *,
    current_ranks: Ranks,
    ranks: Ranks,
    expert_bytes: float | None,
    machine: ExpertMachine | None,
    step_gain_ratio: float | None,
) -> MigrationCost:
    """Count and price the move; break-even is when the saved time equals the transfer time.

    Args:
        current: placement.
        new: placement.
        current_ranks: with their current slots.
        ranks: with the planned slots and nodes.
        expert_bytes: weights of an expert; None where no model is known.
        machine: its links price the transfer; None where none are known.
        step_gain_ratio: share of a whole pass that is saved; None where time is not priced.
    """
    loaded = loaded_G(current, new, ranks=ranks, current_ranks=current_ranks)
    moved = int(loaded.sum())
    if expert_bytes is None:
        return MigrationCost(moved_experts=moved)
    moved_bytes = int(moved * expert_bytes)
    if machine is None:
        return MigrationCost(moved_experts=moved, moved_bytes=moved_bytes)
    rate = (
        machine.hardware.scale_up_bytes_per_s
        if ranks.num_nodes == 1
        else machine.hardware.scale_out_bytes_per_s
    )
    transfer_s = float(loaded.max()) * expert_bytes / float(np.max(rate))
    pays = step_gain_ratio is not None and step_gain_ratio > 0.0
    return MigrationCost(
        moved_experts=moved,
        moved_bytes=moved_bytes,
        transfer_s=transfer_s,
        break_even_s=transfer_s / step_gain_ratio if pays and step_gain_ratio else None,
    )
