"""The benchmark of a deployment: `vllm bench serve` and AIPerf, with the numbers to expect.

    bench_vllm.sh     random prompts, or a file with prompt hashes, from vLLM 0.33.0's client
    bench_aiperf.sh   synthetic prompts, or a file, from AIPerf 0.13.0
    requests.jsonl    requests that their options do not draw (benchmark_requests.py)
    expected.json     what the plan predicts, in seconds

By options, both clients send prompts of one length after one common prefix, and vLLM's also draws
lengths uniformly from mean * (1 - r) to mean * (1 + r). Sessions, other distributions and on/off
arrivals are in the file: AIPerf's options draw lengths from a normal distribution that is cut at 0,
whose mean is far above the stated one where the deviation is large, and a prefix for each request
at random from a pool, however long ago it was sent. Of a file vLLM's client sends token ids; behind
a router that refuses them it sends distributions at their mean and sessions as prefixes that return
throughout the run (`prefix_repetition`), and the script says so.

Gamma arrivals are `--burstiness` / `--arrival-smoothness` 1 / cv^2 (the gamma shape); an infinite
`--burstiness` has constant gaps. Goodput counts requests within the largest limit of each SLO.
"""

import json
import math
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from tuner.engines.files import EmittedFile, comment
from tuner.engines.launchers.benchmark_requests import (
    MOST_IN_FILE,
    NAME,
    BenchmarkRequests,
    benchmark_requests,
    fewest_requests,
    session_turns,
)
from tuner.engines.serving.command import FIRST_PORT
from tuner.engines.serving.router import ROUTER_PORT, engine_gateway, needs_router
from tuner.engines.serving.statement import brief_statement, expectation, statement
from tuner.plans.serve import VerifiedServing
from tuner.spec.serving.goal import Percentiles
from tuner.spec.serving.lengths import LengthKind, LengthLaw, mean_tokens
from tuner.spec.serving.traces import BLOCK_TOKENS
from tuner.spec.serving.traffic import ArrivalKind, Traffic

_REQUESTS_PER_SLOT: Final = 10
"""Requests of a closed loop over its concurrency: enough to amortise ramp-up and drain."""
_OPEN_S: Final = 300
"""Length of an open run, seconds."""
_FEWEST: Final = 100
_FEWEST_WARMUPS: Final = 16
_WARMUPS_PER_RANK: Final = 2
_VLLM_DRAWS: Final = frozenset({LengthKind.FIXED, LengthKind.UNIFORM})
_AIPERF_DRAWS: Final = frozenset({LengthKind.FIXED})
"""Distributions that options of the clients draw as stated."""
TRACE_FORM: Final = (
    'TRACE holds a line a request, such as {"timestamp": 1500, "input_length": 900,'
    ' "output_length": 80}, with milliseconds and tokens.'
)
"""AIPerf's `mooncake_trace`."""


def benchmark_files(verified: VerifiedServing) -> tuple[EmittedFile, ...]:
    """Return the scripts and the expected results."""
    requests = planned_requests(verified)
    scripts = {
        "bench_aiperf.sh": benchmark_aiperf_bash(verified, requests),
        "bench_vllm.sh": benchmark_vllm_bash(verified, requests),
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
        *requests_files(requests),
    )


def requests_files(requests: BenchmarkRequests | None) -> tuple[EmittedFile, ...]:
    """Return the file of the requests, if there is one."""
    if requests is None:
        return ()
    return (EmittedFile(path=PurePosixPath(NAME), text="".join(requests.lines())),)


def planned_requests(verified: VerifiedServing) -> BenchmarkRequests | None:
    """Return the requests of the clients' file; None where options draw all of them."""
    traffic, goal = offered_traffic(verified), verified.plan.goal
    if not _needs_file(traffic, drawn=_AIPERF_DRAWS):
        return None
    longest = verified.plan.model.max_position
    return benchmark_requests(
        traffic,
        count=num_requests(verified) + num_warmups(verified),
        in_flight=_in_flight(verified),
        most_tokens=min(goal.max_model_len or longest, longest),
    )


