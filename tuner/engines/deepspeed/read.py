"""DeepSpeed's JSON as `LaunchSettings`.

Names and defaults of https://www.deepspeed.ai/docs/config-json/ (release 0.18). What the training
script decides and the JSON does not say is taken from its command, from the spec (sequence,
devices), or stated in the notes: whether checkpointing is on (taken as on where
`activation_checkpointing` is configured, or a pipeline has an `activation_checkpoint_interval`).
`"auto"` is filled in by the Hugging Face trainer (transformers 5.24.0,
integrations/deepspeed.py, `trainer_config_process`) from the command's arguments. Without a command
precision is the goal's, and batch sizes need numbers.

Not covered: what DeepSpeed's own pipeline module holds, which the script builds; its stages are
taken to be equal.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from profilers.steps.config import Recompute
from tuner.engines.reading.launch import LaunchSettings, TokenDispatcher, TrainingEngine
from tuner.engines.reading.sections import Sections
from tuner.errors import SpecError
from tuner.spec.files import one_line, shown_value

SPELLED: Final[Mapping[str, str]] = {
    "tensor": "tensor_parallel.autotp_size",
    "expert": "expert_parallel.autoep_size",
    "expert_tensor": "expert_parallel.expert_tensor_parallel_size",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "global_batch": "train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "zero_stage": "zero_optimization.stage",
    "recompute": "activation_checkpointing",
    "overlap_grad_reduce": "zero_optimization.overlap_comm",
    "context": "sequence_parallel_size",
    "pipeline": "pipeline.stages",
    "shard_ranks": "zero_optimization.mics_shard_size",
}
_MARKS: Final = frozenset(
    {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16"}
)
AUTO: Final = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramArguments:
    """Settings in the command of a training program beside its JSON; None: not stated there."""

    is_trainer: bool = False
    """The program is Transformers' Trainer, which fills in `"auto"` and says what is recomputed."""
    micro_batch: int | None = None
    accumulation: int | None = None
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    recompute: bool | None = None
    expert: int | None = None
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Fields of `LaunchSettings` that the command spells."""


def read(text: str, *, source: str, arguments: ProgramArguments | None = None) -> LaunchSettings:
    """Read a JSON file, beside the arguments of the program that reads it.

    Raises:
        SpecError: not JSON, or settings that DeepSpeed refuses.
    """
    beside = arguments or ProgramArguments()
    try:
        raw = json.loads(text)
    except RecursionError as error:
        raise SpecError(f"{source}: nested too deeply") from error
    except ValueError as error:
        raise SpecError(one_line(f"{source}: not valid JSON: {error}")) from error
    if not isinstance(raw, dict):
        raise SpecError(f"{source}: {shown_value(raw)} at the top, where an object belongs")
    if not _MARKS & set(raw):
        raise SpecError(f"{source}: neither a batch size nor zero_optimization: not DeepSpeed's")
    batch, numbers_said = _batch_sizes(raw, beside, source=source)
    given = Sections(batch, source=source)
    _refuse_unpriced(given)
    tensor = given.number(SPELLED["tensor"], default=1, least=0) or 1
    stage = _stage(given)
    interval = given.number("pipeline.activation_checkpoint_interval", default=0, least=0)
    is_configured = given.value(SPELLED["recompute"]) is not None or interval > 0
    has_checkpointing = is_configured if beside.recompute is None else beside.recompute
    # AutoEP ignores its settings unless it is enabled.
    is_expert = given.is_on("expert_parallel.enabled")
    expert = beside.expert or 1
    if is_expert:
        expert = given.number(SPELLED["expert"], default=1)
    shard = given.number(SPELLED["shard_ranks"], default=-1, least=-1)
    is_legacy = given.value("zero_optimization.cpu_offload") is not None
    settings = {
        "tensor": tensor,
        "context": given.number(SPELLED["context"], default=1),
        "pipeline": given.number(SPELLED["pipeline"], default=1),
        "dispatcher": TokenDispatcher.DEEPEP
        if given.word("expert_parallel.comm_backend", default="comm") == "deepep"
        else TokenDispatcher.ALLTOALL,
        "expert": expert,
        "expert_tensor": given.number(SPELLED["expert_tensor"], default=1)
        if expert > 1
        else tensor,
        "shard_ranks": shard if shard > 0 else None,
        **_batch(given),
        **_precision(given, beside),
        "zero_stage": stage,
        "recompute": Recompute.FULL if has_checkpointing else Recompute.NONE,
        "overlap_grad_reduce": given.is_on(SPELLED["overlap_grad_reduce"], default=stage == 3),
        "overlap_param_gather": stage == 3,
        "optimizer_offload_ratio": _offload(given, stage),
        "parameter_offload": stage == 3 and _offloads_parameters(given),
    }
    given.check_spelling()
    return LaunchSettings(
        engine=TrainingEngine.DEEPSPEED,
        source=source,
        **settings,
        spelled={**SPELLED, **beside.spelled},
        understood=tuple(
            setting for setting in given.read if setting.split(" = ")[0] not in numbers_said
        ),
        ignored=given.left,
        deprecated=("zero_optimization.cpu_offload: say zero_optimization.offload_optimizer",)
        if is_legacy
        else (),
        notes=tuple(_notes(given, beside, has_checkpointing=has_checkpointing)),
    )


_UNPRICED: Final[Mapping[str, str]] = {
    "bf16.bf16_master_weights_and_grads": "16-bit master weights are not priced, fp32 ones are",
    "fp16.fp16_master_weights_and_grads": "16-bit master weights are not priced, fp32 ones are",
    "torch_autocast.enabled": "parameters stay fp32, which is not priced; bf16.enabled is",
}
"""Settings that change the bytes of a parameter."""


def _refuse_unpriced(given: Sections) -> None:
    for name, why in _UNPRICED.items():
        if given.is_on(name):
            raise SpecError(f"{given.source}: {name}: {why}; leave it out")
    name = "zero_optimization.zero_hpz_partition_size"
    if given.number(name, default=1) > 1:
        raise SpecError(
            f"{given.source}: {name}: a second copy of the parameters in every group is not "
            "priced; leave it out"
        )


def _notes(given: Sections, beside: ProgramArguments, *, has_checkpointing: bool) -> Iterator[str]:
    if beside.recompute is None:
        yield (
            "activation_checkpointing is configured, so every layer is taken to be recomputed; "
            "the training script decides"
            if has_checkpointing
            else "no activation_checkpointing, so nothing is taken to be recomputed; the training "
            "script decides"
        )
    if _offloads_parameters(given) and given.number(SPELLED["zero_stage"], default=0) != 3:
        yield "offload_param has no effect: stage 3 alone has shards of parameters"


def _batch_sizes(
    raw: Mapping[str, Any], beside: ProgramArguments, *, source: str
) -> tuple[dict[str, Any], frozenset[str]]:
    """Fill in batch sizes that are `"auto"` or that a Trainer's arguments hold; name those.

    Raises:
        SpecError: a size differs from the Trainer's, which stops then, or nobody fills it in.
    """
    filled, added = dict(raw), set()
    for name in ("micro_batch", "accumulation", "global_batch"):
        key, said = SPELLED[name], getattr(beside, name, None)
        stated = filled.get(key)
        if stated == AUTO and not beside.is_trainer and not _has_two_numbers(raw):
            raise SpecError(
                f"{source}: {key} 'auto' is filled in by Transformers' Trainer: estimate its "
                "command with this file beside it, or write a whole number"
            )
        if stated == AUTO:
            del filled[key]
        elif stated is not None and said is not None and stated != said:
            raise SpecError(
                f"{source}: {key} {shown_value(stated)} is not {beside.spelled.get(name, name)} "
                f"{said} of the command; the Trainer stops there: write 'auto'"
            )
        if said is not None and key not in filled:
            filled[key] = said
            added.add(key)
    return filled, frozenset(added)


def _has_two_numbers(raw: Mapping[str, Any]) -> bool:
    """Return whether the third batch size follows from the other two and the devices."""
    names = ("micro_batch", "accumulation", "global_batch")
    return sum(isinstance(raw.get(SPELLED[name]), int) for name in names) >= 2


def _stage(given: Sections) -> Literal[0, 1, 2, 3]:
    if isinstance(given.value("zero_optimization"), bool):
        return 1 if given.value("zero_optimization") else 0
    stage = given.number(SPELLED["zero_stage"], default=0, least=0)
    for allowed in (0, 1, 2, 3):
        if stage == allowed:
            return allowed
    raise SpecError(f"{given.source}: {SPELLED['zero_stage']} {stage}: there are 0 to 3")


def _batch(given: Sections) -> dict[str, Any]:
    """Return the two of three numbers that DeepSpeed needs; the third follows from the devices."""
    names = ("global_batch", "micro_batch", "accumulation")
    numbers = {name: given.number(SPELLED[name], default=0) for name in names}
    if not numbers["global_batch"] and not numbers["micro_batch"]:
        raise SpecError(
            f"{given.source}: neither train_batch_size nor train_micro_batch_size_per_gpu; "
            "write one of them"
        )
    if not numbers["micro_batch"] and not numbers["accumulation"]:
        # DeepSpeed then divides the whole batch at once.
        numbers["accumulation"] = 1
    if not numbers["global_batch"] and not numbers["accumulation"]:
        numbers["accumulation"] = 1
    return {
        "global_batch": numbers["global_batch"] or None,
        "micro_batch": numbers["micro_batch"] or 1,
        "accumulation": numbers["accumulation"] or None,
        "micro_batch_follows": not numbers["micro_batch"],
    }


def _precision(given: Sections, beside: ProgramArguments) -> dict[str, Any]:
    """Find the GEMM precision; `auto` leaves it to the Trainer, or without one to the goal."""
    brain = _enabled(given, "bf16") or _enabled(given, "bfloat16")
    half = _enabled(given, "fp16")
    if brain is True and half is True:
        raise SpecError(f"{given.source}: bf16.enabled and fp16.enabled: choose one")
    plain: Literal["bf16", "fp16", "fp32"]
    plain = "bf16" if brain is True else "fp16" if half is True else "fp32"
    follows = plain == "fp32" and AUTO in (brain, half)
    if follows and beside.precision is not None:
        plain, follows = beside.precision, False
    if follows:
        plain = "bf16"
    sums = given.word("data_types.grad_accum_dtype", default="")
    wide = sums == "fp32" if sums else plain == "fp32"
    return {
        "precision": plain,
        "precision_follows": follows,
        "gradient_bytes": 4 if wide else 2,
    }


def _enabled(given: Sections, section: str) -> bool | str:
    value = given.value(f"{section}.enabled")
    return AUTO if value == AUTO else given.is_on(f"{section}.enabled")


def _offloads_parameters(given: Sections) -> bool:
    return given.word("zero_optimization.offload_param.device", default="none") != "none"


def _offload(given: Sections, stage: int) -> float:
    device = given.word(
        "zero_optimization.offload_optimizer.device",
        default="none",
        choices=("none", "cpu", "nvme"),
    )
    legacy = given.is_on("zero_optimization.cpu_offload")
    if (device != "none" or legacy) and stage == 0:
        raise SpecError(
            f"{given.source}: offload_optimizer needs {SPELLED['zero_stage']} 1, 2 or 3, not 0"
        )
    if device == "none":
        return float(legacy)
    value = given.value("zero_optimization.offload_optimizer.ratio")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise SpecError(
            f"{given.source}: zero_optimization.offload_optimizer.ratio {shown_value(value)} is "
            "outside 0..1"
        )
    return float(value)
