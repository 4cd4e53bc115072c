"""KV caches inside machines: which pairs, at which rate, and machines as cells."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.expect import present
from tests.tuner.search.serve.testing import problem_of
from tests.tuner.serve_specs import plan_of, serve_spec
from tuner.config.serve import Role
from tuner.costs.serve.kv_transfer import KV_TRANSFER_LATENCY_S, NIC_RATIO
from tuner.search.serve.kv_routes import build_kv_routes
from tuner.search.serve.most_rate import solve_goal
from tuner.search.serve.options import Option
from tuner.search.serve.solve_mode import (
    ServeProblem,
    goal_spare,
    problem_variants,
    solve_program_of,
)
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
        variant = problem_variants(problem, "disaggregated")[-1]
        assert variant.cell_pool == ("p" if nodes > 1 else "")
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
