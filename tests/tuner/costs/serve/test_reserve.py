"""Activations, graphs and buffers by hand, and against published numbers."""

from dataclasses import replace

import pytest

from tests.tuner.decoders import (
    DEEPSEEK_V3,
    GPT_OSS_120B,
    LLAMA_8B,
    LLAMA_70B,
    QWEN35_397B,
)
from tests.tuner.models import example_model
from tuner.costs.serve.capacity import (
    cache_tokens,
    instance_kv_bytes_per_token,
    instance_weight_bytes,
)
from tuner.costs.serve.decoder import Decoder, Formats, decoder_of
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.memory import kv_bytes_per_token, weight_bytes
from tuner.costs.serve.reserve import (
    activation_bytes,
    all_to_all_buffer_bytes,
    captured_sizes,
    dispatch_cap,
    low_latency_bytes,
    sparse_workspace_bytes,
    step_reserve,
)
from tuner.costs.serve.speculative import Drafting
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine

FP8 = Formats(
    attention="fp8_block", output="fp8_block", ffn="fp8_block", experts="fp8_block", kv="fp8"
)
BF16 = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")
MIB = 2.0**20
GIB = 2.0**30


def iteration(decoder: Decoder, formats: Formats = FP8, **named: int) -> Iteration:
    return Iteration(
        decoder=decoder,
        formats=formats,
        degrees=InstanceDegrees(**named),
        traits=ENGINE_TRAITS["sglang"],
        machine=ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("h200-sxm"), tables=None),
    )


WIDE = iteration(DEEPSEEK_V3, attention_data=8, expert=8)


BASE = iteration(LLAMA_8B, BF16)


def test_activations_of_a_dense_model_by_hand() -> None:
    # 8192 tokens: two streams of 4096 and three rows of 14336, at two bytes.
    found = activation_bytes(BASE, tokens=8192.0, running=1.0, logit_bytes=38.0)
    assert found == 8192 * 2 * (2 * 4096 + 3 * 14336)
    # A Llama-3.1-8B with 20,000 tokens a step peaks 2.07 GiB above its weights (issue 10517); its
    # release compiled nothing, so that the loop over layers kept the input of the one that ran.
    long = activation_bytes(BASE, tokens=20_000.0, running=1.0, logit_bytes=38.0, hidden_states=3)
    assert long == pytest.approx(2.07 * GIB, rel=0.01)


def test_tensorrt_llm_makes_anew_what_its_dry_run_held_and_samples_a_full_batch() -> None:
    own = replace(
        iteration(GPT_OSS_120B, replace(BF16, experts="mxfp4")), traits=ENGINE_TRAITS["trtllm"]
    )
    few, many = (
        step_reserve(own, step_tokens=8192, running=running, captured=8) for running in (8, 1024)
    )
    assert few.activations == many.activations
    # Graphs of 1, 2, 4 and 8 sequences, and eight rows of logits, in bf16 and fp32.
    assert few.graphs == 0.4 * MIB * 36 * 4 + 8 * 201_088 * 6
    assert few.late == pytest.approx(few.graphs)
    # 1,024 sequences: fp32 logits and probabilities instead of the prompts' experts.
    hidden = 3 * 2 * 8192 * 2880
    more = 1024 * 201_088 * 8 - (many.activations - hidden)
    assert many.late - many.graphs == pytest.approx(more)
    moving = step_reserve(own, step_tokens=8192, running=8, captured=8, moves_cache=True)
    assert moving.buffers == 3 * 512 * MIB == pytest.approx(moving.late - moving.graphs)


def test_indexers_of_entries_gather_more_keys_than_attention_for_long_requests() -> None:
    own = iteration(decoder_of(example_model("deepseek-v4-flash")), FP8)
    short, long = (
        sparse_workspace_bytes(own, step_tokens=4096, longest=longest) for longest in (0, 912_128)
    )
    # 40 prompts of every fourth token's fp8 key with its scale, and fp32 numbers of every 128th.
    gathered = 4 * (128 + 4096) * 512 * 2
    grown = 40 * 912_128 / 4 * 132 - gathered + 2 * 4096 * 912_128 / 128 * 4
    assert long - short == pytest.approx(grown)


