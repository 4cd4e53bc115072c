"""vLLM's deployments on a processor against their predictions; run as

    python tests/benchmarks/processor_deployments.py [FOLDER] [--launch --vllm BIN --model DIR]
        [--rounds 5] [--only NAME ...]

The disaggregated one runs on two machines of one core each, which one_core_machines.sh emulates
(root; the cpuset controller), and is started once for each load, after its client.

FOLDER, by default examples/profiles/epyc-vllm, holds `profile/` with the steps of the engine
(`moetune profile --suite kernels,links,engine`) and `launches.json`, the latencies of every launch.
With `--launch` every deployment (`DEPLOYMENTS`) is emitted, started by its local.sh, and sent both
loads (`RATES`) by vLLM's benchmark client, round-robin, so that repeats of a deployment are far
apart in time; the machine must be idle. BIN is the folder of `vllm`, DIR what make_model.py wrote.
Printed:

    alone     error of TTFT and TPOT from the profile alone, before any launch
    after     the same with the residual of three other deployments at that load, all choices of
              three; and how many bands of those residuals hold, and how wide they are
    spread    of the repeats: largest over smallest less 1
    band      whether the measured mean lies in the band of the prediction
    choice    seconds of a mean request under the deployment that is predicted to be the fastest,
              over those of the one that was measured so, less 1; at each load, and of one device
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from tuner.config.serve import Role, ServeDecision
from tuner.costs.serve.residual import latency_residual
from tuner.goals.serve_plan import plan_deployment, price_serving_pools
from tuner.goals.serve_trial import Reached, prepared_launch, write_launch_files
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.search.serve.options import Option
from tuner.search.serve.program import SolvedProgram, Spare
from tuner.search.serve.simulation import InstanceGroup
from tuner.search.serve.solve_mode import (
    ModeSolution,
    ServeProblem,
    build_serve_problem,
    planned_routers,
    simulate_traffic,
)
from tuner.search.serve.to_plan import to_decision, to_prediction
from tuner.search.settings import SearchSettings
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.read import read_serve_spec
from tuner.verify.command import parse_template
from tuner.verify.deployments.launcher import (
    SERVER_PLACEHOLDERS,
    DeploymentLaunch,
    DeploymentStarter,
    DeploymentTimeouts,
)

CHECKOUT: Final = Path(__file__).parents[2]
STORED: Final = CHECKOUT / "examples" / "profiles" / "epyc-vllm"
MODEL: Final = CHECKOUT / "examples" / "models" / "small-moe" / "config.json"
FLAGS: Final = "--host 127.0.0.1 --load-format dummy --enforce-eager --no-enable-prefix-caching"
"""Without prefix caching: the client warms up with a run's first prompt, and prompts repeat, being
consecutive tokens from a random one of 256."""
ONE_CORE_MACHINES: Final = Path(__file__).with_name("one_core_machines.sh")
INPUT, OUTPUT = 256, 32
RATES: Final = (0.5, 1.2)
"""Requests a second."""
REQUESTS: Final = {0.5: 8, 1.2: 16}
START_S: Final = 400.0
RUN_S: Final = 300.0


@dataclass(frozen=True)
class Deployment:
    """What is started: equal instances, and their budgets."""

    tensor: int
    count: int
    running: int
    tokens: int
    roles: tuple[Role, ...] = (Role.AGGREGATED,)

    @property
    def mode(self) -> Mode:
        """Of serving."""
        return "aggregated" if len(self.roles) == 1 else "disaggregated"


DEPLOYMENTS: Final[Mapping[str, Deployment]] = {
    "1 instance": Deployment(1, 1, 16, 1024),
    "1 instance, 2 sequences": Deployment(1, 1, 2, 1024),
    "1 instance, chunks of 128": Deployment(1, 1, 16, 128),
    "2 instances": Deployment(1, 2, 16, 1024),
    "2 instances, 1 sequence": Deployment(1, 2, 1, 1024),
    "TP 2": Deployment(2, 1, 16, 1024),
    "TP 2, chunks of 128": Deployment(2, 1, 16, 128),
    "2 instances, chunks of 128": Deployment(1, 2, 16, 128),
    "prefill and decode": Deployment(1, 1, 16, 1024, (Role.PREFILL, Role.DECODE)),
}


def spec_text(rate: float, profile: Path, *, mode: str) -> str:
    """Return a spec of one load."""
    nodes = 1 if mode == "aggregated" else 2
    return f"""
