"""Fits corrections of an engine's steps to what a running server's logs say of it.

    steps      logged steps against the simulator's seconds of steps with that in them: one by one
               those with prompts, means of several alike those without
    requests   the logged arrivals replayed on the simulated deployment: medians of TTFT by length
               of the prompt, and of TPOT by how many sequences ran beside

The corrections are factors on parts of the step (tuner/prices/serve/corrections.py), fitted
together to all that the logs hold (gauss_newton.py), with priors of one. What the logs do not
identify stays as predicted: of the coefficients whose posterior spread is too wide, the widest is
left out and the others are fitted anew, until all that are left are known.

Steps of one load repeat each other, and what the simulator gets wrong of it: they count for no more
than `MOST_STEPS_COUNTED`. A step log without the lengths of prompts says little of their attention,
so its prior is tight.

Errors before and after are those of the last third of each log, with a fit to the first two.

Letters: I points, K coefficients, R requests.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tuner.calibrate.gauss_newton import NUDGE, fit_factors
from tuner.calibrate.server_records import Coefficient, HeldOut
from tuner.engines.metrics.observed import RequestRecord, StepRecord
from tuner.prices.serve.corrections import UNCORRECTED, StepCorrections
from tuner.prices.serve.curves import Floats
from tuner.search.serve.options import Option
from tuner.search.serve.simulation import simulate_rank
from tuner.simulate.serving.client import client_observed_ttft_s, engine_client
from tuner.simulate.serving.load import Requests
from tuner.simulate.serving.steps import StepTimes, step_times

PRIORS: Final[Mapping[str, float]] = {
    "step": 1.0,
    "linear": 0.5,
    "attention": 0.7,
    "prompt_attention": 0.15,
    "links": 0.7,
    "request": 1.0,
}
"""Standard deviations of logarithms before any log."""
MOST_OF_PRIOR: Final = 0.4
"""Posterior over prior standard deviation up to which a coefficient is identified: beyond, most of
its value would be the prior's."""
HINTS: Final[Mapping[str, str]] = {
    "step": "few sequences with short prompts",
    "linear": "prompts of many tokens",
    "attention": "many sequences with long contexts",
    "prompt_attention": "prompts of very different lengths",
    "links": "steps of many tokens",
    "request": "single requests, logged by their client",
}
"""Load that would say more."""
QUANTILE_80: Final = 1.282
NOISE: Final = 0.1
LEAST_NOISE: Final = 0.01
MOST_STEPS_COUNTED: Final = 2000
BLOCK_STEPS: Final = 16
"""Steps without prompts that are one point."""
NUDGES: Final = (0.5, 0.25, 0.125)
"""Differences of a logarithm over which slopes are taken: replays go from event to event, so that
small ones show more of their accidents than of the factor."""
GROUPS: Final = 4
LEAST_GROUP: Final = 8
EARLY_RATIO: Final = 2.0 / 3.0
MOST_REPLAYED: Final = 4000
NORMAL_SPREAD: Final = 1.4826

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Points of one log."""

    predicted: Callable[[Option], Floats]
    """Logarithms of the predicted seconds of every point, or of their ratio to the measured."""
    measured_I: Floats
    """Logarithms of the measured seconds; 0 where what is predicted is over them already."""
    noise_I: Floats
    """Standard deviations of these, as usual."""
    least_I: Floats
    """Standard deviations of these at least, however close a fit comes."""
    repeats: float
    """How many points say what one does."""
    nudges: tuple[float, ...]
    """Differences of a logarithm over which slopes are taken."""
    is_early_I: Bools
    """Whether the point is of the first two thirds."""
    is_first_I: Bools
    """Whether prompts are in the point: first tokens, or steps that read prompts."""


def corrected_option(option: Option, corrections: StepCorrections) -> Option:
    """Return an option whose steps are corrected."""
    machine = replace(option.iteration.machine, corrections=corrections)
    return replace(option, iteration=replace(option.iteration, machine=machine))


def step_evidence(steps: Sequence[StepRecord], *, cache_tokens: float) -> Evidence:
    """Return the points of logged steps.

    Args:
        steps: in order, of any of an instance's ranks.
        cache_tokens: of a rank.
    """
    steps = [step for step in steps if step.seconds > 0.0 and step.prompts + step.running > 0]
    blocks = _blocks(steps)
    longest = max(
        max(
            _past(step, cache_tokens),
            (step.before_tokens + step.prompt_tokens) / max(step.prompts, 1),
        )
        for step in steps
    )
    most_tokens = max(step.prompt_tokens + step.running for step in steps)
    most_running = max(step.running + step.prompts for step in steps)

    def predicted(priced: Option) -> Floats:
        times = step_times(
            priced.iteration,
            most_tokens=most_tokens,
            most_sequences=max(most_running, 2),
            longest=math.ceil(longest) + 1,
        )
        return np.log(
            [
                fmean(_step_s(times, step, cache_tokens=cache_tokens) for step in block)
                for block in blocks
            ]
        )

    repeats = max(len(blocks) / MOST_STEPS_COUNTED, 1.0)
    return Evidence(
        predicted=predicted,
        measured_I=np.log([fmean(step.seconds for step in block) for block in blocks]),
        noise_I=np.full(len(blocks), NOISE * math.sqrt(repeats)),
        least_I=np.full(len(blocks), LEAST_NOISE * math.sqrt(repeats)),
        repeats=repeats,
        nudges=(NUDGE,),
        is_early_I=np.arange(len(blocks)) < EARLY_RATIO * len(blocks),
        is_first_I=np.array([block[0].prompts > 0 for block in blocks]),
    )


def _blocks(steps: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Put steps without prompts together that have as many sequences, in the order of their last.

    Requests get their tokens from many steps, so that means of these count, whatever the median is.
    """
    begun: dict[int, list[StepRecord]] = {}
    blocks = []
    for step in steps:
        block = begun.setdefault(-1 if step.prompts else step.running, [])
        block.append(step)
        if step.prompts or len(block) == BLOCK_STEPS:
            blocks.append(begun.pop(-1 if step.prompts else step.running))
    return blocks + list(begun.values())