def is_drawn_by_vllm(traffic: Traffic) -> bool:
    """Say whether options of vLLM's client draw the traffic."""
    return traffic.trace is None and not _needs_file(traffic, drawn=_VLLM_DRAWS)


def _needs_file(traffic: Traffic, *, drawn: frozenset[LengthKind]) -> bool:
    if traffic.trace is not None:
        return False
    laws = [law for law in (traffic.input_tokens, traffic.output_tokens) if law is not None]
    return (
        _has_sessions(traffic)
        or (traffic.arrival is not None and traffic.arrival.kind is ArrivalKind.ON_OFF)
        or any(law.kind not in drawn or law.most < (law.high or 0) for law in laws)
    )


def _has_sessions(traffic: Traffic) -> bool:
    return traffic.prefix_hit > 0.0 and traffic.prefix_scope == "session"


def _takes_token_ids(verified: VerifiedServing) -> bool:
    gateway = engine_gateway(verified) if needs_router(verified) else None
    return gateway is None or gateway.takes_token_ids


def benchmark_vllm_bash(verified: VerifiedServing, requests: BenchmarkRequests | None) -> str:
    """Return bash that executes vLLM's client.

    Args:
        verified: the deployment.
        requests: the `planned_requests` of it.
    """
    traffic = offered_traffic(verified)
    if is_drawn_by_vllm(traffic) or not _takes_token_ids(verified):
        requests = None
    targets = _goodput(verified, names=("ttft", "tpot"))
    words = [
        "vllm bench serve",
        '--backend openai --base-url "$BASE_URL" --model "$MODEL"',
        *_vllm_prompts(verified, requests),
        *_vllm_load(traffic, is_file=requests is not None),
        *((f"--num-prompts {num_requests(verified)}",) if not traffic.is_replayed else ()),
        "--ignore-eos --percentile-metrics ttft,tpot --metric-percentiles 50,90,99",
        *((f"--goodput {' '.join(targets)}",) if targets else ()),
        '--save-result "$@"',
    ]
    needs = _source(traffic, requests) + ("" if traffic.trace is None else _NEEDS_HASHES)
    return _target(verified) + needs + "exec " + " \\\n  ".join(words) + "\n"


def _source(traffic: Traffic, requests: BenchmarkRequests | None) -> str:
    """Return bash that finds the file of the requests."""
    if traffic.trace is not None:
        return _NEEDS_TRACE
    return "" if requests is None else _OWN_REQUESTS


_LOCAL_TOKENIZER: Final = """\
TOKENIZER="$MODEL"
if [[ -d "$MODEL" ]]; then
  # Processes of AIPerf find tokenizers in the cache of repositories only.
  HF_HUB_CACHE="$(mktemp -d)"
  export HF_HUB_CACHE HF_HUB_OFFLINE=1
  CACHED="$HF_HUB_CACHE/models--local--model"
  mkdir -p -- "$CACHED/snapshots" "$CACHED/refs"
  ln -s -- "$(cd -- "$MODEL" && pwd)" "$CACHED/snapshots/0"
  printf 0 > "$CACHED/refs/main"
  TOKENIZER=local/model
fi
"""
_NEEDS_TRACE: Final = ': "${TRACE:?set TRACE to the recorded requests as Mooncake JSONL}"\n'
_OWN_REQUESTS: Final = f': "${{TRACE:=$(dirname -- "${{BASH_SOURCE[0]}}")/{NAME}}}"\n'
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


