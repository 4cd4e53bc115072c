"""Bytes of a parameter's optimizer state in Megatron-LM, as its flags say.

A precision-aware optimizer keeps moments and master weights in the types of `--exp-avg-dtype`,
`--exp-avg-sq-dtype` and `--main-params-dtype`. Of fp32 master weights of bf16 parameters it keeps
only the 16 bits that the parameters lack, unless `store_param_remainders` is off
(megatron/core/optimizer of core_v0.16.1: optimizer_config.py, and `init_shard` of
distrib_optimizer.py); where parameters are fp8 with scales of blocks, Megatron-LM itself keeps
masters in fp32. Without such an optimizer the engine refuses other types than fp32.

Moments are counted by a table. Muon's parameters that are no matrices, embedding and output have
Adam's two where one is counted, and optimizers outside the table count as Adam: the estimate says
so (tuner/engines/megatron_lm/unpriced.py).

Not covered: states on the host (fp32 there).
"""

from collections.abc import Mapping
from typing import Any, Final

from tuner.engines.reading.arguments import Flags
from tuner.errors import SpecError
from tuner.spec.files import shown_value

NUM_MOMENTS: Final[Mapping[str, int]] = {"adam": 2, "adamw": 2, "lion": 1, "sgd": 1}
"""Moments of a parameter by optimizer; SGD's is its momentum."""
_AWARE: Final = "use-precision-aware-optimizer"
_MOMENTS: Final = ("exp-avg-dtype", "exp-avg-sq-dtype")
_MASTER: Final = "main-params-dtype"
_GRADIENTS: Final = "main-grads-dtype"
_BYTES: Final = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
_BYTES_OF_MOMENTS: Final = _BYTES | {"fp8": 1, "uint8": 1}


def optimizer_state(flags: Flags, *, has_recipe: bool) -> dict[str, Any]:
    """Return `gradient_bytes`, and where they are not fp32 `master_bytes` and `moments_bytes`.

    Raises:
        SpecError: a type is unknown, or needs an optimizer that the launch does not have.
    """
    optimizer = flags.word("optimizer") or "adam"
    kept = _MOMENTS[: NUM_MOMENTS.get(optimizer, 1 if is_orthogonal(optimizer) else 2)]
    moments = sum(_bytes(flags, name, _BYTES_OF_MOMENTS) for name in kept)
    master, gradient = (_bytes(flags, name, _BYTES) for name in (_MASTER, _GRADIENTS))
    is_half, is_brain = flags.is_on("fp16"), flags.is_on("bf16")
    is_aware = flags.is_on(_AWARE)
    for name in (*_MOMENTS, _MASTER, _GRADIENTS):
        if _bytes(flags, name, _BYTES_OF_MOMENTS) < _BYTES["fp32"] and not (is_aware or has_recipe):
            raise SpecError(
                f"{flags.source}: {flags.said(name)} needs --{_AWARE}; add it, or leave the type at"
                " fp32"
            )
    # With fp16, gradients have the parameters' type unless a flag says fp32.
    is_half = is_half and not flags.is_on("accumulate-allreduce-grads-in-fp32")
    if is_half or (is_brain and flags.is_on("grad-reduce-in-bf16")):
        gradient = min(gradient, _BYTES["bf16"])
    states = {"gradient_bytes": gradient, "shards_optimizer": not is_orthogonal(optimizer)}
    if flags.is_on("optimizer-cpu-offload"):
        return states
    if keeps_remainders(flags):
        master = _BYTES["bf16"]
    if master != _BYTES["fp32"]:
        states["master_bytes"] = master
    if moments != 2 * _BYTES["fp32"]:
        states["moments_bytes"] = moments
    return states


def is_orthogonal(optimizer: str) -> bool:
    """Return whether updates are made orthogonal, as Muon and its variants do."""
    return "muon" in optimizer


def keeps_remainders(flags: Flags) -> bool:
    """Return whether a master weight is kept as its bf16 parameter and the remainder."""
    if not (flags.is_on(_AWARE) and flags.is_on("bf16")) or flags.is_on("optimizer-cpu-offload"):
        return False
    if _bytes(flags, _MASTER, _BYTES) < _BYTES["fp32"]:
        return False
    is_scaled = flags.word("fp8-format") is not None and flags.word("fp8-recipe") not in (
        None,
        "delayed",
    )
    return not (flags.is_on("no-store-param-remainders") or is_scaled)


def _bytes(flags: Flags, name: str, sizes: dict[str, int]) -> int:
    word = flags.word(name)
    if word is None:
        return sizes["fp32"]
    size = sizes.get(word.removeprefix("torch."))
    if size is None:
        raise SpecError(
            f"{flags.source}: --{name} {shown_value(word)} is none of {', '.join(sizes)}"
        )
    return size
