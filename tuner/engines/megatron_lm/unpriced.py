"""Megatron-LM's settings that are not priced: expert load balancing, and values that differ.

The rows of tuner/engines/priced_settings.py are compared with the flags of a launch. A launch that
starts from a recipe of Megatron-Bridge has the recipe's values, which are the priced ones, where it
says nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from tuner.engines.megatron_lm.optimizer_state import NUM_MOMENTS, is_orthogonal
from tuner.engines.priced_settings import MEGATRON, PricedSetting
from tuner.engines.reading.arguments import Flags
from tuner.engines.reading.launch import Effect, UnpricedSetting
from tuner.errors import SpecError
from tuner.spec.files import shown_value

_FLAG: Final = {"fp8_param": "fp8-param-gather"}
"""Flags by field, where the flag is not the field's own name."""

OFF: Final = {
    "overlap_p2p_comm": "no-overlap-p2p-communication",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "apply_rope_fusion": "no-rope-fusion",
    "bias_swiglu_fusion": "no-bias-swiglu-fusion",
}
"""Flags that turn a default off."""

_READ_ELSEWHERE: Final = frozenset(
    {
        *("tp_comm_overlap", "attention_backend", "bucket_size", "moe_expert_capacity_factor"),
        *("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"),
    }
)
"""Priced as they are set (tuner/engines/megatron_lm/read.py)."""

_ROWS: Final = tuple(row for row in MEGATRON if row.name not in _READ_ELSEWHERE)


def _flag_of(row: PricedSetting) -> str:
    return _FLAG.get(row.name, row.name.replace("_", "-"))


MATERIAL: Final[Mapping[str, tuple[Effect, str]]] = {
    "fp32-residual-connection": ("memory", "residuals are twice as large"),
    "distribute-saved-activations": ("memory", "tensor ranks share what is saved"),
    "hierarchical-context-parallel-sizes": ("time", "context parallelism has two levels"),
    "rampup-batch-size": ("time", "the batch is smaller until it is reached"),
    "moe-paged-stash": ("memory", "saved tensors of experts are kept in pages"),
    # Of the dev branch (core_dev_r0.16.0 and later).
    "offload-optimizer-states": ("memory and time", "moments leave the device between updates"),
    "chunked-optimizer-state-offload": ("memory and time", "moments leave between updates"),
    "hybrid-context-parallel": ("memory and time", "its degree changes with a sample's length"),
    # Of Primus.
    "patch-zero-bubble": ("memory and time", "the pipeline has another schedule"),
    "patch-primus-pipeline": ("memory and time", "the pipeline has another schedule"),
    "decoder-pipeline-manual-split-list": ("memory and time", "stages have other layers"),
    "recompute-layer-ids": ("memory and time", "priced is that all layers are recomputed"),
    "use-fsdp2-fp32-param-optimizer": ("memory", "parameters are stored in fp32"),
    "use-fsdp2-bf16-master-weight-optimizer": ("memory", "master weights are bf16"),
}
"""Flags that change bytes or seconds by factors: what does not hold with them, and why."""

FLAGS: Final = frozenset(
    {
        *MATERIAL,
        "optimizer",
        "moe-aux-loss-coeff",
        "moe-router-load-balancing-type",
        "moe-router-force-load-balancing",
        "moe-router-enable-expert-bias",
        *(OFF.get(row.name, _flag_of(row)) for row in _ROWS),
    }
)
SWITCHES: Final = frozenset(
    {
        *("fp32-residual-connection", "distribute-saved-activations", "moe-paged-stash"),
        *("offload-optimizer-states", "chunked-optimizer-state-offload"),
        "hybrid-context-parallel",
        "moe-router-force-load-balancing",
        "moe-router-enable-expert-bias",
        *OFF.values(),
        *(_flag_of(row) for row in _ROWS if isinstance(row.default, bool) and not row.default),
    }
)


def unpriced_settings(flags: Flags) -> Iterator[UnpricedSetting]:
    """Yield what a launch sets and no price knows."""
    for name, (changes, how) in MATERIAL.items():
        words = " ".join(flags.values.get(name, ("false",))).casefold()
        if words not in ("false", "0", "null", "none"):
            yield UnpricedSetting(said=flags.said(name), changes=changes, how=how)
    optimizer = flags.word("optimizer") or "adam"
    if is_orthogonal(optimizer):
        how = (
            "updates are made orthogonal by GEMMs, and the second moment of embedding and output"
            " is not counted"
        )
        yield UnpricedSetting(said=flags.said("optimizer"), changes="memory and time", how=how)
    elif optimizer not in NUM_MOMENTS:
        how = "priced are Adam's two moments"
        yield UnpricedSetting(said=flags.said("optimizer"), changes="memory", how=how)


def balance(flags: Flags) -> str:
    """Return what of a launch spreads tokens evenly over experts; empty where nothing does.

    Raises:
        SpecError: a coefficient is no number.
    """
    if flags.is_on("moe-router-force-load-balancing"):
        return "--moe-router-force-load-balancing"
    if flags.is_on("moe-router-enable-expert-bias"):
        return "--moe-router-enable-expert-bias"
    words = flags.words("moe-aux-loss-coeff")
    if any(_number(flags, word) > 0.0 for word in words) and flags.words(
        "moe-router-load-balancing-type"
    ) != ("none",):
        return flags.said("moe-aux-loss-coeff")
    if "sinkhorn" in flags.words("moe-router-load-balancing-type"):
        return flags.said("moe-router-load-balancing-type")
    return ""


def _number(flags: Flags, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise SpecError(
            f"{flags.source}: --moe-aux-loss-coeff {shown_value(word)} is not a number"
        ) from None


def differing_settings(flags: Flags, *, has_recipe: bool) -> Iterator[tuple[str, str]]:
    """Yield the rows that a launch sets to another value than the priced one: name and flag.

    Raises:
        SpecError: a switch has a value.
    """
    for row in _ROWS:
        flag = _flag_of(row)
        off = OFF.get(row.name)
        if off is not None:
            if flags.is_on(off):
                yield row.name, f"--{off}"
        elif isinstance(row.priced, bool):
            is_absent = flag not in flags.values
            if not (is_absent and has_recipe) and flags.is_on(flag) != row.priced:
                yield row.name, f"no --{flag}" if row.priced else f"--{flag}"
        elif flag in flags.values and _shortened(flags.words(flag)) != (str(row.priced),):
            yield row.name, flags.said(flag)


def _shortened(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return values with the table's names; the parser writes `fp32` for `float32`."""
    return tuple(word.replace("fp32", "float32") for word in words)
