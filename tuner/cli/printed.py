"""Types that commands print as JSON and no file stores, for `moetune schema NAME`."""

from profilers.compare import Difference
from profilers.records import Record
from profilers.routing.skew import Skew
from profilers.routing.store import RecordingHeader
from tuner.cli.environment import Component


class Doctor(Record):
    """`moetune doctor --json`."""

    usable: bool
    """Every core component is present."""
    findings: tuple[Component, ...]


class ProfileDiff(Record):
    """`moetune profile diff --json`."""

    counts: dict[str, int]
    """Cases by verdict."""
    differences: tuple[Difference, ...]
    """Every case, the unchanged ones too."""
    differing: tuple[str, ...] = ()
    """Differences between the machines that make their times incomparable; only with --anyway."""


class ShownRecording(RecordingHeader):
    """A recording as `moetune profile show --json` prints it."""

    token_copies: int
    skew: Skew
