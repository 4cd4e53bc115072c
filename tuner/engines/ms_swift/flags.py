"""Names of Megatron-SWIFT's arguments, and what Megatron-LM calls those that an estimate reads.

ms-swift parses dataclasses with Transformers' `HfArgumentParser`: a field is a flag with `_` or
`-`, a unique beginning of it is enough, a switch takes `true` or `false`, and one that is on by
default is also turned off by `--no_NAME`. Most fields are those of megatron-core's configurations;
`OWN` holds the others. arguments.txt lists all fields, so that a slip is told from a flag that
changes no price.

Read from the wheels ms-swift 3.5.0 to 4.6.0 (swift/megatron/arguments, swift/arguments; up to 3.12
swift/megatron/argument, swift/llm/argument). Defaults are those of 4.6.0.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tuner.engines.megatron_lm import flags as megatron
from tuner.engines.reading.sections import SLIP_RATIO
from tuner.errors import SpecError
from tuner.spec.files import shown_value

RELEASE: Final = "ms-swift 4.6"

NAMES: Final = frozenset(
    word
    for line in Path(__file__).with_name("arguments.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for word in line.split()
)

OWN: Final[Mapping[str, str]] = {
    "max_length": "seq-length",
    "output_dir": "save",
    "save_steps": "save-interval",
    "save_total_limit": "most-recent-k",
    "manual_gc_steps": "manual-gc-interval",
    "microbatch_group_size_per_vp_stage": megatron.SPELLED["interleave_group"],
    "virtual_pipeline_model_parallel_size": megatron.SPELLED["virtual_pipeline"],
    "cp_comm_type": "cp-comm-type",
}
"""Fields with another name in Megatron-LM."""

OLDER: Final[Mapping[str, str]] = {
    "train_type": "tuner_type",
    "save": "output_dir",
    "save_interval": "save_steps",
    "manual_gc_interval": "manual_gc_steps",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "load": "mcore_model",
    "adapter_load": "mcore_adapter",
    "extra_megatron_kwargs": "megatron_extra_kwargs",
}
"""Names of 3.x: what 4.x calls them."""

OFF: Final[Mapping[str, tuple[str, bool]]] = {
    "apply_rope_fusion": ("no-rope-fusion", False),
    "bias_activation_fusion": ("no-bias-swiglu-fusion", True),
    "gradient_accumulation_fusion": ("no-gradient-accumulation-fusion", True),
    "overlap_p2p_comm": ("no-overlap-p2p-communication", True),
}
"""Switches that Megatron-LM has the other way round, and their defaults."""
OLDER_OFF: Final[Mapping[str, str]] = {
    "no_rope_fusion": "apply_rope_fusion",
    "no_bias_swiglu_fusion": "bias_activation_fusion",
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
}
"""Names in 3.x, which had them as Megatron-LM has."""

READ: Final = frozenset(
    {
        "torch_dtype",
        "packing",
        "packing_length",
        "seq_length",
        "tuner_type",
        "lora_rank",
        "lora_alpha",
        "lora_dtype",
        "target_modules",
        "adapters",
        "mcore_adapter",
        "megatron_extra_kwargs",
        "rlhf_type",
        "calculate_KL",
        *OFF,
    }
)
"""Read here, without a flag of Megatron-LM's."""

_OF_THE_MODEL: Final = frozenset(megatron.SIZES.values()) | {
    "ffn-hidden-size",
    "group-query-attention",
    "num-query-groups",
    "multi-latent-attention",
    "hybrid-layer-pattern",
    "linear-attention-freq",
    "attention-output-gate",
    "experimental-attention-variant",
    "moe-layer-freq",
    "swiglu",
    "untie-embeddings-and-output-weights",
}
"""Set by 3.x from the checkpoint's config.json, which the spec names."""

DEFAULTS: Final[Mapping[str, str]] = {
    "micro-batch-size": "1",
    "global-batch-size": "16",
    "use-distributed-optimizer": "true",
    "moe-token-dispatcher-type": "alltoall",
    "moe-grouped-gemm": "true",
    "expert-tensor-parallel-size": "1",
    "hidden-dropout": "0",
    "attention-dropout": "0",
    "recompute-granularity": "selective",
    "cross-entropy-loss-fusion": "true",
    "save": "megatron_output",
    "save-interval": "500",
}
"""Defaults by flag of Megatron-LM. The precision is the checkpoint's, bf16 unless it says more."""


def megatron_flag(name: str) -> str | None:
    """Return Megatron-LM's flag of a field; None where the price does not depend on it."""
    flag = OWN.get(name, name.replace("_", "-"))
    known = megatron.UNDERSTOOD - _OF_THE_MODEL
    return flag if flag in known else None


def own_flag(flag: str) -> str:
    """Return a flag of Megatron-LM as ms-swift has it."""
    name = flag.removeprefix("--")
    swift_names = {theirs: ours for ours, theirs in OWN.items()} | {
        off: ours for ours, (off, _) in OFF.items()
    }
    return f"--{swift_names.get(name, name.replace('-', '_'))}"


def field_of(flag: str, *, source: str, finds_slips: bool = True) -> tuple[str, bool]:
    """Return the field of a flag, and whether the flag turns it off.

    Slips are looked for unless the launch has had too many unknown flags before this one.

    Raises:
        SpecError: it begins several fields, or is a slip of one.
    """
    name = flag.replace("-", "_")
    if name in NAMES:
        return (OLDER_OFF[name], True) if name in OLDER_OFF else (OLDER.get(name, name), False)
    if name.startswith("no_") and name.removeprefix("no_") in NAMES:
        return name.removeprefix("no_"), True
    begun = sorted(field for field in NAMES if field.startswith(name))
    if len(begun) == 1:
        return OLDER.get(begun[0], begun[0]), False
    near = difflib.get_close_matches(name, NAMES, n=1, cutoff=SLIP_RATIO) if finds_slips else []
    shown = shown_value(flag)[1:-1]
    if begun:
        raise SpecError(
            f"{source}: --{shown} begins several flags of {RELEASE}: "
            f"{', '.join(f'--{field}' for field in begun[:4])}; write one of them out"
        )
    if near:
        raise SpecError(f"{source}: --{shown} is no flag of {RELEASE}; did you mean --{near[0]}?")
    return name, False
