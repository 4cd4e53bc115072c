"""Reads commands of SGLang as people write them."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.expect import refused
from tests.rows import each_row
from tuner.config.serve import Role
from tuner.costs.serve.engine import InstanceDegrees
from tuner.errors import SpecError

Made = Callable[..., Any]
START = "python3 -m sglang.launch_server --model-path m"


@each_row(
    ("flags", "degrees"),
    [
        ("", InstanceDegrees()),
        ("--tp 8", InstanceDegrees(attention_tensor=8, moe_tensor=8)),
        ("--tp-size 8 --ep 8", InstanceDegrees(attention_tensor=8, expert=8)),
        ("--tp 8 --ep-size 2", InstanceDegrees(attention_tensor=8, expert=2, moe_tensor=4)),
        (
            "--tp 8 --dp 4 --enable-dp-attention --ep 8",
            InstanceDegrees(attention_tensor=2, attention_data=4, expert=8),
        ),
        ("--tp 8 --attn-dp-size 8", InstanceDegrees(attention_data=8, moe_tensor=8)),
        (
            "--tp 8 --attn-dp-size 8 --moe-a2a-backend deepep",
            InstanceDegrees(attention_data=8, expert=8),
        ),
    ],
)
def test_degrees_are_read_however_they_are_spelled(
    deployment: Made, flags: str, degrees: InstanceDegrees
) -> None:
    launch = deployment(engine="sglang").read(f"{START} {flags}")
    assert launch.engine == "sglang"
    assert launch.setting.degrees == degrees


def test_machines_of_stages_divide_them_and_are_there(deployment: Made) -> None:
    read = deployment(engine="sglang", nodes=4).read
    for flags, machines in (
        ("--tp 4 --pp-size 4 --nnodes 4", 4),
        ("--tp 4 --pp-size 4 --nnodes 2", 1),
        ("--tp 4 --pp-size 2 --nnodes $NODES", 1),
        ("--tp 8 --nnodes 2", 1),
    ):
        assert read(f"{START} {flags}").setting.degrees.stage_machines == machines, flags
    for flags, message in (
        ("--tp 4 --pp-size 4 --nnodes 3", "does not divide 4 stages of a pipeline; the nearest is"),
        ("--tp 4 --pp-size 8 --nnodes 8", "--nnodes 8 is more than the 4 machines of"),
        ("--tp 8 --nnodes", "--nnodes has no value"),
        ("--tp 8 --nnodes foo", "is not a whole number"),
        ("--tp 8 --nnodes 0", "--nnodes 0 is outside 1.."),
    ):
        with refused(SpecError, message):
            read(f"{START} {flags}")


def test_sizes_of_an_instance_are_divided_by_its_ranks(deployment: Made) -> None:
    launch = deployment(engine="sglang").read(
        f"{START} --tp 8 --dp 8 --enable-dp-attention --max-running-requests 1024"
        " --chunked-prefill-size 65536 --mem-fraction-static 0.8 --context-length 16384"
        " --kv-cache-dtype fp8_e4m3 --disaggregation-mode prefill --disable-cuda-graph"
        " --watchdog-timeout 9"
    )
    assert launch.setting.running == 128
    assert launch.setting.step_tokens == 8192
    assert launch.memory_ratio == 0.8
    assert launch.max_model_len == 16384
    assert launch.kv_cache_dtype == "fp8"
    assert launch.role is Role.PREFILL
    assert launch.flags.unpriced == ()
    assert launch.flags.ignored == ("--watchdog-timeout 9",)
    assert launch.flags.timeless == ("--model-path m",)


def test_data_parallelism_without_attention_is_separate_instances(deployment: Made) -> None:
    launch = deployment(engine="sglang").read(f"{START} --tp 2 --dp 4")
    assert launch.copies == 4
    assert launch.setting.degrees == InstanceDegrees(attention_tensor=2, moe_tensor=2)
    assert any("4 separate instances" in note for note in launch.notes)
    twice = "python -m sglang.launch_server --model Qwen/QwQ-32B --model-path /home/QwQ-32B --tp 8"
    assert deployment(engine="sglang").read(twice).setting.degrees.attention_tensor == 8


def test_backends_of_the_all_to_all_are_priced_as_they_spread(deployment: Made) -> None:
    launch = deployment(engine="sglang").read(
        f"{START} --tp 8 --ep-size 4 --moe-a2a-backend deepep --deepep-mode normal"
    )
    assert launch.setting.degrees.expert == 8
    assert launch.setting.a2a_backend == "deepep_normal"
    assert any("all 8 ranks" in note for note in launch.notes)
    launch = deployment(engine="sglang").read(
        f"{START} --tp 8 --moe-a2a-backend mooncake --deepep-mode auto"
    )
    assert any("mooncake is priced as" in note for note in launch.notes)
    assert any("--deepep-mode takes effect" in note for note in launch.notes)
    launch = deployment(engine="sglang").read(f"{START} --tp 8 --disable-cuda-graph")
    assert launch.setting.graph_sequences == 0
    assert launch.flags.unpriced == ()


@each_row(
    ("flags", "says"),
    [
        ("--tp 8 --attn-dp-size 3", "does not divide --tp-size 8; the nearest that does is 2"),
        ("--tp 8 --dp 6 --enable-dp-attention", "--dp-size 6 does not divide --tp-size 8"),
        (
            "--tp 8 --attn-dp-size 4 --dp-size 8 --enable-dp-attention",
            "are one setting; keep --attn-dp-size 4",
        ),
        ("--tp 6", "deals 32 attention heads to 6 ranks; the nearest .* is --tp-size 4"),
        ("--tp 12 --attn-dp-size 4", "to 3 ranks; the nearest that divides is --tp-size 8"),
        ("--tp 8 --ep 3", "--ep-size 3 does not divide --tp-size 8; the nearest that does is 2"),
        ("--tp 16 --ep 16", "spreads 8 experts over 16 ranks; the nearest that divides is 8"),
        ("--tp 8 --dp 4", "takes 32 devices, pool 'gpus' has 16"),
        ("--tp 8 --attn-dp-size 8 --max-running-requests 4", "the nearest is 8"),
        ("--pp-size 64", "64 stages of 32 layers; the nearest is 32"),
        ("--speculative-num-steps 3", "without --speculative-algorithm"),
        ("--disaggregation-mode both", "is none of null, prefill, decode"),
        ("--moe-a2a-backend deepep --deepep-mode fast", "is none of auto, normal, low_latency"),
        ("--mem-fraction-static 88", "the nearest is 1"),
        ("--context-length 40000", "the nearest is 32768"),
        ("--tp 8 --attn-dp-size 8 --chunked-prefill-size 4", "-size 4 leaves none .* is 8"),
        ("--chunked-prefill-size -2", "outside -1"),
        ("--tp 8 --tp-size 4", "are one flag"),
    ],
)
def test_contradictions_are_one_line_with_the_nearest_legal_value(
    deployment: Made, flags: str, says: str
) -> None:
    with refused(SpecError, match=says):
        deployment(engine="sglang").read(f"{START} {flags}")


def test_experts_are_refused_where_ranks_do_not_divide_them(deployment: Made) -> None:
    with pytest.raises(SpecError, match="without experts; the nearest is 1"):
        deployment(model="llama-3.1-8b").read(f"{START} --tp 8 --ep 8")
    made = deployment(engine="sglang", model="deepseek-v3", nodes=9)
    says = (
        r"272 experts \(16 of them redundant\) over 72 ranks; the nearest that divide are 68 and"
        r" 136, or --ep-num-redundant-experts 32"
    )
    with pytest.raises(SpecError, match=says):
        made.read(
            f"{START} --tp-size 72 --dp-size 72 --enable-dp-attention --moe-a2a-backend deepep"
            " --ep-num-redundant-experts 16"
        )


def test_what_memory_depends_on_is_read(deployment: Made) -> None:
    launch = deployment(engine="sglang", model="deepseek-v3", nodes=9).read(
        f"{START} --tp-size 72 --dp-size 72 --enable-dp-attention --enable-deepep-moe"
        " --ep-num-redundant-experts 32 --cuda-graph-bs 128 256 --max-total-tokens 131072"
    )
    assert launch.setting.degrees == InstanceDegrees(attention_data=72, expert=72)
    assert launch.setting.redundant_experts == 32
    assert launch.setting.graph_sequences == 256
    assert launch.setting.a2a_backend == "deepep_low_latency"
    assert launch.most_cached_tokens == 131_072
    # Of 8,192 tokens that the engine takes over all data ranks on such a device.
    assert launch.setting.step_tokens == 8192 // 72


def test_kept_states_cap_the_running_requests_of_hybrids(deployment: Made) -> None:
    hybrid = deployment(engine="sglang", model="nemotron-3-nano")
    flags = f"{START} --tp 8 --attn-dp-size 8 --max-running-requests 1024"
    # 320 states of a rank are those of 64 requests, five each; of 320 without the radix cache.
    for more, running in (
        ("", 128),
        ("--max-mamba-cache-size 2560", 64),
        ("--max-mamba-cache-size 2560 --disable-radix-cache", 128),
    ):
        assert hybrid.read(f"{flags} {more}").setting.running == running
    stated = hybrid.read(f"{flags} --max-mamba-cache-size 2560").notes
    assert not any("mamba" in note for note in stated)
    assert any("no --max-mamba-cache-size" in note for note in hybrid.read(flags).notes)
    plain = deployment(engine="sglang").read(f"{flags} --max-mamba-cache-size 8")
    assert plain.setting.running == 128


def test_memory_is_divided_between_states_and_pages_of_hybrids(deployment: Made) -> None:
    hybrid = deployment(engine="sglang", model="nemotron-3-nano", slo="{}")
    start = f"{START} --tp 2 --max-running-requests 64"
    usual, even, few, stated = (
        hybrid.predict(f"{start} {more}")
        for more in (
            "",
            "--mamba-full-memory-ratio 1",
            "--mamba-full-memory-ratio 0.01",
            "--max-mamba-cache-size 320",
        )
    )
    assert usual.logged_kv_tokens / even.logged_kv_tokens == pytest.approx(2.0 / 1.9, rel=1e-3)
    assert few.logged_kv_tokens > usual.logged_kv_tokens
    assert few.instance.max_batch < usual.instance.max_batch == stated.instance.max_batch
    with pytest.raises(SpecError, match="the engine's own is"):
        hybrid.read(f"{start} --mamba-full-memory-ratio 0")
