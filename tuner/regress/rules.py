"""Judges whether a plan is as good as the accepted one, rule by rule.

Planning the same spec on the same inputs again gives the same plan, so every difference has a
cause. Each rule checks one aspect; the most severe finding is the verdict.

    objective, figures   beyond the tolerance: better or worse; inside: drift
    decision             another one at an equal price, or of the tie set: drift
    certificate          a wider gap: worse; a bound above the price of a known plan: broken
    bands                much wider or narrower: drift
    measurements         significantly slower cases of the profile: worse

A decision is allowed `tie_ratio`, because the planner itself chooses among decisions that it cannot
tell apart (tuner/search/train/preference.py); the same decision is only allowed `ratio`.

Not covered: whether the model is right. That is what `moetune backtest` is for.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tuner.goals.stored_figures import Json, StoredFigure
from tuner.regress.observed import PlanFacts, spec_differences
from tuner.regress.records import AcceptedChange, ScenarioVerdict
from tuner.regress.words import (
    decision_words,
    figure_words,
    gap_words,
    moved_words,
    percent,
    spec_difference_words,
)
from tuner.units import format_ratio

UNCHANGED_RATIO: Final = 1e-6
"""Numbers this near are equal: sums in another order, texts in fewer digits."""
BOUND_RATIO: Final = 1e-3
"""A bound above a known price by more than this share is broken: solvers stop within less."""
BAND_RATIO: Final = 1.25
"""Least change of a band's width that is reported."""


