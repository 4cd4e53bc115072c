"""What the product answers, under names of our own: the only file here that knows the product.

Where something of the product moves or is renamed, this file follows, and nothing that is stored
changes. A case is asked by its name (`names`) and answers with a tree (`answered`) of mappings,
lists, numbers and words. Tables are trees too:

    {"drawn": {field: values}, "figures": {name: values}}     one value, or list of values, per row

    megatron-*, torchtitan-*, deepspeed-*   rows of `drawn.analytic_row`, priced by the formulas in
                                            the row's own layout, and as the search prices them
    reference-*                             rows of `drawn.measured_row`, on profiles and formulas
    serving-*                               every way to run an instance that the search weighs
    check-*                                 plan.json and launch files of a stored check
    estimate-*                              what is said of public recipes, and of launch files that
                                            a check's plan has written

Rows of training tables are recorded, so `answered` prices the recorded ones, or some of them.
"""

import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import yaml

from profilers.records import Case
from profilers.steps.config import LayerKind
from profilers.store import read_profile
from profilers.work import work
from tests.frozen.drawn import EXTRAS, Dice, Job, Row, analytic_row, measured_row, rows
from tests.tuner.formulas import Formulas
from tuner import api
from tuner.config.candidates import strategies_of
from tuner.config.columns import Strategies
from tuner.config.serve import Role
from tuner.config.shapes import Stages, stacked
from tuner.config.train import TrainDecision
from tuner.costs.residuals import Residual
from tuner.costs.serve.capacity import instance_kv_bytes_per_token, instance_weight_bytes
from tuner.costs.train.calibration import shipped
from tuner.costs.train.columns_of import StageLayers, stages_of_layouts
from tuner.costs.train.memory import price_memory
from tuner.costs.train.step import price_step
from tuner.engines.serving.releases import release_on
from tuner.engines.targets import programs
from tuner.errors import OutsideProfileError
from tuner.goals.serve_plan import price_serving_pool as site_of_server
from tuner.goals.serve_spec import read_serve_spec
from tuner.goals.train_spec import read_spec
from tuner.prices.profile import ProfilePrices
from tuner.search.reference.decisions import degrees_of
from tuner.search.reference.decisions import options_of as stage_options_of
from tuner.search.reference.engine_workload import workload_of
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine, layout_problem
from tuner.search.reference.predict import predict
from tuner.search.serve.launchable import build_choices
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.options import Option, device_memory_bytes, price_options
from tuner.search.serve.problem import ServeProblem
from tuner.search.serve.solve_mode import build_serve_problem
from tuner.search.settings import SearchSettings
from tuner.search.train.build_problem import build_problem, price_pool
from tuner.search.train.candidate_prices import candidate_bound_s, price
from tuner.search.train.candidates import Candidates
from tuner.search.train.options import RecomputeChoice, option_space
from tuner.search.train.problem import TrainProblem
from tuner.spec.serving.spec import ServeSpec
from tuner.spec.spec import Spec

Floats = npt.NDArray[np.float64]
Tree = Any
Table = dict[str, dict[str, list[Any]]]

CHECKOUT: Final = Path(__file__).parents[2]
EXAMPLES: Final = CHECKOUT / "examples"

LONGEST_S: Final = 36000.0
"""Time limit of planning, whose own clock stands still: a search ends by its own account."""


def _spec(model: str, *, device: str, nodes: int, per_node: int = 8, **more: Any) -> Row:
    goal = {"kind": "train", "sequence_length": 4096, "global_batch_size": 1024} | more["goal"]
    pool = {"name": "pool", "device": device, "nodes": nodes, "devices_per_node": per_node}
    return {
        "schema_version": 1,
        "model": str(EXAMPLES / "models" / model),
        "cluster": {"pools": [pool | {"nic": "400Gbit/s"} | more.get("pool", {})]},
        "goal": goal,
        "emit": more["emit"],
    }


