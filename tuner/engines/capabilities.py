"""Every launch target by the name users type, with what it can express.

A target is a program (`reference`, `megatron-lm`, ...) or a wrapper that starts one (`slurm`). A
wrapper limits nothing. A knob that a target lacks is not searched: `intersection` is what all named
targets can express, `refusals` (tuner/spec/refusals.py) says which rules a decision breaks. A
program's plain name is its newest release; older ones have theirs in the name.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Final

from tuner.engines.manifest import Capabilities, anything, intersect, with_gradients
from tuner.engines.registry import train_targets
from tuner.errors import UnknownTargetError
from tuner.spec.refusals import refusals

__all__ = [
    "DEFAULT_PROGRAM",
    "TARGETS",
    "WRAPPERS",
    "Capabilities",
    "intersection",
    "launchable",
    "programs",
    "refusals",
]

DEFAULT_PROGRAM: Final = "reference"
"""The program of a wrapper if none is named."""

WRAPPERS: Final = frozenset({"slurm"})
"""Targets that start another target's program."""

TARGETS: Final[Mapping[str, Capabilities]] = {
    **{target.name: target.capabilities for _, target in train_targets()},
    **{name: anything(name) for name in sorted(WRAPPERS)},
}


def programs(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the targets that are programs, in order; the default if only wrappers are named.

    Raises:
        UnknownTargetError: a name is not in `TARGETS`.
    """
    named = tuple(targets)
    for name in named:
        _target(name)
    chosen = tuple(name for name in dict.fromkeys(named) if name not in WRAPPERS)
    return chosen or (DEFAULT_PROGRAM,)


def intersection(targets: Iterable[str]) -> Capabilities:
    """Return what all of the targets can express.

    Raises:
        UnknownTargetError: a name is not in `TARGETS`.
    """
    named = tuple(dict.fromkeys(targets))
    wrappers = (name for name in named if name in WRAPPERS)
    parts = tuple(_target(name) for name in (*programs(named), *wrappers))
    return parts[0] if len(parts) == 1 else reduce(intersect, parts)


def launchable(targets: Iterable[str], *, precision: str, gradient_bytes: int = 4) -> Capabilities:
    """Return what all of the targets can express, given precision and main gradients.

    Raises:
        UnknownTargetError: a name is not in `TARGETS`.
    """
    return with_gradients(intersection(targets), gradient_bytes=gradient_bytes, precision=precision)


def _target(name: str) -> Capabilities:
    if name not in TARGETS:
        raise UnknownTargetError(
            f"emit: no target is named {name!r}; there are {', '.join(TARGETS)}"
        )
    return TARGETS[name]
