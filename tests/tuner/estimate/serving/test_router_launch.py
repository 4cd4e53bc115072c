"""Routers of launches that others wrote."""

import pytest

from tuner.errors import SpecError
from tuner.estimate.serving.router_launch import read_router


def test_routers_of_others_are_named_with_their_policies() -> None:
    for text, said in (
        ("python -m sglang_router.launch_router --worker-urls http://a:1", "cache_aware"),
        ("smg launch --policy random --worker-urls http://a:1 http://b:1", "random"),
        ("vllm-router --policy=power_of_two --worker-urls http://a:1", "power_of_two"),
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
        ("trtllm-serve disaggregated -c config.yaml", "round_robin"),
    ):
        found = read_router(text, source="the command")
        assert found is not None, text
        assert str(found).partition(" by ")[2] == said, text
    for text in ("vllm serve m", "# vllm-router --policy random", "command -v vllm-router", ""):
        assert read_router(text, source="the command") is None, text


def test_a_policy_that_a_router_lacks_is_named() -> None:
    for text, said in (
        ("vllm-router --policy fastest", "vllm-router 0.1.17 has no policy 'fastest'; there are"),
        ("vllm-router --cache-threshold 7", "--cache-threshold '7' is no share of 0 to 1"),
        ("vllm-router --policy random & vllm-router --policy random", "starts 2 servers"),
        ("dynamo.frontend --router-mode", "--router-mode has no value"),
    ):
        with pytest.raises(SpecError, match=said) as caught:
            read_router(text, source="the command")
        assert "\n" not in str(caught.value)
