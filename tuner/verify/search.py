"""Which decision to launch next: an Optuna study that starts from the plan's own proposals.

Ask and tell, so that the loop is the caller's. The study lives in a journal file, the storage that
several processes can share and that survives a kill between any two writes. Seeds come first, in
order; then TPE proposes points of the neighbourhood, with the excess over the memory limit as its
constraint. Decisions that were launched already, that a target cannot launch or that do not fit
are told to the study and never launched.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from tuner.plan import TrainDecision
from tuner.verify.neighbourhood import PLANNED, Neighbourhood, Point
from tuner.verify.records import TrialRecord

STUDY_NAME = "verify"
EXCESS = "excess_bytes"
FAILED_S = 1e9
"""What the sampler is told of a launch that failed: slower than anything."""

MOST_REPEATS = 64
"""Proposals in a row that need no launch, after which the neighbourhood counts as known."""

Origin = Literal["plan", "neighbour", "alternative", "sampler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A decision to launch, and where the study expects the answer."""

    trial: Trial
    decision: TrainDecision
    origin: Origin


class StudySearch:
    """Proposes decisions and takes results; a resource with the study's file behind it."""

    def __init__(
        self,
        neighbourhood: Neighbourhood,
        *,
        journal: Path,
        finished: Sequence[TrialRecord],
        seed: int = 0,
    ) -> None:
        """Open the study, and settle what a killed process left running.

        Args:
            neighbourhood: where decisions may lie.
            journal: the study's file; made when absent.
            finished: trials that ended, by their own files; these are the truth.
            seed: of the sampler.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._neighbourhood = neighbourhood
        self._known = {record.decision: record for record in finished}
        journal.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            # The multivariate sampler is still marked experimental in Optuna.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=seed, multivariate=True, constant_liar=True, n_startup_trials=4
            )
        self._study = optuna.create_study(
            study_name=STUDY_NAME,
            storage=JournalStorage(JournalFileBackend(str(journal))),
            sampler=sampler,
            load_if_exists=True,
        )
        self._space: dict[str, BaseDistribution] = {
            "degrees": CategoricalDistribution(tuple(neighbourhood.candidates)),
            "option": CategoricalDistribution(neighbourhood.option_names),
        }
        self._seeds = neighbourhood.seeds()
        self._settle(finished)
        self._enqueue(self._seeds)

    def next(self) -> Proposal | None:
        """Propose a decision that was not launched yet; None when the neighbourhood is known."""
        for _ in range(MOST_REPEATS):
            trial = self._study.ask(self._space)
            point = Point(degrees=trial.params["degrees"], option=trial.params["option"])
            decision = self._neighbourhood.decision_at(point)
            if decision is None:
                self._study.tell(trial, state=TrialState.FAIL)
                continue
            excess = self._neighbourhood.excess_bytes(decision)
            trial.set_constraint(EXCESS, excess)
            known = self._known.get(decision)
            if known is not None:
                self._study.tell(trial, _value(known))
            elif excess > 0:
                self._study.tell(trial, FAILED_S)
            else:
                return Proposal(trial=trial, decision=decision, origin=self._origin(point))
        return None

    def tell(self, proposal: Proposal, record: TrialRecord) -> None:
        """Report what a launch measured."""
        self._known[record.decision] = record
        self._study.tell(proposal.trial, _value(record))

    def _settle(self, finished: Iterable[TrialRecord]) -> None:
        """Close trials that a killed process left open: by their record, else as failed."""
        by_number = {record.number: record for record in finished}
        for trial in self._study.get_trials(states=(TrialState.RUNNING,)):
            record = by_number.get(trial.number)
            if record is None:
                self._study.tell(trial.number, state=TrialState.FAIL)
            else:
                self._study.tell(trial.number, _value(record))

    def _enqueue(self, seeds: Iterable[Point]) -> None:
        for seed in seeds:
            params = {"degrees": seed.degrees, "option": seed.option}
            decision = self._neighbourhood.decision_at(seed)
            if decision is not None and decision not in self._known:
                self._study.enqueue_trial(params, skip_if_exists=False)

    def _origin(self, point: Point) -> Origin:
        if point not in self._seeds:
            return "sampler"
        if point.option != PLANNED:
            return "neighbour"
        return "plan" if point == self._seeds[0] else "alternative"


def _value(record: TrialRecord) -> float:
    return FAILED_S if record.measured_step_s is None else record.measured_step_s
