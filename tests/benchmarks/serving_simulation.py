"""How many requests a minute the serving simulation plays, and how near closed forms it comes.

    python tests/benchmarks/serving_simulation.py

Plays a closed loop of a dense model on 8 H200 from the datasheet under each engine's batching, and
a queue whose waits Pollaczek and Khinchine give. Prints figures beside their aims; the end is 1 if
any is missed. Rates are of CPU time, so that neighbours on the machine do not count.
"""

import sys
import time

import numpy as np

from tuner.backtest.serving.decoders import LLAMA_70B
from tuner.costs.serving.decoder import Formats
from tuner.costs.serving.engine import TRAITS, Batching, Degrees, Engine
from tuner.costs.serving.iteration import Iteration
from tuner.costs.serving.machine import ServingMachine
from tuner.devices.catalogue import find_device
from tuner.simulate.serving.batching import Rules, simulate
from tuner.simulate.serving.load import Requests, uniform_requests
from tuner.simulate.serving.steps import StepTimes, step_times

LEAST_PER_MINUTE = 200_000.0
LARGEST_ERROR = 0.02
REQUESTS = 20_000
CONCURRENCY = 64


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> int:
    """Print every figure and return 1 if any misses its aim."""
    missed = [_rate(engine) for engine in Engine]
    missed.append(_queue())
    return int(any(missed))


def _rate(engine: Engine) -> bool:
    kind = "fp8"
    iteration = Iteration(
        decoder=LLAMA_70B,
        formats=Formats(attention=kind, output=kind, ffn=kind, experts=kind, kv=kind),
        degrees=Degrees(attention_tensor=8),
        engine=engine,
        machine=ServingMachine(sheet=find_device("h200-sxm"), tables=None),
    )
    tokens = TRAITS[engine].step_tokens
    requests = uniform_requests(
        REQUESTS, input_tokens=1024, output_tokens=1024, least_ratio=0.8, seed=0
    )
    started_s = time.process_time()
    times = step_times(
        iteration, most_tokens=tokens + CONCURRENCY, most_sequences=CONCURRENCY, longest=2048
    )
    rules = Rules(batching=TRAITS[engine].batching, step_tokens=tokens)
    served = simulate(requests, times=times, rules=rules, concurrency=CONCURRENCY)
    per_minute = 60.0 * REQUESTS / (time.process_time() - started_s)
    word = "reached" if per_minute >= LEAST_PER_MINUTE else "MISSED"
    _say(
        f"{engine.value}: {per_minute:,.0f} requests a minute, aim {LEAST_PER_MINUTE:,.0f}, {word}"
        f" (TPOT {1e3 * float(np.mean(served.tpot_s_R)):.2f} ms)"
    )
    return per_minute < LEAST_PER_MINUTE


def _queue() -> bool:
    """Waits of deterministic steps of one prompt under Poisson arrivals at 70 % load."""
    count, service_s, load = 300_000, 0.01, 0.7
    arrival_s = np.cumsum(np.random.default_rng(0).exponential(service_s / load, count))
    requests = Requests(
        input_R=np.full(count, 100), output_R=np.full(count, 1), arrival_s_R=arrival_s
    )
    times = StepTimes(
        linear_s=[service_s] * 200,
        head_s=[0.0] * 2,
        decode_s=[[0.0, 0.0]] * 2,
        past_step=1.0,
        prompt_s=[0.0, 0.0],
        prompt_step=1.0,
        scheduler_s=0.0,
        prompt_scheduler_s=0.0,
    )
    rules = Rules(batching=Batching.WHOLE, step_tokens=100)
    found_s = float(simulate(requests, times=times, rules=rules).ttft_s_R.mean())
    expected_s = service_s + load * service_s / (2.0 * (1.0 - load))
    error = abs(found_s / expected_s - 1.0)
    word = "reached" if error <= LARGEST_ERROR else "MISSED"
    _say(f"M/D/1: {100 * error:.2f} % off, aim {100 * LARGEST_ERROR:.0f} %, {word}")
    return error > LARGEST_ERROR


if __name__ == "__main__":
    sys.exit(main())
