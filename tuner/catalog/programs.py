"""The programs that a plan is launched with, and what they can express.

A target is a program (`reference`, `megatron-lm`, ...) or a wrapper that starts one (`slurm`). A
wrapper limits nothing. A knob that a target lacks is not searched: `capabilities` is what all named
programs can express, `refusals` (tuner/spec/refusals.py) says which rules a decision breaks. A
program's plain name is its newest release; an older release is part of the name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Final, Literal

from tuner.catalog.manifest import (
    Capabilities,
    intersect,
    of_model,
    with_adapters,
    with_gradients,
)
from tuner.catalog.saved_bytes import SavedBytes
from tuner.catalog.target import Target
from tuner.errors import UnknownTargetError
from tuner.spec.features import features
from tuner.spec.model import ModelSpec
from tuner.spec.tune import Adapters

DEFAULT_PROGRAM: Final = "reference"
"""The program of a wrapper if none is named."""

WRAPPERS: Final = frozenset({"slurm"})
"""Targets that start another target's program."""

DeviceKind = Literal["cpu", "cuda"]
"""Kind of the devices of a launch; manifests describe accelerators unless a target has one for
CPUs, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The programs among named targets."""

    names: tuple[str, ...]
    """Targets that users named, wrappers too."""
    known: Mapping[str, Target]
    """Every program that is described, by its name."""

    @property
    def chosen(self) -> tuple[str, ...]:
        """The names that are programs, in order; the default if only wrappers are named.

        Raises:
            UnknownTargetError: a name is no target's.
        """
        targets = (*self.known, *sorted(WRAPPERS))
        unknown = next((name for name in self.names if name not in targets), None)
        if unknown is not None:
            raise UnknownTargetError(
                f"emit: no target is named {unknown!r}; there are {', '.join(targets)}"
            )
        chosen = tuple(name for name in dict.fromkeys(self.names) if name not in WRAPPERS)
        return chosen or (DEFAULT_PROGRAM,)

    @property
    def first(self) -> Target:
        """The program that prices are for."""
        return self.known[self.chosen[0]]

    def capabilities(self, *, device_kind: DeviceKind = "cuda") -> Capabilities:
        """Return what all programs can express on devices of a kind."""
        parts = [
            (target.on_processors if device_kind == "cpu" else None) or target.capabilities
            for target in map(self.known.__getitem__, self.chosen)
        ]
        return parts[0] if len(parts) == 1 else reduce(intersect, parts)

    def launchable(
        self,
        *,
        model: ModelSpec,
        precision: str,
        gradient_bytes: int = 4,
        device_kind: DeviceKind = "cuda",
        adapters: Adapters | None = None,
    ) -> Capabilities:
        """Return what all programs can express of a model and its settings."""
        able = of_model(self.capabilities(device_kind=device_kind), features(model))
        able = with_gradients(able, gradient_bytes=gradient_bytes, precision=precision)
        return with_adapters(able, adapters)

    def saved_bytes(
        self, *, adapters: Adapters | None, zero_stage: int, precision: str
    ) -> SavedBytes:
        """Return the checkpoint bytes of a parameter, the largest among the programs."""
        sizes = [
            self.known[name].saved_bytes(adapters, zero_stage, precision) for name in self.chosen
        ]
        return SavedBytes(
            trained=max(size.trained for size in sizes),
            frozen=max(size.frozen for size in sizes),
            reread=max(size.reread for size in sizes),
        )

    def loading_ranks(self, *, devices_per_node: int) -> int:
        """Return a node's ranks that load PyTorch's distributed format; 0: no program has it."""
        able = any(self.known[name].capabilities.distributed_checkpoints for name in self.chosen)
        return devices_per_node if able else 0

    def host_checkpoint_obstacle(self, *, zero_stage: int, offloads_optimizer: bool) -> str:
        """Say why checkpoints cannot be kept in host memory; empty where they can."""
        able = self.capabilities()
        names = " and ".join(able.names)
        having = self._known_that(lambda target: bool(target.host_checkpoint_zero_stages))
        obstacle = _stage_obstacle(
            able.host_checkpoint_zero_stages,
            zero_stage,
            none=f"{names} has no checkpoints on hosts; they exist in {having}",
            others=f"checkpoints on hosts need zero_stage {{}} in {names}, and it is {zero_stage}",
        )
        if offloads_optimizer and not obstacle:
            return f"{names} keeps no copy on hosts of an optimizer that is offloaded"
        return obstacle

    def in_process_restart_obstacle(
        self, *, zero_stage: int, device_kind: DeviceKind = "cuda"
    ) -> str:
        """Say why the programs cannot restart inside their processes; empty where they can."""
        able = self.capabilities(device_kind=device_kind)
        names = " and ".join(able.names)
        having = self._known_that(lambda target: bool(target.in_process_restart_zero_stages))
        return _stage_obstacle(
            able.in_process_restart_zero_stages,
            zero_stage,
            none=f"restarts inside processes are written for {having}, not for {names}",
            others=f"restarts inside the processes of {names} need zero_stage {{}}",
        )

    def reshard_obstacle(self, *, zero_stage: int, on_hosts: bool) -> str:
        """Say why a checkpoint is not restored in another layout; empty where it is.

        Args:
            zero_stage: of both layouts.
            on_hosts: whether the run also keeps checkpoints in the memory of nodes.
        """
        able = self.capabilities()
        names = " and ".join(able.names)
        if not able.reshards:
            first = " and ".join(sorted(able.reshard_converters))
            until = f" until {first} has converted it" if first else ""
            return (
                f"{names} does not restore a checkpoint in another layout{until};"
                f" {self._known_that(lambda target: target.reshards)} do"
            )
        if on_hosts and zero_stage not in able.reshard_zero_stages_with_host_copies:
            return (
                f"{names} has no checkpoints that another layout can restore at zero_stage"
                f" {zero_stage} beside checkpoints on hosts; write levels: [shared]"
            )
        return ""

    def _known_that(self, can: Callable[[Capabilities], bool]) -> str:
        """List the programs for which `can` holds, without older releases."""
        able = [name for name, target in self.known.items() if can(target.capabilities)]
        newest = (name for name in able if not any(name.startswith(f"{new}-") for new in able))
        return ", ".join(newest)


def background_checkpoint_obstacle(target: Capabilities, *, zero_stage: int) -> str:
    """Say why a target waits until a checkpoint is written; empty where it need not."""
    names = " and ".join(target.names)
    return _stage_obstacle(
        target.background_checkpoint_zero_stages,
        zero_stage,
        none=f"{names} waits until a checkpoint is written",
        others=f"{names} writes checkpoints in the background with zero_stage {{}} only",
    )


def _stage_obstacle(stages: frozenset[int], zero_stage: int, *, none: str, others: str) -> str:
    """Say that no ZeRO stage has a feature, or which have it; empty where this one has."""
    if zero_stage in stages:
        return ""
    return others.format(" or ".join(map(str, sorted(stages)))) if stages else none
