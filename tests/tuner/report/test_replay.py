"""A deployment of the example, played again as it was planned and at other rates."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.expect import present
from tests.rows import each_row
from tuner.config.serve import Island
from tuner.goals.serve_plan import deploy, price_serving_pool
from tuner.plans.serve import Latency, ServePlan
from tuner.report.latency_figures import goodput_figure, latency_figure
from tuner.report.replay import QUANTILES, Replay, replayed
from tuner.search.serve.planned_instances import at_planned_rate
from tuner.spec.serving.goal import Percentiles
from tuner.spec.serving.spec import ServeSpec

SPEC = """
schema_version: 1
model: {model}
cluster:
  pools: [{{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 4}}]
goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {traffic}
  slo: {{ttft: {{p90: 2s}}, tpot: {{p90: 50ms}}}}
  objective: devices
  modes: [aggregated]
emit: []
"""
EXAMPLES = Path(__file__).parents[3] / "examples"


RATE = "{rate: 6/s, input_tokens: 1000, output_tokens: 200}"
CONCURRENCY = "{concurrency: 32, input_tokens: 1000, output_tokens: 200}"
Planned = Callable[[str], tuple[ServePlan, ServeSpec]]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """Plan the example for some traffic, once: planned(RATE)."""

    @cache
    def plan(traffic: str) -> tuple[ServePlan, ServeSpec]:
        path = tmp_path_factory.mktemp("planned") / "spec.yaml"
        model = EXAMPLES / "models" / "qwen3-30b-a3b" / "config.json"
        path.write_text(SPEC.format(model=model, traffic=traffic), encoding="utf-8")
        made = deploy(path, time_limit_s=10.0)
        return made.plan, made.spec

    return plan


def simulated(plan: ServePlan, spec: ServeSpec) -> Replay | None:
    priced_pools = [price_serving_pool(pool, ()) for pool in spec.cluster.pools]
    return replayed(spec, priced_pools, present(plan.decision))


@each_row("traffic", [RATE, CONCURRENCY])
def test_the_planned_traffic_gives_the_plans_own_figures(planned: Planned, traffic: str) -> None:
    plan, spec = planned(traffic)
    replay, predicted = present(simulated(plan, spec)), present(plan.predicted)
    assert replay.is_open == ("rate" in traffic)
    for own, stored in (
        (replay.as_planned.ttft_s, predicted.ttft_s),
        (replay.as_planned.tpot_s, predicted.tpot_s),
    ):
        assert own.model_dump() == pytest.approx(stored.model_dump())
    assert replay.ttft_s[QUANTILES.index(0.9)] == pytest.approx(predicted.ttft_s.p90, rel=0.05)
    assert list(replay.ttft_s) == sorted(replay.ttft_s)
    assert all(one.good_per_s <= one.requests_per_s + 1e-9 for one in replay.rates)


def test_instances_without_a_priced_match_are_not_simulated(planned: Planned) -> None:
    plan, spec = planned(RATE)
    decision = present(plan.decision)
    other = decision.instances[0].model_copy(update={"kv_tokens": 12})
    changed = decision.model_copy(update={"instances": (other,)})
    assert simulated(plan.model_copy(update={"decision": changed}), spec) is None


def test_islands_are_simulated_with_their_shares(planned: Planned) -> None:
    plan, spec = planned(RATE)
    before = present(plan.decision)
    group = before.instances[0]
    own = tuple(group.model_copy(update={"island": name, "count": 1}) for name in ("x", "y"))
    shares = tuple(Island(name=name, share_ratio=0.5) for name in ("x", "y"))
    decision = before.model_copy(update={"instances": own, "islands": shares})
    replay = present(simulated(plan.model_copy(update={"decision": decision}), spec))
    assert replay.as_planned.requests_per_s == pytest.approx(6.0)


def test_the_rate_that_was_found_is_the_planned_one(planned: Planned) -> None:
    plan, spec = planned(RATE)
    traffic = plan.goal.traffic.model_copy(update={"rate": 9.0})
    found = plan.goal.model_copy(update={"objective": "rate", "traffic": traffic})
    assert at_planned_rate(spec, found).goal.traffic.rate == 9.0
    assert at_planned_rate(spec, plan.goal) is spec


def test_a_plan_without_replay_draws_its_quantiles_only() -> None:
    latency = Latency(mean=0.3, p50=0.1, p90=0.6, p99=4.0)
    figure = latency_figure(
        "ttft", latency, (0.2, 0.5), Percentiles(p90=1.0), key="predicted.ttft_s"
    )
    points, mean, target = figure.traces
    assert (points["x"], points["y"]) == ([0.1, 0.6, 4.0], [0.5, 0.9, 0.99])
    assert points["mode"] == "lines+markers"
    assert (mean["x"], mean["error_x"]["array"]) == ([0.3], [pytest.approx(0.2)])
    assert (target["x"], target["y"]) == ([1.0], [0.9])
    assert figure.table.header == ("over requests", "predicted", "target")


def test_goodput_is_drawn_over_the_offered_load(planned: Planned) -> None:
    plan, spec = planned(RATE)
    replay = present(simulated(plan, spec))
    figure = goodput_figure(replay)
    _, good = figure.traces
    assert good["x"] == [one.offered for one in replay.rates]
    assert good["y"] == [one.good_per_s for one in replay.rates]
    assert figure.layout["shapes"][0]["x0"] == 6.0