ANALYTIC: Final[Mapping[str, Row]] = {
    "megatron-deepseek-v3": _spec(
        "deepseek-v3",
        device="h800",
        nodes=64,
        goal={"precision": "fp8-blockwise", "global_batch_size": 7680},
        emit=["megatron-lm"],
    ),
    "megatron-mixtral": _spec(
        "mixtral-8x7b",
        device="a100-80gb",
        nodes=8,
        goal={"precision": "bf16", "global_batch_size": 256},
        emit=["megatron-lm"],
        pool={"nic": "200Gbit/s", "nics_per_node": 4, "oversubscription": 2.0},
    ),
    "megatron-gpt-oss": _spec(
        "gpt-oss-120b",
        device="gb200",
        nodes=16,
        per_node=4,
        goal={"precision": "mxfp8", "global_batch_size": 512},
        emit=["megatron-bridge"],
        pool={"scale_up_domain": 64},
    ),
    "megatron-qwen3": _spec(
        "qwen3-30b-a3b",
        device="h100-sxm",
        nodes=2,
        goal={"precision": "bf16"},
        emit=["megatron-bridge"],
    ),
    "megatron-llama": _spec(
        "llama-3.1-70b",
        device="h100-sxm",
        nodes=8,
        goal={"precision": "fp8-delayed", "sequence_length": 8192, "global_batch_size": 128},
        emit=["megatron-lm"],
    ),
    "torchtitan-llama": _spec(
        "llama-3.1-405b",
        device="h100-sxm",
        nodes=64,
        goal={"precision": "fp8-tensorwise", "sequence_length": 8192, "global_batch_size": 512},
        emit=["torchtitan"],
    ),
    "torchtitan-qwen3": _spec(
        "qwen3-235b-a22b",
        device="b200",
        nodes=8,
        goal={"precision": "bf16", "global_batch_size": 512},
        emit=["torchtitan"],
    ),
    "torchtitan-deepseek-v2": _spec(
        "deepseek-v2-lite",
        device="h200-sxm",
        nodes=2,
        goal={"precision": "bf16", "global_batch_size": 256},
        emit=["torchtitan"],
    ),
    "deepspeed-mixtral": _spec(
        "mixtral-8x22b",
        device="a100-80gb",
        nodes=16,
        goal={"precision": "bf16", "global_batch_size": 512},
        emit=["deepspeed"],
        pool={"nic": "100Gbit/s"},
    ),
    "deepspeed-qwen3": _spec(
        "qwen3-30b-a3b",
        device="h20",
        nodes=4,
        goal={"precision": "bf16", "global_batch_size": 256},
        emit=["deepspeed"],
    ),
}
"""Specs whose devices' datasheets price rows; 2,000 rows for each engine."""

REFERENCE: Final[Mapping[str, tuple[str, str, int]]] = {
    "reference-two-ranks": ("checks/train-measured", "epyc-2-ranks/used/profile", 400),
    "reference-quickstart": ("checks/train-measured", "epyc-quickstart-1/used/profile", 400),
    "reference-two-nodes": ("profiles/emulated-2x2", "emulated-2x2/profile", 500),
}
"""Folders of specs, measured profiles, and how many rows."""

FORMULAS: Final = "reference-formulas"
"""A profile whose times are formulas, so that many ranks and deep pipelines are priced too."""
FORMULA_ROWS: Final = 700
FORMULA_MODEL: Final = {"num_hidden_layers": 5, "n_routed_experts": 8, "num_experts_per_tok": 2}
"""Of GLM-4.5-Air, a shared expert and a first layer without experts: few, as prices ask each."""
FORMULA_SPEC: Final = _spec(
    "glm-4.5-air",
    device="h100-sxm",
    nodes=4,
    per_node=2,
    goal={"precision": "bf16", "sequence_length": 2048, "global_batch_size": 48},
    emit=["reference"],
)

SERVING: Final[Mapping[str, tuple[str, str]]] = {
    "serving-vllm-goodput": ("checks/serve-aggregated", ""),
    "serving-trtllm-goodput": ("checks/serve-aggregated", "trtllm"),
    "serving-sglang-devices": ("serving/deepseek-v3-32-h200", ""),
    "serving-sglang-rate": ("serving/deepseek-v3-72-h100", ""),
    "serving-vllm-cost": ("serving/long-prompts-remote", ""),
    "serving-vllm-apart": ("serving/qwen3-attention-ffn", ""),
}
"""Specs, and the engine where it is another than the spec's."""

