"""Options that several commands share: durations, and the flags that describe a simple spec.

Every flag sets the field of the same name (tuner/draft/draft.py).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

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
    from tuner.engines.capabilities import TARGETS
    from tuner.engines.place_capabilities import PLACE_TARGETS
    from tuner.engines.serve_writers import SERVE_EMITTERS

    before, comma, last = incomplete.rpartition(",")
    names = dict.fromkeys((*TARGETS, *SERVE_EMITTERS, *PLACE_TARGETS))
    return (f"{before}{comma}{name}" for name in names if name.startswith(last))


def _flag(help_text: str, **extra: Any) -> Any:
    return typer.Option(help=help_text, show_default=False, rich_help_panel=None, **extra)


VerboseFlag = Annotated[bool, typer.Option("--verbose", "-v", help="Print all notes.")]
GoalFlag = Annotated[str | None, _flag("Without SPEC: train, serve or place. Default: train.")]
ModelFlag = Annotated[str | None, _flag("Without SPEC: config.json of the model, or its folder.")]
DeviceFlag = Annotated[
    str | None, _flag("Without SPEC: the device, e.g. h100-sxm.", autocompletion=_device_names)
]
DevicesFlag = Annotated[str | None, _flag("Without SPEC: how many devices.")]
SequenceFlag = Annotated[str | None, _flag("train: sequence length in tokens. Default: 4096.")]
BatchFlag = Annotated[str | None, _flag("train: global batch size in sequences. Default: 256.")]
PrecisionFlag = Annotated[str | None, _flag("train: bf16, fp8-blockwise, ... Default: bf16.")]
EngineFlag = Annotated[
    str | None,
    _flag(
        "serve: sglang, vllm or trtllm, optionally with its release, e.g. vllm@0.33.0. Default: "
        "the one that --emit names, else sglang."
    ),
]
ConcurrencyFlag = Annotated[str | None, _flag("serve: concurrent requests (closed loop).")]
RateFlag = Annotated[str | None, _flag("serve: request rate, e.g. 10/s (open loop).")]
InputFlag = Annotated[str | None, _flag("serve: input tokens per request. Default: 4000.")]
OutputFlag = Annotated[str | None, _flag("serve: output tokens per request. Default: 1000.")]
TtftFlag = Annotated[str | None, _flag("serve: SLO on P90 TTFT. Default: 2s.")]
TpotFlag = Annotated[str | None, _flag("serve: SLO on P90 TPOT. Default: 50ms.")]
QuantizationFlag = Annotated[
    str | None,
    _flag("serve: bf16, fp8, fp8_block, nvfp4, mxfp4. Default: as the model was released."),
]
ObjectiveFlag = Annotated[
    str | None,
    _flag("serve: goodput, cost, devices, rate; place: balance, co_activation, layer_chain."),
]
WorkloadFlag = Annotated[
    str | None, _flag("place: routing recordings, NAME=PATH, comma-separated.")
]
RanksFlag = Annotated[str | None, _flag("place: expert-parallel ranks.")]
RanksPerNodeFlag = Annotated[
    str | None, _flag("place: expert-parallel ranks per node. Default: all.")
]
RedundantFlag = Annotated[str | None, _flag("place: redundant experts per layer.")]
EmitFlag = Annotated[
    str | None,
    _flag(
        "Without SPEC: launch targets, comma-separated. Default: megatron-lm, local, eplb.",
        autocompletion=_target_names,
    ),
]


def given_flags(params: Mapping[str, Any]) -> dict[str, str]:
    """Return the spec flags that were given, by the keys of their fields.

    Args:
        params: of the command, by the names of its parameters.
    """
    return {name.replace("_", "-"): params[name] for name in SPEC_FLAGS if params[name] is not None}


SPEC_FLAGS: Final = (
    "model",
    "device",
    "devices",
    "sequence_length",
    "batch",
    "precision",
    "engine",
    "concurrency",
    "rate",
    "input_tokens",
    "output_tokens",
    "ttft",
    "tpot",
    "quantization",
    "objective",
    "workload",
    "ranks",
    "ranks_per_node",
    "redundant_experts",
    "emit",
)
"""Names of the parameters; `goal` says which of them apply."""