_NUMBERS: Final = re.compile(r"[+-]?\d[\d.,]*( ?[%kMGTm]?i?[Bs]?\b)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Bounds within which a plan may change without counting as better or worse."""

    ratio: float = 0.01
    """Share by which a predicted number may change. Predictions have no noise; a change of the
    model below 1 % is not worth failing a build for."""
    tie_ratio: float = 0.02
    """Share by which a predicted number may change where the decision changed: the planner's own
    TOLERANCE_RATIO."""
    gap_ratio: float = 0.01
    """Absolute increase of the proven gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Finding of one rule."""

    verdict: ScenarioVerdict
    words: str
    changes: tuple[AcceptedChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict with its reason."""

    verdict: ScenarioVerdict
    reason: str
    changes: tuple[AcceptedChange, ...]


SEVERITY: Final = (
    ScenarioVerdict.INCOMPARABLE,
    ScenarioVerdict.REGRESSION,
    ScenarioVerdict.BETTER,
    ScenarioVerdict.DRIFT,
)
"""Most severe first; the first that any rule returns is the verdict."""
MOST_WORDS: Final = 3
"""Findings in a reason; the others are among the changes."""


def judge(
    accepted: PlanFacts,
    current: PlanFacts,
    *,
    tolerance: Tolerance,
    beside: Sequence[Finding] = (),
) -> Judgement:
    """Compare a plan with the accepted one.

    Args:
        accepted: what was accepted, or what another version plans.
        current: what is planned now.
        tolerance: how far it may move.
        beside: findings from other sources, the measurements.
    """
    price = _price_today(accepted, current)
    spec_findings = (*_other_launch(accepted, current), *_other_spec(accepted, current))
    if any(finding.verdict is ScenarioVerdict.INCOMPARABLE for finding in spec_findings):
        return _to_judgement(spec_findings, current)
    return _to_judgement(
        (*spec_findings, *_findings(accepted, current, tolerance, price), *beside), current
    )


def same_decision(accepted: Json | None, current: Json | None) -> bool:
    """Return whether two decisions agree in every field that both versions know."""
    if accepted is None or current is None:
        return accepted is current
    shared = accepted.keys() & current.keys()
    return all(_is_equal(accepted[name], current[name]) for name in shared)


def _is_equal(accepted: object, current: object) -> bool:
    return not any(spec_differences(accepted, current))


def _findings(
    accepted: PlanFacts, current: PlanFacts, tolerance: Tolerance, price: float | None
) -> Iterator[Finding]:
    yield from _status(accepted, current)
    if not (accepted.has_decision and current.has_decision):
        yield from _binding(accepted, current)
        return
    same = same_decision(accepted.decision, current.decision)
    yield from _certificate(accepted, current, tolerance, price)
    yield from _objective(
        accepted, current, tolerance, tail=_cause(accepted, current, price, same=same)
    )
    if not same:
        yield _decision(accepted, current)
    yield from _all_figures(accepted, current, tolerance, same=same)
    yield from _binding(accepted, current)


def _other_launch(accepted: PlanFacts, current: PlanFacts) -> Iterator[Finding]:
    """Report changes of the deployment that an accepted placement was made for.

    Its loads follow from the dispatch rule of its release and from which ranks share a node. Other
    nodes or ranks are another spec; another release or rule is not.
    """
    for engine in sorted(accepted.made_for.keys() & current.made_for.keys()):
        before, after = accepted.made_for[engine], current.made_for[engine]
        changes = tuple(
            AcceptedChange(
                what=f"made_for.{engine}.{name}", accepted=str(before[name]), found=str(after[name])
            )
            for name in ("release", "nodes", "ep_size", "dispatch", "a2a_backend")
            if name in before and name in after and before[name] != after[name]
        )
        if not changes:
            continue
        said = ", ".join(
            f"{change.what.rpartition('.')[2]} {change.accepted} (now {change.found})"
            for change in changes
        )
        shape = any(before.get(name) != after.get(name) for name in ("nodes", "ep_size"))
        yield Finding(
            verdict=ScenarioVerdict.INCOMPARABLE if shape else ScenarioVerdict.DRIFT,
            words=f"the accepted placement was made for {engine} with {said}: what was emitted must"
            " be planned and emitted again",
            changes=changes,
        )


def _other_spec(accepted: PlanFacts, current: PlanFacts) -> Iterator[Finding]:
    if accepted.kind != current.kind:
        differences = [("goal.kind", accepted.kind, current.kind)]
    else:
        differences = list(spec_differences(accepted.spec, current.spec))
    if differences:
        at, before, after = differences[0]
        yield Finding(
            verdict=ScenarioVerdict.INCOMPARABLE,
            words=spec_difference_words(differences),
            changes=(AcceptedChange(what=at, accepted=_shown(before), found=_shown(after)),),
        )


def _status(accepted: PlanFacts, current: PlanFacts) -> Iterator[Finding]:
    change = AcceptedChange(what="status", accepted=accepted.status, found=current.status)
    if accepted.has_decision and not current.has_decision:
        yield Finding(
            verdict=ScenarioVerdict.REGRESSION,
            words=f"was {accepted.status}, now {current.status}: {current.binding}",
            changes=(change.model_copy(update={"weight": "worse"}),),
        )
    elif current.has_decision and not accepted.has_decision:
        yield Finding(
            verdict=ScenarioVerdict.BETTER,
            words=f"was {accepted.status} ({accepted.binding}), now there is a plan",
            changes=(change.model_copy(update={"weight": "better"}),),
        )
    elif not current.has_decision and accepted.status != current.status:
        worse = current.status == "unknown"
        yield Finding(
            verdict=ScenarioVerdict.REGRESSION if worse else ScenarioVerdict.DRIFT,
            words=f"was {accepted.status}, now {current.status}: {current.binding}",
            changes=(change.model_copy(update={"weight": "worse" if worse else "neutral"}),),
        )
    if (
        accepted.verdict_word != current.verdict_word
        and accepted.has_decision
        and current.has_decision
    ):
        worse = accepted.verdict_word == "worth it"
        yield Finding(
            verdict=ScenarioVerdict.REGRESSION if worse else ScenarioVerdict.DRIFT,
            words=f"placement was {accepted.verdict_word!r}, now {current.verdict_word!r}",
            changes=(
                AcceptedChange(
                    what="verdict", accepted=accepted.verdict_word, found=current.verdict_word
                ),
            ),
        )


def _binding(accepted: PlanFacts, current: PlanFacts) -> Iterator[Finding]:
    """Compare the binding constraints; other numbers in the same text are no change."""
    before, after = (_NUMBERS.sub("#", facts.binding) for facts in (accepted, current))
    if before != after:
        yield Finding(
            verdict=ScenarioVerdict.DRIFT,
            words=f"what binds was {accepted.binding!r}, now {current.binding!r}",
            changes=(
                AcceptedChange(
                    what="binding_constraint", accepted=accepted.binding, found=current.binding
                ),
            ),
        )


def _certificate(
    accepted: PlanFacts, current: PlanFacts, tolerance: Tolerance, price: float | None
) -> Iterator[Finding]:
    """Check the proof: bounds that contradict the plan, and gaps that widened."""
    bound, objective = current.bound, current.objective
    change = AcceptedChange(
        what="bound",
        accepted=accepted.bound,
        found=bound,
        ratio=_ratio(accepted.bound, bound),
        weight="worse",
    )
    if bound is not None and objective is not None and bound > objective * (1.0 + UNCHANGED_RATIO):
        yield Finding(
            verdict=ScenarioVerdict.REGRESSION,
            words=f"bound {bound:.6g} lies above its own objective {objective:.6g}: the solver's"
            " bound is broken",
            changes=(change,),
        )
        return
    if bound is not None and price is not None and bound > price * (1.0 + BOUND_RATIO):
        yield Finding(
            verdict=ScenarioVerdict.REGRESSION,
            words=f"claims that nothing is below {bound:.6g}, but the accepted decision still costs"
            f" {price:.6g}: the solver's bound is broken",
            changes=(change,),
        )
        return
    widened = current.gap_ratio - accepted.gap_ratio
    lost = accepted.status == "optimal" and current.status != "optimal"
    if widened > tolerance.gap_ratio or lost or abs(widened) > UNCHANGED_RATIO:
        is_worse = widened > tolerance.gap_ratio
        yield Finding(
            verdict=ScenarioVerdict.REGRESSION if is_worse else ScenarioVerdict.DRIFT,
            words=gap_words(accepted, current),
            changes=(
                AcceptedChange(
                    what="gap_ratio",
                    accepted=accepted.gap_ratio,
                    found=current.gap_ratio,
                    weight="worse" if is_worse else "neutral",
                ),
            ),
        )


def _price_today(accepted: PlanFacts, current: PlanFacts) -> float | None:
    """Return today's price of an accepted training decision, where today's plan holds it."""
    if not accepted.has_price or accepted.decision is None:
        return None
    for runner_up in current.runners_up:
        if runner_up.price is not None and same_decision(accepted.decision, runner_up.decision):
            return runner_up.price
    return None


def _objective(
    accepted: PlanFacts, current: PlanFacts, tolerance: Tolerance, *, tail: str
) -> Iterator[Finding]:
    if accepted.objective is None or current.objective is None:
        return
    name = "fastest step" if current.has_price else "objective"
    figure = StoredFigure(
        name=name, value=current.objective, unit="s" if current.has_price else "ratio"
    )
    before = StoredFigure(name=name, value=accepted.objective, unit=figure.unit)
    yield from _figure(
        before,
        figure,
        allowed=tolerance.ratio,
        is_decisive=True,
        tail=tail,
    )


def _decision(accepted: PlanFacts, current: PlanFacts) -> Finding:
    tied = any(
        runner_up.is_tie and same_decision(runner_up.decision, current.decision)
        for runner_up in accepted.runners_up
    ) or any(
        runner_up.is_tie and same_decision(runner_up.decision, accepted.decision)
        for runner_up in current.runners_up
    )
    words, before, after = decision_words(accepted.decision or {}, current.decision or {})
    return Finding(
        verdict=ScenarioVerdict.DRIFT,
        words=f"another decision{' of the tie set' if tied else ''}: {words}",
        changes=(AcceptedChange(what="decision", accepted=before, found=after),),
    )


def _all_figures(
    accepted: PlanFacts, current: PlanFacts, tolerance: Tolerance, *, same: bool
) -> Iterator[Finding]:
    before = {figure.name: figure for figure in accepted.figures}
    allowed = tolerance.ratio if same else tolerance.tie_ratio
    for position, figure in enumerate(current.figures):
        former = before.get(figure.name)
        if former is None:
            continue
        # With another decision, figures that are not the objective may change either way.
        is_decisive = same or (current.has_price and position == 0)
        yield from _figure(former, figure, allowed=allowed, is_decisive=is_decisive, tail="")
        yield from _band(former, figure)


def _figure(
    accepted: StoredFigure, current: StoredFigure, *, allowed: float, is_decisive: bool, tail: str
) -> Iterator[Finding]:
    change = current.value - accepted.value
    scale = abs(accepted.value) or abs(current.value)
    if scale == 0.0 or abs(change) <= UNCHANGED_RATIO * scale:
        return
    is_better = (change > 0.0) == current.is_better_high
    beyond = abs(change) > allowed * scale and is_decisive
    verdict = ScenarioVerdict.DRIFT
    if beyond:
        verdict = ScenarioVerdict.BETTER if is_better else ScenarioVerdict.REGRESSION
    yield Finding(
        verdict=verdict,
        words=figure_words(accepted, current) + (tail if beyond else ""),
        changes=(
            AcceptedChange(
                what=current.name,
                accepted=accepted.value,
                found=current.value,
                ratio=_ratio(accepted.value, current.value),
                weight="better" if is_better else "worse",
            ),
        ),
    )


def _band(accepted: StoredFigure, current: StoredFigure) -> Iterator[Finding]:
    if accepted.band is None or current.band is None:
        return
    before = accepted.band[1] - accepted.band[0]
    after = current.band[1] - current.band[0]
    if before > 0.0 and after > 0.0 and not 1.0 / BAND_RATIO <= after / before <= BAND_RATIO:
        words = "wider" if after > before else "narrower"
        yield Finding(
            verdict=ScenarioVerdict.DRIFT,
            words=f"the band of {current.name} is x{after / before:.2f} as wide",
            changes=(
                AcceptedChange(
                    what=f"{current.name}_band",
                    accepted=before,
                    found=after,
                    ratio=after / before,
                    weight="worse" if words == "wider" else "better",
                ),
            ),
        )


def _cause(accepted: PlanFacts, current: PlanFacts, price: float | None, *, same: bool) -> str:
    """Explain a change: costs or search, which inputs, which term."""
    parts = []
    if same:
        parts.append("the same decision is priced differently")
    elif price is not None and accepted.figures:
        before = accepted.figures[0].value
        parts.append(
            "the accepted decision costs the same as before, so the search lost it"
            if abs(price - before) <= BOUND_RATIO * before
            else f"the accepted decision would now cost {percent(before, price).strip(' ()')}"
        )
    inputs = sorted(
        name
        for name in accepted.inputs.keys() & current.inputs.keys()
        if accepted.inputs[name] != current.inputs[name]
    )
    if inputs:
        parts.append(f"measurements of {', '.join(map(repr, inputs))} changed")
    elif same:
        parts.append("on the same inputs")
    moved = moved_words(accepted.terms_s, current.terms_s) if same else ""
    return "".join(f", {part}" for part in (*parts, moved) if part)


def _ratio(accepted: float | None, current: float | None) -> float | None:
    return current / accepted if accepted and current is not None else None


def _shown(value: object) -> float | str | None:
    return value if isinstance(value, float | str) or value is None else str(value)


def _to_judgement(findings: Iterable[Finding], current: PlanFacts) -> Judgement:
    listed = tuple(findings)
    verdict = next(
        (
            candidate
            for candidate in SEVERITY
            if any(finding.verdict is candidate for finding in listed)
        ),
        ScenarioVerdict.PASS,
    )
    ordered = sorted(listed, key=lambda finding: finding.verdict is not verdict)  # stable
    reason = "; ".join(finding.words for finding in ordered[:MOST_WORDS])
    if verdict is ScenarioVerdict.BETTER:
        reason += "; accept it with --update"
    return Judgement(
        verdict=verdict,
        reason=reason or _unchanged(current),
        changes=tuple(change for finding in listed for change in finding.changes),
    )


def _unchanged(current: PlanFacts) -> str:
    if not current.has_decision:
        return f"still {current.status}: {current.binding}"
    return f"same decision and prediction, {current.status}, gap {format_ratio(current.gap_ratio)}"