ESTIMATES: Final[Mapping[str, tuple[str, str]]] = {
    "estimate-deepseek-v3": ("worked/deepseek-v3-2048-h800", "public.sh"),
    "estimate-mixtral": ("worked/mixtral-8x7b-64-a100", "public.sh"),
    "estimate-qwen3": ("worked/qwen3-30b-a3b-16-h100", "public.sh"),
    "estimate-gpt-oss": ("checks/train-gpt-oss", "launch/megatron-bridge/overrides.txt"),
    "estimate-llama": ("checks/train-llama-dense", "launch/torchtitan/torchtitan.toml"),
    "estimate-vllm": ("checks/serve-aggregated", "launch/vllm/aggregated.sh"),
    "estimate-sglang": ("checks/serve-disaggregated", "launch/sglang/decode.sh"),
}
"""Folders of specs, and the launch file; what lies in `launch/` is written by the spec's plan."""

UNTIMELY: Final = frozenset(
    {"moetune_version", "created", "solve_s", "spec_sha256", "profile_sha256", "links_sha256"}
    | {"kernels_sha256"}
)
"""Fields of plan.json that tell when and from which bytes it was made."""

PARTS: Final[Mapping[str, str]] = {
    "once_s": "once_s",
    "bubble_s": "bubble_s",
    "tensor_s": "tensor_s",
    "context_s": "context_s",
    "expert_s": "expert_s",
    "recompute_s": "recompute_s",
    "host_s": "host_s",
    "boundary_s": "boundary_s",
}
"""Our names of the parts of a step, and the product's."""
BYTES: Final[Mapping[str, str]] = {
    "weights_bytes": "weights_PC",
    "gradients_bytes": "gradients_PC",
    "optimizer_bytes": "optimizer_PC",
    "activations_bytes": "activations_PC",
    "buffers_bytes": "buffers_PC",
    "reserve_bytes": "reserve_PC",
    "context_bytes": "context_PC",
}
REFERENCE_PARTS: Final = (
    *("attention", "ffn", "router", "experts", "embedding", "head", "optimizer"),
    *("tensor_communication", "expert_communication", "pipeline_communication"),
    *("data_communication", "recompute", "bubble"),
)
"""Causes in the breakdown of a step of the reference; one that is absent takes no time."""
EXTRA_FIELDS: Final[Mapping[str, str]] = {
    "busiest_ratio": "expert_imbalance",
    "busiest_ratio_p99": "expert_imbalance_p99",
    "flash_attention": "has_flash_attention",
    "dropout": "dropout",
    "overlap_tensor": "overlap_tensor",
    "recompute_products": "recompute_by_op",
    "fused_grouped_mlp": "fused_grouped_mlp",
}


def names() -> tuple[str, ...]:
    """All cases."""
    checks = (f"check-{name}" for name in _checks())
    return (*ANALYTIC, *REFERENCE, FORMULAS, *SERVING, *checks, *ESTIMATES)


def is_table(name: str) -> bool:
    """Whether rows of a case are drawn, so that some of them can be asked about."""
    return name in ANALYTIC or name in REFERENCE or name == FORMULAS


def drawn(name: str) -> list[Row]:
    """Draw the rows of a table, as they are recorded."""
    if name in ANALYTIC:
        job = _job(_read(ANALYTIC[name]))
        engine = name.partition("-")[0]
        count = 2000 // sum(one.startswith(engine) for one in ANALYTIC)
        return rows(count, seed=len(name), draw=lambda dice: analytic_row(dice, job))
    ask = _reference(name)
    count = REFERENCE[name][2] if name in REFERENCE else FORMULA_ROWS
    return rows(count, seed=len(name), draw=ask.priced_row)


