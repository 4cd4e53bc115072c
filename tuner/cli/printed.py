"""Types that commands print as JSON and no file stores, for `moetune schema NAME`."""

from profilers.compare import Difference
from profilers.records import Record
from profilers.routing.skew import Skew
from profilers.routing.store import RecordingHeader


class ComponentStatus(Record):
    """One component of the environment; see tuner/cli/environment.py."""

    name: str
    status: str
    """`ok`, `missing` or `broken`."""
    found: str
    """Version, path or devices."""
    core: bool
    """Whether moetune needs it for every command."""
    costs: str
    """Features that do not work without the component; empty if it is ok."""
    remedy: str
    """The command that installs it; empty if it is ok."""


class Doctor(Record):
    """`moetune doctor --json`."""

    usable: bool
    """Every core component is present."""
    findings: tuple[ComponentStatus, ...]


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
