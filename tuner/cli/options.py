"""Options that several commands share: durations, and the flags that describe a simple spec.

Every flag sets the field of the same name (tuner/draft/draft.py).
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from tuner.errors import TunerError
from tuner.paths import plan_folder
from tuner.units import parse_seconds


def _folder_of(plan: Path) -> Path:
    return plan_folder(plan)


PlanArgument = Annotated[
    Path,
    typer.Argument(
        help="Folder of a plan, or its plan.json.", show_default=False, callback=_folder_of
    ),
]
"""Every PLAN of the command line."""


def seconds(text: str, *, option: str) -> float:
    """Read a positive duration.

    Raises:
        TunerError: it is none; the message names the option.
    """
    try:
        duration_s = parse_seconds(text)
    except ValueError as error:
        raise TunerError(f"{option}: {error}") from error
    if duration_s <= 0.0:
        raise TunerError(f"{option}: {text!r} must be more than nothing, e.g. 60s")
    return duration_s


def _device_names(incomplete: str) -> Iterator[str]:
    from tuner.devices.catalogue import DEVICES

    return (name for name in DEVICES if name.startswith(incomplete))


def _target_names(incomplete: str) -> Iterator[str]:
    """Complete the last name of a list with commas."""
    from tuner.catalog.serve_rules.autoscalers import AUTOSCALERS
    from tuner.engines.placement.targets import PLACE_TARGETS
    from tuner.engines.serve_writers import SERVE_EMITTERS
    from tuner.engines.targets import TARGETS

    before, comma, last = incomplete.rpartition(",")
    names = dict.fromkeys((*TARGETS, *SERVE_EMITTERS, *AUTOSCALERS, *PLACE_TARGETS))
    return (f"{before}{comma}{name}" for name in names if name.startswith(last))


def _flag(help_text: str, **extra: Any) -> Any:
    return typer.Option(help=help_text, show_default=False, rich_help_panel=None, **extra)


VerboseFlag = Annotated[bool, typer.Option("--verbose", "-v", help="Print all notes.")]
ProfilesOption = Annotated[
    list[Path] | None,
    typer.Option("--profile", help="Same as for plan; a training plan keeps its own copies."),
]
WhatIfTimeOption = Annotated[
    str, typer.Option("--time-limit", help="For all what-if searches together, with its unit.")
]
UncalibratedFlag = Annotated[bool, typer.Option("--uncalibrated", help="Same as for plan.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecFlags:
    """Flags that describe a simple spec, by the keys of its fields."""

    goal: Annotated[str | None, _flag("Without SPEC: train, serve or place. Default: train.")] = (
        None
    )
    model: Annotated[
        str | None, _flag("Without SPEC: config.json of the model, or its folder.")
    ] = None
    device: Annotated[
        str | None, _flag("Without SPEC: the device, e.g. h100-sxm.", autocompletion=_device_names)
    ] = None
    devices: Annotated[str | None, _flag("Without SPEC: how many devices.")] = None
    sequence_length: Annotated[
        str | None, _flag("train: sequence length in tokens. Default: 4096.")
    ] = None
    batch: Annotated[str | None, _flag("train: global batch size in sequences. Default: 256.")] = (
        None
    )
    precision: Annotated[str | None, _flag("train: bf16, fp8-blockwise, ... Default: bf16.")] = None
    engine: Annotated[
        str | None,
        _flag(
            "serve: sglang, vllm or trtllm, optionally with its release, e.g. vllm@0.33.0. "
            "Default: the one that --emit names, else sglang."
        ),
    ] = None
    concurrency: Annotated[str | None, _flag("serve: concurrent requests (closed loop).")] = None
    rate: Annotated[str | None, _flag("serve: request rate, e.g. 10/s (open loop).")] = None
    input_tokens: Annotated[
        str | None, _flag("serve: input tokens per request. Default: 4000.")
    ] = None
    output_tokens: Annotated[
        str | None, _flag("serve: output tokens per request. Default: 1000.")
    ] = None
    ttft: Annotated[str | None, _flag("serve: SLO on P90 TTFT. Default: 2s.")] = None
    tpot: Annotated[str | None, _flag("serve: SLO on P90 TPOT. Default: 50ms.")] = None
    quantization: Annotated[
        str | None,
        _flag(
            "serve: bf16, fp8, fp8_block, nvfp4, mxfp4, fp8_block_mxfp4, int4."
            " Default: as the model was released."
        ),
    ] = None
    objective: Annotated[
        str | None,
        _flag("serve: goodput, cost, devices, rate; place: balance, co_activation, layer_chain."),
    ] = None
    workload: Annotated[
        str | None, _flag("place: routing recordings, NAME=PATH, comma-separated.")
    ] = None
    ranks: Annotated[str | None, _flag("place: expert-parallel ranks.")] = None
    ranks_per_node: Annotated[
        str | None, _flag("place: expert-parallel ranks per node. Default: all.")
    ] = None
    redundant_experts: Annotated[str | None, _flag("place: redundant experts per layer.")] = None
    emit: Annotated[
        str | None,
        _flag(
            "Without SPEC: launch targets, comma-separated. Default: megatron-lm, local, eplb.",
            autocompletion=_target_names,
        ),
    ] = None

    def given(self) -> dict[str, str]:
        """Return those of the goal's fields that were given, by their keys."""
        values = asdict(self)
        del values["goal"]
        return {name.replace("_", "-"): text for name, text in values.items() if text is not None}


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with an option for every field of the dataclasses that it takes.

    Args:
        command: all of its parameters are keywords.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Callable[..., Any]] = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)
    }
    fields_of = {name: inspect.signature(group).parameters for name, group in groups.items()}

    @functools.wraps(command)
    def collect(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field: values.pop(field) for field in fields_of[name]})
        command(**values)

    options = chain(
        *(fields_of.get(name, {name: parameter}).values() for name, parameter in parameters.items())
    )
    collect.__signature__ = inspect.Signature([*options])  # type: ignore[attr-defined]  # typer's
    return collect
