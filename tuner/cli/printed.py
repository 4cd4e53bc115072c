"""What commands print as JSON and no file holds: the types behind `moetune schema NAME`."""

from profilers.compare import Difference
from profilers.records import Profile, Record
from profilers.routing.notes import Skew
from profilers.routing.store import RecordingHeader


class FoundPiece(Record):
    """One piece of the environment; see tuner/environment.py."""

    name: str
    status: str
    """`ok`, `missing` or `broken`."""
    found: str
    """Version, path or devices, in words."""
    core: bool
    """Whether nothing works without it."""
    costs: str
    """What cannot be done without it; empty when it is ok."""
    remedy: str
    """The command that adds it; empty when it is ok."""


class Doctor(Record):
    """`moetune doctor --json`."""

    usable: bool
    """Every core piece is there."""
    findings: tuple[FoundPiece, ...]


class ProfileDiff(Record):
    """`moetune profile diff --json`."""

    counts: dict[str, int]
    """Cases by verdict."""
    differences: tuple[Difference, ...]
    """Every case, the unchanged ones too."""
    differing: tuple[str, ...] = ()
    """Facts of the two machines that make their times another matter; only with --anyway."""


class ShownRecording(RecordingHeader):
    """A recording as `moetune profile show --json` prints it."""

    token_copies: int
    skew: Skew
    notes: tuple[str, ...]


class ShownProfile(Profile):
    """A profile as `moetune profile show --json` prints it."""

    recordings: tuple[ShownRecording, ...] = ()
    """Of routing, beside the tables."""
