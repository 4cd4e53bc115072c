"""Thresholds, and instances on both sides of them."""

from pathlib import Path

import numpy as np
import pytest

from tests.expect import present
from tests.tuner.search.serve.testing import problem_of
from tests.tuner.serve_specs import serve_spec
from tuner.config.serve import Role
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.modes.prefill_offload import length_thresholds, offload_options, waits_s
from tuner.search.serve.problem import ServeProblem
from tuner.search.serve.program import Spare, build_program

MODEL = Path(__file__).parents[5] / "examples" / "models" / "mixtral-8x7b"


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> ServeProblem:
    lengths = "{kind: lognormal, mean: 5000, cv: 1.2, most: 30000}, output_tokens: 300"
    return problem_of(
        serve_spec(
            tmp_path_factory.mktemp("offloading"),
            pools="{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8},"
            " {name: h20, device: h20, nodes: 1, devices_per_node: 8}",
            links="{between: [h100, h20], bandwidth: 100Gbit/s, latency: 200us}",
            traffic=f"{{rate: 4/s, prefix_hit: 0.5, input_tokens: {lengths}}}",
            slo="{ttft: {p90: 5s}, tpot: {p90: 50ms}}",
            extra="modes: [prefill_offload]",
        )
    )


def test_thresholds_part_the_tokens_to_compute(problem: ServeProblem) -> None:
    cuts = length_thresholds(problem.spec.goal, problem.demand)
    shares = [threshold.long_share for threshold in cuts]
    assert shares == sorted(shares, reverse=True)
    for threshold in cuts:
        assert 0.0 < threshold.long_share < 1.0
        assert threshold.lengths(is_long=True).min() > threshold.above_tokens
        assert threshold.lengths(is_long=False).max() <= threshold.above_tokens
        # Half of every prompt is found in the cache.
        assert threshold.input_tokens(is_long=True) > 2.0 * threshold.above_tokens
        whole = threshold.long_share * threshold.input_tokens(is_long=True)
        whole += (1.0 - threshold.long_share) * threshold.input_tokens(is_long=False)
        assert whole == pytest.approx(problem.demand.input_tokens, rel=0.1)


def test_more_offloaded_prompts_leave_local_instances_more_requests(problem: ServeProblem) -> None:
    best = []
    for threshold in length_thresholds(problem.spec.goal, problem.demand):
        made = offload_options(problem.options.options, threshold, problem.demand)
        assert {one.role for one in made} == {Role.PREFILL, Role.DECODE}
        best.append(
            (
                max(one.rate_per_s for one in made if one.role is Role.DECODE),
                max(one.rate_per_s for one in made if one.role is Role.PREFILL),
            )
        )
    local, remote = zip(*best, strict=True)
    assert list(local) == sorted(local, reverse=True)
    assert list(remote) == sorted(remote)


def test_caches_go_between_pools_and_only_those_of_long_prompts(problem: ServeProblem) -> None:
    for variant in load_mode("prefill_offload").variants(problem):
        program = present(
            build_program(
                "prefill_offload",
                variant.options.options,
                serving_pools=variant.serving_pools,
                kv_transfers=variant.kv_transfers,
                demand=variant.demand,
                spare=Spare(prefill_ratio=0.0, others_ratio=0.0),
            )
        )
        own = program.problem
        for route in own.routes:
            ends = own.groups[route.sender].name, own.groups[route.receiver].name
            assert ("h100" in ends[0]) != ("h100" in ends[1])
            # Mixtral keeps 131,072 bytes a token.
            tokens = present(variant.threshold).long_share * present(
                variant.threshold
            ).input_tokens(is_long=True)
            assert route.request_bytes == pytest.approx(131_072 * tokens, rel=1e-3)
            assert {own.links[link].name for link in route.links} <= {"h100 to h20", "h20 to h100"}


def test_waits_of_the_remote_side_are_those_of_its_servers() -> None:
    arrival_s_R, seconds_R = np.array([0.0, 0.0, 0.0, 10.0]), np.full(4, 2.0)
    assert waits_s(arrival_s_R, seconds_R, 1).tolist() == [0.0, 2.0, 4.0, 0.0]
    assert waits_s(arrival_s_R, seconds_R, 2).tolist() == [0.0, 0.0, 2.0, 0.0]
