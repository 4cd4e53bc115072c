"""Adapters as arguments of PEFT's `LoraConfig`.

Modules and parameters are named as PEFT names them (`target_modules`, `target_parameters`): stacked
experts are parameters, and every other target is a module. Groups are written out, since PEFT's own
`all-linear` would adapt the router of an MoE model, too. PEFT matches the last parts of a module's
name (tuners/tuners_utils.py, `check_target_module_exists`), so that a name of both kinds of
attention is one target. Read from the package peft 0.21.2.
"""

from typing import Any, Final

from tuner.engines.manifest import restricted
from tuner.spec.features import ModelFeature
from tuner.spec.model import ModelSpec
from tuner.spec.tune import ADAPTER_TARGETS, EXPERTS, Adapters, adapted

EXPERT_PARAMETERS: Final = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Stacks of experts' weights in Transformers 5."""
WITHOUT_OUT_PROJ: Final = restricted(
    ModelFeature.MAMBA2, adapter_targets=frozenset(ADAPTER_TARGETS) - {"out_proj"}
)
"""The fused kernels of Mamba-2 multiply by the weights of `out_proj` themselves, so PEFT refuses an
adapter of it (tuners/tuners_utils.py, `_check_lora_target_modules_mamba`)."""


def lora_config(tune: Adapters, model: ModelSpec) -> dict[str, Any]:
    """Return rank, scale and names."""
    names = adapted(tune, model)
    return {
        "r": tune.rank,
        "lora_alpha": tune.effective_alpha,
        "target_modules": [name for name in names if name != EXPERTS],
        "target_parameters": list(EXPERT_PARAMETERS) if EXPERTS in names else [],
    }
