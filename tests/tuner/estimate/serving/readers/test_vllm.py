"""Reads commands of vLLM as people write them."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.expect import refused
from tests.rows import each_row
from tuner.config.serve import Role
from tuner.costs.serve.engine import InstanceDegrees
from tuner.errors import SpecError
from tuner.search.serve.demand import MOST_RUNNING

Made = Callable[..., Any]


@each_row(
    ("command", "degrees"),
    [
        ("vllm serve m", InstanceDegrees()),
        ("vllm serve m -tp 8", InstanceDegrees(attention_tensor=8, moe_tensor=8)),
        (
            "vllm serve m --tensor-parallel-size=4 -ep",
            InstanceDegrees(attention_tensor=4, expert=4),
        ),
        (
            "vllm serve m -tp 2 -dp 4 --enable-expert-parallel",
            InstanceDegrees(attention_tensor=2, attention_data=4, expert=8),
        ),
        (
            "vllm serve --enable-expert-parallel m -dp 8",
            InstanceDegrees(attention_data=8, expert=8),
        ),
        (
            "CUDA_VISIBLE_DEVICES=0,1 python -m vllm.entrypoints.openai.api_server --model m"
            " --tensor_parallel_size 2",
            InstanceDegrees(attention_tensor=2, moe_tensor=2),
        ),
        (
            "TP=4\ndocker run --gpus all vllm/vllm-openai vllm serve m -tp $TP",
            InstanceDegrees(attention_tensor=4, moe_tensor=4),
        ),
        ("-tp 2 --max-num-seqs 8", InstanceDegrees(attention_tensor=2, moe_tensor=2)),
    ],
)
def test_degrees_are_read_however_they_are_spelled(
    deployment: Made, command: str, degrees: InstanceDegrees
) -> None:
    launch = deployment().read(command)
    assert launch.engine == "vllm"
    assert launch.setting.degrees == degrees


def test_everything_else_that_counts_is_read(deployment: Made) -> None:
    launch = deployment().read(
        "vllm serve m -tp 2 --max-num-seqs 96 --max-num-batched-tokens 16k --max-model-len 8K"
        " --gpu-memory-utilization 0.85 -q fp8 --kv-cache-dtype fp8_e4m3"
        " --no-enable-chunked-prefill --seed 3 --enforce-eager --speculative-config '{}'"
        ' --kv-transfer-config=\'{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}\''
    )
    assert launch.setting.running == 96
    assert launch.setting.step_tokens == 16_000
    assert launch.max_model_len == 8192
    assert launch.memory_ratio == 0.85
    assert (launch.quantization, launch.kv_cache_dtype) == ("fp8", "fp8")
    assert not launch.setting.is_chunked
    assert launch.role is Role.DECODE
    assert launch.flags.ignored == ("--seed 3",)
    assert launch.flags.unpriced == ()
    assert any("--speculative-config has no price" in note for note in launch.notes)
    assert "--tensor-parallel-size 2" in launch.flags.understood


@each_row(
    ("options", "streamed"),
    [
        ("", 1.0),
        ("--stream-interval 4", 4.0),
        ("--api-server-count 2", 2.0),
        # Eight ranks have eight servers unless a launch says otherwise.
        ("-dp 8 -ep", 1.0),
        ("-dp 8 -ep --api-server-count 2 --stream-interval 2", 0.5),
    ],
)
def test_the_servers_of_ranks_stream_so_many_tokens_at_once(
    deployment: Made, options: str, streamed: float
) -> None:
    launch = deployment().read(f"vllm serve m {options}")
    assert launch.setting.streamed_tokens == streamed
    assert not launch.flags.unpriced


def test_a_stated_cache_counts_in_place_of_a_share(deployment: Made) -> None:
    sizes = {"10737418240": 10 * 2**30, "10G": 10 * 2**30, "25.5g": 25_500_000_000}
    for stated, size in sizes.items():
        launch = deployment().read(f"vllm serve m -tp 2 --kv-cache-memory-bytes {stated}")
        assert launch.cache_bytes == size
    assert deployment().read("vllm serve m").cache_bytes is None
    both = "vllm serve m --kv-cache-memory-bytes 10G --gpu-memory-utilization 0.8"
    assert any("sets the cache" in note for note in deployment().read(both).notes)


def test_what_is_not_stated_or_takes_no_effect_is_said(deployment: Made) -> None:
    launch = deployment().read("vllm serve m")
    assert launch.setting.running == MOST_RUNNING
    assert any("no --max-num-seqs" in note for note in launch.notes)
    launch = deployment().read('vllm serve m --kv-transfer-config \'{"kv_role": "kv_both"}\'')
    assert launch.role is Role.AGGREGATED
    assert any("kv_both" in note for note in launch.notes)
    launch = deployment().read("vllm serve m -dp 8 --all2all-backend pplx")
    assert any("takes effect only under --enable-expert-parallel" in note for note in launch.notes)
    assert any("pplx is priced as" in note for note in launch.notes)
    dense = deployment(model="llama-3.1-8b").read("vllm serve m -ep")
    assert any("changes nothing of a model without" in note for note in dense.notes)


def test_without_experts_data_parallel_ranks_are_instances(deployment: Made) -> None:
    launch = deployment(model="llama-3.1-8b").read("vllm serve m -tp 2 -dp 4")
    assert launch.copies == 4
    assert launch.setting.degrees == InstanceDegrees(attention_tensor=2)
    launch = deployment().read("vllm serve -tp 2 --gpu_memory_utilization=0.98 /models/mixtral")
    assert launch.memory_ratio == 0.98


@each_row(
    ("flags", "says"),
    [
        ("-tp 3", "deals 32 attention heads to 3 ranks; .* --tensor-parallel-size 2"),
        ("-tp 64", "deals 32 attention heads to 64 ranks; .* --tensor-parallel-size 32"),
        ("-tp 32", "takes 32 devices, pool 'gpus' has 16; the nearest is 16"),
        ("-tp 4 --tensor-parallel-size 8", "-tp 4 and --tensor-parallel-size 8 are one flag"),
        ("-dp 16 -ep", "spreads 8 experts over 16 ranks; the nearest that divides is 8"),
        ("-pp 64", "64 stages of 32 layers; the nearest is 32"),
        (
            '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 99}\'',
            "99 is not in 1..16",
        ),
        ("-tp 0", "outside 1"),
        ("-tp eight", "not a whole number"),
        ("-tp", "no value"),
        ("-tp $TP", "has no value here"),
        ("--max-num-seqs 512 --max-num-batched-tokens 256", "nearest is .*-tokens 512"),
        (
            "--disable-chunked-prefill --max-model-len 8192 --max-num-batched-tokens 4096",
            "the nearest is 8192",
        ),
        ("--enable-chunked-prefill --no-enable-chunked-prefill", "keep one"),
        ("--max-model-len 99999", "beyond the model's 32768 positions; the nearest is 32768"),
        ("--max-model-len 1.5", "not a number of tokens"),
        ("--kv-cache-memory-bytes -1", "not a number of bytes"),
        ("--kv-cache-memory-bytes 0", "outside 1"),
        ("--kv-cache-memory-bytes 9999T", "the nearest is 1125899906842624"),
        ("--max-model-len 0", "outside 1"),
        ("--gpu-memory-utilization 1.4", "the nearest is 1"),
        ("--gpu-memory-utilization 0", "leaves no memory"),
        ("--kv-cache-dtype int4", "has no price; there is auto"),
        ("-q two_bits", "has no price; leave it out"),
        ("--kv-transfer-config '{'", "is no JSON"),
        ("--kv-transfer-config '[]'", "is no JSON object"),
        ("-dp 8 -ep --eplb-config.num_redundant_experts 8", "needs --enable-eplb and"),
        ("-tp 8 --enable-eplb --eplb-config.num_redundant_experts 8", "--enable-expert-parallel"),
        (
            "-dp 8 -ep --enable-eplb --eplb-config.num_redundant_experts 9",
            r"17 experts \(9 of them .* divide are 1 and 17.*, or --eplb-config\S+ 8 or 16",
        ),
        ('--eplb-config \'{"num_redundant_experts": "x"}\'', "is no number of experts"),
        ("--eplb-config.num_redundant_experts '\"8000000000\"'", "is no number of experts"),
        ('--kv-transfer-config \'{"kv_role": ["x"]}\'', "is none of"),
        ('--kv-transfer-config \'{"kv_role": "x"}', "quote is never closed"),
    ],
)
def test_contradictions_are_one_line_with_the_nearest_legal_value(
    deployment: Made, flags: str, says: str
) -> None:
    with refused(SpecError, match=f"^launch.sh: .*{says}"):
        deployment().read(f"vllm serve m {flags}")


@each_row(
    "config",
    (
        '--eplb-config \'{"num_redundant_experts": 4, "window_size": 9}\'',
        "--eplb-config.num_redundant_experts 4",
        "--eplb-config.num-redundant-experts=4",
    ),
)
def test_copies_of_experts_are_read_however_they_are_spelled(deployment: Made, config: str) -> None:
    launch = deployment().read(f"vllm serve m -tp 2 -dp 6 -ep --enable-eplb {config}")
    assert launch.setting.degrees.expert == 12
    assert launch.setting.redundant_experts == 4, config
    assert not launch.flags.unpriced


@each_row(
    ("device", "tokens", "running"),
    (
        ("h100-sxm", 8192, 1024),
        ("a100-80gb-sxm", 2048, 256),
        ("l40s", 2048, 256),
        ("b200-sxm", 16_384, 1024),
    ),
)
def test_batches_that_are_not_stated_follow_the_device(
    deployment: Made, device: str, tokens: int, running: int
) -> None:
    setting = deployment(device=device).read("vllm serve m -tp 8").setting
    assert (setting.step_tokens, setting.running) == (tokens, running), device


def test_a_launch_of_zero_computation_experts_is_read_and_priced(deployment: Made) -> None:
    longcat = deployment(model="longcat-flash", device="h200-sxm", nodes=8)
    assert longcat.read("vllm serve m -tp 2 -pp 28").setting.degrees.pipeline == 28
    with pytest.raises(SpecError, match="29 stages of 28 layers; the nearest is 28"):
        longcat.read("vllm serve m -pp 29")
    longcat = deployment(model="longcat-flash", device="h200-sxm", extra="quantization: fp8_block")
    estimate = longcat.predict("vllm serve m -tp 8 --enable-expert-parallel --max-num-seqs 64")
    # 561 GB in fp8 over eight devices, the embedding and routers in bf16.
    assert 65e9 < estimate.memory.weight_bytes < 75e9
    assert 0.005 < estimate.load.tpot_s.mean < 0.2


def test_several_mistakes_are_said_at_once(deployment: Made) -> None:
    with pytest.raises(SpecError) as refused:
        deployment().read(
            "vllm serve m --max-num-seqs abc --kv-cache-dtype int3 --gpu-memory-utilization 95"
        )
    said = str(refused.value)
    assert "3 mistakes: (1) " in said
    for name in ("--max-num-seqs 'abc'", "--kv-cache-dtype 'int3'", "--gpu-memory-utilization 95"):
        assert name in said
