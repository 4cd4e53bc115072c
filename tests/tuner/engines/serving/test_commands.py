"""What each engine is told: the mapping of a decision to its options."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expect import refused
from tests.rows import each_row
from tests.tuner.engines.serving.testing import (
    aggregated,
    disaggregated,
    dynamo_graph,
    routed,
    sample_instances,
    sample_serving,
    shared_device,
)
from tests.tuner.engines.testing import texts_of, write_emitted
from tests.tuner.models import example_model
from tuner.config.serve import Role, ServeDecision
from tuner.engines.serve_writers import emit_all_serving, emit_serving
from tuner.engines.serving.releases import ENGINES
from tuner.engines.sglang.multiplexing import division
from tuner.errors import UnknownTargetError
from tuner.plans.serve import VerifiedServing
from tuner.spec.model import ModelSpec

LOW_LATENCY: dict[str, Any] = {"a2a_backend": "deepep_low_latency", "max_batch": 96}
SPECULATIVE = {
    method: {"speculative": {"method": method, "draft_tokens": 3, "acceptance": 0.8}}
    for method in ("mtp", "eagle")
}
ON_EIGHT: dict[str, Any] = {"devices": 8, "attention_dp": 8, "ep": 8}


@pytest.fixture
def start(deepseek: ModelSpec, launch: Path, programs: Any) -> Any:
    """Run one group's script; return the server's words and its environment."""

    def run(
        engine: str, decision: ServeDecision, name: str, *, goal: Any = None, **environment: str
    ) -> tuple[list[str], dict[str, str]]:
        verified = sample_serving(deepseek, decision, engine=engine, goal=goal)
        write_emitted(launch / engine, emit_serving(engine, verified))
        call = programs.called(str(launch / engine / f"{name}.sh"), cwd=launch, **environment)
        return call["argv"], call["environment"]

    return run


@pytest.fixture
def route(deepseek: ModelSpec, launch: Path, programs: Any) -> Any:
    """Run the router's script; return the words of the only call that it makes."""

    def run(
        engine: str, decision: ServeDecision, urls: dict[str, str]
    ) -> tuple[list[str], VerifiedServing]:
        verified = sample_serving(deepseek, decision, engine=engine)
        write_emitted(launch, emit_serving(engine, verified))
        call = programs.called(str(launch / "router.sh"), cwd=launch, **urls, log="router.json")
        return call["argv"], verified

    return run


