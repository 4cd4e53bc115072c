"""Shared memory of SGLang's linear program for one layer, and its limits.

    NC constraints   NV variables   G ranks

`--ep-dispatch-algorithm lp` builds one solver for each row of the expert map when the engine
starts. A solver holds its whole problem in the shared memory of one thread block, in float32:

    NC = replicated experts + G
    NV = their replicas + G + 2

Read from SGLang 0.5.23. The engine checks a first size (kernels/ops/lplb/shmem_budget.py, against
the H100's budget on every device), the kernel launches with a second one
(kernels/jit/csrc/lplb/ipm.cuh), which holds a second matrix of NC x NV. Both must fit.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

BUDGET_BYTES: Final = 223 * 1024
"""Limit of the engine's check."""

BLOCK_BYTES: Final = 227 * 1024
"""Limit of a thread block: compute capabilities 9.0 and 10.x (CUDA C++ Programming Guide, technical
specifications per compute capability)."""

_WORKSPACE_BYTES: Final = 256
_FLOAT_BYTES: Final = 4


def program_shape(row: Sequence[int], *, ranks: int) -> tuple[int, int]:
    """Return constraints and variables of a layer's program.

    Args:
        row: the expert of each slot.
        ranks: with equally many slots.
    """
    replicated = [copies for copies in Counter(row).values() if copies > 1]
    return len(replicated) + ranks, sum(replicated) + ranks + 2


def checked_bytes(constraints: int, variables: int) -> int:
    """Return the bytes that the engine's check counts."""
    both = constraints * (variables + constraints)
    return _FLOAT_BYTES * (both + 3 * variables + constraints) + _WORKSPACE_BYTES


def launched_bytes(constraints: int, variables: int) -> int:
    """Return the bytes of the kernel launch: its struct, one float and a padded flag included."""
    both = constraints * (2 * variables + constraints)
    return _FLOAT_BYTES * (both + 2 * constraints + 4 * variables + 2)


def lp_misfit(rows: Iterable[Sequence[int]], *, ranks: int) -> str | None:
    """Return why the program of the largest row does not fit; None if all fit."""
    largest = max((program_shape(row, ranks=ranks) for row in rows), default=(0, 0))
    return _misfit(*largest)


def smallest_lp_misfit(*, num_slots: int, num_experts: int, ranks: int) -> str | None:
    """Return why no placement of a shape fits; None if some do.

    The fewest constraints and variables are those of one expert that has all redundant slots.
    """
    redundant = num_slots - num_experts
    replicas = redundant + 1 if redundant else 0
    return _misfit(int(redundant > 0) + ranks, replicas + ranks + 2)


def _misfit(constraints: int, variables: int) -> str | None:
    for need, limit, what in (
        (checked_bytes(constraints, variables), BUDGET_BYTES, "its check allows"),
        (launched_bytes(constraints, variables), BLOCK_BYTES, "a thread block has"),
    ):
        if need > limit:
            return (
                f"needs {need / 1024:.1f} KiB of shared memory for a layer's linear program"
                f" ({constraints} constraints, {variables} variables), and {what}"
                f" {limit / 1024:.1f} KiB"
            )
    return None
