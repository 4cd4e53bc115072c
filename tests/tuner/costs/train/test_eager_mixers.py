"""What mixers of Transformers keep for the backward pass, counted by hooks over real modules.

Kernels that a CPU lacks are replaced by functions that save what the kernels save: attention,
causal_conv1d_fn of causal-conv1d, chunk_gated_delta_rule and chunk_kda of flash-linear-attention
0.5 (`save_for_backward` of fla/ops/gated_delta_rule/chunk.py and fla/ops/kda/chunk.py), and
MambaSplitConv1dScanCombinedFn of mamba_ssm 2. Adapters compute as PEFT's.

Letters: B sequences, S tokens of one, H heads, P values of one, Q tokens of a chunk.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.rows import Failures
from tests.tuner.models import MODELS
from tuner.config.columns import Strategies
from tuner.config.shapes import number
from tuner.config.tune_columns import Stack, tune_columns
from tuner.costs.train.columns_of import shape_of_model
from tuner.costs.train.eager_activations import eager_activation_bytes
from tuner.spec.huggingface.read import read_model
from tuner.spec.tune import Adapters

B, S, CHUNK, RANK = 2, 128, 64, 16
SIZES = {"hidden_size": 256, "intermediate_size": 320, "vocab_size": 64, "num_attention_heads": 4}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 80, "q_lora_rank": 96, "v_head_dim": 40}
LATENT |= {"qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "first_k_dense_replace": 9}
DELTA = {"num_key_value_heads": 2, "head_dim": 48, "mlp_only_layers": list(range(9))}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 32, "linear_value_head_dim": 40}
KDA = {"first_k_dense_replace": 9, "num_key_value_heads": 4, "pad_token_id": 0}
KDA |= {"bos_token_id": 0, "eos_token_id": 0}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 40, "n_groups": 2, "ssm_state_size": 24}


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_zeros(B, S, q.shape[1], v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, torch.zeros(q.shape[:3]))
        return out


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.clone()


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, triangles: int
    ) -> Tensor:
        kept = [v.new_zeros(*v.shape[:3], CHUNK) for _ in range(triangles)]
        ctx.save_for_backward(q.clone(), k.clone(), v, g.float().clone(), beta, *kept)
        return torch.zeros(v.shape, dtype=v.dtype)


class MambaScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, weight: Tensor) -> Tensor:
        out = projected.new_zeros(B, S, weight.shape[1])
        ctx.save_for_backward(projected, out, weight)
        return nn.functional.linear(out, weight)


def convolve(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    return Convolution.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]  # torch


def scan(triangles: int) -> Any:
    def run(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **_: Any) -> Any:
        return Scan.apply(q, k, v, g, beta, triangles), None  # type: ignore[no-untyped-call]  # torch

    return run


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Any:
        return Attention.apply(q, k, v)  # type: ignore[no-untyped-call]  # torch

    def mamba(projected: Tensor, *_: Any, outproj_weight: Tensor, **__: Any) -> Any:
        return MambaScan.apply(projected, outproj_weight)  # type: ignore[no-untyped-call]  # torch

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", convolve)
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", scan(1))
    monkeypatch.setattr(modeling_kimi_linear, "causal_conv1d_fn", convolve)
    monkeypatch.setattr(modeling_kimi_linear, "chunk_kimi_delta_attention", scan(2))
    monkeypatch.setattr(modeling_nemotron_h, "mamba2_split_conv1d_scan_combined", mamba)


class Adapted(nn.Module):
    def __init__(self, frozen: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.frozen, self.weight = frozen, frozen.weight
        self.a = nn.Parameter(torch.zeros(RANK, frozen.in_features, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(frozen.out_features, RANK, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.linear(x.to(self.a.dtype), self.a)
        result: Tensor = self.frozen(x) + nn.functional.linear(inner, self.b) * 2.0
        return result.to(x.dtype)


def adapt(model: nn.Module, names: tuple[str, ...], dtype: torch.dtype) -> None:
    model.requires_grad_(requires_grad=False)
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in names and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), name, Adapted(module, dtype))


def kept_bytes(fields: dict[str, Any], tune: Adapters) -> int:
    """Count what a forward pass keeps beside parameters, each storage once."""
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    dtype = torch.bfloat16 if tune.dtype == "bf16" else torch.float32
    adapt(model, tune.targets, dtype)
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (pointer := tensor.untyped_storage().data_ptr()) not in own:
            kept[pointer] = tensor
        return tensor

    tokens = torch.zeros(B, S, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    assert loss.requires_grad
    return sum(one.untyped_storage().nbytes() for one in kept.values())


def latent(layers: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, **LATENT}


def softmax(layers: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers, **DELTA}


def delta(layers: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "layer_types": ["linear_attention"] * layers, **DELTA}


def kda(layers: int) -> dict[str, Any]:
    every = {"kda_layers": list(range(1, layers + 1)), "full_attn_layers": [], "head_dim": 40}
    return {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention"] * layers,
        "mlp_layer_types": ["dense"] * layers,
        "linear_attn_config": every | {"num_heads": 4, "short_conv_kernel_size": 4},
        **KDA,
    }


def mamba(layers: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "hybrid_override_pattern": "M" * layers, **MAMBA}


def rows() -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    down = "down_proj"
    yield "deepseek-v3", latent, (down,)
    yield "deepseek-v3", latent, (down, "q_b_proj", "kv_b_proj")
    yield "deepseek-v3", latent, (down, "q_a_proj", "kv_a_proj_with_mqa", "o_proj")
    yield "qwen3-next-80b-a3b", softmax, (down, "q_proj", "k_proj", "v_proj", "o_proj")
    yield "qwen3-next-80b-a3b", delta, (down,)
    yield "qwen3-next-80b-a3b", delta, (down, "in_proj_qkvz", "in_proj_ba", "out_proj")
    yield "kimi-linear-48b-a3b", kda, (down,)
    yield "kimi-linear-48b-a3b", kda, (down, "q_proj", "b_proj", "f_a_proj", "f_b_proj", "o_proj")
    yield "nemotron-3-nano", mamba, ("in_proj",)


def test_a_layer_keeps_what_hooks_count(tmp_path: Path, failures: Failures) -> None:
    for name, layers, targets in rows():
        published = json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))
        dropped = {"layers_block_type", "rope_scaling", "auto_map", "quantization_config"}
        dropped |= {"bos_token_id", "eos_token_id", "pad_token_id"}
        fields = {key: value for key, value in published.items() if key not in dropped} | SIZES
        for dtype in ("fp32", "bf16"):
            tune = Adapters.model_validate(
                {"method": "lora", "rank": RANK, "targets": targets, "dtype": dtype}
            )
            two, three = (kept_bytes(fields | layers(count), tune) for count in (2, 3))
            (tmp_path / "config.json").write_text(json.dumps(fields | layers(3)), "utf-8")
            model = read_model(tmp_path)
            columns = tune_columns(tune, model, Stack.TRANSFORMERS)
            usual = {"sequence": float(S), "micro_batch": float(B), "num_microbatches": 1.0}
            shape = shape_of_model(model, mtp_layers=0)
            found = eager_activation_bytes(shape, Strategies(**usual, **columns))
            with failures.of(name, targets, dtype):
                # Some numbers per token and head are not counted.
                assert number(found.dense.saved) == pytest.approx(three - two, rel=0.02)
