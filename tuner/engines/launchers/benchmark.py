"""The benchmark of a deployment: `vllm bench serve` and AIPerf, with the numbers to expect.

    bench_vllm.sh     random prompts, or a trace with prompt hashes, from vLLM 0.33.0's client
    bench_aiperf.sh   synthetic prompts, or a trace, from AIPerf 0.13.0
    expected.json     what the plan predicts, in seconds

Lengths: vLLM's client draws uniformly from mean * (1 - r) to mean * (1 + r), AIPerf from a normal
distribution of the mean and deviation; any other distribution is run at its mean, without its tail,
and the script says so. Gamma arrivals are `--burstiness` / `--arrival-smoothness` 1 / cv^2 (the
gamma shape). Goodput counts requests within the largest limit of each SLO.
"""

import json
import math
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from tuner.engines.files import EmittedFile, comment
from tuner.engines.serving.command import FIRST_PORT
from tuner.engines.serving.router import ROUTER_PORT, needs_router
from tuner.engines.serving.statement import brief_statement, expectation, statement
from tuner.plans.serve import VerifiedServing
from tuner.spec.serving.goal import Percentiles
from tuner.spec.serving.lengths import LengthKind, LengthLaw, mean_tokens
from tuner.spec.serving.traffic import ArrivalKind, Traffic

_REQUESTS_PER_SLOT: Final = 10
"""Requests of a closed loop over its concurrency: enough to amortise ramp-up and drain."""
_OPEN_S: Final = 300
"""Length of an open run, seconds."""
_FEWEST: Final = 100
TRACE_FORM: Final = (
    'TRACE holds a line a request, such as {"timestamp": 1500, "input_length": 900,'
    ' "output_length": 80}, with milliseconds and tokens.'
)
"""AIPerf's `mooncake_trace`."""


def benchmark_files(verified: VerifiedServing) -> tuple[EmittedFile, ...]:
    """Return the scripts and the expected results."""
    scripts = {
        "bench_aiperf.sh": benchmark_aiperf_bash(verified),
        "bench_vllm.sh": benchmark_vllm_bash(verified),
    }
    heads = comment((*brief_statement(verified), *expectation(verified), "", *_notes(verified)))
    return (
        *(
            EmittedFile(
                path=PurePosixPath(name),
                text=f"#!/usr/bin/env bash\n{heads}set -euo pipefail\n{bash}",
                executable=True,
            )
            for name, bash in sorted(scripts.items())
        ),
        EmittedFile(path=PurePosixPath("expected.json"), text=_expected(verified)),
    )


def benchmark_vllm_bash(verified: VerifiedServing) -> str:
    """Return bash that executes vLLM's client."""
    traffic = offered_traffic(verified)
    targets = _goodput(verified, names=("ttft", "tpot"))
    words = [
        "vllm bench serve",
        '--backend openai --base-url "$BASE_URL" --model "$MODEL"',
        *_vllm_prompts(traffic),
        *_vllm_load(traffic),
        *((f"--num-prompts {num_requests(verified)}",) if not traffic.is_replayed else ()),
        "--ignore-eos --percentile-metrics ttft,tpot --metric-percentiles 50,90,99",
        *((f"--goodput {' '.join(targets)}",) if targets else ()),
        '--save-result "$@"',
    ]
    needs = "" if traffic.trace is None else _NEEDS_TRACE + _NEEDS_HASHES
    return _target(verified) + needs + "exec " + " \\\n  ".join(words) + "\n"


_LOCAL_TOKENIZER: Final = """\
# In offline mode, AIPerf reads a folder's path as a repository name.
if [[ -d "$MODEL" ]]; then unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE; fi
"""
_NEEDS_TRACE: Final = ': "${TRACE:?set TRACE to the recorded requests as Mooncake JSONL}"\n'
_NEEDS_HASHES: Final = """\
if ! head -n 1 -- "$TRACE" | grep -q '"hash_ids"'; then
  echo "$TRACE has no hash_ids, which vLLM's client needs: use bench_aiperf.sh" >&2
  exit 2
fi
"""


def offered_traffic(verified: VerifiedServing) -> Traffic:
    """Return the traffic to send: where the rate is the objective, what this deployment serves."""
    goal = verified.plan.goal
    if goal.objective != "rate":
        return goal.traffic
    return goal.traffic.model_copy(update={"rate": verified.predicted.requests_per_s})


