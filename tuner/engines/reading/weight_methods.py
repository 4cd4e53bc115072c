"""The quantization method that a launch names, and the weights that it means.

Most methods only name the kernels for what a checkpoint holds: its bytes are those of the spec's
`goal.quantization`, which must have as many bits. The others make the weights of a launch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tuner.engines.reading.arguments import Flags
from tuner.errors import SpecError

BITS: Final[Mapping[str, int]] = {
    "bf16": 16,
    "fp8": 8,
    "fp8_block": 8,
    "nvfp4": 4,
    "mxfp4": 4,
    "fp8_block_mxfp4": 4,
    "int4": 4,
}
"""Bits of expert weights, by `goal.quantization`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights that a quantization method means."""

    format: str = ""
    """Format by a spec's names; empty: the spec's own."""
    bits: tuple[int, ...] = ()
    """Bits of expert weights; empty: any."""
    notes: tuple[str, ...] = ()
    """Notes on the method for the estimate."""


_ANY: Final = (
    "auto-round compressed-tensors gguf humming inc modelopt modelopt_mixed online quark torchao"
)
_FEW: Final = "ascend auto_gptq deepseek_v4_fp8 fp_quant gptq gptq_marlin modelslim"
_FOUR: Final = (
    "auto_awq awq awq_marlin bitsandbytes gpt_oss_mxfp4 mlx_q4 moe_wna16 mxfp4 mxfp_w4a8"
    " nvfp4_online nvfp4_per_token petit_nvfp4 qoq quark_int4fp8_moe quark_mxfp4 w4afp8"
)
_EIGHT: Final = (
    "auto-round-int8 blockwise_int8 experts_int8 fbgemm_fp8 int8_per_channel_weight_only mlx_q8"
    " modelopt_fp8 modelopt_mxfp8 mxfp8 w8a8_fp8 w8a8_int8"
)
METHODS: Final[Mapping[str, Weights]] = {
    **dict.fromkeys(_ANY.split(), Weights()),
    **dict.fromkeys(_FEW.split(), Weights(bits=(4, 8))),
    **dict.fromkeys(_FOUR.split(), Weights(bits=(4,))),
    **dict.fromkeys(_EIGHT.split(), Weights(bits=(8,))),
    **dict.fromkeys(
        ("fp8", "fp8_per_tensor", "fp8_per_channel", "ptpc_fp8"), Weights(format="fp8")
    ),
    "fp8_per_block": Weights(format="fp8_block"),
    "modelopt_fp4": Weights(format="nvfp4"),
    "nvfp4": Weights(format="nvfp4"),
    "unquant": Weights(format="bf16"),
}
"""Methods of vLLM 0.33.0 (model_executor/layers/quantization/__init__.py), vLLM-Ascend, SGLang
0.5.23 (srt/arg_groups/choices.py) and of older releases. `modelopt` is fp8 in vLLM, and what the
checkpoint says in SGLang."""
_SOME: Final = ("fp8", "awq", "gptq", "modelopt_fp4", "compressed-tensors")


def weight_method(flags: Flags, name: str) -> Weights:
    """Return the weights of the method that a flag names; the checkpoint's without one.

    Raises:
        SpecError: it is no method that is known.
    """
    word = flags.word(name)
    if word is None or word.lower() in ("none", "null", "auto"):
        return Weights()
    if word not in METHODS:
        raise SpecError(
            f"{flags.source}: --{name} {word!r:.60} has no price; leave it out where the spec's"
            f" goal.quantization states its weights; there is {', '.join(_SOME)} and others"
        )
    weights = METHODS[word]
    if weights.format:
        return weights
    note = f"--{name} {word} is priced with the weights of the spec's goal.quantization"
    return Weights(bits=weights.bits, notes=(note,))


def check_bits(source: str, bits: tuple[int, ...], *, quantization: str) -> None:
    """Refuse a launch whose weights have other bits than the spec's.

    Raises:
        SpecError: they have.
    """
    spec_bits = BITS.get(quantization)
    if not bits or spec_bits is None or spec_bits in bits:
        return
    nearest = "fp8" if 8 in bits else "int4"
    raise SpecError(
        f"{source}: its --quantization means weights of {' or '.join(map(str, bits))} bits, the"
        f" spec's goal.quantization {quantization} has {spec_bits}; write the format of the"
        f" checkpoint there, the nearest is {nearest}"
    )
