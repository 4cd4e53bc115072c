"""The definition, worked by hand."""

import pytest

from solvers.layout import check
from solvers.layout.problem import Layout
from tests.solvers.layout.testing import two_stages

# Stage 0: both layers of run 0 and one of run 1, lean; stage 1: one layer of run 1, fast.
GOOD = Layout(layers_SR=((2, 1), (0, 1)), option_S=(1, 0))


def test_times_and_bytes_follow_the_definition() -> None:
    problem = two_stages()
    # T_0 = 0.5 + 2 * 2 + 1 * 5 = 9.5, T_1 = 0.25 + 3 = 3.25
    assert check.stage_time_s_S(problem, GOOD) == (9.5, 3.25)
    assert check.device_time_s_D(problem, GOOD) == (9.5, 3.25)
    # 9.5 + 3.25 + (3 - 1) * 9.5
    assert check.objective(problem, GOOD) == pytest.approx(31.75)
    # device 0: 5 + 2 * 10 + 20 static, 2 in flight * (3 + 2 * 1 + 2), largest transient 9
    # device 1: 7 + 20 static, 1 in flight * 16, no transient
    assert check.memory_bytes_D(problem, GOOD) == (45 + 14 + 9, 27 + 16)
    assert check.violations(problem, GOOD) == ()


def test_stages_of_one_device_share_time_and_memory() -> None:
    problem = two_stages(device_of_stage=(0, 0), memory_limit_bytes_D=[111])
    # D_0 = 12.75; v = 2 and one device, so there is no bubble: 3 * 12.75
    assert check.objective(problem, GOOD) == pytest.approx(38.25)
    # held: 59 of stage 0 and 43 of stage 1; the transients of the two never meet: max(9, 0)
    assert check.memory_bytes_D(problem, GOOD) == (59 + 43 + 9,)
    assert check.violations(problem, GOOD) == ()


def test_equal_interleaved_stages_give_the_published_bubble() -> None:
    problem = two_stages(
        run_lengths=(4,),
        device_of_stage=(0, 1, 0, 1),
        options=("only",),
        time_s_RO=[[1.0]],
        fixed_time_s_S=[0.0] * 4,
        static_bytes_R=[0],
        fixed_bytes_S=[0] * 4,
        saved_bytes_RO=[[0]],
        fixed_saved_bytes_S=[0] * 4,
        transient_bytes_RO=[[0]],
        in_flight_S=(1,) * 4,
        num_microbatches=8,
    )
    layout = Layout(layers_SR=((1,),) * 4, option_S=(0,) * 4)
    # (m + (p - 1) / v) * D = (8 + 1 / 2) * 2
    assert check.objective(problem, layout) == pytest.approx(17.0)


def test_every_broken_rule_is_named_with_its_numbers() -> None:
    for layers_SR, option_S, complaint in (
        (((2, 1), (0, 0)), (1, 0), "run 1 has 2 layers, 1 are placed"),
        (((1, 1), (1, 1)), (1, 1), "stage 1 holds run 0 after run 1 began on stage 0"),
        (((0, 2), (2, 0)), (1, 1), "stage 1 holds run 0 after run 1 began on stage 0"),
        # 5 + 2 * 10 + 2 * 20 static, 2 in flight * (3 + 2 * 8 + 2 * 16)
        (((2, 2), (0, 0)), (0, 0), "device 0 needs 167 bytes, its limit is 100"),
        (((2, 2),), (0,), "1 stages with 1 options, the pipeline has 2 stages"),
        (((2, 1), (0,)), (0, 0), "stage 1 counts 1 runs, the model has 2"),
        (((3, 1), (-1, 1)), (0, 0), "stage 1 holds a negative number of layers: (-1, 1)"),
        (((2, 1), (0, 1)), (0, 2), "stage 1 has option 2, there are 2"),
    ):
        assert complaint in check.violations(
            two_stages(), Layout(layers_SR=layers_SR, option_S=option_S)
        )


def test_the_optional_rules_are_checked_where_they_are_set() -> None:
    assert check.violations(two_stages(uniform_option=True), GOOD) == (
        "options (1, 0) differ, one option must hold for every stage",
    )
    assert check.violations(two_stages(fixed_layout=(2, 2)), GOOD) == (
        "stage 0 holds 3 layers, fixed at 2",
        "stage 1 holds 1 layers, fixed at 2",
    )
    assert "stage 1 holds 0 layers, at least 1" in check.violations(
        two_stages(min_layers_per_stage=1), Layout(layers_SR=((2, 2), (0, 0)), option_S=(1, 1))
    )
