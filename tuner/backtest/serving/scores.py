"""Errors of predicted latencies, per source and harness, and of choices among strategies.

Strategies are compared at equal load: rows
equal in system, engine, model, precision, lengths and concurrency; several measurements of one
strategy count as their median. A pair is clear when its measurements differ by more than 10 %.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from tuner.backtest.errors import ScoredRow, summarise_errors
from tuner.backtest.records import Errors
from tuner.backtest.serving.launches import PublishedLaunch
from tuner.backtest.serving.prediction import MeanLatency
from tuner.backtest.serving.records import Metric, Order

CLEAR_RATIO = 0.10
CHOICES = (
    "rank_correlation",
    "rank_correlation_min",
    "choice_cases",
    "choice_regret",
    "choice_regret_max",
    "choice_regret_top3",
    "choice_regret_top3_max",
)
"""Errors that are of strategies, not of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One measurement and its prediction."""

    launch: PublishedLaunch
    latency: MeanLatency


Read = Callable[[Pair], tuple[float, float]]
"""Predicted and measured seconds."""


def ttft(pair: Pair) -> tuple[float, float]:
    """Predicted and measured time to the first token."""
    return pair.latency.ttft_s, pair.launch.ttft_s


def tpot(pair: Pair) -> tuple[float, float]:
    """Predicted and measured time per further token."""
    return pair.latency.tpot_s, pair.launch.tpot_s


def summarise_metric(pairs: Sequence[Pair], *, read: Read, refused: Sequence[str]) -> Metric:
    """Summarise one latency; `refused` names the source of every row that was not predicted."""
    sources = sorted({pair.launch.source for pair in pairs} | {name for name in refused if name})
    by_source = {
        name: _errors(
            [pair for pair in pairs if pair.launch.source == name],
            read=read,
            refused=sum(source == name for source in refused),
        )
        for name in sources
    }
    return Metric(
        **_errors(pairs, read=read, refused=len(refused)).model_dump(),
        sources=by_source,
        harnesses=_harnesses(pairs, read=read),
        order=_orders(pairs, read=read),
    )


def _harnesses(pairs: Sequence[Pair], *, read: Read) -> dict[str, Errors]:
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.launch.is_disaggregated:
            continue
        for harness in ("all", pair.launch.harness):
            groups.setdefault(f"{pair.launch.generation}|{harness}", []).append(pair)
    return {name: _errors(groups[name], read=read, refused=0) for name in sorted(groups)}


def _errors(pairs: Sequence[Pair], *, read: Read, refused: int) -> Errors:
    scored = [
        ScoredRow(
            predicted_s=read(pair)[0], measured_s=read(pair)[1], tokens=1.0, case=(str(number),)
        )
        for number, pair in enumerate(pairs)
    ]
    nothing = ScoredRow(predicted_s=None, measured_s=None, tokens=1.0, case=())
    plain = summarise_errors([*scored, *([nothing] * refused)])
    choice = summarise_errors(_strategies(pairs, read=read))
    return plain.model_copy(update={name: getattr(choice, name) for name in CHOICES})


def _case(launch: PublishedLaunch) -> tuple[str, ...]:
    load = (launch.input_tokens, launch.output_tokens, launch.concurrency)
    return (launch.source, launch.decoder.name, repr(launch.formats), *map(str, load))


def _medians(
    pairs: Sequence[Pair], *, read: Read
) -> dict[tuple[str, ...], list[tuple[int, float, float]]]:
    """Return devices, predicted and measured seconds of every strategy, by case."""
    rows: dict[tuple[tuple[str, ...], object], list[Pair]] = {}
    for pair in pairs:
        rows.setdefault((_case(pair.launch), pair.launch.sides), []).append(pair)
    cases: dict[tuple[str, ...], list[tuple[int, float, float]]] = {}
    for (case, _), same in rows.items():
        predicted_s = median(read(pair)[0] for pair in same)
        measured_s = median(read(pair)[1] for pair in same)
        cases.setdefault(case, []).append((same[0].launch.devices, predicted_s, measured_s))
    return cases


def _strategies(pairs: Sequence[Pair], *, read: Read) -> list[ScoredRow]:
    return [
        ScoredRow(predicted_s=predicted_s, measured_s=measured_s, tokens=1.0, case=case)
        for case, strategies in _medians(pairs, read=read).items()
        for _, predicted_s, measured_s in strategies
    ]


def _orders(pairs: Sequence[Pair], *, read: Read) -> dict[str, Order]:
    generations = sorted({pair.launch.generation for pair in pairs})
    return {
        name: _order([pair for pair in pairs if pair.launch.generation == name], read=read)
        for name in generations
    }


def _order(pairs: Sequence[Pair], *, read: Read) -> Order:
    every: list[bool] = []
    equal: list[bool] = []
    for strategies in _medians(pairs, read=read).values():
        for (devices, mine, my_s), (others, theirs, their_s) in itertools.combinations(
            strategies, 2
        ):
            if max(my_s, their_s) <= (1.0 + CLEAR_RATIO) * min(my_s, their_s):
                continue
            is_right = (mine < theirs) == (my_s < their_s)
            every.append(is_right)
            if devices == others:
                equal.append(is_right)
    return Order(
        pairs=len(every),
        ordered_ratio=_share(every),
        equal_pairs=len(equal),
        equal_ordered_ratio=_share(equal),
    )


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None