def answered(name: str, asked: Sequence[Row] = ()) -> Tree:
    """Ask the product; of a table about these rows."""
    if name in ANALYTIC:
        return table(asked, _analytic_figures(_read(ANALYTIC[name]), asked))
    if name in SERVING:
        return _serving(*SERVING[name])
    if name.startswith("check-"):
        return _check(name.removeprefix("check-"))
    if name in ESTIMATES:
        return _estimate(*ESTIMATES[name])
    return table(asked, _reference(name).figures(asked))


def table(asked: Sequence[Row], figures: Mapping[str, Sequence[Any]]) -> Table:
    """Put rows and figures into columns."""
    fields = list(asked[0]) if asked else []
    return {
        "drawn": {field: [row[field] for row in asked] for field in fields},
        "figures": {name: list(values) for name, values in figures.items()},
    }


# --- what the formulas price -----------------------------------------------------------------


def _read(raw: Row, **changes: Any) -> Spec:
    """Read a spec whose model is changed."""
    with tempfile.TemporaryDirectory() as folder:
        path, config = Path(folder) / "spec.yaml", Path(folder) / "config.json"
        model = json.loads((Path(raw["model"]) / config.name).read_text(encoding="utf-8"))
        config.write_text(json.dumps(model | changes), encoding="utf-8")
        path.write_text(yaml.safe_dump(raw | {"model": config.name}), encoding="utf-8")
        return read_spec(path)


def _job(spec: Spec) -> Job:
    model, moe = spec.model, spec.model.moe
    has = {
        "mla_up_proj": model.attention.kind == "mla",
        "mlp": LayerKind.DENSE in model.layers,
        "moe_act": moe is not None,
        "shared_experts": moe is not None and moe.shared_ffn_size > 0,
        "moe": moe is not None,
    }
    modules = ("core_attn", "layernorm", *(name for name, there in has.items() if there))
    precision = spec.goal.precision.value
    return Job(
        devices=spec.num_devices,
        layers=model.num_layers,
        heads=model.attention.num_kv_heads,
        experts=0 if moe is None else moe.num_experts,
        modules=modules,
        batch=spec.goal.global_batch_size,
        mtp_layers=int(_question(spec).shape.mtp_layers),
        fp8_recipe="" if precision in ("bf16", "fp32") else precision,
    )


def _question(spec: Spec) -> TrainProblem:
    (pool,) = spec.cluster.pools
    return build_problem(spec, price_pool(pool, residuals=shipped()))


def _decision(row: Row) -> TrainDecision:
    return TrainDecision.model_validate_json(
        json.dumps({name: value for name, value in row.items() if name not in EXTRAS})
    )


def _analytic_figures(spec: Spec, asked: Sequence[Row]) -> dict[str, list[Any]]:
    question = _question(spec)
    decisions = [_decision(row) for row in asked]
    found: dict[str, Any] = {}
    orders = [row["rank_order"] for row in asked]
    for order in sorted(set(orders)):
        at = [number for number, one in enumerate(orders) if one == order]
        rows_at, decisions_at = [asked[n] for n in at], [decisions[n] for n in at]
        strategies = stacked(
            [_column(question, *one) for one in zip(rows_at, decisions_at, strict=True)]
        )
        stages = stages_of_layouts(question.model, [_layout(one) for one in decisions_at])
        priced = _priced(question, strategies, stages, tuple(order.split("-")))
        for name, values in priced.items():
            found.setdefault(name, [None] * len(asked))
            for place, value in zip(at, values, strict=True):
                found[name][place] = value
    pipelines = [row["pipeline_model_parallel_size"] for row in asked]
    found["peak_bytes"] = [
        list(peaks[:ranks]) for peaks, ranks in zip(found["peak_bytes"], pipelines, strict=True)
    ]
    return found | _searched(question, asked)


def _column(question: TrainProblem, row: Row, decision: TrainDecision) -> Strategies:
    plain = strategies_of(
        decision,
        sequence_length=question.sequence_length,
        global_batch_size=question.global_batch_size,
    )
    return dataclasses.replace(
        plain,
        linear_bytes=question.linear_bytes,
        **{field: float(row[name]) for name, field in EXTRA_FIELDS.items()},
    )