schema_version: 1
model: {MODEL}
cluster:
  pools:
    - {{name: here, device: cpu, profile: {profile}, nodes: {nodes},
       devices_per_node: {2 // nodes}, memory_per_device: 4GiB, nic: 1GB/s}}
goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{rate: {rate}/s, input_tokens: {INPUT}, output_tokens: {OUTPUT}}}
  slo: {{ttft: {{p90: 2s}}, tpot: {{p90: 100ms}}}}
  max_model_len: 1024
  modes: [{mode}]
emit: [vllm, local]
"""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A deployment under one load."""

    plan: ServePlan
    decision: ServeDecision
    predicted: ServePrediction


def planned(name: str, rate: float, profile: Path, scratch: Path) -> Planned:
    """Price and simulate one deployment as a plan does."""
    own = DEPLOYMENTS[name]
    path = scratch / "spec.yaml"
    path.write_text(spec_text(rate, profile, mode=own.mode), encoding="utf-8")
    spec = read_serve_spec(path)
    settings = SearchSettings(time_limit_s=20.0)
    pools = price_serving_pools(spec, ())
    problem = build_serve_problem(spec, pools, settings)
    groups = tuple(
        InstanceGroup(option=_option(problem, own, role), count=own.count) for role in own.roles
    )
    router = planned_routers(spec, own.mode)[0]
    solution = ModeSolution(
        # Only its mode is read: nothing was solved.
        solved=cast(SolvedProgram, SimpleNamespace(program=SimpleNamespace(mode=own.mode))),
        groups=groups,
        simulated=simulate_traffic(problem, own.mode, groups, router=router),
        spare=cast(Spare, None),
        missed=(),
        router=router,
    )
    plan = plan_deployment(spec, (), settings=settings).plan
    return Planned(
        plan=plan,
        decision=to_decision(solution, problem),
        predicted=to_prediction(solution, problem),
    )


def _option(problem: ServeProblem, own: Deployment, role: Role) -> Option:
    one = next(
        option
        for option in (*problem.options.options, *(c.option for c in problem.options.curves))
        if option.degrees.attention_tensor == own.tensor and option.role is role
    )
    return replace(one, running=own.running, step_tokens=own.tokens, is_chunked=True)


def launches(
    profile: Path, vllm: Path, model: Path, rounds: Sequence[int], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Start the deployments and send each both loads, round-robin."""
    environment = {
        **os.environ,
        "PATH": f"{vllm}{os.pathsep}{os.environ['PATH']}",
        "MODEL": str(model),
        "HF_HUB_OFFLINE": "1",
        "ROUTER_HOST": "127.0.0.1",
    }
    commands = {
        "aggregated": f"bash {{launch}}/local.sh {FLAGS}",
        "disaggregated": f"bash {ONE_CORE_MACHINES} {{launch}}/../vllm {FLAGS}",
    }
    starters = {
        mode: DeploymentStarter(
            command=parse_template(
                command, placeholders=SERVER_PLACEHOLDERS, example="bash {launch}/local.sh"
            ),
            pace=DeploymentTimeouts(start_s=START_S),
            environment=environment,
            prepare=lambda launch: write_launch_files(launch, None),
            on_message=lambda _: None,
        )
        for mode, command in commands.items()
    }
    with tempfile.TemporaryDirectory(prefix="moetune-deployments-") as scratch:
        folder = Path(scratch)
        result = folder / "result.json"
        for number, name in itertools.product(rounds, names):
            mode = DEPLOYMENTS[name].mode
            starts = [RATES] if mode == "aggregated" else [(rate,) for rate in RATES]
            for rates in starts:
                own = planned(name, RATES[0], profile, folder)
                place = len(DEPLOYMENTS) * number + list(DEPLOYMENTS).index(name)
                launch = prepared_launch(
                    own.plan, own.decision, own.predicted, place, folder, Reached()
                )
                clients = [_client(launch.url, model, rate, result, seed=number) for rate in rates]
                sent = (
                    _sent(starters[mode], launch, clients, environment)
                    if mode == "aggregated"
                    else _sent_by_waiting(starters[mode], launch, clients[0], environment)
                )
                for rate, _ in zip(rates, sent, strict=True):
                    values = json.loads(result.read_text())
                    yield {
                        "deployment": name,
                        "rate": rate,
                        "ttft_s": values["mean_ttft_ms"] / 1e3,
                        "tpot_s": values["mean_tpot_ms"] / 1e3,
                        "completed": values["completed"],
                    }


def _client(url: str, model: Path, rate: float, result: Path, *, seed: int) -> list[str]:
    return [
        *("vllm", "bench", "serve", "--base-url", url, "--model", str(model)),
        *("--dataset-name", "random", "--random-input-len", str(INPUT)),
        *("--random-output-len", str(OUTPUT), "--ignore-eos", "--num-warmups", "4"),
        *("--num-prompts", str(REQUESTS[rate]), "--request-rate", str(rate)),
        *("--seed", str(1000 * seed + round(100 * rate)), "--disable-tqdm"),
        *("--save-result", "--result-filename", str(result)),
    ]


def _sent(
    starter: DeploymentStarter,
    launch: DeploymentLaunch,
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str],
) -> Iterator[None]:
    """Start a deployment and run one client after the other."""
    with starter.started(launch):
        for command in commands:
            _run(command, environment)
            yield


def _sent_by_waiting(
    starter: DeploymentStarter,
    launch: DeploymentLaunch,
    command: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[None]:
    """Start a client that waits for its deployment, which leaves a new one no core to start on."""
    waits = [*command, "--ready-check-timeout-sec", str(round(START_S))]
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(_run, waits, environment, START_S + RUN_S)
        with starter.started(launch):
            client.result()
            yield


def _run(command: Sequence[str], environment: Mapping[str, str], limit_s: float = RUN_S) -> None:
    subprocess.run(
        command,
        env=dict(environment),
        check=True,
        timeout=limit_s,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


METRICS: Final = ("ttft_s", "tpot_s")


def figures(folder: Path) -> dict[str, Any]:
    """Compute errors before and after launches, bands, and the cost of the plan's choices."""
    stored: list[dict[str, Any]] = json.loads((folder / "launches.json").read_text())
    cells = list(itertools.product(DEPLOYMENTS, RATES))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="moetune-deployments-") as scratch:
        for name, rate in cells:
            predicted = planned(name, rate, folder / "profile", Path(scratch)).predicted
            row: dict[str, Any] = {"deployment": name, "rate": rate}
            for metric in METRICS:
                repeats = [
                    one[metric]
                    for one in stored
                    if (one["deployment"], one["rate"]) == (name, rate)
                ]
                measured = statistics.median(repeats)
                low, high = getattr(predicted, f"{metric}_band")
                row[metric] = {
                    "measured": measured,
                    "predicted": getattr(predicted, metric).mean,
                    "spread": max(repeats) / min(repeats) - 1.0,
                    "inside": low <= measured <= high,
                    "band": [low, high],
                }
            rows.append(row)
    return {
        "rows": rows,
        "choice": {
            f"{rate}/s, {'one device' if only_one else 'any'}": _choice(
                [
                    row
                    for row in rows
                    if row["rate"] == rate
                    and (not only_one or row["deployment"].startswith("1 instance"))
                ]
            )
            for rate in RATES
            for only_one in (False, True)
        },
        **{metric: _summary(rows, metric) for metric in METRICS},
    }


def _choice(rows: Sequence[Mapping[str, Any]]) -> float:
    def request_s(row: Mapping[str, Any], kind: str) -> float:
        return float(row["ttft_s"][kind] + (OUTPUT - 1) * row["tpot_s"][kind])

    chosen = min(rows, key=lambda row: request_s(row, "predicted"))
    return request_s(chosen, "measured") / min(request_s(row, "measured") for row in rows) - 1.0


def _summary(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    ratios = {
        (row["deployment"], row["rate"]): row[metric]["measured"] / row[metric]["predicted"]
        for row in rows
    }
    spread = statistics.median(row[metric]["spread"] for row in rows)
    errors: list[float] = []
    held: list[bool] = []
    spreads: list[float] = []
    for (own, rate), ratio in ratios.items():
        others = [name for name in DEPLOYMENTS if name != own]
        for three in itertools.combinations(others, 3):
            residual = latency_residual([ratios[name, rate] for name in three], prior=None)
            assert residual is not None
            errors.append(abs(residual.factor / ratio - 1.0))
            held.append(abs(math.log(residual.factor / ratio)) <= math.log(residual.spread))
            spreads.append(residual.spread)
    return {
        "alone": statistics.median(abs(1.0 / ratio - 1.0) for ratio in ratios.values()),
        "after": statistics.median(errors),
        "spread": spread,
        "inside_alone": sum(row[metric]["inside"] for row in rows),
        "held_after": statistics.mean(held),
        "band_after": statistics.median(spreads),
    }


def main() -> None:
    """Print or launch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=STORED)
    parser.add_argument("--launch", action="store_true")
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=tuple(DEPLOYMENTS), default=[*DEPLOYMENTS])
    options = parser.parse_args()
    if options.launch:
        if options.vllm is None or options.model is None:
            parser.error("--launch needs --vllm and --model")
        stored = options.folder / "launches.json"
        # Rounds before this one count too.
        rows = json.loads(stored.read_text()) if stored.is_file() else []
        done = sum((one["deployment"], one["rate"]) == (options.only[0], RATES[0]) for one in rows)
        rounds = range(done, done + options.rounds)
        for row in launches(
            options.folder / "profile", options.vllm, options.model, rounds, options.only
        ):
            rows.append(row)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            stored.write_text(json.dumps(rows, indent=0) + "\n")
    result = figures(options.folder)
    for row in result["rows"]:
        cells = "  ".join(
            f"{metric[:4]} {1e3 * row[metric]['measured']:7.1f} ms,"
            f" {1e3 * row[metric]['predicted']:7.1f} predicted"
            f" ({100 * (row[metric]['predicted'] / row[metric]['measured'] - 1):+5.0f} %,"
            f" repeats {100 * row[metric]['spread']:3.0f} %)"
            for metric in METRICS
        )
        sys.stdout.write(f"{row['deployment']:28} {row['rate']}/s  {cells}\n")
    sys.stdout.write(f"choice {json.dumps(result['choice'])}\n")
    for metric in METRICS:
        sys.stdout.write(f"{metric} {json.dumps(result[metric])}\n")


if __name__ == "__main__":
    main()
