"""Reads rows of published steps of reinforcement learning as described steps.

What tables leave out is the frameworks' default, or assumed alike for all rows, and named: prompts
of 200 tokens (OpenMathInstruct-2 with its template), responses that spread as a lognormal law of
coefficient 0.8 before they are cut at the limit, so that their mean is the published one, one
sequence of the limit a micro-batch, and full recomputation where none does not fit.

A row that lacks what a step depends on, or whose step has parts that it does not state (tools,
discarded groups), is refused, and the reason says why.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tuner.backtest.columns import device_hardware
from tuner.backtest.known_models import find_model
from tuner.backtest.serving.launches import ASYNCHRONOUS, SEQUENCE_S, release_version
from tuner.backtest.stages import divide_layers, stage_columns
from tuner.config.columns import Strategies
from tuner.config.shapes import ModelShape, number
from tuner.costs.rl.packing import PackingRule, TokenBudget
from tuner.costs.rl.trainer import Trainer
from tuner.costs.rl.weight_sync import SyncPath
from tuner.costs.serve.decoder import Formats, decoder_of
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.train.calibration import Regime, constants_of, kind_of_model, shipped
from tuner.costs.train.columns_of import shape_of_model
from tuner.costs.train.memory_constants import memory_constants
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Datasheet
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.errors import UnknownDeviceError
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.train.constants import GemmPrecision, Software
from tuner.simulate.rl.rollout import RolloutSide, draw_batch
from tuner.simulate.rl.step import RlPlacement, RlStep, Updates
from tuner.spec.model import ModelSpec
from tuner.spec.serving.lengths import LengthKind, LengthLaw, law_with_mean

SYSTEM: Final = "NeMo-RL"
DEVICES: Final[Mapping[str, str]] = {"h100": "h100-sxm", "h20": "h20-sxm", "gb200": "gb200-nvl72"}
"""Device descriptions by published name, where it is no name of one."""
PLACEMENTS: Final[Mapping[str, RlPlacement]] = {
    "colocated-sync": RlPlacement.COLOCATED,
    "disaggregated-sync": RlPlacement.DISAGGREGATED,
    "disaggregated-async": RlPlacement.DISAGGREGATED,
}
ENGINE_OF_RELEASE: Final[Mapping[str, tuple[str, int]]] = {
    "0.4": ("0.10.0", 8_192),
    "0.5": ("0.11.2", 16_384),
    "0.6": ("0.17.1", 16_384),
    "0.7": ("0.20.0", 16_384),
}
"""vLLM and its tokens of a step by release of NeMo-RL (pyproject.toml, grpo_math_1B.yaml)."""
MEMORY_RATIO: Final = {RlPlacement.COLOCATED: 0.6, RlPlacement.DISAGGREGATED: 0.8}
"""`gpu_memory_utilization` of the recipes where a row states none."""
MOST_RUNNING: Final = 256
"""Sequences of a rank at once: vLLM's default for an engine that a framework embeds."""
PROMPT_TOKENS: Final = 200
RESPONSE_CV: Final = 0.8
SAMPLES: Final = 16
_DEGREE: Final = re.compile(r"\b(TP|CP|EP|PP)(\d{1,4})\b")
_RATIO: Final = re.compile(r"gpu_memory_utilization (0\.\d+)")
_RELEASE: Final = re.compile(r"\bv(\d+\.\d+)")
_GENERATED: Final = re.compile(r"gen batch (\d{1,7})\b")
_TOKENS: Final = re.compile(r"(response )?(\d{1,7})(?:\.\d+)?")

Cells = Mapping[str, str]


