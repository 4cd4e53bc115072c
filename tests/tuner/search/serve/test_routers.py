"""The router as part of the decision: which policy, how many kinds, which prefixes are found."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import yaml

from tests.expect import present
from tests.printed import words_of
from tests.tuner import serve_specs
from tests.tuner.models import MODELS
from tests.tuner.search.serve.testing import problem_of
from tests.tuner.serve_specs import H100
from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.catalog.serve_rules.routers import router_stacks
from tuner.config.serve import Role
from tuner.engines.serve_writers import emit_serving
from tuner.engines.serving.releases import engine_manifest, releases_by_pool
from tuner.plans.serve import ServePlan, VerifiedServing
from tuner.report.serve_page import serve_report
from tuner.search.serve import options
from tuner.search.serve import routed_simulation as playing_routed
from tuner.search.serve.degrees import instance_degrees
from tuner.search.serve.demand import build_demand
from tuner.search.serve.modes.disaggregated import has_choice, simulate_disaggregated_mode
from tuner.search.serve.problem import ModeSolution, ServeProblem, restrict_problem
from tuner.search.serve.routed_simulation import simulate_routed_mode
from tuner.search.serve.routers import (
    loses_prefixes,
    missing_ranks,
    router_choices,
    stated_hits,
    to_serve_router,
)
from tuner.search.serve.simulation import InstanceGroup, sample_rank_requests
from tuner.search.serve.solve_mode import solve_with_remaining_hits, solve_with_router
from tuner.spec.cluster import Pool
from tuner.spec.serving.goal import Engine, EngineName, Mode, ServeGoal
from tuner.spec.serving.routers import RouterPolicy

H20 = "{name: h20, device: h20, nodes: 1, devices_per_node: 8, price_per_device_hour: 1.5}"
TWO_POOLS = f"{H100}, {H20}"


def planned(
    folder: Path,
    *,
    pools: str = H100,
    engine: str = "vllm",
    emit: str = "",
    rate: float = 20,
    rest: str = "",
) -> ServePlan:
    return serve_specs.planned(
        folder,
        pools=pools,
        engine=engine,
        traffic=f"{{rate: {rate}/s, arrival: {{kind: gamma, cv: 1.5}}, input_tokens: 2000,"
        f" output_tokens: 400{rest}}}",
        slo="{ttft: {p90: 1s}, tpot: {p90: 40ms}}",
        extra="objective: cost\n  modes: [aggregated]",
        emit=emit,
    )


def goal_of(engine: str, **traffic: object) -> ServeGoal:
    return ServeGoal.model_validate(
        {
            "kind": "serve",
            "engine": {"name": engine},
            "traffic": {"rate": 1.0, "input_tokens": 100, "output_tokens": 10} | traffic,
        }
    )


def releases_of(goal: ServeGoal, *pools: Pool) -> Collection[ServingCapabilities]:
    """Return the releases on pools; of none, the goal's engine on NVIDIA devices."""
    return releases_by_pool(goal, pools).values() or (engine_manifest(goal.engine),)


CHOICES: list[tuple[str, tuple[str, ...], Mode, float, tuple[str, str, str | None]]] = [
    ("vllm", ("vllm",), "aggregated", 0.0, ("least_requests", "weighted_least_requests", None)),
    ("vllm", ("vllm", "dynamo"), "aggregated", 0.0, ("least_requests", "least_requests", None)),
    (
        "sglang",
        ("slurm",),
        "disaggregated",
        0.0,
        ("least_requests", "least_requests", "least_requests"),
    ),
    # The gateway's one threshold is the prefill's; SGLang's two choices are picked at random.
    ("sglang", (), "disaggregated", 0.5, ("cache_aware", "cache_aware", "round_robin")),
    ("vllm", (), "disaggregated", 0.5, ("cache_aware", "cache_aware", "power_of_two")),
    ("vllm", ("dynamo",), "disaggregated", 0.5, ("cache_aware", "cache_aware", "cache_aware")),
    ("trtllm", (), "aggregated", 0.5, ("least_requests", "weighted_least_requests", None)),
]


