"""Candidates, degrees with an option each, as arrays, and as inputs of the analytic formulas.

A candidate is one row of degrees and one choice on every option axis. Unit costs are expensive to
price and depend on few columns, so the distinct combinations of those are priced once and gathered
(`Candidates.same`).

Letters: C candidates.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.config.candidates import recompute_columns
from tuner.config.columns import Strategies
from tuner.config.knobs import FIELD_OF_DEGREE, searched
from tuner.config.microbatches import most_microbatches
from tuner.search.train.degrees import Table, take_rows
from tuner.search.train.options import DISPATCH_AXES, RECOMPUTE_AXES, OptionSpace, RecomputeChoice
from tuner.search.train.problem import TrainProblem

MOST_CODES: Final = 2**62
"""Combinations of columns that a 64-bit code can hold."""

TIME_DEGREES: Final = ("tensor", "context", "expert", "expert_tensor", "micro_batch")
TIME_AXES: Final = (*RECOMPUTE_AXES, *DISPATCH_AXES)
MEMORY_DEGREES: Final = (*TIME_DEGREES, "data")
MEMORY_AXES: Final = (
    *RECOMPUTE_AXES,
    "sharding",
    *(knob.field for knob in searched() if knob.changes_memory),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Arrays of one length."""

    rows: Table
    """The degrees of degrees.py."""
    options: Mapping[str, Ints]
    """Index of the choice on each option axis, by axis."""

    def __len__(self) -> int:
        return len(self.rows["tensor"])

    def taken(self, chosen: Ints) -> "Candidates":
        """Select candidates; an index may be repeated."""
        return Candidates(
            rows=take_rows(self.rows, chosen), options=take_rows(self.options, chosen)
        )

    def concat(self, appended: "Candidates") -> "Candidates":
        """Concatenate two sets of candidates."""
        return Candidates(
            rows={
                name: np.concatenate((column, appended.rows[name]))
                for name, column in self.rows.items()
            },
            options={
                name: np.concatenate((column, appended.options[name]))
                for name, column in self.options.items()
            },
        )

    def same(self, names: Iterable[str]) -> tuple[Ints, Ints]:
        """Return one candidate of each combination of the named columns, and the inverse index."""
        code, codes = np.zeros(len(self), dtype=np.int64), 1
        for name in names:
            column = self.rows[name] if name in self.rows else self.options[name]
            size = int(column.max(initial=0)) + 1
            if codes * size > MOST_CODES:
                # Degrees of huge clusters: number the codes that occur, so that none wraps around.
                kinds, code = np.unique(code, return_inverse=True)
                codes = len(kinds)
            code, codes = code * size + column, codes * size
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        return first, inverse


def num_microbatches(problem: TrainProblem, rows: Table) -> Ints:
    """Micro-batches of the most-loaded pipeline in one step."""
    count: Ints = most_microbatches(
        problem.global_batch_size, micro_batch=rows["micro_batch"], data=rows["data"]
    )
    return count


def to_strategies(
    problem: TrainProblem, options: OptionSpace, candidates: Candidates
) -> Strategies:
    """Return candidates as inputs of the analytic formulas."""
    rows = {name: candidates.rows[name].astype(np.float64) for name in FIELD_OF_DEGREE}
    chosen = _option_columns(options, candidates.options)
    mean, p99 = _imbalance(problem, candidates.rows["expert"])
    has_sequence = problem.capabilities.sequence_parallel
    return Strategies(
        sequence=float(problem.sequence_length),
        num_microbatches=num_microbatches(problem, candidates.rows).astype(np.float64),
        sequence_parallel=((rows["tensor"] > 1.0) & has_sequence).astype(np.float64),
        dispatch_bytes=problem.dispatch_bytes,
        linear_bytes=problem.linear_bytes,
        gradient_bytes=problem.gradient_bytes,
        shard_ranks=_shard_ranks(options, candidates),
        expert_imbalance=mean,
        expert_imbalance_p99=p99,
        **rows,
        **chosen,
        **problem.tuned,
        **problem.packed_columns(
            micro_batch=rows["micro_batch"],
            has_graphs=chosen["partial_graph"] + chosen["full_graph"],
        ),
    )


def _shard_ranks(options: OptionSpace, candidates: Candidates) -> Floats | float:
    """Ranks that share one copy of the training state; 0: all of them."""
    rows = candidates.rows
    if "copies" not in rows:
        return 0.0
    is_partial = np.array([choice == "domain" for choice in options.choices["sharding"]])
    parts = rows["data"] * rows["context"] / rows["copies"]
    return np.where(is_partial[candidates.options["sharding"]], parts, 0.0)


def _imbalance(problem: TrainProblem, expert: Ints) -> tuple[Floats | float, Floats | float]:
    return (
        (1.0, 1.0) if problem.expert_imbalance is None else problem.expert_imbalance.columns(expert)
    )


def _option_columns(options: OptionSpace, chosen: Mapping[str, Ints]) -> dict[str, Floats]:
    recompute: list[RecomputeChoice] = list(options.choices["recompute"])  # type: ignore[arg-type] # this axis only
    by_axis: dict[str, list[dict[str, float]]] = {
        knob.field: [knob.columns_of(choice) for choice in options.choices[knob.field]]  # type: ignore[arg-type] # no recomputation
        for knob in searched()
    } | {
        "recompute": [
            recompute_columns(choice.modules, full_ratio=choice.share) for choice in recompute
        ],
        "chunks": [{"chunks": float(count)} for count in options.choices["chunks"]],  # type: ignore[arg-type] # numbers by construction
    }
    return {
        column: np.array([values[column] for values in columns])[chosen[axis]]
        for axis, columns in by_axis.items()
        for column in columns[0]
    }
