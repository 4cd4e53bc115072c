"""Compares what a launch states with the spec: sizes of the model, which weights are trained.

Vocabularies may differ by padding: engines round up to a multiple of their own, and published
configs are already padded. Up to one part in twenty that is a note; beyond it is another model.
The width of dense layers is compared only where the model has such layers.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from profilers.steps.config import LayerKind
from tuner.engines.reading.launch import LaunchSettings
from tuner.errors import SpecError
from tuner.spec.linear_attention import LinearName
from tuner.spec.model import Mixer, ModelSpec
from tuner.spec.spec import Spec
from tuner.spec.tune import FULL, Adapters, Tune, adapted, adapters_words

VOCABULARY_TOLERANCE_RATIO: Final = 0.05

Size = int | bool | tuple[int, ...]


def _of_linear(kind: LinearName, name: str) -> Callable[[ModelSpec], Size | None]:
    def size(model: ModelSpec) -> Size | None:
        linear = model.linear
        return getattr(linear, name) if linear is not None and linear.kind is kind else None

    return size


def _of_indexer(name: str) -> Callable[[ModelSpec], Size | None]:
    return lambda model: getattr(model.attention.indexer, name, None)


_MAMBA2, _DELTA = LinearName.MAMBA2, LinearName.GATED_DELTA
_SIZES: Final[Mapping[str, Callable[[ModelSpec], Size | None]]] = {
    "num_layers": lambda model: model.num_layers,
    "hidden_size": lambda model: model.hidden_size,
    "num_heads": lambda model: model.attention.num_heads,
    "num_kv_heads": lambda model: model.attention.num_kv_heads,
    "head_dim": lambda model: None if model.attention.kind == "mla" else model.attention.head_dim,
    "is_mla": lambda model: model.attention.kind == "mla",
    "q_lora_rank": lambda model: model.attention.q_lora_rank,
    "kv_lora_rank": lambda model: model.attention.kv_lora_rank,
    "qk_nope_head_dim": lambda model: model.attention.qk_nope_head_dim,
    "qk_rope_head_dim": lambda model: model.attention.qk_rope_head_dim,
    "v_head_dim": lambda model: model.attention.v_head_dim,
    "dense_ffn_size": lambda model: (
        model.dense_ffn_size if LayerKind.DENSE in model.layers else None
    ),
    "ffn_is_gated": lambda model: model.ffn_is_gated,
    "is_untied": lambda model: not model.tie_word_embeddings,
    "num_experts": lambda model: model.moe.num_experts if model.moe else 0,
    "top_k": lambda model: model.moe.top_k if model.moe else None,
    "expert_ffn_size": lambda model: model.moe.expert_ffn_size if model.moe else None,
    "shared_ffn_size": lambda model: model.moe.shared_ffn_size if model.moe else None,
    "moe_layers": lambda model: tuple(int(kind is LayerKind.MOE) for kind in model.layers),
    "latent_size": lambda model: model.moe.latent_size if model.moe else None,
    "linear_layers": lambda model: tuple(
        int(mixer is Mixer.LINEAR) for mixer in model.mixer_by_layer
    ),
    "has_output_gate": lambda model: model.attention.has_output_gate,
    "is_sparse": lambda model: model.attention.indexer is not None,
    "mamba_heads": _of_linear(_MAMBA2, "num_value_heads"),
    "mamba_groups": _of_linear(_MAMBA2, "num_key_heads"),
    "mamba_head_dim": _of_linear(_MAMBA2, "value_head_dim"),
    "mamba_state_dim": _of_linear(_MAMBA2, "key_head_dim"),
    "delta_key_heads": _of_linear(_DELTA, "num_key_heads"),
    "delta_value_heads": _of_linear(_DELTA, "num_value_heads"),
    "delta_key_head_dim": _of_linear(_DELTA, "key_head_dim"),
    "delta_value_head_dim": _of_linear(_DELTA, "value_head_dim"),
    "indexer_heads": _of_indexer("num_heads"),
    "indexer_head_dim": _of_indexer("head_dim"),
    "indexer_top_k": _of_indexer("top_k"),
}
"""Functions that return the model's value of a size; None where it has no such size."""


def check_stated_model(launch: LaunchSettings, model: ModelSpec) -> tuple[str, ...]:
    """Return notes on sizes that differ and may.

    Raises:
        SpecError: the launch trains another model than the spec names.
    """
    notes = tuple(_vocabulary_notes(launch, model))
    for stated in launch.stated:
        compare = _SIZES.get(stated.size)
        expected = compare(model) if compare else None
        if expected is None or expected == stated.value:
            continue
        raise SpecError(
            f"{launch.source}: {stated.said}, but {model.name} of the spec has "
            f"{stated.size} {_shown(expected)}; name the model that is launched"
        )
    return notes


def with_stated_tune(launch: LaunchSettings, spec: Spec) -> tuple[Spec, tuple[str, ...]]:
    """Return the spec with what the launch trains, and a note where the spec says otherwise.

    A launch that does not say trains the spec's.

    Raises:
        SpecError: the model lacks what has an adapter.
    """
    tune = launch.tune
    if tune is None:
        return spec, ()
    try:
        matrices = adapted(tune, spec.model) if isinstance(tune, Adapters) else ()
    except ValueError as error:
        raise SpecError(f"{launch.source}: {error}") from None
    stated = spec.goal.tune
    notes: tuple[str, ...] = ()
    if "tune" in spec.goal.model_fields_set and (
        _rank(tune) != _rank(stated)
        or (isinstance(stated, Adapters) and set(matrices) != set(adapted(stated, spec.model)))
    ):
        notes = (f"goal.tune says {_tune_words(stated)}; the launch's {_tune_words(tune)} count",)
    goal = spec.goal.model_copy(update={"tune": tune})
    return spec.model_copy(update={"goal": goal}), notes


def _rank(tune: Tune) -> int:
    return tune.rank if isinstance(tune, Adapters) else 0


def _tune_words(tune: Tune) -> str:
    return "all weights" if tune == FULL or not isinstance(tune, Adapters) else adapters_words(tune)


def _vocabulary_notes(launch: LaunchSettings, model: ModelSpec) -> Iterator[str]:
    for stated in launch.stated:
        if stated.size != "vocab_size" or not isinstance(stated.value, int):
            continue
        difference = abs(stated.value - model.vocab_size)
        if difference > VOCABULARY_TOLERANCE_RATIO * model.vocab_size:
            raise SpecError(
                f"{launch.source}: {stated.said}, but {model.name} of the spec has vocab_size "
                f"{model.vocab_size}; name the model that is launched"
            )
        if difference:
            yield f"{stated.said}: priced with the model's vocabulary of {model.vocab_size}"


def _shown(value: Size) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, tuple):
        return str(value)
    dense = value.index(1) if 1 in value else len(value)
    if set(value[dense:]) <= {1}:
        return f"([0]*{dense}+[1]*{len(value) - dense})"
    return f"{sum(value)} of {len(value)}"
