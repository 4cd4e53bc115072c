"""Models that a release runs, and the degrees that it runs some of them without.

A model is named by its class in `config.json` (`architectures`). Which classes moetune reads is in
tuner/spec/huggingface/architectures.py; a release that lacks one refuses it in a line.

Not covered: classes that run on another name's weights, and adapters (`trust_remote_code`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from tuner.config.serve import Instances
from tuner.devices.datasheet import Generation
from tuner.spec.huggingface.architectures import ARCHITECTURES

SPARSE: Final = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
"""Models with an indexer."""
COMPRESSED: Final = frozenset({"DeepseekV4ForCausalLM"})
"""Models with compressors beside windows."""
CHUNKED: Final = frozenset({"Llama4ForCausalLM", "Llama4ForConditionalGeneration"})
ZERO_EXPERTS: Final = frozenset({"LongcatFlashForCausalLM"})
"""Models with experts that return their input."""
HYBRID: Final = frozenset(
    {
        "KimiLinearForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
"""Models with linear attention."""
EVERY: Final = frozenset(ARCHITECTURES)
"""All models that moetune reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """Models of a release."""

    architectures: frozenset[str] = EVERY
    only_one: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Models that run only with degree 1, by degree (attention_dp, ep, pp)."""
    only_on: Mapping[str, frozenset[Generation]] = field(default_factory=dict)
    """NVIDIA devices that a model runs on, where not on all, by model."""
    source: str = ""
    """Source of what the release lacks."""


def model_refusals(
    served: ServedModels,
    group: Instances,
    *,
    architecture: str,
    generation: Generation | None = None,
) -> Iterator[str]:
    """Yield why the release does not run a model with such degrees, on such a device if known."""
    why = f" ({served.source})" if served.source else ""
    if architecture not in served.architectures:
        known = ", ".join(sorted(served.architectures & _family(architecture)))
        instead = f"; it runs {known}" if known else ""
        yield f"the release does not run {architecture}{instead}{why}"
        return
    able = served.only_on.get(architecture)
    if able is not None and generation is not None and generation not in able:
        yield f"the release runs {architecture} on {', '.join(sorted(able))} only{why}"
    for degree, models in served.only_one.items():
        value = getattr(group, degree)
        if value > 1 and architecture in models:
            yield f"{degree} {value}: the release runs {architecture} with {degree} 1 only{why}"


def _family(architecture: str) -> frozenset[str]:
    """Return the models of the same kind."""
    kinds = (SPARSE, COMPRESSED, CHUNKED, ZERO_EXPERTS, HYBRID)
    return next((kind for kind in kinds if architecture in kind), frozenset())
