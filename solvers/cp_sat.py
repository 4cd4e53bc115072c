"""Runs CP-SAT: its status as ours, and Ctrl-C as an interrupt.

By default CP-SAT treats Ctrl-C as "stop and report", which would hide the interrupt. So it searches
in a thread, and an interrupt of the main thread stops the search and is raised.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

from ortools.sat.python import cp_model

from solvers.errors import BackendFailedError
from solvers.result import Status

STOP_POLL_S: Final = 0.05
SEED: Final = 0

STATUS_OF_CP_SAT: Final[Mapping[int, Status]] = {
    cp_model.OPTIMAL: Status.OPTIMAL,
    cp_model.FEASIBLE: Status.FEASIBLE,
    cp_model.INFEASIBLE: Status.INFEASIBLE,
    cp_model.UNKNOWN: Status.UNKNOWN,
}
"""Status by CP-SAT's; anything else means that the model was refused."""


def run_cp_sat(
    model: cp_model.CpModel,
    *,
    time_limit_s: float,
    threads: int,
    other_method: str | None = None,
    linearization_level: int | None = None,
    presolve: bool = True,
) -> tuple[Status, cp_model.CpSolver]:
    """Search once, from a fixed seed; return the status and the solver, which holds the values.

    Args:
        model: what is solved.
        time_limit_s: for the search.
        threads: of it.
        other_method: of the family, named where CP-SAT refuses the model.
        linearization_level: None: CP-SAT's own.
        presolve: whether the model is simplified first.

    Raises:
        BackendFailedError: CP-SAT refuses the model.
    """
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = threads
    solver.parameters.random_seed = SEED
    solver.parameters.cp_model_presolve = presolve
    if linearization_level is not None:
        solver.parameters.linearization_level = linearization_level
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(max_workers=1) as pool:
        search = pool.submit(solver.solve, model)
        try:
            code = search.result()
        except KeyboardInterrupt:
            # A search that has not begun ignores the first stop: repeat until it ends.
            while wait([search], timeout=STOP_POLL_S).not_done:
                solver.stop_search()
            raise
    status = STATUS_OF_CP_SAT.get(code)
    if status is None:
        advice = f"; choose another method, e.g. {other_method!r}" if other_method else ""
        raise BackendFailedError(f"CP-SAT refused the model ({solver.status_name(code)}){advice}")
    return status, solver
