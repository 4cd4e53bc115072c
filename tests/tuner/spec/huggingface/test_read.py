import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from profilers.steps.config import LayerKind
from tests.expect import present
from tests.rows import Failures, each_row
from tuner.errors import SpecError
from tuner.spec.huggingface.architectures import ARCHITECTURES
from tuner.spec.huggingface.read import read_model
from tuner.spec.model import Mixer, ModelSpec, Moe, QkNorm
from tuner.spec.sparse_attention import Indexer

MODELS = Path(__file__).parents[4] / "examples" / "models"


def written(folder: Path, changes: dict[str, Any], *, base: str = "tiny-moe") -> Path:
    config = json.loads((MODELS / base / "config.json").read_text()) | changes
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


def refusal(path: Path) -> str:
    with pytest.raises(SpecError) as error:
        read_model(path)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 1000
    return message


def test_reads_the_folder_or_the_file_and_names_the_model_by_it(tmp_path: Path) -> None:
    assert read_model(MODELS / "tiny-moe") == read_model(MODELS / "tiny-moe" / "config.json")
    assert read_model(MODELS / "glm-4.5").name == "glm-4.5"
    assert read_model(written(tmp_path, {}).rename(tmp_path / "my model.json")).name == "my model"


def test_reads_what_decides_public_models() -> None:
    model = read_model(MODELS / "deepseek-v3")
    assert model.layers == (LayerKind.DENSE,) * 3 + (LayerKind.MOE,) * 58
    assert model.attention.kind == "mla"
    assert model.attention.head_dim == 192
    assert model.attention.q_lora_rank == 1536
    assert model.mtp_num_layers == 1
    assert model.moe is not None
    assert (model.moe.num_groups, model.moe.groups_per_token) == (8, 4)
    assert model.moe.scoring == "sigmoid"
    assert model.moe.score_correction_bias
    model = read_model(MODELS / "kimi-k2")
    assert model.architecture == "DeepseekV3ForCausalLM"
    assert present(model.moe).num_experts == 384
    assert model.mtp_num_layers == 0
    model = read_model(MODELS / "gpt-oss-20b")
    assert model.windowed == (True, False) * 12
    assert model.attention.sliding_window == 128
    assert model.attention.has_sinks
    assert model.moe is not None
    assert model.moe.router_bias
    assert model.moe.expert_bias
    assert read_model(MODELS / "olmoe-1b-7b").attention.qk_norm is QkNorm.FULL
    assert read_model(MODELS / "qwen3-30b-a3b").attention.qk_norm is QkNorm.HEAD
    assert read_model(MODELS / "glm-4.5").attention.qk_norm is QkNorm.HEAD
    assert read_model(MODELS / "glm-4.5-air").attention.qk_norm is QkNorm.NONE


def test_fields_are_read_in_their_newer_places_beside_marks_and_duplicates(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    model = read_model(written(tmp_path, changes, base="qwen3-30b-a3b"))
    dense, moe = LayerKind.DENSE, LayerKind.MOE
    assert model.layers == (dense, moe, dense, dense, dense, moe)
    assert model.dense_ffn_size == 6144
    changes = {"rope_theta": None, "rope_parameters": {"rope_theta": 12345.0}}
    assert read_model(written(tmp_path, changes)).rope_theta == 12345.0
    text = (MODELS / "tiny-moe" / "config.json").read_text()
    file = tmp_path / "config.json"
    file.write_text("\ufeff" + text.replace("{", '{"hidden_size": 7,', 1), encoding="utf-8")
    assert read_model(file).hidden_size == 256


def test_an_unknown_architecture_lists_the_known_and_the_near_ones(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, {"architectures": ["FalconForCausalLM"]}))
    assert "config.json: architectures: 'FalconForCausalLM' is not supported" in message
    assert "give a dense decoder as LlamaForCausalLM of the same sizes" in message
    assert all(name in message for name in ARCHITECTURES)
    message = refusal(written(tmp_path, {"architectures": ["MixtralForCausaLM"]}))
    assert "did you mean 'MixtralForCausalLM'?" in message


NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps")
NEEDED_OF_HYBRIDS = ("hidden_size", "num_attention_heads", "vocab_size", "layer_norm_epsilon")
"""Of Nemotron-H, whose pattern says how many layers there are."""
NEEDED_OF_LONGCAT = ("hidden_size", "num_layers", "zero_expert_num", "rms_norm_eps")


