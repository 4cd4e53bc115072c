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
from typing import Any, Final

from profilers.steps.config import Recompute
from tuner.backtest.cells import Cells, MissingError, count_of, number_of, optional_of, text_of
from tuner.backtest.known_models import find_model
from tuner.backtest.serving.launches import ASYNCHRONOUS, SEQUENCE_S, release_version
from tuner.backtest.stages import divide_layers
from tuner.costs.rl.packing import PackingRule, TokenBudget
from tuner.costs.rl.residuals import PLAIN
from tuner.costs.serve.engine import InstanceDegrees
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Datasheet
from tuner.engines.reading.launch import LaunchSettings, StageContent, TrainingEngine
from tuner.engines.reading.rl_launch import RlLaunch
from tuner.errors import SpecError, UnknownDeviceError
from tuner.estimate.rl.setup import build_inputs, price_step_of
from tuner.prices.weight_sync import SyncPath
from tuner.simulate.rl.step import RlPlacement, RlStep
from tuner.spec.cluster import Cluster
from tuner.spec.model import ModelSpec
from tuner.spec.rl import RlGoal
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
FULL_RECOMPUTE: Final[Mapping[str, Any]] = {
    "recompute": Recompute.FULL,
    "recompute_method": "uniform",
    "recompute_layers": 1,
}
PROMPT_TOKENS: Final = 200
RESPONSE_CV: Final = 0.8
SAMPLES: Final = 16
_DEGREE: Final = re.compile(r"\b(TP|CP|EP|PP)(\d{1,4})\b")
_RATIO: Final = re.compile(r"gpu_memory_utilization (0\.\d+)")
_RELEASE: Final = re.compile(r"\bv(\d+\.\d+)")
_GENERATED: Final = re.compile(r"gen batch (\d{1,7})\b")
_TOKENS: Final = re.compile(r"(response )?(\d{1,7})(?:\.\d+)?")


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
        MissingError: it lacks something, or has parts that it does not state.
    """
    _check_kind(cells)
    model = find_model(text_of(cells, "model"))
    if model is None:
        raise MissingError(f"model {cells['model'][:40]!r} is none of examples/models")
    device = _device(text_of(cells, "device"))
    prompts, samples, assumed = _batch_sizes(cells)
    longest, mean = _tokens(cells, "max_tokens"), _tokens(cells, "mean_tokens")
    inputs = build_inputs(
        RlGoal(
            kind="rl",
            prompt_tokens=LengthLaw(kind=LengthKind.FIXED, mean=PROMPT_TOKENS),
            response_tokens=law_with_mean(mean, cv=RESPONSE_CV, most=longest),
        ),
        _cluster(cells, device),
        model,
        residuals=PLAIN,
        calibrated=True,
    )
    launch = _launch(cells, model, device, prompts=prompts, samples=samples, longest=longest)
    try:
        priced = price_step_of(launch, inputs)
        if priced.memory.train_bytes > device.memory_bytes:
            recomputed = launch.trainer.model_copy(update=FULL_RECOMPUTE)
            priced = price_step_of(replace(launch, trainer=recomputed), inputs)
    except SpecError as error:
        raise MissingError(str(error)) from error
    return RlRun(
        id=cells.get("id", ""),
        source=launch.framework,
        model=model.name,
        measured_s=number_of(cells, "step_s"),
        step=priced.step,
        assumed=(*assumed, "prompts", "length law", "micro-batches", "recompute"),
    )


def _check_kind(cells: Cells) -> None:
    """Refuse rows of what is not modelled, or not stated.

    Raises:
        MissingError: it is such a row.
    """
    mode, algorithm = cells.get("mode", ""), cells.get("algorithm", "")
    if mode == "weight-sync only":
        raise MissingError("weight sync alone, no step")
    if not cells.get("step_s", "").strip():
        raise MissingError("step_s is blank")
    if cells.get("system", "") != SYSTEM:
        name = cells.get("system", "")[:40]
        raise MissingError(f"{name!r} has no fitted steps: only {SYSTEM} states lengths")
    if mode not in PLACEMENTS:
        raise MissingError(f"mode {mode[:40]!r} is none of {', '.join(PLACEMENTS)}")
    if "agentic" in algorithm or algorithm.startswith("SWE"):
        raise MissingError("turns and tools of an agent are not stated")
    if algorithm.startswith("DAPO"):
        raise MissingError("DAPO discards groups and generates others; how many is not stated")
    for name, engine in (("train_engine", "megatron"), ("rollout_engine", "vllm")):
        if cells.get(name, "") != engine:
            raise MissingError(f"{name} {cells.get(name, '')[:40]!r} is not {engine}")


def _cluster(cells: Cells, device: Datasheet) -> Cluster:
    """Return as many nodes as both sides take."""
    sides = [count_of(cells, name) for name in ("train_devices", "rollout_devices")]
    is_colocated = PLACEMENTS[cells["mode"]] is RlPlacement.COLOCATED
    devices = max(sides) if is_colocated else sum(sides)
    per_node = min(device.devices_per_node, devices)
    pool = {"name": "table", "device": device.name, "devices_per_node": per_node}
    return Cluster.model_validate({"pools": [{**pool, "nodes": -(-devices // per_node)}]})


def _launch(
    cells: Cells, model: ModelSpec, device: Datasheet, *, prompts: int, samples: int, longest: int
) -> RlLaunch:
    """Return a row as a launch, with the settings of NeMo-RL's recipes where it has none."""
    placement = PLACEMENTS[cells["mode"]]
    is_colocated = placement is RlPlacement.COLOCATED
    release = next(iter(_RELEASE.findall(cells.get("source", ""))), "")
    engine, step_tokens = ENGINE_OF_RELEASE.get(release, ENGINE_OF_RELEASE["0.7"])
    tensor = _degrees(cells, "rollout_layout").get("TP", 1)
    stated = _RATIO.search(cells.get("rollout_layout", ""))
    is_narrow = "fp8" in cells.get("other", "")
    update = min(count_of(cells, "train_batch"), prompts * samples)
    sequence = TokenBudget(rule=PackingRule.FIRST_FIT, size=longest + PROMPT_TOKENS)
    return RlLaunch(
        source=cells.get("id", ""),
        framework=f"{SYSTEM} {release}".strip(),
        trainer=_trainer(cells, model, update=update, sequence=sequence.size, is_narrow=is_narrow),
        placement=placement,
        versions=0.0 if is_colocated else optional_of(cells, "staleness"),
        devices_per_node=device.devices_per_node,
        rollout_devices=count_of(cells, "rollout_devices"),
        prompts=prompts,
        samples=samples,
        samples_per_update=update,
        longest_prompt=PROMPT_TOKENS,
        longest_response=longest,
        train_budget=sequence,
        forward_budget=sequence,
        recomputes_old=True,
        has_reference=True,
        has_critic=False,
        engine="vllm",
        engine_release=engine,
        weight_format="fp8_block" if is_narrow else "bf16",
        sequence_s=SEQUENCE_S if release_version(engine) < ASYNCHRONOUS else 0.0,
        degrees=InstanceDegrees(attention_tensor=tensor, moe_tensor=tensor),
        memory_ratio=float(stated.group(1)) if stated else MEMORY_RATIO[placement],
        most_running=MOST_RUNNING,
        step_tokens=step_tokens,
        is_eager=False,
        sleeps=True,
        sleep_keeps_weights=is_colocated,
        path=SyncPath.PACKED,
        bucket_bytes=0.0,
        offloads_weights=is_colocated,
        offloads_optimizer=is_colocated,
        offloads_reference=True,
        spelled={},
    )


