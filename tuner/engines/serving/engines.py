"""The server command of an instance and its files, by engine."""

from typing import Final, Protocol

from tuner.engines.files import EmittedFile
from tuner.engines.registry import engine_file
from tuner.engines.serving.command import ServerCommand, variables
from tuner.engines.serving.placement import ServedPlacement
from tuner.engines.serving.releases import ENGINES
from tuner.engines.serving.shape import GroupShape, group_shapes, needs_draft_model
from tuner.plans.serve import VerifiedServing


class ServerWriter(Protocol):
    """Returns the command of one machine of one instance."""

    def __call__(
        self, verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
    ) -> ServerCommand: ...


MPI_ENGINES: Final = frozenset(name for name, releases in ENGINES.items() if releases[0].is_mpi_job)
"""Engines whose multi-node instances are MPI jobs with one task per device."""


def server_command(
    verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
) -> ServerCommand:
    """Return the command of the plan's engine."""
    server: ServerWriter = engine_file(verified.plan.goal.engine.name, "write").server
    return server(verified, shape, placement)


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
    command_files = getattr(
        engine_file(verified.plan.goal.engine.name, "write"), "command_files", None
    )
    read = (
        () if command_files is None else command_files(verified, group_shapes(verified), placement)
    )
    return (*read, *(() if placement is None else placement.files))
