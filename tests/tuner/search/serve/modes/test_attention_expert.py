"""Cells that the plugin launches: which are tried, what refuses them, and the plan they become."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.tuner.models import MODELS, example_model
from tests.tuner.search.serve.testing import FORMATS, demand, problem_of, serving_pool
from tests.tuner.serve_specs import planned, serve_spec
from tuner.config.serve import Role
from tuner.costs.serve.decoder import Decoder, decoder_of
from tuner.costs.serve.remote_ffn import RemoteFfnIteration, ffn_bytes
from tuner.engines.serve_writers import emit_all_serving, unlaunchable
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.goals.serve_plan import deploy
from tuner.plans.serve import ServePlan, VerifiedServing
from tuner.search.serve.causes import explain_no_solution
from tuner.search.serve.certificate import to_space
from tuner.search.serve.demand import Demand
from tuner.search.serve.instances import to_instances
from tuner.search.serve.modes.attention_expert import BUDGET, price_afd_options, sides_of
from tuner.search.serve.options import Option, Options, ServingPool
from tuner.search.serve.problem import ServeProblem
from tuner.spec.cluster import Pool


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return decoder_of(example_model("qwen3-30b-a3b"))


def _priced(
    serving_pool: ServingPool, decoder: Decoder, demand: Demand, refuse: Callable[[Option], str]
) -> Options:
    return price_afd_options(
        (serving_pool,),
        decoder=decoder,
        formats=FORMATS,
        traits=ENGINE_TRAITS["vllm"],
        demand=demand,
        loads=None,
        page_by_pool={},
        refuse=refuse,
    )


def _more_ffn(option: Option) -> str:
    attention, expert = to_instances(option, count=1)
    return "more experts" if attention.devices < expert.devices else ""


def test_every_pair_of_sides_fits_the_pool_and_divides_the_experts(decoder: Decoder) -> None:
    pool = Pool(name="small", device="h100-sxm", nodes=2, devices_per_node=8)
    found = list(sides_of(pool, decoder))
    assert len(set(found)) == len(found)
    for own, ffn in found:
        assert own.devices + ffn.devices <= pool.num_devices
        assert 128 % ffn.devices == 0
        assert own.expert == own.moe_tensor == 1
        # Tensor ranks of an FFN server get the same tokens only where both sides are alike.
        alike = (own.attention_tensor, own.attention_data) == (
            ffn.attention_tensor,
            ffn.attention_data,
        )
        assert alike or ffn.attention_tensor == own.attention_tensor == 1
    sizes = {(own.devices, ffn.devices) for own, ffn in found}
    assert {(8, 8), (12, 4), (8, 1), (1, 2)} <= sizes
    assert not list(sides_of(pool, decoder_of(example_model("llama-3.1-8b"))))


def test_afd_units_count_both_servers_and_each_fits_its_device(decoder: Decoder) -> None:
    here = serving_pool("h100-sxm", nodes=1)
    found = _priced(here, decoder, demand(slo={"tpot": {"p90": 0.05}}), _more_ffn)
    assert found.options
    assert found.refused_units
    assert found.illegal_by["more experts"] > 0
    for option in (*found.options, *found.refused_units):
        own = option.iteration
        assert isinstance(own, RemoteFfnIteration)
        attention, expert = to_instances(option, count=3)
        assert (attention.role, expert.role) == (Role.ATTENTION, Role.EXPERT)
        assert option.devices == attention.devices + expert.devices
        assert attention.count == expert.count == 3
        assert attention.max_batch == expert.max_batch == option.running <= BUDGET.tokens
        assert option.tpot_s <= 0.05
        held = ffn_bytes(
            own.ffn,
            step_tokens=round(max(own.peers, 1.0) * BUDGET.tokens),
            running=round(max(own.peers, 1.0) * option.running),
        )
        assert held < here.memory_bytes
    assert all(_more_ffn(option) for option in found.refused_units)
    assert not any(_more_ffn(option) for option in found.options)


def _planned(folder: Path, *, model: str = "deepseek-v3", **changes: Any) -> ServePlan:
    values = {
        "quantization": "fp8_block",
        "modes": "attention_expert",
        "nodes": 4,
        "rate": 2,
        "version": "0.30.0+afd",
        "emit": "vllm",
    } | changes
    return planned(
        folder,
        model=model,
        pools=f"{{name: h200, device: h200-sxm, nodes: {values['nodes']}, devices_per_node: 8}}",
        engine=f"vllm, version: {values['version']}",
        traffic=f"{{rate: {values['rate']}/s, input_tokens: 2000, output_tokens: 200}}",
        slo="{ttft: {p90: 3s}, tpot: {p90: 100ms}}",
        extra=f"quantization: {values['quantization']}\n  max_model_len: 8192\n"
        f"  objective: devices\n  modes: [{values['modes']}]",
        emit=str(values["emit"]),
    )


def test_a_plan_of_afd_units_is_launched_and_names_what_a_rule_costs(tmp_path: Path) -> None:
    plan = _planned(tmp_path)
    decision, predicted = present(plan.decision), present(plan.predicted)
    assert [group.role for group in decision.instances] == [
        Role.PREFILL,
        Role.ATTENTION,
        Role.EXPERT,
    ]
    _, attention, expert = decision.instances
    assert attention.devices >= expert.devices
    assert plan.certificate.objective == decision.num_devices
    assert any(name.startswith("expert@h200/") for name in predicted.memory_bytes)
    assert not unlaunchable(
        VerifiedServing(plan=plan, decision=decision, predicted=predicted, waived="test")
    )
    # 256 experts need 8 devices, and so little traffic fewer for attention.
    (costly,) = plan.unlaunchable
    assert "num_ffn_ranks" in costly.feature
    assert f"launched AFD units take {decision.num_devices}" in costly.feature
    assert 0.0 < costly.gain_ratio < 1.0
    assert any("experiment of the engine's plugin" in note for note in plan.provenance.notes)
    assert any("num_ffn_ranks" in reason for reason in plan.certificate.space.illegal_by)


def test_a_model_without_a_wrapper_is_sized_and_refused_by_name(tmp_path: Path) -> None:
    plan = _planned(
        tmp_path,
        model="mixtral-8x7b",
        quantization="fp8",
        nodes=1,
        modes="disaggregated, attention_expert",
    )
    (own,) = (one for one in plan.modes if one.mode == "attention_expert")
    assert own.status == "unlaunchable"
    assert "MixtralForCausalLM" in own.told
    assert present(plan.decision).mode == "disaggregated"


def test_a_release_without_the_plugin_sizes_the_mode_and_names_the_one_with_it(
    tmp_path: Path,
) -> None:
    plan = _planned(tmp_path, version="0.33.0", modes="disaggregated, attention_expert", nodes=8)
    (own,) = (one for one in plan.modes if one.mode == "attention_expert")
    assert own.status == "unlaunchable"
    assert "vllm 0.30.0+afd has it, as an experiment" in own.told


def _problem(folder: Path, *, model: str = "qwen3-30b-a3b", rest: str = "") -> ServeProblem:
    path = serve_spec(
        folder,
        model=model,
        pools=TWO_POOLS,
        links="{between: [a, b], bandwidth: 400Gbit/s, latency: 10us}",
        traffic="{rate: 9000/s, input_tokens: 2000, output_tokens: 200}",
        slo="{ttft: {p90: 3s}, tpot: {p90: 100ms}}",
        extra=f"max_model_len: 8192\n  modes: [disaggregated, attention_expert]\n{rest}",
    )
    return problem_of(path)


TWO_POOLS = ", ".join(
    f"{{name: {name}, device: h200-sxm, nodes: 1, devices_per_node: 8}}" for name in "ab"
)


def test_afd_units_are_priced_by_the_engine_of_their_own_pool(tmp_path: Path) -> None:
    problem = _problem(tmp_path, rest="  engines: {b: {name: sglang}}\n")
    assert {
        (one.serving_pool.pool.name, one.iteration.traits.name)
        for one in problem.own_options["attention_expert"].refused_units
    } == {("a", "vllm"), ("b", "sglang")}
    # No release has the mode: what it refuses is in no space.
    assert to_space(problem, ()).illegal_by == problem.options.illegal_by


def test_traffic_that_no_afd_units_serve_is_told_by_what_the_pools_lack(tmp_path: Path) -> None:
    told = [
        explain_no_solution("attention_expert", _problem(tmp_path, model=model))
        for model in ("qwen3-30b-a3b", "llama-3.1-8b")
    ]
    assert told[0].startswith("devices: 16 serve at most")
    assert told[1] == "the model has no experts"


def test_a_target_that_starts_no_afd_units_leaves_the_mode_out(tmp_path: Path) -> None:
    plan = _planned(
        tmp_path,
        model="qwen3-30b-a3b",
        quantization="bf16",
        nodes=1,
        modes="disaggregated, attention_expert",
        emit="vllm, kubernetes",
    )
    assert present(plan.decision).mode == "disaggregated"
    (own,) = (one for one in plan.modes if one.mode == "attention_expert")
    assert own.status == "unlaunchable"
    assert "emit: kubernetes" in own.told


def test_the_example_is_planned_and_launched() -> None:
    plan = deploy(MODELS.parent / "serving" / "qwen3-attention-ffn.yaml", time_limit_s=20.0).plan
    verified = VerifiedServing(
        plan=plan, decision=present(plan.decision), predicted=present(plan.predicted), waived="test"
    )
    files = emit_all_serving(verified)
    assert list(files) == ["vllm", "local", "slurm"]
    assert {"attention.sh", "expert.sh", "cell.sh"} <= {str(file.path) for file in files["vllm"]}
