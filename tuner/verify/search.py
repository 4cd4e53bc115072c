"""Chooses the next decision to launch: an Optuna study seeded with the plan's own proposals.

Ask and tell, so that the loop is the caller's. Seeds come first, in order; then TPE proposes points
of the neighbourhood, with the excess over the memory limit as its constraint. Decisions that were
launched already, are being launched, cannot be launched by a target or do not fit are told to the
study and never launched; once the sampler repeats itself, the remaining decision with the shortest
predicted step is next.

study/ holds how the study is stored, how several processes share it, and what becomes of the trials
of a process that died.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import Trial

from tuner.config.train import TrainDecision
from tuner.verify.budget.scale import Scale
from tuner.verify.neighbourhood import PLANNED, DecisionSpace, Point
from tuner.verify.proposal import Origin, Proposal
from tuner.verify.records import TrialRecord
from tuner.verify.study.claims import (
    FAILED_S,
    SamplePoint,
    SharedStudy,
    StudyCallbacks,
    StudySnapshot,
    sampler_value_s,
)
from tuner.verify.study.membership import EarlierTrials, Sampling, join_workers
from tuner.verify.study.store import Store

EXCESS: Final = "excess_bytes"

MOST_REPEATS: Final = 16
"""Consecutive proposals without a launch after which the sampler is given up."""

FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 1.0
"""Longest polling interval for trials of other workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """A launch that the caller wants next."""

    decision: TrainDecision | None = None
    """None: a new decision of the sampler."""
    scale: Scale | None = None
    """The scaled-down job to launch instead of the decision."""
    origin: Origin = "repeat"
    """Origin of a named decision; only a repeat may have been launched before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Nothing can be launched before running trials have ended."""

    open: tuple[Proposal, ...]


RequestSource = Callable[[StudySnapshot], Sequence[LaunchRequest]]
"""Returns what to launch next, best first; an empty result ends the trials. Called exclusively."""


