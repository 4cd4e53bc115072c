import signal
import threading
from concurrent.futures import Future

import pytest
from ortools.sat.python import cp_model

from solvers.layout import cp_sat
from solvers.registry import LAYOUT
from solvers.result import Status
from tests.solvers.layout.testing import interleaved_problem, two_stages


def test_an_interrupt_stops_the_search_and_is_raised() -> None:
    interrupt = threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))

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


@pytest.mark.parametrize(("spare_bytes", "step_s"), [(0, 2.0), (-1, 11.0)])
def test_one_byte_too_many_is_seen(spare_bytes: int, step_s: float) -> None:
    # Two stages of one device, two layers of 1 s and 5 GB, or of 10 s and nothing: both fast take
    # 10 GB and 2 s.
    problem = two_stages(
        run_lengths=(2,),
        device_of_stage=(0, 0),
        time_s_RO=[[1.0, 10.0]],
        fixed_time_s_S=[0.0, 0.0],
        static_bytes_R=[0],
        fixed_bytes_S=[0, 0],
        saved_bytes_RO=[[5_000_000_000, 0]],
        fixed_saved_bytes_S=[0, 0],
        transient_bytes_RO=[[0, 0]],
        in_flight_S=(1, 1),
        memory_limit_bytes_D=[10_000_000_000 + spare_bytes],
        num_microbatches=1,
        min_layers_per_stage=1,
    )
    outcome = LAYOUT.solve(problem, time_limit_s=60.0)
    assert outcome.status is Status.OPTIMAL
    assert outcome.objective == pytest.approx(step_s)
