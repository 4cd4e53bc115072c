"""The input of a measuring job; written as JSON for the ranks that a session starts itself."""

from typing import Literal

from profilers.records import Case, Record, Seconds


class Job(Record):
    """One call of `moetune profile`."""

    out: str
    """Directory of the profile."""
    suites: tuple[str, ...]
    budget_s: Seconds
    """Time for the whole job; rank 0 keeps to it."""
    begun_s: float | None = None
    """Start of the job by the monotonic clock of rank 0's host; None: when all ranks are ready."""
    resume: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtypes: tuple[str, ...] = ()
    """Types of the matrix operations; empty means the device's usual ones."""
    extra_cases: tuple[Case, ...] = ()
    """Exact sizes that a plan will need; measured before the default grid."""
    storage_directory: str = ""
    """Folder where checkpoints would go; empty means the profile's own directory."""