class StudySearch:
    """Proposes decisions and takes results, for this worker of a shared study."""

    def __init__(
        self, neighbourhood: DecisionSpace, shared: SharedStudy, *, sampling: Sampling
    ) -> None:
        self._neighbourhood = neighbourhood
        self._shared = shared
        self._sampling = sampling
        self._seeds = neighbourhood.seeds()
        self._known: dict[TrainDecision, TrialRecord] = {}
        self._open: frozenset[TrainDecision] = frozenset()
        self._smaller: frozenset[tuple[TrainDecision, Scale]] = frozenset()
        self._pause_s = FIRST_PAUSE_S
        self._has_reported = False

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """Every trial that ended, by number, as of the last proposal."""
        return tuple(self._shared.records[number] for number in sorted(self._shared.records))

    def next(self, requests: RequestSource) -> Proposal | Waiting | None:
        """Claim the first request that is possible; None if nothing is left and all have ended."""

        def claimed() -> Proposal | Waiting | None:
            progress = self._shared.look()
            if self._shared.taken_over:
                return self._shared.taken_over[0]
            self._know(progress)
            granted = (self._granted(wish) for wish in requests(progress))
            proposal = next((one for one in granted if one is not None), None)
            if proposal is None and progress.open:
                return Waiting(open=progress.open)
            return proposal

        proposal_or_wait = self._shared.exclusively(claimed)
        if isinstance(proposal_or_wait, Proposal):
            self._shared.hold(proposal_or_wait)
            self._pause_s = FIRST_PAUSE_S
        return proposal_or_wait

    def report(self, proposal: Proposal, record: TrialRecord) -> bool:
        """Report the record of a launch; False if another worker took the trial over."""
        return self._shared.complete(proposal, record)

    def sweep(self, remove: Callable[[frozenset[int]], None]) -> None:
        """Call `remove` with the numbers of the running trials, to clean up all others."""

        def swept() -> None:
            remove(frozenset(proposal.number for proposal in self._shared.look().open))

        self._shared.exclusively(swept)

    def wait(self, waiting: Waiting, pause: Callable[[float], None] = time.sleep) -> None:
        """Wait for trials of other workers, longer from call to call; print a message once."""
        if self._pause_s == LONGEST_PAUSE_S and not self._has_reported:
            count = len(waiting.open)
            self._shared.on_message(f"waiting for trials of other processes: {count} running")
            self._has_reported = True
        pause(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, LONGEST_PAUSE_S)

    def _know(self, progress: StudySnapshot) -> None:
        """Remember finished and running trials; scaled-down jobs separately."""
        records = progress.records
        self._known = {one.decision: one for one in records if one.scale is None}
        self._open = frozenset(one.decision for one in progress.open if one.scale is None)
        trials: list[TrialRecord | Proposal] = [*records, *progress.open]
        self._smaller = frozenset(
            (one.decision, one.scale) for one in trials if one.scale is not None
        )

    def _granted(self, wish: LaunchRequest) -> Proposal | None:
        if wish.decision is None:
            return self._new()
        if wish.scale is not None:
            if wish.origin != "repeat" and (wish.decision, wish.scale) in self._smaller:
                return None
            wanted = {"decision": wish.decision, "scale": wish.scale, "origin": wish.origin}
            # The sampler gets no scaled-down jobs: their step times are not comparable.
            return self._shared.claim(wanted, SamplePoint())
        if wish.decision in self._open:
            return None
        if wish.origin != "repeat" and wish.decision in self._known:
            return None
        place = self._sampling.sample_point(wish.decision)
        if not place.params:
            return None
        return self._shared.claim({"decision": wish.decision, "origin": wish.origin}, place)

    def _new(self) -> Proposal | None:
        """Claim a decision that was not launched yet; None if all were."""
        seed = next(filter(self._is_new, self._seeds), None)
        if seed is not None:
            return self._at(seed)
        for _ in range(MOST_REPEATS):
            proposal = self._sampled(self._shared.study.ask(dict(self._sampling.space)))
            if proposal is not None:
                return proposal
        fastest = self._fastest_left()
        return None if fastest is None else self._at(fastest)

    def _at(self, point: Point) -> Proposal | None:
        decision = self._neighbourhood.decision_at(point)
        if decision is None:
            return None
        wanted = {"decision": decision, "origin": self._origin(point)}
        return self._shared.claim(wanted, self._sampling.sample_point(decision))

    def _sampled(self, trial: Trial) -> Proposal | None:
        """Turn a sampled trial into a proposal; tell its value if it needs no launch."""
        point = Point(degrees=trial.params["degrees"], option=trial.params["option"])
        decision = self._neighbourhood.decision_at(point)
        if decision is None or decision in self._open:
            self._shared.fail(trial.number)
            return None
        excess = self._neighbourhood.excess_bytes(decision)
        trial.set_constraint(EXCESS, excess)
        known = self._known.get(decision)
        if known is None and excess <= 0:
            wanted = {"decision": decision, "origin": self._origin(point)}
            return self._shared.claim_sampled(trial, wanted)
        self._shared.study.tell(trial, FAILED_S if known is None else sampler_value_s(known))
        return None

    def _is_new(self, point: Point) -> bool:
        """Whether the decision at the point can be launched, fits and is new."""
        decision = self._neighbourhood.decision_at(point)
        if decision is None or decision in self._known or decision in self._open:
            return False
        return self._neighbourhood.excess_bytes(decision) <= 0

    def _fastest_left(self) -> Point | None:
        decisions = self._neighbourhood
        points = [
            Point(degrees=degrees, option=option)
            for degrees in decisions.candidates
            for option in decisions.option_names
        ]
        return min(filter(self._is_new, points), key=decisions.predicted_step_s, default=None)

    def _origin(self, point: Point) -> Origin:
        if point not in self._seeds:
            return "sampler"
        if point.option != PLANNED:
            return "neighbour"
        return "plan" if point == self._seeds[0] else "alternative"


@contextmanager
def join_study(
    neighbourhood: DecisionSpace,
    *,
    store: Store,
    left: EarlierTrials,
    outside: StudyCallbacks,
    seed: int = 0,
    **how: Any,
) -> Iterator[StudySearch]:
    """Join the study of a neighbourhood.

    Args:
        neighbourhood: where decisions may lie.
        store: of the study.
        left: trials of earlier workers in this worker's folder.
        outside: side effects outside of the study.
        seed: of the sampler.
        how: further arguments of `join_workers`.
    """
    space: dict[str, BaseDistribution] = {
        "degrees": CategoricalDistribution(tuple(neighbourhood.candidates)),
        "option": CategoricalDistribution(neighbourhood.option_names),
    }

    def sample_point(decision: TrainDecision) -> SamplePoint:
        point = neighbourhood.find_point(decision)
        if point is None:
            return SamplePoint()
        return SamplePoint(
            params={"degrees": point.degrees, "option": point.option},
            space=space,
            constraints={EXCESS: neighbourhood.excess_bytes(decision)},
        )

    sampling = Sampling(space=space, sampler=_sampler(seed), sample_point=sample_point)
    with join_workers(store, sampling=sampling, left=left, outside=outside, **how) as shared:
        yield StudySearch(neighbourhood, shared, sampling=sampling)


def _sampler(seed: int) -> optuna.samplers.TPESampler:
    with warnings.catch_warnings():
        # The multivariate sampler is still marked experimental in Optuna.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=4
        )
