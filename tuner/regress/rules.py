"""Whether a plan is as good as the accepted one, rule by rule.

Planning the same question on the same inputs again gives the same plan, so what differs has a
cause. Each rule looks at one thing and says what it means; the gravest finding is the verdict.

    objective, figures   beyond the tolerance: better or worse; inside: drift
    decision             another one at an equal price, or of the tie set: drift
    certificate          a wider gap: worse; a bound that a plan known today refutes: broken
    bands                much wider or narrower: drift
    measurements         significantly slower cases of the profile: worse

A decision is allowed `tie_ratio`, because the planner itself chooses among decisions that it cannot
tell apart (tuner/planner/analytic/preference.py); the same decision is only allowed `ratio`.

Not covered: whether the model is right. That is what `moetune backtest` is for.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tuner.regress.observed import Figure, Json, Observed, question_changes
from tuner.regress.records import Change, Verdict
from tuner.regress.words import (
    decision_words,
    figure_words,
    gap_words,
    moved_words,
    percent,
    question_words,
)

UNCHANGED_RATIO: Final = 1e-6
"""Numbers this near are equal: sums in another order, texts in fewer digits."""
BOUND_RATIO: Final = 1e-3
"""A bound above a known price by more than this share is broken: solvers stop within less."""
BAND_RATIO: Final = 1.25
"""A band is told of once its width changed by this factor."""


_NUMBERS: Final = re.compile(r"[+-]?\d[\d.,]*( ?[%kMGTm]?i?[Bs]?\b)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a plan may move before it is better or worse."""

    ratio: float = 0.01
    """Of a predicted number. Nothing is measured anew, so there is no noise to wait out; below a
    hundredth a change of the model is not worth failing a build for."""
    tie_ratio: float = 0.02
    """Of a predicted number where the decision changed: the planner's own TOLERANCE_RATIO."""
    gap_ratio: float = 0.01
    """That a proven gap may widen by, in absolute terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one rule says."""

    verdict: Verdict
    words: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The verdict with its reason."""

    verdict: Verdict
    reason: str
    changes: tuple[Change, ...]


GRAVITY: Final = (Verdict.INCOMPARABLE, Verdict.REGRESSION, Verdict.BETTER, Verdict.DRIFT)
"""The first of these that any rule says is the verdict."""
MOST_WORDS: Final = 3
"""Findings in a reason; the others are among the changes."""


def judge(
    accepted: Observed,
    found: Observed,
    *,
    tolerance: Tolerance,
    beside: Sequence[Finding] = (),
    price_today: float | None = None,
) -> Judged:
    """Compare a plan with the accepted one.

    Args:
        accepted: what was accepted, or what another version plans.
        found: what is planned now.
        tolerance: how far it may move.
        beside: what is known of other sources: measurements, effort.
        price_today: first figure of the accepted decision as it is priced now; None: not known
            but for what the plan's runners-up say.
    """
    price = _price_today(accepted, found) if price_today is None else price_today
    asked = (*_other_launch(accepted, found), *_another_question(accepted, found))
    if any(one.verdict is Verdict.INCOMPARABLE for one in asked):
        return _judged(asked, found)
    return _judged((*asked, *_findings(accepted, found, tolerance, price), *beside), found)


def same_decision(accepted: Json | None, found: Json | None) -> bool:
    """Whether two decisions agree in every field that both versions know."""
    if accepted is None or found is None:
        return accepted is found
    shared = accepted.keys() & found.keys()
    return all(_alike(accepted[name], found[name]) for name in shared)


def _alike(accepted: object, found: object) -> bool:
    return not any(question_changes(accepted, found))


def _findings(
    accepted: Observed, found: Observed, tolerance: Tolerance, price: float | None
) -> Iterator[Finding]:
    yield from _status(accepted, found)
    if not (accepted.is_found and found.is_found):
        yield from _binding(accepted, found)
        return
    same = same_decision(accepted.decision, found.decision)
    yield from _certificate(accepted, found, tolerance, price)
    yield from _objective(
        accepted, found, tolerance, tail=_cause(accepted, found, price, same=same)
    )
    if not same:
        yield _decision(accepted, found)
    yield from _all_figures(accepted, found, tolerance, same=same)
    yield from _binding(accepted, found)


def _other_launch(accepted: Observed, found: Observed) -> Iterator[Finding]:
    """What an accepted placement was made for, and is no more.

    Its loads follow from the dispatch rule of its release and from which ranks share a node. Other
    nodes or ranks are another question; another release or rule is the same one.
    """
    for engine in sorted(accepted.made_for.keys() & found.made_for.keys()):
        before, after = accepted.made_for[engine], found.made_for[engine]
        changes = tuple(
            Change(
                what=f"made_for.{engine}.{name}", accepted=str(before[name]), found=str(after[name])
            )
            for name in ("release", "nodes", "ep_size", "dispatch", "a2a_backend")
            if name in before and name in after and before[name] != after[name]
        )
        if not changes:
            continue
        said = ", ".join(
            f"{one.what.rpartition('.')[2]} {one.accepted} (now {one.found})" for one in changes
        )
        shape = any(before.get(name) != after.get(name) for name in ("nodes", "ep_size"))
        yield Finding(
            verdict=Verdict.INCOMPARABLE if shape else Verdict.DRIFT,
            words=f"the accepted placement was made for {engine} with {said}: what was emitted must"
            " be planned and emitted again",
            changes=changes,
        )


def _another_question(accepted: Observed, found: Observed) -> Iterator[Finding]:
    if accepted.kind != found.kind:
        differences = [("goal.kind", accepted.kind, found.kind)]
    else:
        differences = list(question_changes(accepted.question, found.question))
    if differences:
        at, before, after = differences[0]
        yield Finding(
            verdict=Verdict.INCOMPARABLE,
            words=question_words(differences),
            changes=(Change(what=at, accepted=_shown(before), found=_shown(after)),),
        )


def _status(accepted: Observed, found: Observed) -> Iterator[Finding]:
    change = Change(what="status", accepted=accepted.status, found=found.status)
    if accepted.is_found and not found.is_found:
        yield Finding(
            verdict=Verdict.REGRESSION,
            words=f"was {accepted.status}, now {found.status}: {found.binding}",
            changes=(change.model_copy(update={"weight": "worse"}),),
        )
    elif found.is_found and not accepted.is_found:
        yield Finding(
            verdict=Verdict.BETTER,
            words=f"was {accepted.status} ({accepted.binding}), now there is a plan",
            changes=(change.model_copy(update={"weight": "better"}),),
        )
    elif not found.is_found and accepted.status != found.status:
        worse = found.status == "unknown"
        yield Finding(
            verdict=Verdict.REGRESSION if worse else Verdict.DRIFT,
            words=f"was {accepted.status}, now {found.status}: {found.binding}",
            changes=(change.model_copy(update={"weight": "worse" if worse else "neutral"}),),
        )
    if accepted.verdict_word != found.verdict_word and accepted.is_found and found.is_found:
        worse = accepted.verdict_word == "worth it"
        yield Finding(
            verdict=Verdict.REGRESSION if worse else Verdict.DRIFT,
            words=f"placement was {accepted.verdict_word!r}, now {found.verdict_word!r}",
            changes=(
                Change(what="verdict", accepted=accepted.verdict_word, found=found.verdict_word),
            ),
        )


def _binding(accepted: Observed, found: Observed) -> Iterator[Finding]:
    """What stands in the way; other numbers in the same words are no other constraint."""
    before, after = (_NUMBERS.sub("#", each.binding) for each in (accepted, found))
    if before != after:
        yield Finding(
            verdict=Verdict.DRIFT,
            words=f"what binds was {accepted.binding!r}, now {found.binding!r}",
            changes=(
                Change(what="binding_constraint", accepted=accepted.binding, found=found.binding),
            ),
        )


def _certificate(
    accepted: Observed, found: Observed, tolerance: Tolerance, price: float | None
) -> Iterator[Finding]:
    """Proofs: what contradicts itself or a known plan, and what is proven less well."""
    bound, objective = found.bound, found.objective
    change = Change(
        what="bound",
        accepted=accepted.bound,
        found=bound,
        ratio=_ratio(accepted.bound, bound),
        weight="worse",
    )
    if bound is not None and objective is not None and bound > objective * (1.0 + UNCHANGED_RATIO):
        yield Finding(
            verdict=Verdict.REGRESSION,
            words=f"bound {bound:.6g} lies above its own objective {objective:.6g}: the solver's"
            " bound is broken",
            changes=(change,),
        )
        return
    if bound is not None and price is not None and bound > price * (1.0 + BOUND_RATIO):
        yield Finding(
            verdict=Verdict.REGRESSION,
            words=f"claims that nothing is below {bound:.6g}, but the accepted decision still costs"
            f" {price:.6g}: the solver's bound is broken",
            changes=(change,),
        )
        return
    widened = found.gap_ratio - accepted.gap_ratio
    lost = accepted.status == "optimal" and found.status != "optimal"
    if widened > tolerance.gap_ratio or lost or abs(widened) > UNCHANGED_RATIO:
        is_worse = widened > tolerance.gap_ratio
        yield Finding(
            verdict=Verdict.REGRESSION if is_worse else Verdict.DRIFT,
            words=gap_words(accepted, found),
            changes=(
                Change(
                    what="gap_ratio",
                    accepted=accepted.gap_ratio,
                    found=found.gap_ratio,
                    weight="worse" if is_worse else "neutral",
                ),
            ),
        )


def _price_today(accepted: Observed, found: Observed) -> float | None:
    """What an accepted training decision costs today where today's plan has priced it."""
    if accepted.kind != "train" or accepted.decision is None:
        return None
    for one in found.runners_up:
        if one.price is not None and same_decision(accepted.decision, one.decision):
            return one.price
    return None


