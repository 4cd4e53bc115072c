"""Measure a profile: as a single rank, as one of a launcher's ranks, or with ranks started here.

This is what `moetune profile` calls. It imports torch only when something is really measured.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from profilers.clock import HostClock
from profilers.errors import MissingLibraryError, ProfilerError, ProfileUnwritableError
from profilers.job import Job
from profilers.launch import run_workers
from profilers.progress import Progress, silent
from profilers.ranks import from_environment
from profilers.records import Case, ProfileHeader
from profilers.registry import SUITES, load_suite
from profilers.sole_writer import sole_writer
from profilers.store import read_header


def measure_profile(
    out: Path,
    *,
    suites: Sequence[str] = tuple(SUITES),
    budget_s: float = 60.0,
    ranks: int | None = None,
    resume: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtypes: Sequence[str] = (),
    extra_cases: Sequence[Case] = (),
    storage_directory: Path | None = None,
    progress: Progress = silent,
    environment: Mapping[str, str] = os.environ,
) -> ProfileHeader | None:
    """Measure the suites into `out` in `budget_s` seconds, the start of the ranks included.

    Args:
        out: directory of the profile; a profile that lies there is replaced unless resumed.
        suites: names from `registry.SUITES`, measured in this order.
        budget_s: time for everything. Where starting the ranks takes more than half of it, half of
            it is for measuring all the same; every table gets one case at least.
        ranks: how many processes to start here; None means one for each accelerator, or one.
            Ranks that a launcher started are taken as they are.
        resume: keep the tables that are complete and measure the rest.
        device: where kernels run; auto takes an accelerator when there is one.
        dtypes: types of the matrix operations; empty means the device's usual ones.
        extra_cases: exact sizes to measure before the default grid.
        storage_directory: where checkpoints would go; None means `out`.
        progress: called for every case, on the first rank's host.
        environment: says how this process was started.

    Returns:
        The header of the profile; None on ranks other than the first.

    Raises:
        ProfilerError: no torch, no such suite, an unwritable directory, another machine's profile,
            or a rank that failed.
    """
    begun_s = HostClock().now_s()
    if not 0.0 < budget_s < math.inf or (ranks is not None and ranks < 1):
        raise ProfilerError(f"budget {budget_s} s and ranks {ranks} must be positive")
    require_torch()
    for name in suites:
        load_suite(name)
    _require_writable(out)
    job = Job(
        out=str(out.absolute()),
        suites=tuple(dict.fromkeys(suites)),
        budget_s=budget_s,
        begun_s=begun_s,
        resume=resume,
        device=device,
        dtypes=tuple(dtypes),
        extra_cases=tuple(extra_cases),
        storage_directory=str(storage_directory.absolute()) if storage_directory else "",
    )
    info = from_environment(environment)
    wanted = _default_ranks(device) if ranks is None else ranks
    # Only the first of the ranks that a launcher started writes.
    writer_lock = sole_writer(out, what="`moetune profile`") if info.rank == 0 else nullcontext()
    with writer_lock:
        if info.world == 1 and wanted > 1:
            run_workers(job, ranks=wanted, progress=progress)
            return read_header(out)

        from profilers.rank_loop import run_rank

        return run_rank(job, info=info, rendezvous=None, progress=progress, alive=_nobody_watches)


def require_torch() -> None:
    """Refuse to go on without PyTorch.

    Raises:
        MissingLibraryError: it is not installed.
    """
    if find_spec("torch") is None:
        raise MissingLibraryError("moetune profile needs PyTorch: pip install 'moetune[torch]'")


def _default_ranks(device: str) -> int:
    if device == "cpu":
        return 1

    from profilers.devices import count_accelerators

    return max(1, count_accelerators())


def _require_writable(out: Path) -> None:
    try:
        str(out).encode()
    except UnicodeEncodeError as error:
        raise ProfileUnwritableError(
            f"{str(out)!r} is not UTF-8, as the files below it must be; choose another directory"
        ) from error
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProfileUnwritableError(
            f"{out} cannot be made: {error.strerror}; choose another directory"
        ) from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise ProfileUnwritableError(f"{out} cannot be written; choose another directory")


def _nobody_watches() -> None:
    """Do nothing: the launcher watches the ranks that it started."""