def _layout(decision: TrainDecision) -> list[StageLayers]:
    last = decision.num_stages - 1
    return [
        StageLayers(
            layers=layers,
            embedding=stage == 0,
            head=stage == last,
            mtp_layers=decision.mtp_num_layers if stage == last else 0,
        )
        for stage, layers in enumerate(decision.pipeline_layout)
    ]


def _priced(
    question: TrainProblem, strategies: Strategies, stages: Stages, order: tuple[str, ...]
) -> dict[str, list[Any]]:
    count = len(np.asarray(strategies.tensor))
    hardware = question.hardware
    step = price_step(
        question.shape,
        strategies,
        hardware,
        question.constants,
        stages,
        prices=question.prices,
        order=order,
    )
    memory = price_memory(
        question.shape, strategies, hardware, stages, constants=question.memory_constants
    )
    peaks_PC = np.broadcast_to(memory.total_PC, (len(memory.total_PC), count))
    return {
        "step_s": _each(step.step_s, count),
        **{name: _each(getattr(step, field), count) for name, field in PARTS.items()},
        "forward_s": _each(step.forward_s_SC.sum(axis=0), count),
        "backward_s": _each(step.backward_s_SC.sum(axis=0), count),
        "slowest_stage_s": _each((step.forward_s_SC + step.backward_s_SC).max(axis=0), count),
        **{name: _each(getattr(memory, field).sum(axis=0), count) for name, field in BYTES.items()},
        "peak_bytes": peaks_PC.T.tolist(),
    }


def _each(value: Any, count: int) -> list[float]:
    found: list[float] = np.broadcast_to(np.asarray(value, dtype=np.float64), count).tolist()
    return found


def _searched(question: TrainProblem, asked: Sequence[Row]) -> dict[str, list[Any]]:
    """Price rows as the search does: in layouts of its own, plain and lean, and from below."""
    options = option_space(question)

    def columns(*fields: str) -> dict[str, npt.NDArray[np.int64]]:
        return {
            field.removesuffix("_model_parallel_size")
            .removesuffix("_parallel_size")
            .removesuffix("_size"): np.array([row[field] for row in asked])
            for field in fields
        }

    degrees = columns(
        "tensor_model_parallel_size",
        "context_parallel_size",
        "pipeline_model_parallel_size",
        "data_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "micro_batch_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    )
    copies = [
        row["data_parallel_size"] * row["context_parallel_size"] // row["shard_ranks"]
        if row["shard_ranks"]
        else 1
        for row in asked
    ]
    chosen = [_choices(row) for row in asked]
    candidates = Candidates(
        rows=degrees | {"copies": np.array(copies)},
        options={
            axis: np.array([choices.index(one[axis]) for one in chosen])
            for axis, choices in options.choices.items()
        },
    )
    plain = price(question, options, candidates)
    lean = price(question, options, candidates, is_moved_to_fit=True)
    return {
        "search_step_s": plain.step_s.tolist(),
        "search_peak_bytes": plain.peak_bytes.tolist(),
        "search_least_s": candidate_bound_s(question, options, candidates).tolist(),
        "search_lean_step_s": lean.step_s.tolist(),
        "search_lean_peak_bytes": lean.peak_bytes.tolist(),
    }


def _choices(row: Row) -> dict[str, Any]:
    layers = row["recompute_num_layers"]
    share = 0.0
    if row["recompute"] == "full":
        # Shares are quarters; a row says the layers that one is rounded up to.
        most = max(row["pipeline_layout"])
        share = 1.0 if layers is None else max(1, math.floor(4.0 * layers / most)) / 4.0
    decision = _decision(row)
    return {
        "zero_stage": row["zero_stage"],
        "recompute": RecomputeChoice(
            level=decision.recompute,
            modules=frozenset(row["recompute_modules"]),
            share=share,
        ),
        "chunks": row["chunks"][0],
        "dispatcher": row["dispatcher"],
        "a2a_overlap": row["a2a_overlap"],
        "cuda_graph": row["cuda_graph"],
        "schedule": row["schedule"],
        "overlap_grad_reduce": row["overlap_grad_reduce"],
        "overlap_param_gather": row["overlap_param_gather"],
        "optimizer_offload": row["optimizer_offload"],
        "activation_offload": row["activation_offload"],
        "rank_order": row["rank_order"],
        "sharding": "domain" if row["shard_ranks"] else "everywhere",
    }


