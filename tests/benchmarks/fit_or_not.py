"""Accuracy of predicted fits: trials of the reference step near a limit on its memory.

    python tests/benchmarks/fit_or_not.py TRIALS.jsonl --trials 120 [--lora]

Random models, layouts of one or two ranks, recomputation and precisions; the limit of a trial is
its predicted peak times a factor drawn log-uniformly from 0.8 to 1.25, so that half of the trials
are predicted to fit. The kernel enforces the limit (profilers/steps/limit.py), trials are
classified as by `moetune verify`, and the prediction is the planner's
(tuner/search/reference/peak.py). Ranks are forked from this process, which has loaded PyTorch and
runs no thread; their memory is counted from their start.

A trial counts as out of memory only if its launch reports it; other failures are counted
separately. Exit code 1: such a failure, a trial that was predicted to fit and did not, or more than
one in ten of the others that did.

Trials are appended to TRIALS.jsonl; existing ones are not run again, and are compared with today's
prediction at their limit. A trial takes 2 to 20 s and at most 2 x 1 GB. Three sets of 120 are in
examples/profiles/fit-or-not/: the one that the memory model was corrected by, and two hold-outs
that were drawn and run afterwards, the first right away (seed 20261120), the second by a later
model (20261123). `--trials 0` evaluates a file without running any. With `--lora` jobs train
adapters of random ranks and targets on layouts that have them (examples/profiles/epyc-lora/).
"""

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")

from profilers.local_ranks import PARENT, RENDEZVOUS, STORE_NAME
from profilers.records import Record
from profilers.steps.__main__ import main as run_step
from profilers.steps.config import Adapters as StepAdapters
from profilers.steps.config import (
    LayerKind,
    Parallelism,
    Recompute,
    Stage,
    StepConfig,
    StepReport,
    TokenRouting,
)
from profilers.steps.run import refusal
from tuner.config.train import TrainDecision
from tuner.costs.prices.profile import ProfilePrices
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.costs.residuals import residual_for
from tuner.engines.reference.step_config import model_shape
from tuner.search.reference.decisions import decision
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.options import RecomputeOption
from tuner.search.reference.peak import peak_bytes
from tuner.spec.model import Attention, ModelSpec, Moe
from tuner.spec.tune import Adapters, adapted
from tuner.units import format_ratio
from tuner.verify.launcher import CONFIG_NAME, LOG_NAME, REPORT_NAME, exit_result, log_tail

SEED = 20_240_607
LOWEST, HIGHEST = 0.8, 1.25
SMALLEST_BYTES, LARGEST_BYTES = 300e6, 1.0e9
MOST_FLOP = 1.5e11
"""FLOPs of a step: 6 for every weight that a token uses."""
DEADLINE_S = 400.0
MOST_MISSED_RATIO = 0.10

