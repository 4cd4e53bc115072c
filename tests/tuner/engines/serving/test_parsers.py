"""The real parsers take what is emitted: SGLang's, vLLM's, their routers', and both clients'.

They need no accelerator, but more packages than this project: MOETUNE_ENGINES_PYTHON names the
interpreter of an environment that has them (`pip install --no-deps vllm==0.33.0 sglang==0.5.23
sglang-router vllm-router`, beside what these import); without it the present one is asked.

Accepted so far: sglang 0.5.23, vllm 0.33.0, vllm 0.30.0 (the servers of cells; in an environment of
its own, `pip install --no-deps vllm==0.30.0 xgrammar`), sglang-router 0.3.2, vllm-router 0.1.17,
ai-dynamo 1.6.1 (its frontend and vLLM workers), aiperf 0.13.0 (which wants other versions of common
packages, hence an environment of its own).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import patient_s
from tests.tuner.engines.placement.testing import sample_decision, sample_placement
from tests.tuner.engines.serving.testing import (
    AFD_ENGINE,
    aggregated,
    attention_expert,
    disaggregated,
    dynamo_graph,
    routed,
    sample_serving,
    shared_device,
)
from tests.tuner.engines.testing import texts_of, write_emitted
from tests.tuner.models import example_model
from tuner.config.serve import ServeRouter
from tuner.engines.serve_writers import emit_serving
from tuner.engines.serving.releases import ENGINES
from tuner.engines.vllm_afd.capabilities import VLLM_0_30_AFD
from tuner.spec.model import ModelSpec

pytestmark = pytest.mark.slow

MODELS = Path(__file__).parents[4] / "examples/models"

PARSERS = {
    "sglang": """
import argparse
from sglang.srt.server_args import ServerArgs
import sglang as package
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
""",
    "vllm": """
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.engine.arg_utils import AsyncEngineArgs
import vllm as package
parser = make_arg_parser(FlexibleArgumentParser())
build = AsyncEngineArgs.from_cli_args
""",
    "vllm_0_30": """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.engine.arg_utils import AsyncEngineArgs
import vllm as package
parser = make_arg_parser(FlexibleArgumentParser())
build = AsyncEngineArgs.from_cli_args
""",
    "vllm_bench": """
import argparse
from vllm.benchmarks.serve import add_cli_args
import vllm as package
parser = argparse.ArgumentParser()
add_cli_args(parser)
""",
    "aiperf": """
from aiperf.cli import app
class parser:
    _actions = ()
    @staticmethod
    def parse_args(argv):
        return app.parse_args(argv, exit_on_error=False)
""",
    "dynamo": """
import sys
class parser:
    _actions = ()
    @staticmethod
    def parse_args(argv):
        from dynamo.frontend import main as frontend
        from dynamo.vllm import args as worker
        ours, sys.argv = sys.argv, argv
        try:
            if argv[0] == "dynamo.frontend":
                return frontend.parse_args()[0]
            return worker.parse_args().engine_args
        finally:
            sys.argv = ours
""",
    "sglang_router": """
import argparse
from sglang_router.router_args import RouterArgs
import sglang_router as package
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser)
""",
    "vllm_router": """
import argparse
from vllm_router.router_args import RouterArgs
import vllm_router as package
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser)
""",
}

_ASK = """
import json, sys
build = None
{parser}
found = []
for argv in json.load(open(sys.argv[1])):
    parsed = parser.parse_args(argv)
    if build is not None:
        parsed = build(parsed)
    known = vars(parsed) if hasattr(parsed, "__dict__") else dict()
    found.append(dict((k, v) for k, v in known.items() if isinstance(v, (int, str, float))))
    found[-1]["speculative_config"] = known.get("speculative_config")
