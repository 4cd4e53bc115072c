"""Run the CBC program on a model file and read what it proved.

PuLP's own status calls an incumbent at the time limit "Optimal" and keeps no bound, so the program
is run here, on a model that PuLP wrote:

- the first line of the solution file names the outcome, the log holds the lower bound;
- files are in a temporary directory that is removed afterwards, also on an interrupt;
- the process is killed afterwards; only a hard kill of the caller leaves it, until its time limit;
- arguments go as a list and files by relative name, so no path needs quoting.

CBC's preprocessing sometimes accepts an infeasible model, which only the log shows ("Postprocessed
model is infeasible"), and rejects a feasible one when its time runs out ("Pre-processing says
infeasible"). The former run is repeated without preprocessing, the latter returns UNKNOWN.

CBC's printed objective ignores a constant term: models must not have one. Numbers are CBC's, within
its tolerances (1e-7 on constraints, 1e-5 absolute on the objective): scale the model so that these
are small, and check the values exactly.
"""

import dataclasses
import math
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from solvers.errors import BackendFailedError
from solvers.result import Status

DEFERRED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 10.0
"""Seconds after the limit at which CBC is killed; it checks its clock between rounds."""

BROKEN_BY_PREPROCESSING = "Postprocessed model is infeasible"
DOUBTFUL_IN_HASTE = "Pre-processing says infeasible"
"""Words of CBC's log that are trusted only in the first half of the time limit: they can be wrong
where the time ran out."""
WITHOUT_PREPROCESSING = ("-preprocess", "off")
LEAST_RUN_S = 0.05
"""Shortest time limit of the second run, seconds, even where the time is up."""

STATUS_OF_FIRST_WORDS: Mapping[str, Status] = {
    "Optimal": Status.OPTIMAL,
    "Infeasible": Status.INFEASIBLE,
    "Integer infeasible": Status.INFEASIBLE,
    "Stopped on time (no integer solution": Status.UNKNOWN,
    "Stopped on time - objective value": Status.FEASIBLE,
}
"""Status by the first words of the solution file; anything else proves nothing and is UNKNOWN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CbcResult:
    """Status, bound and solution of one run of CBC, in the units of the model."""

    status: Status
    bound: float
    """Proven lower bound on the objective, `-inf` when none was printed."""
    value_of_column: Mapping[str, float]
    """Values by the names of columns in the model file; absent columns are 0."""


NO_RESULT = CbcResult(status=Status.UNKNOWN, bound=-math.inf, value_of_column={})


def run_cbc(
    *,
    executable: str,
    write_model: Callable[[Path], object],
    time_limit_s: float,
    threads: int,
) -> CbcResult:
    """Minimise the MPS model that `write_model` puts at the path it is given.

    Raises:
        BackendFailedError: CBC cannot be started, or ends without a solution file.
    """
    deadline_s = time.perf_counter() + time_limit_s
    with tempfile.TemporaryDirectory(prefix="moetune-cbc-") as name:
        directory = Path(name)
        write_model(directory / "model.mps")
        files = _read_run(executable, directory, time_limit_s, threads, options=())
        left_s = deadline_s - time.perf_counter()
        if DOUBTFUL_IN_HASTE in files.log and left_s < time_limit_s / 2.0:
            return NO_RESULT
        if BROKEN_BY_PREPROCESSING in files.log:
            left_s = max(left_s, LEAST_RUN_S)
            files = _read_run(executable, directory, left_s, threads, options=WITHOUT_PREPROCESSING)
        return NO_RESULT if files.solution is None else parse_cbc_output(files.solution, files.log)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CbcFiles:
    """Output files of a run."""

    solution: str | None
    """Text of the solution file; None: the run did not end by itself."""
    log: str


def _read_run(
    executable: str,
    directory: Path,
    time_limit_s: float,
    threads: int,
    *,
    options: tuple[str, ...],
) -> _CbcFiles:
    ended = _run(executable, directory, time_limit_s, threads, options=options)
    log = (directory / "log.txt").read_text(errors="replace")
    if not ended:
        return _CbcFiles(solution=None, log=log)
    solution = directory / "solution.txt"
    if not solution.exists():
        last_line = (log.strip() or "no output").splitlines()[-1]
        raise BackendFailedError(
            f"CBC wrote no solution ({last_line}); reinstall PuLP, which carries the program"
        )
    return _CbcFiles(solution=solution.read_text(), log=log)


def parse_cbc_output(solution: str, log: str) -> CbcResult:
    """Read status, bound and values from a run's solution file and log."""
    first_line, _, rest = solution.partition("\n")
    status = next(
        (status for words, status in STATUS_OF_FIRST_WORDS.items() if first_line.startswith(words)),
        Status.UNKNOWN,
    )
    if status is Status.OPTIMAL and "Stopped on" in log:
        status = Status.FEASIBLE
    if status is Status.INFEASIBLE:
        return dataclasses.replace(NO_RESULT, status=status, bound=math.inf)
    if status is Status.OPTIMAL:
        bound = float(first_line.split()[-1])
    else:
        bound = _printed(log, "Lower bound")
    values = _values(rest) if status.has_solution else {}
    return CbcResult(status=status, bound=bound, value_of_column=values)


def _run(
    executable: str,
    directory: Path,
    time_limit_s: float,
    threads: int,
    *,
    options: tuple[str, ...],
) -> bool:
    """Run CBC and return whether it ended by itself."""
    arguments = ["model.mps", "-sec", f"{time_limit_s:.3f}", "-timeMode", "elapsed"]
    arguments += ["-threads", str(threads)] if threads > 1 else []
    arguments += [*options, "-solve", "-solution", "solution.txt"]
    with (directory / "log.txt").open("wb") as log:
        process: subprocess.Popen[bytes] | None = None
        try:
            # Deferred until the process is assigned, else it could not be killed.
            with _signals_deferred():
                process = subprocess.Popen(
                    [executable, *arguments],
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            process.wait(timeout=time_limit_s + GRACE_S)
        except OSError as error:
            raise BackendFailedError(
                f"CBC cannot be started ({error}); reinstall PuLP, which carries the program"
            ) from error
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process is not None:
                process.kill()
                process.wait()
    return True


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM until the block ends, whichever thread of the process they reach.

    A signal mask would affect one thread only and be inherited by the child. Python handles signals
    in the main thread, so other threads have nothing to defer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    former = {
        signum: signal.signal(signum, lambda got, _: came.append(got))
        for signum in DEFERRED_SIGNALS
    }
    try:
        yield
    finally:
        for deferred, handler in former.items():
            signal.signal(deferred, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)


def _printed(log: str, label: str) -> float:
    """The last number printed after a label, lowered by what its rounding can hide."""
    numbers = re.findall(rf"^{label}:\s+(-?[\d.]+(?:e[+-]?\d+)?)\s*$", log, flags=re.MULTILINE)
    if not numbers:
        return -math.inf
    decimals = len(numbers[-1].partition(".")[2])
    return float(numbers[-1]) - 0.5 * 10.0**-decimals


def _values(rows: str) -> dict[str, float]:
    """Columns of a solution file: index, name, value, reduced cost; `**` marks a broken row."""
    values = {}
    for row in rows.splitlines():
        words = row.replace("**", " ").split()
        values[words[1]] = float(words[2])
    return values
