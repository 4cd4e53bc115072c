"""Environment variables that a configuration needs, and what the launch sets.

Megatron-LM checks them where it parses its arguments and nowhere else (`validate_args` of
core_v0.16.1, core_v0.17.1, core_v0.18.0 and core_v0.19.0):

- Before Blackwell, tensor or context parallelism asserts CUDA_DEVICE_MAX_CONNECTIONS=1: with one
  hardware queue collectives start in the order in which they overlap GEMMs. Under
  Megatron-FSDP and under the overlap of the expert all-to-all it only warns, because both want
  more queues: 1 or 32, "depending on what is to be prioritized".
- Megatron-FSDP and torch's FSDP2 assert that it is not 1.
- CUDA graphs of Transformer Engine assert NCCL_GRAPH_REGISTER=0 where PYTORCH_CUDA_ALLOC_CONF has
  expandable_segments:True.

A variable that the launch does not set may be set by whoever starts it, so it is not an error. A
change that needs a variable names it where the launch itself did not need it.

Not covered: NVTE_CPU_OFFLOAD_V1, which depends on the release of Transformer Engine and which no
change offered here needs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tuner.devices.datasheet import Generation
from tuner.engines.megatron_lm.environment import many_queues_for
from tuner.engines.reading.launch import Graphs
from tuner.engines.reading.variables import (
    ALLOCATOR,
    GRAPH_REGISTER,
    QUEUES,
)
from tuner.estimate.configuration import Configuration

MANY_QUEUES: Final = "32"
"""The value in Megatron-LM's warning, and the driver's maximum."""

_ANY_QUEUES: Final = frozenset({Generation.BLACKWELL, Generation.BLACKWELL_RTX})
"""Compute capability 10 and later, whose number of queues is free (`validate_args`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Value that a configuration needs in one environment variable."""

    variable: str
    value: str
    """Value to set the variable to."""
    holds: bool
    """The launch's value satisfies the need; an unset variable counts as satisfied."""
    is_stated: bool
    """The launch sets the variable."""
    is_asserted: bool
    """The engine stops where it does not hold; otherwise it runs slower."""
    why: str

    @property
    def line(self) -> str:
        """Line of the script that sets the variable, with the reason as a comment."""
        return f"export {self.variable}={self.value}  # {self.why}"


def needs(
    config: Configuration, environment: Mapping[str, str], generation: Generation
) -> Iterator[Need]:
    """Yield what a configuration needs in the environment of its launch."""
    if not config.engine.is_megatron:
        return
    yield from _queues(config, environment, generation)
    if config.cuda_graph is Graphs.PARTIAL and "expandable_segments:True" in environment.get(
        ALLOCATOR, ""
    ):
        yield Need(
            variable=GRAPH_REGISTER,
            value="0",
            holds=environment.get(GRAPH_REGISTER) == "0",
            is_stated=True,
            is_asserted=True,
            why=f"CUDA graphs with expandable segments in {ALLOCATOR}",
        )


def _queues(
    config: Configuration, environment: Mapping[str, str], generation: Generation
) -> Iterator[Need]:
    value = environment.get(QUEUES)
    ordered = (config.tensor > 1 or config.context > 1) and generation not in _ANY_QUEUES
    if reason := many_queues_for(config):
        loses = (
            "; tensor and context parallelism, which want 1, then overlap less, and that is not "
            "priced"
            if ordered
            else ""
        )
        yield Need(
            variable=QUEUES,
            value=MANY_QUEUES,
            holds=value != "1",
            is_stated=value is not None,
            is_asserted=config.zero_stage >= 2,
            why=f"{reason} needs more than one hardware queue{loses}",
        )
    elif ordered:
        yield Need(
            variable=QUEUES,
            value="1",
            holds=value in (None, "1"),
            is_stated=value is not None,
            is_asserted=True,
            why="tensor and context parallelism before Blackwell need one hardware queue",
        )


def lines_to_set(
    before: Configuration,
    after: Configuration,
    environment: Mapping[str, str],
    generation: Generation,
) -> tuple[str, ...]:
    """Return the lines that set what a change of the configuration needs."""
    already = {(need.variable, need.value) for need in needs(before, environment, generation)}
    return tuple(
        need.line
        for need in needs(after, environment, generation)
        if not need.holds
        # An unset variable that only the change needs has to be set.
        or (need.is_asserted and not need.is_stated and (need.variable, need.value) not in already)
    )


def refusals(
    config: Configuration, environment: Mapping[str, str], generation: Generation
) -> Iterator[str]:
    """Yield why the engine stops in the environment that the launch sets."""
    for need in needs(config, environment, generation):
        if need.is_asserted and not need.holds:
            stated = environment.get(need.variable)
            said = need.variable + (" is not set" if stated is None else f"={stated}")
            yield f"{said}: {need.why}; set {need.variable}={need.value}"


def notes(
    config: Configuration, environment: Mapping[str, str], generation: Generation
) -> Iterator[str]:
    """Yield notes on what runs slower than priced in the environment that the launch sets."""
    for need in needs(config, environment, generation):
        if not need.holds and not need.is_asserted:
            yield (
                f"{need.variable}={environment[need.variable]}, but {need.why}: the price takes it"
                f" to be {need.value}"
            )
