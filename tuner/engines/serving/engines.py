"""The server command of an instance and its files, by engine."""

from collections.abc import Mapping
from typing import Final, Protocol

from tuner.engines.files import EmittedFile
from tuner.engines.serving.command import ServerCommand, variables
from tuner.engines.serving.placement import ServedPlacement
from tuner.engines.serving.shape import GroupShape, group_shapes, needs_draft_model
from tuner.engines.sglang import write as sglang
from tuner.engines.sglang.multiplexing import shares_file
from tuner.engines.trtllm import write as trtllm
from tuner.engines.vllm import write as vllm
from tuner.plans.serve import VerifiedServing


class Server(Protocol):
    """Returns the command of one machine of one instance."""

    def __call__(
        self, verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
    ) -> ServerCommand: ...


SERVERS: Final[Mapping[str, Server]] = {
    "sglang": sglang.server,
    "vllm": vllm.server,
    "trtllm": trtllm.server,
}

MPI_ENGINES: Final = frozenset({"trtllm"})
"""Engines whose multi-node instances are MPI jobs with one task per device."""


def server_command(
    verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
) -> ServerCommand:
    """Return the command of the plan's engine."""
    return SERVERS[verified.plan.goal.engine.name](verified, shape, placement)


def server_bash(
    verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
) -> str:
    """Return bash that sets the variables of the command and executes the server."""
    rendezvous = verified.plan.goal.engine.name not in MPI_ENGINES
    read = variables(shape, has_rendezvous=rendezvous, draft_model=needs_draft_model(verified))
    return read + server_command(verified, shape, placement).bash


def engine_files(
    verified: VerifiedServing, placement: ServedPlacement | None
) -> tuple[EmittedFile, ...]:
    """Return the files that the commands read, all in the folder FILES."""
    placed = () if placement is None else placement.files
    shapes = group_shapes(verified)
    if verified.plan.goal.engine.name == "trtllm":
        options = (trtllm.options_file(verified, shape, placement) for shape in shapes)
        return (*options, *placed)
    shared = (shape for shape in shapes if shape.group.prefill_share_ratio is not None)
    return (*(shares_file(verified, shape) for shape in shared), *placed)
