"""Finds the smallest change that beats a launch: one knob, then two, everything else fixed.

Where none of them makes a launch fit, further knobs join those that need the least memory.

Each change of tuner/estimate/knobs.py is applied, dropped where a rule, the user's limits or the
target's manifest forbids it, and priced. Two calls of the analytic model suffice: one for single
changes, one for pairs of changes of different knobs (of the gradient bucket sizes only the fastest
is paired). A change is better if it fits and is faster by more than `LEAST_GAIN_RATIO`; for a
launch that does not fit, any change that fits is better: those that leave memory as a plan does,
else those that are likelier to run than to run out.

The manifest may refuse a launch that runs nevertheless; a change is dropped only for refusals that
it adds.

Not covered: three knobs at once that only save time; use `moetune plan`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from tuner.catalog.manifest import with_adapters, with_gradients
from tuner.config.train import TrainDecision
from tuner.engines.reading.launch import LaunchSettings
from tuner.engines.targets import TARGETS
from tuner.estimate.configuration import Configuration, with_degrees
from tuner.estimate.decision import to_decision
from tuner.estimate.environment import lines_to_set
from tuner.estimate.flag_lines import flag_lines
from tuner.estimate.knobs import BUCKET, MEMORY_KNOBS, OFFLOAD, KnobChange, knob_changes
from tuner.estimate.legality import broken_rules
from tuner.estimate.prices import (
    TARGET_OF,
    PricedConfiguration,
    PricingSetup,
    fits_devices,
    host_parts,
    leaves_reserve,
    price_configurations,
)
from tuner.estimate.records import TrainingChange
from tuner.search.ratios import Ratios, is_tie
from tuner.spec.refusals import refusals
from tuner.spec.search import Search
from tuner.units import format_bytes

LEAST_GAIN_RATIO: Final = 0.01
"""Smaller differences are below what two runs of one launch differ by."""
SHOWN_KNOBS: Final = 8
MOST_KNOBS: Final = 6
"""Knobs of a change that makes a launch fit."""
_KEPT: Final = 24
"""Sets of so many knobs to which another is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The result of the search."""

    smallest: TrainingChange | None
    best_pair: TrainingChange | None
    by_knob: tuple[TrainingChange, ...]
    num_tried: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Search:
    """The launch and everything that limits how it may be changed."""

    launch: LaunchSettings
    baseline: PricedConfiguration
    setup: PricingSetup
    ratios: Ratios
    limits: Search
    accepted: frozenset[str]
    """Refusals of the manifest for the launch as it is."""
    host_copies: float
    """Bytes of a node's memory that copies of checkpoints take."""
    fills_devices: bool = False
    """Changes that make a launch fit may leave less memory than a plan does."""

    def is_better(self, priced: PricedConfiguration) -> bool:
        """Say whether a configuration beats the launch, and leaves memory as it or a plan does."""
        leaves_memory = leaves_reserve(priced, self.setup)
        if not self.baseline_fits:
            return (leaves_memory or self.fills_devices) and self.fits(priced)
        leaves_memory |= bool(priced.peak_bytes_P.max() <= self.baseline.peak_bytes_P.max())
        is_faster = priced.step_s < self.baseline.step_s * (1 - LEAST_GAIN_RATIO)
        return leaves_memory and is_faster and self.fits(priced)

    @cached_property
    def baseline_fits(self) -> bool:
        """Whether the launch as it is has the memory."""
        return self.fits(self.baseline)

    def fits(self, priced: PricedConfiguration) -> bool:
        """Say whether every pipeline rank and every host has the memory."""
        if not fits_devices(priced, self.setup):
            return False
        limit = self.setup.host_limit_bytes
        return limit is None or priced.host_bytes + self.host_copies <= limit

    def is_legal(self, config: Configuration) -> bool:
        """Say whether the engine and the user allow a configuration."""
        if config == self.baseline.configuration or config.data == 0:
            return False
        if config.global_batch % (config.micro_batch * config.data * config.rounds):
            return False
        if config.data % config.replicas:
            return False
        return next(broken_rules(config, self.setup.model, name=self.launch.name), None) is None

    def is_allowed(self, config: Configuration) -> bool:
        """Say whether the limits and the manifest allow it, up to the launch's own refusals."""
        if _outside(self.limits, to_decision(config, self.setup.model)):
            return False
        return not set(manifest_refusals(config, self.setup)) - self.accepted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PricedChange:
    knob_changes: tuple[KnobChange, ...]
    priced: PricedConfiguration

    @property
    def knobs(self) -> frozenset[str]:
        """Names of what is changed."""
        return frozenset(change.limit for change in self.knob_changes)


