"""Traffic on one kind of instance: closed loops, prompts of any length, what is said of them."""

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.printed import words_of
from tests.rows import each_row
from tests.tuner.estimate.serving.conftest import MODELS, Deployment
from tuner.errors import SpecError, TunerError
from tuner.goals.serve_spec import read_serve_spec
from tuner.report.serving_estimate import serving_estimate_sections
from tuner.spec.cluster import Cluster, Host
from tuner.units import format_s

Made = Callable[..., Any]
STARTS = {
    "vllm": ("vllm serve m -tp 4", "vllm serve m -tp 4 --max-num-batched-tokens 512"),
    "sglang": ("sglang serve m --tp 4", "sglang serve m --tp 4 --disaggregation-mode prefill"),
    "trtllm": ("trtllm-serve serve m --tp_size 4 --max_num_tokens 8192",),
}
FP8_BLOCK = "quantization: fp8_block"
MXFP4 = "quantization: mxfp4"


@each_row(("inputs", "outputs"), ((7000, 1), (28_000, 1), (30_000, 8)))
def test_prefill_alone_and_prompts_longer_than_a_step_are_estimated(
    deployment: Made, inputs: int, outputs: int
) -> None:
    made = deployment(
        traffic=f"{{concurrency: 4, input_tokens: {inputs}, output_tokens: {outputs}}}",
        slo="{}",
    )
    for start in STARTS["vllm"]:
        result = made.predict(start)
        assert (result.load.tpot_s is None) == (outputs == 1)
        # Four requests are in the system, and prompts are what takes their time.
        further_s = 0.0 if outputs == 1 else (outputs - 1) * result.load.tpot_s.mean
        each_s = result.load.ttft_s.mean + further_s
        assert result.load.requests_per_s * each_s == pytest.approx(4, rel=0.2)
        assert result.load.requests_per_s == pytest.approx(result.load.capacity_per_s, rel=0.1)


def test_whole_prompts_that_no_step_holds_do_not_fit_and_chunks_do(deployment: Made) -> None:
    traffic = "{concurrency: 4, input_tokens: 20000, output_tokens: 100}"
    result = deployment(engine="trtllm", traffic=traffic, slo="{}").estimate(STARTS["trtllm"][0])
    assert not result.fits
    assert "prompts of 20000 tokens are refused" in result.misfit
    assert any(change.lines == ("enable_chunked_prefill: true",) for change in result.changes), [
        change.what for change in result.changes
    ]


@each_row("role", ("prefill", "decode"))
@each_row("slo", ("{}", "{ttft: {p90: 1s}, tpot: {p90: 50ms}}"))
def test_a_closed_loop_keeps_its_requests_in_both_halves_of_a_deployment(
    deployment: Made, role: str, slo: str
) -> None:
    made = deployment(
        engine="sglang",
        traffic="{concurrency: 50, input_tokens: 2000, output_tokens: 100}",
        slo=slo,
    )
    result = made.predict(f"sglang serve m --tp 4 --disaggregation-mode {role}")
    load = result.load
    own_s = load.ttft_s.mean if role == "prefill" else 99 * load.tpot_s.mean
    # Little's law, the first burst and the last requests aside.
    assert load.requests_per_s * (own_s + load.other_half_s) == pytest.approx(50, rel=0.15)
    assert load.keeps_up
    assert any("a closed loop of 50 is in both halves" in note for note in result.notes)


def test_more_requests_at_once_wait_longer_and_not_for_a_rate_that_nobody_stated(
    deployment: Made,
) -> None:
    waits = []
    for concurrency in (1, 50, 100, 400):
        made = deployment(
            engine="sglang",
            slo="{}",
            traffic=f"{{concurrency: {concurrency}, input_tokens: 4000, output_tokens: 20}}",
        )
        load = made.predict("sglang serve m --tp 4 --disaggregation-mode prefill").load
        waits.append(load.ttft_s.mean)
        assert load.requests_per_s <= load.capacity_per_s
    assert waits == sorted(waits)
    # Most of 400 requests wait for their prompts at the rate of the instance.
    assert waits[-1] == pytest.approx(400 / load.capacity_per_s, rel=0.35)


