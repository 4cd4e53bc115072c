"""Timers of logs beside predicted phases."""

import pytest

from tuner.errors import SpecError
from tuner.estimate.rl.timers import compare_timers, read_timers
from tuner.simulate.rl.step import Phases, RlPlacement

VERL = """\
(TaskRunner pid=1) step:1 - actor/pg_loss:0.0 - timing_s/gen:300.0 - timing_s/old_log_prob:9.0 - \
timing_s/ref:8.0 - timing_s/update_actor:40.0 - timing_s/update_weights:5.0 - timing_s/step:370.0
(TaskRunner pid=1) step:2 - timing_s/gen:100.0 - timing_s/old_log_prob:9.5 - timing_s/ref:8.5 - \
timing_s/update_actor:42.0 - timing_s/update_weights:5.5 - timing_s/step:171.0
(TaskRunner pid=1) step:3 - timing_s/gen:110.0 - timing_s/old_log_prob:np.float64(10.5) - \
timing_s/ref:9.5 - timing_s/update_actor:44.0 - timing_s/update_weights:6.5 - timing_s/step:181.0
"""
NEMO_RL = """\
⏱️  Timing:
  • Total step time: 66.55s
  • exposed_generation: 32.52s (48.9%)
  • policy_training: 25.05s (37.6%)
  • policy_and_reference_logprobs: 4.78s (7.2%)
  • weight_sync: 0.13s (0.2%)
"""


def phases(**changed: float) -> Phases:
    seconds = {
        "rollout_s": 60.0,
        "rolled_s": 50.0,
        "forward_s": 20.0,
        "train_s": 40.0,
        "sync_s": 5.0,
        "offload_s": 1.0,
    }
    return Phases(placement=RlPlacement.COLOCATED, versions=0.0, **{**seconds, **changed})


def test_words_that_only_begin_as_numbers_are_none() -> None:
    text = "timing_s/gen:1.2.3 - timing_s/ref:1e999 - timing_s/step:7.0"
    assert read_timers(text, source="run.log") == ({"step": 7.0}, 1)


def test_medians_leave_the_first_step_out() -> None:
    timers, steps = read_timers(VERL, source="run.log")
    assert steps == 3
    assert timers["gen"] == 105.0
    assert timers["old_log_prob"] == 10.0
    assert timers["step"] == 176.0


def test_the_phase_that_is_off_is_named() -> None:
    timers, _ = read_timers(VERL, source="run.log")
    compared = {timer.phase: timer for timer in compare_timers(timers, phases(), factor=1.3)}
    assert {name for name, timer in compared.items() if timer.is_off} == {"rollout", "step"}
    assert compared["rollout"].ratio == pytest.approx(105.0 / 60.0)
    assert compared["forward"].measured_s == pytest.approx(19.0)
    assert compared["forward"].timers == ("old_log_prob", "ref")
    assert compared["switch"].predicted_s == pytest.approx(6.0)


def test_the_console_of_nemo_rl_and_json_are_read() -> None:
    timers, steps = read_timers(NEMO_RL, source="run.log")
    assert steps == 1
    compared = {timer.phase: timer for timer in compare_timers(timers, phases(), factor=1.3)}
    # What training hides of the rollout does not count: 60 s less 20 + 40.
    assert compared["rollout"].predicted_s == 0.0
    assert compared["step"].measured_s == 66.55
    line = '{"timing/train/policy_training": 12.5, "timing/train/total_step_time": 40}'
    assert read_timers(line, source="run.jsonl")[0] == {
        "policy_training": 12.5,
        "total_step_time": 40.0,
    }


def test_a_log_without_timers_is_refused() -> None:
    with pytest.raises(SpecError, match="no phase timers"):
        read_timers("step:1 - actor/loss:0.5\nloss: 2.5s\n", source="run.log")
