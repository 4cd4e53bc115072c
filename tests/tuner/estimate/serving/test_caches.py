"""Caches of public launches: their bytes, their types, and what must fit beside them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rows import Failures, each_row
from tuner.errors import SpecError
from tuner.goals.estimate import estimate_serving
from tuner.goals.serve_spec import read_serve_spec
from tuner.spec.huggingface.quantization import released_cache

Made = Callable[..., Any]
BUSY = "{concurrency: 8, input_tokens: 4000, output_tokens: 500}"
V4 = "vllm serve m --enable-expert-parallel --block-size 256 --kv-cache-dtype fp8"
GIB = 2**30


def test_releases_count_other_tokens_in_flight_and_the_estimate_says_both(
    deployment: Made,
) -> None:
    made = deployment(
        model="deepseek-v4-flash",
        device="b200-sxm",
        nodes=1,
        traffic=BUSY,
        extra="quantization: fp8_block_mxfp4",
    )
    wide = f"{V4} --gpu-memory-utilization 0.95 --max-num-batched-tokens 8192 --max-num-seqs 256"
    # vLLM 0.25.0 logs 20.43 requests of 1,048,576 tokens (vLLM issue 51454).
    logged = 20.43 * 1_048_576
    result = made.predict(f"{wide} -tp 8")
    said = next(note for note in result.notes if note.startswith("no release is stated"))
    assert "vllm before 0.26 logs" in said
    words = [int(word.replace(",", "")) for word in re.findall(r"[0-9,]{9,}", said)]
    assert words[0] == pytest.approx(logged, rel=0.02)
    # From 0.26 on 16,384 tokens in flight: 10,778 blocks of a request instead of 7,450.
    assert words[1] == result.logged_kv_tokens == pytest.approx(words[0] * 7450 / 10_778, rel=1e-6)


def test_an_older_release_of_the_spec_or_of_an_image_s_tag_counts(
    deployment: Made, tmp_path: Path
) -> None:
    made = deployment(model="deepseek-v4-flash", device="b200-sxm", nodes=1, traffic=BUSY)
    text = made.spec.path.read_text().replace("name: vllm", "name: vllm, version: 0.25.0")
    older = tmp_path / "older.yaml"
    older.write_text(text)
    flags = "-tp 8 --kv-cache-dtype fp8 --max-num-seqs 256 --max-num-batched-tokens 8192"
    newest = estimate_serving(made.spec.path, launch=f"vllm serve m {flags}")
    by_spec = estimate_serving(older, launch=f"vllm serve m {flags}")
    by_tag = estimate_serving(
        made.spec.path, launch=f"docker run vllm/vllm-openai:v0.25.0-cu129 m {flags}"
    )
    # From 0.26 on two steps are in flight: 10,778 blocks of a request instead of 7,450.
    for result in (by_spec, by_tag):
        assert result.logged_kv_tokens > 1.3 * newest.logged_kv_tokens
        assert any("are those of vllm 0.25.0" in note for note in result.notes)
    assert not any("are those of" in note for note in newest.notes)
    with pytest.raises(SpecError, match=r"no vllm '0\.25\.0' is described"):
        read_serve_spec(older)


def test_an_unstated_release_names_the_last_one_that_leaves_another_cache(
    deployment: Made, tmp_path: Path
) -> None:
    # local-inference-lab/rtx6kpro, models/minimax-m25.md, a page of 2026-03-09: a sampler that
    # sorts and a share of 0.9 leave 23.62 GiB and 399,424 tokens on 4 RTX PRO 6000.
    made = deployment(
        model="minimax-m2",
        device="rtx-pro-6000",
        nodes=1,
        slo="{}",
        traffic="{concurrency: 4, input_tokens: 4000, output_tokens: 500}",
        extra="quantization: fp8_block",
    )
    command = "vllm serve MiniMaxAI/MiniMax-M2.5 --tensor-parallel-size 4 --trust-remote-code"
    said = next(note for note in made.predict(command).notes if "no release is stated" in note)
    assert "vllm before 0.17 logs" in said
    words = [int(word.replace(",", "")) for word in re.findall(r"[0-9,]{7,}", said)]
    assert words[0] == pytest.approx(399_424, rel=0.02)
    text = made.spec.path.read_text().replace("name: vllm", "name: vllm, version: 0.16.0")
    older = tmp_path / "older.yaml"
    older.write_text(text)
    result = estimate_serving(older, launch=command, profiles=())
    assert result.memory.weight_bytes / GIB == pytest.approx(53.75, rel=0.01)
    assert result.memory.cache_bytes / GIB == pytest.approx(23.62, rel=0.02)
    assert result.logged_kv_tokens == words[0]
    assert not any("no release is stated" in note for note in result.notes)


def test_every_sequence_with_graphs_needs_a_block_for_its_state(deployment: Made) -> None:
    made = deployment(
        model="qwen3-next-80b-a3b",
        device="h100-sxm",
        nodes=1,
        traffic=BUSY,
        extra="quantization: fp8_block",
    )
    # By default 1,024 sequences, of which vllm-project/vllm#38270 lets no more in than blocks.
    start = "vllm serve m -tp 2 --gpu-memory-utilization"
    result = made.estimate(f"{start} 0.6")
    assert not result.fits
    assert re.search(r": \d{3} blocks, and each of 1024 sequences needs one", result.misfit)
    assert made.predict(f"{start} 0.6 --max-num-seqs 512").fits
    assert made.predict(f"{start} 0.6 --enforce-eager").fits
    # Graphs in pieces run such mixers without one; other parts of the JSON may have no value.
    for mode, fits in (("PIECEWISE", True), ("FULL_AND_PIECEWISE", False)):
        graphs = f"""--compilation-config '{{"cudagraph_mode":"{mode}","x":[1,$N]}}'"""
        assert made.predict(f"{start} 0.6 {graphs}").fits is fits
    assert any("--max-num-seqs 512" in line for one in result.changes for line in one.lines)


def test_awq_without_experts_quantises_every_linear_layer(deployment: Made) -> None:
    made = deployment(model="llama-3.1-70b", device="l40s", nodes=1, extra="quantization: int4")
    result = made.predict("vllm serve m --tensor-parallel-size 2")
    # Llama-3-70B AWQ in groups of 128 loads 18.55 GiB a device; groups of 32 are priced.
    assert result.memory.weight_bytes == pytest.approx(18.55 * GIB, rel=0.1)


def test_a_request_of_deepseek_v4_that_has_no_room_is_refused(deployment: Made) -> None:
    made = deployment(
        model="deepseek-v4-flash",
        device="h100-96gb-hbm2e",
        nodes=1,
        traffic="{concurrency: 1, input_tokens: 4000, output_tokens: 500}",
        extra="quantization: fp8_block_mxfp4",
    )
    steps = f"{V4} -tp 2 --gpu-memory-utilization 0.95 --max-model-len 30000"
    # As vLLM 0.22 with 16,384 tokens a step: 5.44 GiB of cache, one request needs 6.66 GiB.
    result = made.predict(f"{steps} --max-num-batched-tokens 16384")
    assert not result.fits
    assert "room for one request of 30000 tokens" in result.misfit
    assert result.memory.cache_bytes == pytest.approx(5.44 * GIB, rel=0.1)
    # Its source was an `LLM` object; a server has steps of 8,192 tokens (0.22, arg_utils.py).
    assert made.predict(steps).fits
    # 12,288 tokens in flight have room, and from 0.26 on 24,576 do not.
    said = made.predict(f"{steps} --max-num-batched-tokens 12288").notes
    said = next(note for note in said if note.startswith("no release is stated"))
    assert re.search(
        "before 0.26 logs 42,... tokens .* and starts, the newest .* and does not;", said
    )


@each_row(
    ("engine", "model", "device", "dtype"),
    (
        ("sglang", "deepseek-v3.2", "b200-sxm", "fp8"),
        ("sglang", "deepseek-v3.2", "h200-sxm", "bf16"),
        ("sglang", "glm-5", "b200-sxm", "fp8"),
        ("sglang", "deepseek-v4-flash", "h200-sxm", "fp8"),
        ("sglang", "deepseek-v3", "b200-sxm", "bf16"),
        ("vllm", "deepseek-v3.2", "b200-sxm", "bf16"),
        ("vllm", "glm-5", "b200-sxm", "fp8"),
        ("vllm", "glm-5", "h200-sxm", "bf16"),
        ("vllm", "glm-5", "rtx-pro-6000", "fp8"),
        ("vllm", "deepseek-v4-flash", "h200-sxm", "fp8"),
        ("trtllm", "deepseek-v3", "b200-sxm", "bf16"),
    ),
)
def test_engines_resolve_the_type_of_a_cache_by_model_and_device(
    deployment: Made, engine: str, model: str, device: str, dtype: str
) -> None:
    starts = {
        "vllm": "vllm serve m -tp 8",
        "sglang": "python -m sglang.launch_server --model m --tp 8",
        "trtllm": "trtllm-serve serve m --tp_size 8",
    }
    made = deployment(model=model, engine=engine, device=device, traffic=BUSY)
    # The plan takes what the launch takes, unless the spec states a type.
    assert made.spec.goal.kv_cache_dtype == dtype
    assert made.read(starts[engine]).kv_cache_dtype == dtype


def test_sparse_attention_and_weights_of_sglang_are_counted_by_rank(deployment: Made) -> None:
    made = deployment(
        model="deepseek-v3.2",
        engine="sglang",
        device="b200-sxm",
        nodes=1,
        traffic=BUSY,
        extra="quantization: fp8_block",
    )
    start = "python -m sglang.launch_server --model m --tp 8 --dp 8 --enable-dp-attention"
    result = made.predict(start, release="0.5.4")
    # 43.67 GiB hold 975,424 tokens of a rank (SGLang pull request 11309), counted as 708 bytes.
    each = result.memory.cache_bytes / (result.kv_tokens / 8)
    assert each == pytest.approx(61 * 788, rel=1e-5)
    assert 43.67 * GIB / each == pytest.approx(975_424, rel=1e-3)
    assert result.kv_tokens / 8 == pytest.approx(975_424, rel=0.04)
    gathered = made.predict(start).memory.weight_bytes
    dispatched = made.predict(f"{start} --moe-a2a-backend deepep").memory.weight_bytes
    # Seven eighths of shared experts (58 x 44 M), dense networks (3 x 396 M) and head (2 x 927 M).
    less = 58 * 44.04e6 + 3 * 396.4e6 + 2 * 926.7e6
    assert dispatched - gathered == pytest.approx(less * 7 / 8, rel=0.01)


@each_row(
    ("device", "release", "each"),
    (
        ("h200-sxm", "", 656),
        ("b200-sxm", "0.18.1", 656),
        # A log of 0.26 has 50.62 GiB for 1,139,456 tokens: 78 x 576 and 21 indexers' 132 bytes.
        ("b200-sxm", "0.19.0", 576),
        ("b200-sxm", "", 576),
    ),
)
def test_vllm_keeps_scales_beside_sparse_attention_s_cache_where_flashmla_reads_it(
    deployment: Made, device: str, release: str, each: int
) -> None:
    fp8 = "quantization: fp8_block"
    made = deployment(model="glm-5", device=device, nodes=1, traffic=BUSY, extra=fp8)
    text = made.spec.path.read_text()
    if release:
        text = text.replace("name: vllm", f"name: vllm, version: {release}")
    made.spec.path.write_text(text)
    result = estimate_serving(made.spec.path, launch="vllm serve m -tp 8 --kv-cache-dtype fp8")
    found = result.memory.cache_bytes / result.kv_tokens
    assert found == pytest.approx(78 * (each + 132), rel=1e-4)


def test_drafts_take_memory_whether_or_not_their_acceptance_is_known(deployment: Made) -> None:
    start = "vllm serve m -tp 8 --enable-expert-parallel"
    drafted = f"""{start} --speculative-config '{{"method": "mtp", "num_speculative_tokens": 3}}'"""
    found = {}
    for acceptance in ("", "\n  speculative: {method: mtp, draft_tokens: 3, acceptance: 0.8}"):
        made = deployment(
            model="deepseek-v3",
            device="h200-sxm",
            nodes=1,
            traffic=BUSY,
            extra="quantization: fp8_block" + acceptance,
        )
        plain, more = made.predict(start), made.predict(drafted)
        assert more.memory.weight_bytes > plain.memory.weight_bytes + GIB
        assert more.memory.reserve_bytes > plain.memory.reserve_bytes
        found[acceptance] = more.memory
    unknown, known = found.values()
    assert unknown.weight_bytes == known.weight_bytes
    assert unknown.reserve_bytes == known.reserve_bytes
    assert unknown.limit_ratio == known.limit_ratio


def test_what_tensorrt_llm_allocates_behind_its_cache_must_fit(deployment: Made) -> None:
    made = deployment(
        model="qwen3-235b-a22b",
        engine="trtllm",
        device="h200-sxm",
        nodes=1,
        traffic=BUSY,
        extra="quantization: fp8_block",
    )
    start = (
        "python3 -m dynamo.trtllm --model-path m --tensor-parallel-size 4"
        " --moe-expert-parallel-size 4 --max-batch-size 512 --max-num-tokens 1024"
        " --max-seq-len 8192 --kv-cache-config.dtype fp8 --disaggregation-mode decode"
        " --cuda-graph-config.max-batch-size 512 --free-gpu-memory-fraction"
    )
    # Failed with 0.95 and ran with 0.85, 65.73 GiB of cache (Dynamo pull request 9746).
    assert not made.predict(f"{start} 0.95").fits
    result = made.predict(f"{start} 0.85")
    assert result.fits
    assert result.memory.cache_bytes == pytest.approx(65.73 * GIB, rel=0.02)


def test_tensorrt_llm_starts_gpt_oss_with_its_default_share(deployment: Made) -> None:
    made = deployment(
        model="gpt-oss-120b",
        engine="trtllm",
        device="h100-sxm",
        nodes=1,
        traffic="{concurrency: 1000, input_tokens: 215, output_tokens: 194}",
        extra="quantization: mxfp4",
    )
    # It served 1,000 requests at once (gpustack performance lab, TensorRT-LLM 1.0.0).
    result = made.predict("trtllm-serve openai/gpt-oss-120b --max_seq_len 32768")
    assert result.fits, result.misfit


def test_whole_prompts_take_what_waits_and_not_what_a_step_may_hold(deployment: Made) -> None:
    made = deployment(
        model="deepseek-v3",
        engine="sglang",
        device="b200-sxm",
        nodes=1,
        traffic="{concurrency: 16, input_tokens: 2400, output_tokens: 300}",
        extra="quantization: fp8_block",
    )
    start = (
        "python -m sglang.launch_server --model m --tp 4 --chunked-prefill-size -1"
        " --max-prefill-tokens 260768"
    )
    # 1.5 MiB of each of these tokens are more than the device has (SGLang 0.5.23).
    assert "default share of memory, -1.1" in made.predict(start).misfit
    assert made.predict(f"{start} --mem-fraction-static 0.95").fits


def test_a_checkpoint_may_ask_for_the_type_of_its_cache(failures: Failures) -> None:

    fp8 = {"num_bits": 8, "type": "float", "dynamic": False}
    for fields, dtype in (
        (None, "bf16"),
        ({"quant_method": "fp8"}, "bf16"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": fp8}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": fp8}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "bf16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": fp8 | {"type": "int"}}, "bf16"),
    ):
        with failures.of(fields):
            assert released_cache({"quantization_config": fields}) == dtype
            assert released_cache({"text_config": {"quantization_config": fields}}) == dtype


def test_a_vision_tower_takes_memory_unless_the_engine_leaves_it_out(deployment: Made) -> None:
    made = deployment(
        model="qwen3.5-397b-a17b",
        device="b200-sxm",
        nodes=1,
        traffic=BUSY,
        extra="quantization: fp8_block",
    )
    sglang = "python -m sglang.launch_server --model m --tp"
    # 27 layers of width 1152 with networks of 4304, joined into tokens of width 4096; in bf16.
    tower = 27 * (4 * 1152**2 + 2 * 1152 * 4304) + 4608 * (4608 + 4096)
    for start, ranks in (("vllm serve m -tp 8", 8), (f"{sglang} 4", 4)):
        whole = made.predict(start).memory.weight_bytes
        less = made.predict(f"{start} --language-model-only").memory.weight_bytes
        assert whole - less == pytest.approx(2 * tower / ranks, abs=1)