def test_a_burst_counts_from_its_first_request_to_its_last(deployment: Made) -> None:
    lengths = "input_tokens: 4000, output_tokens: 200"

    def load_of(traffic: str, **made: object) -> Any:
        return deployment(traffic=f"{{{traffic}, {lengths}}}", slo="{}", **made).predict

    # 500 requests at once to DeepSeek-R1 on 8 H200: 3.77 requests/s, 63 s to the first token, 164
    # ms a token (GPUStack, performance lab, deepseek-r1/h200.md: vLLM 0.11.0).
    start = "vllm serve m -tp 8"
    on_h200 = {"model": "deepseek-v3", "device": "h200-sxm", "extra": FP8_BLOCK}
    burst = load_of("concurrency: 500, requests: 500", **on_h200)(start).load
    assert burst.requests_per_s == pytest.approx(3.77, rel=0.35)
    assert burst.ttft_s.mean == pytest.approx(63.0, rel=0.35)
    assert burst.tpot_s.mean == pytest.approx(0.164, rel=0.35)
    # 500 to GLM-4.5-Air on 4 A100: 2.17 requests/s, 109 s, 125 ms (the same, glm-4.5-air/a100.md:
    # SGLang 0.5.4.post2).
    made = load_of(
        "concurrency: 500, requests: 500", model="glm-4.5-air", device="a100-80gb", engine="sglang"
    )
    burst = made("sglang serve m --tp-size 4 --ep-size 4").load
    assert burst.requests_per_s == pytest.approx(2.17, rel=0.35)
    assert burst.ttft_s.mean == pytest.approx(109.3, rel=0.35)


def test_a_burst_of_equal_outputs_says_how_long_one_of_chats_takes(deployment: Made) -> None:
    said = "outputs have 200 tokens; were they spread as those of chats"

    def result(outputs: str, requests: str = "requests: 1000, ") -> Any:
        traffic = f"{{concurrency: 1000, {requests}input_tokens: 214, output_tokens: {outputs}}}"
        made = deployment(
            traffic=traffic, slo="{}", model="glm-4.5-air", device="a100-80gb", engine="sglang"
        )
        return made.predict("sglang serve m --tp-size 4")

    equal = result("200")
    (note,) = (note for note in equal.notes if said in note)
    spread = result(note.partition("'output_tokens: ")[2].rstrip("'"))
    assert spread.load.requests_per_s < 0.8 * equal.load.requests_per_s
    assert f"{spread.load.requests_per_s:.4g} requests/s" in note
    # 1,000 requests of ShareGPT at once: 67.25 s (GPUStack, performance lab, glm-4.5-air/a100.md:
    # SGLang 0.5.4.post2).
    assert spread.load.requests_per_s == pytest.approx(1000 / 67.25, rel=0.25)
    for other in (result("200", requests=""), spread):
        assert not any("spread as those of chats" in note for note in other.notes)


@each_row(("engine", "start"), (("vllm", "vllm serve m -tp 4"), ("trtllm", STARTS["trtllm"][0])))
def test_a_band_holds_servers_that_stream_slower(deployment: Made, engine: str, start: Any) -> None:
    said = "the server streams tokens most of the time"
    ratios = []
    for concurrency in (4, 1000):
        traffic = f"{{concurrency: {concurrency}, input_tokens: 200, output_tokens: 200}}"
        made = deployment(
            engine=engine, model="gpt-oss-20b", traffic=traffic, slo="{}", extra=MXFP4
        )
        result = made.predict(start)
        ratios.append(result.tpot_s_band[1] / result.load.tpot_s.mean)
        assert any(said in note for note in result.notes) == (concurrency == 1000)
    assert ratios[1] == pytest.approx(2.0 * ratios[0])


def test_a_short_run_is_of_so_many_requests_and_reaches_what_the_launch_can(
    deployment: Made,
) -> None:
    start, lengths = "vllm serve m -tp 4", "input_tokens: 500, output_tokens: 200"
    loads = {
        name: deployment(traffic=f"{{{traffic}, {lengths}}}", slo="{}").predict(start).load
        for name, traffic in (
            ("loop", "concurrency: 64"),
            ("burst", "concurrency: 64, requests: 64"),
            ("two", "concurrency: 64, requests: 128"),
            ("long", "rate: 2/s"),
            ("short", "rate: 2/s, requests: 8"),
            ("flood", "rate: 1000/s, requests: 64"),
        )
    }
    rates = {name: load.requests_per_s for name, load in loads.items()}
    # Filling and draining the batch costs the more, the fewer requests follow each other.
    assert rates["burst"] < rates["two"] < rates["loop"]
    assert rates["long"] == pytest.approx(2.0)
    # Eight arrive within four seconds, and the last one takes its own seconds besides.
    assert rates["short"] < 2.0
    # All at once, whatever they are called.
    assert rates["flood"] == pytest.approx(rates["burst"], rel=0.05)
    assert all(load.keeps_up for load in loads.values())


