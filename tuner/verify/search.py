"""Which decision to launch next: an Optuna study that starts from the plan's own proposals.

Ask and tell, so that the loop is the caller's. Seeds come first, in order; then TPE proposes points
of the neighbourhood, with the excess over the memory limit as its constraint. Decisions that were
launched already, that somebody is launching, that a target cannot launch or that do not fit are
told to the study and never launched; when the sampler has nothing new to say, the fastest predicted
decision left is next.

Where the study lives, how several processes share it, and what becomes of their trials when they
die is in study/.
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

from tuner.plan import TrainDecision
from tuner.verify.budget.scale import Scale
from tuner.verify.neighbourhood import PLANNED, Around, Point
from tuner.verify.proposal import Origin, Proposal
from tuner.verify.records import TrialRecord
from tuner.verify.study.claims import FAILED_S, Outside, Place, Progress, SharedStudy, told_s
from tuner.verify.study.membership import Left, Sampling, taking_part
from tuner.verify.study.store import Store

EXCESS: Final = "excess_bytes"

MOST_REPEATS: Final = 16
"""Proposals in a row that need no launch, after which the sampler is not asked any more."""

FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 1.0
"""Between two looks at trials of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to launch next."""

    decision: TrainDecision | None = None
    """None: whatever is new and looks best."""
    scale: Scale | None = None
    """A smaller job in place of the decision that is named."""
    origin: Origin = "repeat"
    """Of a decision that is named; a repeat may have been launched before, nothing else may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """There is nothing to launch before trials under way have ended."""

    open: tuple[Proposal, ...]


Wishes = Callable[[Progress], Sequence[Wish]]
"""Says what to launch next, best first; nothing ends the trials. Called exclusively."""


