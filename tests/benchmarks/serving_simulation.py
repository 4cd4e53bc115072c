"""Speed of the serving simulation, and its agreement with closed forms.

    python tests/benchmarks/serving_simulation.py

Simulates a closed loop of a dense model on 8 H200 from the datasheet under each engine's batching,
a queue with the waits of Pollaczek and Khinchine, and prefill workers with those of Erlang. Prints
figures beside their aims. Exit code 1: an aim is missed. Rates are of CPU time, so that other load
on the machine does not count.
"""

import sys
import time
from typing import get_args

import numpy as np

from tests.tuner.decoders import LLAMA_70B
from tuner.costs.serve.decoder import Formats
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.machine import ServingMachine
from tuner.costs.serve.queueing import mean_wait_s
from tuner.devices.catalogue import find_device
from tuner.engines.registry import serve_traits
from tuner.engines.serve_rules.traits import Batching
from tuner.simulate.serving.batching import Rules, simulate
from tuner.simulate.serving.disaggregated import Stations, simulate_disaggregated
from tuner.simulate.serving.load import Requests, uniform_requests
from tuner.simulate.serving.steps import StepTimes, step_times
from tuner.spec.serving.goal import EngineName

LEAST_PER_MINUTE = 200_000.0
LARGEST_ERROR = 0.02
REQUESTS = 20_000
CONCURRENCY = 64
SERVICE_S = 0.01
TOKEN_S = 1e-6


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> int:
    """Print every figure and return 1 if any misses its aim."""
    missed = [_rate(engine) for engine in get_args(EngineName)]
    missed.append(_one_server())
    missed.append(_servers())
    return int(any(missed))


def _rate(engine: str) -> bool:
    kind = "fp8"
    iteration = Iteration(
        decoder=LLAMA_70B,
        formats=Formats(attention=kind, output=kind, ffn=kind, experts=kind, kv=kind),
        degrees=InstanceDegrees(attention_tensor=8),
        engine=engine,
        machine=ServingMachine(sheet=find_device("h200-sxm"), tables=None),
    )
    tokens = serve_traits()[engine].step_tokens
    requests = uniform_requests(
        REQUESTS, input_tokens=1024, output_tokens=1024, least_ratio=0.8, seed=0
    )
    started_s = time.process_time()
    times = step_times(
        iteration, most_tokens=tokens + CONCURRENCY, most_sequences=CONCURRENCY, longest=2048
    )
    rules = Rules(batching=serve_traits()[engine].batching, step_tokens=tokens)
    served = simulate(requests, times=times, rules=rules, concurrency=CONCURRENCY)
    per_minute = 60.0 * REQUESTS / (time.process_time() - started_s)
    word = "reached" if per_minute >= LEAST_PER_MINUTE else "MISSED"
    _say(
        f"{engine}: {per_minute:,.0f} requests a minute, aim {LEAST_PER_MINUTE:,.0f}, {word}"
        f" (TPOT {1e3 * float(np.mean(served.tpot_s_R)):.2f} ms)"
    )
    return per_minute < LEAST_PER_MINUTE


def _one_server() -> bool:
    """Waits of deterministic steps of one prompt under Poisson arrivals at 70 % load."""
    count, load = 500_000, 0.7
    arrival_s = np.cumsum(np.random.default_rng(0).exponential(SERVICE_S / load, count))
    requests = Requests(
        input_R=np.full(count, 100), output_R=np.full(count, 1), arrival_s_R=arrival_s
    )
    rules = Rules(batching=Batching.WHOLE, step_tokens=100)
    started_s = time.process_time()
    found_s = float(simulate(requests, times=_flat(SERVICE_S), rules=rules).ttft_s_R.mean())
    _say(f"one server: {60.0 * count / (time.process_time() - started_s):,.0f} requests a minute")
    rate = count / float(arrival_s[-1])
    wait_s = mean_wait_s(rate_per_s=rate, service_s=SERVICE_S, service_cv2=0.0)
    return _near("M/D/1", found_s - SERVICE_S, wait_s)


def _servers() -> bool:
    """Waits of exponential prompts for four prefill workers at 70 % load."""
    count, load, workers = 1_500_000, 0.7, 4
    rng = np.random.default_rng(1)
    tokens = np.maximum(np.rint(rng.exponential(SERVICE_S / TOKEN_S, count)), 1.0).astype(np.int64)
    arrival_s = np.cumsum(rng.exponential(SERVICE_S / load / workers, count))
    requests = Requests(input_R=tokens, output_R=np.full(count, 2), arrival_s_R=arrival_s)
    stations = Stations(
        prefill_workers=workers,
        prefill_ranks=1,
        prompt_s=lambda length, busy: TOKEN_S * length,
        kv_transfer_s=lambda length: 0.0,
        decode_ranks=100,
        decode=_flat(1e-9),
    )
    started_s = time.process_time()
    served = simulate_disaggregated(requests, stations=stations, concurrency=0)
    _say(f"apart: {60.0 * count / (time.process_time() - started_s):,.0f} requests a minute")
    service_s = TOKEN_S * float(tokens.mean())
    rate = count / float(arrival_s[-1])
    wait_s = mean_wait_s(rate_per_s=rate, service_s=service_s, servers=workers)
    return _near(f"M/M/{workers}", float(served.ttft_s_R.mean()) - service_s, wait_s)


def _flat(step_s: float) -> StepTimes:
    return StepTimes(
        linear_s=[step_s] * 1001,
        head_s=[0.0] * 1001,
        decode_s=[[0.0, 0.0]] * 1001,
        past_step=1.0,
        prompt_s=[0.0, 0.0],
        prompt_step=1.0,
        scheduler_s=0.0,
        prompt_scheduler_s=0.0,
    )


def _near(name: str, found_s: float, expected_s: float) -> bool:
    """Print how far a mean wait is from its closed form at the rates that were drawn."""
    error = abs(found_s / expected_s - 1.0)
    word = "reached" if error <= LARGEST_ERROR else "MISSED"
    _say(f"wait of {name}: {100 * error:.2f} % off, aim {100 * LARGEST_ERROR:.0f} %, {word}")
    return error > LARGEST_ERROR


if __name__ == "__main__":
    sys.exit(main())
