import signal
import threading
from concurrent.futures import Future

import numpy as np
import pytest
from ortools.sat.python import cp_model

from solvers.layout import cp_sat
from solvers.registry import LAYOUT
from tests.solvers.layout.testing import interleaved_problem, tiny_problem


def test_an_interrupt_stops_the_search_and_is_raised() -> None:
    searching_thread = threading.get_ident()
    interrupt = threading.Timer(0.5, signal.pthread_kill, (searching_thread, signal.SIGINT))

    def interrupted() -> None:
        interrupt.start()
        cp_sat.solve(interleaved_problem(), time_limit_s=250.0)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    interrupt.join()
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


def test_an_interrupt_that_meets_a_starting_search_stops_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stops: list[bool] = []
    stop_search = cp_model.CpSolver.stop_search

    def first_one_is_lost(solver: cp_model.CpSolver) -> None:
        stops.append(True)
        if len(stops) > 1:
            stop_search(solver)

    def interrupted(_search: Future[object]) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(cp_model.CpSolver, "stop_search", first_one_is_lost)
    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cp_sat.solve(interleaved_problem(), time_limit_s=250.0)
    assert len(stops) > 1


def test_one_thread_gives_the_same_layout_every_time() -> None:
    problem = tiny_problem(np.random.default_rng(11))
    first, second = (
        LAYOUT.solve(problem, method="cp_sat", time_limit_s=60.0).solution for _ in range(2)
    )
    assert first == second