# --- what a profile prices -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reference:
    """The reference step on one machine."""

    spec: Spec
    machine: PricedMachine

    def priced_row(self, dice: Dice) -> Row | None:
        """Draw a row that the profile can price."""
        (pool,) = self.spec.cluster.pools
        row = measured_row(dice, _reference_job(self.spec), nodes=pool.nodes)
        if row is None or isinstance(self.machine.prices.curves, Formulas):
            return row
        try:
            self._figures(row)
        except OutsideProfileError:
            return None
        return row

    def figures(self, asked: Sequence[Row]) -> dict[str, list[Any]]:
        """Price rows one by one; costs of equal degrees are kept."""
        each = [self._figures(row) for row in asked]
        named = dict.fromkeys(name for one in each for name in one)
        return {name: [one.get(name, 0.0) for one in each] for name in named}

    def _figures(self, row: Row) -> dict[str, Any]:
        decision = _decision(row)
        degrees = degrees_of(decision, ranks_per_node=self.machine.ranks_per_node)
        costs = CandidateCosts(work=workload_of(self.spec), degrees=degrees, machine=self.machine)
        predicted = predict(costs, decision)
        options = sorted(set(stage_options_of(decision)), key=lambda option: option.name)
        problem = layout_problem(
            costs,
            options=options,
            capabilities=programs(self.spec.emit).launchable(
                model=self.spec.model, precision=self.spec.goal.precision
            ),
            uniform_chunks=False,
        )
        return {
            "step_s": predicted.step_time_s,
            "communication_s": predicted.communication_s,
            "inter_node_bytes": predicted.inter_node_bytes,
            **{f"{part}_s": 0.0 for part in REFERENCE_PARTS},
            **{f"{part}_s": value for part, value in predicted.breakdown_s.items()},
            "peak_bytes": list(predicted.peak_memory_bytes),
            "activations_bytes": list(predicted.activation_bytes),
            "weights_bytes": sum(stage.parameter_bytes for stage in predicted.stages),
            "gradients_bytes": sum(stage.gradient_bytes for stage in predicted.stages),
            "optimizer_bytes": sum(stage.optimizer_bytes for stage in predicted.stages),
            "chunk_tokens": [stage.max_chunk_tokens for stage in predicted.stages],
            "solver_layers_s": float(problem.time_s_RO.sum()),
            "solver_ends_s": float(problem.fixed_time_s_S.sum()),
            "solver_saved_bytes": int(problem.saved_bytes_RO.sum()),
            "solver_working_bytes": int(problem.transient_bytes_RO.sum()),
            "solver_fixed_bytes": int(problem.fixed_bytes_S.sum()),
            "solver_static_bytes": int(problem.static_bytes_R.sum()),
        }


def _reference_job(spec: Spec) -> Job:
    model, moe = spec.model, spec.model.moe
    return Job(
        devices=spec.num_devices,
        layers=model.num_layers,
        heads=model.attention.num_kv_heads,
        experts=0 if moe is None else moe.num_experts,
        modules=(),
        batch=spec.goal.global_batch_size,
    )


@functools.cache
def _reference(name: str) -> _Reference:
    if name == FORMULAS:
        spec = _read(FORMULA_SPEC, **FORMULA_MODEL)
        return _Reference(spec=spec, machine=_formula_machine(spec))
    folder, stored, _ = REFERENCE[name]
    spec = read_spec(EXAMPLES / folder / "spec.yaml")
    (pool,) = spec.cluster.pools
    profile = read_profile(EXAMPLES / "profiles" / stored)
    return _Reference(spec=spec, machine=api.machine_of(pool, profile))


