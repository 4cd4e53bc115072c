"""Megatron-LM's `--hybrid-layer-pattern`: layers as letters, e.g. `MEM*E|MEMEM/*E`.

`M` is a Mamba-2 layer, `G` one with the gated delta rule, `*` attention, `-` a dense network, `E`
experts; `|` ends a pipeline stage, and each `/` begins a multi-token-prediction layer. A layer that
is a mixer and a network is two letters. Stage s runs on pipeline rank s % PP; without `|` the
engine cuts the letters into equal stages.
Grammar: megatron/core/models/hybrid/hybrid_layer_allocation.py of core_v0.19.0.

Not covered: latent and sparse attention (`+`, `D`), which no model here has beside such layers.
"""

from dataclasses import dataclass
from typing import Final

from profilers.steps.config import LayerKind
from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.linear_attention import LinearName
from tuner.spec.model import MOST_LAYERS, Mixer, ModelSpec

STAGE_END: Final = "|"
MTP: Final = "/"
ATTENTION: Final = "*"
_LINEAR: Final = {LinearName.MAMBA2: "M", LinearName.GATED_DELTA: "G"}
_NETWORK: Final = {LayerKind.DENSE: "-", LayerKind.MOE: "E", LayerKind.NONE: ""}
_MEANINGS: Final = {
    "M": "Mamba-2",
    "G": "gated delta rule",
    ATTENTION: "attention",
    "-": "dense network",
    "E": "experts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridPattern:
    """Letters of a launch."""

    stages: tuple[str, ...]
    """Letters of every stage in execution order; one entry where the engine cuts the stages."""
    mtp: tuple[str, ...] = ()
    """Letters of every multi-token-prediction layer."""

    @property
    def letters(self) -> str:
        """All layers but those of multi-token prediction."""
        return "".join(self.stages)


def hybrid_pattern(text: str, *, said: str) -> HybridPattern:
    """Read a pattern.

    Raises:
        SpecError: an unknown letter, no layer, or more layers than any model has.
    """
    main, *mtp = text.split(MTP)
    for letter in text:
        if letter not in _MEANINGS and letter not in (STAGE_END, MTP):
            raise SpecError(
                f"{said} {shown_value(text)}: {letter!r} is no layer; the letters are "
                + ", ".join(f"{name} ({what})" for name, what in _MEANINGS.items())
            )
    pattern = HybridPattern(stages=tuple(main.split(STAGE_END)), mtp=tuple(filter(None, mtp)))
    if not pattern.letters or len(pattern.letters) > MOST_LAYERS:
        raise SpecError(f"{said} {shown_value(text)}: must hold 1 to {MOST_LAYERS} layers")
    if any(STAGE_END in layer for layer in mtp):
        raise SpecError(f"{said} {shown_value(text)}: every {STAGE_END} must precede the first /")
    if len(set(pattern.mtp)) > 1:
        raise SpecError(f"{said} {shown_value(text)}: all patterns after / must be the same")
    return pattern


def layer_letters(model: ModelSpec) -> tuple[str, ...]:
    """Return the letters of every layer; `?` for linear attention that has none."""
    linear = _LINEAR.get(model.linear.kind, "?") if model.linear is not None else ""
    mixers = {Mixer.LINEAR: linear, Mixer.ATTENTION: ATTENTION, Mixer.NONE: ""}
    return tuple(
        mixers[mixer] + _NETWORK[kind]
        for mixer, kind in zip(model.mixer_by_layer, model.layers, strict=True)
    )


def mtp_letters(model: ModelSpec) -> str:
    """Return the letters of one multi-token-prediction layer: attention and the last network."""
    networks = [_NETWORK[kind] for kind in model.layers if kind is not LayerKind.NONE]
    return ATTENTION + (networks[-1] if networks else "")
