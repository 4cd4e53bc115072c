"""Consistency checks of a placement's recordings, with each other and with the model."""

from collections.abc import Mapping

import numpy as np

from profilers.routing.recording import Recording
from profilers.steps.config import LayerKind
from tuner.errors import SpecError
from tuner.spec.model import ModelSpec
from tuner.spec.place import PlaceGoal


def common_shape(recordings: Mapping[str, Recording], source: str) -> tuple[tuple[int, ...], int]:
    """Return the layers and experts of all recordings; each workload must have the same."""
    first_name, first = next(iter(recordings.items()))
    for name, recording in recordings.items():
        where = f"{source}: goal.workloads: {name!r}"
        if recording.num_experts != first.num_experts:
            raise SpecError(
                f"{where} has {recording.num_experts} experts, {first_name!r} has"
                f" {first.num_experts}; workloads of one plan must be of one model"
            )
        if recording.layer_ids != first.layer_ids:
            raise SpecError(
                f"{where} has layers {_shown_layers(recording.layer_ids)}, {first_name!r} has"
                f" {_shown_layers(first.layer_ids)}; record the same layers"
            )
        empty = np.flatnonzero(recording.count_LE.sum(axis=1) == 0)
        if len(empty):
            raise SpecError(
                f"{where}: layer {recording.layer_ids[empty[0]]} has no tokens; record it or"
                " leave it out"
            )
    return first.layer_ids, first.num_experts


def decoder_layers(
    model: ModelSpec | None, recordings: Mapping[str, Recording], source: str
) -> int | None:
    """Return the number of decoder layers, dense ones included; None if not known.

    From the model, or a recording whose source has a row for each layer. Without either, layers
    recorded from the first on without a gap are assumed to be all.
    """
    stated = {
        name: one.num_decoder_layers
        for name, one in recordings.items()
        if one.num_decoder_layers is not None
    }
    if model is not None:
        stated = {model.name: model.num_layers} | stated
    if stated:
        first_name, first = next(iter(stated.items()))
        for name, layers in stated.items():
            if layers != first:
                raise SpecError(
                    f"{source}: goal.workloads: {name!r} is of a model of {layers} decoder layers,"
                    f" {first_name!r} of {first}; record one model"
                )
        return first
    layer_ids = next(iter(recordings.values())).layer_ids
    return len(layer_ids) if layer_ids == tuple(range(len(layer_ids))) else None


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


def check_top_k(model: ModelSpec | None, recordings: Mapping[str, Recording], source: str) -> None:
    """Refuse recordings whose top-k differs from the model's or from other recordings'."""
    whose, chosen, rule = "", None, "record this model"
    if model is not None and model.moe is not None:
        whose, chosen = model.name, model.moe.top_k
    for name, recording in recordings.items():
        if recording.top_k is None:
            continue
        if chosen is None:
            whose, chosen = repr(name), recording.top_k
            rule = "workloads of one plan must be of one model"
        if recording.top_k != chosen:
            raise SpecError(
                f"{source}: goal.workloads: {name!r} has {recording.top_k} experts a token,"
                f" {whose} has {chosen}; {rule}"
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