options = sorted(word for action in parser._actions for word in action.option_strings)
json.dump(dict(found=found, options=options), open(sys.argv[1], "w"))
"""

Ask = Callable[[str, list[list[str]]], tuple[list[dict[str, Any]], set[str]]]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Return what a parser made of several commands, and every option that it knows."""

    def run(name: str, commands: list[list[str]]) -> tuple[list[dict[str, Any]], set[str]]:
        python = os.environ.get("MOETUNE_ENGINES_PYTHON", sys.executable)
        package, _, release = name.removesuffix("_bench").partition("_0_")
        asks = f"import importlib.util as u; assert u.find_spec({package!r})"
        if release:
            asks += "; import importlib.metadata as m"
            asks += f"; assert m.version({package!r}).startswith('0.{release}.')"
        has = [python, "-c", asks]
        if subprocess.run(has, check=False, capture_output=True, timeout=patient_s(60)).returncode:
            pytest.skip(f"{name} is not installed; set MOETUNE_ENGINES_PYTHON")
        file = tmp_path / "asked.json"
        file.write_text(json.dumps(commands))
        done = subprocess.run(
            [python, "-c", _ASK.format(parser=PARSERS[name]), str(file)],
            env={**os.environ, "VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=patient_s(250),
        )
        assert done.returncode == 0, done.stderr[-2000:]
        response = json.loads(file.read_text())
        return response["found"], set(response["options"])

    return run


GOAL = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
MTP, EAGLE = (
    {"speculative": {"method": method, "draft_tokens": 3, "acceptance": 0.8}}
    for method in ("mtp", "eagle")
)
ON_FOUR = {"devices": 4, "attention_dp": 4, "ep": 4}
CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (aggregated(), "aggregated", {}),
    (aggregated(attention_dp=1, attention_tp=8), "aggregated", {"goal": GOAL}),
    (aggregated(devices=16, attention_dp=16, ep=16), "aggregated", {}),
    (aggregated(devices=16, attention_tp=8, attention_dp=1, pp=2), "aggregated", {}),
    (aggregated(chunked_prefill=False), "aggregated", {}),
    (aggregated(a2a_backend="deepep_normal"), "aggregated", {}),
    (disaggregated(), "prefill", {}),
    (disaggregated(path="device", connector="mooncake"), "decode", {}),
    (disaggregated(decode={"a2a_backend": "deepep_low_latency"}), "decode", {}),
    (aggregated(**ON_FOUR), "aggregated", {"placed": True}),
    (aggregated(page_size=64, draft_tokens=3), "aggregated", {"goal": MTP}),
    (aggregated(draft_tokens=2), "aggregated", {"goal": EAGLE}),
    (aggregated(a2a_backend="deepep_normal", two_batch_overlap=True), "aggregated", {}),
    (disaggregated(decode={"draft_tokens": 3}), "prefill", {"goal": MTP}),
    (
        disaggregated(
            decode={"draft_tokens": 3, "a2a_backend": "deepep_low_latency", "page_size": 64},
            prefill={"page_size": 64, "a2a_backend": "deepep_normal", "two_batch_overlap": True},
            path="device",
        ),
        "decode",
        {"goal": MTP},
    ),
    (shared_device(), "aggregated", {"only": "sglang", "model": "qwen3-235b-a22b"}),
]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_engines_parser_takes_every_command(
    engine: str, deepseek: ModelSpec, launch: Path, programs: Any, ask: Ask
) -> None:
    placement = sample_placement(sample_decision())
    commands = []
    cases = [case for case in CASES if case[2].get("only", engine) == engine]
    for decision, name, others in cases:
        named = others.get("model")
        model = example_model(named) if named else deepseek
        verified = sample_serving(model, decision, engine=engine, goal=others.get("goal"))
        placed = placement if others.get("placed") else None
        write_emitted(launch, emit_serving(engine, verified, placement=placed))
        argv = programs.called(
            str(launch / f"{name}.sh"),
            cwd=launch,
            NODE_RANK="1",
            MASTER_ADDR="first",
            DRAFT_MODEL="draft",
        )["argv"]
        # python -m sglang.launch_server, vllm serve.
        commands.append(argv[3:] if engine == "sglang" else argv[2:])
    found, options = ask(engine, commands)
    assert ENGINES[engine][0].options <= options
    for (decision, name, _), parsed in zip(cases, found, strict=True):
        (group,) = (group for group in decision.instances if group.role == name)
        drafts = max(each.draft_tokens for each in decision.instances)
        if engine == "sglang":
            assert parsed["tp_size"] * parsed["pp_size"] == group.devices
            assert parsed["attn_dp_size"] == group.attention_dp
            assert parsed.get("speculative_num_draft_tokens", 1) == drafts + 1
            assert parsed["enable_two_batch_overlap"] == group.two_batch_overlap
            assert parsed["enable_pdmux"] == (group.prefill_share_ratio is not None)
            assert parsed.get("page_size") == group.page_size
        else:
            ranks = parsed["tensor_parallel_size"] * parsed["pipeline_parallel_size"]
            assert ranks * parsed["data_parallel_size"] == group.devices
            assert parsed["enable_dbo"] == group.two_batch_overlap
            assert parsed.get("block_size") == group.page_size
            speculative = parsed.get("speculative_config") or {}
            assert speculative.get("num_speculative_tokens", 0) == drafts


