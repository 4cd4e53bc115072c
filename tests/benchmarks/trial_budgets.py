"""Value of a trial budget on machines that differ from the model.

    python tests/benchmarks/trial_budgets.py SPEC.yaml MACHINES DEVICES HOURS...

Plans the spec on datasheets, and lets hidden machines (tests/tuner/verify/budget/testing.py) run
the trials of its candidates: eight at most, under each budget and on the given devices. Prints how
many full-scale jobs lie within the stated errors, how large those and the real ones are, and how
much slower than the best the chosen candidate is, beside launching the plan's first candidates at
full scale for the same time, on all devices.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.benchmarks.bars import say
from tests.expect import present
from tests.tuner.verify.budget.testing import HiddenMachine
from tuner import api
from tuner.costs.residuals import residual_for
from tuner.costs.train.calibration import shipped
from tuner.goals.train_spec import read_spec
from tuner.search.train.build_problem import build_problem, price_pool
from tuner.units import format_ratio, format_s
from tuner.verify.budget.budget import Budget, Spending
from tuner.verify.budget.prices import production_prices
from tuner.verify.launches import TrialJobs
from tuner.verify.space import TrainSpace
from tuner.verify.verification import conclude

TRIALS, START_UP_S, STEPS = 8, 120.0, 12
TOP = 12


def _jobs(path: Path, devices: int) -> TrialJobs:
    spec = read_spec(path)
    plan = api.plan(path, top=TOP, with_unlaunchable=False).plan
    problem = build_problem(spec, price_pool(spec.cluster.pools[0], residuals=shipped()))
    price = production_prices(problem, present(plan.predicted))
    return TrialJobs(space=TrainSpace(plan=plan), price=price, max_devices=devices)


def main(arguments: Sequence[str]) -> int:
    """Print a line for each budget."""
    machines, devices = int(arguments[1]), int(arguments[2])
    jobs = _jobs(Path(arguments[0]), devices)
    for hours in arguments[3:]:
        say(_line(jobs, machines=machines, wall_s=float(hours) * 3600.0))
    return 0


def _line(jobs: TrialJobs, *, machines: int, wall_s: float) -> str:
    inside, off, stated, chosen, first, trials = [], [], [], [], [], []
    for seed in range(machines):
        machine = HiddenMachine(
            jobs=jobs, price=present(jobs.price), seed=seed, start_up_s=START_UP_S, num_steps=STEPS
        )
        spending = Spending(
            jobs=jobs,
            budget=Budget(wall_s=wall_s, max_devices=jobs.max_devices),
            clock=lambda machine=machine: machine.clock_s,  # type: ignore[misc] # bound now
            num_steps=STEPS,
            runs_reference=False,
        )
        records = machine.spent(spending, trials=TRIALS)
        trials.append(len(records))
        plan = jobs.space.plan
        known = conclude(
            plan,
            records,
            prior=residual_for("hidden", device="", device_kind="cuda"),
            space=jobs.space,
        )
        truth_s = {one: machine.step_s(one, None) for one in machine.candidates()}
        for trial in known.trials:
            said = trial.extrapolated
            if said is not None:
                low_s, high_s = said.step_time_s_band
                inside.append(low_s <= truth_s[trial.decision] <= high_s)
                off.append(abs(said.step_time_s / truth_s[trial.decision] - 1.0))
                stated.append(said.error_ratio)
        best_s, own_s = min(truth_s.values()), next(iter(truth_s.values()))
        chosen.append((truth_s[known.winner] if known.winner else own_s) / best_s - 1.0)
        first.append(min(machine.first_ones_s(wall_s, trials=TRIALS) or [own_s]) / best_s - 1.0)
    parts = [
        f"{format_s(wall_s)}, {jobs.max_devices} devices: {np.mean(trials):.1f} trials",
        *_extrapolated(inside, off, stated),
        f"choice {format_ratio(float(np.mean(chosen)))} slower than the best",
        f"first candidates whole {format_ratio(float(np.mean(first)))}"
        f" (difference ± {format_ratio(_error(chosen, first))})",
    ]
    return "; ".join(parts)


def _extrapolated(
    inside: Sequence[bool], off: Sequence[float], stated: Sequence[float]
) -> tuple[str, ...]:
    """Report the accuracy of extrapolations; empty where all jobs ran at full scale."""
    if not off:
        return ()
    large = float(np.quantile(off, 0.9))
    return (
        f"{np.mean(inside) * 100:.1f} % of {len(inside)} whole jobs within the stated error"
        f" (median ± {format_ratio(float(np.median(stated)))})",
        f"off by {format_ratio(float(np.median(off)))} median, {format_ratio(large)} P90",
    )


def _error(chosen: Sequence[float], first: Sequence[float]) -> float:
    """Standard error of the difference."""
    return float(np.std(np.array(chosen) - np.array(first)) / np.sqrt(len(chosen)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
