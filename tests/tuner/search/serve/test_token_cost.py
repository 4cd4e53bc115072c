"""Cost of a million tokens: sums to the cost of all devices, and falls to the roles that work."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.expect import present
from tests.printed import words_of
from tests.tuner.models import MODELS
from tests.tuner.search.serve.testing import demand, iteration, serving_pool
from tuner.config.serve import Role
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.goals.serve_plan import deploy
from tuner.report.serve_page import serve_report
from tuner.search.serve.mixed_batches import prompt_time, split_iteration
from tuner.search.serve.options import Option, price_options, step_seconds
from tuner.search.serve.token_cost import prompt_ratio

PRICES = {"h100": 3.0, "h20": 1.5}
SPEC = f"""
schema_version: 1
model: {MODELS / "mixtral-8x7b"}
cluster:
  currency: EUR
  pools:
    - {{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8, price_per_device_hour: 3.0}}
    - {{name: h20, device: h20, nodes: 1, devices_per_node: 8, price_per_device_hour: 1.5}}
  links: [{{between: [h100, h20], bandwidth: 400Gbit/s, latency: 10us}}]
goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{rate: 10/s, input_tokens: 2000, output_tokens: 300}}
  slo: {{ttft: {{p90: 1s}}, tpot: {{p90: 50ms}}}}
  modes: [aggregated, disaggregated]
  objective: cost
"""


@pytest.fixture
def aggregated() -> Option:
    found = price_options(
        (serving_pool(per_node=4, nodes=1),),
        decoder=iteration().decoder,
        formats=iteration().formats,
        traits=ENGINE_TRAITS["vllm"],
        demand=demand(),
        roles=(Role.AGGREGATED,),
    )
    return found.options[0]


def test_what_all_tokens_cost_is_what_all_devices_cost(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    plan = deploy(path, time_limit_s=20.0).plan
    solutions = [(plan.decision, plan.predicted)]
    solutions += [(other.decision, other.predicted) for other in plan.alternatives]
    assert {decision.mode for decision, _ in solutions if decision} == {
        "aggregated",
        "disaggregated",
    }
    for decision, predicted in solutions:
        assert decision is not None
        assert predicted is not None
        cost, per_hour = present(predicted.token_cost), present(predicted.cost_per_hour)
        assert cost.currency == "EUR"
        of_prompts = present(predicted.input_tokens_per_s) * cost.input_per_million
        of_answers = predicted.output_tokens_per_s * cost.output_per_million
        assert (of_prompts + of_answers) * 3600.0 / 1e6 == pytest.approx(per_hour)
        assert of_prompts * 3600.0 / 1e6 == pytest.approx(cost.input_ratio * per_hour)
        if decision.mode == "disaggregated":
            prefill = sum(
                group.count * group.devices * PRICES[group.pool]
                for group in decision.instances
                if group.role is Role.PREFILL
            )
            assert cost.input_ratio == pytest.approx(prefill / per_hour)
        assert re.search(r"cost per million input tokens [\d.,]+ EUR", words_of(serve_report(plan)))


def test_an_aggregated_instance_is_split_by_the_seconds_of_prompts_and_outputs(
    aggregated: Option,
) -> None:
    asked = demand()
    own = aggregated.iteration
    prompt_s = prompt_time(own, asked, step_tokens=aggregated.step_tokens).busy_s
    step_s = float(step_seconds(own, np.array([float(aggregated.running)]), asked)[0])
    answer_s = 400 * step_s / aggregated.running
    found = prompt_ratio(aggregated, asked, threshold=None)
    assert found == pytest.approx(prompt_s / (prompt_s + answer_s))
    assert prompt_ratio(replace(aggregated, role=Role.PREFILL), asked, threshold=None) == 1.0
    assert prompt_ratio(replace(aggregated, role=Role.DECODE), asked, threshold=None) == 0.0
    cached = prompt_ratio(aggregated, demand(prefix_hit=0.9), threshold=None)
    # Not a tenth: a step of 200 tokens reads the same weights as one of 2,000.
    assert 0.1 * found < cached < 0.7 * found


def test_shares_of_a_device_weigh_what_runs_on_them(aggregated: Option) -> None:
    asked, share = demand(), 0.25
    shared = replace(aggregated, prefill_share_ratio=share)
    reading, writing = split_iteration(
        shared.iteration, share, asked, step_tokens=shared.step_tokens
    )
    prompt_s = prompt_time(reading, asked, step_tokens=shared.step_tokens).busy_s
    step_s = float(step_seconds(writing, np.array([float(shared.running)]), asked)[0])
    expected = 0.25 * prompt_s / (0.25 * prompt_s + 0.75 * (400 * step_s / shared.running))
    assert prompt_ratio(shared, asked, threshold=None) == pytest.approx(expected)
