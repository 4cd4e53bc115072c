"""Routers of launches that others wrote."""

import time

import pytest

from tuner.errors import SpecError
from tuner.estimate.serving.router_launch import read_router

UNKNOWN = "a policy that is not known here"
FILES = {
    "router.yaml": "context_servers:\n  num_instances: 1\n  router: {type: 'load_balancing'}\n"
    "generation_servers:\n  num_instances: 1\n"
}


def test_routers_of_others_are_named_with_their_policies() -> None:
    for text, said in (
        ("python -m sglang_router.launch_router --worker-urls http://a:1", "cache_aware"),
        ("smg launch --policy random --worker-urls http://a:1 http://b:1", "random"),
        ("vllm-router --policy=power_of_two --worker-urls http://a:1", "power_of_two"),
        ("uv run vllm-router --policy random", "random"),
        ("vllm-router --cache-threshold 1.0 --worker-urls http://a:1", "least_requests"),
        (
            "python3 -m sglang_router.launch_router --pd-disaggregation --prefill http://a:1 8998"
            " --decode http://b:1 --prefill-policy cache_aware --decode-policy round_robin",
            "cache_aware, round_robin for decode",
        ),
        ("python -m dynamo.frontend --router-mode kv --http-port 8000", "cache_aware"),
        ("python -m dynamo.frontend", "round_robin"),
        ("upstream llm {\n  least_conn;\n  server a:1;\n  server b:1;\n}", "least_requests"),
        (
            "upstream llm {\n  least_conn;\n  server a:1 weight=3;\n  server b:1 weight=1;\n}",
            "weighted_least_requests",
        ),
        ("upstream llm {\n  server a:1;\n}", "round_robin"),
        ("upstream llm {\n  random  two;\n  server a:1;\n}", "power_of_two"),
        ("upstream llm {\n  ip_hash;\n  server a:1;\n}", UNKNOWN),
        ("upstream a {\n server a:1;\n}\nupstream b {\n least_conn;\n server b:1;\n}", UNKNOWN),
        ("export DYN_ROUTER_MODE=kv\npython -m dynamo.frontend", "cache_aware"),
        ("trtllm-serve disaggregated -c config.yaml", UNKNOWN),
        ("trtllm-serve disaggregated -c router.yaml", "least_requests, round_robin for decode"),
        (
            "if ! command -v vllm-router; then pip install vllm-router; fi\n"
            "vllm-router --policy random",
            "random",
        ),
    ):
        result = read_router(text, source="the command", beside=FILES.get)
        assert result is not None, text
        assert str(result).partition(" by ")[2] == said, text
    for text in (
        "vllm serve m",
        "# vllm-router --policy random",
        "command -v vllm-router",
        "pip install vllm-router==0.1.17",
        "uv pip install vllm-router",
        "pkill -f vllm-router",
        "cp load_balance_proxy_server_example.py /tmp",
        "",
    ):
        assert read_router(text, source="the command") is None, text


def test_routing_to_ranks_is_read_where_the_release_does_it() -> None:
    for text, finds, ranks in (
        ("vllm-router --worker-urls http://a:1 --intra-node-data-parallel-size 8", True, 8),
        ("vllm-router --worker-urls http://a:1 --intra-node-data-parallel-size 1", False, None),
        ("vllm-router --worker-urls http://a:1", False, None),
        ("vllm-router --intra-node-data-parallel-size 8 --policy round_robin", False, 8),
        (
            "vllm-router --vllm-pd-disaggregation --prefill http://a:1 --decode http://b:1",
            True,
            None,
        ),
        ("python -m dynamo.frontend --router-mode kv", True, None),
        ("python -m dynamo.frontend", False, None),
        ("python -m sglang_router.launch_router --dp-aware --worker-urls http://a:1", False, None),
        ("upstream llm {\n  server a:1;\n}", False, None),
    ):
        result = read_router(text, source="the command")
        assert result is not None, text
        assert result.router is not None, text
        assert (result.finds_ranks, result.router.ranks) == (finds, ranks), text
        assert bool(result.cautions(8)) == ("--dp-aware" in text), text
        assert bool(result.cautions(4)) == ("--dp-aware" in text or ranks is not None), text
    with pytest.raises(SpecError, match="intra-node-data-parallel-size 0") as caught:
        read_router("vllm-router --intra-node-data-parallel-size 0", source="the command")
    assert "\n" not in str(caught.value)


def test_a_policy_that_a_router_lacks_is_named() -> None:
    for text, said in (
        ("vllm-router --policy fastest", "policy 'fastest' of vllm-router is not modelled; those"),
        ("vllm-router --cache-threshold 7", "--cache-threshold 7 is outside 0..1"),
        ("vllm-router --policy random & vllm-router --policy round_robin", "starts 2 servers"),
        ("dynamo.frontend --router-mode", "--router-mode has no value"),
    ):
        with pytest.raises(SpecError, match=said) as caught:
            read_router(text, source="the command")
        assert "\n" not in str(caught.value)


def test_long_runs_of_spaces_are_read_in_no_time() -> None:
    for text in (
        "context_servers:" + " " * 150_000 + "router:" + " " * 150_000,
        "upstream" + " " * 150_000 + "{",
        "\n" * 150_000 + "vllm-router",
    ):
        started_s = time.process_time()
        read_router(text, source="it")
        assert time.process_time() - started_s < 5.0
