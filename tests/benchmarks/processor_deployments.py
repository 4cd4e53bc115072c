"""vLLM's deployments on a processor against their predictions; run as

    python tests/benchmarks/processor_deployments.py [FOLDER]

FOLDER, by default examples/profiles/epyc-vllm, holds `profile/` with the steps of the engine
(`moetune profile --suite kernels,links,engine`) and `launches.json`, the latencies of every launch:
each deployment (`DEPLOYMENTS`) was emitted, started by its local.sh, and sent both loads (`RATES`)
by vLLM's benchmark client, round-robin, without prefix caching. The disaggregated one ran on two
machines of one core each, emulated by cpusets. Printed:

    alone     error of TTFT and TPOT from the profile alone, before any launch
    after     the same with the residual of one and of three other deployments at that load, all
              choices of them; and how many bands of those residuals hold, and how wide they are
    spread    of the repeats: largest over smallest less 1
    band      whether the measured mean lies in the band of the prediction
    choice    seconds of a mean request under the deployment that is predicted to be the fastest,
              over those of the one that was measured so, less 1; at each load, and of one device
"""

import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from tests.benchmarks.bars import parse, say
from tests.expect import present
from tuner.config.serve import Role, ServeDecision
from tuner.costs.serve.residual import latency_residual
from tuner.goals.serve_plan import plan_deployment, price_serving_pools
from tuner.goals.serve_spec import read_serve_spec
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.search.serve.options import Option
from tuner.search.serve.problem import ModeSolution, ServeProblem
from tuner.search.serve.program import SolvedProgram, Spare
from tuner.search.serve.simulation import InstanceGroup
from tuner.search.serve.solve_mode import build_serve_problem, planned_routers, simulate_traffic
from tuner.search.serve.to_plan import to_decision, to_prediction
from tuner.search.settings import SearchSettings
from tuner.spec.serving.goal import Mode

CHECKOUT: Final = Path(__file__).parents[2]
STORED: Final = CHECKOUT / "examples" / "profiles" / "epyc-vllm"
MODEL: Final = CHECKOUT / "examples" / "models" / "small-moe" / "config.json"
INPUT, OUTPUT = 256, 32
LAUNCHES: Final = (1, 3)
"""Deployments that are learnt from."""
RATES: Final = (0.5, 1.2)
"""Requests a second."""


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
    problem = build_serve_problem(spec, price_serving_pools(spec, ()), settings)
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
    return {
        "alone": statistics.median(abs(1.0 / ratio - 1.0) for ratio in ratios.values()),
        "spread": spread,
        "inside_alone": sum(row[metric]["inside"] for row in rows),
        **{f"after {launches}": _after(ratios, metric, launches) for launches in LAUNCHES},
    }


def _after(
    ratios: Mapping[tuple[str, float], float], metric: str, launches: int
) -> dict[str, float]:
    """Learn from so many deployments, and predict each other one at that load."""
    errors, held, spreads = [], [], []
    for (name, rate), ratio in ratios.items():
        others = [deployment for deployment in DEPLOYMENTS if deployment != name]
        for learnt in itertools.combinations(others, launches):
            residual = present(
                latency_residual(
                    [ratios[deployment, rate] for deployment in learnt],
                    metric="ttft" if metric == "ttft_s" else "tpot",
                    before=None,
                )
            )
            errors.append(abs(residual.factor / ratio - 1.0))
            held.append(abs(math.log(residual.factor / ratio)) <= math.log(residual.spread))
            spreads.append(residual.spread)
    return {
        "error": statistics.median(errors),
        "held": statistics.mean(held),
        "band": statistics.median(spreads),
    }


def main() -> None:
    """Print or launch."""
    result = figures(parse(__doc__, {"folder": STORED}).folder)
    for row in result["rows"]:
        cells = "  ".join(
            f"{metric[:4]} {1e3 * row[metric]['measured']:7.1f} ms,"
            f" {1e3 * row[metric]['predicted']:7.1f} predicted"
            f" ({100 * (row[metric]['predicted'] / row[metric]['measured'] - 1):+5.0f} %,"
            f" repeats {100 * row[metric]['spread']:3.0f} %)"
            for metric in METRICS
        )
        say(f"{row['deployment']:28} {row['rate']}/s  {cells}")
    say(*(f"{name} {json.dumps(result[name])}" for name in ("choice", *METRICS)))


if __name__ == "__main__":
    main()