def test_policies_are_those_that_every_named_stack_has() -> None:
    for engine, targets, mode, hit, (policy, mixed, decode) in CHOICES:
        goal = goal_of(engine, prefix_hit=hit)
        *_, chosen = router_choices(
            goal, targets, is_disaggregated=mode == "disaggregated", releases=releases_of(goal)
        )
        found = (chosen.policy, chosen.mixed_policy, chosen.decode_policy)
        assert found == (policy, mixed, decode), (engine, targets, mode)
        assert loses_prefixes(
            goal, targets, is_disaggregated=mode == "disaggregated", releases=releases_of(goal)
        ) == (engine == "trtllm")
        assert chosen.has_sessions == (policy == "cache_aware")
    common = goal_of("vllm", prefix_hit=0.5, prefix_scope="common")
    assert (
        router_choices(common, (), is_disaggregated=False, releases=releases_of(common))[0].policy
        is RouterPolicy.ROUND_ROBIN
    )


def test_prefixes_are_routed_to_ranks_where_the_release_reaches_them() -> None:
    for engine, targets, mode, expected, is_one_count in (
        ("vllm", ("vllm",), "aggregated", True, True),
        # Its router counts the engines of prefill and decode instances itself.
        ("vllm", ("slurm",), "disaggregated", True, False),
        ("vllm", ("dynamo",), "aggregated", True, False),
        ("vllm", ("vllm", "dynamo"), "aggregated", True, True),
        # sglang-router's option counts on a size that the release states as 1.
        ("sglang", ("sglang",), "aggregated", False, False),
        ("sglang", ("sglang",), "disaggregated", False, False),
        ("sglang", ("dynamo",), "aggregated", True, False),
        ("sglang", ("kubernetes", "dynamo"), "aggregated", False, False),
        ("trtllm", ("trtllm",), "aggregated", False, False),
        ("trtllm", ("trtllm",), "disaggregated", False, False),
    ):
        goal = goal_of(engine, prefix_hit=0.85)
        for choice in router_choices(
            goal, targets, is_disaggregated=mode == "disaggregated", releases=releases_of(goal)
        ):
            assert choice.to_ranks is expected, (engine, targets, mode)
            assert (choice.to_ranks and choice.is_one_count) is is_one_count, (engine, targets)
        role = Role.PREFILL if mode == "disaggregated" else Role.AGGREGATED
        left = stated_hits(goal, targets, releases=releases_of(goal))
        if expected or engine == "trtllm":  # Its instances look for prefixes on their ranks.
            assert left is None or left(role, 24) is None
            continue
        assert left is not None
        found = present(left(role, 24))
        # One of 24 caches has the prefix of a session.
        assert found.ratio == pytest.approx(0.85 / 24)
        assert found.request_ratio == pytest.approx(1 / 24)
        assert left(role, 1) is None
        common = goal_of(engine, prefix_hit=0.85, prefix_scope="common")
        assert stated_hits(common, targets, releases=releases_of(common)) is None
        assert not any(
            one.to_ranks
            for one in router_choices(
                common,
                targets,
                is_disaggregated=mode == "disaggregated",
                releases=releases_of(common),
            )
        )
    assert "rank 0" in missing_ranks(("sglang",), releases=releases_of(goal_of("sglang")))
    assert not missing_ranks(("vllm",), releases=releases_of(goal_of("vllm")))


def test_a_rank_without_the_prefix_computes_the_whole_prompt() -> None:
    goal = goal_of("sglang", prefix_hit=0.75, input_tokens=1000)
    demand = replace(
        build_demand(goal, longest=4096),
        hits_by_ranks=stated_hits(goal, ("sglang",), releases=releases_of(goal)),
    ).on(Role.AGGREGATED, ranks=4)
    assert demand.computed_tokens == pytest.approx(1000 * (1.0 - 0.75 / 4))
    drawn = sample_rank_requests(goal, demand, count=400, every=1, most_tokens=1e6)
    # A quarter finds three quarters of its prompt, the others nothing.
    assert set(present(drawn.cached_R).tolist()) == {0, 750}
    assert float((present(drawn.cached_R) > 0).mean()) == pytest.approx(0.25, abs=0.06)


