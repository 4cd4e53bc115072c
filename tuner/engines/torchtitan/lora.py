"""Adapters as fields of torchtitan's `LoRAConverter.Config`.

Targets are last parts of modules' names. torchtitan fuses queries, keys and values (wqkv), and has
gate, up and down of every network as w1, w3 and w2. Read from the package torchtitan 0.3.0
(components/lora.py and the models' configurations).
"""

from typing import Final

from tuner.spec.model import ModelSpec
from tuner.spec.tune import Adapters, adapted

_FUSED: Final = {"q_proj": "wqkv", "k_proj": "wqkv", "v_proj": "wqkv"}
_LATENT: Final = {"q_proj": "wq", "q_b_proj": "wq_b", "kv_b_proj": "wkv_b"}
_OTHERS: Final = {"o_proj": "wo", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def lora_fields(tune: Adapters, model: ModelSpec) -> dict[str, int | float | list[str]]:
    """Return rank, scale and names."""
    modules = _OTHERS | (_LATENT if model.attention.kind == "mla" else _FUSED)
    return {
        "rank": tune.rank,
        "alpha": tune.effective_alpha,
        "target_modules": list(dict.fromkeys(modules[name] for name in adapted(tune, model))),
    }
