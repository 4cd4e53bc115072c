"""What a measured run is compared with."""

import math

import pytest

from tests.tuner.faults.level_table import seconds
from tuner.verify.faults.calibration import Durations
from tuner.verify.faults.comparison import policy_result
from tuner.verify.faults.curve import measure_curve
from tuner.verify.faults.measured import MeasuredRun
from tuner.verify.faults.scenario import FaultKind, Scenario, StatedPolicy


def test_replays_wait_for_writes_as_the_reference_step_does() -> None:
    # Steps of 10 s. The shared copy of step 6 stalls from 62 to 66 s and is durable at 101 s; that
    # of step 8 on hosts is due at 86 s, and its rank waits for the writer (CheckpointStore).
    scenario = Scenario(steps=9, nodes=2, mean_interval=1e9, faults={FaultKind.KILL: 1.0})
    durations = Durations(seconds=seconds(durable_after_s=(0.0, 35.0)), slow_factor=1.0)
    nothing = MeasuredRun(
        wall_s=90.0, training_s=90.0, saving_s=0.0, recovery_s=0.0, restarts=(), steps=()
    )
    result = policy_result(
        StatedPolicy(shared=6, host=2, asynchronous=True),
        nothing,
        scenario=scenario,
        before=durations,
        during=durations,
        done=(),
        windows=(),
        ranks_per_node=1,
        curve=measure_curve(nothing, (), precision="fp32"),
    )
    assert result.replayed.saving_s == pytest.approx(3 * 1.0 + 4.0 + 15.0)
    assert result.expected_wall_s == pytest.approx(90.0 + 22.0)
    # Nothing of it was measured: there is no ratio.
    assert result.replay_error == math.inf
    same = result.model_copy(update={"replayed": result.measured})
    assert same.replay_error == 0.0
