"""Degrees with a way to run them, as columns, and what the analytic formulas are asked about them.

A candidate is one row of degrees and one choice on every axis of the ways. Many candidates share
what is dear to price: unit costs depend on a few of the columns only, so the distinct combinations
are priced once and gathered (`time_keys`, `memory_keys`).

Letters: C candidates.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.costs.analytic.shapes import Strategies
from tuner.planner.analytic.axes import COLUMN_OF_MODULE, Recomputed
from tuner.planner.analytic.degrees import Table
from tuner.planner.analytic.options import Ways
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.rules import Ints

Floats = npt.NDArray[np.float64]

MOST_CODES: Final = 2**62
"""Combinations of columns that a 64-bit number tells apart."""

DEGREES: Final = (
    *("tensor", "context", "pipeline", "data"),
    *("virtual_pipeline", "micro_batch", "expert", "expert_tensor"),
)
TIME_DEGREES: Final = ("tensor", "context", "expert", "expert_tensor", "micro_batch")
TIME_AXES: Final = ("recompute", "chunks", "dispatcher", "a2a_overlap", "cuda_graph")
MEMORY_DEGREES: Final = (*TIME_DEGREES, "data")
MEMORY_AXES: Final = (
    *("zero_stage", "recompute", "chunks", "dispatcher", "cuda_graph"),
    *("optimizer_offload", "activation_offload", "sharding"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Columns of one length."""

    rows: Table
    """The degrees of degrees.py."""
    ways: Mapping[str, Ints]
    """By axis the index of its choice."""

    def __len__(self) -> int:
        return len(self.rows["tensor"])

    def taken(self, chosen: Ints) -> "Candidates":
        """Keep or repeat some."""
        return Candidates(
            rows={name: column[chosen] for name, column in self.rows.items()},
            ways={name: column[chosen] for name, column in self.ways.items()},
        )

    def joined(self, other: "Candidates") -> "Candidates":
        """Both, one after the other."""
        return Candidates(
            rows={
                name: np.concatenate((column, other.rows[name]))
                for name, column in self.rows.items()
            },
            ways={
                name: np.concatenate((column, other.ways[name]))
                for name, column in self.ways.items()
            },
        )

    def same(self, names: Iterable[str]) -> tuple[Ints, Ints]:
        """One candidate of every combination of the named columns, and which one each has."""
        code, codes = np.zeros(len(self), dtype=np.int64), 1
        for name in names:
            column = self.rows[name] if name in self.rows else self.ways[name]
            size = int(column.max(initial=0)) + 1
            if codes * size > MOST_CODES:
                # Degrees of huge clusters: number the codes that occur, so that none wraps around.
                kinds, code = np.unique(code, return_inverse=True)
                codes = len(kinds)
            code, codes = code * size + column, codes * size
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        return first, inverse


def num_microbatches(question: Question, rows: Table) -> Ints:
    """Micro-batches of one pipeline in one step."""
    found: Ints = question.global_batch_size // (rows["micro_batch"] * rows["data"])
    return found


def strategies_of(question: Question, ways: Ways, candidates: Candidates) -> Strategies:
    """Say candidates in the columns of the formulas."""
    rows = {name: candidates.rows[name].astype(np.float64) for name in DEGREES}
    mean, p99 = _busiest(question, candidates.rows["expert"])
    has_sequence = question.capabilities.sequence_parallel
    return Strategies(
        sequence=float(question.sequence_length),
        num_microbatches=num_microbatches(question, candidates.rows).astype(np.float64),
        sequence_parallel=((rows["tensor"] > 1.0) & has_sequence).astype(np.float64),
        element_bytes=question.element_bytes,
        linear_bytes=question.linear_bytes,
        gradient_bytes=question.gradient_bytes,
        weight_bytes=question.weight_bytes,
        shard_ranks=_shard_ranks(ways, candidates),
        busiest_ratio=mean,
        busiest_ratio_p99=p99,
        **rows,
        **_way_columns(ways, candidates.ways),
    )


def _shard_ranks(ways: Ways, candidates: Candidates) -> Floats | float:
    """Ranks that share one copy of the training state; 0: all of them."""
    rows = candidates.rows
    if "copies" not in rows:
        return 0.0
    is_partial = np.array([choice == "domain" for choice in ways.choices["sharding"]])
    parts = rows["data"] * rows["context"] / rows["copies"]
    return np.where(is_partial[candidates.ways["sharding"]], parts, 0.0)


def _busiest(question: Question, expert: Ints) -> tuple[Floats | float, Floats | float]:
    return (1.0, 1.0) if question.busiest is None else question.busiest.columns(expert)


def _way_columns(ways: Ways, chosen: Mapping[str, Ints]) -> dict[str, Floats]:
    def column(axis: str, value_A: list[float]) -> Floats:
        return np.array(value_A, dtype=np.float64)[chosen[axis]]

    def is_choice(axis: str, wanted: str) -> Floats:
        return column(axis, [float(choice == wanted) for choice in ways.choices[axis]])

    def plain(axis: str) -> Floats:
        return column(axis, [float(choice) for choice in ways.choices[axis]])  # type: ignore[arg-type] # numbers by construction

    again: list[Recomputed] = list(ways.choices["recompute"])  # type: ignore[arg-type] # this axis only
    return {
        "zero_stage": plain("zero_stage"),
        "chunks": plain("chunks"),
        "recompute_full": column("recompute", [one.share for one in again]),
        **{
            name: column("recompute", [float(module in one.modules) for one in again])
            for module, name in COLUMN_OF_MODULE.items()
        },
        "is_deepep": is_choice("dispatcher", "deepep"),
        "is_hybridep": is_choice("dispatcher", "hybridep"),
        "a2a_overlap": plain("a2a_overlap"),
        "partial_graph": is_choice("cuda_graph", "partial"),
        "full_graph": is_choice("cuda_graph", "full_iteration"),
        "zero_bubble": is_choice("schedule", "zero_bubble"),
        "overlap_gradients": plain("overlap_grad_reduce"),
        "overlap_parameters": plain("overlap_param_gather"),
        "optimizer_offload": plain("optimizer_offload"),
        "activation_offload": plain("activation_offload"),
    }