def test_vllm_0_30_takes_the_servers_of_a_cell(
    deepseek: ModelSpec, launch: Path, programs: Any, ask: Ask
) -> None:
    halves = {"two_batch_overlap": True}
    commands = []
    for decision in (
        attention_expert(),
        attention_expert(attention=halves, expert=halves, prefill={"chunked_prefill": False}),
    ):
        verified = sample_serving(deepseek, decision, engine="vllm", goal=AFD_ENGINE)
        write_emitted(launch, emit_serving("vllm", verified))
        for name in ("prefill", "attention", "expert"):
            done = programs.run(str(launch / f"{name}.sh"), cwd=launch, AFD_HOST="first")
            assert done.code == 0, done.stderr
            commands.append(programs.argv()[2:])
    found, options = ask("vllm_0_30", commands)
    assert VLLM_0_30_AFD.options <= options
    sizes = [one["tensor_parallel_size"] * one["data_parallel_size"] for one in found]
    assert sizes == [4, 4, 2] * 2
    assert [one["enable_dbo"] for one in found] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_routers_parser_takes_every_command(
    engine: str, deepseek: ModelSpec, launch: Path, programs: Any, ask: Ask
) -> None:
    urls = {
        "WORKER_URLS": "http://a:30000 http://b:30000",
        "PREFILL_URLS": "http://a:30000 http://b:30000 http://c:30000",
        "DECODE_URLS": "http://d:30000",
    }
    commands = []
    decisions = [
        aggregated(),
        disaggregated(),
        disaggregated(connector="mooncake"),
        routed(policy="least_requests"),
        routed(policy="cache_aware", cache_threshold=0.2),
        routed(policy="cache_aware", ranks=8 if engine == "vllm" else None),
        # One decode instance here, which a router for two or more does not choose from.
        disaggregated().model_copy(
            update={
                "router": ServeRouter.model_validate(
                    {
                        "policy": "cache_aware",
                        "decode_policy": "round_robin",
                        "cache_threshold": 0.2,
                    }
                )
            }
        ),
    ]
    for decision in decisions:
        verified = sample_serving(deepseek, decision, engine=engine)
        write_emitted(launch, emit_serving(engine, verified))
        call = programs.called(str(launch / "router.sh"), cwd=launch, **urls, log="router.json")
        commands.append(call["argv"][3:] if engine == "sglang" else call["argv"][1:])
        # The router of pods, which finds its workers itself.
        text = texts_of(emit_serving("kubernetes", verified))["deployment.yaml"]
        commands.append(_discovering(text, programs, launch, engine=engine))
    found, _ = ask(f"{engine}_router", commands)
    assert len(found) == 2 * len(decisions)
    for parsed in found[6:8]:
        assert (parsed["policy"], parsed["cache_threshold"]) == ("cache_aware", 1.0)
    if engine == "vllm":
        assert [one["intra_node_data_parallel_size"] for one in found[10:12]] == [8, 8]
    for parsed in found[12:]:
        assert (parsed["prefill_policy"], parsed["decode_policy"]) == ("cache_aware", "round_robin")


