"""Emits the three arrays of DeepSeek's EPLB as `.npy` files, with a note on how to read them.

    physical_to_logical_map.npy   [L][P]      expert of each slot
    logical_to_physical_map.npy   [L][E][X]   slots of each expert, ascending, padded with -1
    expert_count.npy              [L][E]      replicas of each expert

int64, as `eplb.rebalance_experts` returns them (deepseek-ai/EPLB d52c72d). L counts MoE layers.
"""

import io
from pathlib import PurePosixPath

import numpy as np

from solvers.placement.ranks import Ints, Placement
from tuner.engines.files import EmittedFile, comment
from tuner.engines.placement.statement import statement
from tuner.plans.place import VerifiedPlacement
from tuner.units import spans


def emit(verified: VerifiedPlacement) -> tuple[EmittedFile, ...]:
    """Return the arrays and the note."""
    decision = verified.decision
    expert_LS = np.array(decision.physical_to_logical, dtype=np.int64)
    count_LE = Placement(expert_LS=expert_LS).copies_LE(decision.num_experts)
    arrays = {
        "physical_to_logical_map": expert_LS,
        "logical_to_physical_map": _slots_LEX(expert_LS, count_LE),
        "expert_count": count_LE,
    }
    note = (
        *statement(verified),
        "",
        f"Rows are MoE layers; in the model these are decoder layers {spans(decision.layer_ids)}.",
        f"Slot p is on rank p // {decision.slots_per_rank[0]}.",
        "Read an array with torch.from_numpy(numpy.load(FILE, allow_pickle=False)).",
    )
    return (
        *(
            EmittedFile(path=PurePosixPath(f"{name}.npy"), data=_npy(array))
            for name, array in arrays.items()
        ),
        EmittedFile(path=PurePosixPath("README.txt"), text=comment(note, prefix="")),
    )


def _slots_LEX(expert_LS: Ints, count_LE: Ints) -> Ints:
    slots_LEX = np.full((*count_LE.shape, int(count_LE.max())), -1, dtype=np.int64)
    for layer, expert in np.ndindex(count_LE.shape):
        slots = np.flatnonzero(expert_LS[layer] == expert)
        slots_LEX[layer, expert, : len(slots)] = slots
    return slots_LEX


def _npy(array: Ints) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