def test_eager_steps_wait_for_the_launches_of_their_kernels(deployment: Made) -> None:
    traffic = "{concurrency: 4, input_tokens: 217, output_tokens: 202}"
    # 122.7 ms a token, Qwen3-30B-A3B on 2 Ascend 910B (GPUStack, performance lab, vLLM-Ascend
    # 0.9.1); 165 ms of 62 layers (vllm-ascend, issue 7723), of which this is 48.
    for device, expected_s in (("ascend-910b", 0.127), ("h100-sxm", 48 * 2.7 * 0.35e-3)):
        made = deployment(model="qwen3-30b-a3b", device=device, traffic=traffic, slo="{}")
        eager, graphs = (
            made.predict(f"vllm serve m -tp 2{flag}").load.tpot_s.mean
            for flag in (" --enforce-eager", "")
        )
        assert eager == pytest.approx(expected_s, rel=0.1)
        assert graphs < 0.5 * eager
    # Large steps take longer than their launches, and no flag changes them.
    traffic = "{concurrency: 512, input_tokens: 8000, output_tokens: 20}"
    made = deployment(model="qwen3-30b-a3b", engine="sglang", traffic=traffic, slo="{}")
    eager, graphs = (
        made.predict(f"sglang serve m --tp 2{flag}").load.requests_per_s
        for flag in (" --disable-cuda-graph", "")
    )
    assert eager == pytest.approx(graphs, rel=0.1)


def test_graphs_in_pieces_wait_for_the_launches_between_them(deployment: Made) -> None:
    # Kimi-K2-Thinking on 16 Ascend 910C of one node, one request: 57.7 ms a token (vllm-ascend's
    # tutorial), here 7 ms more of the host beside two nodes' collectives. `FULL_DECODE_ONLY` is one
    # graph, `NONE` is none (vllm-ascend, issue 5739).
    made = deployment(
        model="kimi-k2.5",
        device="ascend-910c",
        traffic="{concurrency: 1, input_tokens: 1024, output_tokens: 1024}",
        slo="{}",
        extra="quantization: int4",
    )
    modes = {
        mode: made.predict(f"vllm serve m -tp 16 --enable-expert-parallel{given}").load.tpot_s.mean
        for mode, given in {
            "usual": "",
            "level": " --compilation-config 3",
            "words": """ --compilation-config '{"level":' '3}'""",
            "whole": """ --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'""",
            "none": """ --compilation-config '{"cudagraph_mode": "NONE"}'""",
        }.items()
    }
    assert modes["usual"] == pytest.approx(64.7e-3, rel=0.1)
    assert modes["level"] == modes["words"] == modes["usual"]
    assert modes["whole"] < 0.75 * modes["usual"]
    assert modes["none"] > 2.0 * modes["usual"]


def test_launches_and_kernels_add_up_on_ascend(deployment: Made) -> None:
    # vllm-ascend's tutorials: Kimi-K2-Thinking with eight requests on 16 dies of 910C, and
    # Qwen3-Next with 32 on four; Qwen3-30B-A3B with one of 15,000 tokens (issue 4656).
    whole = """ --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'"""
    for model, device, ranks, sizes, flags, measured_s in (
        ("kimi-k2.5", "ascend-910c", 16, (8, 1024, 1024), " --enable-expert-parallel", 87.4e-3),
        ("qwen3-next-80b-a3b", "ascend-910c", 4, (32, 2048, 2048), whole, 54e-3),
        ("qwen3-30b-a3b", "ascend-910b", 4, (1, 15000, 100), whole, 20e-3),
    ):
        users, prompt, output = sizes
        made = deployment(
            model=model,
            device=device,
            traffic=f"{{concurrency: {users}, input_tokens: {prompt}, output_tokens: {output}}}",
            slo="{}",
            extra="quantization: int4" if model == "kimi-k2.5" else "",
        )
        load = made.predict(f"vllm serve m -tp {ranks}{flags}").load
        assert measured_s / 1.5 < load.tpot_s.mean < measured_s * 1.5, model