def _past(step: StepRecord, cache_tokens: float) -> float:
    """Return the tokens in the cache of a running sequence, mean."""
    past = step.past_tokens
    if past is None:
        past = max((step.cache_ratio or 0.0) * cache_tokens - step.prompt_tokens, 0.0)
    return past / max(step.running, 1)


def _step_s(times: StepTimes, step: StepRecord, *, cache_tokens: float) -> float:
    """Predict one logged step."""
    past = _past(step, cache_tokens)
    if not step.prompts:
        return times.decode_step_s(step.running, past)
    before = step.before_tokens / step.prompts
    whole_s = times.prefill_s(before + step.prompt_tokens / step.prompts)
    return times.mixed_s(
        step.prompt_tokens,
        step.prompts * (whole_s - times.prefill_s(before)),
        running=step.running,
        past=past,
        ended=step.prompts,
    )


def request_evidence(records: Sequence[RequestRecord], option: Option, *, ranks: int) -> Evidence:
    """Return the points of logged requests: medians over groups of predicted over measured.

    Args:
        records: in order of arrival.
        option: the deployment, as it is priced.
        ranks: that share the requests in turn; the first one's are replayed.
    """
    replayed = records[::ranks][:MOST_REPLAYED]
    arrival_s_R = np.array([record.arrival_s for record in replayed])
    cached_R = np.array([record.cached_tokens or 0 for record in replayed])
    requests = Requests(
        input_R=np.array([record.input_tokens for record in replayed]),
        output_R=np.array([record.output_tokens for record in replayed]),
        arrival_s_R=arrival_s_R - arrival_s_R[0],
        cached_R=np.minimum(cached_R, [record.input_tokens - 1 for record in replayed]),
    )
    ttft_s_R = np.array([record.ttft_s for record in replayed])
    end_s_R = np.array([record.end_s for record in replayed])
    several_R = requests.output_R > 1
    tpot_s_R = (end_s_R - arrival_s_R - ttft_s_R)[several_R] / (requests.output_R[several_R] - 1)
    beside_R = _beside(arrival_s_R, end_s_R)
    held_R = requests.input_R + 0.5 * requests.output_R
    is_early_R = np.arange(len(replayed)) < EARLY_RATIO * len(replayed)
    first_groups = _groups(requests.input_R, beside_R, is_early_R)
    each_groups = _groups(held_R[several_R], beside_R[several_R], is_early_R[several_R])
    groups = first_groups + each_groups

    def predicted(priced: Option) -> Floats:
        served = simulate_rank(priced, requests, most_running=option.running, concurrency=1)
        first_s_R = client_observed_ttft_s(served, client=engine_client(priced.iteration))
        first_R = np.log(first_s_R / ttft_s_R)
        each_R = np.log(served.tpot_s_R / np.maximum(tpot_s_R, 1e-6))
        medians = [median(first_R[group.places]) for group in first_groups]
        return np.array(medians + [median(each_R[group.places]) for group in each_groups])

    return Evidence(
        predicted=predicted,
        measured_I=np.zeros(len(groups)),
        noise_I=np.full(len(groups), NOISE),
        least_I=np.full(len(groups), LEAST_NOISE),
        repeats=1.0,
        nudges=NUDGES,
        is_early_I=np.array([group.is_early for group in groups]),
        is_first_I=np.arange(len(groups)) < len(first_groups),
    )


