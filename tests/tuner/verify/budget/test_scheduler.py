"""A budget is never exceeded, spent on what matters, and says why it stops."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.rows import each_row
from tuner.errors import SpecError
from tuner.verify.budget.extrapolation import estimates
from tuner.verify.budget.scheduler import MOST_GRACE_S, START_UP_S, Budget, Spending
from tuner.verify.budget.trial_options import TrialOptions
from tuner.verify.records import TrialRecord

Hidden = Callable[..., Any]


@pytest.fixture
def spend(wide: Any) -> Callable[..., Spending]:
    """A budget on a hidden machine's clock: spend(machine, wall_s=60.0, max_devices=8)."""

    def made(machine: Any, *, max_devices: int | None = None, **budget: Any) -> Spending:
        return Spending(
            possible=wide.possible(max_devices=max_devices or 16),
            budget=Budget(max_devices=max_devices, **budget),
            clock=lambda: machine.clock_s,
            num_steps=machine.num_steps,
        )

    return made


Spend = Callable[..., Spending]


@pytest.mark.slow
@each_row("seed", range(3))
def test_trials_end_inside_the_budget(spend: Spend, hidden: Hidden, seed: int) -> None:
    machine = hidden(seed)
    spending = spend(machine, wall_s=150.0)
    records = machine.spent(spending, trials=8)
    assert records
    assert machine.clock_s <= 150.0 + spending.budget.grace_s
    assert spending.stopped
    said = spending.stop_notes(records)
    assert said[0].startswith("stopped: ")
    assert any(line.endswith("without a trial: the budget ran out") for line in said) or (
        "no further trial" in said[0]
    )


def test_no_job_is_larger_than_allowed_or_launched_twice(spend: Spend, hidden: Hidden) -> None:
    machine = hidden(3)
    records = machine.spent(spend(machine, max_devices=8), trials=8)
    jobs = [(one.decision, one.scale) for one in records]
    assert len(set(jobs)) == len(jobs)
    assert all(scale is not None and scale.num_devices <= 8 for _, scale in jobs)


def test_a_budget_of_everything_decides_nothing(spend: Spend, hidden: Hidden) -> None:
    machine = hidden(0)
    assert spend(machine, wall_s=1e6).holds_everything((), trials=8)
    assert not spend(machine, wall_s=1e6, max_devices=8).holds_everything((), trials=8)
    assert not spend(machine, wall_s=100.0).holds_everything((), trials=8)
    assert spend(machine).holds_everything((), trials=8)


def test_whole_jobs_side_by_side_stay_within_the_devices(spend: Spend, hidden: Hidden) -> None:
    machine = hidden(0)
    spending = spend(machine, max_devices=24)
    (first, second) = spending.possible.candidates()[:2]
    assert first.num_devices == 16
    assert spending.holds_everything((), trials=8)
    assert spending.has_room([])
    assert not spending.has_room([(first, None)])
    assert spend(machine, max_devices=32).has_room([(first, None)])
    assert not spend(machine, max_devices=32).has_room([(first, None), (second, None)])
    assert spend(machine).has_room([(first, None), (second, None)])


def test_costs_are_learnt_from_the_longest_start_up(
    wide: Any, spend: Spend, hidden: Hidden
) -> None:
    machine = hidden(1, start_up_s=200.0)
    spending = spend(machine, wall_s=1000.0)
    whole = wide.plan.decision
    first = machine.record(0, whole, None)
    step_s = machine.step_s(whole, None)
    # As often as 1000 s hold start-up and steps that are known by now, and once is gone.
    left_s = 1000.0 - machine.clock_s
    cost_s = 200.0 + machine.num_steps * step_s
    assert spending.affords(whole, [first]) == (cost_s * 1.05 < left_s)
    assert START_UP_S[True] < 200.0
    slow = first.model_copy(update={"wall_s": first.wall_s + left_s})
    assert not spending.affords(whole, [slow])


def test_a_running_trial_is_ended_at_the_end_of_the_budget_with_grace(
    spend: Spend, hidden: Hidden
) -> None:
    machine = hidden(0)
    spending = spend(machine, wall_s=100.0)
    machine.clock_s += 90.0
    assert spending.left_s == pytest.approx(10.0)
    assert spending.latest_s() == pytest.approx(15.0)
    machine.clock_s += 50.0
    assert spending.latest_s() == 0.0
    assert Budget(wall_s=1e6).grace_s == MOST_GRACE_S
    assert math.isinf(spend(machine, max_devices=8).latest_s())


def test_on_few_devices_the_plans_own_choice_is_launched_first(
    wide: Any, spend: Spend, hidden: Hidden
) -> None:
    failed = []
    for seed in range(8):
        for devices in (4, 8):
            spending = spend(hidden(seed), max_devices=devices)
            own = wide.plan.decision
            choice = spending.next((), running=(), trials=8)
            assert choice is not None
            if spending.possible.options_of(own) and choice.job.candidate != own:
                failed.append((seed, devices))
            if not spending.possible.options_of(own) and not spending.without_own_choice():
                failed.append((seed, devices))
    assert not failed