def _objective(
    accepted: Observed, found: Observed, tolerance: Tolerance, *, tail: str
) -> Iterator[Finding]:
    if accepted.objective is None or found.objective is None:
        return
    name = {"train": "fastest step", "serve": "objective", "place": "objective"}[found.kind]
    figure = Figure(
        name=name, value=found.objective, unit="s" if found.kind == "train" else "ratio"
    )
    before = Figure(name=name, value=accepted.objective, unit=figure.unit)
    yield from _figure(
        before,
        figure,
        allowed=tolerance.ratio,
        is_decisive=True,
        tail=tail,
    )


def _decision(accepted: Observed, found: Observed) -> Finding:
    tied = any(
        one.is_tie and same_decision(one.decision, found.decision) for one in accepted.runners_up
    ) or any(
        one.is_tie and same_decision(one.decision, accepted.decision) for one in found.runners_up
    )
    words, before, after = decision_words(accepted.decision or {}, found.decision or {})
    return Finding(
        verdict=Verdict.DRIFT,
        words=f"another decision{' of the tie set' if tied else ''}: {words}",
        changes=(Change(what="decision", accepted=before, found=after),),
    )


def _all_figures(
    accepted: Observed, found: Observed, tolerance: Tolerance, *, same: bool
) -> Iterator[Finding]:
    before = {figure.name: figure for figure in accepted.figures}
    allowed = tolerance.ratio if same else tolerance.tie_ratio
    for position, figure in enumerate(found.figures):
        former = before.get(figure.name)
        if former is None:
            continue
        # The planner may trade what it does not minimise once it decides otherwise.
        is_decisive = same or (found.kind == "train" and position == 0)
        yield from _figure(former, figure, allowed=allowed, is_decisive=is_decisive, tail="")
        yield from _band(former, figure)