def _vllm_prompts(traffic: Traffic) -> Iterator[str]:
    if traffic.input_tokens is None or traffic.output_tokens is None:
        yield '--dataset-name timed_trace --dataset-path "$TRACE" --timed-trace-chunk-hash-size 512'
        return
    tokens = mean_tokens(traffic.input_tokens)
    cached = round(tokens * traffic.prefix_hit)
    ratios = {
        "input": _range_ratio(traffic.input_tokens),
        "output": _range_ratio(traffic.output_tokens),
    }
    yield f"--dataset-name random --random-input-len {max(1, round(tokens - cached))}"
    yield f"--random-output-len {round(mean_tokens(traffic.output_tokens))}"
    yield f"--random-range-ratio '{json.dumps(ratios)}'"
    if cached:
        yield f"--random-prefix-len {cached}"


def benchmark_aiperf_bash(verified: VerifiedServing) -> str:
    """Return bash that executes AIPerf."""
    traffic = offered_traffic(verified)
    targets = _goodput(verified, names=("time_to_first_token", "inter_token_latency"))
    words = [
        "aiperf profile",
        '--model "$MODEL" --tokenizer "$MODEL" --url "$BASE_URL"',
        "--endpoint-type completions --streaming --extra-inputs ignore_eos:true",
        # Random text has another number of tokens when the server tokenizes it.
        "--use-server-token-count",
        *_aiperf_prompts(traffic),
        *_aiperf_load(traffic),
        # One argument for both, unlike vLLM's client.
        *((f"--goodput '{' '.join(targets)}'",) if targets else ()),
    ]
    if not traffic.is_replayed:
        words.append(f"--request-count {num_requests(verified)}")
    words.append('"$@"')
    needs = "" if traffic.trace is None else _NEEDS_TRACE
    return _target(verified) + _LOCAL_TOKENIZER + needs + "exec " + " \\\n  ".join(words) + "\n"


def num_requests(verified: VerifiedServing) -> int:
    """Return how many requests a run sends."""
    traffic = offered_traffic(verified)
    if traffic.requests is not None:
        return traffic.requests
    if traffic.concurrency is not None:
        return max(_FEWEST, _REQUESTS_PER_SLOT * traffic.concurrency)
    rate = traffic.rate or verified.predicted.requests_per_s
    return max(_FEWEST, math.ceil(rate * _OPEN_S))


def _target(verified: VerifiedServing) -> str:
    port = ROUTER_PORT if needs_router(verified) else FIRST_PORT
    return (
        ': "${MODEL:?set MODEL as the instances have it}"\n'
        f'BASE_URL="${{BASE_URL:-http://127.0.0.1:{port}}}"\n'
    )


def _vllm_load(traffic: Traffic) -> Iterator[str]:
    if traffic.is_replayed:
        # Milliseconds to seconds; a larger number stretches the trace.
        yield '--timed-trace-sec-multiplier "${SECONDS_EACH:-0.001}"'
        yield '--num-prompts "$(wc -l < "$TRACE")"'
        return
    if traffic.trace is not None:
        yield "--no-self-timed"
    if traffic.concurrency is not None:
        yield f"--max-concurrency {traffic.concurrency} --request-rate inf"
        return
    yield f"--request-rate {traffic.rate}"
    if traffic.arrival is not None and traffic.arrival.cv:
        yield f"--burstiness {traffic.arrival.cv**-2:.6g}"


def _aiperf_load(traffic: Traffic) -> Iterator[str]:
    if traffic.is_replayed:
        yield "--fixed-schedule"
        return
    if traffic.concurrency is not None:
        yield f"--concurrency {traffic.concurrency}"
        return
    yield f"--request-rate {traffic.rate}"
    if traffic.arrival is None or traffic.arrival.kind is ArrivalKind.POISSON:
        yield "--arrival-pattern poisson"
    elif traffic.arrival.kind is ArrivalKind.CONSTANT:
        yield "--arrival-pattern constant"
    elif traffic.arrival.cv:
        yield f"--arrival-pattern gamma --arrival-smoothness {traffic.arrival.cv**-2:.6g}"


