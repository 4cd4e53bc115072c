"""The study: what it proposes, and what is left of it after kills and damage."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tuner.config.train import TrainDecision
from tuner.plans.folder import JOURNAL_NAME, TRIALS_NAME
from tuner.spec.search import Search
from tuner.verify.neighbourhood import Neighbourhood
from tuner.verify.proposal import Proposal
from tuner.verify.records import TrialRecord
from tuner.verify.search import LaunchRequest, StudySearch, Waiting
from tuner.verify.study.claims import StudySnapshot

DecisionSpace = Callable[..., Neighbourhood]
Record = Callable[..., TrialRecord]
Join = Callable[..., StudySearch]

NARROW = Search(
    micro_batch_size=(2, 4),
    tensor_model_parallel_size=(1,),
    recompute=("selective",),
    chunks=(1, 4),
)


def _anything(_progress: StudySnapshot) -> list[LaunchRequest]:
    return [LaunchRequest()]


def _next(study: StudySearch) -> Proposal | None:
    result = study.next(_anything)
    assert not isinstance(result, Waiting)
    return result


def _run(
    study: StudySearch, record: Record, launches: int
) -> Iterator[tuple[Proposal, TrialRecord]]:
    """Answer proposals, each a little slower than the one before."""
    for _ in range(launches):
        proposal = _next(study)
        if proposal is None:
            return
        number = proposal.number
        reply = record(number, measured_s=1.0 + number, decision=proposal.decision)
        study.report(proposal, reply)
        yield proposal, reply


def test_the_seeds_come_first_and_in_order(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = space(planned)
    proposed = [proposal for proposal, _ in _run(join(one, planned), record, 8)]
    wanted = list(dict.fromkeys(one.decision_at(seed) for seed in one.seeds()))[:8]
    assert [proposal.decision for proposal in proposed] == wanted
    assert proposed[0].decision == one.plan.decision
    origins = [proposal.origin for proposal in proposed]
    assert origins[0] == "plan"
    assert set(origins) == {"plan", "neighbour", "alternative"}


def test_the_sampler_never_repeats_nor_exceeds_memory(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = space(planned)
    proposed = [proposal.decision for proposal, _ in _run(join(one, planned), record, 24)]
    assert len(proposed) == 24
    assert len(set(proposed)) == 24
    assert len(one.seeds()) < 24
    assert all(one.excess_bytes(decision) <= 0 for decision in proposed)


def test_it_stops_when_everything_that_fits_was_launched(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    plan = space(planned).plan
    one = space(planned, search=NARROW, alternatives=plan.runners_up[:2], variants=())
    points = {(degrees, option) for degrees in one.candidates for option in one.option_names}
    assert len(points) == 9
    fit: set[TrainDecision] = set()
    for degrees, option in points:
        decision = one.decision_at(type(one.seeds()[0])(degrees=degrees, option=option))
        if decision is not None and one.excess_bytes(decision) <= 0:
            fit.add(decision)
    study = join(one, planned)
    proposed = [proposal.decision for proposal, _ in _run(study, record, 100)]
    assert set(proposed) == fit
    assert len(proposed) == len(fit)
    assert _next(study) is None


def test_a_killed_trial_of_the_plan_itself_is_the_first_to_be_launched_again(
    planned: Path, space: DecisionSpace, join: Join
) -> None:
    one = space(planned)
    lost = _next(join(one, planned))
    repeated = _next(join(one, planned))
    assert lost is not None
    assert repeated is not None
    assert repeated.decision == lost.decision == one.plan.decision
    assert repeated.number > lost.number


def test_many_kills_do_not_use_the_seeds_up(
    planned: Path, space: DecisionSpace, join: Join
) -> None:
    one = space(planned)
    for _ in range(4):
        proposal = _next(join(one, planned))
        assert proposal is not None
        assert proposal.origin == "plan"


def test_a_record_that_was_not_told_any_more_counts(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = space(planned)
    proposal = _next(join(one, planned))
    assert proposal is not None
    written = record(proposal.number, decision=proposal.decision)
    repeated = _next(join(one, planned, [written]))
    assert repeated is not None
    assert repeated.decision != proposal.decision
    assert repeated.number != written.number


def _journal(planned: Path) -> Path:
    return planned / TRIALS_NAME / JOURNAL_NAME


def _half_a_line(data: bytes) -> bytes:
    return data[:-7]


def _half_of_all(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _zeros_at_the_end(data: bytes) -> bytes:
    return data[:-7] + bytes(4096)


def _garbage_inside(data: bytes) -> bytes:
    return data.replace(b'"op_code":', b"\xff\xfe", 3)


def _no_beginning(data: bytes) -> bytes:
    return b"".join(data.splitlines(keepends=True)[1:])


def _another_story(_data: bytes) -> bytes:
    return json.dumps({"op_code": "x"}).encode() + b"\n"


def _a_list(_data: bytes) -> bytes:
    return b"[1]\n[2]\n"


def _nothing(_data: bytes) -> bytes:
    return b""


@each_row(
    "damage",
    [
        _half_a_line,
        _half_of_all,
        _zeros_at_the_end,
        _garbage_inside,
        _no_beginning,
        _another_story,
        _a_list,
        _nothing,
    ],
)
def test_a_damaged_journal_is_rebuilt_from_the_records(
    bound_plan: Path,
    tmp_path: Path,
    space: DecisionSpace,
    record: Record,
    damage: Callable[[bytes], bytes],
    join: Join,
) -> None:
    planned = Path(shutil.copytree(bound_plan, tmp_path / damage.__name__))
    one = space(planned)
    finished = [reply for _, reply in _run(join(one, planned), record, 5)]
    journal = _journal(planned)
    before = damage(journal.read_bytes())
    journal.write_bytes(before)
    more = list(_run(join(one, planned, finished), record, 3))
    launched = [reply.decision for reply in finished]
    assert len({*launched, *(proposal.decision for proposal, _ in more)}) == 8
    numbers = {reply.number for reply in finished}
    assert not numbers & {proposal.number for proposal, _ in more}
    # Optuna reads these two without complaint; only what they lack is told again.
    if damage not in (_nothing, _no_beginning):
        assert journal.with_name(f"{JOURNAL_NAME}.damaged").read_bytes() == before
    # What was rebuilt is whole, and goes on.
    everything = [*finished, *(reply for _, reply in more)]
    assert len(list(_run(join(one, planned, everything), record, 1))) == 1


def test_every_damaged_journal_is_kept(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = space(planned)
    finished = [reply for _, reply in _run(join(one, planned), record, 2)]
    journal = _journal(planned)
    for written in (b"first", b"second", b"third"):
        journal.write_bytes(written)
        assert _next(join(one, planned, finished)) is not None
    kept = {file.name: file.read_bytes() for file in journal.parent.glob("*.damaged*")}
    name = f"{JOURNAL_NAME}.damaged"
    assert kept == {name: b"first", f"{name}-2": b"second", f"{name}-3": b"third"}


def test_a_journal_cut_at_any_byte_is_survived(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = space(planned)
    finished = [reply for _, reply in _run(join(one, planned), record, 2)]
    journal = _journal(planned)
    data = journal.read_bytes()
    for end in range(0, len(data), 97):
        journal.write_bytes(data[:end])
        proposal = _next(join(one, planned, finished))
        assert proposal is not None
        assert proposal.decision not in {reply.decision for reply in finished}
        assert proposal.number not in {reply.number for reply in finished}


def test_records_with_gaps_keep_their_numbers(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = space(planned)
    decisions = [one.decision_at(seed) for seed in one.seeds()]
    finished = [record(3, decision=decisions[0]), record(9, decision=decisions[4])]
    proposal = _next(join(one, planned, finished))
    assert proposal is not None
    assert proposal.number == 10
    assert proposal.decision == decisions[1]


def test_a_record_of_no_known_point_keeps_its_number_and_is_not_repeated(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = space(planned)
    assert one.plan.decision is not None
    strange = one.plan.decision.model_copy(update={"fp8_recipe": "of another release"})
    proposal = _next(join(one, planned, [record(0, decision=strange)]))
    assert proposal is not None
    assert proposal.number == 1


def test_a_study_of_other_choices_is_begun_anew(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = space(planned)
    finished = [reply for _, reply in _run(join(one, planned), record, 2)]
    other = space(planned, search=NARROW)
    proposal = _next(join(other, planned, finished))
    assert proposal is not None
    assert proposal.decision not in {reply.decision for reply in finished}


def test_a_lock_that_a_killed_process_left_blocks_nobody(
    planned: Path,
    space: DecisionSpace,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
    join: Join,
) -> None:
    # Optuna's own lock would be waited for without end here: the path is relative.
    monkeypatch.chdir(planned.parent)
    folder = Path(planned.name)
    one = space(folder)
    finished = [reply for _, reply in _run(join(one, folder), record, 1)]
    lock = folder / TRIALS_NAME / f"{JOURNAL_NAME}.lock"
    assert lock.is_file()
    child = os.fork()
    if child == 0:
        _hold_and_die(lock)
    os.waitpid(child, 0)
    assert _next(join(one, folder, finished)) is not None


def _hold_and_die(lock: Path) -> Any:
    import fcntl
    import signal

    descriptor = os.open(lock, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.kill(os.getpid(), signal.SIGKILL)
