"""What a measuring job is told; written as JSON for the ranks that a session starts itself."""

from typing import Literal

from profilers.records import Case, Record


class Job(Record):
    """One call of `moetune profile`."""

    out: str
    """Directory of the profile."""
    suites: tuple[str, ...]
    deadline_s: float
    """When to be done, on this host's monotonic clock; only rank 0 looks at it."""
    resume: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtypes: tuple[str, ...] = ()
    """Types of the matrix operations; empty means the device's usual ones."""
    extra_cases: tuple[Case, ...] = ()
    """Exact sizes that somebody is going to ask for; measured before the default grid."""
    storage_directory: str = ""
    """Where checkpoints would go; empty means the profile's own directory."""
