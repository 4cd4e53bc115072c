"""The trial loop of every kind of decision: propose, launch, record, until nothing is left.

    for each proposal of the study, until there are enough trials:
        launch it; tell the study, which keeps its record
    after two failures for the same reason, start no more
    if only other processes still run trials, wait for them

A trial that hangs, runs out of memory or crashes is a result like any other. What differs between
training runs and deployments enters as `StartTrial`. Several processes may run this loop on one
study: the trials of all count, and each concludes from all records.

A single launch runs in this thread, where Ctrl-C interrupts its wait. Several run in threads; an
exception in this thread, Ctrl-C included, tells them to stop and waits until they have ended their
processes.

Two configurations that crash with the same last error, or hang before the first step, point to the
environment: a missing module, a command that does not exist, a port in use. Further trials would
fail likewise. Running out of memory or being slow does not count: those are results about the
configuration. Nor does the end of a budget or a Slurm time limit, or a job that Slurm lost. A
successful trial shows that the environment works, so only failures since the last success count;
failures of an earlier call do not, because their cause may be fixed by now.

Reasons are compared without what differs between launches: folders, ports, addresses, dates.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from tuner.verify.budget.scale import Scale
from tuner.verify.launcher import NO_REPORT, NODE_GONE
from tuner.verify.records import AnyRecord, Decision, LaunchRecord, LaunchRequest, Proposal, Trial

if TYPE_CHECKING:
    # Optuna is imported where a study is opened, not where records are read.
    from tuner.verify.search import StudySearch
    from tuner.verify.study.shared import StudySnapshot

ENOUGH: Final = 2
"""Identical failures."""

FOLDER: Final = re.compile(r"[^\s'\"=:(\[]*/")
PASSING: Final = (
    re.compile(r"\d{4}-\d{2}-\d{2}[ T]?"),
    re.compile(r"\d{1,2}:\d{2}:\d{2}([.,]\d+)?"),
    re.compile(r"0x[0-9a-fA-F]+"),
    re.compile(r"(?<=:)\d{4,5}\b"),
    re.compile(r"\brank[ :]?\d+\b", re.IGNORECASE),
)
"""Dates, times, addresses, ports, and the first rank that failed."""

NO_RESPONSE: Final = "did not answer within"
"""Phrase in the reason of a deployment that was never ready."""
HUNG: Final = re.compile(rf"{NO_REPORT} \d+ s;|\S+ {NO_RESPONSE} \d+ s:")
"""The reason of a trial without a step before its deadline, or of a deployment that was never
ready."""


def failure_cause(ended: LaunchRecord[Any] | Trial) -> str:
    """Return the cause of a failure, equal for identical failures; empty if unknown."""
    if ended.status == "timeout":
        return "timeout" if HUNG.match(ended.reason) else ""
    if ended.status != "crashed" or not ended.reason or ended.reason == NODE_GONE:
        return ""
    cause = FOLDER.sub("", ended.reason)
    for passing in PASSING:
        cause = passing.sub("", cause)
    return f"crashed: {' '.join(cause.split())}"


def identical_failures(records: Sequence[AnyRecord]) -> tuple[AnyRecord, ...]:
    """Return the failures with one cause since the last success, if there are enough."""
    by_cause: dict[str, list[AnyRecord]] = {}
    for record in records:
        if record.status == "ok":
            by_cause.clear()
        elif cause := failure_cause(record):
            by_cause.setdefault(cause, []).append(record)
    return next((tuple(trials) for trials in by_cause.values() if len(trials) >= ENOUGH), ())


def stop_notes(
    records: Sequence[LaunchRecord[Any]], *, earlier: Collection[int], trials: int
) -> tuple[str, ...]:
    """Say why no more trials were started; nothing if failures were not the reason.

    Args:
        records: of all trials.
        earlier: numbers of the trials of earlier calls.
        trials: the requested number.
    """
    failures = identical_failures([record for record in records if record.number not in earlier])
    left = trials - sum(record.origin != "repeat" for record in records)
    if not failures or left < 1:
        return ()
    return (
        f"stopped: {len(failures)} trials failed identically, so {left} of {trials} were not"
        " launched; fix the cause and verify with --resume, which retries these first",
    )


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


StartTrial = Callable[[Proposal[Decision], Sequence[AnyRecord]], Callable[[], AnyRecord]]
"""Prepares a trial, beside the records so far; returns what runs it to its record, perhaps in
another thread."""
Affordable = Callable[
    ["StudySnapshot[Decision, AnyRecord]"], Mapping[Decision, Scale | None] | None
]
"""Returns what may be launched now, each with its scaled-down job or None; None: all."""


def run_trials(
    study: "StudySearch[Decision, AnyRecord]",
    *,
    start: "StartTrial[Decision, AnyRecord]",
    trials: int,
    ended: Callable[[AnyRecord], None],
    parallel: int = 1,
    stop: Callable[[], None] = lambda: None,
    affordable: "Affordable[Decision, AnyRecord]" = lambda _progress: None,
) -> tuple[AnyRecord, ...]:
    """Launch proposals until there are enough trials or nothing new is left.

    Args:
        study: proposes decisions and keeps their records.
        start: launches them.
        trials: most decisions to launch, those of earlier calls included.
        ended: called with each record of this call, once it is written.
        parallel: launches at once.
        stop: ends parallel launches if this is left by an exception.
        affordable: limits what is launched.

    Returns:
        The records of all trials of the study, by number, whichever process launched them.
    """
    requests = partial(_requests, affordable=affordable, trials=trials, earlier=study.earlier)
    running: dict[Future[AnyRecord], Proposal[Decision]] = {}
    with launch_threads(parallel, stop=stop) as threads:
        while True:
            next_step = study.propose(requests) if len(running) < parallel else None
            if isinstance(next_step, Proposal):
                running[threads.submit(start(next_step, study.records))] = next_step
            elif running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                first = min(done, key=lambda future: running[future].number)
                proposal, record = running.pop(first), first.result()
                if study.record(proposal, record):
                    ended(record)
            elif next_step is None:
                return study.records
            else:
                study.wait(next_step)


def _requests(
    progress: "StudySnapshot[Decision, AnyRecord]",
    *,
    affordable: "Affordable[Decision, AnyRecord]",
    trials: int,
    earlier: Collection[int],
) -> list[LaunchRequest[Decision]]:
    """Return what to launch next, best first."""
    if identical_failures([record for record in progress.records if record.number not in earlier]):
        return []
    begun = sum(record.origin != "repeat" for record in progress.records) + len(progress.open)
    if begun >= trials:
        return []
    among = affordable(progress)
    retries = [
        retry
        for retry in _retries(progress, earlier)
        if among is None or (retry.decision, retry.scale) in among.items()
    ]
    return [*retries, LaunchRequest(among=among)]


def _retries(
    progress: "StudySnapshot[Decision, AnyRecord]", earlier: Collection[int]
) -> list[LaunchRequest[Decision]]:
    """Return the identical failures of an earlier call, to retry each once."""
    failed = identical_failures([record for record in progress.records if record.number in earlier])
    last = max((record.number for record in failed), default=-1)
    begun = [record.job for record in progress.records if record.number > last]
    begun += [proposal.job for proposal in progress.open]
    return [
        LaunchRequest(decision=decision, scale=scale)
        for decision, scale in dict.fromkeys(record.job for record in failed)
        if (decision, scale) not in begun
    ]


class ThisThread(Executor):
    """Runs what is submitted at once, where Ctrl-C interrupts it."""

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Return the finished run."""
        ended: Future[Result] = Future()
        ended.set_result(fn(*args, **kwargs))
        return ended


@contextmanager
def launch_threads(parallel: int, *, stop: Callable[[], None]) -> Iterator[Executor]:
    """Yield what runs launches; `stop` ends parallel ones if this is left by an exception."""
    if parallel == 1:
        yield ThisThread()
        return
    with ThreadPoolExecutor(max_workers=parallel) as threads:
        try:
            yield threads
        except BaseException:
            stop()
            raise