def _vllm_prompts(verified: VerifiedServing, requests: BenchmarkRequests | None) -> Iterator[str]:
    traffic = offered_traffic(verified)
    if requests is not None or traffic.input_tokens is None or traffic.output_tokens is None:
        block_tokens = BLOCK_TOKENS if requests is None else requests.block_tokens
        yield '--dataset-name timed_trace --dataset-path "$TRACE"'
        yield f"--timed-trace-chunk-hash-size {block_tokens}"
        return
    tokens = round(mean_tokens(traffic.input_tokens))
    output = round(mean_tokens(traffic.output_tokens))
    if _has_sessions(traffic):
        turns = session_turns(traffic.prefix_hit)
        # The first request of a prefix finds none of it.
        prefix = round(tokens * traffic.prefix_hit * turns / (turns - 1))
        yield "--dataset-name prefix_repetition"
        yield f"--prefix-repetition-num-prefixes {max(1, num_requests(verified) // turns)}"
        yield f"--prefix-repetition-prefix-len {prefix}"
        yield f"--prefix-repetition-suffix-len {max(1, tokens - prefix)}"
        yield f"--prefix-repetition-output-len {output}"
        return
    cached = round(tokens * traffic.prefix_hit)
    ratios = {
        "input": _range_ratio(traffic.input_tokens),
        "output": _range_ratio(traffic.output_tokens),
    }
    yield f"--dataset-name random --random-input-len {max(1, tokens - cached)}"
    yield f"--random-output-len {output}"
    yield f"--random-range-ratio '{json.dumps(ratios)}'"
    if cached:
        yield f"--random-prefix-len {cached}"


def benchmark_aiperf_bash(verified: VerifiedServing, requests: BenchmarkRequests | None) -> str:
    """Return bash that executes AIPerf.

    Args:
        verified: the deployment.
        requests: the `planned_requests` of it.
    """
    traffic = offered_traffic(verified)
    targets = _goodput(verified, names=("time_to_first_token", "inter_token_latency"))
    words = [
        "aiperf profile",
        '--model "$MODEL" --tokenizer "$TOKENIZER" --url "$BASE_URL"',
        "--endpoint-type completions --streaming --extra-inputs ignore_eos:true",
        # Random text has another number of tokens when the server tokenizes it.
        "--use-server-token-count",
        *_aiperf_prompts(traffic, requests),
        *_aiperf_load(traffic, is_file=bool(_source(traffic, requests))),
        # One argument for both, unlike vLLM's client.
        *((f"--goodput '{' '.join(targets)}'",) if targets else ()),
    ]
    if not _is_timed(traffic):
        number = num_requests(verified)
        words.append(f"--request-count {number}")
        if requests is None and traffic.trace is None:
            words.append(f"--num-dataset-entries {number + num_warmups(verified)}")
    words.append('"$@"')
    needs = _LOCAL_TOKENIZER + _source(traffic, requests)
    return _target(verified) + needs + "exec " + " \\\n  ".join(words) + "\n"


def num_requests(verified: VerifiedServing) -> int:
    """Return how many requests a run sends."""
    traffic = offered_traffic(verified)
    if traffic.requests is not None:
        return traffic.requests
    if traffic.concurrency is not None:
        count = _REQUESTS_PER_SLOT * traffic.concurrency
    else:
        count = math.ceil((traffic.rate or verified.predicted.requests_per_s) * _OPEN_S)
    count = max(_FEWEST, count, fewest_requests(traffic, in_flight=_in_flight(verified)))
    return min(count, MOST_IN_FILE) if _needs_file(traffic, drawn=_AIPERF_DRAWS) else count


def num_warmups(verified: VerifiedServing) -> int:
    """Return how many requests a verification sends before it measures.

    Some for every rank of data-parallel attention, so that each has compiled and captured what it
    runs. AIPerf takes them from its requests, and begins these again at their end.
    """
    ranks = sum(group.count * group.attention_dp for group in verified.decision.instances)
    return max(_FEWEST_WARMUPS, _WARMUPS_PER_RANK * ranks)


