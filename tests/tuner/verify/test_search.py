"""The study: what it proposes, and what is left of it after kills and damage."""

from collections.abc import Iterator
from pathlib import Path

from tests.expect import present
from tests.tuner.verify.testing import DecisionSpace, Join, Record
from tuner.plans.folder import STUDY_NAME, TRIALS_NAME
from tuner.spec.search import Search
from tuner.verify.records import LaunchRequest, Proposal, TrialRecord
from tuner.verify.search import StudySearch, Waiting
from tuner.verify.study.shared import StudySnapshot, this_worker

NARROW = Search(
    micro_batch_size=(2, 4),
    tensor_model_parallel_size=(1,),
    recompute=("selective",),
    chunks=(1, 4),
)


def _anything(_progress: StudySnapshot) -> list[LaunchRequest]:
    return [LaunchRequest()]


def _next(study: StudySearch) -> Proposal | None:
    result = study.propose(_anything)
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
        study.record(proposal, reply)
        yield proposal, reply


def test_the_sampler_never_repeats_and_ends_when_everything_that_fits_was_launched(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    plan = space(planned).plan
    one = space(planned, search=NARROW, alternatives=plan.runners_up[:2], variants=())
    study = join(one, planned)
    proposed = [proposal for proposal, _ in _run(study, record, 100)]
    assert len(proposed) == len(one.points()) > 3
    assert {proposal.decision for proposal in proposed} == set(one.points())
    assert proposed[0].decision == plan.decision
    assert [proposal.origin for proposal in proposed[:3]] == ["plan", "sampler", "sampler"]
    assert _next(study) is None


def test_workers_launch_different_decisions(
    planned: Path, space: DecisionSpace, join: Join
) -> None:
    near = space(planned)
    workers = [join(near, planned, worker=this_worker()) for _ in range(3)]
    begun = [_next(worker) for worker in workers * 3]
    assert len({one.decision for one in begun if one is not None}) == 9


def test_a_killed_trial_of_the_plan_itself_is_the_first_to_be_launched_again(
    planned: Path, space: DecisionSpace, join: Join
) -> None:
    one = space(planned)
    proposals = [_next(join(one, planned)) for _ in range(4)]
    assert [proposal and proposal.decision for proposal in proposals] == [one.plan.decision] * 4
    assert [proposal and proposal.number for proposal in proposals] == [0, 1, 2, 3]
    assert {proposal and proposal.origin for proposal in proposals} == {"plan"}


def test_a_study_that_is_no_more_is_made_anew_from_the_records(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = space(planned)
    finished = [reply for _, reply in _run(join(one, planned), record, 5)]
    study = planned / TRIALS_NAME / STUDY_NAME
    for is_empty in (False, True):
        study.unlink()
        if is_empty:
            study.touch()
        finished += [reply for _, reply in _run(join(one, planned, finished), record, 3)]
    assert len({reply.decision for reply in finished}) == 11
    assert [reply.number for reply in finished] == list(range(11))


def test_records_with_gaps_keep_their_numbers(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = space(planned)
    decisions = list(one.points())
    finished = [record(3, decision=decisions[0]), record(9, decision=decisions[4])]
    proposal = present(_next(join(one, planned, finished)))
    assert proposal.number == 10
    assert proposal.decision not in (decisions[0], decisions[4])


def test_a_record_of_no_known_point_keeps_its_number_and_is_not_repeated(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = space(planned)
    strange = present(one.plan.decision).model_copy(update={"fp8_recipe": "of another release"})
    assert present(_next(join(one, planned, [record(0, decision=strange)]))).number == 1


def test_a_study_of_other_choices_goes_on(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = space(planned)
    finished = [reply for _, reply in _run(join(one, planned), record, 2)]
    proposal = present(_next(join(space(planned, search=NARROW), planned, finished)))
    assert proposal.decision not in {reply.decision for reply in finished}
