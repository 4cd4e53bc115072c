"""A step as a sum of operations, on a datasheet alone."""

from dataclasses import replace

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.decoders import (
    DEEPSEEK_V3,
    GLM_5,
    GLM_45,
    LLAMA_8B,
    LLAMA_70B,
    MINIMAX_M2,
    QWEN35_397B,
)
from tuner.costs.serve.decoder import Decoder, Formats
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import TORCH_ROUTING_S, Iteration, sustained_factor
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Generation
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.ops import Op
from tuner.prices.peer_link import LAUNCH_S
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.machine import ARRIVAL_S, PUSH_S, ServingMachine

FP8 = Formats(
    attention="fp8_block", output="fp8_block", ffn="fp8_block", experts="fp8_block", kv="fp8"
)
ONE = np.array([1.0])


def iteration(decoder: Decoder, **named: int) -> Iteration:
    return Iteration(
        decoder=decoder,
        formats=FP8,
        degrees=InstanceDegrees(**named),
        traits=ENGINE_TRAITS["sglang"],
        machine=ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("h200-sxm"), tables=None),
    )


def test_one_token_reads_all_weights_of_a_dense_model() -> None:
    # 7.5 billion weights outside the embedding at a byte each and 0.8 of 4.8 TB/s: 1.8 ms, and
    # launches of 160 kernels.
    assert 1.8e-3 < float(iteration(LLAMA_8B).linear_s(ONE)[0]) < 3.0e-3


@each_row("decoder", [LLAMA_70B, DEEPSEEK_V3, GLM_5, QWEN35_397B])
def test_every_kind_of_attention_is_priced_and_takes_longer_for_more(decoder: Decoder) -> None:
    own = iteration(decoder, attention_tensor=8, expert=8)
    sizes = np.array([1.0, 16.0, 256.0, 4096.0])
    for seconds in (own.linear_s(sizes), own.prompt_s(sizes), own.decode_s(sizes, sizes * 0 + 1e3)):
        assert (np.diff(seconds) > -1e-12).all()
        assert (seconds > 0.0).all()
    assert own.machine.estimated


def test_tensor_parallelism_pays_in_exchange_what_it_saves_in_products() -> None:
    at = np.array([64.0])
    alone, split = (
        iteration(LLAMA_70B, attention_tensor=degree).linear_parts(at) for degree in (1, 8)
    )
    assert float(split["projections"][0]) < float(alone["projections"][0])
    assert float(alone["exchange"][0]) == 0.0
    assert float(split["exchange"][0]) > 0.0


def test_host_work_grows_with_the_sequences() -> None:
    plain = iteration(LLAMA_8B)
    paid = Iteration(
        decoder=LLAMA_8B,
        formats=FP8,
        degrees=InstanceDegrees(),
        traits=ENGINE_TRAITS["vllm"],
        machine=plain.machine,
        sequence_s=25e-6,
    )
    at = np.array([100.0])
    assert float((paid.head_s(at) - plain.head_s(at))[0]) == pytest.approx(2.5e-3)


def test_clocks_fall_only_where_the_device_is_busy() -> None:
    found = sustained_factor(np.array([1.0, 128.0, 1024.0, 8192.0]))
    assert found == pytest.approx([1.0, 1.0, 1.1, 1.1])


