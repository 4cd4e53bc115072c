"""Accuracy of predicted fits: trials of the reference step near a limit on its memory.

    python tests/benchmarks/fit_or_not.py TRIALS.jsonl

A file holds random models, layouts of one or two ranks, recomputation and precisions; the limit of
a trial is its predicted peak times a factor drawn log-uniformly from 0.8 to 1.25, so that half of
the trials are predicted to fit. The kernel enforced the limit (profilers/steps/limit.py), trials
were classified as by `moetune verify`, and the prediction is today's
(tuner/search/reference/peak.py).

A trial counts as out of memory only if its launch reports it; other failures are counted
separately. Exit code 1: such a failure, a trial that was predicted to fit and did not, or more than
one in ten of the others that did.

Three sets of 120 are in examples/profiles/fit-or-not/: the one that the memory model was corrected
by, and two hold-outs that were drawn and run afterwards, the first right away (seed 20261120), the
second by a later model (20261123). Those of examples/profiles/epyc-lora/ train adapters.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from profilers.records import Record
from profilers.steps.config import StepConfig
from tests.benchmarks.bars import parse, say
from tuner.config.train import TrainDecision
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.costs.residuals import residual_for
from tuner.prices.profile import ProfilePrices
from tuner.search.reference.decisions import RecomputeOption, decision
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.peak import peak_bytes
from tuner.spec.model import Attention, ModelSpec, Moe
from tuner.spec.tune import Adapters
from tuner.units import format_ratio

MOST_MISSED_RATIO = 0.10


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
    text = file.read_text(encoding="utf-8")
    rows = [Row.model_validate_json(line) for line in text.splitlines()]
    return [
        row.model_copy(
            update={"predicted_bytes": predicted_peak(*workload_and_decision(row.config))}
        )
        for row in rows
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a requirement is missed."""
    rows = kept(parse(__doc__, {"file": Path}, arguments).file)
    say(*lines(rows))
    return int(not is_as_expected(rows))


if __name__ == "__main__":
    sys.exit(main())