def test_sparse_attention_over_fp8_keys_gathers_five_of_the_longest_requests() -> None:
    own = iteration(decoder_of(example_model("glm-5")), FP8, attention_tensor=8, moe_tensor=8)
    found = sparse_workspace_bytes(own, step_tokens=8192, longest=1_048_576)
    # In bf16, beside the queries of 8 heads; numbers of 2,048 picked tokens, and their scores.
    made = (8192 * 8 + 5 * 1_048_576) * 576 * 2 + 8192 * 2048 * 4
    assert found == made + 512 * MIB
    # vLLM 0.28 makes it as it makes GLM-5.3: 94.46 GiB are loaded on each of 8 H200, 88.6 GiB of
    # them weights (vllm-project/recipes, pull request 893; without a maximal length).
    assert made / GIB == pytest.approx(94.46 - 88.6, rel=0.02)
    plain = sparse_workspace_bytes(
        replace(own, formats=replace(FP8, kv="bf16")), step_tokens=8192, longest=1_048_576
    )
    assert plain == 40 * 1_048_576 * 132 + 8192 * 2048 * 4 + 512 * MIB


def test_a_sampler_that_sorts_is_what_profiles_of_large_vocabularies_show() -> None:
    # vLLM before 0.21 sorts logits of the whole vocabulary on every rank, 38 bytes each.
    for decoder, running, seen in (
        # "PyTorch activation peak memory 1.26GiB" (pull request 10511, 256 sequences).
        (LLAMA_8B, 256, 1.26),
        # 0.9 x 79.2 - 65.97 of weights + 2.14 that was missing (issue 23278).
        (GPT_OSS_120B, 1024, 7.4),
    ):
        own = replace(iteration(decoder, BF16), traits=ENGINE_TRAITS["vllm"], release="0.10.1")
        found = step_reserve(own, step_tokens=8192, running=running).activations
        assert found == pytest.approx(seen * GIB, rel=0.05)
    # As many tokens as sequences leave it as it is (issue 27508: 7.5 GiB).
    few = step_reserve(own, step_tokens=1024, running=1024)
    assert few.activations == pytest.approx(7.4 * GIB, rel=0.05)


def test_context_and_communicators_are_what_many_devices_were_seen_to_take() -> None:
    # 2.53 GiB on two nodes of eight (vLLM, issue 13074), 2.3 on one (SGLang, issue 6017).
    own = iteration(DEEPSEEK_V3, attention_tensor=8, expert=8, pipeline=2)
    found = step_reserve(own, step_tokens=2048, running=32)
    assert found.context + found.communicators == pytest.approx(2.4 * GIB, rel=0.1)
    alone = step_reserve(iteration(LLAMA_8B, BF16), step_tokens=2048, running=32)
    assert alone.communicators == 0.0


def test_graphs_grow_with_layers_and_captured_batches() -> None:
    # 1, 2, 4, 8, 16, ... 256: 35 of them, as vLLM's log counts (pull request 11349).
    assert [captured_sizes(most) for most in (0, 1, 4, 8, 256, 512)] == [0, 1, 3, 4, 35, 51]
    none, some = (
        step_reserve(BASE, step_tokens=2048, running=256, captured=most).graphs for most in (0, 8)
    )
    assert none == 0.0
    assert some == 4 * 32 * 0.4 * 2**20


def test_data_ranks_do_not_multiply_what_graphs_take() -> None:
    one = iteration(DEEPSEEK_V3, attention_data=8, expert=8)
    many = iteration(DEEPSEEK_V3, attention_data=64, expert=64)
    small, large = (step_reserve(own, step_tokens=2048, running=288).graphs for own in (one, many))
    assert small == large


LOW = replace(WIDE, a2a_backend=A2aBackend.LOW_LATENCY)