def _formula_machine(spec: Spec) -> PricedMachine:
    (pool,) = spec.cluster.pools
    return PricedMachine(
        num_devices=spec.num_devices,
        memory_limit_bytes=60 * 2**30,
        prices=ProfilePrices(curves=Formulas(_formula_s)),
        residual=Residual(
            engine="reference",
            release="",
            device_kind="cuda",
            computation=1.1,
            communication=0.8,
            band_ratio=0.1,
            origin="made up",
            num_runs=1,
        ),
        ranks_per_node=pool.devices_per_node,
        cores_per_rank=0.5,
    )


def _formula_s(case: Case) -> float:
    axes = {name: np.array([float(size)]) for name, size in case.axes.items()}
    needed = work(
        case.operation, kind=case.kind, dtype=case.dtype, direction=case.direction, axes=axes
    )
    flop, moved = float(needed.flop[0]), float(needed.bytes[0])
    if case.operation == "rendezvous":
        return 0.02 * case.axes["work_us"] * 1e-6
    if case.operation == "collective":
        return 20e-6 * max(1, case.axes["ranks"] - 1) + moved / 40e9
    return 5e-6 + flop / 300e12 + moved / 2e12


# --- what serves -----------------------------------------------------------------------------


def _serving(path: str, engine: str) -> Tree:
    with tempfile.TemporaryDirectory() as folder:
        spec = _serving_spec(path, engine, Path(folder))
        sites = tuple(site_of_server(pool, ()) for pool in spec.cluster.pools)
        question = build_serve_problem(spec, sites, SearchSettings(clock=_stopped))
    kept = {_words(option): "kept" for option in question.options.options}
    found = {"weighed": _serving_table(_weighed(question), question, kept)}
    for mode in ("shared_device", "prefill_offload", "attention_expert"):
        variants = load_mode(mode).variants(question) if mode in spec.goal.modes else ()
        for number, variant in enumerate(variants):
            found[f"{mode}-{number}"] = _serving_table(variant.options.options, variant, {})
    return found | {
        "illegal_by": dict(sorted(question.options.illegal_by.items())),
        "beaten": question.options.beaten,
        "slowest_ttft_s": question.options.slowest_ttft_s,
        "slowest_tpot_s": question.options.slowest_tpot_s,
        "demand": {
            "rate_per_s": question.demand.rate_per_s,
            "input_tokens": question.demand.input_tokens,
            "output_tokens": question.demand.output_tokens,
            "held_tokens": question.demand.held_tokens,
            "past_tokens": question.demand.past_tokens,
        },
    }


def _serving_spec(path: str, engine: str, folder: Path) -> ServeSpec:
    file = EXAMPLES / path / "spec.yaml"
    file = file if file.is_file() else EXAMPLES / f"{path}.yaml"
    if not engine:
        return read_serve_spec(file)
    raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    raw["model"] = str((file.parent / raw["model"]).resolve())
    raw["goal"]["engine"] = {"name": engine}
    raw["emit"] = [engine]
    changed = folder / "spec.yaml"
    changed.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return read_serve_spec(changed)


def _weighed(question: ServeProblem) -> list[Option]:
    """Every way in every role, those that the release refuses or another beats too."""
    spec, seen = question.spec, list[Option]()

    def noted(option: Option) -> str:
        seen.append(option)
        return ""

    for serving_pool in question.serving_pools:
        choices = build_choices(spec, (serving_pool,), demand=question.demand)
        price_options(
            (serving_pool,),
            decoder=question.decoder,
            formats=question.formats,
            traits=release_on(spec.goal, serving_pool.pool).traits,
            demand=question.demand,
            roles=(Role.AGGREGATED, Role.PREFILL, Role.DECODE),
            choices=dataclasses.replace(
                choices, copies=dataclasses.replace(choices.copies, loads=question.loads)
            ),
            refuse=noted,
        )
    return seen