def _aiperf_prompts(traffic: Traffic) -> Iterator[str]:
    if traffic.input_tokens is None or traffic.output_tokens is None:
        yield '--input-file "$TRACE" --custom-dataset-type mooncake_trace'
        return
    tokens = mean_tokens(traffic.input_tokens)
    cached = round(tokens * traffic.prefix_hit)
    yield f"--synthetic-input-tokens-mean {max(1, round(tokens - cached))}"
    yield f"--synthetic-input-tokens-stddev {_deviation(traffic.input_tokens):.0f}"
    yield f"--output-tokens-mean {round(mean_tokens(traffic.output_tokens))}"
    yield f"--output-tokens-stddev {_deviation(traffic.output_tokens):.0f}"
    if cached:
        yield f"--num-prefix-prompts 1 --prefix-prompt-length {cached}"


def _range_ratio(law: LengthLaw) -> float:
    """Half the width of the drawn range over its middle; 0 draws the mean only."""
    if law.kind is not LengthKind.UNIFORM or law.low is None or law.high is None:
        return 0.0
    return round((law.high - law.low) / (law.high + law.low), 6)


def _deviation(law: LengthLaw) -> float:
    """Return the standard deviation, in tokens, of the laws that have one in closed form."""
    if law.kind is LengthKind.UNIFORM and law.low is not None and law.high is not None:
        # Discrete uniform distribution: sqrt((n^2 - 1) / 12).
        return math.sqrt(((law.high - law.low + 1) ** 2 - 1) / 12.0)
    if law.kind is LengthKind.LOGNORMAL and law.mean is not None and law.cv is not None:
        return law.mean * law.cv
    return 0.0


def _goodput(verified: VerifiedServing, *, names: tuple[str, str]) -> tuple[str, ...]:
    """Return the SLO limits in milliseconds, as both tools read them."""
    slo = verified.plan.goal.slo
    return tuple(
        f"{name}:{limit_s * 1000.0:.6g}"
        for name, limit_s in zip(names, (_limit_s(slo.ttft), _limit_s(slo.tpot)), strict=True)
        if limit_s is not None
    )


def _limit_s(targets: Percentiles) -> float | None:
    stated = [
        limit
        for limit in (targets.mean, targets.p50, targets.p90, targets.p99)
        if limit is not None
    ]
    return max(stated, default=None)


def _notes(verified: VerifiedServing) -> Iterator[str]:
    traffic = offered_traffic(verified)
    trace = "" if traffic.trace is None else "TRACE=FILE "
    yield f"Usage: MODEL=... {trace}[BASE_URL=http://host:port] ./bench_aiperf.sh or bench_vllm.sh"
    if traffic.trace is not None:
        yield TRACE_FORM
        yield 'vLLM\'s client also needs "hash_ids", one for every 512 tokens of the prompt.'
    if any(group.draft_tokens for group in verified.decision.instances):
        yield "Random prompts are drafted worse than text: to compare TPOT, send texts of your own."
    plain = (LengthKind.FIXED, LengthKind.UNIFORM)
    laws = (traffic.input_tokens, traffic.output_tokens)
    if any(law is not None and law.kind not in plain for law in laws):
        yield "Lengths are drawn without the tail of their distribution, so expect lower latency."
    if traffic.arrival is not None and traffic.arrival.kind is ArrivalKind.ON_OFF:
        yield "Neither tool has on/off arrivals: both send Poisson arrivals of the mean rate."
    if traffic.arrival is not None and traffic.arrival.kind is ArrivalKind.CONSTANT:
        yield "vLLM's client sends Poisson arrivals here; AIPerf sends constant ones."
    if traffic.is_replayed and traffic.rate is not None:
        yield (
            f"The plan stretches the trace to {traffic.rate:.4g} requests/s: stretch TRACE, too,"
            " or set SECONDS_EACH for bench_vllm.sh."
        )


def _expected(verified: VerifiedServing) -> str:
    predicted = verified.predicted
    expected = {
        "ttft_s": predicted.ttft_s.model_dump(),
        "ttft_s_band": predicted.ttft_s_band,
        "tpot_s": predicted.tpot_s.model_dump(),
        "tpot_s_band": predicted.tpot_s_band,
        "requests_per_s": predicted.requests_per_s,
        "output_tokens_per_s": predicted.output_tokens_per_s,
        "goodput_per_device": predicted.goodput_per_device,
        "num_devices": verified.decision.num_devices,
        "statement": statement(verified),
    }
    return json.dumps(expected, indent=2) + "\n"
