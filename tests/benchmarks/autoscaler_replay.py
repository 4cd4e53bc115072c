"""A day of recorded rates through an autoscaler's control loop, simulated, beside peak's instances.

    python tests/benchmarks/autoscaler_replay.py RATES.json LENGTHS.csv

RATES.json holds requests a second of a service in windows of ten minutes (ServeGen's, arXiv
2505.09999: {name: {"t": [...], "rate": [...]}}), LENGTHS.csv the pairs of lengths that requests are
drawn from (Azure's conversations). Qwen3-30B-A3B on machines of one H100 each is planned for the
day's highest rate, which is peak's number of instances; the plan's `autoscaling` says at how many
running and waiting requests instances are added. Arrivals are Poisson in each window.

The loop is the HorizontalPodAutoscaler's (kubernetes.io): every 15 s ceil(load / target), nothing
within a tolerance of 0.1, at most double or 4 more, and fewer only after the highest count of
300 s; the load is that of the scrape before, 15 s old. An instance takes requests `--start-up`
seconds after it was asked for; the last one to come goes first, and is paid until it is empty. The
router sends each request to the instance that takes requests with the fewest outstanding.

A request is within both targets where its TTFT and its TPOT are below the limits of the plan's P90.
`--kv-usage` scales by the share of the KV cache in use instead, as published settings do.
Exit code 1: an aim is missed.
"""

import json
import math
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import yaml

from tests.benchmarks.bars import is_missed, parse, say
from tests.expect import present
from tuner.goals.serve_plan import deploy, price_serving_pools
from tuner.plans.autoscaling import SCALE_DOWN_WINDOW_S, SYNC_S, Autoscaling
from tuner.plans.serve import ServePlan
from tuner.search.serve.options import Option
from tuner.search.serve.planned_instances import planned_groups
from tuner.search.serve.simulation import option_step_times
from tuner.search.serve.solve_mode import build_serve_problem
from tuner.search.settings import SearchSettings
from tuner.simulate.serving.batching import EngineRank, Rules
from tuner.simulate.serving.client import client_observed_ttft_s, engine_client, engine_rules
from tuner.simulate.serving.load import Requests, SentRequests, Served
from tuner.simulate.serving.steps import StepTimes
from tuner.spec.serving.traces import trace_chunks

MODEL = Path(__file__).parents[2] / "examples/models/qwen3-30b-a3b/config.json"
WINDOW_S = 600.0
DAY_WINDOWS = 144
TTFT_S, TPOT_S = 1.0, 0.025
TOLERANCE = 0.1
SPARE_MACHINES = 2
"""Machines of the pool beyond those of the peak."""
MOST_HOURS, LEAST_MET = 0.70, 0.99

Floats = npt.NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class ControlLoop:
    """Decisions of a HorizontalPodAutoscaler."""

    target: float
    """Load of an instance that is kept."""
    at_least: int
    at_most: int
    proposed: deque[tuple[float, int]] = field(default_factory=deque)

    def count(self, now_s: float, load: float, current: int) -> int:
        """Return the instances for a load, of which there are so many now."""
        if not self.proposed:
            self.proposed.append((now_s, current))
        wanted = current
        if abs(load / (self.target * current) - 1.0) > TOLERANCE:
            wanted = math.ceil(load / self.target)
        self.proposed.append((now_s, wanted))
        while self.proposed[0][0] < now_s - SCALE_DOWN_WINDOW_S:
            self.proposed.popleft()
        if wanted < current:
            wanted = min(current, max(count for _, count in self.proposed))
        most = min(max(2 * current, current + 4), self.at_most)
        return min(max(wanted, self.at_least), most)


