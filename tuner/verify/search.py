"""Which decision to launch next: an Optuna study that starts from the plan's own proposals.

Ask and tell, so that the loop is the caller's. Seeds come first, in order; then TPE proposes points
of the neighbourhood, with the excess over the memory limit as its constraint. Decisions that were
launched already, that a target cannot launch or that do not fit are told to the study and never
launched; when the sampler has nothing new to say, the fastest predicted decision left is next.

The study lives in a journal file, the storage that several processes can share. The records of
finished trials are the truth: a journal that a kill or a full disk cut short is moved aside, and
what it lacks is told to the study again, every trial under its own number.

Not covered: two verifications of one plan at a time; the later one takes what the earlier one is
launching for abandoned.
"""

import contextlib
import fcntl
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from tuner.plan import TrainDecision
from tuner.verify.neighbourhood import PLANNED, Around, Point
from tuner.verify.proposal import Origin, Proposal
from tuner.verify.records import TrialRecord

STUDY_NAME = "verify"
EXCESS = "excess_bytes"
FAILED_S = 1e9
"""What the sampler is told of a launch that failed: slower than anything."""

MOST_REPEATS = 16
"""Proposals in a row that need no launch, after which the sampler is not asked any more."""


class StudySearch:
    """Proposes decisions and takes results; a resource with the study's file behind it."""

    def __init__(
        self,
        neighbourhood: Around,
        *,
        journal: Path,
        finished: Sequence[TrialRecord],
        under_way: Sequence[Proposal] = (),
        seed: int = 0,
    ) -> None:
        """Open the study, and settle what a killed process left running.

        Args:
            neighbourhood: where decisions may lie.
            journal: the study's file; made when absent.
            finished: trials that ended, by their own files; these are the truth.
            under_way: trials of a killed process that go on without it and are awaited.
            seed: of the sampler.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._neighbourhood = neighbourhood
        self._known = {record.decision: record for record in finished}
        self._open = {proposal.decision for proposal in under_way}
        self._space: dict[str, BaseDistribution] = {
            "degrees": CategoricalDistribution(tuple(neighbourhood.candidates)),
            "option": CategoricalDistribution(neighbourhood.option_names),
        }
        self._seeds = neighbourhood.seeds()
        self._unasked = iter(self._seeds)
        self._study = _opened(journal, space=self._space, seed=seed)
        self._settle(finished, awaited=[proposal.number for proposal in under_way])

    def next(self) -> Proposal | None:
        """Propose a decision that was not launched yet; None when the neighbourhood is known."""
        for _ in range(MOST_REPEATS):
            proposal = self._proposal(self._ask(next(filter(self._is_new, self._unasked), None)))
            if proposal is not None:
                return proposal
        fastest = self._fastest_left()
        return None if fastest is None else self._proposal(self._ask(fastest))

    def repeat(self, decision: TrainDecision) -> Proposal | None:
        """Propose a decision again that ran already; None where it lies outside the space."""
        point = self._neighbourhood.point_of(decision)
        if point is None:
            return None
        return Proposal(number=self._ask(point).number, decision=decision, origin="repeat")

    def tell(self, proposal: Proposal, record: TrialRecord) -> None:
        """Report what a launch measured."""
        self._known[record.decision] = record
        self._open.discard(record.decision)
        # An awaited trial whose journal was lost is closed in the new one already.
        if not self._study.get_trials(deepcopy=False)[proposal.number].state.is_finished():
            self._study.tell(proposal.number, _value(record))

    def _ask(self, point: Point | None) -> Trial:
        """Ask for this point, or for what the sampler likes best."""
        if point is not None:
            self._study.enqueue_trial({"degrees": point.degrees, "option": point.option})
        return self._study.ask(self._space)

    def _proposal(self, trial: Trial) -> Proposal | None:
        """Make a proposal of a trial; one that needs no launch is told its value instead."""
        point = Point(degrees=trial.params["degrees"], option=trial.params["option"])
        decision = self._neighbourhood.decision_at(point)
        if decision is None:
            self._study.tell(trial, state=TrialState.FAIL)
            return None
        excess = self._neighbourhood.excess_bytes(decision)
        trial.set_constraint(EXCESS, excess)
        known = self._known.get(decision)
        if decision in self._open:
            self._study.tell(trial, state=TrialState.FAIL)
            return None
        if known is None and excess <= 0:
            self._open.add(decision)
            return Proposal(number=trial.number, decision=decision, origin=self._origin(point))
        self._study.tell(trial, FAILED_S if known is None else _value(known))
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

    def _settle(self, finished: Sequence[TrialRecord], *, awaited: Sequence[int]) -> None:
        """Make the study say what the records say; what a killed process left open has failed."""
        by_number = {record.number: record for record in finished}
        while self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._study.ask()
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            record = by_number.get(trial.number)
            if trial.number in awaited:
                continue
            if record is None:
                self._study.tell(trial.number, state=TrialState.FAIL)
            else:
                self._study.tell(trial.number, _value(record))
        told = len(self._study.get_trials(deepcopy=False))
        for number in range(told, 1 + max((*by_number, *awaited), default=-1)):
            self._study.add_trial(self._as_told(by_number.get(number)))

    def _as_told(self, record: TrialRecord | None) -> FrozenTrial:
        """Return a trial that was never asked for here."""
        point = None if record is None else self._neighbourhood.point_of(record.decision)
        if record is None or point is None:
            return optuna.trial.create_trial(state=TrialState.FAIL)
        return optuna.trial.create_trial(
            params={"degrees": point.degrees, "option": point.option},
            distributions=self._space,
            value=_value(record),
            constraints={EXCESS: self._neighbourhood.excess_bytes(record.decision)},
        )

    def _origin(self, point: Point) -> Origin:
        if point not in self._seeds:
            return "sampler"
        if point.option != PLANNED:
            return "neighbour"
        return "plan" if point == self._seeds[0] else "alternative"


def _value(record: TrialRecord) -> float:
    return FAILED_S if record.measured_step_s is None else record.measured_step_s


class _KernelLock(JournalFileOpenLock):
    """A lock that ends with the process that holds it; Optuna's own outlive a kill."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._file = file
        self._descriptor = -1

    def acquire(self) -> bool:
        self._descriptor = os.open(self._file, os.O_CREAT | os.O_RDWR, 0o666)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        os.close(self._descriptor)