def _trainer(
    cells: Cells, model: ModelSpec, *, update: int, sequence: int, is_narrow: bool
) -> LaunchSettings:
    degrees = _degrees(cells, "train_layout")
    counts, _ = divide_layers(model.num_layers, num_stages=degrees.get("PP", 1))
    last = len(counts) - 1
    return LaunchSettings(
        engine=TrainingEngine.MEGATRON,
        source=cells.get("id", ""),
        devices=count_of(cells, "train_devices"),
        tensor=degrees.get("TP", 1),
        context=degrees.get("CP", 1),
        pipeline=degrees.get("PP", 1),
        expert=degrees.get("EP", 1) if model.moe else 1,
        expert_tensor=1,
        layout=tuple(
            StageContent(layers=count, embedding=stage == 0, loss=stage == last)
            for stage, count in enumerate(counts)
        ),
        sequence_parallel=degrees.get("TP", 1) > 1,
        sequence=sequence,
        global_batch=update,
        fp8_recipe="blockwise" if is_narrow else "",
        gradient_bytes=2,
        zero_stage=1,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )


def _batch_sizes(cells: Cells) -> tuple[int, int, tuple[str, ...]]:
    """Return prompts, responses of each, and what of them is assumed."""
    if cells.get("prompts_per_step", "").strip():
        return count_of(cells, "prompts_per_step"), count_of(cells, "samples_per_prompt"), ()
    stated = _GENERATED.search(cells.get("other", ""))
    if stated is None or int(stated.group(1)) % SAMPLES:
        raise MissingError("prompts_per_step is blank")
    return int(stated.group(1)) // SAMPLES, SAMPLES, ("samples_per_prompt",)


def _tokens(cells: Cells, name: str) -> int:
    """Return tokens of a response: as stated, or of a sequence less the prompt."""
    match = _TOKENS.fullmatch(text_of(cells, name))
    tokens = 0 if match is None else int(match.group(2))
    tokens -= PROMPT_TOKENS * (match is not None and match.group(1) is None)
    if tokens < 1:
        raise MissingError(f"{name} {cells[name][:40]!r} is no length of a response")
    return tokens


def _degrees(cells: Cells, name: str) -> dict[str, int]:
    stated = _DEGREE.findall(text_of(cells, name).partition("(")[0])
    if not stated or any(int(size) < 1 for _, size in stated):
        raise MissingError(f"{name} {cells[name][:40]!r} names no degree, or one below 1")
    return {degree: int(size) for degree, size in stated}


def _device(name: str) -> Datasheet:
    try:
        return find_device(DEVICES.get(name.lower(), name))
    except UnknownDeviceError:
        raise MissingError(f"device {name[:40]!r} is not known") from None
