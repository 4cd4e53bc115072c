"""Counts against transformers on the meta device, and formulas worked by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner.spec.accounting import (
    active_parameters,
    attended_tokens,
    attention_core_flop_per_token,
    attention_parameters,
    embedding_parameters,
    ffn_parameters,
    forward_flop_per_token,
    head_parameters,
    kv_bytes_per_token,
    layer_norm_parameters,
    layer_parameters,
    mixer_parameters,
    network_parameters,
    num_parameters,
    one_expert_parameters,
    router_parameters,
    shared_expert_parameters,
    state_bytes_per_sequence,
    stream_head_parameters,
    training_flop_per_token,
)
from tuner.spec.huggingface.architectures import ARCHITECTURES
from tuner.spec.huggingface.read import read_model
from tuner.spec.model import Mixer, ModelSpec

MODELS = Path(__file__).parents[3] / "examples" / "models"
NAMES = sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def architecture_of(name: str) -> str:
    return str(json.loads((MODELS / name / "config.json").read_text())["architectures"][0])


ONE_OF_EACH = sorted({architecture_of(name): name for name in reversed(NAMES)}.values())
"""A model of every architecture that is shipped."""

LANGUAGE_MODELS = {
    "Glm4vMoeForConditionalGeneration": "Glm4MoeForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""Of classes that read images, too: a class with the parameters of what generates text."""

Reference = Callable[[dict[str, Any]], int]


