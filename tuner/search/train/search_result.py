"""The result of a search: its solutions, what it proves, and both in the terms of a plan.

The certificate is about the closed form of a step (tuner/costs/train/step.py). Its space counts
decisions without their layouts: `candidate_bound_s` bounds every layout of a decision.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.config.columns import Strategies
from tuner.config.knobs import FIELD_OF_DEGREE
from tuner.config.microbatches import spanned_replicas
from tuner.config.shapes import Stages, taken
from tuner.costs.train.attention import mean_pairs
from tuner.costs.train.memory import assemble_memory
from tuner.costs.train.prices import MemoryPrice, StepPrice
from tuner.plans.train import Certificate
from tuner.search.driver import Proof
from tuner.search.layout_groups import Layout
from tuner.search.train.candidate_prices import (
    TimePiece,
    assemble_step,
    price_batch,
    time_pieces,
)
from tuner.search.train.candidates import Candidates
from tuner.search.train.degrees import Degrees
from tuner.search.train.layouts import layers_of_stages, to_stages
from tuner.search.train.memory import take_units, unit_memory
from tuner.search.train.options import OptionSpace, RecomputeChoice
from tuner.search.train.problem import TrainProblem
from tuner.simulate.rows import RowCosts

LAYOUT: Final = ("tensor", "context", "pipeline", "data", "expert", "expert_tensor")
"""Columns of a row that make its layout, as tuner/search/layout_groups.py lists them."""

MOST_KEPT = 65_536
"""Rows that a search keeps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solutions:
    """Rows that fit in memory, each at its best option, best first."""

    candidates: Candidates
    step_s: Floats
    peak_bytes: Floats
    layers_PC: Ints
    """Layers of every device of the pipeline."""

    def concat_best(self, added: "Solutions") -> "Solutions":
        """Concatenate, each row at its better option, best first, up to `MOST_KEPT` rows."""
        both = self.concat(added)
        order = np.argsort(both.step_s, kind="stable")
        _, row = both.candidates.same(FIELD_OF_DEGREE)
        _, first = np.unique(row[order], return_index=True)
        return both.taken(order[np.sort(first)][:MOST_KEPT])

    def concat(self, added: "Solutions") -> "Solutions":
        """Concatenate as they are."""
        return Solutions(
            candidates=self.candidates.concat(added.candidates),
            step_s=np.concatenate((self.step_s, added.step_s)),
            peak_bytes=np.concatenate((self.peak_bytes, added.peak_bytes)),
            layers_PC=_side_by_side(self.layers_PC, added.layers_PC),
        )

    def taken(self, chosen: Ints) -> "Solutions":
        """Select some of them."""
        return Solutions(
            candidates=self.candidates.taken(chosen),
            step_s=self.step_s[chosen],
            peak_bytes=self.peak_bytes[chosen],
            layers_PC=self.layers_PC[:, chosen],
        )

    def layouts(self) -> Iterator[Layout]:
        """The layout of each, best first."""
        rows = self.candidates.rows
        columns = [rows[name] for name in LAYOUT]
        return (tuple(int(column[at]) for column in columns) for at in range(len(self)))

    def __len__(self) -> int:
        return len(self.step_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchOutcome:
    """The solutions of a search and what it proves."""

    problem: TrainProblem
    options: OptionSpace
    degrees: Degrees
    solutions: Solutions | None
    proof: Proof


def _side_by_side(left: Ints, right: Ints) -> Ints:
    """Columns of both; the shorter ones are filled with zeros."""
    rows = max(len(left), len(right))
    return np.concatenate(
        [np.pad(part, ((0, rows - len(part)), (0, 0))) for part in (left, right)], axis=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """Other combinations of degrees, each at its best, that may be as fast."""

    count: int = 0
    is_least: bool = False
    """There may be more that were left out as too slow to be listed."""


NO_TIES = Ties()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Detail:
    """One decision priced stage by stage; every array has one candidate."""

    strategies: Strategies
    stages: Stages
    step: StepPrice
    memory: MemoryPrice
    piece: TimePiece | None = None
    """Inputs of its time; None where it is not priced again."""
    rows: RowCosts | None = None
    """Costs of the rows of a step; None where all are alike."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedRow:
    """A row of a search, priced stage by stage, with its simulated schedule."""

    row: Solutions
    """Row of the decision, a single one."""
    detail: Detail
    simulated_s: float

    @property
    def step_s(self) -> float:
        """Seconds of its step, the larger of closed form and simulation."""
        return max(float(self.row.step_s[0]), self.simulated_s)


def solution_fields(search: SearchOutcome, index: int) -> dict[str, Any]:
    """Return what the row of that rank decides, as fields of `TrainDecision`."""
    solutions = _require_solutions(search)
    candidate = solutions.candidates.taken(np.array([index]))
    return decision_fields(search.problem, search.options, candidate, stage_layers(search, index))


def decision_fields(
    problem: TrainProblem, options: OptionSpace, candidate: Candidates, layers: tuple[int, ...]
) -> dict[str, Any]:
    """Return what one candidate in a layout decides, as fields of `TrainDecision`."""
    rows = {name: int(column[0]) for name, column in candidate.rows.items()}
    chosen = {axis: options.choices[axis][column[0]] for axis, column in candidate.options.items()}
    recompute = chosen.pop("recompute")
    chunks = int(chosen.pop("chunks"))
    copies = rows["copies"] if chosen.pop("sharding") == "domain" else 1
    assert isinstance(recompute, RecomputeChoice)
    ranks = rows["tensor"] * rows["context"] * rows["data"]
    is_part = 0.0 < recompute.share < 1.0
    return {
        **{field: rows[column] for column, field in FIELD_OF_DEGREE.items()},
        "expert_data_parallel_size": ranks // (rows["expert"] * rows["expert_tensor"]),
        "sequence_parallel": rows["tensor"] > 1 and problem.capabilities.sequence_parallel,
        "recompute": recompute.level,
        "recompute_modules": tuple(sorted(recompute.modules)),
        "recompute_num_layers": math.ceil(recompute.share * max(layers)) if is_part else None,
        "stage_recompute": (recompute.level,) * len(layers),
        "chunks": (chunks,) * len(layers),
        "pipeline_layout": layers,
        "mtp_num_layers": int(problem.shape.mtp_layers),
        "shard_ranks": None if copies == 1 else rows["data"] * rows["context"] // copies,
        "fp8_recipe": "" if problem.precision in ("bf16", "fp32") else problem.precision,
        "gradient_bytes": int(problem.gradient_bytes),
        **chosen,
    }


def stage_layers(search: SearchOutcome, index: int) -> tuple[int, ...]:
    """Layers of every stage of a row, in execution order."""
    solutions = _require_solutions(search)
    rows = solutions.candidates.rows
    layers_PC = solutions.layers_PC[: rows["pipeline"][index], index : index + 1]
    virtual = int(rows["virtual_pipeline"][index])
    return tuple(int(n) for n in layers_of_stages(layers_PC, virtual=virtual)[:, 0])


def price_solution(search: SearchOutcome, index: int) -> Detail:
    """Price a row stage by stage."""
    solutions, problem = _require_solutions(search), search.problem
    candidate = solutions.candidates.taken(np.array([index]))
    layers_SC = np.array(stage_layers(search, index))[:, None]
    return price_in_layout(search, candidate, to_stages(problem.model, layers_SC))


def price_in_layout(search: SearchOutcome, candidate: Candidates, stages: Stages) -> Detail:
    """Price one candidate in a given layout."""
    problem = search.problem
    batch = price_batch(problem, search.options, candidate)
    piece = next(time_pieces(search.options, batch))
    units, unit_of = unit_memory(problem, batch.strategies, candidate)
    strategies = taken(batch.strategies, np.array([0]))
    step = assemble_step(problem, piece, stages)
    return Detail(
        piece=piece,
        strategies=strategies,
        stages=stages,
        step=step,
        rows=_row_costs(search, candidate, stages, step),
        memory=assemble_memory(take_units(units, unit_of), strategies, stages),
    )


def _row_costs(
    search: SearchOutcome, candidate: Candidates, stages: Stages, step: StepPrice
) -> RowCosts | None:
    """Price the rows of a candidate, whose seconds are linear in the pairs of attention."""
    problem = search.problem
    if problem.rows is None:
        return None
    doubled = {name: 2.0 * value for name, value in problem.packed.items()}
    batch = price_batch(replace(problem, packed=doubled), search.options, candidate)
    more = assemble_step(problem, next(time_pieces(search.options, batch)), stages)
    mean_s, more_s = (float((s.forward_s_SC + s.backward_s_SC).sum()) for s in (step, more))
    pairs_R = problem.rows.total_R(lambda tokens: np.asarray(mean_pairs(problem.shape, tokens)))
    at = {name: int(column[0]) for name, column in candidate.rows.items()}
    return RowCosts(
        cost_R=1.0 + (more_s / mean_s - 1.0) * (pairs_R / pairs_R.mean() - 1.0),
        data=at["data"],
        micro_batch=at["micro_batch"],
        spanned=int(
            spanned_replicas(
                ranks=at["tensor"] * at["context"], group=at["expert"] * at["expert_tensor"]
            )
        ),
    )


def to_certificate(
    search: SearchOutcome,
    *,
    ties: Ties = NO_TIES,
    objective_s: float | None = None,
    decision_s: float | None = None,
) -> Certificate:
    """State what the search proves.

    Args:
        search: its outcome.
        ties: of the plan's decision.
        objective_s: of the fastest row where it was simulated; None: its closed form.
        decision_s: of the plan's decision where that is not the fastest.
    """
    if search.solutions is not None:
        objective_s = objective_s or float(search.solutions.step_s[0])
    return search.proof.certify(
        objective_s,
        decision_s=decision_s,
        within_band=ties.count,
        within_band_is_least=ties.is_least,
        method="bounds",
    )


def pareto_front(search: SearchOutcome) -> tuple[int, ...]:
    """Rows that no other dominates in step time and memory, fastest first.

    All use the same devices, so the cost of a step is its time at the pool's price.
    """
    if search.solutions is None:
        return ()
    least = np.minimum.accumulate(search.solutions.peak_bytes)
    before = np.concatenate(([np.inf], least[:-1]))
    return tuple(int(index) for index in np.flatnonzero(search.solutions.peak_bytes < before))


def cost_of_step(search: SearchOutcome, index: int) -> float | None:
    """Price of one step in the user's currency, None without a price."""
    problem = search.problem
    if problem.price_per_device_hour is None:
        return None
    hours = float(_require_solutions(search).step_s[index]) / 3600.0
    return hours * problem.num_devices * problem.price_per_device_hour


def _require_solutions(search: SearchOutcome) -> Solutions:
    if search.solutions is None:
        raise ValueError("the search found nothing that fits")
    return search.solutions