@dataclass(slots=True, kw_only=True)
class Instance:
    """An instance that is paid for."""

    rank: EngineRank
    begun_s: float
    ready_s: float
    sent: int = 0

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""
        return self.sent - len(self.rank.end_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """One day under one policy."""

    instance_hours: float
    met_ratio: float
    """Share of requests within both targets."""
    ttft_p99_s: float
    missed_windows: int
    """Windows whose P90 of TTFT or TPOT misses its target."""
    windows: int
    most_instances: int


@dataclass(slots=True, kw_only=True)
class Deployment:
    """Instances behind a router, one attention-data rank each, and the loop that counts them."""

    requests: Requests
    times: StepTimes
    rules: Rules
    start_up_s: float
    loop: ControlLoop | None
    """Loop that decides; None: the number stays."""
    by_kv_usage: bool = False
    serving: list[Instance] = field(default_factory=list)
    """Instances that take requests, or will, in the order in which they came."""
    draining: list[Instance] = field(default_factory=list)
    ranks: list[EngineRank] = field(default_factory=list)
    paid_s: float = 0.0
    seen: float | None = None
    """Load at the scrape before; None before the first."""
    most: int = 0
    sent: SentRequests = field(init=False)
    """Lengths that all ranks look up."""

    def __post_init__(self) -> None:
        self.sent = SentRequests.of(self.requests)

    def start(self, now_s: float, *, ready_s: float) -> None:
        """Start an instance."""
        rank = EngineRank(
            times=self.times,
            rules=self.rules,
            observe=None,
            inputs=self.sent.inputs,
            outputs=self.sent.outputs,
            delays_s=[],
            prefilled_elsewhere=self.sent.prefilled_elsewhere,
            cached=self.sent.cached,
        )
        self.ranks.append(rank)
        self.serving.append(Instance(rank=rank, begun_s=now_s, ready_s=ready_s))
        self.most = max(self.most, len(self.serving))

    def advance(self, now_s: float) -> None:
        """Let every instance serve until then."""
        for instance in (*self.serving, *self.draining):
            rank = instance.rank
            while rank.due_s() <= now_s:
                rank.turn()

    def load(self) -> float:
        """Return what the autoscaler adds up over the instances that are not ending."""
        if self.by_kv_usage:
            return sum(
                (instance.rank.past + instance.rank.prompts) / self.rules.kv_tokens
                for instance in self.serving
            )
        return float(sum(instance.outstanding for instance in self.serving))

    def decide(self, now_s: float) -> None:
        """Count instances, start and end some, and pay for those that are empty."""
        for instance in [one for one in self.draining if not one.outstanding]:
            self.draining.remove(instance)
            self.paid_s += now_s - instance.begun_s
        if self.loop is None:
            return
        seen, self.seen = self.seen, self.load()
        if seen is None:
            return
        wanted = self.loop.count(now_s, seen, len(self.serving))
        for _ in range(wanted - len(self.serving)):
            self.start(now_s, ready_s=now_s + self.start_up_s)
        for _ in range(len(self.serving) - wanted):
            self.draining.append(self.serving.pop())

    def send(self, request: int, at_s: float) -> None:
        """Send a request to the instance with the fewest outstanding."""
        ready = [instance for instance in self.serving if instance.ready_s <= at_s]
        chosen = min(ready, key=lambda instance: instance.outstanding)
        chosen.sent += 1
        chosen.rank.send(request, at_s)

    def run(self, first: int) -> float:
        """Serve all requests, from so many instances on; return the seconds until the last end."""
        for _ in range(first):
            self.start(0.0, ready_s=0.0)
        tick_s = SYNC_S
        for request, at_s in enumerate(present(self.requests.arrival_s_R).tolist()):
            while tick_s <= at_s:
                self.advance(tick_s)
                self.decide(tick_s)
                tick_s += SYNC_S
            self.advance(at_s)
            self.send(request, at_s)
        while any(instance.outstanding for instance in (*self.serving, *self.draining)):
            self.advance(tick_s)
            self.decide(tick_s)
            tick_s += SYNC_S
        self.paid_s += sum(tick_s - one.begun_s for one in (*self.serving, *self.draining))
        return tick_s

    def served(self) -> Served:
        """Return the times of all requests."""
        merged: list[dict[int, float]] = [{}, {}, {}]
        for rank in self.ranks:
            for whole, part in zip(merged, (rank.arrived_s, rank.first_s, rank.end_s), strict=True):
                whole |= part
        arrived_s, first_s, end_s = merged
        return Served.in_order(self.requests, arrived_s=arrived_s, first_s=first_s, end_s=end_s)


def replay(deployment: Deployment, option: Option, *, first: int, windows: int) -> Replay:
    """Serve a day from so many instances on, and judge its requests."""
    deployment.run(first)
    served = deployment.served()
    ttft_s_R = client_observed_ttft_s(served, client=engine_client(option.iteration))
    tpot_s_R = np.zeros(len(ttft_s_R))
    tpot_s_R[served.output_R > 1] = served.tpot_s_R
    window_R = np.minimum((served.arrival_s_R / WINDOW_S).astype(int), windows - 1)
    missed = sum(
        np.quantile(ttft_s_R[own_R], 0.9) > TTFT_S or np.quantile(tpot_s_R[own_R], 0.9) > TPOT_S
        for window in range(windows)
        if (own_R := window_R == window).any()
    )
    return Replay(
        instance_hours=deployment.paid_s / 3600.0,
        met_ratio=float(((ttft_s_R <= TTFT_S) & (tpot_s_R <= TPOT_S)).mean()),
        ttft_p99_s=float(np.quantile(ttft_s_R, 0.99)),
        missed_windows=int(missed),
        windows=windows,
        most_instances=deployment.most,
    )


def day_requests(
    rates_W: Sequence[float], lengths: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
) -> Requests:
    """Draw Poisson arrivals of each window, and lengths in recorded pairs."""
    rng = np.random.default_rng(0)
    arrivals = []
    for window, rate in enumerate(rates_W):
        count = rng.poisson(rate * WINDOW_S)
        arrivals.append(WINDOW_S * (window + np.sort(rng.random(count))))
    arrival_s_R = np.concatenate(arrivals)
    chosen_R = rng.integers(len(lengths[0]), size=len(arrival_s_R))
    return Requests(
        input_R=lengths[0][chosen_R], output_R=lengths[1][chosen_R], arrival_s_R=arrival_s_R
    )


def peak_plan(
    trace: Path, *, peak_per_s: float, start_up_s: float, machines: int, folder: Path
) -> tuple[ServePlan, Option]:
    """Plan the peak on so many machines of one H100, and find the instance that was chosen."""
    spec = {
        "schema_version": 1,
        "model": str(MODEL),
        "cluster": {
            "pools": [
                {"name": "h100", "device": "h100-sxm", "nodes": machines, "devices_per_node": 1}
            ]
        },
        "goal": {
            "kind": "serve",
            "engine": {"name": "vllm"},
            "traffic": {
                "trace": str(trace.absolute()),
                "rate": f"{peak_per_s}/s",
                "arrival": {"kind": "poisson"},
            },
            "slo": {"ttft": {"p90": f"{TTFT_S}s"}, "tpot": {"p90": f"{TPOT_S}s"}},
            "objective": "devices",
            "modes": ["aggregated"],
            "autoscaler": {"start_up": f"{start_up_s}s"},
        },
        "emit": ["vllm", "kubernetes", "hpa"],
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    made = deploy(path)
    problem = build_serve_problem(made.spec, price_serving_pools(made.spec, ()), SearchSettings())
    (group,) = present(planned_groups(problem, present(made.plan.decision)))
    return made.plan, group.option


def deployment_of(
    option: Option, requests: Requests, scaling: Autoscaling, loop: ControlLoop | None
) -> Deployment:
    """Return a day's deployment before its first request."""
    return Deployment(
        requests=requests,
        times=option_step_times(
            option,
            requests,
            most_tokens=option.step_tokens + option.running,
            most_running=option.running,
        ),
        rules=engine_rules(
            option.iteration.traits,
            step_tokens=option.step_tokens,
            kv_tokens=option.kv_tokens,
            most_running=option.running,
            is_chunked=option.is_chunked,
        ),
        start_up_s=present(scaling.start_up_s) + scaling.node_provisioning_s,
        loop=loop,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay a day, print both policies, and say what missed."""
    asked = parse(
        __doc__,
        {
            "rates": Path,
            "lengths": Path,
            "--service": "m-small",
            "--day": 1,
            "--scale": (float, 1.0 / 55.0),
            "--start-up": (float, 60.0),
            "--windows": DAY_WINDOWS,
            "--kv-usage": (float, 0.0),
            "--at-least": 0,
        },
        arguments,
    )
    recorded = json.loads(asked.rates.read_text())[asked.service]["rate"]
    first_window = asked.day * DAY_WINDOWS
    rates_W = [asked.scale * rate for rate in recorded[first_window : first_window + asked.windows]]
    chunks = list(trace_chunks(asked.lengths))
    lengths = (
        np.concatenate([chunk.input_tokens_N for chunk in chunks]),
        np.concatenate([chunk.output_tokens_N for chunk in chunks]),
    )
    peak_per_s = max(rates_W)
    with tempfile.TemporaryDirectory() as folder:
        plan, option = peak_plan(
            asked.lengths,
            peak_per_s=peak_per_s,
            start_up_s=asked.start_up,
            machines=64,
            folder=Path(folder),
        )
    scaling, peak = present(plan.autoscaling), present(plan.decision).instances[0].count
    say(*scaling.words())
    (scaled,) = scaling.roles
    loop = ControlLoop(
        target=asked.kv_usage or scaled.target,
        at_least=asked.at_least or scaled.at_least,
        at_most=peak + SPARE_MACHINES,
    )
    requests = day_requests(rates_W, lengths)
    say(f"{len(requests.input_R):,} requests, at most {peak_per_s:.3g}/s, peak {peak} instances")
    results = {}
    for name, chosen in (("peak", None), ("autoscaler", loop)):
        deployment = deployment_of(option, requests, scaling, chosen)
        deployment.by_kv_usage = bool(asked.kv_usage) and chosen is not None
        results[name] = result = replay(deployment, option, first=peak, windows=len(rates_W))
        say(
            f"{name:11} {result.instance_hours:7.1f} instance-hours, at most"
            f" {result.most_instances} instances, both targets held for"
            f" {100 * result.met_ratio:.2f} %, TTFT P99 {result.ttft_p99_s:.3g} s,"
            f" {result.missed_windows} of {result.windows} windows missed"
        )
    share = results["autoscaler"].instance_hours / results["peak"].instance_hours
    missed = is_missed("instance-hours of peak's", share, MOST_HOURS)
    met = results["autoscaler"].met_ratio
    return int(is_missed("within both targets", met, LEAST_MET, is_most=False) or missed)


if __name__ == "__main__":
    sys.exit(main())
