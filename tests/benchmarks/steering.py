"""Launches that Optuna saves by starting from the model's predictions; run as

    python tests/benchmarks/steering.py [--seeds 200] [--launches 12]

Replayed on measured tables: the settings of vLLM (examples/profiles/epyc-vllm-settings) and the
layouts of three trainers (engine_layouts.py). A launch gives one of the repeats, drawn by the seed.
Regret is the value of the best launched so far over the least of all, less 1, both by the medians
of the repeats; for each seed, medians over seeds:

    random       any order
    predicted    the model's order
    tpe          Optuna's TPE over the knobs, without predictions
    prior        `tuner.verify.search`, which `moetune verify` uses

The value is a step's seconds, or a mean request's times each latency's excess over its target
(`TARGETS`); a launch that misses one is taken only where none meets all. Noise: how much less one
launch of the best setting may be than its median.
"""

import itertools
import json
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from typing import Any, Final

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState

from tests.benchmarks.bars import parse, say
from tests.benchmarks.engine_layouts import ENGINES, engine_of, predicted
from tests.benchmarks.measure_vllm_settings import CONCURRENCY, KNOBS, MAX_MODEL_LEN, requests_of
from tests.benchmarks.processor_deployments import CHECKOUT, MODEL
from tests.benchmarks.processor_deployments import STORED as KERNELS
from tuner.config.serve import Role
from tuner.goals.serve_plan import price_serving_pools
from tuner.goals.serve_spec import read_serve_spec
from tuner.search.serve.simulation import InstanceGroup, latency_of
from tuner.search.serve.solve_mode import build_serve_problem, simulate_traffic
from tuner.search.settings import SearchSettings
from tuner.verify.deployments.space import ERROR
from tuner.verify.records import PricedPoint
from tuner.verify.search import PriorSampler
from tuner.verify.space import MEMORY_ERROR, STEP_ERROR, priced_point

STORED: Final = CHECKOUT / "examples" / "profiles" / "epyc-vllm-settings"
TARGETS: Final = {"ttft_s": 2.0, "tpot_s": 0.1}
"""Seconds of P90, as in processor_deployments.py."""
NAMES: Final = ("random", "predicted", "tpe", "prior")

Metrics = tuple[float, ...]
Order = Callable[[Mapping[int, Metrics]], int]
"""Returns what to launch next, from what was measured."""


@dataclass(frozen=True)
class Table:
    """Measured launches, and what the model said of each."""

    name: str
    points: tuple[PricedPoint, ...]
    repeats: tuple[tuple[Metrics, ...], ...]
    errors: tuple[float, ...]


def trainer_tables() -> list[Table]:
    """Return the layouts of the three trainers."""
    tables = []
    for name in ENGINES:
        engine = engine_of(name)
        steps_s = json.loads((engine.stored / "steps.json").read_text())
        trials = predicted(engine, engine.stored)
        tables.append(
            Table(
                name,
                tuple(
                    priced_point(one.decision, one.predicted_step_s, peak_ratio=0.5)
                    for one in trials.values()
                ),
                tuple(tuple((second, 0.5) for second in steps_s[name]) for name in trials),
                (STEP_ERROR, MEMORY_ERROR),
            )
        )
    return tables


def vllm_table(folder: Path = STORED) -> Table:
    """Return the settings of vLLM."""
    launches: list[dict[str, Any]] = json.loads((folder / "settings.json").read_text())
    settings: dict[tuple[int, ...], list[Metrics]] = {}
    for one in launches:
        measured = one["measured"]
        if measured is not None:
            excess = [measured[name]["p90"] / limit_s for name, limit_s in TARGETS.items()]
            values = (measured["request_s"]["mean"], *excess)
            settings.setdefault(tuple(one["settings"].values()), []).append(values)
    said = _predictions(folder)
    return Table(
        "vllm",
        tuple(
            PricedPoint(knobs=dict(zip(KNOBS, key, strict=True)), predicted=said[key[:2]])
            for key in settings
        ),
        tuple(map(tuple, settings.values())),
        (ERROR,) * (1 + len(TARGETS)),
    )


def _predictions(folder: Path) -> dict[tuple[int, ...], Metrics]:
    """Simulate the requests under every budget of tokens and of sequences."""
    lengths = requests_of()
    tokens = statistics.fmean(answer for _, answer in lengths)
    said: dict[tuple[int, ...], Metrics] = {}
    with tempfile.TemporaryDirectory(prefix="moetune-steering-") as scratch:
        profile, trace = Path(scratch) / "profile", Path(scratch) / "trace.jsonl"
        copytree(KERNELS / "profile", profile)
        (profile / "engine.json").write_bytes((folder / "engine.json").read_bytes())
        trace.write_text(
            "".join(
                json.dumps({"timestamp": at, "input_length": prompt, "output_length": answer})
                + "\n"
                for at, (prompt, answer) in enumerate(lengths)
            )
        )
        path = Path(scratch) / "spec.yaml"
        path.write_text(_spec(profile, trace), encoding="utf-8")
        spec = read_serve_spec(path)
        problem = build_serve_problem(spec, price_serving_pools(spec, ()), SearchSettings())
        options = problem.options
        base = next(
            one
            for one in (*options.options, *(curve.option for curve in options.curves))
            if one.role is Role.AGGREGATED
        )
        for budget, running in itertools.product(*list(KNOBS.values())[:2]):
            option = replace(base, running=running, step_tokens=budget, is_chunked=True)
            group = InstanceGroup(option=option, count=1)
            simulated = simulate_traffic(problem, "aggregated", (group,), may_stop=False)
            ttft, tpot = latency_of(simulated.ttft_s_R), latency_of(simulated.tpot_s_R)
            said[budget, running] = (
                ttft.mean + (tokens - 1.0) * tpot.mean,
                ttft.p90 / TARGETS["ttft_s"],
                tpot.p90 / TARGETS["tpot_s"],
            )
    return said