class UnpredictedError(ValueError):
    """A row is not predicted; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RlRun:
    """One published step that can be predicted."""

    id: str
    source: str
    """Framework and release."""
    model: str
    measured_s: float
    step: RlStep
    assumed: tuple[str, ...]
    """Figures that the row leaves out, which a rule filled."""

    @property
    def case(self) -> tuple[str, ...]:
        """Return the key of rows that differ in placement and layout alone: model and batch."""
        batch = self.step.batch
        return (self.model, str(len(batch.response_N)), str(int(batch.length_N.max())))


def parse_run(cells: Cells) -> RlRun:
    """Read one row.

    Raises:
        UnpredictedError: it lacks something, or has parts that it does not state.
    """
    _check_kind(cells)
    model = find_model(_text(cells, "model"))
    if model is None:
        raise UnpredictedError(f"model {cells['model'][:40]!r} is none of examples/models")
    device = _device(_text(cells, "device"))
    placement = PLACEMENTS[cells["mode"]]
    release = next(iter(_RELEASE.findall(cells.get("source", ""))), "")
    precision = GemmPrecision.MXFP8 if "fp8" in cells.get("other", "") else GemmPrecision.BF16
    prompts, samples, assumed = _batch_sizes(cells)
    longest, mean = _tokens(cells, "max_tokens"), _tokens(cells, "mean_tokens")
    batch = draw_batch(
        prompts=prompts,
        samples=samples,
        prompt_tokens=LengthLaw(kind=LengthKind.FIXED, mean=PROMPT_TOKENS),
        response_tokens=law_with_mean(mean, cv=RESPONSE_CV, most=longest),
    )
    sequence = TokenBudget(rule=PackingRule.FIRST_FIT, size=longest + PROMPT_TOKENS)
    updates = prompts * samples // min(_count(cells, "train_batch"), prompts * samples)
    trainer = _trainer(cells, model, device, precision)
    step = RlStep(
        placement=placement,
        versions=float(_optional(cells, "staleness")),
        release=f"{SYSTEM} {release}".strip(),
        batch=batch,
        trainer=trainer,
        train_budget=sequence,
        forward_budget=sequence,
        updates=Updates(mini_batches=updates),
        side=_rollout_side(cells, model, device, precision, release),
        path=SyncPath.PACKED,
        offload_bytes=0.0,
    )
    return RlRun(
        id=cells.get("id", ""),
        source=step.release,
        model=model.name or cells["model"],
        measured_s=_number(cells, "step_s"),
        step=_fitting(step, device),
        assumed=(*assumed, "prompts", "length law", "micro-batches", "recompute"),
    )


def _check_kind(cells: Cells) -> None:
    """Refuse rows of what is not modelled, or not stated.

    Raises:
        UnpredictedError: it is such a row.
    """
    mode, algorithm = cells.get("mode", ""), cells.get("algorithm", "")
    if mode == "weight-sync only":
        raise UnpredictedError("weight sync alone, no step")
    if not cells.get("step_s", "").strip():
        raise UnpredictedError("step_s is blank")
    if cells.get("system", "") != SYSTEM:
        name = cells.get("system", "")[:40]
        raise UnpredictedError(f"{name!r} has no fitted steps: only {SYSTEM} states lengths")
    if mode not in PLACEMENTS:
        raise UnpredictedError(f"mode {mode[:40]!r} is none of {', '.join(PLACEMENTS)}")
    if "agentic" in algorithm or algorithm.startswith("SWE"):
        raise UnpredictedError("turns and tools of an agent are not stated")
    if algorithm.startswith("DAPO"):
        raise UnpredictedError("DAPO discards groups and generates others; how many is not stated")


def _fitting(step: RlStep, device: Datasheet) -> RlStep:
    """Return the step with full recomputation where none does not fit, and with its offload."""
    micro = step.update_batches()
    trainer = step.trainer
    if float(trainer.memory(micro).total_PC.max()) > device.memory_bytes:
        trainer = replace(trainer, strategy=replace(trainer.strategy, recompute_full=1.0))
    state = trainer.memory(micro)
    is_colocated = step.placement is RlPlacement.COLOCATED
    moved = float((state.weights_PC + state.optimizer_PC).max()) if is_colocated else 0.0
    return replace(step, trainer=trainer, offload_bytes=moved)


def _trainer(
    cells: Cells, model: ModelSpec, device: Datasheet, precision: GemmPrecision
) -> Trainer:
    if cells.get("train_engine", "") != "megatron":
        raise UnpredictedError(f"train_engine {cells.get('train_engine', '')[:40]!r}")
    shape = shape_of_model(model, mtp_layers=0)
    degrees = _degrees(cells, "train_layout")
    tensor, context, pipeline = (degrees.get(name, 1) for name in ("TP", "CP", "PP"))
    devices = _count(cells, "train_devices")
    data, rest = divmod(devices, tensor * context * pipeline)
    if rest or not data:
        raise UnpredictedError(f"train_layout does not divide {devices} train_devices")
    expert = degrees.get("EP", 1) if number(shape.experts) else 1
    if (tensor * context * data) % expert:
        ranks = tensor * context * data
        raise UnpredictedError(f"EP {expert} does not divide the {ranks} ranks of a stage")
    counts, counts_embedding = divide_layers(_layers(shape), num_stages=pipeline)
    regime = Regime(
        device=device.name,
        generation=device.generation,
        precision=precision,
        software=Software.MEGATRON_2025,
        family="nemo",
        model_kind=kind_of_model(has_experts=bool(number(shape.experts))),
    )
    return Trainer(
        shape=shape,
        strategy=Strategies(
            sequence=1.0,
            micro_batch=1.0,
            num_microbatches=1.0,
            tensor=float(tensor),
            context=float(context),
            pipeline=float(pipeline),
            data=float(data),
            expert=float(expert),
            sequence_parallel=float(tensor > 1),
            gradient_bytes=2.0,
            embedding_loss_as_layers=float(counts_embedding),
        ),
        hardware=device_hardware(device, precision),
        constants=constants_of([regime], shipped()),
        memory_constants=memory_constants([regime.software], families=[regime.family]),
        stages=stage_columns(shape, counts),
    )


def _layers(shape: ModelShape) -> int:
    return int(number(shape.dense_layers) + number(shape.moe_layers))


def _rollout_side(
    cells: Cells, model: ModelSpec, device: Datasheet, precision: GemmPrecision, release: str
) -> RolloutSide:
    if cells.get("rollout_engine", "") != "vllm":
        raise UnpredictedError(f"rollout_engine {cells.get('rollout_engine', '')[:40]!r}")
    tensor = _degrees(cells, "rollout_layout").get("TP", 1)
    devices = _count(cells, "rollout_devices")
    if devices % tensor:
        raise UnpredictedError(f"TP {tensor} does not divide {devices} rollout_devices")
    engine, step_tokens = ENGINE_OF_RELEASE.get(release, ENGINE_OF_RELEASE["0.7"])
    traits = ENGINE_TRAITS["vllm"]
    weights = "fp8_block" if precision.is_narrow else "bf16"
    stated = _RATIO.search(cells.get("rollout_layout", ""))
    return RolloutSide(
        iteration=Iteration(
            decoder=decoder_of(model),
            formats=Formats(
                attention=weights, output=weights, ffn=weights, experts=weights, kv="bf16"
            ),
            degrees=InstanceDegrees(attention_tensor=tensor, moe_tensor=tensor),
            traits=traits,
            machine=ServingMachine(sheet=device, tables=None, engines=ENGINE_TRAITS),
            sequence_s=SEQUENCE_S if release_version(engine) < ASYNCHRONOUS else 0.0,
            stream_s=traits.rank_stream_s(1),
            release=engine,
        ),
        instances=devices // tensor,
        step_tokens=step_tokens,
        most_running=MOST_RUNNING,
        memory_ratio=float(stated.group(1)) if stated else MEMORY_RATIO[PLACEMENTS[cells["mode"]]],
        memory_bytes=float(device.memory_bytes),
    )


def _batch_sizes(cells: Cells) -> tuple[int, int, tuple[str, ...]]:
    """Return prompts, responses of each, and what of them is assumed."""
    if cells.get("prompts_per_step", "").strip():
        return _count(cells, "prompts_per_step"), _count(cells, "samples_per_prompt"), ()
    stated = _GENERATED.search(cells.get("other", ""))
    if stated is None or int(stated.group(1)) % SAMPLES:
        raise UnpredictedError("prompts_per_step is blank")
    return int(stated.group(1)) // SAMPLES, SAMPLES, ("samples_per_prompt",)


def _tokens(cells: Cells, name: str) -> int:
    """Return tokens of a response: as stated, or of a sequence less the prompt."""
    match = _TOKENS.fullmatch(_text(cells, name))
    tokens = 0 if match is None else int(match.group(2))
    tokens -= PROMPT_TOKENS * (match is not None and match.group(1) is None)
    if tokens < 1:
        raise UnpredictedError(f"{name} {cells[name][:40]!r} is no length of a response")
    return tokens


def _degrees(cells: Cells, name: str) -> dict[str, int]:
    stated = _DEGREE.findall(_text(cells, name).partition("(")[0])
    if not stated:
        raise UnpredictedError(f"{name} {cells[name][:40]!r} names no degree")
    return {degree: int(size) for degree, size in stated}


def _device(name: str) -> Datasheet:
    try:
        return find_device(DEVICES.get(name.lower(), name))
    except UnknownDeviceError:
        raise UnpredictedError(f"device {name[:40]!r} is not known") from None


def _text(cells: Cells, name: str) -> str:
    text = cells.get(name, "").strip()
    if not text:
        raise UnpredictedError(f"{name} is blank")
    return text


def _number(cells: Cells, name: str) -> float:
    text = _text(cells, name)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1e9:
        raise UnpredictedError(f"{name} {text[:40]!r} is no number above 0")
    return value


def _count(cells: Cells, name: str) -> int:
    value = _number(cells, name)
    if value != int(value):
        raise UnpredictedError(f"{name} {value:g} is no whole number")
    return int(value)


def _optional(cells: Cells, name: str) -> float:
    return 0.0 if cells.get(name, "").strip() in ("", "0") else _number(cells, name)