def test_a_plan_counts_on_one_in_so_many_hits_where_nothing_routes_to_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = instance_degrees

    def of_ranks(engine: str, ranks: int) -> ServePlan:
        monkeypatch.setattr(
            options,
            "instance_degrees",
            lambda *of, **more: (one for one in every(*of, **more) if one.attention_data == ranks),
        )
        return planned(tmp_path, engine=engine, emit=engine, rate=30, rest=", prefix_hit: 0.85")

    whole, split = of_ranks("vllm", 4), of_ranks("sglang", 4)
    narrow, own = of_ranks("sglang", 1), of_ranks("trtllm", 4)
    # No router finds the instance, but the instance finds the rank.
    of_own = 0.85 / sum(group.count for group in present(own.decision).instances)
    for plan, ranks, hit in (
        (whole, 4, 0.85),
        (split, 4, 0.85 / 4),
        (narrow, 1, 0.85),
        (own, 4, of_own),
    ):
        hits = present(present(plan.predicted).prefix_hits)
        assert {group.attention_dp for group in present(plan.decision).instances} == {ranks}
        assert hits.ranks == ranks * hits.instances
        assert hits.ratio == pytest.approx(hit)
    predicted = present(own.predicted)
    assert present(predicted.prefix_hits).ratio_band == pytest.approx((of_own / 4, of_own))
    verified = VerifiedServing(plan=own, decision=present(own.decision), predicted=predicted)
    files = emit_serving("trtllm", verified)
    (text,) = (file.text for file in files if file.path.name == "aggregated.yaml")
    assert yaml.safe_load(text)["attention_dp_config"]["enable_kv_cache_aware_routing"] is True
    assert present(present(whole.decision).router).ranks == 4
    assert present(present(whole.predicted).prefix_hits).ratio_band == pytest.approx(
        (0.85 / 4, 0.85)
    )
    text = words_of(serve_report(whole))
    hits = present(present(whole.predicted).prefix_hits)
    assert (
        f"router by prefix, to {hits.ranks} ranks (85.0 % of prompt tokens found; 21.2 % if to"
        f" {hits.instances} instance{'s' * (hits.instances > 1)})"
    ) in text
    (note,) = (one for one in split.provenance.notes if "counted on in prefix caches" in one)
    assert note.startswith("21 %")
    assert "gives them requests in turn" in note
    assert "rank 0" in note
    # Both sides of the choice are in the search: a wide instance costs what it computes.
    assert present(split.certificate.objective) > present(whole.certificate.objective)


def test_a_policy_is_one_of_the_routers_of_every_engine_of_the_pools() -> None:
    pools = tuple(
        Pool(name=name, device="h100-sxm", nodes=1, devices_per_node=8) for name in ("a", "b")
    )
    engines = {"b": {"name": "sglang"}}
    goal = goal_of("vllm").model_copy(
        update={"engines": {name: Engine.model_validate(one) for name, one in engines.items()}}
    )
    hits = goal.model_copy(update={"traffic": goal.traffic.model_copy(update={"prefix_hit": 0.5})})
    vllm = goal_of("vllm", prefix_hit=0.5)
    (_, alone) = router_choices(
        hits, (), is_disaggregated=True, releases=releases_of(hits, *pools[:1])
    )
    (_, both) = router_choices(hits, (), is_disaggregated=True, releases=releases_of(hits, *pools))
    assert alone.decode_policy is RouterPolicy.POWER_OF_TWO
    # SGLang's gateway has no two choices.
    assert both.decode_policy is RouterPolicy.ROUND_ROBIN
    assert both.holds_prefill
    # Prefill and decode of vLLM on Ascend are paired by a proxy that knows load alone.
    ascend = pools[0].model_copy(update={"device": "ascend-910b"})
    for own in ((ascend,), (pools[0], ascend)):
        (_, choice) = router_choices(
            vllm, (), is_disaggregated=True, releases=releases_of(vllm, *own)
        )
        found = {choice.policy, choice.mixed_policy, choice.decode_policy}
        assert found == {RouterPolicy.LEAST_REQUESTS}
        assert loses_prefixes(vllm, (), is_disaggregated=True, releases=releases_of(vllm, *own))
        assert not loses_prefixes(
            vllm, (), is_disaggregated=False, releases=releases_of(vllm, *own)
        )


def test_every_stack_serves_in_turn_and_by_load() -> None:
    for engine in get_args(EngineName):
        for targets in ((engine,), ("dynamo",), ("kubernetes", "dynamo")):
            for stack in router_stacks((engine_manifest(Engine(name=engine)).routers,), targets):
                for is_disaggregated in (False, True):
                    known = {
                        p for one in stack for p in one.policies(is_disaggregated=is_disaggregated)
                    }
                    assert {RouterPolicy.ROUND_ROBIN, RouterPolicy.LEAST_REQUESTS} <= known