def _opened(journal: Path, *, space: dict[str, BaseDistribution], seed: int) -> optuna.Study:
    """Open the study of a journal, or begin another one when it cannot be used."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        # The multivariate sampler is still marked experimental in Optuna.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=4
        )

    def opened() -> optuna.Study:
        lock = _KernelLock(journal.with_name(f"{journal.name}.lock"))
        return optuna.create_study(
            study_name=STUDY_NAME,
            storage=JournalStorage(JournalFileBackend(str(journal), lock_obj=lock)),
            sampler=sampler,
            load_if_exists=True,
        )

    if _is_whole(journal):
        # Whole lines can still tell a story that Optuna cannot follow.
        with contextlib.suppress(AssertionError, LookupError, TypeError, ValueError):
            study = opened()
            asked = [trial.distributions for trial in study.get_trials(deepcopy=False)]
            if all(space.get(name) == one for each in asked for name, one in each.items()):
                return study
    journal.replace(journal.with_name(f"{journal.name}.damaged"))
    return opened()


def _is_whole(journal: Path) -> bool:
    """Whether every line was written to its end; Optuna appends to half a line unawares."""
    if not journal.exists():
        return True
    data = journal.read_bytes()
    try:
        lines = [json.loads(line) for line in data.splitlines()]
    except ValueError:
        return False
    return data[-1:] in (b"", b"\n") and all(isinstance(line, dict) for line in lines)
