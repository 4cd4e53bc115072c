"""Tiny models of every architecture with random weights, saved as their users' models lie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        # The second layer is dense.
        {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 16, "mlp_only_layers": [1]},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 8}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 8, "head_dim": 16, "sliding_window": 16},
    ),
}


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Save a model once: saved_model(model_type) -> its folder."""
    folders: dict[str, Path] = {}

    def save(model_type: str) -> Path:
        if model_type not in folders:
            name, more = CONFIGS[model_type]
            torch.manual_seed(3)
            model = transformers.AutoModelForCausalLM.from_config(
                getattr(transformers, name)(**COMMON | more)
            )
            for parameter in model.parameters():
                # Some gates begin at zero, where every choice is a tie.
                torch.nn.init.normal_(parameter, std=0.3)
            for key, buffer in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    torch.nn.init.normal_(buffer, std=0.2)
            folders[model_type] = tmp_path_factory.mktemp(model_type) / "model"
            model.save_pretrained(folders[model_type])
        return folders[model_type]

    return save


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Some 700 bytes, among them some that are no ASCII."""
    file = tmp_path / "text.txt"
    lines = [f"Zeile {number}: größer als {number * number}\n" for number in range(24)]
    file.write_text("".join(lines), encoding="utf-8")
    return file