def test_a_role_of_one_instance_is_given_no_choice() -> None:
    goal = goal_of("vllm", prefix_hit=0.2)
    (_, choice) = router_choices(goal, (), is_disaggregated=True, releases=releases_of(goal))
    assert to_serve_router(choice, goal, [(Role.PREFILL, 1), (Role.DECODE, 1)]) is None
    some = present(to_serve_router(choice, goal, [(Role.PREFILL, 1), (Role.DECODE, 2)]))
    assert some.policy is RouterPolicy.ROUND_ROBIN
    assert some.decode_policy is RouterPolicy.POWER_OF_TWO
    assert some.cache_threshold is None
    both = present(
        to_serve_router(choice, goal, [(Role.PREFILL, 2), (Role.PREFILL, 1), (Role.DECODE, 1)])
    )
    # Half of the prefix, which is less than the router's own three tenths of a prompt.
    assert (both.policy, both.cache_threshold) == (RouterPolicy.CACHE_AWARE, 0.1)
    assert both.decode_policy is RouterPolicy.ROUND_ROBIN
    # Nor is there one in islands of one instance a role each.
    one, three = [(Role.PREFILL, 1), (Role.DECODE, 1)], [(Role.PREFILL, 1), (Role.DECODE, 3)]
    assert to_serve_router(choice, goal, one, one) is None
    assert to_serve_router(choice, goal, one, three) == some


def test_two_kinds_cost_less_than_one_where_the_router_has_weights(tmp_path: Path) -> None:
    by_load = planned(tmp_path, pools=TWO_POOLS, emit="vllm", rate=22.5)
    assert len(present(by_load.decision).instances) == 2
    assert present(present(by_load.decision).router).policy is RouterPolicy.WEIGHTED_LEAST_REQUESTS
    assert present(by_load.predicted).ttft_s.p90 <= 1.0
    assert present(by_load.predicted).tpot_s.p90 <= 0.04
    assert "up to 3 kinds" in by_load.certificate.covers
    # Dynamo's frontend has no weights: one kind, and the plan says what these would save.
    without = planned(tmp_path, pools=TWO_POOLS, emit="dynamo", rate=22.5)
    assert without.decision is not None
    saved = 1.0 - present(by_load.certificate.objective) / present(without.certificate.objective)
    assert saved > 0.1
    (named,) = (one for one in without.unlaunchable if "router with weights" in one.feature)
    assert named.gain_ratio == pytest.approx(saved)
    assert "dynamo 1.6.1 has no weighted_least_requests" in named.feature


def test_a_router_without_prefixes_finds_one_in_so_many(tmp_path: Path) -> None:
    # nginx before TensorRT-LLM: a session's prefix lies on one instance of n.
    alone, shared = (
        planned(tmp_path, engine="trtllm", rate=32, rest=f", prefix_hit: 0.8{scope}")
        for scope in ("", ", prefix_scope: common")
    )
    kept = planned(tmp_path, engine="sglang", rate=32, rest=", prefix_hit: 0.8")
    count = sum(group.count for group in present(alone.decision).instances)
    assert count > 1
    (note,) = (one for one in alone.provenance.notes if "counted on in prefix caches" in one)
    assert float(note.partition("%")[0]) / 100.0 <= 0.8 / count + 0.005
    assert present(alone.certificate.objective) >= present(shared.certificate.objective)
    assert not any("counted on in prefix" in one for one in shared.provenance.notes)
    router = present(kept.decision).router
    if sum(group.count for group in present(kept.decision).instances) > 1:
        assert present(router).policy is RouterPolicy.CACHE_AWARE


