"""Finds the smallest change that beats a launch: one knob, then two, everything else fixed.

Every turn of tuner/estimate/knobs.py is applied, thrown out where a rule, the user's limits or the
target's manifest speaks against it, and priced; all in two calls of the analytic model, one for
single turns and one for pairs of turns of unlike knobs (of the sizes of gradient buckets, only the
fastest alone is paired). Better means: fits, and faster by more than
`LEAST_GAIN_RATIO`; for a launch that does not fit, fitting is better than any time.

The manifest may refuse the launch itself, which runs nevertheless; a change is held back only for
what it adds to that.

Not covered: three knobs at once, which is what `moetune plan` is for.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tuner.estimate.configuration import Configuration, rearranged
from tuner.estimate.decision import decision_of
from tuner.estimate.environment import lines_to_set
from tuner.estimate.flag_lines import flag_lines
from tuner.estimate.knobs import BUCKET, Turn, turns
from tuner.estimate.launch import LaunchSettings
from tuner.estimate.legality import broken_rules
from tuner.estimate.prices import TARGET_OF, Bench, Priced, priced
from tuner.estimate.records import Change
from tuner.plan import TrainDecision
from tuner.planner.ratios import Ratios, is_tie
from tuner.spec.capabilities import TARGETS, Capabilities, refusals
from tuner.spec.manifests.manifest import with_gradients
from tuner.spec.search import Search

LEAST_GAIN_RATIO: Final = 0.01
"""Smaller differences are below what two runs of one launch differ by."""
SHOWN_KNOBS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What was found."""

    smallest: Change | None
    best_pair: Change | None
    by_knob: tuple[Change, ...]
    num_tried: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Search:
    """The launch and everything that limits how it may be changed."""

    launch: LaunchSettings
    own: Priced
    bench: Bench
    ratios: Ratios
    limits: Search
    target: Capabilities | None
    accepted: frozenset[str]
    """What the manifest says against the launch as it is."""

    def is_better(self, one: Priced) -> bool:
        """Say whether a configuration beats the launch."""
        if not self.fits(one):
            return False
        return not self.fits(self.own) or one.step_s < self.own.step_s * (1 - LEAST_GAIN_RATIO)

    def fits(self, one: Priced) -> bool:
        """Say whether every pipeline rank has the memory."""
        return float(one.peak_bytes_P.max()) <= self.bench.memory_limit_bytes

    def is_legal(self, one: Configuration) -> bool:
        """Say whether the engine and the user allow a configuration."""
        if one == self.own.configuration or one.data == 0:
            return False
        if one.global_batch % (one.micro_batch * one.data * one.rounds):
            return False
        if one.data % one.replicas:
            return False
        return next(broken_rules(one, self.bench.model, name=self.launch.name), None) is None

    def is_allowed(self, one: Configuration) -> bool:
        """Say whether limits and manifest have nothing new against it."""
        decision = decision_of(one, self.bench.model)
        if _outside(self.limits, decision):
            return False
        if self.target is None:
            return True
        able = with_gradients(
            self.target, gradient_bytes=one.gradient_bytes, precision=one.precision
        )
        return not set(refusals(able, model=self.bench.model, decision=decision)) - self.accepted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidate:
    turns: tuple[Turn, ...]
    priced: Priced


def manifest_refusals(own: Configuration, bench: Bench) -> tuple[str, ...]:
    """Return what the target's manifest says against a configuration."""
    target = TARGETS.get(TARGET_OF[own.engine])
    if target is None:
        return ()
    able = with_gradients(target, gradient_bytes=own.gradient_bytes, precision=own.precision)
    return refusals(able, model=bench.model, decision=decision_of(own, bench.model))


