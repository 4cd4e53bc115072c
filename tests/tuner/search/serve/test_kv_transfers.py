"""Handovers of whole deployments: what meets, what moves, what a refusal costs."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.expect import present
from tests.tuner.search.serve.testing import problem_of
from tests.tuner.serve_specs import plan_of, serve_spec
from tuner.config.serve import Role
from tuner.costs.serve.kv_transfer import KV_TRANSFER_LATENCY_S, NIC_RATIO
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine
from tuner.search.serve.assumptions import plan_assumptions
from tuner.search.serve.choices import usual_choices
from tuner.search.serve.options import Option, ServingPool
from tuner.search.serve.problem import ServeProblem
from tuner.search.serve.program import build_kv_routes
from tuner.spec.accounting import state_bytes_per_sequence
from tuner.spec.cluster import Pool
from tuner.units import format_bytes

H20 = "{name: h20, device: h20, nodes: 1, devices_per_node: 8, price_per_device_hour: 1.0}"
B200 = "{name: b200, device: b200-sxm, nodes: 1, devices_per_node: 8, price_per_device_hour: 5.0}"
AMD = "{name: amd, device: mi300x, nodes: 1, devices_per_node: 8, price_per_device_hour: 1.0}"
LINK = "{{between: [{0}, {1}], bandwidth: 400Gbit/s, latency: 10us}}"


def spec_of(folder: Path, *, engines: str = "{}", **fields: str) -> Path:
    spec = {
        "pools": f"{H20}, {B200}",
        "links": LINK.format("h20", "b200"),
        "traffic": "{rate: 20/s, input_tokens: 4000, output_tokens: 400}",
        "slo": "{ttft: {p90: 400ms}, tpot: {p90: 30ms}}",
        "extra": f"engines: {engines}\n  modes: [disaggregated]\n  objective: cost",
    }
    return serve_spec(folder, **(spec | fields))


def serving_pool(pool: Pool) -> ServingPool:
    sheet = find_device(pool.device or "")
    return ServingPool(
        pool=pool,
        machine=ServingMachine(engines=ENGINE_TRAITS, sheet=sheet, tables=None),
        memory_bytes=float(sheet.memory_bytes),
        source="datasheet",
    )


def option(problem: ServeProblem, role: Role, pool: str, *, tensor: int) -> Option:
    return next(
        one
        for one in problem.options.options
        if (one.role, one.serving_pool.pool.name, one.degrees.attention_tensor)
        == (role, pool, tensor)
    )


def test_bytes_and_seconds_are_those_of_the_pair(tmp_path: Path) -> None:
    problem = problem_of(spec_of(tmp_path))
    own = problem.kv_transfers
    # Mixtral keeps 32 layers x 2 x 8 heads x 128 x 2 bytes a token; 4000 tokens.
    whole = 32 * 2 * 8 * 128 * 2 * 4000
    sender = option(problem, Role.PREFILL, "b200", tensor=1)
    receiver = option(problem, Role.DECODE, "h20", tensor=1)
    assert own.moved(sender, receiver).whole == whole
    pair = (sender, receiver)
    cards = [NIC_RATIO * one.serving_pool.machine.sheet.scale_out_bytes_per_s for one in pair]
    assert own.seconds(sender, receiver) == pytest.approx(
        KV_TRANSFER_LATENCY_S + 10e-6 + whole / min(*cards, 400e9 / 8)
    )
    # Split over two ranks at each end of one pool, each card carries half.
    roles = (Role.PREFILL, Role.DECODE)
    moving = []
    for tensor in (1, 2):
        ends = [option(problem, role, "b200", tensor=tensor) for role in roles]
        moving.append(own.seconds(*ends) - KV_TRANSFER_LATENCY_S)
    assert moving[0] == pytest.approx(whole / cards[0])
    assert moving[0] == pytest.approx(2.0 * moving[1])


def test_states_are_sent_as_the_release_of_their_own_pool_keeps_them(tmp_path: Path) -> None:
    problem = problem_of(
        spec_of(tmp_path, model="qwen3-next-80b-a3b", engines="{h20: {name: sglang}}")
    )
    moved = [
        problem.kv_transfers.moved(
            *(option(problem, role, pool, tensor=2) for role in (Role.PREFILL, Role.DECODE))
        ).whole
        for pool in ("h20", "b200")
    ]
    # SGLang keeps states in fp32, vLLM those of this model in bf16.
    states = [
        state_bytes_per_sequence(problem.spec.model, state_bytes=element) for element in (4.0, 2.0)
    ]
    assert moved[0] - moved[1] == pytest.approx(states[0] - states[1])
    notes = list(
        plan_assumptions(problem.spec, problem.demand, usual_choices(ENGINE_TRAITS["vllm"]))
    )
    for size, words in zip(states, (("fp32", "sglang"), ("bf16", "vllm")), strict=True):
        assert any(all(word in note for word in (format_bytes(size), *words)) for note in notes)


def test_copies_of_a_latent_count_on_the_link(tmp_path: Path) -> None:
    problem = problem_of(spec_of(tmp_path, model="deepseek-v2-lite"))
    sender = option(problem, Role.PREFILL, "h20", tensor=1)
    single, double = (
        problem.kv_transfers.moved(sender, option(problem, Role.DECODE, "h20", tensor=tensor))
        for tensor in (1, 2)
    )
    assert double.whole == 2.0 * single.whole
    assert double.received == single.received


def test_unlike_vendors_pass_through_host_memory_where_the_engine_can(tmp_path: Path) -> None:
    problem = problem_of(
        spec_of(tmp_path, pools=f"{AMD}, {B200}", links=LINK.format("amd", "b200"))
    )
    sender = option(problem, Role.PREFILL, "b200", tensor=1)
    receiver = option(problem, Role.DECODE, "amd", tensor=1)
    assert len(problem.kv_transfers.path(sender, receiver).rates) == 3
    assert problem.kv_transfers.path_kind(receiver.serving_pool, receiver.serving_pool) == "device"
    assert problem.kv_transfers.refusals(sender, receiver) == ()
    like = option(problem, Role.PREFILL, "amd", tensor=2)
    assert problem.kv_transfers.refusals(like, receiver) == ()


def test_pools_whose_pages_differ_are_given_a_size_that_both_take(tmp_path: Path) -> None:
    # SGLang's pages hold 64 tokens on Blackwell and 1 on Hopper.
    joined = plan_of(spec_of(tmp_path, engine="sglang"))
    assert [(way.from_pool, way.to_pool) for way in present(joined.decision).handovers] == [
        ("b200", "h20")
    ]
    (page,) = {group.page_size for group in present(joined.decision).instances}
    assert page is not None


def test_pages_that_differ_keep_instances_unconnected(tmp_path: Path) -> None:
    problem = problem_of(spec_of(tmp_path, engine="sglang"))
    sender = option(problem, Role.PREFILL, "b200", tensor=1)
    receiver = option(problem, Role.DECODE, "h20", tensor=1)
    assert problem.kv_transfers.refusals(sender, receiver) == ()
    own = tuple(replace(one, page_tokens=None) for one in (sender, receiver))
    (line,) = problem.kv_transfers.refusals(*own)
    assert "page sizes 64 (prefill) and 1" in line


def test_pages_of_prefill_that_divide_those_of_decode_may_meet(tmp_path: Path) -> None:
    # vLLM's latent pages: 16 tokens on Hopper, 32 on Blackwell.
    problem = problem_of(spec_of(tmp_path, model="deepseek-v2-lite"))
    ends = {
        (role, pool): replace(option(problem, role, pool, tensor=1), page_tokens=None)
        for role in (Role.PREFILL, Role.DECODE)
        for pool in ("h20", "b200")
    }
    refusals = problem.kv_transfers.refusals
    assert refusals(ends[Role.PREFILL, "h20"], ends[Role.DECODE, "b200"]) == ()
    (line,) = refusals(ends[Role.PREFILL, "b200"], ends[Role.DECODE, "h20"])
    assert "prefill's must divide decode's" in line


def test_tensor_degrees_that_a_release_refuses_to_pair_are_groups_of_their_own(
    tmp_path: Path,
) -> None:
    # Qwen3-235B has 4 key-value heads; vLLM's NIXL refuses a wider prefill beyond them.
    problem = problem_of(spec_of(tmp_path, pools=B200, links="", model="qwen3-235b-a22b"))
    wide, half = (option(problem, Role.PREFILL, "b200", tensor=tensor) for tensor in (8, 4))
    receiver = option(problem, Role.DECODE, "b200", tensor=4)
    (line,) = problem.kv_transfers.refusals(wide, receiver)
    assert "4 key-value heads" in line
    options = tuple(one for one in problem.options.options if one.role is not Role.AGGREGATED)
    ways = build_kv_routes(options, problem.kv_transfers, problem.serving_pools)
    ends = {(route.sender, route.receiver) for route in ways.routes}
    assert (ways.group(half), ways.group(receiver)) in ends
    assert (ways.group(wide), ways.group(receiver)) not in ends
    free = replace(problem.kv_transfers, refuses=False)
    every = build_kv_routes(options, free, problem.serving_pools)
    assert (every.group(wide), every.group(receiver)) in {
        (route.sender, route.receiver) for route in every.routes
    }


def test_degrees_that_hand_over_alike_are_one_group(tmp_path: Path) -> None:
    problem = problem_of(spec_of(tmp_path, pools=B200, links=""))
    ways = build_kv_routes(problem.options.options, problem.kv_transfers, problem.serving_pools)
    assert [group.name for group in ways.groups] == [
        "prefill@b200/tp1-2-4-8",
        "decode@b200/tp1-2-4-8",
    ]


def test_a_pair_that_the_connector_refuses_is_named_where_it_would_save(tmp_path: Path) -> None:
    # Prefill on 8 tensor ranks is quick enough, but vLLM's NIXL refuses it beside decode on 4.
    pool = "{name: h100, device: h100-sxm, nodes: 4, devices_per_node: 8}"
    path = spec_of(tmp_path, pools=pool, links="", model="qwen3-235b-a22b")
    goal = (
        path.read_text()
        .replace(
            "rate: 20/s, input_tokens: 4000, output_tokens: 400",
            "rate: 2/s, input_tokens: 8000, output_tokens: 100",
        )
        .replace("objective: cost", "objective: devices\n  quantization: fp8")
    )
    path.write_text(goal)
    plan = plan_of(path)
    (named,) = plan.unlaunchable
    assert "h100 to h100: tensor degrees 8 (prefill) and 4 (decode)" in named.feature
    assert f"20 devices, the chosen one takes {present(plan.decision).num_devices}" in named.feature
    assert named.gain_ratio == pytest.approx(1.0 - 20 / present(plan.decision).num_devices)
