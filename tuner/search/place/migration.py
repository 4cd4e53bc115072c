"""Cost of moving from the current placement to another one.

A rank loads the experts that it does not hold yet; their slots do not matter. The rank that loads
most sets the transfer time: over the network if there are several nodes (an expert may come from
anywhere), over the scale-up links otherwise.
"""

import numpy as np

from solvers.placement.balance.migration import loaded_LG
from solvers.placement.ranks import Placement, Ranks
from tuner.costs.place.expert_layer import ExpertMachine
from tuner.plans.place import MigrationCost


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
    loaded_G = loaded_LG(current, new, ranks=ranks, current_ranks=current_ranks).sum(axis=0)
    moved = int(loaded_G.sum())
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
    transfer_s = float(loaded_G.max()) * expert_bytes / float(np.max(rate))
    pays = step_gain_ratio is not None and step_gain_ratio > 0.0
    return MigrationCost(
        moved_experts=moved,
        moved_bytes=moved_bytes,
        transfer_s=transfer_s,
        break_even_s=transfer_s / step_gain_ratio if pays and step_gain_ratio else None,
    )