def test_low_latency_buffers_follow_the_published_layout() -> None:
    # 256 experts, 128 tokens, rows of 2 * 7168 + 4 * 56 bytes, two of either buffer: 1.9 GB.
    assert low_latency_bytes(hidden=7168, experts=256, tokens=128) == 4 * 256 * 128 * 14560
    assert all_to_all_buffer_bytes(WIDE, tokens=64) == 0.0
    # Beside them those of normal kernels, which do not grow.
    grown = all_to_all_buffer_bytes(LOW, tokens=256) - all_to_all_buffer_bytes(LOW, tokens=128)
    assert grown == 4 * 256 * 128 * 14560


def test_the_cap_counts_drafts_and_is_a_power_of_two() -> None:
    assert [dispatch_cap(tokens) for tokens in (1, 128, 129, 96 * 4)] == [128, 128, 256, 512]
    drafting = Drafting(draft_tokens=3, acceptance=0.8)
    plain, drafted = (
        step_reserve(one, step_tokens=512, running=96).buffers
        for one in (LOW, replace(LOW, drafting=drafting))
    )
    assert drafted > 3.0 * plain


def test_larger_budgets_and_batches_leave_fewer_tokens() -> None:
    def held(step_tokens: int, running: int, memory_bytes: float = 141e9) -> float:
        return cache_tokens(
            WIDE, memory_bytes=memory_bytes, step_tokens=step_tokens, running=running
        )

    assert held(2048, 64) > held(8192, 64) > held(8192, 256) > 0.0
    # The weights fit into 109 GB; beside a share that a launch can state no cache does.
    assert held(2048, 8, memory_bytes=109e9) < 0.0 < held(2048, 8, memory_bytes=111e9)


def test_a_drafter_takes_weights_and_cache() -> None:
    plain = iteration(DEEPSEEK_V3, attention_tensor=8, expert=8)
    drafted = replace(plain, drafting=Drafting(draft_tokens=1, acceptance=0.8))
    # One of 62 layers more in the cache; DeepSeek-V3's MTP module has 11.5 billion parameters
    # without embedding and head (its README), an eighth of them here.
    each = instance_kv_bytes_per_token(drafted) / instance_kv_bytes_per_token(plain)
    assert each == pytest.approx(62 / 61)
    added = instance_weight_bytes(drafted) - instance_weight_bytes(plain)
    assert added == pytest.approx(11.5e9 / 8, rel=0.1)


def test_windowed_layers_keep_their_window_of_a_request() -> None:
    degrees = InstanceDegrees()
    whole = kv_bytes_per_token(GPT_OSS_120B, BF16, degrees)
    cut = kv_bytes_per_token(GPT_OSS_120B, BF16, degrees, request_tokens=1280.0)
    # Half of the layers keep 128 of 1280 tokens.
    assert cut == pytest.approx(whole * (0.5 + 0.5 * 0.1))
    assert kv_bytes_per_token(GPT_OSS_120B, BF16, degrees, request_tokens=64.0) == whole


def test_a_state_is_shared_by_the_tokens_of_a_request() -> None:
    degrees = InstanceDegrees()
    whole = kv_bytes_per_token(QWEN35_397B, BF16, degrees)
    # 45 layers of 64 heads of 128 x 128 in fp32, and three inputs of the convolution's
    # 2 x 16 x 128 + 64 x 128 channels in bf16.
    per_request = 45 * (64 * 128 * 128 * 4 + 3 * 12_288 * 2)
    found = kv_bytes_per_token(QWEN35_397B, BF16, degrees, request_tokens=1000.0)
    assert found == pytest.approx(whole + per_request / 1000.0)


def test_a_stage_holds_its_layers_and_one_end() -> None:
    # 80 layers over 4 stages; embedding and head stand on different ones.
    whole = weight_bytes(LLAMA_70B, BF16, InstanceDegrees())
    ends = 2 * 128256 * 8192 * 2
    stage = weight_bytes(LLAMA_70B, BF16, InstanceDegrees(pipeline=4))
    assert stage == pytest.approx((whole - ends) / 4 + ends / 2)
    # 61 layers over 4: the longest stage has 16.
    each = kv_bytes_per_token(DEEPSEEK_V3, FP8, InstanceDegrees(pipeline=4))
    assert each == pytest.approx(16 * 576)
