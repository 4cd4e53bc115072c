"""Adapters as arguments of PEFT's `LoraConfig`.

Modules and parameters are named as PEFT names them (`target_modules`, `target_parameters`): stacked
experts are parameters, and every other target is a module. Groups are written out, since PEFT's own
`all-linear` would adapt the router of an MoE model, too. PEFT matches the last parts of a module's
name (tuners/tuners_utils.py, `check_target_module_exists`). Read from the package peft 0.21.2.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from tuner.spec.linear_attention import LinearName
from tuner.spec.model import Mixer, ModelSpec
from tuner.spec.tune import EXPERTS, GQA_PROJECTIONS, Adapters, adapted

EXPERT_PARAMETERS: Final = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Stacks of experts' weights in Transformers 5."""


def lora_config(tune: Adapters, model: ModelSpec) -> dict[str, Any]:
    """Return rank, scale and names."""
    names = adapted(tune, model)
    return {
        "r": tune.rank,
        "lora_alpha": tune.effective_alpha,
        "target_modules": list(_modules(names, model)),
        "target_parameters": list(EXPERT_PARAMETERS) if EXPERTS in names else [],
    }


def _modules(names: Iterable[str], model: ModelSpec) -> Iterator[str]:
    """Yield what matches the modules of softmax attention and networks, and no others.

    Kimi delta attention has projections of the same names, under `self_attn` as well (transformers
    5.24, models/kimi_linear; the code beside its checkpoint is alike); there every layer is named.
    Modules of other linear attention are in_proj, in_proj_* and out_proj (models/qwen3_next,
    qwen3_5_moe and nemotron_h).
    """
    has_same_names = model.linear is not None and model.linear.kind is LinearName.KDA
    for name in names:
        if has_same_names and name in GQA_PROJECTIONS:
            for layer, mixer in enumerate(model.mixer_by_layer):
                if mixer is Mixer.ATTENTION:
                    yield f"layers.{layer}.self_attn.{name}"
        elif name != EXPERTS:
            yield name