def _in_flight(verified: VerifiedServing) -> float:
    """Return the requests that are under way at a time (Little's law)."""
    traffic, predicted = offered_traffic(verified), verified.predicted
    if traffic.concurrency is not None:
        return traffic.concurrency
    output = 0.0 if traffic.output_tokens is None else mean_tokens(traffic.output_tokens)
    stay_s = predicted.ttft_s.mean + output * predicted.tpot_s.mean
    return (traffic.rate or predicted.requests_per_s) * stay_s


def _is_timed(traffic: Traffic) -> bool:
    """Say whether requests are sent at the times of a file."""
    return traffic.is_replayed or (
        traffic.arrival is not None and traffic.arrival.kind is ArrivalKind.ON_OFF
    )


def _target(verified: VerifiedServing) -> str:
    port = ROUTER_PORT if needs_router(verified) else FIRST_PORT
    return (
        ': "${MODEL:?set MODEL as the instances have it}"\n'
        f'BASE_URL="${{BASE_URL:-http://127.0.0.1:{port}}}"\n'
    )


def _vllm_load(traffic: Traffic, *, is_file: bool) -> Iterator[str]:
    if traffic.is_replayed or (is_file and _is_timed(traffic)):
        # Milliseconds to seconds; a larger number stretches the trace.
        yield '--timed-trace-sec-multiplier "${SECONDS_EACH:-0.001}"'
        if traffic.is_replayed:
            yield '--num-prompts "$(wc -l < "$TRACE")"'
        return
    if traffic.trace is not None or is_file:
        yield "--no-self-timed"
    if traffic.concurrency is not None:
        yield f"--max-concurrency {traffic.concurrency} --request-rate inf"
        return
    yield f"--request-rate {traffic.rate}"
    if traffic.arrival is not None and traffic.arrival.kind is ArrivalKind.CONSTANT:
        yield "--burstiness inf"
    elif traffic.arrival is not None and traffic.arrival.cv:
        yield f"--burstiness {traffic.arrival.cv**-2:.6g}"


def _aiperf_load(traffic: Traffic, *, is_file: bool) -> Iterator[str]:
    if _is_timed(traffic):
        yield "--fixed-schedule"
        return
    if is_file:
        # Else times in a file are followed.
        yield "--no-fixed-schedule"
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


def _aiperf_prompts(traffic: Traffic, requests: BenchmarkRequests | None) -> Iterator[str]:
    if requests is not None or traffic.input_tokens is None or traffic.output_tokens is None:
        yield '--input-file "$TRACE" --custom-dataset-type mooncake_trace'
        if requests is not None:
            yield f"--prompt-input-tokens-block-size {requests.block_tokens}"
        return
    tokens = round(mean_tokens(traffic.input_tokens))
    cached = round(tokens * traffic.prefix_hit)
    yield f"--synthetic-input-tokens-mean {max(1, tokens - cached)}"
    yield "--synthetic-input-tokens-stddev 0"
    yield f"--output-tokens-mean {round(mean_tokens(traffic.output_tokens))}"
    yield "--output-tokens-stddev 0"
    if cached:
        yield f"--num-prefix-prompts 1 --prefix-prompt-length {cached}"


def _range_ratio(law: LengthLaw) -> float:
    """Half the width of the drawn range over its middle; 0 draws the mean only."""
    if law.kind is not LengthKind.UNIFORM or law.low is None or law.high is None:
        return 0.0
    return round((law.high - law.low) / (law.high + law.low), 6)


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
    if _has_sessions(traffic):
        yield (
            f"Sessions have up to {session_turns(traffic.prefix_hit)} requests, the first of which"
            " finds no prefix, and the others more than is planned: expect a higher P99 of TTFT."
        )
    if not is_drawn_by_vllm(traffic) and not _takes_token_ids(verified):
        yield (
            "The router refuses the token ids that vLLM's client sends of a file: send traces by"
            f" bench_aiperf.sh. Only it sends {NAME}; bench_vllm.sh sends mean lengths, Poisson"
            " arrivals in place of on/off ones, and sessions that last the whole run."
        )
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