def find_changes(
    launch: LaunchSettings, own: Priced, bench: Bench, *, limits: Search, ratios: Ratios
) -> Changes:
    """Look for the smallest change that beats the launch."""
    search = _Search(
        launch=launch,
        own=own,
        bench=bench,
        ratios=ratios,
        limits=limits,
        target=TARGETS.get(TARGET_OF[launch.engine]),
        accepted=frozenset(manifest_refusals(own.configuration, bench)),
    )
    every = tuple(turns(own.configuration, bench.model, bench.sheet.generation))
    single = _tried(search, [(turn,) for turn in every])
    paired = _paired(every, single)
    pairs = _tried(
        search,
        [
            (first, second)
            for index, first in enumerate(paired)
            for second in paired[index + 1 :]
            if first.knob != second.knob
        ],
    )
    best_single = next(_better(search, single), None)
    best_pair = next(_better(search, pairs), None)
    smallest = best_single or best_pair
    adds = (
        best_pair is not None
        and best_single is not None
        and best_pair.priced.step_s < best_single.priced.step_s * (1 - LEAST_GAIN_RATIO)
    )
    return Changes(
        smallest=_change(search, smallest) if smallest else None,
        best_pair=_change(search, best_pair) if best_pair and adds else None,
        by_knob=tuple(_change(search, one) for one in _per_knob(search, single)),
        num_tried=len(single) + len(pairs),
    )


def _paired(every: Sequence[Turn], single: Sequence[_Candidate]) -> tuple[Turn, ...]:
    """Leave out every size of buckets but the fastest: which one it is hangs little on the rest."""
    sizes = [one for one in single if one.turns[0].knob == BUCKET]
    best = min(sizes, key=lambda one: one.priced.step_s).turns if sizes else ()
    return tuple(turn for turn in every if turn.knob != BUCKET or turn in best)


def _tried(search: _Search, groups: Sequence[tuple[Turn, ...]]) -> list[_Candidate]:
    """Apply and price what is legal."""
    found: dict[Configuration, tuple[Turn, ...]] = {}
    for group in groups:
        own = search.own.configuration
        for turn in group:
            own = _settled(turn.apply(own))
        if own not in found and search.is_legal(own):
            found[own] = group
    prices = priced(tuple(found), search.bench) if found else ()
    return [
        _Candidate(turns=group, priced=price)
        for group, price in zip(found.values(), prices, strict=True)
    ]


def _settled(own: Configuration) -> Configuration:
    """Let what depends on a degree follow it."""
    if own.tensor == 1 and own.overlap_tensor:
        own = replace(own, overlap_tensor=False)
    if own.data == 0:
        return own
    return rearranged(own)


def _better(search: _Search, candidates: Iterable[_Candidate]) -> Iterator[_Candidate]:
    """Yield what beats the launch and may be launched, fastest first."""
    ranked = sorted(
        (one for one in candidates if search.is_better(one.priced)),
        key=lambda one: one.priced.step_s,
    )
    return (one for one in ranked if search.is_allowed(one.priced.configuration))


def _per_knob(search: _Search, single: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """Yield each knob's best setting where it beats the launch, best first."""
    seen: set[str] = set()
    for one in _better(search, single):
        knob = one.turns[0].knob
        if knob not in seen:
            seen.add(knob)
            yield one
        if len(seen) == SHOWN_KNOBS:
            return


def _change(search: _Search, one: _Candidate) -> Change:
    after = one.priced.configuration
    chosen, decision = (
        decision_of(each, search.bench.model) for each in (search.own.configuration, after)
    )
    ratio = one.priced.step_s / search.own.step_s
    band = search.ratios.between(chosen, decision, ratio=ratio)
    return Change(
        what=tuple(turn.what for turn in one.turns),
        lines=flag_lines(search.launch, search.own.configuration, after),
        step_time_s=one.priced.step_s,
        ratio_band=band,
        within_band=is_tie(band),
        gain_ratio=1.0 - ratio,
        peak_memory_bytes=round(float(one.priced.peak_bytes_P.max())),
        decision=decision,
        environment=lines_to_set(
            search.own.configuration,
            after,
            search.launch.environment,
            search.bench.sheet.generation,
        ),
    )


def _outside(limits: Search, decision: TrainDecision) -> bool:
    """Say whether the user's limits leave a decision out; lists must lie inside as a whole."""
    for name in type(limits).model_fields:
        allowed = getattr(limits, name)
        if allowed is None:
            continue
        value = getattr(decision, name)
        values = value if isinstance(value, tuple) else (value,)
        if not set(values) <= set(allowed):
            return True
    return False
