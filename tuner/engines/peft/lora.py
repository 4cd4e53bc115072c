"""Adapters as arguments of PEFT's `LoraConfig`.

Modules and parameters are named as PEFT names them (`target_modules`, `target_parameters`): stacked
experts are parameters, and every other target is a module. Groups are written out, since PEFT's own
`all-linear` would adapt the router of an MoE model, too. PEFT matches the last parts of a module's
name (tuners/tuners_utils.py, `check_target_module_exists`), so that a name of both kinds of
attention is one target. Read from the package peft 0.21.2.

In architectures whose experts were modules before Transformers 5, PEFT takes gate_proj, up_proj and
down_proj for those of the experts, doubles the rank of gate_up_proj, and gives dense and shared
networks none (utils/transformers_weight_conversion.py, `_convert_peft_config_moe`, also where it
loads what was saved): DeepSeek-V2 counts 3.48e9 parameters instead of 2.27e9 at rank 16.
"""

from typing import Any, Final

from tuner.catalog.manifest import restricted
from tuner.spec.features import ModelFeature, features
from tuner.spec.model import ModelSpec
from tuner.spec.tune import ADAPTER_TARGETS, EXPERTS, Adapters, adapted

WITHOUT_OUT_PROJ: Final = restricted(
    ModelFeature.MAMBA2,
    adapter_targets=frozenset(ADAPTER_TARGETS) - {"out_proj"},
    adapters=frozenset({"lora"}),
)
"""The fused kernels of Mamba-2 multiply by the weights of `out_proj` themselves, so PEFT refuses an
adapter of it (tuners/tuners_utils.py, `_check_lora_target_modules_mamba`), and 4-bit ones would not
be dequantised."""
NETWORKS_BECOME_EXPERTS: Final = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeForCausalLM",
        "GlmMoeDsaForCausalLM",
        "LongcatFlashForCausalLM",
        "OlmoeForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    }
)


def lora_config(tune: Adapters, model: ModelSpec) -> dict[str, Any]:
    """Return rank, scale and names."""
    names = adapted(tune, model)
    return {
        "r": tune.rank,
        "lora_alpha": tune.effective_alpha,
        "target_modules": [name for name in names if name != EXPERTS],
        "target_parameters": list(_expert_parameters(model)) if EXPERTS in names else [],
    }


def _expert_parameters(model: ModelSpec) -> tuple[str, str]:
    """Name the stacks of experts' weights in Transformers 5: up, or gate and up together, and down.

    Where a layer is a mixer or a network alone, both are called mixer (models/nemotron_h).
    """
    layer = "mixer" if ModelFeature.SEPARATE_LAYERS in features(model) else "mlp"
    first = "gate_up_proj" if model.ffn_is_gated else "up_proj"
    return f"{layer}.experts.{first}", f"{layer}.experts.down_proj"