def test_tensor_ranks_of_two_servers_take_what_was_measured(deployment: Made) -> None:
    # DeepSeek-R1 on 2 x 8 H100, 128 tokens in and out, milliseconds a token
    # (tenstorrent/tt-inference-server, issue 356).
    measured_ms = {("vllm", 1): 25.9, ("vllm", 32): 44.7, ("sglang", 1): 23.1, ("sglang", 32): 32.5}
    starts = {
        "vllm": "vllm serve m --tensor-parallel-size 16",
        "sglang": "sglang serve m --tp 16 --nnodes 2 --node-rank 0 --dist-init-addr a:5000",
    }
    for (engine, concurrency), measured in measured_ms.items():
        traffic = f"{{concurrency: {concurrency}, input_tokens: 128, output_tokens: 128}}"
        made = deployment(
            model="deepseek-v3", engine=engine, traffic=traffic, slo="{}", extra=FP8_BLOCK
        )
        low_s, high_s = made.predict(starts[engine]).tpot_s_band
        assert low_s < measured * 1e-3 < high_s, (engine, concurrency)


@each_row(("slo", "is_stated"), (("{}", False), ("{ttft: {p90: 1s}}", True)))
def test_goodput_and_slos_are_named_where_one_is_stated(
    *, deployment: Made, slo: str, is_stated: bool
) -> None:
    traffic = "{concurrency: 8, input_tokens: 2000, output_tokens: 100}"
    result = deployment(traffic=traffic, slo=slo).estimate("vllm serve m -tp 4")
    text = words_of(serving_estimate_sections(result))
    assert ("goodput" in text) == ("SLO" in text) == result.has_slo == is_stated
    assert "requests/s per device" in text


@each_row("seed", range(8))
def test_random_traffic_is_estimated_or_refused_in_a_line(deployment: Made, seed: Any) -> None:
    draw = random.Random(seed)
    inputs, outputs = (round(2 ** draw.uniform(0, most)) for most in (21, 16))
    load = draw.choice((f"concurrency: {round(2 ** draw.uniform(0, 12))}", "rate: 0.01/s"))
    engine = draw.choice(sorted(STARTS))
    slo = draw.choice(("{}", "{ttft: {p90: 1s}, tpot: {p90: 50ms}}"))
    traffic = f"{{{load}, input_tokens: {inputs}, output_tokens: {outputs}}}"
    with contextlib.suppress(TunerError):  # Such as requests longer than the model takes.
        made = deployment(engine=engine, traffic=traffic, slo=slo)
        serving_estimate_sections(made.estimate(draw.choice(STARTS[engine])))


def test_a_prompt_on_one_attention_data_rank_delays_what_runs_on_all(deployment: Made) -> None:
    # DeepSeek-V4-Flash with one draft on 4 H200, DP 4: 17.0 ms a token at 16 requests of 10k and
    # 1k tokens of a trace (ai-dynamo/dynamo, recipes/deepseek-v4/deepseek-v4-flash, 1.3.0).
    command = (
        "vllm serve m -dp 4 --enable-expert-parallel --kv-cache-dtype fp8 --max-num-seqs 64"
        ' --speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\''
    )
    said = "would delay those that run on all: TPOT "

    def result(outputs: str) -> Any:
        traffic = f"{{concurrency: 16, input_tokens: 10000, output_tokens: {outputs}}}"
        drafts = "speculative: {method: mtp, draft_tokens: 1, acceptance: 0.8}"
        made = deployment(
            traffic=traffic,
            slo="{}",
            model="deepseek-v4-flash",
            device="h200-sxm",
            extra=f"{drafts}\n  quantization: fp8_block_mxfp4",
        )
        return made.predict(command)

    equal = result("1000")
    (note,) = (note for note in equal.notes if said in note)
    spread = result(note.partition("'output_tokens: ")[2].rstrip("'"))
    assert spread.load.tpot_s.mean == pytest.approx(0.0170, rel=0.35)
    assert spread.load.tpot_s.mean > 1.25 * equal.load.tpot_s.mean
    assert f"{said}{format_s(spread.load.tpot_s.mean)}" in note
    assert not any(said in note for note in spread.notes)


