"""Weights and caches, by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rows import Failures, each_row
from tests.tuner.decoders import DEEPSEEK_V3, LLAMA_70B
from tests.tuner.models import MODELS, example_model
from tuner.costs.serve.decoder import Formats, decoder_of
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.memory import (
    attention_weight_bytes,
    expert_bytes,
    kv_bytes_per_token,
    state_bytes_per_request,
    weight_bytes,
)
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine
from tuner.spec.huggingface.read import read_model

FP8 = Formats(
    attention="fp8_block", output="fp8_block", ffn="fp8_block", experts="fp8_block", kv="fp8"
)
BF16 = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")


def test_deepseek_weighs_what_its_parameters_do() -> None:
    # 671 billion parameters, of which embedding and head stay at two bytes.
    assert weight_bytes(DEEPSEEK_V3, FP8, InstanceDegrees()) == pytest.approx(673e9, rel=0.01)


def test_llama_weighs_what_its_parameters_do() -> None:
    assert weight_bytes(LLAMA_70B, BF16, InstanceDegrees()) == pytest.approx(2 * 70.55e9, rel=0.01)
    # A public start of AWQ's groups of 128 with zero points on two ranks logs 18.55 GiB.
    int4 = "int4_wo"
    awq = Formats(
        attention=int4, output=int4, ffn=int4, experts=int4, kv="bf16", int4_bytes=0.51953125
    )
    ranks = InstanceDegrees(attention_tensor=2)
    assert weight_bytes(LLAMA_70B, awq, ranks) == pytest.approx(18.55 * 2**30, rel=0.01)


def test_a_tied_head_weighs_nothing_on_one_stage(tmp_path: Path) -> None:
    # Qwen2.5-Coder-3B: 3.09 billion parameters in bf16, 5.75 GiB as loaded.
    fields = json.loads((MODELS / "qwen2.5-7b" / "config.json").read_text())
    fields |= {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36}
    fields |= {"num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151_936}
    models = []
    for is_tied in (False, True):
        (tmp_path / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": is_tied}))
        models.append(decoder_of(read_model(tmp_path)))
    untied, tied = models
    assert weight_bytes(tied, BF16, InstanceDegrees()) == pytest.approx(2 * 3.085e9, rel=0.002)
    table = 2.0 * 151_936 * 2048
    for ranks in (1, 2):
        degrees = InstanceDegrees(attention_tensor=ranks)
        saved = weight_bytes(untied, BF16, degrees) - weight_bytes(tied, BF16, degrees)
        assert saved == table / ranks
    # The first stage holds the embedding, the last one a copy as its head.
    stages = InstanceDegrees(pipeline=2)
    assert weight_bytes(tied, BF16, stages) == weight_bytes(untied, BF16, stages)


def test_compressed_keys_are_whole_on_every_rank() -> None:
    # 61 layers of 512 + 64 elements at one byte, whatever the degree.
    for tensor in (1, 8):
        degrees = InstanceDegrees(attention_tensor=tensor, expert=tensor)
        assert kv_bytes_per_token(DEEPSEEK_V3, FP8, degrees) == 61 * 576


def test_heads_are_split_until_there_is_one_each() -> None:
    # 80 layers, keys and values of 8 heads of 128 at two bytes: 327,680 bytes on one device.
    each = {
        tensor: kv_bytes_per_token(LLAMA_70B, BF16, InstanceDegrees(attention_tensor=tensor))
        for tensor in (1, 8, 16)
    }
    assert each == {1: 327_680, 8: 40_960, 16: 40_960}


@each_row(
    ("folder", "token_bytes", "state_bytes", "parameters"),
    [
        # 6 layers of keys and values of 2 heads of 128; 23 of 64 heads of 128 x 64 in fp32 and 3
        # inputs of 6,144 channels in bf16.
        (
            "nemotron-3-nano",
            6 * 2 * 2 * 128 * 2,
            23 * (64 * 128 * 64 * 4 + 3 * 6144 * 2),
            31_577_937_344,
        ),
        # 12 layers of 2 heads of 256; 36 of 32 heads of 128 x 128, 8,192 channels.
        (
            "qwen3-next-80b-a3b",
            12 * 2 * 2 * 256 * 2,
            36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2),
            79_674_391_296,
        ),
        # 7 layers of 512 + 64 elements; 20 of 32 heads of 128 x 128, 12,288 channels.
        (
            "kimi-linear-48b-a3b",
            7 * 576 * 2,
            20 * (32 * 128 * 128 * 4 + 3 * 12288 * 2),
            49_122_675_072,
        ),
    ],
)
def test_hybrids_cache_keys_of_some_layers_and_a_state_of_the_others(
    folder: str, token_bytes: int, state_bytes: int, parameters: int
) -> None:
    decoder, one = decoder_of(example_model(folder)), InstanceDegrees()
    assert kv_bytes_per_token(decoder, BF16, one) == token_bytes
    assert state_bytes_per_request(decoder, one) == state_bytes
    assert weight_bytes(decoder, BF16, one) == pytest.approx(2 * parameters, rel=2e-3)
    # Eight ranks share states; draft tokens need one each.
    shared = InstanceDegrees(attention_tensor=8, expert=8)
    drafted = state_bytes_per_request(decoder, shared, drafts=3)
    assert drafted == pytest.approx(4 * state_bytes / 8)


def test_engines_keep_states_of_qwen3_next_in_different_types(failures: Failures) -> None:
    # 36 layers of 32 heads of 128 x 128, and 3 inputs of 8,192 channels in bf16.
    narrow = 36 * (32 * 128 * 128 * 2 + 3 * 8192 * 2)
    wide, one = narrow + 36 * 32 * 128 * 128 * 2, InstanceDegrees()
    for name, engine, width in (
        ("qwen3-next-80b-a3b", "vllm", 2.0),
        ("qwen3-next-80b-a3b", "trtllm", 2.0),
        ("qwen3-next-80b-a3b", "sglang", 4.0),
        ("qwen3.5-397b-a17b", "vllm", 4.0),
        ("nemotron-3-nano", "vllm", 4.0),
        ("kimi-linear-48b-a3b", "vllm", 4.0),
    ):
        decoder = decoder_of(example_model(name))
        rule = ENGINE_TRAITS[engine].memory_rule().states
        kept = state_bytes_per_request(decoder, one, states=replace(rule, per_request=1))
        machine = ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("h200-sxm"), tables=None)
        step = Iteration(
            decoder=decoder,
            formats=BF16,
            degrees=one,
            traits=ENGINE_TRAITS[engine],
            machine=machine,
        )
        with failures.of(name, engine):
            assert {layer.state_bytes for _, layer in step.attention_layers} == {width}
            assert "next" not in name or kept == (narrow if width == 2.0 else wide)


def test_indexers_cache_a_key_of_their_own() -> None:
    decoder = decoder_of(example_model("deepseek-v3.2"))
    one = InstanceDegrees()
    # 512 + 64 elements and 128 + 4 bytes of the indexer's key; in fp8 656 bytes with its scales.
    assert kv_bytes_per_token(decoder, BF16, one) == 61 * (576 * 2 + 132)
    assert kv_bytes_per_token(decoder, FP8, one) == 61 * (656 + 132)
    # Beside DeepSeek-V3's weights: 1,536 x 64 x 128 and 7,168 x (128 + 64) a layer.
    more = weight_bytes(decoder, FP8, one) - weight_bytes(DEEPSEEK_V3, FP8, one)
    assert more == 61 * (1536 * 64 * 128 + 7168 * 192)


def test_layers_that_share_an_indexer_have_none(tmp_path: Path) -> None:
    config = json.loads((MODELS / "glm-5/config.json").read_text())
    plain, one = decoder_of(example_model("glm-5")), InstanceDegrees()
    # Layers 0, 1, 2 and every fourth from 6 to 74 pick tokens: 21 of 78, as GLM-5.2 is published.
    own = [at < 3 or at % 4 == 2 for at in range(78)]
    types = ["full" if one else "shared" for one in own]
    pattern = "".join("F" if one else "S" for one in own)
    for number, more in enumerate(
        (
            {"index_topk_freq": 4, "index_skip_topk_offset": 3},
            {"indexer_types": types},
            {"index_topk_pattern": pattern},
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | more))
        shared = decoder_of(read_model(folder))
        # 431,150 bytes a token over 8 ranks (vllm-project/recipes, pull request 893).
        assert kv_bytes_per_token(shared, FP8, one) == 78 * 656 + 21 * 132 == 53_940
        less = weight_bytes(plain, FP8, one) - weight_bytes(shared, FP8, one)
        assert less == 57 * (2048 * 32 * 128 + 6144 * (128 + 32))


def test_compressors_cache_entries_beside_windows_and_open_entries() -> None:
    decoder, one = decoder_of(example_model("deepseek-v4-flash")), InstanceDegrees()
    # 584 bytes a token of a window and an entry, 132 a key of an indexer, 21 layers of 4 tokens and
    # 20 of 128; whole on every rank. Open entries: 8 x 2,560 and 128 x 1,024 elements in fp32.
    entries = 21 * (584 + 132) / 4 + 20 * 584 / 128
    windows, opened = 43 * 128 * 584, 4 * (21 * 8 * 2560 + 20 * 128 * 1024)
    for formats, degrees in ((BF16, one), (FP8, InstanceDegrees(attention_tensor=8, expert=8))):
        assert kv_bytes_per_token(decoder, formats, degrees) == entries
        held = state_bytes_per_request(decoder, degrees, drafts=3)
        assert held == windows + opened
        long = kv_bytes_per_token(decoder, formats, degrees, request_tokens=131_072)
        assert long == pytest.approx(entries + held / 131_072)
    # SGLang has a tenth as many tokens in a pool of windows as in that of entries.
    pooled = kv_bytes_per_token(decoder, FP8, one, request_tokens=131_072, window_pool_ratio=0.1)
    assert pooled == pytest.approx(0.1 * 43 * 584 + entries + opened / 131_072)
    # As released: 43 x 256 experts of 3 x 4,096 x 2,048 in mxfp4; shared experts, attention and the
    # queries of indexers in fp8; the rest of compressors, routers, embedding and head in bf16; two
    # connections a layer in fp32.
    released = replace(FP8, experts="mxfp4", head="bf16")
    # Of a layer with an indexer keys and gates of 4,096 x 2 x 2 x (512 + 128) and weights of 64
    # heads, without one 4,096 x 2 x 512: 309,592,064 in all, beside queries of 1,024 x 64 x 128.
    compressors = 21 * 4096 * (2 * 2 * (512 + 128) + 64) + 20 * 4096 * 2 * 512
    assert compressors == 309_592_064
    attention = 43 * 106_954_752 + 21 * 1024 * 64 * 128 + 2 * compressors
    others = 43 * 256 * 4096 * 2 + 2 * 129_280 * 4096 * 2 + 86 * 24 * 16_384 * 4
    experts = 43 * (256 * 0.53125 + 1) * 3 * 4096 * 2048
    assert weight_bytes(decoder, released, one) == experts + attention + others
    # Of attention 4,096 x (1,024 + 512), indexers and compressors are whole on every rank.
    for ranks in (1, 8):
        degrees = InstanceDegrees(attention_tensor=ranks, expert=ranks)
        whole = 43 * 6_291_456 + 21 * 1024 * 64 * 128 + 2 * compressors
        expected = whole + 43 * 100_663_296 / ranks
        assert attention_weight_bytes(decoder, released, degrees) == expected


def test_latent_experts_are_small_and_their_projections_whole() -> None:
    decoder = decoder_of(example_model("nemotron-3-super"))
    # Two matrices of 1,024 x 2,688.
    assert expert_bytes(decoder, BF16) == 2 * 1024 * 2688 * 2
    whole = weight_bytes(decoder, BF16, InstanceDegrees())
    assert whole == pytest.approx(2 * 120_668_687_360, rel=2e-3)
    # Of 40 layers 8 ranks keep 4,096 x 1,024 in and out and a router of 512 each.
    kept = 40 * (2 * 4096 * 1024 + 4096 * 512) * 2
    split = weight_bytes(decoder, BF16, InstanceDegrees(attention_tensor=8, expert=8))
    # Key heads are 2, so that every rank has one.
    keys = 8 * 2 * 4096 * 128 * (1 - 2 / 8) * 2
    assert split == pytest.approx((whole - kept) / 8 + kept + keys, rel=1e-6)