LAYOUTS: Sequence[Mapping[str, int]] = (
    {},
    {},
    {"data": 2},
    {"data": 2, "zero_stage": 1},
    {"data": 2, "zero_stage": 3},
    {"data": 2, "expert": 2},
    {"data": 2, "expert": 2, "zero_stage": 1},
    {"data": 2, "expert": 2, "zero_stage": 3},
    {"tensor": 2},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "expert": 2, "zero_stage": 1},
    {"pipeline": 2},
    {"pipeline": 2, "zero_stage": 1},
    {"pipeline": 2, "virtual_pipeline": 2},
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and its predicted memory."""

    config: StepConfig
    predicted_bytes: int


class Row(Record):
    """One trial."""

    number: int
    predicted_bytes: int
    limit_bytes: int
    status: str
    reason: str
    measured_bytes: int | None
    """Of the fullest rank; absent where the trial did not run to its end."""
    wall_s: float
    config: StepConfig

    @property
    def is_predicted_to_fit(self) -> bool:
        """Whether the plan predicts a fit."""
        return self.predicted_bytes <= self.limit_bytes


def drawn(rng: np.random.Generator) -> Case:
    """Draw jobs until one is legal and of the right size."""
    while True:
        case = _tried(rng)
        if case is not None and SMALLEST_BYTES <= case.predicted_bytes <= LARGEST_BYTES:
            return case


def _tried(rng: np.random.Generator) -> Case | None:
    def one(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    degrees = StepDegrees(
        **{
            "tensor": 1,
            "pipeline": 1,
            "virtual_pipeline": 1,
            "data": 1,
            "expert": 1,
            "zero_stage": 0,
            "micro_batch_size": one(1, 2, 4),
            **one(*LAYOUTS),
        }
    )
    hidden, experts = one(256, 384, 512, 768, 1024), one(4, 8, 16)
    heads = hidden // 64
    layers = int(rng.integers(2, 9))
    dense_layers = one(0, 0, 1, layers // 2)
    width = one(hidden // 2, hidden, 2 * hidden, 3 * hidden)
    model = ModelSpec(
        name="drawn",
        architecture="drawn",
        hidden_size=hidden,
        num_layers=layers,
        vocab_size=one(512, 4096, 16384, 32000),
        tie_word_embeddings=bool(one(0, 0, 1)),
        norm_epsilon=1e-5,
        rope_theta=1e4,
        max_position=4096,
        attention=Attention(
            kind="gqa",
            num_heads=heads,
            num_kv_heads=one(*(count for count in (2, 4, heads) if heads % count == 0)),
            head_dim=64,
        ),
        dense_ffn_size=4 * hidden,
        layers=(LayerKind.DENSE,) * dense_layers + (LayerKind.MOE,) * (layers - dense_layers),
        windowed=(False,) * layers,
        moe=Moe(
            num_experts=experts,
            top_k=int(rng.integers(1, 5)),
            expert_ffn_size=width,
            shared_ffn_size=one(0, 0, width),
        ),
    )
    option = one(
        RecomputeOption(recompute=Recompute.NONE, chunks=1),
        RecomputeOption(recompute=Recompute.NONE, chunks=1),
        RecomputeOption(recompute=Recompute.SELECTIVE, chunks=one(1, 2, 4)),
        RecomputeOption(recompute=Recompute.FULL, chunks=one(1, 2, 4)),
    )
    loads: tuple[tuple[float, ...], ...] = ()
    if one(False, True):
        drawn_LE = rng.dirichlet((4.0,) * experts, size=model.num_moe_layers)
        loads = tuple(tuple(row) for row in drawn_LE.tolist())
    work = Workload(
        model=model,
        sequence_length=one(256, 512, 1024, 2048),
        global_batch_size=degrees.micro_batch_size * degrees.data * one(1, 2, 4),
        precision=one("bf16", "bf16", "fp32"),
        load_ratio=loads,
    )
    even = layers // degrees.num_stages
    stages = [even + (stage < layers % degrees.num_stages) for stage in range(degrees.num_stages)]
    if not even or _flop(work) > MOST_FLOP:
        return None
    try:
        config = _config(work, degrees, option, stages=stages)
    except ValueError:
        return None
    if refusal(config) is not None:
        return None
    train_decision = decision(degrees, layers=tuple(stages), options=(option,) * degrees.num_stages)
    return Case(config=config, predicted_bytes=predicted_peak(work, degrees, train_decision))


def drawn_with_adapters(rng: np.random.Generator) -> Case:
    """Draw jobs until one can train adapters and is of the right size."""
    while True:
        case = _adapted(drawn(rng), rng)
        if case is not None and case.predicted_bytes >= SMALLEST_BYTES / 2:
            return case


def _adapted(case: Case, rng: np.random.Generator) -> Case | None:
    config, degrees = case.config, case.config.parallelism
    if degrees.tensor > 1 or degrees.pipeline > 1:
        return None
    groups: Sequence[Sequence[str]] = (
        ("attention",),
        ("attention", "mlp"),
        ("mlp",),
        ("experts",),
        ("q_proj", "v_proj"),
    )
    work, *_ = workload_and_decision(config)
    own = Adapters(
        method="lora",
        rank=int(rng.choice((4, 8, 16, 32, 64))),
        targets=tuple(groups[int(rng.integers(len(groups)))]),
    )
    config = config.model_copy(
        update={
            "adapters": StepAdapters.model_validate(
                {
                    "rank": own.rank,
                    "alpha": own.effective_alpha,
                    "targets": adapted(own, work.model),
                }
            )
        }
    )
    return Case(config=config, predicted_bytes=predicted_peak(*workload_and_decision(config)))


def workload_and_decision(config: StepConfig) -> tuple[Workload, StepDegrees, TrainDecision]:
    """Return a configuration as workload, degrees and decision."""
    shape, cut = config.model, config.parallelism
    model = ModelSpec(
        name="drawn",
        architecture="drawn",
        hidden_size=shape.hidden_size,
        num_layers=len(shape.layers),
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tie_embeddings,
        norm_epsilon=shape.norm_epsilon,
        rope_theta=shape.rope_theta,
        max_position=4096,
        attention=Attention(
            kind="gqa",
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        ),
        dense_ffn_size=shape.dense_ffn_size,
        layers=shape.layers,
        windowed=(False,) * len(shape.layers),
        moe=Moe(
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            expert_ffn_size=shape.moe_ffn_size,
            shared_ffn_size=shape.shared_ffn_size,
        )
        if shape.num_experts
        else None,
    )
    degrees = StepDegrees(
        tensor=cut.tensor,
        pipeline=cut.pipeline,
        virtual_pipeline=cut.virtual_pipeline,
        data=cut.data,
        expert=cut.expert,
        zero_stage=cut.zero_stage,
        micro_batch_size=config.micro_batch_size,
    )
    work = Workload(
        model=model,
        sequence_length=config.sequence_length,
        global_batch_size=config.global_batch_size,
        precision=config.precision,
        load_ratio=config.routing.load_ratio,
        tune=tune_of(config),
    )
    options = [RecomputeOption(recompute=one.recompute, chunks=one.chunks) for one in config.stages]
    layers = tuple(one.num_layers for one in config.stages)
    return work, degrees, decision(degrees, layers=layers, options=options)


def tune_of(config: StepConfig) -> Adapters | None:
    """Return what a configuration trains; None: all weights."""
    own = config.adapters
    if own is None:
        return None
    return Adapters(method="lora", rank=own.rank, alpha=own.alpha, targets=own.targets)


def predicted_peak(work: Workload, degrees: StepDegrees, train_decision: TrainDecision) -> int:
    """Return the highest predicted peak of a rank; times are not used."""
    machine = PricedMachine(
        num_devices=degrees.world,
        memory_limit_bytes=2**62,
        prices=ProfilePrices(curves={}),
        residual=residual_for("reference", device="", device_kind="cpu"),
    )
    costs = CandidateCosts(work=work, degrees=degrees, machine=machine)
    return max(peak_bytes(costs, train_decision, rank=rank) for rank in range(degrees.pipeline))


def _flop(work: Workload) -> float:
    model, moe = work.model, work.model.moe
    assert moe is not None
    weights = model.vocab_size * model.hidden_size + model.num_layers * model.hidden_size * (
        4 * model.hidden_size + 3 * (moe.top_k * moe.expert_ffn_size + moe.shared_ffn_size)
    )
    return 6.0 * weights * work.global_batch_size * work.sequence_length


def _config(
    work: Workload, degrees: StepDegrees, option: RecomputeOption, *, stages: Sequence[int]
) -> StepConfig:
    return StepConfig(
        model=model_shape(work.model),
        parallelism=Parallelism(
            tensor=degrees.tensor,
            pipeline=degrees.pipeline,
            virtual_pipeline=degrees.virtual_pipeline,
            data=degrees.data,
            expert=degrees.expert,
            zero_stage=degrees.zero_stage,
        ),
        stages=tuple(
            Stage(num_layers=layers, recompute=option.recompute, chunks=option.chunks)
            for layers in stages
        ),
        sequence_length=work.sequence_length,
        global_batch_size=work.global_batch_size,
        micro_batch_size=degrees.micro_batch_size,
        precision=work.precision,
        routing=TokenRouting(mode="forced", load_ratio=work.load_ratio, balancing="none"),
        steps=1,
        warmup_steps=0,
        device="cpu",
    )


def trial(number: int, case: Case, *, limit_bytes: int, scratch: Path) -> Row:
    """Run one job under a limit."""
    folder = scratch / str(number)
    folder.mkdir()
    config = case.config.model_copy(update={"memory_limit_bytes": limit_bytes})
    (folder / CONFIG_NAME).write_text(config.model_dump_json(), encoding="utf-8")
    begun_s = time.monotonic()
    exit_code = _run(folder, world=config.parallelism.world)
    ended = exit_result(
        exit_code,
        tail=log_tail(folder / LOG_NAME),
        report_file=folder / REPORT_NAME,
        wall_s=time.monotonic() - begun_s,
    )
    peaks = [one.allocator_peak for one in ended.report.memory] if ended.report else []
    return Row(
        number=number,
        predicted_bytes=case.predicted_bytes,
        limit_bytes=limit_bytes,
        status=ended.status,
        reason=ended.reason,
        measured_bytes=max((peak for peak in peaks if peak is not None), default=None),
        wall_s=ended.wall_s,
        config=config,
    )


def run_job(folder: Path, config: StepConfig) -> StepReport:
    """Run a job in a new folder.

    Raises:
        RuntimeError: it failed.
    """
    folder.mkdir()
    (folder / CONFIG_NAME).write_text(config.model_dump_json(), encoding="utf-8")
    if _run(folder, world=config.parallelism.world):
        raise RuntimeError(f"a trial failed: {log_tail(folder / LOG_NAME)}")
    return StepReport.model_validate_json((folder / REPORT_NAME).read_text(encoding="utf-8"))


def _run(folder: Path, *, world: int) -> int:
    """Run the ranks of a job; the exit code of the first that fails, which ends the others."""
    rendezvous_folder = folder / "ranks"
    rendezvous_folder.mkdir(mode=0o700)
    ranks = {
        _forked(folder, rank=rank, world=world, rendezvous_folder=rendezvous_folder)
        for rank in range(world)
    }
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            return code
    return 0


def _forked(folder: Path, *, rank: int, world: int, rendezvous_folder: Path) -> int:
    """Start a rank as verification does, without loading PyTorch again; return its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if world > 1:
            os.environ |= {
                RENDEZVOUS: str(rendezvous_folder / STORE_NAME),
                PARENT: str(parent),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
            }
        files = [str(folder / CONFIG_NAME), f"--report={folder / REPORT_NAME}"]
        code = run_step([*files, f"--deadline={DEADLINE_S}"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_as_expected(rows: Sequence[Row]) -> bool:
    """Whether all requirements are met."""
    fits = [row for row in rows if row.is_predicted_to_fit]
    others = [row for row in rows if not row.is_predicted_to_fit]
    missed = sum(row.status == "ok" for row in others)
    has_failed = any(row.status not in ("ok", "out_of_memory") for row in rows)
    is_safe = all(row.status != "out_of_memory" for row in fits)
    return is_safe and not has_failed and missed <= MOST_MISSED_RATIO * len(others)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The four counts, other failures, and errors of predicted against used memory."""
    yield f"{'':<24}{'ran':>8}{'no memory':>12}"
    for name, is_fit in (("predicted to fit", True), ("predicted not to fit", False)):
        some = [row for row in rows if row.is_predicted_to_fit is is_fit]
        ran = sum(row.status == "ok" for row in some)
        out = sum(row.status == "out_of_memory" for row in some)
        yield f"{name:<24}{ran:>8}{out:>12}"
    for row in rows:
        if row.status not in ("ok", "out_of_memory"):
            yield f"trial {row.number} failed otherwise: {row.status}: {row.reason}"
    ratios = [row.measured_bytes / row.predicted_bytes for row in rows if row.measured_bytes]
    if ratios:
        low, half, high = np.percentile(ratios, (5, 50, 95))
        yield (
            f"measured / predicted peak of {len(ratios)} that ran: P5 {low:.3f}, P50 {half:.3f},"
            f" P95 {high:.3f}, largest {max(ratios):.3f}"
        )
    others = [row for row in rows if not row.is_predicted_to_fit]
    if others:
        share = format_ratio(sum(row.status == "ok" for row in others) / len(others))
        yield f"of those predicted not to fit, {share} ran"


def kept(file: Path) -> list[Row]:
    """Read the trials of a file, with today's predictions."""
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    rows = [Row.model_validate_json(line) for line in text.splitlines()]
    return [
        row.model_copy(
            update={"predicted_bytes": predicted_peak(*workload_and_decision(row.config))}
        )
        for row in rows
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing trials, print the table; return 1 where a requirement is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="where trials are kept, JSON lines")
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--first", type=int, default=0, help="of the trials to run here")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--lora", action="store_true", help="train adapters")
    parser.add_argument("--factors", type=float, nargs=2, default=(LOWEST, HIGHEST))
    options = parser.parse_args(arguments)
    rows = kept(options.file)
    done = {row.number for row in rows}
    rng = np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        for number in range(options.trials):
            case = drawn_with_adapters(rng) if options.lora else drawn(rng)
            factor = math.exp(rng.uniform(*np.log(options.factors)))
            if number in done or number < options.first:
                continue
            limit_bytes = round(factor * case.predicted_bytes)
            row = trial(number, case, limit_bytes=limit_bytes, scratch=Path(scratch))
            with options.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(json.loads(row.model_dump_json())) + "\n")
            rows.append(row)
    if not rows:
        parser.error(f"{options.file} holds no trials to judge; run some with --trials")
    sys.stdout.write("\n".join(lines(rows)) + "\n")
    return int(not is_as_expected(rows))


if __name__ == "__main__":
    sys.exit(main())
