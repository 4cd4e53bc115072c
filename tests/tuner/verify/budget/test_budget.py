"""A budget is never exceeded, spent on what the sampler proposes, and says why it stops."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.rows import each_row
from tuner.errors import SpecError
from tuner.verify.budget.budget import MOST_GRACE_S, START_UP_S, Budget, Spending
from tuner.verify.launches import WARMUP_STEPS, TrialJobs
from tuner.verify.records import Proposal

Hidden = Callable[..., Any]


@pytest.fixture
def spend(wide: Any) -> Callable[..., Spending]:
    """A budget on a hidden machine's clock: spend(machine, wall_s=60.0, max_devices=8)."""

    def made(machine: Any, *, max_devices: int | None = None, **budget: Any) -> Spending:
        return Spending(
            jobs=wide.jobs(max_devices=max_devices or 16),
            budget=Budget(max_devices=max_devices, **budget),
            clock=lambda: machine.clock_s,
            num_steps=machine.num_steps,
        )

    return made


Spend = Callable[..., Spending]


def test_no_job_is_larger_than_allowed_or_launched_twice(spend: Spend, hidden: Hidden) -> None:
    machine = hidden(3)
    records = machine.spent(spend(machine, max_devices=8), trials=8)
    jobs = [(one.decision, one.scale) for one in records]
    assert len(set(jobs)) == len(jobs)
    assert all(scale is not None and scale.num_devices <= 8 for _, scale in jobs)


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


def test_a_budget_for_no_trial_is_refused_in_one_line(spend: Spend, hidden: Hidden) -> None:
    with pytest.raises(SpecError, match=r"^--budget 1.00 s: the shortest trial is predicted to"):
        spend(hidden(0), wall_s=1.0).check()
    with pytest.raises(SpecError, match=r"^--max-devices 1: no trial is small enough; give"):
        spend(hidden(0), max_devices=1).check()
    spend(hidden(0), max_devices=8).check()


def test_a_plan_that_fits_nowhere_is_not_blamed_on_an_option(wide: Any) -> None:
    machine = dataclasses.replace(wide.space.machine, memory_limit_bytes=1)
    full = dataclasses.replace(wide.space, machine=machine)
    for budget in (Budget(wall_s=1e6), Budget(max_devices=16)):
        spending = Spending(
            jobs=TrialJobs(space=full, max_devices=budget.max_devices),
            budget=budget,
            clock=lambda: 0.0,
            num_steps=10,
        )
        with pytest.raises(SpecError, match=r"^no candidate of the plan fits in memory"):
            spending.check()


@pytest.mark.slow
@each_row("seed", range(3))
def test_trials_end_inside_the_budget(spend: Spend, hidden: Hidden, seed: int) -> None:
    machine = hidden(seed)
    spending = spend(machine, wall_s=150.0)
    records = machine.spent(spending, trials=8)
    assert records
    assert machine.clock_s <= 150.0 + spending.budget.grace_s
    (line,) = spending.stop_notes(records, trials=8)
    assert re.match(
        r"stopped: \S+ \S+ of the budget are left and the cheapest of \d+ further", line
    )


def test_all_that_fits_devices_and_time_may_be_launched(
    wide: Any, spend: Spend, hidden: Hidden
) -> None:
    machine = hidden(0)
    everything = dict.fromkeys(wide.space.points())
    assert spend(machine).affordable(()) == everything
    assert spend(machine, wall_s=1e6).affordable(()) == everything
    assert not spend(machine, wall_s=1.0).affordable(())
    for decision, scale in spend(machine, max_devices=8).affordable(()).items():
        assert decision.num_devices == 16
        assert scale is not None
        assert scale.num_devices <= 8
    assert 0 < len(spend(machine, wall_s=150.0).affordable(())) < len(everything)


def test_after_all_possible_trials_the_end_of_the_budget_stopped_nothing(
    wide: Any, spend: Spend, hidden: Hidden
) -> None:
    machine = hidden(0)
    spending = spend(machine, wall_s=1.0)
    records = [machine.record(number, one, None) for number, one in enumerate(wide.space.points())]
    assert spending.left_s < 0.0
    assert spending.stop_notes(records, trials=len(records) + 1) == ()
    assert len(spending.stop_notes(records[1:], trials=len(records))) == 1


