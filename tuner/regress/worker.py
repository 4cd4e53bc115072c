"""Plans scenarios one after another, each in its own process; started by file, not by name.

`python -P worker.py` imports the first moetune on PYTHONPATH, so that an older version can plan the
same scenario; therefore this file imports nothing of `tuner.regress` and only calls
`tuner.api.plan`.

The process loads the libraries once and then forks for every job: a job that crashes, or is
killed for its memory, does not affect others.

    stdin   one job a line: {spec, profiles, time_limit_s, memory_limit_bytes, reply}
    reply   a file: {plan} or {error}
    stdout  one line a job once it has ended: {status, cpu_s}, status as os.wait4 says

Not covered: systems without fork.
"""

import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, Final

Job = Mapping[str, Any]

LOADED: Final = (
    "numpy",
    "tuner.api",
    "tuner.goals.place",
    "tuner.goals.serve",
    "tuner.goals.train",
    "tuner.search.train.plan_train",
    "tuner.search.train.pools.plan_pools",
    "tuner.costs.train.calibration",
    "tuner.costs.train.measured_profile",
)
"""Imported before the first job; modules that a version lacks are skipped; the job reports them."""

WATCH_INTERVAL_S: Final = 1.0
"""Seconds between two looks at whoever started this process."""
LONGEST_ERROR: Final = 400
"""Characters of a defect's message that its last line repeats."""


def main() -> None:
    """Run jobs until stdin ends."""
    for name in LOADED:
        _import_where_it_exists(name)
    gc.freeze()  # what is loaded is shared with the children and never collected
    _end_with(os.getppid())
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _run_and_exit(job)
        _, status, usage = os.wait4(child, 0)
        status_line = {"status": status, "cpu_s": usage.ru_utime + usage.ru_stime}
        sys.stdout.write(json.dumps(status_line) + "\n")
        sys.stdout.flush()


def _end_with(starter: int) -> None:
    """End this process and the jobs of its session once whoever started it has gone.

    A closed stdin is only seen between two jobs; timers are not inherited by the jobs.
    """

    def look(_number: int, _stack: object) -> None:
        if os.getppid() != starter:
            os.killpg(0, signal.SIGKILL)

    if os.getsid(0) == os.getpid():
        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, WATCH_INTERVAL_S, WATCH_INTERVAL_S)


def run_job(job: Job) -> dict[str, Any]:
    """Plan one scenario; a refused input is returned as an error."""
    own_errors = _own_errors()
    try:
        return {"plan": plan_of(job)}
    except own_errors as error:
        return {"error": " ".join(str(error).split())}
    except ImportError as error:
        return {"error": f"this version of moetune lacks what the scenario needs: {error}"}
    except MemoryError:
        return {"error": "planning ran out of the memory that --memory-limit allows"}


def plan_of(job: Job) -> dict[str, Any]:
    """Return the plan of a job as `plan.json` would hold it, its paths relative to the spec."""
    spec, profiles = Path(job["spec"]), tuple(Path(profile) for profile in job["profiles"])
    os.chdir(spec.parent)
    spec = Path(spec.name)
    options: dict[str, Any] = {"profiles": profiles, "time_limit_s": float(job["time_limit_s"])}
    planner = getattr(import_module("tuner.api"), "plan", None)
    if planner is None:
        raise ImportError("tuner.api.plan")
    if "with_unlaunchable" in signature(planner).parameters:
        options["with_unlaunchable"] = False  # not compared: PRUNED of tuner/regress/baseline.py
    made = planner(spec, **options)
    values: dict[str, Any] = made.plan.model_dump(mode="json")
    return values


def _own_errors() -> tuple[type[Exception], ...]:
    names = (
        ("tuner.errors", "TunerError"),
        ("solvers.errors", "SolverError"),
        ("profilers.errors", "ProfilerError"),
    )
    errors: list[type[Exception]] = [getattr(import_module(at), name) for at, name in names]
    return tuple(errors)


def _run_and_exit(job: Job) -> None:
    """End this process whatever happens; a defect leaves its traceback on stderr and no reply."""
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # solvers may print; the line above is the worker's own
        limit = int(job["memory_limit_bytes"])
        if limit:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        text = json.dumps(run_job(job))
        Path(job["reply"]).write_text(text, encoding="utf-8")
        code = 0
    finally:
        if code:
            kind, error, trace = sys.exc_info()
            sys.excepthook(kind, error, trace)  # type: ignore[arg-type]  # inside an exception
            words = " ".join(str(error).split())[:LONGEST_ERROR]
            sys.stderr.write(f"{getattr(kind, '__name__', kind)}: {words}\n")
        sys.stderr.flush()
        os._exit(code)


def _import_where_it_exists(name: str) -> None:
    try:
        import_module(name)
    except ImportError:
        sys.stderr.write(f"{name} cannot be imported\n")  # the job that needs it reports why


if __name__ == "__main__":
    main()