def test_in_little_time_the_plans_own_choice_is_launched_first(
    wide: Any, spend: Spend, hidden: Hidden
) -> None:
    failed = []
    for seed in range(8):
        for wall_s in (60.0, 150.0):
            spending = spend(hidden(seed), wall_s=wall_s)
            own = wide.plan.decision
            choice = spending.next((), running=(), trials=8)
            if choice is None or choice.job.candidate != own:
                failed.append((seed, wall_s, choice))
    assert not failed


def test_why_the_plans_own_choice_has_no_trial_is_one_line(
    wide: Any, spend: Spend, hidden: Hidden
) -> None:
    lines = {}
    for devices in (2, 4, 8):
        spending = spend(hidden(0), max_devices=devices)
        own = spending.possible.options_of(wide.plan.decision)
        lines[devices] = spending.without_own_choice()
        assert len(lines[devices]) == (0 if own else 1)
        # It is not counted once more among those without a trial.
        said = spending.left_out(())
        assert sum("own choice" in line for line in said) == len(lines[devices])
        assert len(said) <= 3
    assert lines[2][0].startswith("the plan's own choice has no trial: its smallest job needs ")


def test_the_refusal_names_as_many_devices_as_are_enough(spend: Spend, hidden: Hidden) -> None:
    with pytest.raises(SpecError) as refused:
        spend(hidden(0), max_devices=1).check()
    (line,) = str(refused.value).splitlines()
    assert line.count("smallest job needs ") == 1
    assert line.count("allowed") == 1
    enough = int(line.rsplit("give --max-devices ", 1)[1].split()[0])
    spend(hidden(0), max_devices=enough).check()
    with pytest.raises(SpecError):
        spend(hidden(0), max_devices=enough - 1).check()


def test_a_budget_for_no_trial_is_refused_in_one_line(spend: Spend, hidden: Hidden) -> None:
    with pytest.raises(SpecError, match=r"^--budget 1.00 s: the shortest trial is predicted to"):
        spend(hidden(0), wall_s=1.0).check()
    with pytest.raises(SpecError, match=r"^--max-devices 1: no trial is small enough: its"):
        spend(hidden(0), max_devices=1).check()
    spend(hidden(0), max_devices=8).check()


def test_a_plan_that_fits_nowhere_is_not_blamed_on_an_option(wide: Any) -> None:
    machine = dataclasses.replace(wide.space.machine, memory_limit_bytes=1)
    full = dataclasses.replace(wide.space, machine=machine)
    for budget in (Budget(wall_s=1e6), Budget(max_devices=16)):
        spending = Spending(
            possible=TrialOptions(space=full, max_devices=budget.max_devices),
            budget=budget,
            clock=lambda: 0.0,
            num_steps=10,
        )
        with pytest.raises(SpecError, match=r"^no candidate of the plan fits in memory"):
            spending.check()


def test_what_runs_beside_takes_devices_and_its_candidate(spend: Spend, hidden: Hidden) -> None:
    machine = hidden(2)
    spending = spend(machine, max_devices=8)
    first = spending.next((), running=(), trials=8)
    assert first is not None
    job = (first.job.candidate, first.job.scale)
    second = spending.next((), running=[job], trials=7)
    if second is not None:
        assert second.job.candidate != first.job.candidate
        assert second.job.num_devices + first.job.num_devices <= 8


def test_a_failed_trial_is_not_begun_again(spend: Spend, hidden: Hidden) -> None:
    machine = hidden(4)
    spending = spend(machine, max_devices=8)
    records: list[TrialRecord] = []
    for number in range(5):
        choice = spending.next(records, running=(), trials=5 - number)
        assert choice is not None
        made = machine.record(number, choice.job.candidate, choice.job.scale)
        failed = {"status": "crashed", "measured_steps_s": (), "measured_step_s": None}
        records.append(made.model_copy(update=failed))
    assert len({(one.decision, one.scale) for one in records}) == 5
    assert estimates(spending.possible, records).best is None


@pytest.mark.slow
def test_regret_is_lower_than_launching_the_first_ones_for_as_long(
    wide: Any, spend: Spend, hidden: Hidden
) -> None:
    wall_s, chosen, first = 240.0, [], []
    for seed in range(60):
        machine = hidden(seed)
        spending = spend(machine, wall_s=wall_s)
        best = estimates(spending.possible, machine.spent(spending, trials=8)).best
        truth = {one: machine.step_s(one, None) for one in spending.possible.candidates()}
        fastest_s, own_s = min(truth.values()), next(iter(truth.values()))
        chosen.append((truth[best] if best else own_s) / fastest_s - 1.0)
        # The plan's own order at full size, until the next one would not end in time.
        tried = machine.first_ones_s(wall_s, trials=8)
        first.append(min(tried or [own_s]) / fastest_s - 1.0)
    assert np.mean(chosen) < np.mean(first)