def test_what_runs_beside_takes_its_devices(wide: Any, spend: Spend, hidden: Hidden) -> None:
    machine = hidden(0)
    first, second = list(wide.space.points())[:2]
    running = [
        Proposal(number=number, decision=decision, origin="sampler")
        for number, decision in enumerate((first, second))
    ]
    assert first.num_devices == 16
    assert not spend(machine, max_devices=24).affordable((), running=running[:1])
    assert spend(machine, max_devices=32).affordable((), running=running[:1])
    assert not spend(machine, max_devices=32).affordable((), running=running)
    assert spend(machine).affordable((), running=running)


def test_costs_are_learnt_from_start_up_and_steps(wide: Any, spend: Spend, hidden: Hidden) -> None:
    machine = hidden(1, start_up_s=200.0)
    whole = wide.plan.decision
    first = machine.record(0, whole, None)
    high_s = wide.space.predicted(whole).step_time_s_band[1]
    before_s = START_UP_S[True] + machine.num_steps * high_s
    start_up_s = first.wall_s - machine.num_steps * first.measured_step_s
    cost_s = start_up_s + machine.num_steps * 1.1 * first.measured_step_s
    for records, its_s in (([], before_s), ([first], cost_s)):
        for wall_s, is_enough in ((1.01 * its_s, True), (0.95 * its_s, False)):
            assert (whole in spend(machine, wall_s=wall_s).affordable(records)) == is_enough
    assert START_UP_S[True] < 200.0
    # Another call's --steps, or a trial ended early: the start-up of each is its own.
    fewer = hidden(1, start_up_s=200.0, num_steps=12).record(0, whole, None)
    steps_s = first.measured_steps_s[:3]
    wall_s = 200.0 + (WARMUP_STEPS + len(steps_s)) * first.measured_step_s
    for record in (fewer, first.model_copy(update={"measured_steps_s": steps_s, "wall_s": wall_s})):
        assert whole in spend(machine, wall_s=1.05 * cost_s).affordable([record])
        assert whole not in spend(machine, wall_s=0.95 * cost_s).affordable([record])
    slow = first.model_copy(update={"wall_s": first.wall_s + cost_s})
    assert whole not in spend(machine, wall_s=1.1 * cost_s).affordable([slow])


def test_why_the_plans_own_choice_has_no_trial_is_one_line(
    wide: Any, spend: Spend, hidden: Hidden
) -> None:
    for devices in (2, 4, 8, 16):
        spending = spend(hidden(0), max_devices=devices)
        has_job = spending.jobs.job(wide.plan.decision) is not None
        assert len(spending.without_own_choice()) == (0 if has_job else 1)
    (line,) = spend(hidden(0), max_devices=2).without_own_choice()
    assert line.startswith("the plan's own choice has no trial: it needs 16 devices")


def test_the_refusal_names_as_many_devices_as_are_enough(spend: Spend, hidden: Hidden) -> None:
    with pytest.raises(SpecError) as refused:
        spend(hidden(0), max_devices=1).check()
    (line,) = str(refused.value).splitlines()
    enough = int(line.rsplit("give --max-devices ", 1)[1].split()[0])
    spend(hidden(0), max_devices=enough).check()
    with pytest.raises(SpecError):
        spend(hidden(0), max_devices=enough - 1).check()


@pytest.mark.slow
def test_regret_is_at_most_that_of_the_first_ones_for_as_long(spend: Spend, hidden: Hidden) -> None:
    wall_s, chosen, first = 240.0, [], []
    for seed in range(60):
        machine = hidden(seed)
        records = machine.spent(spend(machine, wall_s=wall_s), trials=8)
        truth = {one: machine.step_s(one, None) for one in machine.candidates()}
        truth |= {one.decision: machine.step_s(one.decision, None) for one in records}
        ran = min(records, key=lambda one: one.measured_step_s or math.inf, default=None)
        fastest_s, own_s = min(truth.values()), next(iter(truth.values()))
        chosen.append((truth[ran.decision] if ran else own_s) / fastest_s - 1.0)
        # The plan's own order at full size, until the next one would not end in time.
        tried = machine.first_ones_s(wall_s, trials=8)
        first.append(min(tried or [own_s]) / fastest_s - 1.0)
    assert np.mean(chosen) < np.mean(first) + 0.005
