"""Adapters that a launch of Megatron-SWIFT trains, from its own flags.

Targets are the ends of megatron-core's module names (`linear_qkv`), or the groups `all-linear`,
`all-router` and `all-embedding`. `all-linear` are the linear layers of a block, of every expert too
(`find_all_linears` of swift/megatron/utils/utils.py), the router's is none.

Adapters have the weights' type (`LoraParallelLinear` of mcore-bridge 1.6.5, tuners/lora.py).

Not covered: adapters of vision towers, a rank for each matrix.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from tuner.engines.ms_swift.flags import RELEASE
from tuner.engines.reading.arguments import Flags
from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.tune import FULL, JOINED_INPUTS, QKV, Adapters, Tune

TUNERS: Final = ("full", "lora", "lora_llm")
_MODULES: Final = {
    "all-linear": ("all-linear",),
    # A few bytes, beside the others.
    "all-router": (),
    "linear_qkv": QKV,
    "linear_proj": ("o_proj",),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_fc1": ("mlp",),
    "linear_fc2": ("mlp",),
    "in_proj": JOINED_INPUTS,
    "out_proj": ("out_proj",),
}
"""Modules of megatron-core: the matrices in them. A model has `linear_fc1` and `linear_fc2` in
dense networks, in experts or in both, so one of them stands for all of a network."""
_UNPRICED: Final = {
    "freeze_parameters": "",
    "freeze_parameters_regex": "",
    "freeze_parameters_ratio": "",
    "trainable_parameters": "",
    "trainable_parameters_regex": "",
    "freeze_llm": "",
    "target_regex": "; name the modules with --target_modules",
    "modules_to_save": "; leave it out to price the adapters",
}
"""Fields that change which weights are trained, in ways that have no price, and the way out."""


def stated_tune(flags: Flags) -> Tune:
    """Return what is trained: `full`, or adapters.

    Raises:
        SpecError: something that has no price.
    """
    for name, remedy in _UNPRICED.items():
        words = flags.words(name)
        if words and tuple(word.casefold() for word in words) not in (("false",), ("0",), ("0.0",)):
            raise SpecError(
                f"{flags.source}: {shown_value(flags.said(name))[1:-1]} trains a part of the"
                f" weights that has no price here{remedy or '; leave it out'}"
            )
    named = flags.choice("tuner_type", TUNERS, "full")
    if named == "full" and not {"adapters", "mcore_adapter"} & set(flags.values):
        return FULL
    rank = flags.number("lora_rank") or 8
    is_wide = flags.word("lora_dtype") == "float32"
    targets = tuple(
        dict.fromkeys(_targets(flags, flags.words("target_modules") or ("all-linear",)))
    )
    if not targets:
        raise SpecError(f"{flags.source}: adapters of routers alone have no price here")
    return Adapters(
        method="lora",
        rank=rank,
        alpha=_alpha(flags),
        targets=("all-linear",) if "all-linear" in targets else targets,
        dtype="fp32" if is_wide else "bf16",
    )


def _alpha(flags: Flags) -> float:
    word = flags.word("lora_alpha")
    try:
        return 32.0 if word is None else float(word)
    except ValueError:
        raise SpecError(f"{flags.source}: {flags.said('lora_alpha')} is not a number") from None


def _targets(flags: Flags, words: Sequence[str]) -> Iterator[str]:
    for word in words:
        module = word.rpartition(".")[2]
        if module not in _MODULES:
            known = ", ".join(_MODULES)
            raise SpecError(
                f"{flags.source}: --target_modules {shown_value(word)} of {RELEASE} has no price"
                f" here; known: {known}"
            )
        yield from _MODULES[module]