def _beside(arrival_s_R: Floats, end_s_R: Floats) -> Floats:
    """Return how many requests were in flight in the middle of each."""
    middle_s_R = 0.5 * (arrival_s_R + end_s_R)
    begun_R = np.searchsorted(np.sort(arrival_s_R), middle_s_R, side="right")
    return np.asarray(begun_R - np.searchsorted(np.sort(end_s_R), middle_s_R, side="right"))


class _Group(NamedTuple):
    """Requests that are one point."""

    places: npt.NDArray[np.intp]
    is_early: bool


def _groups(key_R: npt.NDArray[Any], beside_R: Floats, is_early_R: Bools) -> list[_Group]:
    """Split early and late requests by quantiles of those beside, and each part by a key's."""
    return [
        _Group(part, is_early)
        for is_early in (True, False)
        for period in _parts(np.flatnonzero(is_early_R == is_early), beside_R)
        for part in _parts(period, key_R)
    ]


def _parts(places: npt.NDArray[np.intp], key_R: npt.NDArray[Any]) -> list[npt.NDArray[np.intp]]:
    """Split requests by quantiles of a key."""
    ordered = places[np.argsort(key_R[places], kind="stable")]
    count = max(min(GROUPS, len(ordered) // LEAST_GROUP), 1)
    return [part for part in np.array_split(ordered, count) if len(part)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedCorrections:
    """Result of a fit."""

    corrections: StepCorrections
    coefficients: tuple[Coefficient, ...]
    errors: HeldOut


def fit_corrections(
    evidence: Sequence[Evidence], option: Option, *, minutes: float, names: Sequence[str]
) -> FittedCorrections:
    """Fit the corrections that the logs identify, and predict their last third without it.

    Args:
        evidence: of every log.
        option: the deployment, as it is priced.
        minutes: that the logs cover.
        names: of the coefficients that can matter.
    """
    evidence = [_with_noise_seen(part, option, names) for part in evidence]
    known, spreads = _identified(evidence, option, names, is_early=False)
    early, _ = _identified(evidence, option, names, is_early=True)
    return FittedCorrections(
        corrections=known,
        coefficients=tuple(
            _coefficient(name, getattr(known, name), spreads, minutes=minutes) for name in names
        ),
        errors=_errors(evidence, option, early),
    )


def _residuals(
    evidence: Sequence[Evidence], option: Option, corrections: StepCorrections, *, is_early: bool
) -> Floats:
    priced = corrected_option(option, corrections)
    parts = [
        ((part.predicted(priced) - part.measured_I) / part.noise_I)[
            part.is_early_I | (not is_early)
        ]
        for part in evidence
    ]
    return np.concatenate(parts)


def _at(names: Sequence[str], offset_K: Floats) -> StepCorrections:
    return StepCorrections(**dict(zip(names, np.exp(offset_K).tolist(), strict=True)))


def _with_noise_seen(part: Evidence, option: Option, names: Sequence[str]) -> Evidence:
    """Return points with the spread of their kind about a first fit in place of the usual noise."""
    known, _ = _fit([part], option, names, is_early=False)
    left_I = part.predicted(corrected_option(option, known)) - part.measured_I
    noise_I = part.least_I.copy()
    for kind_I in (part.is_first_I, ~part.is_first_I):
        if kind_I.any():
            spread = NORMAL_SPREAD * float(
                np.median(np.abs(left_I - np.median(left_I[kind_I]))[kind_I])
            )
            noise_I[kind_I] = np.maximum(noise_I[kind_I], spread * math.sqrt(part.repeats))
    return replace(part, noise_I=noise_I)


def _fit(
    evidence: Sequence[Evidence], option: Option, names: Sequence[str], *, is_early: bool
) -> tuple[StepCorrections, dict[str, float]]:
    """Fit these coefficients; return them and their posterior spreads."""
    fit = fit_factors(
        lambda offset_K: _residuals(evidence, option, _at(names, offset_K), is_early=is_early),
        np.array([PRIORS[name] for name in names]),
        nudges=max((part.nudges for part in evidence), key=len),
    )
    return _at(names, fit.offset_K), dict(zip(names, fit.spread_K.tolist(), strict=True))


def _identified(
    evidence: Sequence[Evidence], option: Option, names: Sequence[str], *, is_early: bool
) -> tuple[StepCorrections, dict[str, float]]:
    """Fit the coefficients that are identified; spreads of the others are those when they left."""
    kept = list(names)
    left: dict[str, float] = {}
    while kept:
        known, spreads = _fit(evidence, option, kept, is_early=is_early)
        worst = max(kept, key=lambda name: spreads[name] / _allowed(name))
        if spreads[worst] <= _allowed(worst):
            return known, spreads | left
        left[worst] = spreads[worst]
        kept.remove(worst)
    return UNCORRECTED, left


def _allowed(name: str) -> float:
    return MOST_OF_PRIOR * PRIORS[name]


def _coefficient(
    name: str, factor: float, spreads: Mapping[str, float], *, minutes: float
) -> Coefficient:
    """Return a coefficient with its interval, or with what would identify it."""
    spread, prior = spreads[name], PRIORS[name]
    is_identified = spread <= _allowed(name)
    known = 1.0 / spread**2 - 1.0 / prior**2
    wanted = 1.0 / _allowed(name) ** 2 - 1.0 / prior**2
    reach = math.exp(QUANTILE_80 * spread)
    return Coefficient(
        name=name,
        factor=factor,
        low=factor / reach,
        high=factor * reach,
        is_identified=is_identified,
        minutes_needed=None
        if is_identified or known * 100.0 < wanted
        else minutes * wanted / known,
        wanted_load="" if is_identified else HINTS[name],
    )


def _errors(evidence: Sequence[Evidence], option: Option, early: StepCorrections) -> HeldOut:
    """Return predicted over measured seconds of the last third, before and after a correction."""
    ratios = {}
    for when, corrections in (("before", UNCORRECTED), ("after", early)):
        priced = corrected_option(option, corrections)
        logs = [part.predicted(priced) - part.measured_I for part in evidence]
        for kind, wants_first in (("ttft", True), ("tpot", False)):
            late = np.concatenate(
                [
                    log_I[~part.is_early_I & (part.is_first_I == wants_first)]
                    for part, log_I in zip(evidence, logs, strict=True)
                ]
            )
            ratios[f"{kind}_{when}"] = math.exp(float(np.median(late))) if len(late) else None
    return HeldOut(**ratios)