def _discovering(text: str, programs: Any, launch: Path, *, engine: str) -> list[str]:
    (router,) = (
        each
        for each in yaml.safe_load_all(text)
        if each["kind"] == "Deployment" and each["metadata"]["labels"]["role"] == "router"
    )
    command = router["spec"]["template"]["spec"]["containers"][0]["command"]
    call = programs.called(*command[1:], cwd=launch, NAMESPACE="default", log="router.json")
    argv = [str(word) for word in call["argv"]]
    return argv[3:] if engine == "sglang" else argv[1:]


@pytest.mark.parametrize("client", ["vllm_bench", "aiperf"])
def test_the_clients_take_the_benchmark(
    client: str, deepseek: ModelSpec, launch: Path, programs: Any, ask: Ask
) -> None:
    commands = []
    common = {"prefix_hit": 0.5, "prefix_scope": "common"}
    lengths = {"input_tokens": 100, "output_tokens": 10}
    for engine, traffic in (
        ("sglang", {"concurrency": 8, **lengths, **common}),
        (
            "sglang",
            {
                "rate": 2.0,
                "arrival": {"kind": "gamma", "cv": 2.0},
                "input_tokens": {"kind": "uniform", "low": 80, "high": 120},
                "output_tokens": 10,
            },
        ),
        ("sglang", {"trace": "recorded.csv"}),
        ("vllm", {"rate": 2.0, "arrival": {"kind": "constant"}, **lengths, "prefix_hit": 0.5}),
        ("sglang", {"rate": 2.0, **lengths, "prefix_hit": 0.5}),
    ):
        verified = sample_serving(deepseek, aggregated(), engine=engine, goal={"traffic": traffic})
        write_emitted(launch, emit_serving(engine, verified))
        name = "bench_aiperf.sh" if client == "aiperf" else "bench_vllm.sh"
        trace = launch / "requests.jsonl"
        trace.write_text(
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n'
        )
        done = programs.run(str(launch / name), cwd=launch, TRACE=str(trace))
        assert done.code == 0, done.stderr
        if client == "aiperf":
            (call,) = programs.calls("router.json")
            commands.append(call["argv"][1:])
        else:
            commands.append(programs.argv()[3:])
    found, _ = ask(client, commands)
    assert len(found) == 5
    if client == "vllm_bench":
        assert [parsed["random_input_len"] for parsed in found[:2]] == [50, 100]
        assert [parsed["dataset_name"] for parsed in found[2:]] == [
            "timed_trace",
            "timed_trace",
            "prefix_repetition",
        ]
        assert found[3]["burstiness"] == float("inf")


def test_dynamos_frontend_and_vllm_workers_take_the_graph(deepseek: ModelSpec, ask: Ask) -> None:
    weights = str(MODELS / "deepseek-v3")
    goal = {
        **MTP,
        "traffic": {"concurrency": 8, "input_tokens": 9, "output_tokens": 9, "prefix_hit": 0.5},
    }
    all_to_all = {"a2a_backend": "deepep_normal", "two_batch_overlap": True, "page_size": 64}
    decision = disaggregated(
        prefill=all_to_all,
        decode={"a2a_backend": "deepep_low_latency", "draft_tokens": 3, "page_size": 64},
    )
    verified = sample_serving(deepseek, decision, engine="vllm", goal=goal)
    _, graph = dynamo_graph(verified)
    commands = []
    for component in graph["spec"]["components"]:
        (container,) = component["podTemplate"]["spec"]["containers"]
        module = container["command"][-1]
        commands.append([module, *(w.replace("$(MODEL)", weights) for w in container["args"])])
    (frontend, prefill, decode), _ = ask("dynamo", commands)
    assert frontend["router_mode"] == "kv"
    assert frontend["use_kv_events"]
    assert prefill["enable_dbo"]
    assert not decode["enable_dbo"]
    for worker in (prefill, decode):
        assert worker["block_size"] == 64
        assert worker["speculative_config"]["num_speculative_tokens"] == 3


def test_sglang_refuses_the_name_that_recipes_use_for_graph_sizes(ask: Ask) -> None:
    # Why --cuda-graph-max-bs-decode is emitted: the short name fits two options.
    with pytest.raises(AssertionError, match="ambiguous option: --cuda-graph-max-bs"):
        ask("sglang", [["--model-path", "m", "--cuda-graph-max-bs", "8"]])
