"""Environment variables of a launch that decide what may run at once, and what a setting needs.

Megatron-LM asks for them where it parses its arguments and for nothing elsewhere (`validate_args`
of core_v0.16.1, core_v0.17.1, core_v0.18.0 and core_v0.19.0):

- Before Blackwell, tensor or context parallelism asserts CUDA_DEVICE_MAX_CONNECTIONS=1: with one
  hardware queue collectives start in the order in which they hide behind products. Under
  Megatron-FSDP and under the overlap of the expert all-to-all it only warns, because both want
  more queues: 1 or 32, "depending on what is to be prioritized".
- Megatron-FSDP and torch's FSDP2 assert that it is not 1.
- CUDA graphs of Transformer Engine assert NCCL_GRAPH_REGISTER=0 where PYTORCH_CUDA_ALLOC_CONF has
  expandable_segments:True.

A variable that the launch does not set may be set by whoever starts it, so nothing is held against
it; what a change needs is said all the same where the launch as it stands does not need it.

Not covered: NVTE_CPU_OFFLOAD_V1, which depends on the release of Transformer Engine and which no
change offered here asks for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tuner.devices.datasheet import Generation
from tuner.estimate.configuration import Configuration
from tuner.estimate.launch import Engine, Graphs

QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
GRAPH_REGISTER: Final = "NCCL_GRAPH_REGISTER"
ALLOCATOR: Final = "PYTORCH_CUDA_ALLOC_CONF"
MANY_QUEUES: Final = "32"
"""What Megatron-LM's warning names, and the most that the driver takes."""
_READ: Final = (QUEUES, GRAPH_REGISTER, ALLOCATOR)
_LONGEST_VALUE: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a configuration asks of one variable."""

    variable: str
    value: str
    """To set."""
    holds: bool
    """Whether what the launch sets will do; what it does not set is taken to."""
    is_stated: bool
    """Whether the launch sets the variable."""
    is_asserted: bool
    """The engine stops where it does not hold; else it runs, and slower."""
    why: str

    @property
    def line(self) -> str:
        """As a line of the script, with the reason behind it."""
        return f"export {self.variable}={self.value}  # {self.why}"


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Keep the variables that anything here depends on."""
    return {
        name: environment[name]
        for name in _READ
        if name in environment and len(environment[name]) <= _LONGEST_VALUE
    }


def needs(
    own: Configuration, environment: Mapping[str, str], generation: Generation
) -> Iterator[Need]:
    """Yield what a configuration asks of the environment of its launch."""
    if own.engine is not Engine.MEGATRON:
        return
    yield from _queues(own, environment, generation)
    if own.graphs is Graphs.PARTIAL and "expandable_segments:True" in environment.get(
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
    own: Configuration, environment: Mapping[str, str], generation: Generation
) -> Iterator[Need]:
    value = environment.get(QUEUES)
    ordered = (own.tensor > 1 or own.context > 1) and generation is not Generation.BLACKWELL
    if own.zero_stage >= 2 or own.a2a_overlap:
        reason = "Megatron-FSDP" if own.zero_stage >= 2 else "the overlap of the expert all-to-all"
        loses = (
            "; tensor and context parallelism, which want 1, then hide less, and that is not priced"
            if ordered
            else ""
        )
        yield Need(
            variable=QUEUES,
            value=MANY_QUEUES,
            holds=value != "1",
            is_stated=value is not None,
            is_asserted=own.zero_stage >= 2,
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
    """Return what a change of the configuration asks the environment to become."""
    own = {(need.variable, need.value) for need in needs(before, environment, generation)}
    return tuple(
        need.line
        for need in needs(after, environment, generation)
        if not need.holds
        # Nobody sets for a launch what nothing in it needed.
        or (need.is_asserted and not need.is_stated and (need.variable, need.value) not in own)
    )


def refused(
    own: Configuration, environment: Mapping[str, str], generation: Generation
) -> Iterator[str]:
    """Yield what the engine stops at in the environment that the launch sets."""
    for need in needs(own, environment, generation):
        if need.is_asserted and not need.holds:
            stated = environment.get(need.variable)
            said = need.variable + (" is not set" if stated is None else f"={stated}")
            yield f"{said}: {need.why}; set {need.variable}={need.value}"


def notes(
    own: Configuration, environment: Mapping[str, str], generation: Generation
) -> Iterator[str]:
    """Yield what runs slower than priced in the environment that the launch sets."""
    for need in needs(own, environment, generation):
        if not need.holds and not need.is_asserted:
            yield (
                f"{need.variable}={environment[need.variable]}, but {need.why}: the price takes it"
                f" to be {need.value}"
            )