class StudySearch:
    """Proposes decisions and takes results, for this worker of a shared study."""

    def __init__(self, neighbourhood: Around, shared: SharedStudy, *, sampling: Sampling) -> None:
        self._neighbourhood = neighbourhood
        self._shared = shared
        self._sampling = sampling
        self._seeds = neighbourhood.seeds()
        self._known: dict[TrainDecision, TrialRecord] = {}
        self._open: frozenset[TrainDecision] = frozenset()
        self._smaller: frozenset[tuple[TrainDecision, Scale]] = frozenset()
        self._pause_s = FIRST_PAUSE_S
        self._is_told = False

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """Every trial that ended, by number, as of the last proposal."""
        return tuple(self._shared.records[number] for number in sorted(self._shared.records))

    def next(self, wishes: Wishes) -> Proposal | Waiting | None:
        """Claim the first wish that can be had; None when nothing is left and all have ended."""

        def claimed() -> Proposal | Waiting | None:
            progress = self._shared.look()
            if self._shared.taken_over:
                return self._shared.taken_over[0]
            self._know(progress)
            granted = (self._granted(wish) for wish in wishes(progress))
            proposal = next((one for one in granted if one is not None), None)
            if proposal is None and progress.open:
                return Waiting(open=progress.open)
            return proposal

        found = self._shared.exclusively(claimed)
        if isinstance(found, Proposal):
            self._shared.hold(found)
            self._pause_s = FIRST_PAUSE_S
        return found

    def tell(self, proposal: Proposal, record: TrialRecord) -> bool:
        """Report what a launch measured; False where another worker took the trial over."""
        return self._shared.complete(proposal, record)

    def sweep(self, remove: Callable[[frozenset[int]], None]) -> None:
        """Have removed what belongs to no trial under way; told which numbers are."""

        def swept() -> None:
            remove(frozenset(proposal.number for proposal in self._shared.look().open))

        self._shared.exclusively(swept)

    def wait(self, waiting: Waiting, pause: Callable[[float], None] = time.sleep) -> None:
        """Wait a while for trials of others, longer from call to call, and say so once."""
        if self._pause_s == LONGEST_PAUSE_S and not self._is_told:
            count = len(waiting.open)
            self._shared.told(f"waiting for trials of other processes: {count} under way")
            self._is_told = True
        pause(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, LONGEST_PAUSE_S)

    def _know(self, progress: Progress) -> None:
        """Remember what was launched and what is; smaller jobs apart from whole ones."""
        records = progress.records
        self._known = {one.decision: one for one in records if one.scale is None}
        self._open = frozenset(one.decision for one in progress.open if one.scale is None)
        trials: list[TrialRecord | Proposal] = [*records, *progress.open]
        self._smaller = frozenset(
            (one.decision, one.scale) for one in trials if one.scale is not None
        )

    def _granted(self, wish: Wish) -> Proposal | None:
        if wish.decision is None:
            return self._new()
        if wish.scale is not None:
            if wish.origin != "repeat" and (wish.decision, wish.scale) in self._smaller:
                return None
            wanted = {"decision": wish.decision, "scale": wish.scale, "origin": wish.origin}
            # The sampler hears nothing of smaller jobs: their times are of another scale.
            return self._shared.claim(wanted, Place())
        if wish.decision in self._open:
            return None
        if wish.origin != "repeat" and wish.decision in self._known:
            return None
        place = self._sampling.place_of(wish.decision)
        if not place.params:
            return None
        return self._shared.claim({"decision": wish.decision, "origin": wish.origin}, place)

    def _new(self) -> Proposal | None:
        """Claim a decision that was not launched yet; None when the neighbourhood is known."""
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
        return self._shared.claim(wanted, self._sampling.place_of(decision))

    def _sampled(self, trial: Trial) -> Proposal | None:
        """Make a proposal of a trial; one that needs no launch is told its value instead."""
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
            return self._shared.claim_asked(trial, wanted)
        self._shared.study.tell(trial, FAILED_S if known is None else told_s(known))
        return None

    def _is_new(self, point: Point) -> bool:
        """Whether the decision at the point can be launched, fits and was not launched yet."""
        decision = self._neighbourhood.decision_at(point)
        if decision is None or decision in self._known or decision in self._open:
            return False
        return self._neighbourhood.excess_bytes(decision) <= 0

    def _fastest_left(self) -> Point | None:
        around = self._neighbourhood
        points = [
            Point(degrees=degrees, option=option)
            for degrees in around.candidates
            for option in around.option_names
        ]
        return min(filter(self._is_new, points), key=around.predicted_step_s, default=None)

    def _origin(self, point: Point) -> Origin:
        if point not in self._seeds:
            return "sampler"
        if point.option != PLANNED:
            return "neighbour"
        return "plan" if point == self._seeds[0] else "alternative"


@contextmanager
def studying(
    neighbourhood: Around, *, store: Store, left: Left, outside: Outside, seed: int = 0, **how: Any
) -> Iterator[StudySearch]:
    """Take part in the study of a neighbourhood.

    Args:
        neighbourhood: where decisions may lie.
        store: where the study lives.
        left: by earlier workers in this worker's folder.
        outside: how what happens outside of the study is done.
        seed: of the sampler.
        how: further arguments of `taking_part`.
    """
    space: dict[str, BaseDistribution] = {
        "degrees": CategoricalDistribution(tuple(neighbourhood.candidates)),
        "option": CategoricalDistribution(neighbourhood.option_names),
    }

    def place_of(decision: TrainDecision) -> Place:
        point = neighbourhood.point_of(decision)
        if point is None:
            return Place()
        return Place(
            params={"degrees": point.degrees, "option": point.option},
            space=space,
            constraints={EXCESS: neighbourhood.excess_bytes(decision)},
        )

    sampling = Sampling(space=space, sampler=_sampler(seed), place_of=place_of)
    with taking_part(store, sampling=sampling, left=left, outside=outside, **how) as shared:
        yield StudySearch(neighbourhood, shared, sampling=sampling)


def _sampler(seed: int) -> optuna.samplers.TPESampler:
    with warnings.catch_warnings():
        # The multivariate sampler is still marked experimental in Optuna.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=4
        )
