"""How often running sequences need more KV cache than planned.

    python tests/benchmarks/cache_occupancy.py [--traffics 20]

Draws length distributions and batch sizes, seed by seed, and simulates each on one rank of an
engine that allocates pages as outputs grow (vLLM), with a request always waiting. The cache is as
large as the planner requires for the batch size; what does not fit is preempted and recomputed.
Printed is the share of steps whose occupancy exceeds the planner's 99 % quantile, with its 95 %
interval. Consecutive steps share sequences, so the interval is that of means of stretches, each
four times as long as the longest output. Also printed: preemptions, and how many sequences would
run if whole outputs were reserved. Exit code 1: an interval lies above the stated share.
"""

import sys
from argparse import ArgumentParser
from dataclasses import dataclass, field

import numpy as np

from tuner.engines.serve_rules.traits import Batching
from tuner.search.serve.demand import Demand, build_demand
from tuner.search.serve.occupancy import OCCUPANCY_QUANTILE
from tuner.simulate.serving.batching import WATERMARK_RATIO, Rules, simulate
from tuner.simulate.serving.load import Requests
from tuner.simulate.serving.steps import StepTimes
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.lengths import sample_tokens

LONGEST = 40_000
STRETCHES = 24
"""The first two are dropped."""
SURE = 2.08
"""Student's t with the remaining 21 degrees of freedom, two-sided 95 %."""


@dataclass(slots=True)
class OccupancyShares:
    """Shares of steps, stretch by stretch."""

    limit: float
    stretch: int
    above: list[float] = field(default_factory=lambda: [0.0])
    left: int = 0

    def __call__(self, steps: int, taken: float, running: int) -> None:
        """Count the steps at which the occupancy exceeds the limit."""
        while steps:
            part = min(steps, self.stretch - self.left)
            first = 0 if taken > self.limit else (self.limit - taken) // max(running, 1) + 1
            self.above[-1] += max(part - first, 0.0) / self.stretch
            self.left += part
            steps -= part
            taken += part * running
            if self.left == self.stretch:
                self.above.append(0.0)
                self.left = 0


def goal_of(seed: int) -> tuple[ServeGoal, int]:
    """Draw a traffic and a batch size."""
    rng = np.random.default_rng(seed)

    def law(low: float, high: float, most: int) -> dict[str, object]:
        mean = float(np.exp(rng.uniform(np.log(low), np.log(high))))
        return {"kind": "lognormal", "mean": mean, "cv": rng.uniform(0.2, 1.8), "most": most}

    goal = ServeGoal.model_validate(
        {
            "kind": "serve",
            "engine": {"name": "vllm"},
            "traffic": {
                "rate": "1/s",
                "input_tokens": law(100.0, 4000.0, 8000),
                "output_tokens": law(100.0, 5000.0, 32000),
            },
            "slo": {"tpot": {"mean": "50ms"}},
        }
    )
    return goal, round(float(np.exp(rng.uniform(np.log(8.0), np.log(400.0)))))


def flat_times(running: int) -> StepTimes:
    """Steps of equal time: the occupancy at a step does not depend on it."""
    return StepTimes(
        linear_s=[0.01] * (200_000),
        head_s=[0.0] * (running + 2),
        decode_s=[[0.0, 0.0]] * (running + 2),
        past_step=1e9,
        prompt_s=[0.0, 0.0],
        prompt_step=1e9,
        scheduler_s=0.0,
        prompt_scheduler_s=0.0,
    )


def simulate_occupancy(
    goal: ServeGoal, demand: Demand, running: int, *, seed: int
) -> OccupancyShares:
    """Simulate a traffic with a constant batch size, and count the occupancy of every step."""
    prompts, outputs = goal.traffic.input_tokens, goal.traffic.output_tokens
    if prompts is None or outputs is None:
        raise ValueError("a traffic is drawn with both laws")
    limit = float(demand.grown_N[running - 1])
    shares = OccupancyShares(limit=limit, stretch=4 * outputs.most)
    count = int(1.1 * STRETCHES * shares.stretch * running / demand.output_tokens)
    rng = np.random.default_rng(1000 + seed)
    requests = Requests(
        input_R=sample_tokens(prompts, count=count, rng=rng),
        output_R=sample_tokens(outputs, count=count, rng=rng),
    )
    rules = Rules(
        batching=Batching.CHUNKED,
        step_tokens=8192,
        kv_tokens=limit / (1.0 - WATERMARK_RATIO),
        most_running=running,
        reserves_output=False,
    )
    times = flat_times(running)
    simulate(requests, times=times, rules=rules, concurrency=running + 8, observe=shares)
    return shares


def main() -> int:
    """Print every traffic and return 1 if any exceeds the stated share."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traffics", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    missed = 0
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.traffics):
        goal, running = goal_of(seed)
        demand = build_demand(goal, longest=LONGEST)
        shares = simulate_occupancy(goal, demand, running, seed=seed)
        above = np.array(shares.above[2:STRETCHES])
        mean, half = float(above.mean()), SURE * float(above.std(ddof=1)) / len(above) ** 0.5
        is_more = mean - half > 1.0 - OCCUPANCY_QUANTILE
        missed += is_more
        reserved = int(np.searchsorted(demand.reserved_N, shares.limit, side="right"))
        sys.stdout.write(
            f"seed {seed}: {demand.input_tokens:.0f} in, {demand.output_tokens:.0f} out, {running}"
            f" run ({reserved} with answers reserved): {100 * mean:.2f} % of steps above, 95 %"
            f" {100 * max(mean - half, 0.0):.2f} to {100 * (mean + half):.2f}"
            f"{', MORE' * is_more}\n"
        )
        sys.stdout.flush()
    stated = 100 * (1.0 - OCCUPANCY_QUANTILE)
    sys.stdout.write(
        f"{arguments.traffics - missed} of {arguments.traffics} within {stated:.0f} %\n"
    )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
