"""Emitted scripts estimate to the plan that they were emitted for."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.expect import present
from tests.rows import Failures, each_row
from tests.tuner.engines.serving.testing import (
    aggregated,
    disaggregated,
    sample_serving,
    shared_device,
)
from tests.tuner.estimate.serving.conftest import no_changes
from tuner.config.serve import Role, ServeDecision
from tuner.costs.serve.whole_step import prompt_step_s, step_s
from tuner.engines.reading.serve_launch import ServingLaunch, Surroundings
from tuner.engines.serving.scripts import emit
from tuner.engines.serving.shape import group_shapes
from tuner.estimate.serving.estimate import estimate_serving, pool_named, surroundings
from tuner.estimate.serving.instance import build_inputs, launch_transfers, price_option
from tuner.estimate.serving.records import ServingEstimate
from tuner.estimate.serving.registry import read_serving_text
from tuner.goals.serve_plan import deploy, price_serving_pool
from tuner.goals.serve_spec import read_serve_spec
from tuner.plans.serve import ServePlan, VerifiedServing
from tuner.search.serve.instances import to_instances
from tuner.search.serve.solve_mode import build_serve_problem
from tuner.search.settings import SearchSettings
from tuner.spec.cluster import Pool
from tuner.spec.huggingface.read import read_model
from tuner.spec.serving.spec import ServeSpec

EXAMPLES = Path(__file__).parents[4] / "examples"


def scripts(verified: VerifiedServing) -> dict[str, str]:
    return {str(file.path): file.text for file in emit(verified, None)}


def _beside(texts: dict[str, str], word: str) -> str | None:
    return texts.get(word.rpartition("/")[2])


def predicted(
    spec: ServeSpec, launch: ServingLaunch, pool: Pool, *, instances: int
) -> ServingEstimate:
    return estimate_serving(
        spec,
        launch,
        serving_pool=price_serving_pool(pool, ()),
        instances=instances,
        advise=no_changes,
    )


def as_verified(plan: ServePlan) -> VerifiedServing:
    return VerifiedServing(
        plan=plan,
        decision=present(plan.decision),
        predicted=present(plan.predicted),
        waived="nothing was launched",
    )


@pytest.mark.parametrize(
    "name", ["deepseek-v3-32-h200", pytest.param("mixed-pool", marks=pytest.mark.slow)]
)
def test_scripts_of_examples_have_the_degrees_batch_and_cache_of_their_plan(name: str) -> None:
    path = EXAMPLES / "serving" / f"{name}.yaml"
    verified = as_verified(deploy(path, time_limit_s=20.0).plan)
    spec = read_serve_spec(path)
    texts = scripts(verified)
    for shape in group_shapes(verified):
        pool = pool_named(spec, shape.group.pool)
        launch = read_serving_text(
            texts[f"{shape.name}.sh"],
            surroundings(spec, pool),
            engine=spec.goal.engine.name,
            source=shape.name,
        )
        result = predicted(spec, launch, pool, instances=shape.group.count)
        assert result.instance == shape.group
        assert result.kv_tokens == shape.group.kv_tokens
        assert result.quantization == spec.goal.quantization
        assert not result.refused_by


ONE_GROUP = "modes: [aggregated]\n  objective: devices"
WIDE = {
    "model": "deepseek-v3",
    "engine": "sglang",
    "nodes": 3,
    "traffic": "{rate: 4.9/s, input_tokens: 2000, output_tokens: 1000}",
    "slo": "{ttft: {p90: 5s}, tpot: {p90: 80ms}}",
    "extra": f"{ONE_GROUP}\n  quantization: fp8_block",
}
"""On 24 H100, over which 256 experts are even with eight copies."""
STREAMING = {
    **WIDE,
    "engine": "trtllm",
    "device": "h200-sxm",
    "nodes": 1,
    "traffic": "{rate: 5.8/s, input_tokens: 200, output_tokens: 1000}",
}
"""One process streams the tokens of all attention-data ranks, which decides their TPOT."""


@each_row(
    ("spec_of", "copies"),
    [({"extra": ONE_GROUP}, 0), (STREAMING, 0), (WIDE, 8)],
)
def test_a_plan_of_one_group_is_predicted_as_it_was_planned(
    tmp_path: Path, deployment: Callable[..., object], spec_of: dict[str, object], copies: int
) -> None:
    deployment(**spec_of)
    path = tmp_path / "spec.yaml"
    verified = as_verified(deploy(path, time_limit_s=20.0).plan)
    (shape,) = group_shapes(verified)
    spec = read_serve_spec(path)
    pool = pool_named(spec, None)
    texts = scripts(verified)
    launch = read_serving_text(
        texts[f"{shape.name}.sh"],
        surroundings(spec, pool),
        engine=spec.goal.engine.name,
        source="aggregated.sh",
        beside=partial(_beside, texts),
    )
    assert shape.group.redundant_experts == launch.setting.redundant_experts == copies
    load = present(predicted(spec, launch, pool, instances=shape.group.count).load)
    assert load.ttft_s == verified.predicted.ttft_s
    assert load.tpot_s == verified.predicted.tpot_s
    assert load.keeps_up
    assert not load.missed


def test_stages_that_share_machines_keep_their_path_and_their_steps(
    tmp_path: Path, deployment: Callable[..., object]
) -> None:
    deployment(
        model="llama-3.1-405b",
        engine="sglang",
        nodes=2,
        nics="nics_per_node: 1, nic: 25Gbit/s",
        traffic="{rate: 1/s, input_tokens: 4000, output_tokens: 300}",
        slo="{ttft: {p90: 2.5s}, tpot: {p90: 60ms}}",
        extra="modes: [disaggregated]\n  objective: rate\n  quantization: fp8",
    )
    path = tmp_path / "spec.yaml"
    verified = as_verified(deploy(path, time_limit_s=20.0).plan)
    spec = read_serve_spec(path)
    serving_pool, texts = price_serving_pool(pool_named(spec, None), ()), scripts(verified)
    (transfer,) = verified.decision.handovers
    halves = []
    for shape in group_shapes(verified):
        assert (shape.group.stage_machines, shape.nodes, shape.devices_per_node) == (2, 2, 4)
        launch = read_serving_text(
            texts[f"{shape.name}.sh"],
            surroundings(spec, serving_pool.pool),
            engine="sglang",
            source=shape.name,
        )
        inputs = build_inputs(launch, spec=spec, serving_pool=serving_pool)
        halves.append((inputs, price_option(inputs, launch.setting)))
        assert predicted(spec, launch, serving_pool.pool, instances=1).instance == shape.group
    (inputs, sender), (_, receiver) = halves
    moved = launch_transfers(inputs, (sender, receiver))
    assert moved.seconds(sender, receiver) == pytest.approx(transfer.seconds)
    without = replace(inputs, launch=replace(inputs.launch, environment={}))
    over_nics = launch_transfers(without, (sender, receiver))
    assert over_nics.seconds(sender, receiver) > 20.0 * transfer.seconds


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_options_of_a_search_have_the_price_and_the_cache_of_their_own_launches(
    tmp_path: Path, deployment: Callable[..., object], engine: str, failures: Failures
) -> None:
    goal = {"quantization": "fp8_block", "max_model_len": 8192}
    keys = "".join(f"\n  {key}: {value}" for key, value in goal.items())
    traffic, slo = "{rate: 10/s, input_tokens: 2000, output_tokens: 500}", "{tpot: {p90: 100ms}}"
    deployment(
        model="deepseek-v3",
        engine=engine,
        device="h200-sxm",
        nodes=4,
        traffic=traffic,
        slo=slo,
        extra=f"objective: devices{keys}",
    )
    spec = read_serve_spec(tmp_path / "spec.yaml")
    pool = pool_named(spec, None)
    serving_pool = price_serving_pool(pool, ())
    options = build_serve_problem(spec, (serving_pool,), SearchSettings()).options.options
    by_role = {role: [one for one in options if one.role is role] for role in Role}
    for number in range(4):
        whole, first, last = (
            by_role[role][number * len(by_role[role]) // 4]
            for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE)
        )
        halves = (*to_instances(first, count=1), *to_instances(last, count=1))
        for decision, chosen in (
            (ServeDecision(mode="aggregated", instances=to_instances(whole, count=1)), (whole,)),
            (disaggregated().model_copy(update={"instances": halves}), (first, last)),
        ):
            verified = sample_serving(
                spec.model, decision, engine=engine, goal=goal, devices={"gpus": "h200-sxm"}
            )
            texts = scripts(verified)
            for shape, option in zip(group_shapes(verified), chosen, strict=True):
                launch = read_serving_text(
                    texts[f"{shape.name}.sh"],
                    surroundings(spec, pool),
                    engine=engine,
                    source=shape.name,
                    beside=partial(_beside, texts),
                )
                inputs = build_inputs(launch, spec=spec, serving_pool=serving_pool)
                read = price_option(inputs, launch.setting)
                with failures.of(option.role, option.degrees, option.iteration.a2a_backend):
                    assert launch.setting.running == option.running
                    assert read.kv_tokens == pytest.approx(option.kv_tokens, rel=0.03)
                    own, planned = read.iteration, option.iteration
                    past, sizes = np.full(3, 2250.0), np.array([1.0, 2.0, option.running])
                    if option.role is not Role.PREFILL:
                        seconds = step_s(planned, sizes, past)
                        assert step_s(own, sizes, past) == pytest.approx(seconds)
                    tokens = np.array([100.0, 2000.0, option.step_tokens])
                    if option.role is not Role.DECODE:
                        seconds = prompt_step_s(planned, tokens, past)
                        assert prompt_step_s(own, tokens, past) == pytest.approx(seconds)


DRAFTS = {"draft_tokens": 2, "acceptance": 0.7}
DECISIONS = {
    "one device": aggregated(devices=1, attention_dp=1, ep=1),
    "tensor": aggregated(attention_tp=8, attention_dp=1, moe_tp=8, ep=1),
    "tensor and experts": aggregated(attention_tp=8, attention_dp=1, ep=8),
    "data": aggregated(a2a_backend="allgather"),
    "both": aggregated(attention_tp=2, attention_dp=4, a2a_backend="allgather"),
    "deepep": aggregated(a2a_backend="deepep_normal"),
    "several machines": aggregated(
        devices=16, attention_tp=2, attention_dp=8, ep=16, a2a_backend="allgather"
    ),
    "one rank on several machines": aggregated(devices=16, attention_tp=16, attention_dp=1, ep=16),
    "apart": disaggregated(
        prefill={"a2a_backend": "deepep_normal"}, decode={"a2a_backend": "deepep_low_latency"}
    ),
}


@each_row("engine", ["sglang", "vllm"])
@each_row(
    "decision",
    DECISIONS.values(),
)
def test_every_split_is_read_back_as_it_was_emitted(engine: str, decision: ServeDecision) -> None:
    model = read_model(EXAMPLES / "models" / "deepseek-v3")
    verified = sample_serving(model, decision, engine=engine, goal={"quantization": "fp8_block"})
    texts = scripts(verified)
    for shape in group_shapes(verified):
        launch = read_serving_text(
            texts[f"{shape.name}.sh"],
            Surroundings(model=model, pool=verified.plan.cluster.pools[0]),
            engine=engine,
            source=shape.name,
        )
        group, degrees = shape.group, launch.setting.degrees
        assert launch.role is group.role
        assert degrees.attention_tensor == group.attention_tp
        assert degrees.attention_data == group.attention_dp
        assert (degrees.expert, degrees.moe_tensor) == (group.ep, group.moe_tp)
        assert launch.setting.running == group.max_batch
        assert not launch.flags.ignored
        assert not [note for note in launch.notes if "without graphs" in note]
        assert launch.max_model_len == 8192
        assert launch.kv_cache_dtype == "bf16"
        if group.a2a_backend != "none":
            assert launch.setting.a2a_backend == group.a2a_backend
        if group.role is not Role.DECODE:
            assert launch.setting.step_tokens == group.max_batched_tokens
            assert launch.setting.is_chunked == group.chunked_prefill


VARIED = {
    "drafts": (aggregated(draft_tokens=2), {"speculative": {**DRAFTS, "method": "mtp"}}),
    "a drafting model": (
        aggregated(draft_tokens=2),
        {"speculative": {**DRAFTS, "method": "eagle"}},
    ),
    "halves": (aggregated(a2a_backend="deepep_normal", two_batch_overlap=True), {}),
    "pages": (aggregated(page_size=64), {}),
    "copies": (aggregated(redundant_experts=8), {}),
    "a small cache": (aggregated(), {"kv_cache_dtype": "fp8", "quantization": "fp8_block"}),
}


@each_row("engine", ["sglang", "vllm"])
@each_row(
    ("decision", "goal"),
    VARIED.values(),
)
def test_no_flag_of_an_emitted_script_is_unknown(
    engine: str, decision: ServeDecision, goal: dict[str, object]
) -> None:
    model = read_model(EXAMPLES / "models" / "deepseek-v3")
    verified = sample_serving(model, decision, engine=engine, goal=goal)
    texts = scripts(verified)
    for shape in group_shapes(verified):
        launch = read_serving_text(
            texts[f"{shape.name}.sh"],
            Surroundings(model=model, pool=verified.plan.cluster.pools[0]),
            engine=engine,
            source=shape.name,
        )
        assert not launch.flags.ignored
        assert any(flag.startswith("--port") for flag in launch.flags.timeless)


def test_shared_devices_are_said_to_have_no_price() -> None:
    model = read_model(EXAMPLES / "models" / "qwen3-235b-a22b")
    shared = shared_device()
    verified = sample_serving(model, shared, engine="sglang", goal={"modes": ["shared_device"]})
    (shape,) = group_shapes(verified)
    launch = read_serving_text(
        scripts(verified)[f"{shape.name}.sh"],
        Surroundings(model=model, pool=verified.plan.cluster.pools[0]),
        engine="sglang",
        source=shape.name,
    )
    assert not launch.flags.ignored
    assert "--enable-pdmux" in launch.flags.unpriced
    assert any("without intra-GPU prefill/decode multiplexing" in note for note in launch.notes)
