"""The fields of a decision against megatron-core's own configuration classes, where installed."""

import warnings
from typing import Any

import pytest

from tests.rows import Failures
from tests.tuner.engines.testing import sample_decision
from tests.tuner.models import example_model
from tuner.config.train import TrainDecision
from tuner.engines.megatron_lm.core import Core, decision_fields, model_fields
from tuner.spec.model import ModelSpec

DECISIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two uneven stages with embedding and loss": {
        "pipeline_model_parallel_size": 2,
        "split": (20, 12),
        "ends_as_layers": True,
    },
    "interleaved, overlapped, one MTP layer": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "split": (7, 9, 9, 7),
        "a2a_overlap": True,
        "mtp_num_layers": 1,
    },
    "DeepEP": {"dispatcher": "deepep"},
    "partial graphs and activations of attention recomputed": {
        "cuda_graph": "partial",
        "recompute_modules": ("moe_act", "core_attn"),
        "level": "selective",
    },
    "every layer recomputed": {"level": "full"},
    "three layers of a stage recomputed": {"level": "full", "recompute_num_layers": 3},
    "activations in host memory": {"activation_offload": True},
    "fp8 with a scale per block": {"fp8_recipe": "fp8-blockwise"},
    "nvfp4": {"fp8_recipe": "nvfp4"},
}


def _decision(model: ModelSpec, **changes: Any) -> TrainDecision:
    level = changes.pop("level", "none")
    layout = list(changes.pop("split", (32,)))
    layout[-1] += model.num_layers - sum(layout)
    plain = {
        "pipeline_model_parallel_size": 1,
        "recompute": level,
        "recompute_modules": (),
        "stage_recompute": (level,) * len(layout),
        "chunks": (1,) * len(layout),
        "pipeline_layout": tuple(layout),
    }
    return sample_decision(**{**plain, **changes})


def test_megatron_core_takes_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra: engines)")
    # Transformer Engine needs a GPU; every release of the last two years is new enough.
    monkeypatch.setattr(
        "megatron.core.transformer.transformer_config.is_te_min_version", lambda *given: True
    )
    failures, num_built = Failures(), 0
    for name in ("mixtral-8x7b", "deepseek-v3", "gpt-oss-20b", "qwen3-30b-a3b"):
        model = example_model(name)
        for case, changes in DECISIONS.items():
            # Those that split layers are for 32 and more.
            if model.num_layers >= 32 or "split" not in changes:
                num_built += 1
                with failures.of(name, case):
                    _build(model, _decision(model, **changes))
    failures.check()
    assert num_built == 38


def _build(model: ModelSpec, decision: TrainDecision) -> None:
    """Make the class of the fields, as the launchers do."""
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    fields = model_fields(model) | decision_fields(
        model, decision, precision=decision.fp8_recipe or "bf16", core=Core.V0_16
    )
    fields = {field: value for field, value in fields.items() if value is not None}
    # A name in the launchers, a function in the class.
    fields.pop("activation_func", None)
    cls = MLATransformerConfig if fields.pop("multi_latent_attention", False) else TransformerConfig
    with warnings.catch_warnings():
        # It suggests flags for its other kernels.
        warnings.simplefilter("ignore")
        built = cls(
            **_as_the_class_wants(fields),
            bf16=True,
            pipeline_dtype=torch.bfloat16,
            apply_rope_fusion=False,
        )
    assert built.expert_tensor_parallel_size == 1
    assert built.num_moe_experts == (model.moe.num_experts if model.moe else None)


def _as_the_class_wants(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn tuples into the lists that the class takes, but for a window."""
    return {
        name: list(value) if isinstance(value, tuple) and name != "window_size" else value
        for name, value in fields.items()
    }


def test_stages_that_differ_are_refused_and_a_dense_model_says_so() -> None:
    model = example_model("mixtral-8x7b")
    decision = sample_decision(stage_recompute=("none", "full"), chunks=(1, 1))
    with pytest.raises(ValueError, match="the stages differ"):
        decision_fields(model, decision, precision="bf16", core=Core.V0_18)
    # A recipe that the overrides start from may have some.
    model = example_model("llama-3.1-8b")
    fields = model_fields(model)
    assert fields["num_moe_experts"] is None
    assert fields["num_query_groups"] == 8
    assert fields["add_bias_linear"] is False