def _spec(profile: Path, trace: Path) -> str:
    return f"""
schema_version: 1
model: {MODEL}
cluster:
  pools:
    - {{name: here, device: cpu, profile: {profile}, nodes: 1, devices_per_node: 1,
       memory_per_device: 4GiB, nic: 1GB/s}}
goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{trace: {trace}, concurrency: {CONCURRENCY}}}
  slo: {{ttft: {{p90: {TARGETS["ttft_s"]}s}}, tpot: {{p90: {TARGETS["tpot_s"]}s}}}}
  max_model_len: {MAX_MODEL_LEN}
  modes: [aggregated]
emit: [vllm]
"""


def value(metrics: Metrics) -> tuple[float, float]:
    """Return what is compared: by how much targets are missed, then the seconds."""
    excess = float(np.prod([max(1.0, one) for one in metrics[1:]]))
    return excess, metrics[0] * excess


def order_of(name: str, table: Table, seed: int) -> Order:
    """Return one way to choose the next launch."""
    draw, count = random.Random(seed), len(table.points)
    if name == "random":
        shuffled = draw.sample(range(count), count)
        return lambda known: shuffled[len(known)]
    ranked = sorted(
        range(count), key=lambda at: (*value(table.points[at].predicted), draw.random())
    )
    if name == "predicted":
        return lambda known: ranked[len(known)]
    if name == "prior":
        sampler = PriorSampler(table.points, errors=table.errors)
        return lambda known: sampler.choose(known) if known else ranked[0]
    return _tpe(table, seed)


def _tpe(table: Table, seed: int) -> Order:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=4)
    study, draw = optuna.create_study(sampler=sampler), random.Random(seed)
    names = list(table.points[0].knobs)
    space = {
        name: CategoricalDistribution(sorted({one.knobs[name] for one in table.points}, key=str))
        for name in names
    }
    places = {tuple(one.knobs.values()): at for at, one in enumerate(table.points)}
    asked: list[tuple[optuna.Trial, int]] = []

    def next_one(known: Mapping[int, Metrics]) -> int:
        for trial, place in asked:
            study.tell(trial, value(known[place])[1])
        asked.clear()
        for _ in range(64):
            trial = study.ask(dict(space))
            place = places.get(tuple(trial.params[name] for name in names), -1)
            if place >= 0 and place not in known:
                asked.append((trial, place))
                return place
            if place < 0:
                study.tell(trial, state=TrialState.FAIL)
            else:
                study.tell(trial, value(known[place])[1])
        return draw.choice([at for at in range(len(table.points)) if at not in known])

    return next_one


def regrets(table: Table, name: str, *, seeds: int, launches: int) -> list[float]:
    """Return the median regret after 1, 2, ... launches."""
    truth = [
        value(tuple(statistics.median(each) for each in zip(*repeats, strict=True)))
        for repeats in table.repeats
    ]
    best = min(truth)[1]
    each = []
    for seed in range(seeds):
        draw, order = random.Random(seed), order_of(name, table, seed)
        drawn = [draw.choice(repeats) for repeats in table.repeats]
        known: dict[int, Metrics] = {}
        reached = []
        for _ in range(min(launches, len(table.points))):
            place = order(known)
            known[place] = drawn[place]
            reached.append(truth[min(known, key=lambda at: value(known[at]))][1] / best - 1.0)
        each.append(reached)
    return [statistics.median(column) for column in zip(*each, strict=True)]


def noise(table: Table) -> float:
    """Return the median spread of repeats, largest over least less 1."""
    spreads = [
        max(one[0] for one in repeats) / min(one[0] for one in repeats) - 1.0
        for repeats in table.repeats
    ]
    return statistics.median(spreads)


def figures(*, seeds: int, launches: int) -> dict[str, dict[str, Sequence[float]]]:
    """Return the regrets of every table and order, and the noise of each table."""
    result: dict[str, dict[str, Sequence[float]]] = {}
    for table in (vllm_table(), *trainer_tables()):
        result[table.name] = {
            name: regrets(table, name, seeds=seeds, launches=launches) for name in NAMES
        }
        result[table.name]["noise"] = [noise(table)]
    return result


def main() -> None:
    """Print the regrets in percent."""
    given = parse(__doc__, {"--seeds": 200, "--launches": 12})
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for table, rows in figures(seeds=given.seeds, launches=given.launches).items():
        for name, values in rows.items():
            say(f"{table:<12} {name:<10} " + " ".join(f"{100.0 * one:6.1f}" for one in values))


if __name__ == "__main__":
    main()
