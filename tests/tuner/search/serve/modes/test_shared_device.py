"""Options whose devices prefill and decode share."""

from pathlib import Path

import numpy as np
import pytest

from tests.tuner.search.serve.testing import problem_of
from tests.tuner.serve_specs import serve_spec
from tuner.config.serve import Role
from tuner.search.serve.modes.shared_device import (
    can_share,
    multiplexed_options,
    price_shares,
    sm_shares,
)
from tuner.search.serve.problem import ServeProblem

MODEL = Path(__file__).parents[5] / "examples" / "models" / "qwen3-30b-a3b"


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> ServeProblem:
    return problem_of(
        serve_spec(
            tmp_path_factory.mktemp("sharing"),
            model="qwen3-30b-a3b",
            pools="{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8}",
            engine="sglang",
            traffic="{rate: 5/s, input_tokens: 3000, output_tokens: 300}",
            slo="{ttft: {p90: 1s}, tpot: {p90: 30ms}}",
            extra="modes: [shared_device]",
        )
    )


def test_only_plain_ranks_share(problem: ServeProblem) -> None:
    made = multiplexed_options(problem.options.options, problem.demand)
    assert made
    for option in made:
        assert option.role is Role.AGGREGATED
        assert option.degrees.attention_data == option.degrees.pipeline == 1
        assert option.prefill_share_ratio in sm_shares(option)
    assert any(not can_share(option) for option in problem.options.options)


def test_shares_are_whole_steps_that_leave_both_phases_some(problem: ServeProblem) -> None:
    for ratio in sm_shares(problem.options.options[0]):
        units = ratio * 132
        assert units / 8 == pytest.approx(round(units / 8))
        assert 16 <= units <= 132 - 16


def test_targets_hold_in_the_steady_state(problem: ServeProblem) -> None:
    for option in multiplexed_options(problem.options.options, problem.demand):
        assert option.ttft_s <= problem.demand.ttft_s
        assert option.tpot_s <= problem.demand.tpot_s


def test_a_larger_share_reads_faster_and_writes_slower(problem: ServeProblem) -> None:
    option = next(one for one in problem.options.options if can_share(one))
    running_N = np.array([64.0])
    found = [
        price_shares(
            option.iteration, ratio, running_N, problem.demand, step_tokens=option.step_tokens
        )
        for ratio in (0.3, 0.5, 0.7)
    ]
    prompts = [prompt_s for prompt_s, _ in found]
    steps = [float(step_s_N[0]) for _, step_s_N in found]
    assert prompts == sorted(prompts, reverse=True)
    assert steps == sorted(steps)
