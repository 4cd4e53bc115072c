"""`engine.json` of a profile: the steps of an engine, as launches of it showed them.

    prompts    seconds to the first token of a prompt alone
    decodes    seconds between two tokens of so many running sequences

The model and the degrees say what was in a step, so that rates follow from its seconds
(tuner/calibrate/engine_rates.py).
"""

from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import Field, ValidationError

from profilers.errors import ProfileUnreadableError, first_problem
from profilers.files import TooLargeError, read_bounded
from profilers.records import Record
from profilers.schema_version import refusal_of_newer
from tuner.errors import OutputError
from tuner.output import write_files
from tuner.spec.model import ModelSpec

NAME: Final = "engine.json"
MAX_BYTES: Final = 2**20
SCHEMA_VERSION: Final = 1
# 1: first release.

AnyRecord = TypeVar("AnyRecord", bound=Record)
Positive = Annotated[float, Field(ge=1e-9, le=1e6)]
Tokens = Annotated[int, Field(ge=1, le=2**31)]
Instances = Annotated[int, Field(ge=1, le=2**16)]
"""Running sequences, or ranks."""


class PromptPoint(Record):
    """Prompts of one length, each alone."""

    tokens: Tokens
    seconds: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """Seconds from the request to its first token, at the client."""


class DecodePoint(Record):
    """Running sequences."""

    sequences: Instances
    past_tokens: Tokens
    """Tokens in the cache of each sequence, mean."""
    seconds: Annotated[tuple[Positive, ...], Field(min_length=1)]
    """Seconds between two tokens of a sequence, a mean for each measurement."""


class LaunchSteps(Record):
    """One launch of one instance."""

    tensor_parallel: Instances
    prompts: Annotated[tuple[PromptPoint, ...], Field(min_length=1)]
    decodes: Annotated[tuple[DecodePoint, ...], Field(min_length=1)]
    start_up_s: Positive | None = None
    """Seconds from the start of the command until a request was answered; None: in files of
    earlier releases."""


class EngineSteps(Record):
    """Every launch of one model."""

    schema_version: Literal[1] = SCHEMA_VERSION
    engine: str
    release: str
    device: str
    """Name of the device, as in the profile."""
    command: str
    """Command that started the server."""
    model: ModelSpec
    launches: Annotated[tuple[LaunchSteps, ...], Field(min_length=1, max_length=16)]

    @property
    def start_up_s(self) -> float | None:
        """Seconds of the longest start-up; None where none was measured."""
        measured = [launch.start_up_s for launch in self.launches]
        return max((seconds for seconds in measured if seconds is not None), default=None)


def read_engine_steps(profile: Path) -> EngineSteps | None:
    """Read what a profile's folder holds; None where no engine was measured.

    Raises:
        ProfileUnreadableError: it is damaged.
    """
    return read_beside(
        profile / NAME, EngineSteps, version=SCHEMA_VERSION, advice="measure the suite engine again"
    )


def read_beside(
    file: Path, kind: type[AnyRecord], *, version: int, advice: str
) -> AnyRecord | None:
    """Read a record that lies beside a profile's tables; None where there is none.

    Args:
        file: the record's.
        kind: its type.
        version: of its schema, the newest known.
        advice: what to do with a damaged one.

    Raises:
        ProfileUnreadableError: it is damaged.
    """
    try:
        content = read_bounded(file, most_bytes=MAX_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, TooLargeError) as error:
        raise ProfileUnreadableError(f"{file}: {error}") from error
    if refusal := refusal_of_newer(content, known=version):
        raise ProfileUnreadableError(f"{file}: {refusal}")
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise ProfileUnreadableError(f"{file}: {first_problem(error)}; {advice}") from error


def drop_engine_steps(profile: Path) -> None:
    """Remove them from a profile's folder, which is measured anew.

    Raises:
        OutputError: they cannot be removed.
    """
    try:
        (profile / NAME).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot remove {str(profile / NAME)!r}: {error.strerror}") from error


def write_engine_steps(profile: Path, steps: EngineSteps) -> None:
    """Write them into a profile's folder.

    Raises:
        OutputError: it cannot be written.
    """
    write_files(profile, {NAME: steps.model_dump_json(indent=1) + "\n"})