@each_row("name", sorted(path.parent.name for path in MODELS.glob("*/config.json")))
def test_a_missing_field_is_named(name: str, tmp_path: Path) -> None:
    text = (MODELS / name / "config.json").read_text()
    is_nested = "text_config" in json.loads(text)
    file = tmp_path / "config.json"
    source = f"{file}: text_config" if is_nested else str(file)
    needed = {"nemotron": NEEDED_OF_HYBRIDS, "longcat": NEEDED_OF_LONGCAT}
    for field in needed.get(name.partition("-")[0], NEEDED):
        config = json.loads(text)
        del (config["text_config"] if is_nested else config)[field]
        file.write_text(json.dumps(config))
        assert refusal(file) == f"{source}: {field}: missing, and the architecture needs it"


def changed(name: str, changes: dict[str, Any], folder: Path) -> Path:
    """Write a shipped config with other fields, inside `text_config` where it has one."""
    config = json.loads((MODELS / name / "config.json").read_text())
    (config.get("text_config") or config).update(changes)
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


@each_row(
    ("name", "changes", "said"),
    [
        ("nemotron-3-nano", {"num_hidden_layers": 51}, "52 layers for num_hidden_layers 51"),
        ("nemotron-3-nano", {"hybrid_override_pattern": "ME*X"}, "[3]: 'X' is not a kind of layer"),
        ("nemotron-3-nano", {"hybrid_override_pattern": ""}, "hybrid_override_pattern: missing"),
        ("nemotron-3-nano", {"hybrid_override_pattern": 5}, "5 is not a text"),
        (
            "nemotron-3-nano",
            {"layers_block_type": ["mamba", "moe"] * 26},
            "hybrid_override_pattern: its layers are not those of layers_block_type",
        ),
        ("nemotron-3-nano", {"n_groups": 7}, "n_groups: 7 does not divide mamba_num_heads 64"),
        ("nemotron-3-ultra", {"layers_block_type": ["mamba", "conv"]}, "[1]: 'conv' is not a kind"),
        (
            "nemotron-3-ultra",
            {"layers_block_type": "MEM"},
            "layers_block_type: 'MEM' is not a list",
        ),
        (
            "qwen3.5-397b-a17b",
            {"layer_types": ["full_attention"]},
            "1 entries for num_hidden_layers",
        ),
        ("qwen3.5-397b-a17b", {"layer_types": ["window"] * 60}, "[0]: 'window' is neither"),
        ("qwen3-next-80b-a3b", {"linear_num_key_heads": 5}, "5 does not divide linear_num_value"),
        (
            "kimi-linear-48b-a3b",
            {"linear_attn_config": 3},
            "linear_attn_config: 3 is not an object",
        ),
        (
            "kimi-linear-48b-a3b",
            {"linear_attn_config": {"full_attn_layers": [0], "kda_layers": [1, 2]}},
            "linear_attn_config: full_attn_layers: with kda_layers not each of the 27 layers once",
        ),
        ("deepseek-v3.2", {"index_topk": 0}, "index_topk: 0 is not in 1.."),
        ("deepseek-v4-flash", {"compress_ratios": [0, 4]}, "2 entries for num_hidden_layers 43 (+"),
        ("deepseek-v4-flash", {"compress_ratios": [2] * 43}, "compress_ratios[0]: 2 is none of 0"),
        ("deepseek-v4-flash", {"compress_ratios": ["4"] * 43}, "[0]: '4' is not of type int"),
        ("deepseek-v4-flash", {"compress_ratios": None}, "compress_ratios: missing"),
        ("deepseek-v4-flash", {"compress_ratios": [4] * 44}, "[43]: 4 of a multi-token-prediction"),
        ("deepseek-v4-flash", {"hc_mult": None}, "hc_mult: missing, and the architecture needs it"),
        ("deepseek-v4-flash", {"index_topk": None}, "index_topk: missing"),
        ("deepseek-v4-flash", {"sliding_window": None}, "sliding_window: missing"),
        ("deepseek-v4-flash", {"o_groups": 7}, "o_groups: 7 does not divide num_attention_heads"),
        ("deepseek-v4-flash", {"num_key_value_heads": 8}, "8 is not supported; only 1 is"),
        ("deepseek-v4-flash", {"n_shared_experts": 2}, "n_shared_experts: 2 is not supported"),
        ("deepseek-v4-flash", {"qk_rope_head_dim": 513}, "513 exceeds head_dim 512"),
        ("deepseek-v4-flash", {"scoring_func": "relu"}, "scoring_func: 'relu' is none of softmax"),
        ("llama-4-scout", {"attention_chunk_size": -1}, "attention_chunk_size: -1 is not in 1.."),
        ("llama-4-scout", {"no_rope_layers": [1, 1, 1, 0]}, "4 entries for num_hidden_layers 48"),
        (
            "llama-4-scout",
            {"no_rope_layers": [1] * 48},
            "no_rope_layers[3]: 1, but no_rope_layer_interval 4 makes it 0",
        ),
        (
            "llama-4-scout",
            {"layer_types": ["chunked_attention"] * 48},
            "layer_types[3]: 'chunked_attention', but no_rope_layer_interval 4 with",
        ),
        (
            "llama-4-scout",
            {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 48},
            "layer_types[0]: 'chunked_attention', but no_rope_layer_interval 4 without",
        ),
        (
            "llama-4-maverick",
            {"moe_layers": list(range(48))},
            "moe_layers: not the layers that interleave_moe_layer_step 2 gives experts",
        ),
        ("llama-4-maverick", {"moe_layers": []}, "moe_layers: not the layers that"),
        ("minimax-m2", {"attn_type_list": [1] * 61}, "61 entries for num_hidden_layers 62"),
        (
            "minimax-m2",
            {"attn_type_list": [1] * 7 + [0] + [1] * 54},
            "attn_type_list[7]: 0, but full attention in every layer, which alone is supported,",
        ),
        ("glm-5", {"q_lora_rank": None}, "an indexer needs mla with q_lora_rank"),
    ],
)
def test_a_hybrid_that_cannot_be_is_one_line(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    message = refusal(changed(name, changes, tmp_path))
    assert said in message
    assert "\n" not in message


def test_lists_of_layers_that_agree_change_nothing(tmp_path: Path, failures: Failures) -> None:
    rotary, chunked = [1, 1, 1, 0] * 12, ["chunked_attention"] * 3 + ["full_attention"]
    blocks = {"M": "mamba", "E": "moe", "*": "full_attention"}
    nano = json.loads((MODELS / "nemotron-3-nano" / "config.json").read_text())
    for name, changes in (
        ("llama-4-scout", {"no_rope_layers": rotary, "layer_types": chunked * 12}),
        ("llama-4-scout", {"no_rope_layers": [], "moe_layers": list(range(48))}),
        ("llama-4-maverick", {"moe_layers": list(range(1, 48, 2))}),
        ("minimax-m2", {"attn_type_list": None}),
        (
            "nemotron-3-nano",
            {"layers_block_type": [blocks[one] for one in nano["hybrid_override_pattern"]]},
        ),
    ):
        plain = read_model(MODELS / name)
        with failures.of(name, changes):
            own = read_model(changed(name, changes, tmp_path))
            assert own.model_copy(update={"name": plain.name}) == plain
    without = read_model(changed("llama-4-scout", {"attention_chunk_size": None}, tmp_path))
    assert not any(without.windowed)


def test_reads_what_hybrids_mix() -> None:
    nano = read_model(MODELS / "nemotron-3-nano")
    assert (nano.num_linear_layers, nano.num_moe_layers, nano.num_attention_layers) == (23, 23, 6)
    assert nano.mixers[5] is Mixer.ATTENTION
    assert nano.layers[5] is LayerKind.NONE
    assert not nano.ffn_is_gated
    ultra = read_model(MODELS / "nemotron-3-ultra")
    assert (present(ultra.moe).latent_size, ultra.mtp_num_layers) == (2048, 1)
    qwen = read_model(MODELS / "qwen3.5-397b-a17b")
    assert (qwen.num_linear_layers, qwen.num_attention_layers) == (45, 15)
    assert qwen.attention.has_output_gate
    # Its checkpoint has a layer of multi-token prediction, which published configs leave out.
    assert read_model(MODELS / "qwen3-next-80b-a3b").mtp_num_layers == 1
    scout = read_model(MODELS / "llama-4-scout")
    assert (scout.windowed.count(True), scout.attention.window_is_chunk) == (36, True)
    maverick = read_model(MODELS / "llama-4-maverick")
    assert (maverick.num_moe_layers, maverick.dense_ffn_size) == (24, 16384)
    glm = read_model(MODELS / "glm-5")
    assert glm.attention.indexer == Indexer(num_heads=32, head_dim=128, top_k=2048)
    longcat = read_model(MODELS / "longcat-flash")
    assert (longcat.num_layers, longcat.num_moe_layers) == (56, 28)
    assert longcat.num_attention_layers == 56
    assert longcat.layers[:3] == (LayerKind.MOE, LayerKind.DENSE, LayerKind.MOE)
    assert (longcat.most_stages, longcat.mtp_num_layers) == (28, 1)
    moe = present(longcat.moe)
    assert (moe.router_outputs, moe.top_k, moe.computed_top_k) == (768, 12, 8)
    v4 = read_model(MODELS / "deepseek-v4-flash")
    assert [v4.compress_ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert (v4.residual_streams, v4.mtp_num_layers, all(v4.windowed)) == (4, 1, True)
    assert v4.moe is not None
    assert (v4.moe.scoring, v4.moe.num_hash_layers) == ("sqrtsoftplus", 3)


@each_row(
    ("changes", "said"),
    [
        ({"hidden_size": 0}, "hidden_size: 0 is not in 1..16777216"),
        ({"hidden_size": -256}, "hidden_size: -256 is not in"),
        ({"hidden_size": 10**30}, "hidden_size: 1000000000000000000000000000000 is not in"),
        ({"hidden_size": 10**400}, "hidden_size: a number of more than 30 digits is not in"),
        ({"hidden_size": True}, "hidden_size: true is not a whole number"),
        ({"hidden_size": 256.0}, "hidden_size: 256.0 is not a whole number"),
        ({"hidden_size": "256"}, "hidden_size: '256' is not a whole number"),
        ({"hidden_size": [256]}, "hidden_size: a list of 1 is not a whole number"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: 1000000 is not in 1..1000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads"),
        ({"num_experts_per_tok": 2**24}, "num_experts_per_tok: 16777216 is not in 1..1000"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 exceeds num_local_experts 8"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan must be finite, above 0 and below 1"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: inf must be finite"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: 0 must be finite, above 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps: true is not a number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: 'no' is neither true nor false"),
        ({"head_dim": None, "num_attention_heads": 24}, "num_attention_heads: 24 does not divide"),
        ({"architectures": "MixtralForCausalLM"}, "architectures: 'MixtralForCausalLM' is not a"),
        ({"architectures": []}, "architectures: missing; known: "),
        ({"architectures": [7]}, "architectures[0]: 7 is not of type str"),
        ({"rope_theta": 10**400}, "rope_theta: a number of more than 30 digits must be finite"),
    ],
)
def test_nonsense_is_refused_by_field_value_and_rule(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = written(tmp_path, changes)
    assert refusal(file).startswith(f"{file}: {said}")


@each_row(
    ("base", "changes", "said"),
    [
        ("deepseek-v3", {"n_group": 7}, "n_group: 7 does not divide n_routed_experts 256"),
        ("deepseek-v3", {"topk_group": 9}, "topk_group: 9 exceeds n_group 8"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads: 8 differs"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "layer_types: 1 entries for"),
        ("gpt-oss-20b", {"layer_types": ["linear"] * 24}, "layer_types[0]: 'linear' is neither"),
        ("gpt-oss-20b", {"sliding_window": None}, "sliding_window: missing"),
        ("olmoe-1b-7b", {"head_dim": 64}, "head_dim: 64 is not hidden_size"),
        ("qwen3-30b-a3b", {"mlp_only_layers": ["a"]}, "mlp_only_layers[0]: 'a' is not of type int"),
        ("longcat-flash", {"zero_expert_num": -1}, "zero_expert_num: -1 is not in 0..16777216"),
        ("longcat-flash", {"zero_expert_num": 10**9}, "zero_expert_num: 1000000000 is not in 0.."),
        ("longcat-flash", {"zero_expert_num": None}, "zero_expert_num: missing"),
        (
            "longcat-flash",
            {"zero_expert_type": "copy"},
            "zero_expert_type: 'copy' is not supported",
        ),
        ("longcat-flash", {"zero_expert_type": 0}, "zero_expert_type: 0 is not a text"),
        (
            "longcat-flash",
            {"moe_topk": 769},
            "moe_topk: 769 exceeds n_routed_experts 512 + 256 with",
        ),
        ("longcat-flash", {"moe_topk": 1001}, "moe_topk: 1001 is not in 1..1000"),
        ("longcat-flash", {"num_layers": 501}, "num_layers: 501 is not in 1..500"),
        ("longcat-flash", {"num_layers": None}, "num_layers: missing"),
        ("longcat-flash", {"num_hidden_layers": 27}, "num_hidden_layers: 27 is neither num_layers"),
        ("longcat-flash", {"index_topk": 2048}, "index_topk: not supported of this architecture"),
        ("longcat-flash", {"oe_vocab_size_ratio": 78}, "oe_vocab_size_ratio: not supported"),
    ],
)
def test_nonsense_of_one_architecture_is_refused(
    base: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = written(tmp_path, changes, base=base)
    assert refusal(file).startswith(f"{file}: {said}")


def test_a_path_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    assert "cannot read the model config: No such file" in refusal(tmp_path / "config.json")
    assert "cannot read the model config: No such file" in refusal(tmp_path)
    assert "not a file" in refusal(Path("/dev/zero"))
    assert "a\\nb" in refusal(tmp_path / "a\nb")


@each_row(
    ("content", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "a list of 0 at the top, where an object belongs"),
        (b"null", "null at the top"),
        (bytes(range(256)), "not UTF-8 text"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b" " * 1_000_001, "larger than 1000000 bytes"),
    ],
)
def test_what_is_no_json_object_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    assert said in refusal(file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@each_row("base", ["tiny-moe", "deepseek-v3", "gpt-oss-20b", "qwen3-30b-a3b", "longcat-flash"])
def test_any_value_in_any_field_is_read_or_refused_in_one_line(base: str, tmp_path: Path) -> None:
    fields = sorted(json.loads((MODELS / base / "config.json").read_text()))

    @given(field=st.sampled_from(fields), value=JSON)
    @settings(deadline=None, max_examples=50)
    def holds(field: str, value: Any) -> None:
        file = written(tmp_path, {field: value}, base=base)
        try:
            read_model(file)
        except SpecError as error:
            lines = str(error).splitlines()
        else:
            lines = ["read"]
        assert len(lines) == 1

    holds()


def test_zero_experts_that_cannot_be_are_one_line(failures: Failures) -> None:
    longcat = read_model(MODELS / "longcat-flash")
    moe = present(longcat.moe).model_dump()
    for changes, said in (
        ({"zero_experts": -1}, "greater than or equal to 0"),
        ({"top_k": 769}, "top_k 769 exceeds num_experts 512 + zero_experts 256"),
        ({"top_k": 13, "zero_experts": 0, "num_experts": 12}, "top_k 13 exceeds num_experts 12"),
        ({"num_groups": 8}, "zero_experts need num_groups 1, not 8"),
    ):
        with failures.of(changes), pytest.raises(ValidationError, match=re.escape(said)):
            Moe.model_validate(moe | changes)
    for kept in ([0], [0, 2, 3]):
        with pytest.raises(ValidationError, match="shortcut-connected moe layer needs one without"):
            ModelSpec.model_validate(longcat.part(kept).model_dump())


@each_row(
    ("model", "tower", "sizes"),
    (
        ("qwen3.5-397b-a17b", None, (27, 1152, 4304)),
        ("qwen3.5-397b-a17b", {"depth": 12, "hidden_size": 768}, (12, 768, 4304)),
        ("kimi-k2.5", {"vt_num_hidden_layers": 3, "vt_intermediate_size": 64}, (3, 1152, 64)),
        ("deepseek-v3", {"depth": 12}, None),
    ),
)
def test_vision_towers_have_the_sizes_of_their_config_or_those_of_published_ones(
    tmp_path: Path, model: str, tower: dict[str, Any] | None, sizes: Any
) -> None:
    fields = json.loads((MODELS / model / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | {"vision_config": tower}))
    read = read_model(path)
    layers, width, inner = sizes or (0, 0, 0)
    joined = 4 * width * (4 * width + read.hidden_size)
    expected = layers * (4 * width**2 + 2 * width * inner) + joined
    assert read.vision_elements == expected


def test_vision_towers_have_the_weights_that_transformers_builds(
    tmp_path: Path, failures: Failures
) -> None:
    import torch
    import transformers
    from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeVisionModel
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

    for text, name, built, stated in (
        # GLM-4.5V and GLM-4.6V; Qwen3-VL, three layers of which join patches inside, too; and a
        # tower as those of dense Qwen3.5, which join them once.
        ("glm-4.5-air", "Glm4vMoe", Glm4vMoeVisionModel, {"intermediate_size": 10_944}),
        ("qwen3-30b-a3b", "Qwen3VLMoe", Qwen3VLMoeVisionModel, {"out_hidden_size": 2048}),
        ("qwen3-next-80b-a3b", "Qwen3_5", Qwen3_5VisionModel, {"out_hidden_size": 2048}),
    ):
        with failures.of(name):
            fields = json.loads((MODELS / text / "config.json").read_text())
            tower = getattr(transformers, f"{name}Config")().vision_config
            for key, value in stated.items():
                setattr(tower, key, value)
            with torch.device("meta"):
                weights = sum(one.numel() for one in built(tower).parameters())
            config = {
                "architectures": [f"{name}ForConditionalGeneration"],
                "text_config": fields,
                "vision_config": tower.to_dict(),
            }
            path = tmp_path / "config.json"
            path.write_text(json.dumps(config))
            # Biases, positions and what makes patches aside.
            assert read_model(path).vision_elements == pytest.approx(weights, rel=0.02)
