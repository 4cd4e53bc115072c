"""What a checkpoint says about itself: whose it is, and that its files are whole."""

import zlib
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from profilers.records import Record
from profilers.steps.config import Adapters, Size, StepConfig, TransformerShape

NAME: Final = "checkpoint.json"
SCHEMA_VERSION: Final = 1
# 1: first release.

BLOCK_BYTES: Final = 2**22
"""Read at once for a checksum."""


class RunIdentity(Record):
    """What has to be the same for a run to go on from a checkpoint; the layout need not be."""

    model: TransformerShape
    adapters: Adapters | None
    seed: int
    """Of initial weights and data; with the step, all there is to the position in the data."""
    sequence_length: int
    global_batch_size: int
    state: Literal["fp32", "fp64"]
    """Type of trained weights and of optimizer state."""

    def difference(self, other: "RunIdentity") -> str | None:
        """Name the first fact in which another run, whose checkpoint it is, differs from this."""
        ours, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        ours |= {f"model.{name}": value for name, value in ours.pop("model").items()}
        theirs |= {f"model.{name}": value for name, value in theirs.pop("model").items()}
        for name, value in ours.items():
            if theirs[name] != value:
                return f"{name} is {theirs[name]} there, {value} here"
        return None


class FileFacts(Record):
    """A file of a checkpoint."""

    bytes: Size
    crc32: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


class Manifest(Record):
    """`checkpoint.json` beside the files of PyTorch's format."""

    schema_version: Literal[1] = 1
    step: Size
    """Updates that are done."""
    identity: RunIdentity
    layout: str
    """Digest of how the state was split (plan.py)."""
    files: dict[str, FileFacts]


def identity_of(config: StepConfig) -> RunIdentity:
    """Return what is compared between a run and a checkpoint."""
    return RunIdentity(
        model=config.model,
        adapters=config.adapters,
        seed=config.seed,
        sequence_length=config.sequence_length,
        global_batch_size=config.global_batch_size,
        state="fp64" if config.precision == "fp64" else "fp32",
    )


def facts_of(file: Path) -> dict[str, Any]:
    """Return size and checksum of a file, as fields of `FileFacts`."""
    size, checksum = 0, 0
    with file.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return {"bytes": size, "crc32": f"{checksum:08x}"}