def unread_parameters(config: dict[str, Any]) -> int:
    """Gate and up projections that transformers 5.24 gives experts that return their input."""
    rows = config.get("zero_expert_num", 0) * 2 * config.get("expert_ffn_hidden_size", 0)
    return int(rows * config["hidden_size"] * config["num_layers"]) if rows else 0


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Count the parameters that transformers builds, without allocating any."""
    import torch
    import transformers

    def count(config: dict[str, Any]) -> int:
        fields = dict(config.get("text_config") or config)
        name = LANGUAGE_MODELS.get(config["architectures"][0], config["architectures"][0])
        for name_of_no_size in ("quantization_config", "rope_scaling"):
            fields.pop(name_of_no_size, None)
        model_class = getattr(transformers, name)
        with torch.device("meta"):
            model = model_class(model_class.config_class.from_dict(fields))
        built = sum(parameter.numel() for parameter in model.parameters())
        return int(built - unread_parameters(fields))

    return count


def shipped(name: str) -> ModelSpec:
    return read_model(MODELS / name)


def test_shipped_models_have_experts_or_none() -> None:
    assert {"mixtral-8x7b", "deepseek-v3", "kimi-k2", "gpt-oss-120b", "glm-4.5", "tiny-moe"} <= set(
        NAMES
    )
    model = shipped("llama-3.1-8b")
    assert ffn_parameters(model) == 3 * 4096 * 14336
    with pytest.raises(ValueError, match="has no experts"):
        one_expert_parameters(model)
    assert active_parameters(model) == num_parameters(model)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_counts_the_parameters_that_transformers_builds(
    reference: Reference, *, every: bool
) -> None:
    names = NAMES if every else ONE_OF_EACH
    configs = {name: json.loads((MODELS / name / "config.json").read_text()) for name in names}
    built = {name: reference(config) for name, config in configs.items()}
    assert {name: num_parameters(shipped(name)) for name in names} == built


@each_row(
    ("name", "published"),
    [
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-v3", 671_026_404_352),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("llama-3.1-8b", 8_030_261_248),
        ("deepseek-v4-flash", 284_332_230_231),
        # Published as 560B.
        ("longcat-flash", 560_664_958_976),
    ],
)
def test_counts_the_published_totals(name: str, published: int) -> None:
    assert num_parameters(shipped(name)) == published


def mtp_parameters(model: ModelSpec) -> int:
    """Attention, the last layer's network, what joins two hidden states: 2 h h and three norms.

    With several streams, what joins them before the head, too.
    """
    hidden = model.hidden_size
    layer = mixer_parameters(model, Mixer.ATTENTION) + network_parameters(model, model.layers[-1])
    return layer + 2 * hidden * hidden + 3 * hidden + stream_head_parameters(model)


@each_row(
    ("name", "num_layers", "others", "published"),
    [
        # Elements of the checkpoints; correction biases of routers are buffers here.
        ("nemotron-3-nano", 0, 23 * 128, 31_577_940_288),
        ("qwen3-next-80b-a3b", 1, 0, 81_324_862_720),
        ("glm-5", 1, 76 * 256, 753_864_139_008),
        # Its MTP layer has an embedding and a head of its own there.
        ("deepseek-v3.2", 1, 2 * 129_280 * 7168 + 59 * 256, 685_396_921_376),
        ("minimax-m2", 0, 62 * 256, 228_689_764_864),
        # A vision tower of the same size comes with both.
        ("llama-4-scout", 0, 871_932_416, 108_641_793_536),
        ("llama-4-maverick", 0, 871_932_416, 401_583_781_376),
        ("qwen2.5-7b", 0, 0, 7_615_616_512),
        # Gibibytes of bf16 on disk.
        ("nemotron-3-super", 1, 41 * 512, round(230.27 * 2**29)),
        ("nemotron-3-ultra", 1, 49 * 512, round(1044.06 * 2**29)),
        # By the shapes of mtp.0 that Megatron-Bridge maps (deepseek_v4_bridge.py).
        ("deepseek-v4-flash", 1, 0, 284_332_230_231 + 6_610_048_635),
    ],
)
def test_prediction_layers_add_up_to_the_checkpoints(
    name: str, num_layers: int, others: int, published: int
) -> None:
    """Within the scales of fp8 weights (V3.2) and the rounding of gibibytes."""
    model = shipped(name)
    total = num_parameters(model) + num_layers * mtp_parameters(model) + others
    assert total == pytest.approx(published, rel=2e-4)


@each_row(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 12.9),
        ("mixtral-8x22b", 39.2),
        ("qwen3-30b-a3b", 3.35),
        ("deepseek-v3", 37.6),
        ("olmoe-1b-7b", 1.28),
        ("kimi-k2", 32.9),
        ("nemotron-3-nano", 3.58),
        ("nemotron-3-super", 12.77),
        ("nemotron-3-ultra", 56.06),
        ("qwen3-next-80b-a3b", 3.87),
        ("qwen3.5-397b-a17b", 17.35),
        ("kimi-linear-48b-a3b", 3.48),
        ("llama-4-scout", 17.17),
        # Published as 13B of 284B.
        ("deepseek-v4-flash", 13.7996),
        # Published as 27B on average, without the embedding's 0.8B.
        ("longcat-flash", 27.954),
    ],
)
def test_active_parameters_match_the_model_cards(name: str, billions: float) -> None:
    assert active_parameters(shipped(name)) / 1e9 == pytest.approx(billions, rel=0.005)


# --- generated configs -----------------------------------------------------------------------


def widths(least: int = 1, most: int = 24) -> st.SearchStrategy[int]:
    return st.integers(min_value=least, max_value=most)


@st.composite
def configs(draw: st.DrawFn, architecture: str) -> dict[str, Any]:
    """Draw a small config with every flag of the architecture free."""
    num_kv_heads = draw(widths(most=3))
    num_heads = num_kv_heads * draw(widths(most=3))
    head_dim = 2 * draw(widths(most=4))
    num_layers = draw(widths(most=3))
    num_experts = 2 * draw(widths(most=4))
    config: dict[str, Any] = {
        "architectures": [architecture],
        "hidden_size": num_heads * head_dim,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": draw(widths(least=4, most=64)),
        "tie_word_embeddings": draw(st.booleans()),
        "intermediate_size": draw(widths()),
        "moe_intermediate_size": draw(widths()),
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "num_experts_per_tok": 1,
        "num_experts": num_experts,
        "num_local_experts": num_experts,
        "n_routed_experts": num_experts,
        "n_shared_experts": draw(widths(most=3)),
        "shared_expert_intermediate_size": draw(widths()),
        "first_k_dense_replace": draw(st.integers(min_value=0, max_value=4)),
        "decoder_sparse_step": draw(widths(most=3)),
        "mlp_only_layers": draw(st.lists(st.integers(0, 3), unique=True, max_size=2)),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "use_qk_norm": draw(st.booleans()),
        "n_group": 2,
        "topk_group": 1,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if architecture.startswith(("Deepseek", "Glm4MoeLite", "GlmMoeDsa", "Kimi", "Longcat")):
        del config["head_dim"]
        config |= {
            "num_key_value_heads": num_heads,
            "q_lora_rank": draw(st.none() | widths()),
            "kv_lora_rank": draw(widths()),
            "qk_nope_head_dim": draw(widths()),
            "qk_rope_head_dim": head_dim,
            "v_head_dim": draw(widths()),
        }
    if architecture == "Glm4MoeLiteForCausalLM":
        # The class of transformers 5.24 reads `mlp_layer_types`, one dense layer by default.
        config["first_k_dense_replace"] = 1
    if architecture == "OlmoeForCausalLM":
        del config["head_dim"]
    if architecture == "LongcatFlashForCausalLM":
        # Other names of ffn_hidden_size and expert_ffn_hidden_size there.
        del config["intermediate_size"], config["moe_intermediate_size"]
    if architecture in HYBRIDS:
        config |= draw(HYBRIDS[architecture](num_layers))
    if architecture == "DeepseekV4ForCausalLM":
        # Another name of moe_intermediate_size there, which published configs do not have.
        del config["intermediate_size"]
    # A flag that the config class does not know must not matter to either side.
    return {**config, "text_config": config} if architecture in LANGUAGE_MODELS else config


def sparse(_: int) -> st.SearchStrategy[dict[str, Any]]:
    sizes = ("q_lora_rank", "index_n_heads", "index_topk")
    # Its rotary part is as wide as that of the heads.
    width = st.just({"index_head_dim": 16})
    return st.tuples(st.fixed_dictionaries({size: widths() for size in sizes}), width).map(joined)


def deepseek_v4(num_layers: int) -> st.SearchStrategy[dict[str, Any]]:
    ratios = st.lists(st.sampled_from([0, 4, 128]), min_size=num_layers, max_size=num_layers)
    sizes = ("q_lora_rank", "o_lora_rank", "index_n_heads", "index_topk", "sliding_window")
    fixed = st.fixed_dictionaries(
        {
            **{size: widths() for size in sizes},
            "compress_ratios": st.tuples(ratios, st.sampled_from([[], [0]])).map(sum_of_lists),
            "num_nextn_predict_layers": st.just(1),
            "num_hash_layers": st.integers(0, 4),
            "hc_mult": st.integers(2, 4),
            "index_head_dim": st.just(16),
            "head_dim": widths(least=2, most=4).map(lambda width: 4 * width),
            "qk_rope_head_dim": st.just(4),
            "num_key_value_heads": st.just(1),
            "n_shared_experts": st.just(1),
            "attention_bias": st.just(False),
            "mlp_bias": st.just(False),
        }
    )
    heads = st.tuples(widths(most=3), widths(most=3)).map(
        lambda pair: {"o_groups": pair[0], "num_attention_heads": pair[0] * pair[1]}
    )
    return st.tuples(fixed, heads).map(joined)


def sum_of_lists(pair: tuple[list[int], list[int]]) -> list[int]:
    return pair[0] + pair[1]


def nemotron(num_layers: int) -> st.SearchStrategy[dict[str, Any]]:
    groups = st.integers(1, 3)
    fixed = st.fixed_dictionaries(
        {
            "hybrid_override_pattern": st.text("M*-E", min_size=num_layers, max_size=num_layers),
            "mamba_head_dim": widths(),
            "ssm_state_size": widths(),
            "conv_kernel": st.integers(2, 4),
            "chunk_size": st.just(16),
            "use_conv_bias": st.booleans(),
            "use_bias": st.booleans(),
            "layer_norm_epsilon": st.just(1e-5),
            "moe_latent_size": st.none() | widths(),
            "moe_shared_expert_intermediate_size": widths(),
            "n_group": st.just(1),
            "mlp_bias": st.just(False),
            # The class of transformers 5.24 does not tie them.
            "tie_word_embeddings": st.just(False),
        }
    )
    heads = groups.flatmap(
        lambda n: widths(most=3).map(lambda k: {"n_groups": n, "mamba_num_heads": n * k})
    )
    return st.tuples(fixed, heads).map(joined)


def gated_delta(num_layers: int) -> st.SearchStrategy[dict[str, Any]]:
    kinds = st.sampled_from(["linear_attention", "full_attention"])
    fixed = st.fixed_dictionaries(
        {
            "layer_types": st.lists(kinds, min_size=num_layers, max_size=num_layers),
            "linear_key_head_dim": widths(),
            "linear_value_head_dim": widths(),
            "linear_conv_kernel_dim": st.integers(2, 4),
        }
    )
    heads = st.tuples(widths(most=3), widths(most=3)).map(
        lambda pair: {
            "linear_num_key_heads": pair[0],
            "linear_num_value_heads": pair[0] * pair[1],
        }
    )
    return st.tuples(fixed, heads).map(joined)


def kimi(num_layers: int) -> st.SearchStrategy[dict[str, Any]]:
    def config(is_linear: list[bool]) -> dict[str, Any]:
        places = range(1, num_layers + 1)
        linear = [place for place, one in zip(places, is_linear, strict=True) if one]
        return {
            "linear_attn_config": {
                "kda_layers": linear,
                "full_attn_layers": [place for place in places if place not in linear],
                "num_heads": 3,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
            },
            "q_lora_rank": None,
            "num_experts_per_token": 1,
            "num_shared_experts": 2,
            "num_expert_group": 1,
            "attention_bias": False,
            # The class of transformers 5.24 does not tie them.
            "tie_word_embeddings": False,
        }

    return st.lists(st.booleans(), min_size=num_layers, max_size=num_layers).map(config)


def llama4(_: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "interleave_moe_layer_step": st.integers(1, 3),
            "intermediate_size_mlp": widths(),
            "attention_chunk_size": st.just(32),
        }
    )


def minimax(_: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.just({"use_qk_norm": True})


def longcat(num_layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "num_layers": st.just(num_layers),
            "num_hidden_layers": st.just(2 * num_layers),
            "ffn_hidden_size": widths(),
            "expert_ffn_hidden_size": widths(),
            "moe_topk": st.just(1),
            "zero_expert_num": st.integers(0, 5),
            "router_bias": st.booleans(),
            "q_lora_rank": widths(),
        }
    )


def joined(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


HYBRIDS: dict[str, Callable[[int], st.SearchStrategy[dict[str, Any]]]] = {
    "DeepseekV32ForCausalLM": sparse,
    "DeepseekV4ForCausalLM": deepseek_v4,
    "GlmMoeDsaForCausalLM": sparse,
    "KimiLinearForCausalLM": kimi,
    "Llama4ForCausalLM": llama4,
    "Llama4ForConditionalGeneration": llama4,
    "LongcatFlashForCausalLM": longcat,
    "MiniMaxM2ForCausalLM": minimax,
    "NemotronHForCausalLM": nemotron,
    "Qwen3NextForCausalLM": gated_delta,
    "Qwen3_5ForConditionalGeneration": gated_delta,
    "Qwen3_5MoeForConditionalGeneration": gated_delta,
}
"""Fields that these architectures have on top, for so many layers."""


@each_row("architecture", sorted(ARCHITECTURES))
def test_counts_generated_configs_as_transformers_does(
    architecture: str, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(architecture)

    @given(configs(architecture))
    @settings(deadline=None, max_examples=8)
    def agree(config: dict[str, Any]) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(config))
        assert num_parameters(read_model(file)) == reference(config)

    agree()


# --- worked by hand --------------------------------------------------------------------------


def test_parameters_add_up_by_hand() -> None:
    model = shipped("tiny-moe")
    # h 256, 8 heads and 4 kv heads of 32: queries and output 256 x 256, keys and values 256 x 128.
    assert attention_parameters(model) == 2 * 256 * 256 + 2 * 256 * 128
    assert one_expert_parameters(model) == 3 * 256 * 512
    assert router_parameters(model) == 256 * 8
    assert shared_expert_parameters(model) == 0
    assert layer_norm_parameters(model) == 512
    assert embedding_parameters(model) == head_parameters(model) == 256 * 256
    layer = attention_parameters(model) + 8 * one_expert_parameters(model) + 2048 + 512
    assert layer_parameters(model, 0) == layer
    assert num_parameters(model) == 4 * layer + 2 * 65536 + 256
    # DeepSeek-V3: h 7168, 128 heads, ranks 1536 and 512, widths 128 + 64 and 128.
    queries = 7168 * 1536 + 1536 + 1536 * 128 * 192
    keys_values = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    output = 128 * 128 * 7168
    assert attention_parameters(shipped("deepseek-v3")) == queries + keys_values + output
    untied = shipped("tiny-moe")
    tied = untied.model_copy(update={"tie_word_embeddings": True})
    assert num_parameters(untied) - num_parameters(tied) == embedding_parameters(untied)


def test_causal_attention_sees_half_the_sequence_and_windows_less() -> None:
    # Positions 1..4 see 1, 2, 3, 4 tokens; behind a window of 2 they see 1, 2, 2, 2.
    assert attended_tokens(sequence_length=4, window=None) == 10 / 4
    assert attended_tokens(sequence_length=4, window=2) == 7 / 4
    assert attended_tokens(sequence_length=4, window=4) == 10 / 4
    assert attended_tokens(sequence_length=4, window=9) == 10 / 4


@given(sequence_length=st.integers(1, 5000), window=st.integers(1, 5000))
@settings(deadline=None, max_examples=100)
def test_attended_tokens_equal_the_sum_over_positions(sequence_length: int, window: int) -> None:
    exact = sum(min(position, window) for position in range(1, sequence_length + 1))
    assert attended_tokens(sequence_length=sequence_length, window=window) == pytest.approx(
        exact / sequence_length
    )


def test_the_language_model_counts_flop_by_hand() -> None:
    model = shipped("tiny-moe")
    flop = forward_flop_per_token(model, sequence_length=128)
    # Norms (9 of 256) and the embedding are no matrix products.
    matrices = active_parameters(model) - 9 * 256 - embedding_parameters(model)
    assert flop.total - flop.attention_core == 2 * matrices
    # 4 layers, 8 heads, scores and values of width 32 over 64.5 tokens.
    assert flop.attention_core == 4 * 2 * 8 * 64 * 64.5
    assert training_flop_per_token(model, sequence_length=128) == 3 * flop.total
    model = shipped("gpt-oss-20b")
    full = attention_core_flop_per_token(model, sequence_length=4096)
    windowed = attention_core_flop_per_token(model, sequence_length=4096, windowed=True)
    assert windowed < full / 10
    flop = forward_flop_per_token(model, sequence_length=4096)
    assert flop.attention_core == pytest.approx(12 * full + 12 * windowed)


def test_a_trained_mtp_layer_counts_as_a_layer_with_a_projection_and_a_head() -> None:
    model = shipped("deepseek-v3")
    without, one, two = (
        training_flop_per_token(model, sequence_length=4096, mtp_layers=count) for count in range(3)
    )
    hidden, vocabulary = model.hidden_size, model.vocab_size
    flop = forward_flop_per_token(model, sequence_length=4096)
    moe = flop.router + flop.routed_experts + flop.shared_experts
    # Attention is alike in all 61 layers; 58 of them have experts.
    layer = (flop.total - flop.head - flop.dense_ffn - moe) / 61 + moe / 58
    added = 3 * (layer + 2 * (2 * hidden * hidden + hidden * vocabulary))
    assert one - without == pytest.approx(added, rel=1e-9)
    assert two - one == pytest.approx(added, rel=1e-9)


@each_row("name", NAMES)
def test_forward_flop_follow_active_parameters_on_every_model(name: str) -> None:
    model = shipped(name)
    flop = forward_flop_per_token(model, sequence_length=1)
    matrices = active_parameters(model) - embedding_parameters(model)
    # Norms, biases and sinks are the small difference.
    products = flop.total - flop.attention_core - flop.linear_scan
    assert products / (2 * matrices) == pytest.approx(1.0, abs=0.005)


@each_row(
    ("name", "bytes_per_token"),
    [
        # 32 layers x 2 x 8 heads x 128 x 2 bytes.
        ("mixtral-8x7b", 131_072),
        ("llama-3.1-70b", 327_680),
        # 61 layers x (512 + 64) x 2 bytes.
        ("deepseek-v3", 70_272),
        # 28 layers with two blocks of attention.
        ("longcat-flash", 28 * 2 * (512 + 64) * 2),
        # 21 layers x (512 + 128) / 4 and 20 x 512 / 128 elements, x 2 bytes.
        ("deepseek-v4-flash", 6_880),
    ],
)
def test_kv_cache_bytes_of_one_token(name: str, bytes_per_token: int) -> None:
    assert kv_bytes_per_token(shipped(name), bytes_per_element=2) == bytes_per_token


def test_compressors_by_hand() -> None:
    model = shipped("deepseek-v4-flash")
    # Mean of 4,096 positions: 126.015625 tokens of a window of 128 in 43 layers; 512 of 1,024
    # entries of 4 tokens, seen from position 4 j on: 512 x 4097 - 4 x 512 x 513 / 2 over 4,096 is
    # 383.875 in 21 layers; 32 entries of 128 tokens: 15.5078125 in 20. Each costs 4 x 64 x 512.
    # The indexer scores all entries, 511.75 on average, with 64 heads of 128.
    core = 4 * 64 * 512 * (43 * 126.015625 + 21 * 383.875 + 20 * 15.5078125)
    scores = 21 * 2 * 64 * 128 * 511.75
    flop = forward_flop_per_token(model, sequence_length=4096)
    assert flop.attention_core == core + scores == 1_983_584_256
    # Two sites a layer: 24 outputs of 4 x 4,096, and (2 x 4 + 16) x 4,096 to mix; at the end
    # 4 x 4 x 4,096 and 4 x 4,096.
    sites = 43 * 2 * (24 * 16_384 + 24 * 4096) + 5 * 4 * 4096
    assert flop.hyper_connections == 2 * sites
    # Open entries in fp32: 8 x (2 x 2 x (512 + 128)) and 128 x (2 x 512).
    assert state_bytes_per_sequence(model) == 4 * (21 * 8 * 2560 + 20 * 128 * 1024)


def test_zero_computation_experts_by_hand() -> None:
    model = shipped("longcat-flash")
    # h 6144, 64 heads: queries through 1536 to 64 x 192, keys and values through 512 + 64 to
    # 64 x 256, output 64 x 128; two norms of ranks, one before the block.
    attention = 6144 * 1536 + 1536 * 64 * 192 + 6144 * 576 + 512 * 64 * 256 + 64 * 128 * 6144
    network = 3 * 6144 * 12288
    expert = 3 * 6144 * 2048
    # One layer of LongCat: twice attention and a dense network, four norms of h; the router scores
    # 512 + 256, and no matrices belong to the 256.
    layer = 2 * (attention + 1536 + 512 + network) + 4 * 6144 + 768 * 6144 + 512 * expert
    assert layer_parameters(model, 0) + layer_parameters(model, 1) == layer
    assert num_parameters(model) == 28 * layer + 2 * 131_072 * 6144 + 6144
    # Of 12 copies 8 meet an expert with weights: 12 x 512 / 768.
    flop = forward_flop_per_token(model, sequence_length=1)
    assert flop.routed_experts == 2 * 28 * 8 * expert
    assert flop.router == 2 * 28 * 768 * 6144
    assert flop.dense_ffn == flop.shared_experts == 2 * 28 * network
    # arXiv:2509.01322: 18.6B active parameters with none of them, 31.3B with twelve.
    fixed = active_parameters(model) - 28 * 8 * expert - embedding_parameters(model)
    assert fixed / 1e9 == pytest.approx(18.6, rel=0.006)
    assert (fixed + 28 * 12 * expert) / 1e9 == pytest.approx(31.3, rel=0.006)
    # Its prediction layer is dense.
    mtp = training_flop_per_token(model, sequence_length=1, mtp_layers=1)
    more = mtp - training_flop_per_token(model, sequence_length=1)
    core = 2 * 64 * (192 + 128)
    joined_and_head = 2 * (2 * 6144 * 6144 + 6144 * 131_072)
    assert more == 3 * (2 * (attention + network) + core + joined_and_head)


def test_megatron_bridge_counts_the_same_flop_for_deepseek_v4() -> None:
    """748 TFLOP/s at 8,224 tokens/s on GB300, 706 at 7,776 on GB200 (performance-summary.md)."""
    counted = training_flop_per_token(
        shipped("deepseek-v4-flash"), sequence_length=4096, mtp_layers=1
    )
    assert [counted * rate / 1e12 for rate in (8224, 7776)] == pytest.approx([748, 706], rel=3e-3)