def test_second_copies_of_experts_level_their_load(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def measured_s(_: object, op: Op) -> Floats:
        assert op.software
        if op.operation == "moe":
            seen.append(op.kind)
        return np.array([1.0])

    monkeypatch.setattr(ServingMachine, "measured_s", measured_s)
    own = iteration(DEEPSEEK_V3, attention_data=8, expert=8)
    own.linear_parts(np.array([64.0]))
    replace(own, redundant_experts=32).linear_parts(np.array([64.0]))
    assert set(seen[: len(seen) // 2]) == {"power_law_1.01"}
    assert set(seen[len(seen) // 2 :]) == {"balanced"}


def test_norms_over_all_heads_meet_once_more_where_ranks_share_them() -> None:
    plain = replace(MINIMAX_M2.layers[0].attention, norms_all_heads=False)
    other = replace(MINIMAX_M2, layers=(replace(MINIMAX_M2.layers[0], attention=plain),))
    assert MINIMAX_M2.layers[0].attention.norms_all_heads
    start_s = ARRIVAL_S + PUSH_S[Generation.HOPPER]
    for tensor, all_reduces in ((1, 0), (8, 1)):
        own, without = (
            iteration(one, attention_tensor=tensor, expert=tensor).linear_parts(ONE)
            for one in (MINIMAX_M2, other)
        )
        more_s = float((own["exchange"] - without["exchange"])[0])
        assert more_s == pytest.approx(62 * all_reduces * start_s, rel=1e-3)
        assert own["small"] > without["small"]


def test_an_indexer_has_the_kernels_of_the_engines_release() -> None:
    own = iteration(GLM_5, attention_tensor=8)
    past = np.array([1000.0])
    older, newest = (
        float(replace(own, release=release).decode_s(ONE, past)[0]) for release in ("0.5.8", "")
    )
    assert older - newest == pytest.approx(78 * 8 * LAUNCH_S)


def test_layers_have_the_kernels_of_the_engines_release() -> None:
    sheet = find_device("b200-sxm")

    def parts(decoder: Decoder, release: str, experts: str) -> dict[str, float]:
        own = replace(
            iteration(decoder, attention_tensor=8, moe_tensor=8),
            machine=ServingMachine(engines=ENGINE_TRAITS, sheet=sheet, tables=None),
            formats=replace(FP8, experts=experts),
            release=release,
        )
        return {name: float(seconds_Q[0]) for name, seconds_Q in own.linear_parts(ONE).items()}

    # PyTorch routes for GLM-4.5's 89 layers of 160 experts, a kernel of its own for 256 in groups.
    glm, like = parts(GLM_45, "0.5.6", "bf16"), parts(GLM_45, "0.5.7", "bf16")
    assert glm["router"] == like["router"] > 89 * TORCH_ROUTING_S
    # From 0.5.7 on all-reduces hold the norms, and are TensorRT-LLM's.
    assert glm["small"] > like["small"]
    assert glm["exchange"] > like["exchange"]
    deepseek = parts(DEEPSEEK_V3, "0.5.6", "fp8_block")
    assert deepseek["router"] < 58 * TORCH_ROUTING_S
    # 0.5.4 leaves experts in blocks of fp8 to Triton, 0.5.6 has TensorRT-LLM's, which route.
    older = parts(DEEPSEEK_V3, "0.5.4", "fp8_block")
    assert older["experts"] - deepseek["experts"] > 58 * 15e-6
    assert older["small"] > deepseek["small"]
    # Qwen3.5's delta rules, 45 of 60 layers, have four GEMMs before them until 0.5.10.
    qwens = [parts(QWEN35_397B, release, "fp8_block")["small"] for release in ("0.5.9", "0.5.10")]
    assert qwens[0] - qwens[1] > 45 * 3 * LAUNCH_S


def test_prompts_of_delta_rules_wait_longest_for_their_host() -> None:
    # A prompt of 500 tokens delays others by 3.1 ms a layer (60 of them) of Qwen3-Next's kinds,
    # 1.6 of DeepSeek-R1's (61), 0.6 to 1.2 of MiniMax-M2's (62): SGLang 0.5.6 to 0.5.8 on B200.
    for decoder, low_ms, high_ms in (
        (QWEN35_397B, 140.0, 230.0),
        (DEEPSEEK_V3, 85.0, 115.0),
        (MINIMAX_M2, 45.0, 75.0),
    ):
        own = replace(iteration(decoder, attention_tensor=8), release="0.5.8")
        assert low_ms < float(own.prompt_launch_s(np.array([500.0]))[0]) * 1e3 < high_ms
