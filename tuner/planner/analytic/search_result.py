"""What a search found in the plan's words: decisions, certificate, runner-ups, Pareto front.

The certificate speaks of the closed form of a step (tuner/costs/analytic/step.py). Its space counts
decisions without their layouts: every layout of a decision is bounded by `least_s`.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.costs.analytic.memory import assemble_memory
from tuner.costs.analytic.prices import MemoryPrice, StepPrice
from tuner.costs.analytic.shapes import Stages, Strategies, number, taken
from tuner.plan import Certificate, Space
from tuner.planner.analytic.axes import Recomputed
from tuner.planner.analytic.candidate_prices import TimePiece, assembled, batch_of, time_pieces
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.incumbents import Found, Search
from tuner.planner.analytic.layouts import layers_of_stages, stages_of
from tuner.planner.analytic.memory import taken_bytes, unit_memory
from tuner.planner.analytic.options import Ways
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.ties import NO_TIES, Ties
from tuner.units import format_ratio, format_s

PROVEN_GAP_RATIO = 1e-6
"""Largest relative gap that still counts as proven optimal."""

CAUSES = ("bubble_s", "tensor_s", "context_s", "expert_s", "recompute_s", "host_s", "once_s")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Detail:
    """One decision priced stage by stage; every array has one column."""

    strategies: Strategies
    stages: Stages
    step: StepPrice
    memory: MemoryPrice
    piece: TimePiece | None = None
    """What its time was priced from; None where no other price of it is asked for."""


def decision_of(search: Search, index: int) -> dict[str, Any]:
    """Name what the found row of that rank decides, in the fields of `TrainDecision`."""
    found = _found(search)
    one = found.candidates.taken(np.array([index]))
    return named(search.question, search.ways, one, stage_layers(search, index))


def named(
    question: Question, ways: Ways, candidate: Candidates, layers: tuple[int, ...]
) -> dict[str, Any]:
    """Name what one candidate in a layout decides, in the fields of `TrainDecision`."""
    rows = {name: int(column[0]) for name, column in candidate.rows.items()}
    chosen = {axis: ways.choices[axis][column[0]] for axis, column in candidate.ways.items()}
    again = chosen.pop("recompute")
    chunks = int(chosen.pop("chunks"))
    copies = rows["copies"] if chosen.pop("sharding") == "domain" else 1
    assert isinstance(again, Recomputed)
    ranks = rows["tensor"] * rows["context"] * rows["data"]
    is_part = 0.0 < again.share < 1.0
    return {
        "tensor_model_parallel_size": rows["tensor"],
        "pipeline_model_parallel_size": rows["pipeline"],
        "virtual_pipeline_model_parallel_size": rows["virtual_pipeline"],
        "context_parallel_size": rows["context"],
        "data_parallel_size": rows["data"],
        "expert_model_parallel_size": rows["expert"],
        "expert_tensor_parallel_size": rows["expert_tensor"],
        "expert_data_parallel_size": ranks // (rows["expert"] * rows["expert_tensor"]),
        "sequence_parallel": rows["tensor"] > 1 and question.capabilities.sequence_parallel,
        "micro_batch_size": rows["micro_batch"],
        "recompute": again.level,
        "recompute_modules": tuple(sorted(again.modules)),
        "recompute_num_layers": math.ceil(again.share * max(layers)) if is_part else None,
        "stage_recompute": (again.level,) * len(layers),
        "chunks": (chunks,) * len(layers),
        "pipeline_layout": layers,
        "mtp_num_layers": int(question.shape.mtp_layers),
        "shard_ranks": None if copies == 1 else rows["data"] * rows["context"] // copies,
        "fp8_recipe": "" if question.precision in ("bf16", "fp32") else question.precision,
        "gradient_bytes": int(question.gradient_bytes),
        **chosen,
    }


def stage_layers(search: Search, index: int) -> tuple[int, ...]:
    """Layers of every stage of a found row, in execution order."""
    found = _found(search)
    rows = found.candidates.rows
    layers_PC = found.layers_PC[: rows["pipeline"][index], index : index + 1]
    virtual = int(rows["virtual_pipeline"][index])
    return tuple(int(n) for n in layers_of_stages(layers_PC, virtual=virtual)[:, 0])


def detail_of(search: Search, index: int) -> Detail:
    """Price a found row stage by stage."""
    found, question = _found(search), search.question
    one = found.candidates.taken(np.array([index]))
    layers_SC = np.array(stage_layers(search, index))[:, None]
    return detailed(search, one, stages_of(question.model, layers_SC))


def detailed(search: Search, candidate: Candidates, stages: Stages) -> Detail:
    """Price one candidate in a given layout."""
    question = search.question
    batch = batch_of(question, search.ways, candidate)
    piece = next(time_pieces(search.ways, batch))
    units, unit_of = unit_memory(question, batch.strategies, candidate)
    strategies = taken(batch.strategies, np.array([0]))
    return Detail(
        piece=piece,
        strategies=strategies,
        stages=stages,
        step=assembled(question, piece, stages),
        memory=assemble_memory(taken_bytes(units, unit_of), strategies, stages),
    )


def certificate_of(
    search: Search,
    *,
    ties: Ties = NO_TIES,
    objective_s: float | None = None,
    decision_s: float | None = None,
    method: str = "bounds",
) -> Certificate:
    """State what the search proves.

    Args:
        search: what was searched.
        ties: of the plan's decision.
        objective_s: of the fastest row where it was played; None: its closed form.
        decision_s: of the plan's decision where that is not the fastest.
        method: name of how the search was made.
    """
    counts, found = search.counts, search.found
    objective = None if found is None else objective_s or float(found.step_s[0])
    gap = 0.0 if objective is None else max(0.0, 1.0 - search.bound_s / objective)
    is_proven = gap <= PROVEN_GAP_RATIO if found is not None else not counts.open
    if found is None:
        status, gap = ("infeasible", 0.0) if is_proven else ("unknown", 1.0)
    else:
        status = "optimal" if is_proven else "feasible"
    return Certificate(
        status=status,
        objective=objective,
        bound=search.bound_s if math.isfinite(search.bound_s) else None,
        gap_ratio=gap,
        decision_gap_ratio=(
            None if decision_s is None else max(0.0, 1.0 - search.bound_s / decision_s)
        ),
        space=Space(
            priced=counts.priced,
            bounded=counts.bounded,
            illegal=counts.num_illegal,
            open=counts.open,
        ),
        within_band=ties.count,
        within_band_is_least=ties.is_least,
        solve_s=search.solve_s,
        method=method,
    )


def why_lost(search: Search, index: int) -> str:
    """Name the cause that makes a runner-up slower than the best."""
    best, other = detail_of(search, 0).step, detail_of(search, index).step
    best_s, other_s = number(best.step_s), number(other.step_s)
    slower_s = other_s - best_s
    if slower_s <= best_s * 1e-9:
        return "nothing: the model predicts the same time"
    extra = {name: number(getattr(other, name)) - number(getattr(best, name)) for name in CAUSES}
    extra["compute_s"] = slower_s - sum(extra.values())
    name = max(extra, key=lambda cause: extra[cause])
    ratio = format_ratio(slower_s / best_s)
    cause = name.removesuffix("_s")
    return f"{format_s(slower_s)} ({ratio}) slower, of it {format_s(extra[name])} in {cause}"


def pareto_front(search: Search) -> tuple[int, ...]:
    """Found rows that no other beats in both step time and memory, fastest first.

    All use the same devices, so the cost of a step is its time at the pool's price.
    """
    if search.found is None:
        return ()
    least = np.minimum.accumulate(search.found.peak_bytes)
    before = np.concatenate(([np.inf], least[:-1]))
    return tuple(int(index) for index in np.flatnonzero(search.found.peak_bytes < before))


def cost_of_step(search: Search, index: int) -> float | None:
    """Price of one step in the user's currency, None without a price."""
    question = search.question
    if question.price_per_device_hour is None:
        return None
    hours = float(_found(search).step_s[index]) / 3600.0
    return hours * question.num_devices * question.price_per_device_hour


def _found(search: Search) -> Found:
    if search.found is None:
        raise ValueError("the search found nothing that fits")
    return search.found