def _figure(
    accepted: Figure, found: Figure, *, allowed: float, is_decisive: bool, tail: str
) -> Iterator[Finding]:
    change = found.value - accepted.value
    scale = abs(accepted.value) or abs(found.value)
    if scale == 0.0 or abs(change) <= UNCHANGED_RATIO * scale:
        return
    is_better = (change > 0.0) == found.is_better_high
    beyond = abs(change) > allowed * scale and is_decisive
    verdict = Verdict.DRIFT
    if beyond:
        verdict = Verdict.BETTER if is_better else Verdict.REGRESSION
    yield Finding(
        verdict=verdict,
        words=figure_words(accepted, found) + (tail if beyond else ""),
        changes=(
            Change(
                what=found.name,
                accepted=accepted.value,
                found=found.value,
                ratio=_ratio(accepted.value, found.value),
                weight="better" if is_better else "worse",
            ),
        ),
    )


def _band(accepted: Figure, found: Figure) -> Iterator[Finding]:
    if accepted.band is None or found.band is None:
        return
    before = accepted.band[1] - accepted.band[0]
    after = found.band[1] - found.band[0]
    if before > 0.0 and after > 0.0 and not 1.0 / BAND_RATIO <= after / before <= BAND_RATIO:
        words = "wider" if after > before else "narrower"
        yield Finding(
            verdict=Verdict.DRIFT,
            words=f"the band of {found.name} is x{after / before:.2f} as wide",
            changes=(
                Change(
                    what=f"{found.name}_band",
                    accepted=before,
                    found=after,
                    ratio=after / before,
                    weight="worse" if words == "wider" else "better",
                ),
            ),
        )


def _cause(accepted: Observed, found: Observed, price: float | None, *, same: bool) -> str:
    """Say what the plan makes of a change: costs or search, which inputs, which term."""
    parts = []
    if same:
        parts.append("the same decision is priced differently")
    elif price is not None and accepted.figures:
        before = accepted.figures[0].value
        parts.append(
            "the accepted decision costs what it did, so the search lost it"
            if abs(price - before) <= BOUND_RATIO * before
            else f"the accepted decision would now cost {percent(before, price).strip(' ()')}"
        )
    inputs = sorted(
        name
        for name in accepted.inputs.keys() & found.inputs.keys()
        if accepted.inputs[name] != found.inputs[name]
    )
    if inputs:
        parts.append(f"measurements of {', '.join(map(repr, inputs))} changed")
    elif same:
        parts.append("on the same inputs")
    moved = moved_words(accepted.terms_s, found.terms_s) if same else ""
    return "".join(f", {part}" for part in (*parts, moved) if part)


def _ratio(accepted: float | None, found: float | None) -> float | None:
    return found / accepted if accepted and found is not None else None


def _shown(value: object) -> float | str | None:
    return value if isinstance(value, float | str) or value is None else str(value)


def _judged(findings: Iterable[Finding], found: Observed) -> Judged:
    listed = tuple(findings)
    verdict = next(
        (one for one in GRAVITY if any(each.verdict is one for each in listed)), Verdict.PASS
    )
    ordered = sorted(listed, key=lambda each: each.verdict is not verdict)  # stable
    reason = "; ".join(each.words for each in ordered[:MOST_WORDS])
    if verdict is Verdict.BETTER:
        reason += "; accept it with --update"
    return Judged(
        verdict=verdict,
        reason=reason or _unchanged(found),
        changes=tuple(change for each in listed for change in each.changes),
    )


def _unchanged(found: Observed) -> str:
    if not found.is_found:
        return f"still {found.status}: {found.binding}"
    return f"same decision and prediction, {found.status}, gap {found.gap_ratio:.1%}"