def manifest_refusals(configuration: Configuration, setup: PricingSetup) -> tuple[str, ...]:
    """Return the refusals of the target's manifest for a configuration."""
    target = TARGETS.get(TARGET_OF[configuration.engine])
    if target is None:
        return ()
    able = with_gradients(
        with_adapters(target, setup.adapters),
        gradient_bytes=configuration.gradient_bytes,
        precision=configuration.priced_precision,
    )
    return refusals(able, model=setup.model, decision=to_decision(configuration, setup.model))


def find_changes(
    launch: LaunchSettings,
    baseline: PricedConfiguration,
    setup: PricingSetup,
    *,
    limits: Search,
    ratios: Ratios,
    host_copies: float,
) -> Changes:
    """Look for the smallest change that beats the launch."""
    search = _Search(
        launch=launch,
        baseline=baseline,
        setup=setup,
        ratios=ratios,
        limits=limits,
        accepted=frozenset(manifest_refusals(baseline.configuration, setup)),
        host_copies=host_copies,
    )
    fits = search.baseline_fits
    every = tuple(
        change
        for change in knob_changes(baseline.configuration, setup.model, setup.sheet.generation)
        if not (fits and change.limit in MEMORY_KNOBS)
    )
    single = _price_legal(search, [(change,) for change in every])
    to_pair = _changes_to_pair(every, single)
    pairs = _price_legal(
        search,
        [
            (first, second)
            for index, first in enumerate(to_pair)
            for second in to_pair[index + 1 :]
            if first.limit != second.limit
        ],
    )
    best_single = next(_improvements(search, single), None)
    best_pair = next(_improvements(search, pairs), None)
    smallest, more = best_single or best_pair, 0
    if smallest is None and not fits:
        smallest, more = _with_more_knobs(search, to_pair, [*single, *pairs])
    adds = (
        best_pair is not None
        and best_single is not None
        and best_pair.priced.step_s < best_single.priced.step_s * (1 - LEAST_GAIN_RATIO)
    )
    return Changes(
        smallest=_change(search, smallest) if smallest else None,
        best_pair=_change(search, best_pair) if best_pair and adds else None,
        by_knob=tuple(
            _change(search, candidate)
            for candidate in _best_per_knob(search, single, [] if fits else pairs)
        ),
        num_tried=len(single) + len(pairs) + more,
    )


def _with_more_knobs(
    search: _Search, changes: Sequence[KnobChange], start: Sequence[_PricedChange]
) -> tuple[_PricedChange | None, int]:
    """Add knobs to the changes that need the least memory, until one fits.

    Returns:
        The fastest that fits, of the fewest knobs, if any; and how many were priced. Where none
        leaves memory as a plan does, one that fills the devices more.
    """
    reached, tried = start, 0
    fills, full = None, replace(search, fills_devices=True)
    while reached:
        fills = fills or next(_improvements(full, reached), None)
        kept: dict[frozenset[str], _PricedChange] = {}
        for candidate in sorted(
            reached, key=lambda change: float(change.priced.peak_bytes_P.max())
        ):
            if len(kept) == _KEPT:
                break
            if candidate.knobs not in kept and search.is_allowed(candidate.priced.configuration):
                kept[candidate.knobs] = candidate
        groups = [
            (*candidate.knob_changes, change)
            for candidate in kept.values()
            if len(candidate.knob_changes) < MOST_KNOBS
            for change in changes
            if change.limit not in candidate.knobs
        ]
        reached = _price_legal(search, groups)
        tried += len(reached)
        if best := next(_improvements(search, reached), None):
            return best, tried
    return fills, tried