@each_row(
    ("requests", "input_tokens", "output_tokens", "tpot_s", "error"),
    (
        (1, 7234, 124, 0.0437, 0.35),
        (1, 1024, 128, 1 / 16.29, 0.1),
        (2, 1024, 128, 2 / 28.47, 0.1),
        (4, 1024, 128, 4 / 43.68, 0.15),
    ),
)
def test_nemotron_3_super_in_nvfp4_reads_as_many_bytes_as_its_checkpoint_has(
    deployment: Made,
    requests: int,
    input_tokens: int,
    output_tokens: int,
    tpot_s: float,
    error: float,
) -> None:
    # One DGX Spark, vLLM: 43.7 ms a token behind 7,234 of a prompt (vllm.ai, 2026-06-01); 69.5 GiB,
    # and 16.29, 28.47 and 43.68 tokens/s of 1, 2 and 4 requests of 1,024 and 128 (kubis.ai,
    # nemotron3-super-120b-topology-benchmark, 0.17.2).
    made = deployment(
        traffic=f"{{concurrency: {requests}, input_tokens: {input_tokens},"
        f" output_tokens: {output_tokens}}}",
        slo="{}",
        model="nemotron-3-super",
        device="gb10",
        nodes=1,
        devices_per_node=1,
        extra="quantization: nvfp4",
    )
    found = made.predict("vllm serve m --gpu-memory-utilization 0.85 --max-num-seqs 4")
    assert found.load.tpot_s.mean == pytest.approx(tpot_s, rel=error)
    assert found.memory.weight_bytes == pytest.approx(69.5 * 2**30, rel=0.03)


# Which link the KV caches of a launch take, by its connector and its variables.

Priced = Callable[..., Deployment]
VLLM = (
    "{} vllm serve m --tensor-parallel-size {}"
    ' --kv-transfer-config \'{{"kv_connector": "{}", "kv_role": "kv_producer"}}\''
)
SGLANG = (
    "{} python -m sglang.launch_server --model-path m --tp-size 2 --disaggregation-mode prefill"
)
MOONCAKE = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK MC_INTRANODE_NVLINK=true"


@pytest.fixture
def machine(tmp_path: Path) -> Priced:
    def made(*, engine: str, device: str = "h100-sxm", emit: str = "") -> Deployment:
        path = tmp_path / "spec.yaml"
        path.write_text(
            f"schema_version: 1\nmodel: {MODELS / 'llama-3.1-8b'}\n"
            f"cluster: {{pools: [{{name: p, device: {device}, devices_per_node: 8,"
            " nics_per_node: 1, nic: 25Gbit/s}]}\n"
            f"goal:\n  kind: serve\n  engine: {{name: {engine}}}\n"
            "  traffic: {rate: 1/s, input_tokens: 4000, output_tokens: 100}\n"
            "  slo: {ttft: {p90: 2s}, tpot: {p90: 50ms}}\n"
            "  objective: devices\n  modes: [disaggregated]\n"
            f"emit: [{emit or engine}]\n"
        )
        return Deployment(spec=read_serve_spec(path))

    return made


