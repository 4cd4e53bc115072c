"""Every launch target by the name users type, with what it can express.

A target is a program (`reference`, `megatron-lm`, ...) or a wrapper that starts one (`slurm`). A
wrapper limits nothing. A knob that a target lacks is not searched: `intersection` is what all named
programs can express, `refusals` (tuner/spec/refusals.py) says which rules a decision breaks. A
program's plain name is its newest release; older ones have theirs in the name.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Final, Literal

from tuner.catalog.manifest import (
    Capabilities,
    anything,
    intersect,
    of_model,
    with_adapters,
    with_gradients,
)
from tuner.catalog.registry import train_targets
from tuner.catalog.saved_bytes import SavedBytes
from tuner.errors import UnknownTargetError
from tuner.spec.features import features
from tuner.spec.model import ModelSpec
from tuner.spec.refusals import refusals
from tuner.spec.tune import Adapters

__all__ = [
    "DEFAULT_PROGRAM",
    "TARGETS",
    "WRAPPERS",
    "Capabilities",
    "DeviceKind",
    "intersection",
    "launchable",
    "programs",
    "refusals",
]

DEFAULT_PROGRAM: Final = "reference"
"""The program of a wrapper if none is named."""

WRAPPERS: Final = frozenset({"slurm"})
"""Targets that start another target's program."""

DeviceKind = Literal["cpu", "cuda"]
"""Kind of the devices of a launch; manifests describe accelerators unless a target has another for
CPUs."""

TARGETS: Final[Mapping[str, Capabilities]] = {
    **{target.name: target.capabilities for _, target in train_targets()},
    **{name: anything(name) for name in sorted(WRAPPERS)},
}

_SAVED_BYTES: Final[Mapping[str, Callable[[Adapters | None, int, str], SavedBytes]]] = {
    target.name: target.saved_bytes for _, target in train_targets()
}

_ON_PROCESSORS: Final[Mapping[str, Capabilities]] = {
    target.name: target.on_processors
    for _, target in train_targets()
    if target.on_processors is not None
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


def intersection(targets: Iterable[str], *, device_kind: DeviceKind = "cuda") -> Capabilities:
    """Return what all programs among the targets can express on such devices.

    Raises:
        UnknownTargetError: a name is not in `TARGETS`.
    """
    parts = tuple(_target(name, device_kind) for name in programs(targets))
    return parts[0] if len(parts) == 1 else reduce(intersect, parts)


def saved_bytes(
    targets: Iterable[str], *, adapters: Adapters | None, zero_stage: int, precision: str
) -> SavedBytes:
    """Return what checkpoints hold of a parameter; of several targets the larger of each.

    Raises:
        UnknownTargetError: a name is not in `TARGETS`.
    """
    sizes = [_SAVED_BYTES[name](adapters, zero_stage, precision) for name in programs(targets)]
    return SavedBytes(
        trained=max(size.trained for size in sizes),
        frozen=max(size.frozen for size in sizes),
        reread=max(size.reread for size in sizes),
    )


def loading_ranks(targets: Iterable[str], *, devices_per_node: int) -> int:
    """Return the ranks of a node that load PyTorch's distributed format; 0 if no target has it.

    Raises:
        UnknownTargetError: a name is not in `TARGETS`.
    """
    able = any(TARGETS[name].distributed_checkpoints for name in programs(targets))
    return devices_per_node if able else 0


def host_checkpoint_obstacle(
    target: Capabilities, *, zero_stage: int, offloads_optimizer: bool
) -> str:
    """Say why a target cannot save a configuration to hosts; empty where it can."""
    names, stages = " and ".join(target.names), target.host_checkpoint_zero_stages
    if not stages:
        return (
            f"{names} has no checkpoints on hosts; {', '.join(with_host_checkpoints())} have them"
        )
    if zero_stage not in stages:
        listed = " or ".join(map(str, sorted(stages)))
        return f"checkpoints on hosts need zero_stage {listed} in {names}, and it is {zero_stage}"
    if offloads_optimizer:
        return f"{names} keeps no copy on hosts of an optimizer that is offloaded"
    return ""


def background_checkpoint_obstacle(target: Capabilities, *, zero_stage: int) -> str:
    """Say why a target waits until a checkpoint is written; empty where it need not."""
    names, stages = " and ".join(target.names), target.background_checkpoint_zero_stages
    if zero_stage in stages:
        return ""
    if not stages:
        return f"{names} waits until a checkpoint is written"
    listed = " or ".join(map(str, sorted(stages)))
    return f"{names} writes checkpoints in the background with zero_stage {listed} only"


def in_process_restart_obstacle(target: Capabilities, *, zero_stage: int) -> str:
    """Say why a target is not told to restart inside its processes; empty where it is."""
    names, stages = " and ".join(target.names), target.in_process_restart_zero_stages
    if zero_stage in stages:
        return ""
    if not stages:
        able = _programs_that(lambda program: bool(program.in_process_restart_zero_stages))
        return f"restarts inside processes are written for {', '.join(able)}, not for {names}"
    listed = " or ".join(map(str, sorted(stages)))
    return f"restarts inside the processes of {names} need zero_stage {listed}"


def reshard_obstacle(target: Capabilities, *, zero_stage: int, on_hosts: bool) -> str:
    """Say why a target cannot restore a checkpoint in another layout; empty where it can.

    Args:
        target: program, or several.
        zero_stage: of both layouts.
        on_hosts: whether the run also keeps checkpoints in the memory of nodes.
    """
    names = " and ".join(target.names)
    if not target.reshards:
        able = _programs_that(lambda program: program.reshards)
        first = " and ".join(sorted(target.reshard_converters))
        until = f" until {first} has converted it" if first else ""
        return (
            f"{names} does not restore a checkpoint in another layout{until}; {', '.join(able)} do"
        )
    if on_hosts and zero_stage not in target.reshard_zero_stages_with_host_copies:
        return (
            f"{names} has no checkpoints that another layout can restore at zero_stage"
            f" {zero_stage} beside checkpoints on hosts; write levels: [shared]"
        )
    return ""


def with_host_checkpoints() -> tuple[str, ...]:
    """Return the programs that can save to hosts, without the names of older releases."""
    return _programs_that(lambda program: bool(program.host_checkpoint_zero_stages))


def _programs_that(can: Callable[[Capabilities], bool]) -> tuple[str, ...]:
    able = [name for name, program in TARGETS.items() if can(program) and name not in WRAPPERS]
    return tuple(name for name in able if not any(name.startswith(f"{newest}-") for newest in able))


def launchable(
    targets: Iterable[str],
    *,
    model: ModelSpec,
    precision: str,
    gradient_bytes: int = 4,
    device_kind: DeviceKind = "cuda",
    adapters: Adapters | None = None,
) -> Capabilities:
    """Return what all of the targets can express of a model, given precision, gradients, adapters.

    Raises:
        UnknownTargetError: a name is not in `TARGETS`.
    """
    able = of_model(intersection(targets, device_kind=device_kind), features(model))
    able = with_gradients(able, gradient_bytes=gradient_bytes, precision=precision)
    return with_adapters(able, adapters)


def _target(name: str, device_kind: DeviceKind = "cuda") -> Capabilities:
    if name not in TARGETS:
        raise UnknownTargetError(
            f"emit: no target is named {name!r}; there are {', '.join(TARGETS)}"
        )
    return _ON_PROCESSORS.get(name, TARGETS[name]) if device_kind == "cpu" else TARGETS[name]
