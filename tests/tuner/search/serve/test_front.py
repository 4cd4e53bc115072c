"""The front of throughput a device against speed a user: nothing priced beats it."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.tuner.search.serve.testing import demand, iteration, problem_of, serving_pool
from tuner.config.serve import Role
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.plans.serve import FrontPoint
from tuner.search.serve.front import MOST_POINTS, Offer, offer_of, pareto_front
from tuner.search.serve.options import Option, price_options
from tuner.search.serve.plan_serve import solve_modes

EXAMPLES = Path(__file__).parents[4] / "examples"
SPEC = f"""
schema_version: 1
model: {EXAMPLES / "models" / "mixtral-8x7b"}
cluster:
  pools: [{{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8}}]
goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{rate: 10/s, input_tokens: 2000, output_tokens: 300}}
  slo: {{ttft: {{p90: 1s}}, tpot: {{p90: 20ms}}}}
  modes: [aggregated, disaggregated]
"""


@pytest.fixture
def ways() -> tuple[Option, ...]:
    """Ways to read prompts and to answer on 8 devices."""
    return price_options(
        (serving_pool(nodes=1),),
        decoder=iteration().decoder,
        formats=iteration().formats,
        traits=ENGINE_TRAITS["vllm"],
        demand=demand(),
        roles=(Role.PREFILL, Role.DECODE),
    ).options


def test_no_priced_option_beats_a_point_and_every_option_is_at_or_below_the_front(
    tmp_path: Path,
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    problem = problem_of(path)
    solutions = solve_modes(problem)
    front = pareto_front(problem, solutions, most_points=100_000)
    for mode in ("aggregated", "disaggregated"):
        own = [point for point in front if point.mode == mode]
        assert own
        assert not _beaten(own)
        assert any(point.within_targets for point in own)
        assert all(point.within_targets == (point.tokens_per_s_per_user >= 50.0) for point in own)
    joint = [point for point in front if point.on_joint_front]
    assert joint
    assert not _beaten(joint)
    aggregated = [point for point in front if point.mode == "aggregated"]
    above = [
        (user, device)
        for curve in problem.options.curves
        if curve.option.role is Role.AGGREGATED
        for offer in [offer_of(curve, None, problem.demand)]
        for user, device in zip(offer.user_N, offer.device_N, strict=True)
        if not any(
            point.tokens_per_s_per_user >= user and point.tokens_per_s_per_device >= device
            for point in aggregated
        )
    ]
    assert above == []
    shown = pareto_front(problem, solutions)
    assert 0 < len(shown) <= 2 * MOST_POINTS
    assert set(shown) <= set(front)
    assert {shown[0], shown[-1]} == {front[0], front[-1]}


def _beaten(points: list[FrontPoint]) -> list[tuple[FrontPoint, FrontPoint]]:
    return [
        (one, other)
        for one, other in product(points, points)
        if one is not other
        and other.tokens_per_s_per_user >= one.tokens_per_s_per_user
        and other.tokens_per_s_per_device >= one.tokens_per_s_per_device
    ]


def test_curves_hold_what_options_were_chosen_from() -> None:
    found = price_options(
        (serving_pool(nodes=1),),
        decoder=iteration().decoder,
        formats=iteration().formats,
        traits=ENGINE_TRAITS["vllm"],
        demand=demand(slo={"tpot": {"p90": 0.03}}),
        roles=(Role.AGGREGATED, Role.DECODE),
    )
    assert found.curves
    slowest = 0.0
    for curve in found.curves:
        tpot_s = np.interp(curve.option.running, curve.running_N, np.minimum(curve.tpot_s_N, 1e6))
        assert curve.option.tpot_s == pytest.approx(float(tpot_s))
        slowest = max(slowest, float(curve.tpot_s_N[-1]))
    # Batches that miss the target are priced anyway, and so are on the chart.
    assert slowest > 0.03


def test_prefill_is_counted_in_as_many_instances_as_keep_the_others_busy(
    ways: tuple[Option, ...],
) -> None:
    prefill = next(one for one in ways if one.role is Role.PREFILL and one.devices == 1)
    decode = next(one for one in ways if one.role is Role.DECODE and one.devices == 2)
    prefill = replace(prefill, rate_per_s=4.0)
    offer = Offer(
        option=decode,
        prefill=prefill,
        running_N=np.array([1.0, 8.0, 64.0, 100.0]),
        tpot_s_N=np.array([0.01, 0.02, 0.04, 0.05]),
        rate_N=np.array([1.0, 8.0, 24.0, 32.0]),
        output_tokens=100.0,
    )
    # 8 devices. 1/s: three decode instances of 2 leave room for one of prefill, which four could
    # share, so each has 1 / 3 of it: 100 / (2 + 1 / 3). 8/s: 2 of prefill for each, 800 / 4.
    # 24/s: 6 of prefill and 2 devices fill the pool. 32/s: 8 and 2 are more than it has.
    assert offer.prefill_N == pytest.approx([1.0 / 3.0, 2.0, 6.0, np.inf])
    assert offer.device_N == pytest.approx([300.0 / 7.0, 200.0, 300.0, 0.0])
    assert offer.user_N == pytest.approx([100.0, 50.0, 25.0, 20.0])


def test_batches_that_never_last_are_left_out() -> None:
    # vLLM's largest step is 16384 tokens: n (8000 / 64 + 1) of them, so that 130 last.
    asked = demand(input_tokens=8000, output_tokens=64)
    curves = price_options(
        (serving_pool(nodes=1),),
        decoder=iteration().decoder,
        formats=iteration().formats,
        traits=ENGINE_TRAITS["vllm"],
        demand=asked,
        roles=(Role.AGGREGATED,),
    ).curves
    assert curves
    for curve in curves:
        offer = offer_of(curve, None, asked)
        assert offer.running_N.max() <= 131
        assert np.isfinite(offer.tpot_s_N).all()
