"""Whether a plan and the backtest predict the same for the same launch.

    python tests/benchmarks/serving_agreement.py RUNS.csv [TABLES]

Every aggregated Hopper row of the InferenceX harness is priced twice: by the backtest, and as an
option whose traffic is a closed loop of the same lengths, simulated as plans and estimates do. Both
are compared with the measured times. Settings that only a recipe states are excluded: rows whose
launch polls or streams at intervals, waits for its scheduler or runs another release's kernels are
counted and not compared. Exit code 1: the two differ by more than `MOST_APART` on the median, or a
plan is further from the measured times than the backtest by as much.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests.benchmarks.bars import say
from tests.benchmarks.published_serving import Harness, documented
from tuner.backtest.cells import MissingError
from tuner.backtest.serving.launches import PublishedLaunch, parse_launch
from tuner.backtest.serving.prediction import UNNAMED_RELEASE, Predictor
from tuner.backtest.serving.rows import read_cells
from tuner.backtest.serving.tables import build_machines
from tuner.catalog.serve_rules.traits import Batching
from tuner.config.serve import Role
from tuner.costs.serve.capacity import cache_tokens
from tuner.costs.serve.iteration import Iteration
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine
from tuner.search.serve.demand import build_demand
from tuner.search.serve.modes.aggregated import simulate_aggregated_mode
from tuner.search.serve.options import Option, ServingPool
from tuner.search.serve.simulation import InstanceGroup
from tuner.spec.cluster import Pool
from tuner.spec.serving.goal import ServeGoal

MOST_APART = 0.02
"""Lengths come from different generators and interpolation grids."""


@dataclass(frozen=True, kw_only=True)
class Both:
    """One row's times: of the plan, of the backtest, measured."""

    planned: tuple[float, float]
    backtested: tuple[float, float]
    measured: tuple[float, float]


def is_plain(launch: PublishedLaunch) -> bool:
    """Whether a launch is determined by its columns and its engine."""
    return (
        launch.harness == Harness.INFERENCEX
        and not launch.is_disaggregated
        and not launch.sequence_s
        and not launch.stream_steps
        and not launch.experts_table
        and launch.poll_steps == 1
    )


def option_of(launch: PublishedLaunch, machine: ServingMachine) -> Option:
    """Return a row's launch as a plan would state it."""
    degrees = launch.sides[0].degrees
    traits = ENGINE_TRAITS[launch.engine]
    concurrency = -(-launch.concurrency // degrees.attention_data)
    step_tokens = launch.step_tokens or traits.step_tokens
    is_chunked = traits.batching is not Batching.WHOLE
    if not is_chunked:
        step_tokens = max(step_tokens, concurrency + launch.input_tokens + 64)
    iteration = Iteration(
        decoder=launch.decoder,
        formats=launch.formats,
        degrees=degrees,
        traits=ENGINE_TRAITS[launch.engine],
        machine=machine,
        release=launch.release if launch.release[:1].isdigit() else UNNAMED_RELEASE,
    )
    memory_bytes = float(machine.sheet.memory_bytes)
    pool = Pool(name="pool", device=machine.sheet.name, nodes=1, devices_per_node=degrees.devices)
    return Option(
        serving_pool=ServingPool(
            pool=pool, machine=machine, memory_bytes=memory_bytes, source="imported"
        ),
        role=Role.AGGREGATED,
        degrees=degrees,
        iteration=iteration,
        running=concurrency,
        rate_per_s=1.0,
        ttft_s=0.0,
        tpot_s=0.0,
        kv_tokens=cache_tokens(
            iteration,
            memory_bytes=memory_bytes,
            step_tokens=step_tokens,
            running=concurrency,
            least=2.0 * (launch.input_tokens + launch.output_tokens),
        ),
        step_tokens=step_tokens,
        is_chunked=is_chunked,
    )


def planned_s(launch: PublishedLaunch, machine: ServingMachine) -> tuple[float, float]:
    """Mean TTFT and TPOT of a row's launch and load, as a plan predicts them."""
    least = launch.length_ratio
    lengths = {
        name: {"kind": "uniform", "low": max(round(least * most), 1), "high": most}
        for name, most in (
            ("input_tokens", launch.input_tokens),
            ("output_tokens", launch.output_tokens),
        )
    }
    goal = ServeGoal.model_validate(
        {
            "kind": "serve",
            "engine": {"name": launch.engine},
            "traffic": {"concurrency": launch.concurrency, **lengths},
        }
    )
    option = option_of(launch, machine)
    demand = build_demand(goal, longest=launch.input_tokens + launch.output_tokens)
    simulated = simulate_aggregated_mode(
        (InstanceGroup(option=option, count=1),), goal=goal, demand=demand
    )
    return float(simulated.ttft_s_R.mean()), float(simulated.tpot_s_R.mean())


def both_ways(runs: Path, profiles: Sequence[Path], *, every: int = 1) -> tuple[list[Both], int]:
    """Price Hopper rows by plan and by backtest.

    Args:
        runs: the table.
        profiles: folders of kernels.
        every: takes each so manieth row.

    Returns:
        The rows, and how many were left out for what only their recipe says.
    """
    launches = []
    for number, cells in enumerate(map(documented, read_cells(runs)), start=1):
        try:
            launch = parse_launch(cells, number=number)
        except MissingError:
            continue
        if launch.generation == "hopper" and launch.harness == Harness.INFERENCEX:
            launches.append(launch)
    plain = [launch for launch in launches if is_plain(launch)]
    result = []
    for system in sorted({launch.system for launch in plain}):
        machines, _ = build_machines([system], profiles)
        predictor = Predictor(machines=machines)
        for launch in [one for one in plain if one.system == system][::every]:
            latency = predictor.latency(launch)
            machine = replace(machines[system], estimated=set())
            result.append(
                Both(
                    planned=planned_s(launch, machine),
                    backtested=(latency.ttft_s, latency.tpot_s),
                    measured=(launch.ttft_s, launch.tpot_s),
                )
            )
    return result, len(launches) - len(plain)


def distance(result: Sequence[Both], one: str, other: str) -> tuple[float, float]:
    """Median relative distance of TTFT and TPOT."""
    ratios = np.array(
        [np.divide(getattr(row, one), getattr(row, other)) for row in result], dtype=np.float64
    )
    ttft, tpot = np.median(np.abs(ratios - 1.0), axis=0)
    return float(ttft), float(tpot)


def main(arguments: Sequence[str]) -> int:
    """Print the errors of both and their distance; return 1 where they differ."""
    result, left = both_ways(Path(arguments[0]), [Path(one) for one in arguments[1:]])
    say(f"{len(result)} rows priced both ways, {left} with what only a recipe says")
    between = distance(result, "planned", "backtested")
    plan, backtest = (
        distance(result, "planned", "measured"),
        distance(result, "backtested", "measured"),
    )
    for name, (ttft, tpot) in (
        ("plan to backtest", between),
        ("plan to measured", plan),
        ("backtest to measured", backtest),
    ):
        say(f"{name:<22} TTFT {ttft:6.1%}  TPOT {tpot:6.1%}")
    worse = max(one - other for one, other in zip(plan, backtest, strict=True))
    return int(max(*between, worse) > MOST_APART)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
