"""Run the CBC program on a model file and read what it really proved.

PuLP's own status calls an incumbent at the time limit "Optimal" and keeps no bound, so the program
is run here, on a model that PuLP wrote:

- the first line of the solution file names the outcome, the log holds the lower bound;
- files live in a private directory that is gone afterwards, an interrupt included;
- the process is gone afterwards too; only a hard kill of the caller leaves it, to its time limit;
- arguments go as a list and files by relative name, so no path needs quoting.

Its preprocessing at times takes an infeasible model for a feasible one, and says so only in the log
("Postprocessed model is infeasible"), and a feasible one for infeasible where time runs out in it
("Pre-processing says infeasible"). The former are run again without it, of the latter nothing is
said.

CBC's printed objective ignores a constant term: models must not have one. Numbers are CBC's, within
its tolerances (1e-7 on constraints, 1e-5 absolute on improvements of the objective): scale the
model so that this is small, and check the values exactly.
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

HELD_BACK = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 10.0
"""CBC looks at its clock between rounds; this long after the limit it is ended from outside."""

BROKEN_BY_PREPROCESSING = "Postprocessed model is infeasible"
DOUBTFUL_IN_HASTE = "Pre-processing says infeasible"
"""True of most models, but not of each where the time ran out; believed in the first half of it."""
WITHOUT_PREPROCESSING = ("-preprocess", "off")
LEAST_RUN_S = 0.05
"""What a second run gets even where the time is up."""

STATUS_OF_FIRST_WORDS: Mapping[str, Status] = {
    "Optimal": Status.OPTIMAL,
    "Infeasible": Status.INFEASIBLE,
    "Integer infeasible": Status.INFEASIBLE,
    "Stopped on time (no integer solution": Status.UNKNOWN,
    "Stopped on time - objective value": Status.FEASIBLE,
}
"""First words of the solution file; anything else proves nothing and is UNKNOWN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CbcAnswer:
    """What one run of CBC found, in the units of the model."""

    status: Status
    bound: float
    """Proven lower bound on the objective, `-inf` when none was printed."""
    value_of_column: Mapping[str, float]
    """By the names in the model file; columns that are absent are 0."""


NOTHING_FOUND = CbcAnswer(status=Status.UNKNOWN, bound=-math.inf, value_of_column={})


def run_cbc(
    *,
    executable: str,
    write_model: Callable[[Path], object],
    time_limit_s: float,
    threads: int,
) -> CbcAnswer:
    """Minimise the MPS model that `write_model` puts at the path it is given.

    Raises:
        BackendFailedError: CBC cannot be started, or ends without a solution file.
    """
    deadline_s = time.perf_counter() + time_limit_s
    with tempfile.TemporaryDirectory(prefix="moetune-cbc-") as name:
        directory = Path(name)
        write_model(directory / "model.mps")
        read = _read_run(executable, directory, time_limit_s, threads, options=())
        left_s = deadline_s - time.perf_counter()
        if DOUBTFUL_IN_HASTE in read.log and left_s < time_limit_s / 2.0:
            return NOTHING_FOUND
        if BROKEN_BY_PREPROCESSING in read.log:
            left_s = max(left_s, LEAST_RUN_S)
            read = _read_run(executable, directory, left_s, threads, options=WITHOUT_PREPROCESSING)
        return NOTHING_FOUND if read.solution is None else read_answer(read.solution, read.log)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What a run has written."""

    solution: str | None
    """None: it did not end by itself."""
    log: str


def _read_run(
    executable: str,
    directory: Path,
    time_limit_s: float,
    threads: int,
    *,
    options: tuple[str, ...],
) -> _Read:
    ended = _run(executable, directory, time_limit_s, threads, options=options)
    log = (directory / "log.txt").read_text(errors="replace")
    if not ended:
        return _Read(solution=None, log=log)
    solution = directory / "solution.txt"
    if not solution.exists():
        last_line = (log.strip() or "no output").splitlines()[-1]
        raise BackendFailedError(
            f"CBC wrote no solution ({last_line}); choose another method, e.g. 'exact'"
        )
    return _Read(solution=solution.read_text(), log=log)


def read_answer(solution: str, log: str) -> CbcAnswer:
    """Judge a run by its solution file and its log."""
    first_line, _, rest = solution.partition("\n")
    status = next(
        (status for words, status in STATUS_OF_FIRST_WORDS.items() if first_line.startswith(words)),
        Status.UNKNOWN,
    )
    if status is Status.OPTIMAL and "Stopped on" in log:
        status = Status.FEASIBLE
    if status is Status.INFEASIBLE:
        return dataclasses.replace(NOTHING_FOUND, status=status, bound=math.inf)
    if status is Status.OPTIMAL:
        bound = float(first_line.split()[-1])
    else:
        bound = _printed(log, "Lower bound")
    values = _values(rest) if status.has_solution else {}
    return CbcAnswer(status=status, bound=bound, value_of_column=values)


def _run(
    executable: str,
    directory: Path,
    time_limit_s: float,
    threads: int,
    *,
    options: tuple[str, ...],
) -> bool:
    """Whether CBC ended by itself."""
    arguments = ["model.mps", "-sec", f"{time_limit_s:.3f}", "-timeMode", "elapsed"]
    arguments += ["-threads", str(threads)] if threads > 1 else []
    arguments += [*options, "-solve", "-solution", "solution.txt"]
    with (directory / "log.txt").open("wb") as log:
        process: subprocess.Popen[bytes] | None = None
        try:
            # Until the process is known: one that has just begun would stay.
            with _signals_held_back():
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
                f"CBC cannot be started ({error}); choose another method, e.g. 'exact'"
            ) from error
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process is not None:
                process.kill()
                process.wait()
    return True


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Keep Ctrl-C and SIGTERM until this is left, whichever thread of the process they reach.

    A mask would hold them back from one thread alone, and be inherited by what is started. Python
    handles signals in the main thread, so that others have nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    former = {each: signal.signal(each, lambda got, _: came.append(got)) for each in HELD_BACK}
    try:
        yield
    finally:
        for each, handler in former.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)


def _printed(log: str, label: str) -> float:
    """The last number printed after a label, lowered by what its rounding can hide."""
    found = re.findall(rf"^{label}:\s+(-?[\d.]+(?:e[+-]?\d+)?)\s*$", log, flags=re.MULTILINE)
    if not found:
        return -math.inf
    decimals = len(found[-1].partition(".")[2])
    return float(found[-1]) - 0.5 * 10.0**-decimals


def _values(rows: str) -> dict[str, float]:
    """Columns of a solution file: index, name, value, reduced cost; `**` marks a broken row."""
    values = {}
    for row in rows.splitlines():
        words = row.replace("**", " ").split()
        values[words[1]] = float(words[2])
    return values
