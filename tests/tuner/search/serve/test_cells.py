"""KV caches inside machines: which pairs, at which rate, and cells of one machine or several."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner.search.serve.testing import problem_of
from tests.tuner.serve_specs import plan_of, serve_spec
from tuner.config.serve import Role
from tuner.costs.serve.kv_transfer import KV_TRANSFER_LATENCY_S, NIC_RATIO
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.most_rate import solve_goal
from tuner.search.serve.options import Option, Options
from tuner.search.serve.problem import ServeProblem
from tuner.search.serve.program import build_kv_routes, serving_instances
from tuner.search.serve.solve_mode import goal_spare, solve_program_of
from tuner.search.serve.to_plan import to_decision

ONE_CARD = "nics_per_node: 1, nic: 25Gbit/s"
Spec = Callable[..., Path]


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    def made(
        *,
        device: str = "h100-sxm",
        nodes: int = 1,
        nics: str = ONE_CARD,
        engine: str = "vllm",
        objective: str = "devices",
        emit: str = "",
        more_pools: str = "",
        **fields: str,
    ) -> Path:
        spec = {
            "model": "llama-3.1-8b",
            "traffic": "{rate: 20/s, input_tokens: 4000, output_tokens: 100}",
            "slo": "{ttft: {p90: 400ms}, tpot: {p90: 50ms}}",
            "extra": f"modes: [disaggregated]\n  objective: {objective}",
        }
        pools = f"{{name: p, device: {device}, nodes: {nodes}, devices_per_node: 8"
        pools += f"{nics and ', '}{nics}}}{more_pools}"
        return serve_spec(
            tmp_path, pools=pools, engine=engine, emit=emit or engine, **(spec | fields)
        )

    return made


def first_pair(problem: ServeProblem) -> tuple[Option, Option]:
    prefill, decode = (
        next(one for one in problem.options.options if one.role is role)
        for role in (Role.PREFILL, Role.DECODE)
    )
    return prefill, decode


def test_one_machine_sends_over_its_links_at_what_the_connector_reaches(spec: Spec) -> None:
    card = NIC_RATIO * 25e9 / 8 / 8
    for changes, wanted in (
        ({}, 48e9),
        ({"engine": "sglang"}, 49e9),
        ({"device": "l40s"}, 32e9),  # a bus, whose copies UCX allows when it is told to
        ({"device": "l40s", "engine": "sglang"}, card),  # Mooncake's is of NVLink
        ({"device": "rtx-4090"}, card),  # its driver copies between no two devices
        ({"device": "mi300x"}, card),
        ({"engine": "trtllm"}, card),
        ({"emit": "vllm, dynamo"}, card),
        ({"nodes": 2}, card),
        ({"nics": f"{ONE_CARD}, scale_up_domain: 4"}, card),
        ({"more_pools": ", {name: q, device: h100-sxm, devices_per_node: 8}"}, card),
    ):
        problem = problem_of(spec(**changes))
        own, pool = problem.kv_transfers, problem.serving_pools[0]
        assert (own.inside_bytes_per_s(pool, pool) or card) == wanted, changes
        pair = first_pair(problem)
        same_pool = {one.serving_pool.pool.name for one in pair} == {"p"}
        if same_pool and own.path_kind(pool, pool) == "device":
            assert own.path(*pair).network_bytes_per_s == pytest.approx(wanted), changes
            moving_s = own.moved(*pair).peak_rank / wanted
            assert own.seconds(*pair) == pytest.approx(KV_TRANSFER_LATENCY_S + moving_s)
        # Half of the devices send.
        routes = build_kv_routes(problem.options.options, own, problem.serving_pools)
        if routes.links:
            devices = pool.pool.num_devices
            assert routes.links[0].bytes_per_s == pytest.approx(0.5 * wanted * devices), changes


def test_machines_with_slow_cards_become_cells(spec: Spec) -> None:
    # One card of 25 Gbit/s moves 2.4 caches of 4000 tokens a second.
    problem = problem_of(
        spec(nodes=3, traffic="{rate: 30/s, input_tokens: 4000, output_tokens: 9}")
    )
    solution = present(solve_goal(problem, "disaggregated"))
    assert not solution.missed
    decision = to_decision(solution, problem)
    assert [one.link for one in decision.handovers] == ["scale_up"]
    assert decision.handovers[0].seconds < 0.06
    cells = solution.solved.program.cells
    assert len(decision.islands) == (cells if cells > 1 else 0)
    of_cell: dict[str, list[int]] = {}
    for group in decision.instances:
        of_cell.setdefault(group.island, []).append(group.count * group.devices)
    assert len(of_cell) == cells <= 3
    assert {sum(devices) <= 8 for devices in of_cell.values()} == {True}
    assert len({tuple(devices) for devices in of_cell.values()}) == 1
    assert solution.objective == solution.devices == decision.num_devices
    assert solution.solved.outcome.bound <= solution.objective
    # With a fast card for each device instances are paired freely.
    free = present(solve_goal(problem_of(spec(nodes=3, nics="")), "disaggregated"))
    assert free.solved.program.cells == 0
    assert free.devices <= solution.devices


def test_cells_serve_as_much_as_so_many_machines(spec: Spec) -> None:
    rates = []
    for nodes in (1, 2, 3):
        problem = problem_of(spec(nodes=nodes, objective="rate"))
        variant = list(load_mode("disaggregated").variants(problem))[-1]
        assert variant.cell_pool == ("p" if nodes > 1 else "")
        assert variant.cell_nodes == 1
        spare = goal_spare(variant)
        solved = present(
            solve_program_of(variant, "disaggregated", spare, islands={}, most_rate=True)
        )
        rates.append(present(solved.outcome.solution).rate_per_s)
        assert solved.outcome.objective == pytest.approx(1.0 / rates[-1])
        assert solved.outcome.bound <= solved.outcome.objective
    assert rates == pytest.approx([rates[0], 2.0 * rates[0], 3.0 * rates[0]])


def test_a_machine_with_one_slow_card_serves_as_with_a_fast_one_for_each(spec: Spec) -> None:
    traffic = "{rate: 2/s, input_tokens: 4000, output_tokens: 1000}"
    slo = "{ttft: {p90: 1s}, tpot: {p90: 50ms}}"
    plan = plan_of(spec(model="llama-3.1-70b", traffic=traffic, slo=slo, objective="rate"))
    assert present(plan.predicted).requests_per_s == pytest.approx(2.56, abs=0.15)
    assert present(plan.decision).handovers[0].seconds < 0.03


def test_a_cache_inside_a_machine_of_a100_takes_milliseconds(spec: Spec) -> None:
    plan = plan_of(
        spec(
            model="llama-3.1-70b",
            device="a100-80gb-sxm",
            traffic="{rate: 2/s, input_tokens: 755, output_tokens: 200}",
            slo="{ttft: {p90: 400ms}, tpot: {p90: 100ms}}",
        )
    )
    (transfer,) = present(plan.decision).handovers
    assert transfer.link == "scale_up"
    assert transfer.seconds - KV_TRANSFER_LATENCY_S < 2e-3


def test_a_release_without_a_path_inside_a_machine_has_cells_of_no_gain(spec: Spec) -> None:
    problem = problem_of(spec(nodes=2, engine="trtllm"))
    packed = replace(problem.kv_transfers, is_packed=True)
    pair = first_pair(problem)
    assert packed.seconds(*pair) == problem.kv_transfers.seconds(*pair)


WHOLE_MACHINE = {
    "model": "llama-3.1-405b",
    "engine": "sglang",
    "objective": "rate",
    "traffic": "{rate: 1/s, input_tokens: 4000, output_tokens: 300}",
    "slo": "{ttft: {p90: 2.5s}, tpot: {p90: 60ms}}",
    "extra": "modes: [disaggregated]\n  objective: rate\n  quantization: fp8",
}
"""A model of which a machine holds the weights once, so that no machine holds both roles."""


def test_roles_that_fill_a_machine_each_share_machines_by_stages(spec: Spec) -> None:
    problem = problem_of(spec(nodes=2, **WHOLE_MACHINE))
    solution = present(solve_goal(problem, "disaggregated"))
    decision = to_decision(solution, problem)
    assert [(one.pp, one.attention_tp, one.stage_machines) for one in decision.instances] == [
        (2, 4, 2)
    ] * 2
    assert [one.link for one in decision.handovers] == ["scale_up"]
    assert decision.handovers[0].seconds < 0.03
    # Over a card of 25 Gbit/s the cache of a prompt takes 0.85 s, a third of the target.
    over_nics = replace(problem, own_options={})
    slow = present(solve_goal(over_nics, "disaggregated"))
    assert to_decision(slow, over_nics).handovers[0].seconds == pytest.approx(0.85, abs=0.01)
    assert slow.rate_per_s == pytest.approx(0.83, abs=0.01)
    assert solution.rate_per_s == pytest.approx(1.09, abs=0.01)
    # Fast cards for all serve no more, without cells.
    fast = present(solve_goal(problem_of(spec(nodes=2, nics="", **WHOLE_MACHINE)), "disaggregated"))
    assert fast.solved.program.cells == 0
    assert fast.rate_per_s == pytest.approx(1.07, abs=0.01)


@each_row(("model", "nodes"), list(product(["llama-3.1-405b", "qwen3-235b-a22b"], [2, 3, 5])))
def test_every_machine_of_a_cell_has_equal_stages_of_both_roles(
    spec: Spec, model: str, nodes: int
) -> None:
    quantization = "fp8" if model.startswith("llama") else "bf16"
    changes = WHOLE_MACHINE | {"model": model}
    changes["extra"] = changes["extra"].replace("fp8", quantization)
    problem = problem_of(spec(nodes=nodes, **changes))
    for option in problem.own_options["disaggregated"].options:
        assert option.degrees.stage_machines == option.degrees.pipeline <= nodes
        assert option.degrees.attention_tensor < 8
        # Hidden states cross the NICs, though the instance would fit on one machine.
        beside = replace(option.iteration, degrees=replace(option.degrees, stage_machines=1))
        apart_s, beside_s = (
            float(one.passed_s(np.array([4000.0]))[0]) for one in (option.iteration, beside)
        )
        assert apart_s > beside_s if option.devices <= 8 else apart_s == beside_s
    variants = [one for one in load_mode("disaggregated").variants(problem) if one.cell_nodes > 1]
    assert {one.cell_nodes for one in variants} <= {2, 4}
    for variant in variants:
        spare = goal_spare(variant)
        solved = solve_program_of(variant, "disaggregated", spare, islands={}, most_rate=True)
        if solved is None:
            continue
        cells = solved.program.cells
        assert cells * variant.cell_nodes <= nodes
        served = list(serving_instances(solved))
        assert {option.degrees.stage_machines for option, _ in served} == {variant.cell_nodes}
        assert len({option.degrees.pipeline for option, _ in served}) == 1
        assert {option.role for option, _ in served} == {Role.PREFILL, Role.DECODE}
        per_machine = sum(count * option.degrees.attention_tensor for option, count in served)
        assert per_machine <= 8


def test_stages_are_spread_where_the_release_and_the_launcher_take_them(spec: Spec) -> None:
    for changes, is_spread in (
        ({}, True),
        ({"engine": "vllm"}, False),  # NIXL takes one stage for decode
        ({"engine": "trtllm"}, False),
        ({"model": "llama-3.1-70b"}, False),  # a machine holds both roles
        ({"nodes": 1}, False),
        ({"extra": "modes: [aggregated]\n  objective: rate\n  quantization: fp8"}, False),
    ):
        problem = problem_of(spec(**{"nodes": 2, **WHOLE_MACHINE, **changes}))
        spread = problem.own_options.get("disaggregated", Options())
        assert bool(spread.options) is is_spread, changes
    problem = problem_of(spec(nodes=2, **WHOLE_MACHINE, emit="sglang, dynamo"))
    assert not [one for one in load_mode("disaggregated").variants(problem) if one.cell_pool]