def _serving_row(option: Option) -> Row:
    degrees, own = option.degrees, option.iteration
    return {
        "role": option.role.value,
        "pool": option.serving_pool.pool.name,
        "attention_tp": degrees.attention_tensor,
        "attention_dp": degrees.attention_data,
        "moe_tp": degrees.moe_tensor,
        "ep": degrees.expert,
        "pp": degrees.pipeline,
        "devices": option.devices,
        "a2a_backend": own.a2a_backend.value,
        "draft_tokens": 0 if own.drafting is None else own.drafting.draft_tokens,
        "two_batch_overlap": own.two_batch_overlap,
        "redundant_experts": own.redundant_experts,
        "max_batched_tokens": option.step_tokens,
        "chunked_prefill": option.is_chunked,
        "page_size": option.page_tokens,
        "prefill_share_ratio": option.prefill_share_ratio,
        "max_batch": option.running,
    }


def _words(option: Option) -> str:
    return json.dumps(_serving_row(option))


def _serving_table(
    options: Sequence[Option], question: ServeProblem, kept: Mapping[str, str]
) -> Table:
    ordered = {words: option for option in options for words in (_words(option),)}
    chosen = [ordered[words] for words in sorted(ordered)]
    figures: dict[str, Sequence[Any]] = {
        "rate_per_s": [option.rate_per_s for option in chosen],
        "ttft_s": [option.ttft_s for option in chosen],
        "tpot_s": [option.tpot_s for option in chosen],
        "kv_tokens": [option.kv_tokens for option in chosen],
        "weights_bytes": [instance_weight_bytes(option.iteration) for option in chosen],
        "kv_bytes_per_token": [instance_kv_bytes_per_token(option.iteration) for option in chosen],
        "memory_bytes": [device_memory_bytes(option, question.demand) for option in chosen],
    }
    if kept:
        figures["is_kept"] = [words in kept for words in sorted(ordered)]
    return table([_serving_row(option) for option in chosen], figures)


# --- whole plans -----------------------------------------------------------------------------


def _stopped() -> float:
    """Read a clock that stands still, so that no search ends for want of time."""
    return 0.0


def _checks() -> tuple[str, ...]:
    index = json.loads((EXAMPLES / "checks" / "scenarios.json").read_text(encoding="utf-8"))
    return tuple(index["names"])


def _write_plan(spec: Path, folder: str) -> None:
    api.write(folder, api.plan(spec, clock=_stopped, time_limit_s=LONGEST_S))


def _check(name: str) -> Tree:
    with tempfile.TemporaryDirectory() as folder:
        _write_plan(EXAMPLES / "checks" / name / "spec.yaml", folder)
        plan = json.loads((Path(folder) / "plan.json").read_text(encoding="utf-8"))
        launch = Path(folder) / "launch"
        return {
            "plan": _kept(plan),
            "launch": {
                path.relative_to(launch).as_posix(): _content(path)
                for path in sorted(launch.rglob("*"))
                if path.is_file()
            },
        }


@functools.cache
def _version() -> str:
    return api.version()


def _kept(tree: Tree) -> Tree:
    """Leave out when, where and by which version a tree was made."""
    if isinstance(tree, dict):
        return {name: _kept(one) for name, one in tree.items() if name not in UNTIMELY}
    if isinstance(tree, list):
        return [_kept(one) for one in tree]
    if isinstance(tree, str):
        return tree.replace(str(CHECKOUT), "CHECKOUT").replace(_version(), "VERSION")
    return tree


def _content(path: Path) -> Tree:
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False).tolist()
    text = path.read_text(encoding="utf-8")
    return _kept(json.loads(text) if path.suffix == ".json" else text.split("\n"))


# --- launch files of today -------------------------------------------------------------------


def _estimate(path: str, launch: str) -> Tree:
    spec = EXAMPLES / path / "spec.yaml"
    kind = yaml.safe_load(spec.read_text(encoding="utf-8"))["goal"]["kind"]
    ask = api.estimate if kind == "train" else api.estimate_serving
    with tempfile.TemporaryDirectory() as folder:
        file = spec.parent / launch
        if not file.is_file():
            _write_plan(spec, folder)
            file = Path(folder) / launch
        found = json.loads(ask(spec, launch=str(file)).model_dump_json())
        return _kept(json.loads(json.dumps(found).replace(str(file), file.name)))