def _changes_to_pair(
    every: Sequence[KnobChange], single: Sequence[_PricedChange]
) -> tuple[KnobChange, ...]:
    """Drop every bucket size but the fastest, which depends little on the other knobs."""
    sizes = [size for size in single if size.knob_changes[0].limit == BUCKET]
    best = min(sizes, key=lambda size: size.priced.step_s).knob_changes if sizes else ()
    return tuple(change for change in every if change.limit != BUCKET or change in best)


def _price_legal(search: _Search, groups: Sequence[tuple[KnobChange, ...]]) -> list[_PricedChange]:
    """Apply every group of changes and price the legal results."""
    group_of: dict[Configuration, tuple[KnobChange, ...]] = {}
    for group in groups:
        configuration = search.baseline.configuration
        for change in group:
            configuration = with_dependent_knobs(change.apply(configuration))
        if configuration not in group_of and search.is_legal(configuration):
            group_of[configuration] = group
    prices = price_configurations(tuple(group_of), search.setup) if group_of else ()
    return [
        _PricedChange(knob_changes=group, priced=price)
        for group, price in zip(group_of.values(), prices, strict=True)
    ]


def with_dependent_knobs(configuration: Configuration) -> Configuration:
    """Adjust the knobs that depend on a degree."""
    if configuration.tensor == 1 and configuration.overlap_tensor:
        configuration = configuration.changed(overlap_tensor=False)
    if configuration.data == 0:
        return configuration
    return with_degrees(configuration)


def _improvements(search: _Search, candidates: Iterable[_PricedChange]) -> Iterator[_PricedChange]:
    """Yield the candidates that beat the launch and may be launched, fastest first."""
    ranked = sorted(
        (candidate for candidate in candidates if search.is_better(candidate.priced)),
        key=lambda candidate: candidate.priced.step_s,
    )
    return (candidate for candidate in ranked if search.is_allowed(candidate.priced.configuration))


def _best_per_knob(
    search: _Search, single: Sequence[_PricedChange], pairs: Sequence[_PricedChange]
) -> list[_PricedChange]:
    """Return the best setting of each knob, and of pairs of others, where it beats the launch."""
    best: list[_PricedChange] = []
    for candidates in (single, pairs):
        for candidate in _improvements(search, candidates):
            if len(best) == SHOWN_KNOBS:
                break
            if not any(better.knobs <= candidate.knobs for better in best):
                best.append(candidate)
    return sorted(best, key=lambda change: change.priced.step_s)


def _change(search: _Search, candidate: _PricedChange) -> TrainingChange:
    after = candidate.priced.configuration
    chosen, decision = (
        to_decision(configuration, search.setup.model)
        for configuration in (search.baseline.configuration, after)
    )
    ratio = candidate.priced.step_s / search.baseline.step_s
    band = search.ratios.between(chosen, decision, ratio=ratio)
    return TrainingChange(
        what=tuple(_words(search, change, after) for change in candidate.knob_changes),
        lines=flag_lines(search.launch, search.baseline.configuration, after),
        step_time_s=candidate.priced.step_s,
        ratio_band=band,
        within_band=is_tie(band),
        gain_ratio=1.0 - ratio,
        peak_memory_bytes=round(float(candidate.priced.peak_bytes_P.max())),
        decision=decision,
        environment=lines_to_set(
            search.baseline.configuration,
            after,
            search.launch.environment,
            search.setup.sheet.generation,
        ),
    )


def _words(search: _Search, change: KnobChange, after: Configuration) -> str:
    """Name a change; one that moves the optimizer with what it takes of every node."""
    if change.limit != OFFLOAD:
        return change.words
    on_node = sum(float(size_C[0]) for size_C in host_parts((after,), search.setup).values())
    return f"{change.words} ({format_bytes(on_node)} a node)"


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