def test_instances_that_were_left_out_stay_so_where_lost_prefixes_are_priced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.format(rate=60).replace("name: vllm", "name: trtllm"))
    path.write_text(path.read_text().replace("{rate:", "{prefix_hit: 0.5, rate:"))

    def of_four(problem: ServeProblem) -> ServeProblem:
        kept = tuple(one for one in problem.options.options if one.devices == 4)
        return replace(problem, options=replace(problem.options, options=kept))

    asked: list[tuple[float, set[int]]] = []

    def answered(problem: ServeProblem) -> ModeSolution | None:
        devices = {one.devices for one in problem.options.options}
        asked.append((problem.spec.goal.traffic.prefix_hit, devices))
        router = router_choices(
            problem.spec.goal, (), is_disaggregated=False, releases=problem.spec.releases.values()
        )[0]
        return solve_with_router(problem, "aggregated", router, None)

    problem = restrict_problem(problem_of(path), of_four)
    assert solve_with_remaining_hits(problem, "aggregated", answered) is not None
    hits = [hit for hit, _ in asked]
    assert hits[0] == 0.5
    assert len(hits) > 1
    assert max(hits[1:]) < 0.5
    assert [devices for _, devices in asked] == [{4}] * len(asked)


def test_one_prefill_and_one_decode_instance_need_no_router_to_be_simulated(
    tmp_path: Path,
) -> None:
    # Both simulations of the same two instances agree, so that a second instance starts no jump.

    planned(tmp_path)
    path = tmp_path / "spec.yaml"
    path.write_text(path.read_text().replace("[aggregated]", "[disaggregated]"))
    problem = problem_of(path)
    (router, _) = router_choices(
        problem.spec.goal, (), is_disaggregated=True, releases=problem.spec.releases.values()
    )
    pairs = []
    for role in (Role.PREFILL, Role.DECODE):
        own = [
            one
            for one in problem.options.options
            if one.role is role
            and one.serving_pool.pool.name == "h100"
            and one.degrees.attention_data == 1
        ]
        pairs.append(InstanceGroup(option=max(own, key=lambda one: one.rate_per_s), count=1))
    assert not has_choice(pairs)
    demand = problem.demand
    single = simulate_disaggregated_mode(
        *pairs, kv_transfers=problem.kv_transfers, goal=problem.spec.goal, demand=demand
    )
    routed = simulate_routed_mode(
        pairs,
        router=router,
        kv_transfers=problem.kv_transfers,
        goal=problem.spec.goal,
        demand=demand,
    )
    for one_s, other_s in (
        (single.ttft_s_R, routed.ttft_s_R),
        (single.tpot_s_R, routed.tpot_s_R),
    ):
        assert float(np.mean(other_s)) == pytest.approx(float(np.mean(one_s)), rel=0.03)


def test_a_large_deployment_is_simulated_as_a_share_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spec.yaml"
    found = []
    for count, rate, most_requests in ((16, 100, 20_000), (64, 400, 20_000), (24, 150, 1600)):
        monkeypatch.setattr(playing_routed, "MOST_REQUESTS", most_requests)
        path.write_text(SPEC.format(rate=rate))
        problem = problem_of(path)
        (_, router) = router_choices(
            problem.spec.goal, (), is_disaggregated=False, releases=problem.spec.releases.values()
        )
        options = (one for one in problem.options.options if one.degrees.attention_data == 1)
        option = max(options, key=lambda one: one.rate_per_s / one.devices)
        simulated = simulate_routed_mode(
            [InstanceGroup(option=option, count=count)],
            router=router,
            kv_transfers=problem.kv_transfers,
            goal=problem.spec.goal,
            demand=problem.demand,
        )
        found.append(
            (len(simulated.ttft_s_R), float(simulated.ttft_s_R.mean()), simulated.requests_per_s)
        )
    # 64 ranks are two shares of 32; both have as many requests a rank, and wait about as long.
    # Where 24 ranks would have more requests than are simulated, a third of them has enough.
    assert [requests for requests, _, _ in found] == [16 * 200, 32 * 200, 8 * 200]
    assert found[1][1] == pytest.approx(found[0][1], rel=0.1)
    assert found[1][2] == 400.0


SPEC = f"""
schema_version: 1
model: {MODELS / "mixtral-8x7b"}
cluster: {{{{pools: [{{{{name: h100, device: h100-sxm, nodes: 64, devices_per_node: 8}}}}]}}}}
goal:
  kind: serve
  engine: {{{{name: vllm}}}}
  traffic: {{{{rate: {{rate}}/s, input_tokens: 2000, output_tokens: 300}}}}
  slo: {{{{ttft: {{{{p90: 1s}}}}, tpot: {{{{p90: 40ms}}}}}}}}
  objective: devices
  modes: [aggregated]
"""