def _after(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def _words(argv: list[str], option: str) -> str | bool:
    """Return what follows an option: its value, or whether it is there at all."""
    at = argv.index(option) + 1 if option in argv else None
    if at is None or at == len(argv) or argv[at].startswith("--"):
        return at is not None
    return argv[at]


DECODE_LOW = disaggregated(decode=LOW_LATENCY | ON_EIGHT)
DECODE_DRAFTS = disaggregated(decode=LOW_LATENCY | ON_EIGHT | {"draft_tokens": 3})
NVFP4 = {"quantization": "nvfp4", "kv_cache_dtype": "fp8"}
TWO_MACHINES = {"NODE_RANK": "1", "MASTER_ADDR": "first", "PORT": "31000"}


@each_row(
    ("engine", "decision", "goal", "given_variables", "expected"),
    [
        # Attention TP 2 x DP 4: --tp-size 8; 64 requests and 8192 tokens a rank, 4 ranks.
        (
            "sglang",
            aggregated(attention_tp=2, attention_dp=4),
            None,
            {},
            {
                "--tp-size": "8",
                "--attn-dp-size": "4",
                "--ep-size": "8",
                "--max-running-requests": "256",
                "--chunked-prefill-size": "32768",
                "--cuda-graph-max-bs-decode": "64",
            },
        ),
        # vLLM's are of one data-parallel rank, and it spreads whole experts over TP times DP.
        (
            "vllm",
            aggregated(attention_tp=2, attention_dp=4),
            None,
            {},
            {
                "--tensor-parallel-size": "2",
                "--data-parallel-size": "4",
                "--enable-expert-parallel": True,
                "--max-num-seqs": "64",
                "--max-num-batched-tokens": "8192",
            },
        ),
        (
            "vllm",
            aggregated(ep=1, moe_tp=8),
            None,
            {},
            {"--enable-expert-parallel": False, "--all2all-backend": False},
        ),
        (
            "sglang",
            aggregated(chunked_prefill=False),
            None,
            {},
            {"--chunked-prefill-size": "-1", "--max-prefill-tokens": "8192"},
        ),
        # Graphs and buffers are bounded by the batch under low latency.
        (
            "sglang",
            DECODE_LOW,
            None,
            {},
            {
                "--deepep-mode": "low_latency",
                "--cuda-graph-max-bs-decode": "96",
                "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "96",
                "--disaggregation-mode": "decode",
                "--disaggregation-transfer-backend": "nixl",
            },
        ),
        (
            "vllm",
            DECODE_LOW,
            None,
            {},
            {
                "--all2all-backend": "deepep_low_latency",
                "--max-num-batched-tokens": "96",
                "--max-cudagraph-capture-size": "96",
            },
        ),
        (
            "trtllm",
            DECODE_LOW,
            None,
            {},
            {
                "TRTLLM_FORCE_COMM_METHOD": "DEEPEPLOWLATENCY",
                "TRTLLM_DEEP_EP_TOKEN_LIMIT": "96",
            },
        ),
        # Prompts go through normal kernels, which cannot be captured: a graph size means nothing.
        (
            "sglang",
            aggregated(a2a_backend="deepep_normal"),
            None,
            {},
            {"--deepep-mode": "normal", "--cuda-graph-max-bs-decode": False},
        ),
        (
            "sglang",
            aggregated(a2a_backend="deepep_low_latency"),
            None,
            {},
            {"--deepep-mode": "auto", "--cuda-graph-max-bs-decode": "64"},
        ),
        # Prefill listens where the router says.
        (
            "sglang",
            disaggregated(connector="mooncake"),
            None,
            {"PORT": "31000"},
            {
                "--disaggregation-bootstrap-port": "31010",
                "--disaggregation-transfer-backend": "mooncake",
            },
        ),
        # Data-parallel ranks are numbered by machine.
        (
            "vllm",
            aggregated(devices=16, attention_dp=16, ep=16),
            None,
            TWO_MACHINES,
            {
                "--data-parallel-size-local": "8",
                "--data-parallel-start-rank": "8",
                "--data-parallel-address": "first",
                "--data-parallel-rpc-port": "31100",
                "--headless": True,
            },
        ),
        *(
            (
                engine,
                aggregated(),
                NVFP4,
                {},
                {"--kv-cache-dtype": cache, "--quantization": "modelopt_fp4"},
            )
            for engine, cache in (("sglang", "fp8_e4m3"), ("vllm", "fp8"))
        ),
        # SGLang checks one token more than it drafts. Graphs are counted in requests, buffers in
        # tokens: 96 x 4.
        (
            "sglang",
            DECODE_DRAFTS,
            SPECULATIVE["mtp"],
            {},
            {
                "--speculative-algorithm": "EAGLE",
                "--speculative-num-steps": "3",
                "--speculative-eagle-topk": "1",
                "--speculative-num-draft-tokens": "4",
                "--cuda-graph-max-bs-decode": "96",
                "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "384",
            },
        ),
        # vLLM counts drafts as tokens of a step.
        (
            "vllm",
            DECODE_DRAFTS,
            SPECULATIVE["mtp"],
            {},
            {
                "--speculative-config": '{"method": "mtp", "num_speculative_tokens": 3}',
                "--max-num-seqs": "96",
                "--max-num-batched-tokens": "384",
                "--max-cudagraph-capture-size": "384",
            },
        ),
        *(
            (
                "vllm",
                disaggregated(connector=connector),
                None,
                {"PORT": "31000"},
                {
                    "--kv-transfer-config": json.dumps(
                        {"kv_connector": engine_name, "kv_role": "kv_producer"}
                    ),
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": "31020" if connector == "nixl" else None,
                    "VLLM_MOONCAKE_BOOTSTRAP_PORT": None if connector == "nixl" else "31010",
                },
            )
            for connector, engine_name in ENGINES["vllm"][0].connectors.items()
        ),
        # Caches pass through host memory where the plan does.
        (
            "vllm",
            disaggregated(path="host", decode=ON_EIGHT),
            None,
            {},
            {
                "--kv-transfer-config": json.dumps(
                    {
                        "kv_connector": "NixlConnector",
                        "kv_role": "kv_consumer",
                        "kv_buffer_device": "cpu",
                    }
                )
            },
        ),
        # Below its default of 32 tokens vLLM would not halve a full batch.
        *(
            (
                engine,
                aggregated(a2a_backend="deepep_normal", two_batch_overlap=halves, max_batch=8),
                None,
                {},
                {
                    "--enable-two-batch-overlap": halves and engine == "sglang",
                    "--enable-dbo": halves and engine == "vllm",
                    "--dbo-decode-token-threshold": halves and engine == "vllm" and "8",
                },
            )
            for engine in ("sglang", "vllm")
            for halves in (True, False)
        ),
    ],
)
def test_a_decision_becomes_options_and_variables(
    start: Any,
    engine: str,
    decision: ServeDecision,
    goal: Any,
    given_variables: dict[str, str],
    expected: dict[str, str | bool],
) -> None:
    role = "aggregated"
    if decision.mode == "disaggregated":
        role = "prefill" if "PORT" in given_variables else "decode"
    argv, environment = start(engine, decision, role, goal=goal, **given_variables)
    said = {
        name: _words(argv, name) if name.startswith("--") else environment.get(name)
        for name in expected
    }
    assert said == expected


@each_row("engine", ("sglang", "vllm"))
def test_several_machines_want_to_know_which_they_are(
    deepseek: ModelSpec, launch: Path, programs: Any, engine: str
) -> None:
    decision = aggregated(devices=16, attention_dp=16, ep=16)
    verified = sample_serving(deepseek, decision, engine=engine)
    write_emitted(launch, emit_serving(engine, verified))
    done = programs.run(str(launch / "aggregated.sh"), cwd=launch)
    assert done.code != 0
    assert "set NODE_RANK and MASTER_ADDR" in done.stderr
    three = programs.run(str(launch / "aggregated.sh"), cwd=launch, NNODES="3")
    assert three.code == 2
    assert "NNODES 3 is neither 1 nor 2" in three.stderr


def _options(
    model: ModelSpec, decision: ServeDecision, name: str = "aggregated", **more: Any
) -> Any:
    verified = sample_serving(model, decision, engine="trtllm", **more)
    return yaml.safe_load(texts_of(emit_serving("trtllm", verified))[f"{name}.yaml"])


SLICED = aggregated(attention_dp=1, attention_tp=8, ep=1, moe_tp=8)
COPIES = aggregated(devices=12, attention_dp=12, ep=12, redundant_experts=8)


@each_row(
    ("decision", "name", "more", "expected"),
    (
        # Every device is a rank of attention, or none.
        (
            aggregated(),
            "aggregated",
            {},
            {
                "enable_attention_dp": True,
                "attention_dp_config": {"enable_balance": True},
                "tensor_parallel_size": 8,
                "moe_expert_parallel_size": 8,
                "max_batch_size": 64,
            },
        ),
        (
            SLICED,
            "aggregated",
            {},
            {
                "enable_attention_dp": False,
                "attention_dp_config": None,
                "tensor_parallel_size": 8,
                "moe_tensor_parallel_size": 8,
            },
        ),
        # Prefill runs without overlap and graphs.
        (
            disaggregated(),
            "prefill",
            {},
            {
                "disable_overlap_scheduler": True,
                "cuda_graph_config": None,
                "cache_transceiver_config": {"backend": "NIXL"},
            },
        ),
        (
            disaggregated(),
            "decode",
            {},
            {
                "disable_overlap_scheduler": False,
                "cuda_graph_config": {"enable_padding": True, "max_batch_size": 64},
                "cache_transceiver_config": {"backend": "NIXL"},
            },
        ),
        # A step of drafts is held.
        (
            aggregated(draft_tokens=3, max_batched_tokens=100, page_size=64),
            "aggregated",
            {"goal": {**SPECULATIVE["mtp"], "max_model_len": 100}},
            {
                "max_num_tokens": 64 * 4,
                "cuda_graph_config": {"enable_padding": True, "max_batch_size": 64},
                "kv_cache_config": {"dtype": "auto", "tokens_per_block": 64},
            },
        ),
        (
            COPIES,
            "aggregated",
            {"devices_per_node": 4},
            {"moe_config": {"load_balancer": {"num_slots": 264, "layer_updates_per_iter": 1}}},
        ),
        # Prefill fills the cache of the layer that decode drafts with.
        *(
            (
                disaggregated(decode={"draft_tokens": 3}),
                role,
                {"goal": SPECULATIVE["mtp"]},
                {"speculative_config": {"decoding_type": "MTP", "max_draft_len": 3}},
            )
            for role in ("prefill", "decode")
        ),
    ),
)
def test_a_decision_becomes_options_of_trtllm(
    deepseek: ModelSpec, decision: ServeDecision, name: str, more: Any, expected: dict[str, Any]
) -> None:
    options = _options(deepseek, decision, name, **more)
    assert {option: options.get(option) for option in expected} == expected


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("decision", [aggregated(), disaggregated()])
def test_a_router_gets_every_instance_or_stops(
    engine: str, decision: ServeDecision, route: Any, launch: Path, programs: Any
) -> None:
    lists = {
        "WORKER_URLS": "http://a:30000 http://b:30000",
        "PREFILL_URLS": "http://a:30000\nhttp://b:30000 http://c:30200",
        "DECODE_URLS": "http://d:30000",
    }
    argv, _ = route(engine, decision, lists)
    if engine != "trtllm":
        named = ("a", "b", "c", "d") if decision.mode == "disaggregated" else ("a", "b")
        assert all(f"http://{host}:" in " ".join(argv) for host in named)
    elif decision.mode == "disaggregated":
        config = yaml.safe_load(Path(_after(argv, "-c")).read_text())
        assert config["context_servers"] == {
            "router": {"type": "round_robin"},
            "num_instances": 3,
            "urls": ["a:30000", "b:30000", "c:30200"],
        }
        assert config["generation_servers"]["urls"] == ["d:30000"]
    name = "WORKER_URLS" if decision.mode == "aggregated" else "PREFILL_URLS"
    for wrong in ("http://a:30000", "http://a;x:1 b c"):
        done = programs.run(str(launch / "router.sh"), cwd=launch, **{**lists, name: wrong})
        assert done.code == 2
        assert ";" in wrong or "names 1 instances, the plan has" in done.stderr


HETEROGENEOUS = aggregated().model_copy(
    update={
        "instances": (
            sample_instances(Role.AGGREGATED, count=2, attention_dp=8, max_batch=40),
            sample_instances(
                Role.AGGREGATED,
                pool="h20",
                count=1,
                devices=1,
                attention_dp=1,
                ep=1,
                max_batch=6,
            ),
        )
    }
)


@pytest.mark.parametrize("engine", ENGINES)
def test_heterogeneous_instances_get_requests_by_batch_size(
    engine: str, launch: Path, programs: Any, route: Any
) -> None:
    # 8 ranks x 40 requests twice, and 6.
    urls = {"WORKER_URLS": "http://a:30000 http://b:30000 http://c:30000"}
    argv, verified = route(engine, HETEROGENEOUS, urls)
    assert argv[0] == "nginx"
    config = Path(_after(argv, "-c")).read_text()
    servers = re.findall(r"server (\S+:\d+) weight=(\d+);", config)
    assert servers == [("a:30000", "320"), ("b:30000", "320"), ("c:30000", "6")]
    assert "least_conn;" in config
    # nginx's own limits, 512 connections and bodies of 1 MiB, are too few and too short.
    assert "worker_connections 32768;" in config
    assert "client_max_body_size 0;" in config
    assert "resolve" not in config
    # In Kubernetes a Service's name stands for the pods of a group, each with its own weight.
    text = texts_of(emit_serving("kubernetes", verified))["deployment.yaml"]
    assert "image: nginx:1.29" in text
    objects = list(yaml.safe_load_all(text))
    heads = [each for each in objects if each["kind"] == "Service" and "clusterIP" in each["spec"]]
    assert len(heads) == 2
    (router,) = (
        each
        for each in objects
        if each["kind"] == "Deployment" and each["metadata"]["labels"]["role"] == "router"
    )
    (container,) = router["spec"]["template"]["spec"]["containers"]
    stated = {one["name"]: one.get("value", "") for one in container["env"]}
    stated |= {"NAMESPACE": "serving"}
    call = programs.called(*container["command"][1:], cwd=launch, log="router.json", **stated)
    config = Path(_after(call["argv"], "-c")).read_text()
    servers = re.findall(r"server (\S+):30000 weight=(\d+) resolve;", config)
    assert [int(weight) for _, weight in servers] == [320, 6]
    assert [name for name, _ in servers] == [
        f"{each['metadata']['name']}.serving.svc.cluster.local" for each in heads
    ]
    assert re.search(r"resolver \S+ valid=10s; upstream workers { zone workers 256k; least", config)
    graph, _ = dynamo_graph(verified)
    assert "least-loaded" in graph
    assert "The frontend has no weights" in graph


def test_heterogeneous_decode_instances_are_noted(deepseek: ModelSpec) -> None:
    one = disaggregated()
    small = sample_instances(Role.DECODE, count=1, max_batch=8)
    both = one.model_copy(update={"instances": (*one.instances, small)})
    for engine, (decision, heterogeneous) in product(
        ("sglang", "vllm"), ((one, False), (both, True))
    ):
        verified = sample_serving(deepseek, decision, engine=engine)
        files = texts_of(emit_serving(engine, verified))
        # A threshold that no prompt passes leaves the fewest outstanding requests.
        least = "--policy cache_aware" in files["router.sh"]
        assert least == ("--cache-threshold 1" in files["router.sh"]) == heterogeneous, engine
        assert ("have no weights" in files["router.sh"]) == heterogeneous, engine


POLICIES: dict[str, dict[tuple[bool, str, str], str]] = {
    "sglang": {
        (False, "least_requests", ""): "--policy cache_aware --cache-threshold 1",
        (False, "cache_aware", ""): "--policy cache_aware --cache-threshold 0.2",
        (True, "cache_aware", "round_robin"): (
            "--policy cache_aware --prefill-policy cache_aware --decode-policy round_robin"
            " --cache-threshold 0.2"
        ),
        (True, "least_requests", "least_requests"): "--policy cache_aware --cache-threshold 1",
    },
    "vllm": {
        (False, "round_robin", ""): "--policy round_robin",
        (False, "power_of_two", ""): "--policy power_of_two",
        (True, "cache_aware", "power_of_two"): (
            "--policy cache_aware --prefill-policy cache_aware --decode-policy power_of_two"
            " --cache-threshold 0.2"
        ),
    },
}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_policy_is_written_in_the_gateways_words(engine: str, route: Any) -> None:
    urls = {
        "WORKER_URLS": "http://a:30000 http://b:30000",
        "PREFILL_URLS": "http://a:30000 http://b:30000 http://c:30000",
        "DECODE_URLS": "http://d:30000 http://e:30000",
    }
    for (by_role, policy, decode), words in POLICIES[engine].items():
        decision = routed(
            by_role=by_role,
            policy=policy,
            decode_policy=decode or None,
            cache_threshold=0.2 if policy == "cache_aware" else None,
        )
        argv, verified = route(engine, decision, urls)
        assert words in " ".join(argv)
        text = texts_of(emit_serving("kubernetes", verified))["deployment.yaml"]
        for word in re.findall(r"--\S+ \S+", words):
            assert word in text


@each_row(
    ("engine", "target", "decision"),
    (
        ("sglang", "sglang", routed(policy="power_of_two", by_role=True)),
        ("vllm", "dynamo", routed(policy="weighted_least_requests")),
    ),
)
def test_a_policy_that_a_router_lacks_is_refused(
    deepseek: ModelSpec, engine: str, target: str, decision: Any
) -> None:
    verified = sample_serving(deepseek, decision, engine=engine)
    with pytest.raises(UnknownTargetError, match=decision.router.policy.value):
        emit_serving(target, verified)


def test_a_router_to_ranks_has_its_option_and_is_there_for_one_instance(
    deepseek: ModelSpec, route: Any
) -> None:
    fields: dict[str, Any] = {"policy": "cache_aware", "cache_threshold": 0.2, "ranks": 8}
    one = aggregated(count=1, devices=8, attention_dp=8, attention_tp=1)
    for decision, urls in (
        (routed(**fields), "http://a:30000 http://b:30000"),
        (one.model_copy(update={"router": routed(**fields).router}), "http://a:30000"),
    ):
        argv, verified = route("vllm", decision, {"WORKER_URLS": urls})
        assert _after(argv, "--intra-node-data-parallel-size") == "8"
        text = "".join(file.text for file in emit_serving("kubernetes", verified))
        assert "--intra-node-data-parallel-size 8" in text
        # Without it one instance has no router.
        alone = decision.model_copy(update={"router": None})
        files = emit_serving("vllm", sample_serving(deepseek, alone, engine="vllm"))
        assert any(f.path.name == "router.sh" for f in files) == (
            decision is not one and " " in urls
        )
    # Disaggregated, the router counts the engines of each instance itself.
    apart = routed(by_role=True, decode_policy="round_robin", **fields)
    files = emit_serving("vllm", sample_serving(deepseek, apart, engine="vllm"))
    assert not any("--intra-node-data-parallel-size" in file.text for file in files)
    for engine, said in (("sglang", "every request goes to rank 0"), ("trtllm", "cache_aware")):
        verified = sample_serving(deepseek, routed(**fields), engine=engine)
        with refused(UnknownTargetError, match=said):
            emit_serving(engine, verified)


def test_trtllm_and_dynamo_route_by_load(deepseek: ModelSpec, route: Any) -> None:
    decision = routed(by_role=True, policy="least_requests", decode_policy="least_requests")
    urls = {
        "PREFILL_URLS": "http://a:30000 http://b:30000 http://c:30000",
        "DECODE_URLS": "http://d:30000 http://e:30000",
    }
    argv, _ = route("trtllm", decision, urls)
    config = yaml.safe_load(Path(_after(argv, "-c")).read_text())
    kinds = [config[f"{side}_servers"]["router"]["type"] for side in ("context", "generation")]
    assert kinds == ["load_balancing", "load_balancing"]
    for policy, mode in (
        ("least_requests", "least-loaded"),
        ("cache_aware", "kv"),
        ("power_of_two", "power-of-two"),
    ):
        verified = sample_serving(deepseek, routed(policy=policy), engine="vllm")
        text, graph = dynamo_graph(verified)
        frontend = graph["spec"]["components"][0]
        arguments = frontend["podTemplate"]["spec"]["containers"][0]["args"]
        assert _after(arguments, "--router-mode") == mode
        # Blocks are published where the frontend follows them.
        assert ("--kv-events-config" in text) == (mode == "kv")


def test_sglangs_router_gets_the_bootstrap_ports(route: Any) -> None:
    urls = {
        "PREFILL_URLS": "http://a:30000 http://b:30200 http://c:30400",
        "DECODE_URLS": "http://d:30000",
    }
    argv, _ = route("sglang", disaggregated(), urls)
    pairs = [argv[i + 1 : i + 3] for i, word in enumerate(argv) if word == "--prefill"]
    assert pairs == [
        ["http://a:30000", "30010"],
        ["http://b:30200", "30210"],
        ["http://c:30400", "30410"],
    ]


@each_row(
    ("engine", "decision", "more", "said"),
    (
        # Prefill fills the cache of the layer that decode drafts with.
        *(
            (
                engine,
                disaggregated(decode={"draft_tokens": 3}),
                {"goal": SPECULATIVE["mtp"]},
                (said,),
            )
            for engine, said in (
                ("sglang", "--speculative-num-steps 3"),
                ("vllm", "num_speculative_tokens"),
            )
        ),
        # Copies of experts follow the loads that the engine records.
        *(
            (engine, COPIES, {"devices_per_node": 4}, (*said, "8 redundant experts per layer"))
            for engine, said in (
                ("sglang", ("--ep-num-redundant-experts 8 --enable-eplb",)),
                ("vllm", ("--enable-eplb", "--eplb-config '{\"num_redundant_experts\": 8}'")),
            )
        ),
    ),
)
def test_every_script_of_a_group_says_so(
    deepseek: ModelSpec, engine: str, decision: ServeDecision, more: Any, said: tuple[str, ...]
) -> None:
    files = texts_of(
        emit_serving(engine, sample_serving(deepseek, decision, engine=engine, **more))
    )
    scripts = [files[f"{group.role}.sh"] for group in decision.instances]
    assert all(words in script for words in said for script in scripts)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_separate_draft_layer_is_named(
    engine: str, deepseek: ModelSpec, start: Any, launch: Path, programs: Any
) -> None:
    decision = aggregated(draft_tokens=2)
    hostile = 'it\'s "a" $(touch injected) draft'
    argv, _ = start(engine, decision, "aggregated", goal=SPECULATIVE["eagle"], DRAFT_MODEL=hostile)
    option = "--spec-model" if engine == "vllm" else "--speculative-draft-model-path"
    assert _after(argv, option) == hostile
    assert not (launch / "injected").exists()
    for target in ("slurm", "local"):
        verified = sample_serving(deepseek, decision, engine=engine, goal=SPECULATIVE["eagle"])
        write_emitted(launch / target, emit_serving(target, verified))
        name = "job.sbatch" if target == "slurm" else "local.sh"
        done = programs.run(name, cwd=launch / target, AVAILABLE="16", SLURM_JOB_ID="1")
        assert done.code != 0
        assert "set DRAFT_MODEL to the path or name" in done.stderr


def test_a_machine_deals_out_its_devices_once_and_must_have_all(
    deepseek: ModelSpec, launch: Path, programs: Any
) -> None:
    decision = aggregated(count=3, devices=2, attention_dp=2, ep=2)
    verified = sample_serving(deepseek, decision, engine="sglang", emit=("local",))
    write_emitted(launch, emit_all_serving(verified))
    script = str(launch / "local/local.sh")
    few = programs.run(script, cwd=launch, AVAILABLE="5")
    assert (few.code, "the plan is for 6" in few.stderr) == (2, True)
    done = programs.run(script, cwd=launch, servers=3, AVAILABLE="6")
    assert done.code == 0, done.stderr
    started = [call["environment"] for call in programs.calls()]
    assert sorted(one["CUDA_VISIBLE_DEVICES"] for one in started) == ["0,1", "2,3", "4,5"]
    assert len({one["PORT"] for one in started}) == 3


def test_a_requeued_job_forgets_the_addresses_of_its_earlier_run(
    deepseek: ModelSpec, launch: Path, programs: Any
) -> None:
    """It keeps its number, and so the folder of the run."""
    verified = sample_serving(deepseek, aggregated(), engine="sglang", emit=("slurm",))
    for target in ("sglang", "slurm"):
        write_emitted(launch / target, emit_serving(target, verified))
    run = launch / "slurm" / "run-7"
    run.mkdir()
    for instance in (0, 9):
        (run / f"aggregated.{instance}.url").write_text("http://lost:1\n")
    done = programs.run(
        "job.sbatch",
        cwd=launch / "slurm",
        servers=2,
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="n0,n1",
    )
    assert done.code == 0, done.stderr
    left = {file.name: file.read_text() for file in run.glob("*.url")}
    assert sorted(left) == ["aggregated.0.url", "aggregated.1.url"]
    assert "lost" not in "".join(left.values())


@each_row(
    ("batch", "drafts", "graph"),
    (
        (1, 0, 1),
        (3, 0, 4),
        (64, 0, 64),
        (100, 0, 104),
        (250, 0, 256),
        (100, 2, 320),
        (256, 3, 1024),
    ),
)
def test_vllm_captures_the_whole_batch(start: Any, batch: int, drafts: int, graph: int) -> None:
    # Captured sizes: 1, 2, 4, multiples of 8 below 256, then of 16; whole requests of drafts + 1.
    decision = aggregated(max_batch=batch, draft_tokens=drafts)
    argv, _ = start("vllm", decision, "aggregated", goal=SPECULATIVE["mtp"])
    assert _after(argv, "--max-cudagraph-capture-size") == str(graph)
    each = drafts + 1
    sizes = [1, 2, 4, *range(8, min(graph + 1, 256), 8), *range(256, graph + 1, 16)]
    whole = {-(-size // each) * each for size in sizes if size <= graph}
    assert any(batch * each <= size <= graph for size in whole)


def test_sglang_splits_a_device_as_planned_where_its_processors_are_known(
    launch: Path, programs: Any, deepseek: ModelSpec
) -> None:
    qwen = example_model("qwen3-235b-a22b")
    verified = sample_serving(qwen, shared_device(prefill_share_ratio=0.4))
    write_emitted(launch, emit_serving("sglang", verified))
    argv = programs.called(str(launch / "aggregated.sh"), cwd=launch)["argv"]
    assert _after(argv, "--chunked-prefill-size") == "-1"
    assert "--disable-overlap-schedule" in argv
    shares = yaml.safe_load(Path(_after(argv, "--pdmux-config-path")).read_text())
    # 0.4 of the 132 multiprocessors of an H100 is 52.8; whole eights: 56.
    assert shares == {"sm_group_num": 3, "manual_divisions": [[56, 76, 1]]}
    assert _after(argv, "--sm-group-num") == "3"
    verified = sample_serving(qwen, shared_device())
    pool = verified.plan.cluster.pools[0].model_copy(update={"device": None})
    cluster = verified.plan.cluster.model_copy(update={"pools": (pool,)})
    plan = verified.plan.model_copy(update={"cluster": cluster})
    with pytest.raises(ValueError, match="its number of SMs must be known; state 'device'"):
        emit_serving("sglang", verified.model_copy(update={"plan": plan}))


@settings(deadline=None, max_examples=50)
@given(
    st.integers(16, 200),
    st.floats(0.0, 1.0, exclude_min=True, exclude_max=True, allow_subnormal=False),
)
def test_shares_of_a_device_are_whole_eights_and_leave_both_some(units: int, share: float) -> None:
    prefill, decode = division(compute_units=units, prefill_share_ratio=share)
    assert prefill + decode == units
    assert prefill % 8 == 0
    assert min(prefill, decode) >= 8
    if 8 <= share * units <= units - 16:
        assert abs(prefill - share * units) <= 4 + 1e-9


OPTION_CASES = (
    aggregated(),
    aggregated(chunked_prefill=False, a2a_backend="deepep_normal"),
    aggregated(devices=16, attention_dp=1, attention_tp=8, pp=2),
    disaggregated(connector="mooncake"),
    aggregated(page_size=64, draft_tokens=3),
    disaggregated(decode={"a2a_backend": "deepep_low_latency"}),
)


@each_row(("engine", "decision"), product(ENGINES, OPTION_CASES))
def test_nothing_is_said_that_the_manifest_does_not_name(
    deepseek: ModelSpec, engine: Any, decision: Any
) -> None:
    manifest = ENGINES[engine][0]
    drafts = any(group.draft_tokens for group in decision.instances)
    goal = SPECULATIVE["mtp"] if drafts else None
    verified = sample_serving(deepseek, decision, engine=engine, goal=goal)
    for file in emit_serving(engine, verified):
        if file.path.suffix == ".yaml":
            assert set(yaml.safe_load(file.text)) <= manifest.options
        if file.path.name.removesuffix(".sh") not in ("prefill", "decode", "aggregated"):
            continue
        body = "".join(line for line in file.text.splitlines(True) if not line.startswith("#"))
        exported = set(re.findall(r"^export ([A-Z_]+)=", body, flags=re.MULTILINE))
        assert exported <= manifest.environment
        if engine != "trtllm":
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", body)) <= manifest.options


def test_hybrids_say_how_states_are_kept_and_moved() -> None:
    nano = example_model("nemotron-3-nano")

    def texts(engine: str, decision: ServeDecision) -> str:
        files = emit_serving(engine, sample_serving(nano, decision, engine=engine))
        return "\n".join(file.text for file in files)

    # SGLang: five states of 64 requests of each of 8 ranks.
    whole = aggregated(attention_dp=8, max_batch=64)
    assert f"--max-mamba-cache-size {5 * 64 * 8}" in texts("sglang", whole)
    assert "transceiver_runtime: PYTHON" in texts("trtllm", disaggregated())
    assert "VLLM_SSM_CONV_STATE_LAYOUT=DS" in texts("vllm", disaggregated())
    assert "VLLM_SSM_CONV_STATE_LAYOUT" not in texts("vllm", aggregated())
    # Prefix caches of hybrids need chunks.
    assert "--no-enable-prefix-caching" in texts("vllm", aggregated(chunked_prefill=False))
    assert "--no-enable-prefix-caching" not in texts("vllm", aggregated(chunked_prefill=True))
