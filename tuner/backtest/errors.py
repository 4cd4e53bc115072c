"""Errors of predictions against measurements: of seconds, of choices, of memory.

p is predicted, m measured, both seconds of one step.

    ape    |p - m| / m, as a share
    bias   median(p / m) - 1

Choices are compared within cases: rows equal in model, device, count of devices, sequence and
precision. As rows of one case may differ in batch, they are compared by seconds per token. The
regret of a case is the measured seconds per token of the row that is predicted to be the best, over
those of the row that is, less 1; of the best three, the same with the best measured of the three
that are predicted best. Rank correlation is Spearman's, within a case, and its median over cases.

Letters: N rows, K cases.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.backtest.records import Errors

Values = npt.NDArray[np.float64]

RANKED: int = 3
"""Least rows of a case for a rank correlation."""
CHOSEN: int = 2
"""Least rows of a case for a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """One row as far as errors need it; absent numbers are None."""

    predicted_s: float | None
    measured_s: float | None
    tokens: float
    """Tokens of the global batch."""
    case: tuple[str, ...]
    """Rows of one case are alternatives."""
    predicted_bytes: float | None = None
    measured_bytes: float | None = None
    fits: bool | None = None
    """The model predicts that the row fits; None where memory was not priced."""
    has_run_out_of_memory: bool = False


def summarise_errors(rows: Sequence[ScoredRow]) -> Errors:
    """Summarise rows; None where there is no data."""
    timed = [row for row in rows if row.predicted_s is not None and row.measured_s is not None]
    predicted_N = np.array([row.predicted_s for row in timed], dtype=np.float64)
    measured_N = np.array([row.measured_s for row in timed], dtype=np.float64)
    ape_N = np.abs(predicted_N - measured_N) / measured_N
    cases = _cases(timed)
    correlations = [
        correlation for case in cases if (correlation := _correlation(case)) is not None
    ]
    chosen = [case for case in cases if len(case) >= CHOSEN]
    first_K = np.array([_regret(case, best_of=1) for case in chosen])
    third_K = np.array([_regret(case, best_of=3) for case in chosen])
    memory_N = _memory_errors(rows)
    return Errors(
        rows=len(rows),
        predicted=sum(row.predicted_s is not None for row in rows),
        median_ape=_stated(np.median, ape_N),
        mean_ape=_stated(np.mean, ape_N),
        p90_ape=_stated(_p90, ape_N),
        bias=None if not timed else float(np.median(predicted_N / measured_N)) - 1.0,
        rank_correlation=_stated(np.median, np.array(correlations)),
        rank_correlation_min=min(correlations, default=None),
        choice_cases=len(chosen),
        choice_regret=_stated(np.mean, first_K),
        choice_regret_max=_stated(np.max, first_K),
        choice_regret_top3=_stated(np.mean, third_K),
        choice_regret_top3_max=_stated(np.max, third_K),
        false_fits=_count_wrong(rows, out_of_memory=True),
        false_misfits=_count_wrong(rows, out_of_memory=False),
        memory_rows=len(memory_N),
        memory_median_ape=_stated(np.median, memory_N),
        memory_p90_ape=_stated(_p90, memory_N),
        memory_max_ape=_stated(np.max, memory_N),
    )


def _cases(rows: Sequence[ScoredRow]) -> list[list[ScoredRow]]:
    by_case: dict[tuple[str, ...], list[ScoredRow]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    return [by_case[case] for case in sorted(by_case)]


def _per_token(case: Sequence[ScoredRow]) -> tuple[Values, Values]:
    predicted_N = np.array([(row.predicted_s or 0.0) / row.tokens for row in case])
    return predicted_N, np.array([(row.measured_s or 0.0) / row.tokens for row in case])


def _regret(case: Sequence[ScoredRow], *, best_of: int) -> float:
    predicted_N, measured_N = _per_token(case)
    picked = np.argsort(predicted_N, kind="stable")[:best_of]
    return float(measured_N[picked].min() / measured_N.min()) - 1.0


def _correlation(case: Sequence[ScoredRow]) -> float | None:
    """Return Spearman's rank correlation, None where too few rows differ."""
    if len(case) < RANKED:
        return None
    predicted_N, measured_N = (_ranks(values) for values in _per_token(case))
    if np.ptp(predicted_N) == 0.0 or np.ptp(measured_N) == 0.0:
        return None
    return float(np.corrcoef(predicted_N, measured_N)[0, 1])


def _ranks(values_N: Values) -> Values:
    """Return ranks from 0; equal values share the mean of theirs."""
    _, inverse_N, count_U = np.unique(values_N, return_inverse=True, return_counts=True)
    last_U = np.cumsum(count_U)
    return (last_U - 0.5 * (count_U + 1.0))[inverse_N]


def _memory_errors(rows: Sequence[ScoredRow]) -> Values:
    return np.array(
        [
            abs(row.predicted_bytes - row.measured_bytes) / row.measured_bytes
            for row in rows
            if row.predicted_bytes is not None and row.measured_bytes is not None
        ]
    )


def _count_wrong(rows: Sequence[ScoredRow], *, out_of_memory: bool) -> int | None:
    """Count rows predicted to fit that did not, or the reverse; None without such rows."""
    relevant = [
        row for row in rows if row.fits is not None and row.has_run_out_of_memory == out_of_memory
    ]
    return sum(row.fits == out_of_memory for row in relevant) if relevant else None


def _stated(statistic: Callable[[Values], np.floating], values_N: Values) -> float | None:
    """Return a statistic of values; None without any."""
    return float(statistic(values_N)) if values_N.size else None


def _p90(values_N: Values) -> np.float64:
    return np.float64(np.quantile(values_N, 0.9))


def group_errors(
    scored: Sequence[ScoredRow],
    *,
    sources: Sequence[str],
    generations: Sequence[str],
    has_experts: Sequence[bool],
) -> dict[str, Any]:
    """Return the fields of `GroupedErrors`; a row without a generation is in none."""
    experts = [at for at, has in enumerate(has_experts) if has]
    return {
        "sources": _by_name(sources, scored),
        "moe_only": _by_name([sources[at] for at in experts], [scored[at] for at in experts]),
        "generations": _by_name(generations, scored),
        "total": summarise_errors(scored),
        "moe_total": summarise_errors([scored[at] for at in experts]),
    }


def _by_name(names: Sequence[str], scored: Sequence[ScoredRow]) -> dict[str, Errors]:
    groups: dict[str, list[ScoredRow]] = {}
    for name, row in zip(names, scored, strict=True):
        groups.setdefault(name, []).append(row)
    return {name: summarise_errors(rows) for name, rows in groups.items() if name}
