"""What it takes to get from the placement that runs to another one.

A rank loads an expert that it lacked; which slot of a rank holds it does not matter. The transfer
waits for the rank that loads most: over the network where there are several nodes (the expert may
lie anywhere), over the scale-up links otherwise.
"""

import numpy as np

from solvers.placement.ranks import Ints, Placement, Ranks
from tuner.costs.expert_layer import ExpertMachine
from tuner.place_plan import MigrationCost


def loaded_G(
    current: Placement, new: Placement, *, ranks: Ranks, current_ranks: Ranks | None = None
) -> Ints:
    """Experts that each rank must load, over all layers; None: it has the same slots today."""
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
    """Count and price the move; break-even is when the saved time adds up to it.

    Args:
        current: what runs.
        new: what is to run.
        current_ranks: with the slots that they hold today.
        ranks: with the slots and nodes that are planned.
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