def test_a_launch_without_the_settings_has_the_rate_that_it_gets(machine: Priced) -> None:
    def read(text: str, **changes: str) -> tuple[float, str]:
        made = machine(**changes).predict(text)
        note = next((one for one in made.notes if one.startswith("KV caches")), "")
        return present(present(made.load).ttft_s).mean, note

    # 4000 tokens of 131,072 bytes, on two ranks: 5.5 ms over NVLink, 0.8 s over an eighth of a
    # card of 25 Gbit/s, 0.5 s by TCP.
    nvlink, none = read(VLLM.format("", 2, "NixlConnector"), engine="vllm")
    assert none == ""
    for text, slower_s, words in (
        (VLLM.format("UCX_TLS=rc,tcp", 2, "NixlConnector"), 0.83, "cross the NICs"),
        (VLLM.format("UCX_TLS=^cuda_ipc", 2, "NixlConnector"), 0.83, "cross the NICs"),
        (VLLM.format("UCX_TLS=cuda_ipc,tcp", 2, "NixlPullConnector"), 0.0, ""),
        (VLLM.format("", 2, "NixlPushConnector"), 0.0, ""),
        (VLLM.format("", 2, "MooncakeConnector"), 0.83, "MC_INTRANODE_NVLINK=true"),
        (VLLM.format("MC_INTRANODE_NVLINK=1", 2, "MooncakeConnector"), 0.0, ""),
        (VLLM.format("", 2, "LMCacheConnectorV1"), 0.83, ""),
    ):
        ttft_s, note = read(text, engine="vllm")
        assert ttft_s - nvlink == pytest.approx(slower_s, abs=0.02), text
        assert words in note, text
        assert bool(note) is bool(words), text
    bus, none = read(
        VLLM.format("UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y", 2, "NixlConnector"),
        engine="vllm",
        device="l40s",
    )
    assert none == ""
    slow, note = read(VLLM.format("", 2, "NixlConnector"), engine="vllm", device="l40s")
    assert slow - bus == pytest.approx(0.5, abs=0.05)
    assert "take TCP, 500 MB/s" in note
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on" in note
    inside, none = read(SGLANG.format(MOONCAKE), engine="sglang")
    assert none == ""
    outside, note = read(SGLANG.format(""), engine="sglang")
    assert outside - inside == pytest.approx(0.83, abs=0.02)
    assert MOONCAKE.replace(" ", " and ") in note


def test_a_launch_that_fills_the_machine_sends_to_another(machine: Priced) -> None:
    def of(ranks: int) -> float:
        made = machine(engine="vllm").predict(VLLM.format("", ranks, "NixlConnector"))
        assert not [one for one in made.notes if one.startswith("KV caches")]
        return present(present(made.load).ttft_s).mean

    assert of(8) > of(4) + 0.15


# What serving launches take of their hosts' memory.

GIB = 2**30
ON_HOSTS = "vllm serve m -tp 4"
SGLANG_ON_HOSTS = "python -m sglang.launch_server --model-path m --tp-size 4"


def test_caches_and_weights_on_hosts_are_counted_by_node(deployment: Made) -> None:
    for engine, text, gib in (
        # Of all ranks of an instance together; the others are a device's.
        ("vllm", f"{ON_HOSTS} --kv-offloading-size 256", 256.0),
        ("vllm", f"{ON_HOSTS} --swap-space 8 --cpu-offload-gb 4", 4 * 12.0),
        (
            "vllm",
            f"{ON_HOSTS} --kv-offloading-size 256 --kv-offloading-backend lmcache",
            0.0,
        ),
        (
            "sglang",
            f"{SGLANG_ON_HOSTS} --enable-hierarchical-cache --hicache-size 32",
            4 * 32e9 / GIB,
        ),
        ("vllm", ON_HOSTS, 0.0),
        ("sglang", f"{SGLANG_ON_HOSTS} --hicache-ratio 3", 0.0),
    ):
        result = deployment(engine=engine).predict(text)
        found = 0 if result.host_memory is None else result.host_memory.node_bytes
        assert found == pytest.approx(gib * GIB), text
    for flags, ratio in (("", 2.0), ("--hicache-ratio 1.5", 1.5)):
        own = deployment(engine="sglang").predict(
            f"{SGLANG_ON_HOSTS} --enable-hierarchical-cache {flags}"
        )
        assert own.host_memory.node_bytes == pytest.approx(4 * ratio * own.memory.cache_bytes)


def test_a_host_holds_what_its_launches_ask_for_or_they_do_not_fit(deployment: Made) -> None:
    made = deployment()
    asked = f"{ON_HOSTS} --kv-offloading-size 256"
    assert "cluster.pools[].host" in words_of(serving_estimate_sections(made.estimate(asked)))
    for memory, instances, fits in ((320, 1, True), (320, 2, False), (128, 1, False)):
        pool = made.spec.cluster.pools[0].model_copy(update={"host": Host(memory=memory * GIB)})
        spec = replace(made.spec, cluster=Cluster(pools=(pool,)))
        result = type(made)(spec=spec).predict(asked, instances=instances)
        assert result.fits == fits
        assert ("host memory: " in result.misfit) != fits


@each_row(("value", "said"), (("abc", "is not a number"), ("-4", "is outside 0..")))
def test_sizes_that_are_none_are_refused(deployment: Made, value: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        deployment().predict(f"{ON_HOSTS} --swap-space {value}")
