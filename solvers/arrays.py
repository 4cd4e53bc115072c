"""Arrays of problems: checked, bytes rounded against the plan, and frozen."""

import numpy as np
import numpy.typing as npt

LARGEST_BYTES = 2**52
"""Most bytes of a device (281 TB), which leaves 64-bit integers room for every sum of bytes."""


def freeze(problem: object, name: str, array: npt.NDArray[np.generic]) -> None:
    """Make an array the field of a frozen problem, and unchangeable."""
    array.setflags(write=False)
    object.__setattr__(problem, name, array)


def freeze_numbers(
    problem: object, name: str, shape: tuple[int, ...], *, finite: bool = True
) -> None:
    """Freeze a field of numbers that are at least 0.

    Raises:
        ValueError: it has another shape, or holds a number that is negative, none, or endless
            where it must be `finite`.
    """
    array = np.array(getattr(problem, name), dtype=np.float64)
    usable = np.isfinite(array) if finite else ~np.isnan(array)
    if array.shape != shape or not (usable & (array >= 0.0)).all():
        kind = "finite numbers" if finite else "numbers"
        raise ValueError(f"{name} must be {kind} >= 0 of shape {shape}")
    freeze(problem, name, array)


def freeze_bytes(
    problem: object,
    name: str,
    shape: tuple[int, ...],
    *,
    largest: int = LARGEST_BYTES,
    is_limit: bool = False,
) -> None:
    """Freeze a field of whole bytes: needs rounded up, limits down and to `largest` at most.

    Raises:
        ValueError: it has another shape, or holds less than 0 or a need of more than `largest`.
    """
    given = np.array(getattr(problem, name), dtype=np.float64)
    whole = np.minimum(np.floor(given), largest) if is_limit else np.ceil(given)
    if whole.shape != shape or not ((whole >= 0) & (whole <= largest)).all():
        raise ValueError(f"{name} must be bytes in 0..{largest} of shape {shape}")
    freeze(problem, name, whole.astype(np.int64))
