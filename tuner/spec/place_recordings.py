"""Consistency checks of a placement's recordings, with each other and with the model."""

from collections.abc import Mapping

from profilers.routing.recording import Recording
from profilers.steps.config import LayerKind
from tuner.errors import SpecError
from tuner.spec.model import ModelSpec
from tuner.spec.place import PlaceGoal


def check_recordings(
    recordings: Mapping[str, Recording], *, model: ModelSpec | None, source: str
) -> int | None:
    """Refuse recordings of different models; return the number of decoder layers.

    Dense layers count. The number is the model's, or that of a recording whose source has a row for
    each layer. Without either, layers recorded from the first on without a gap are taken as all;
    None where it is not known.
    """
    stated: dict[str, tuple[str, object]] = {}
    if model is not None and model.moe is not None:
        stated["experts a token"] = (model.name, model.moe.top_k)
        stated["decoder layers"] = (model.name, model.num_layers)
    first_name, first_recording = next(iter(recordings.items()))
    for name, recording in recordings.items():
        facts = {
            "experts": recording.num_experts,
            "experts a token": recording.top_k,
            "decoder layers": recording.num_decoder_layers,
        }
        for what, value in facts.items():
            whose, first = stated.setdefault(what, (repr(name), value)) if value else ("", None)
            if value != first:
                raise SpecError(
                    f"{source}: goal.workloads: {name!r} has {value} {what}, {whose} has {first};"
                    " workloads of one plan must be of one model"
                )
        single = sorted(set(recording.layer_ids) ^ set(first_recording.layer_ids))
        if single:
            raise SpecError(
                f"{source}: goal.workloads: {name!r} has layers"
                f" {_shown_layers(recording.layer_ids)}, {first_name!r} has"
                f" {_shown_layers(first_recording.layer_ids)}; layer {single[0]} is in one of them"
                " only; record the same layers"
            )
    if model is not None:
        return model.num_layers
    layer_ids = next(iter(recordings.values())).layer_ids
    known = (recording.num_decoder_layers for recording in recordings.values())
    all_recorded = len(layer_ids) if layer_ids == tuple(range(len(layer_ids))) else None
    return next(filter(None, known), all_recorded)


def check_model(model: ModelSpec, *, experts: int, layers: tuple[int, ...], source: str) -> None:
    """Refuse layers and experts that the model does not have."""
    if model.moe is None:
        raise SpecError(f"{source}: model: {model.name} has no experts to place")
    if model.moe.num_experts != experts:
        raise SpecError(
            f"{source}: model: {model.name} has {model.moe.num_experts} experts a layer, the"
            f" recordings have {experts}; name the model that was recorded"
        )
    if layers[-1] >= model.num_layers:
        raise SpecError(
            f"{source}: model: {model.name} has {model.num_layers} layers, layer {layers[-1]} was"
            " recorded; name the model that was recorded"
        )
    dense = [layer for layer in layers if model.layers[layer] is LayerKind.DENSE]
    if dense:
        moe = [number for number, kind in enumerate(model.layers) if kind is not LayerKind.DENSE]
        raise SpecError(
            f"{source}: model: layer {dense[0]} was recorded, which has no experts in {model.name}"
            f" (layers {_shown_layers(tuple(moe))} have); where the recording counts MoE layers"
            " from 0, import it with --layer-ids"
        )


def check_passes(
    goal: PlaceGoal, recordings: Mapping[str, Recording], *, is_priced: bool, source: str
) -> None:
    """Refuse goals that need passes or tokens that were not recorded."""
    for name, recording in recordings.items():
        where = f"{source}: goal.workloads: {name!r}"
        if goal.tokens_per_pass is not None and recording.top_k is None and not is_priced:
            raise SpecError(
                f"{where} does not say how many experts a token has, which goal.tokens_per_pass"
                " needs; name `model` and `cluster`, or leave it out"
            )
        if is_priced and recording.num_passes == 1 and goal.tokens_per_pass is None:
            raise SpecError(
                f"{where} has the totals of a recording and no passes; say how many tokens a"
                " pass has in goal.tokens_per_pass"
            )
        if is_priced and goal.is_merged and recording.token_LTK is None:
            raise SpecError(
                f"{where} has no sampled tokens, from which exchange: merged is priced; take a"
                " recording of tokens (SGLang's per_token, Megatron's trace), or exchange: plain"
            )


def _shown_layers(layers: tuple[int, ...]) -> str:
    if len(layers) <= 6:
        return ", ".join(map(str, layers))
    return f"{layers[0]}..{layers[-1]} ({len(layers)} of them)"
