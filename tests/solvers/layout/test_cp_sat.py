import signal
import threading

import numpy as np
import pytest

from solvers.layout import cp_sat
from solvers.layout.testing import interleaved_problem, tiny_problem
from solvers.registry import solve_layout


def test_an_interrupt_stops_the_search_and_is_raised() -> None:
    searching_thread = threading.get_ident()
    interrupt = threading.Timer(0.5, signal.pthread_kill, (searching_thread, signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        cp_sat.solve(interleaved_problem(), time_limit_s=250.0)
    interrupt.join()
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


def test_one_thread_gives_the_same_layout_every_time() -> None:
    problem = tiny_problem(np.random.default_rng(11))
    first, second = (
        solve_layout(problem, method="cp_sat", time_limit_s=60.0).solution for _ in range(2)
    )
    assert first == second
