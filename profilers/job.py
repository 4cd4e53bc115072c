"""What a measuring job is told; written as JSON for the ranks that a session starts itself."""

from typing import Literal

from profilers.records import Case, Record, Seconds


class Job(Record):
    """One call of `moetune profile`."""

    out: str
    """Directory of the profile."""
    suites: tuple[str, ...]
    budget_s: Seconds
    """Time to measure, counted from when all ranks are ready; only rank 0 looks at it."""
    resume: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtypes: tuple[str, ...] = ()
    """Types of the matrix operations; empty means the device's usual ones."""
    extra_cases: tuple[Case, ...] = ()
    """Exact sizes that somebody is going to ask for; measured before the default grid."""
    storage_directory: str = ""
    """Where checkpoints would go; empty means the profile's own directory."""
