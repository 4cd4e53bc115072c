"""Adapters as arguments of PEFT's `LoraConfig`.

Modules and parameters are named as PEFT names them (`target_modules`, `target_parameters`): stacked
experts are parameters, and every other target is a module. Groups are written out, since PEFT's own
`all-linear` would adapt the router of an MoE model, too. Read from the package peft 0.21.2.
"""

from typing import Any, Final

from tuner.spec.model import ModelSpec
from tuner.spec.tune import EXPERTS, Adapters, adapted

EXPERT_PARAMETERS: Final = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Stacks of experts' weights in Transformers 5."""


def lora_config(tune: Adapters, model: ModelSpec) -> dict[str, Any]:
    """Return rank, scale and names."""
    names = adapted(tune, model)
    return {
        "r": tune.rank,
        "lora_alpha": tune.effective_alpha,
        "target_modules": [name for name in names if name != EXPERTS],
        "target_parameters": list(EXPERT_PARAMETERS) if EXPERTS in names else [],
    }
