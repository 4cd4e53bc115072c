"""Logs of a simulated server whose steps take other times than are predicted."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tuner.calibrate.step_corrections import corrected_option
from tuner.estimate.serving.estimate import pool_named, surroundings
from tuner.estimate.serving.instance import build_inputs, price_option
from tuner.estimate.serving.registry import read_serving_text
from tuner.goals.serve_plan import price_serving_pool
from tuner.goals.serve_spec import read_serve_spec
from tuner.prices.serve.corrections import StepCorrections
from tuner.search.serve.options import Option
from tuner.search.serve.simulation import option_step_times
from tuner.simulate.serving.batching import EngineRank
from tuner.simulate.serving.client import client_observed_ttft_s, engine_client, engine_rules
from tuner.simulate.serving.load import Requests, Served

MODELS = Path(__file__).parents[3] / "examples" / "models"
LAUNCH = "vllm serve qwen3-30b-a3b --max-num-seqs 64"
TRUE = StepCorrections(step=2.0, linear=1.25, attention=1.6, request=1.5)


def spec_text(*, model: str = "qwen3-30b-a3b", version: str = "", extra: str = "") -> str:
    stated = f", version: {version}" if version else ""
    return (
        "schema_version: 1\n"
        f"model: {MODELS / model}\n"
        "cluster:\n"
        "  pools: [{name: gpus, device: h100-sxm, nodes: 1, devices_per_node: 8}]\n"
        "goal:\n"
        "  kind: serve\n"
        f"  engine: {{name: vllm{stated}}}\n"
        "  traffic: {rate: 2/s, input_tokens: 2000, output_tokens: 300}\n"
        f"{extra}"
    )


def option_of(spec_path: Path, *, launch: str = LAUNCH) -> Option:
    """Return the deployment of a launch as it is priced without corrections."""
    spec = read_serve_spec(spec_path)
    pool = pool_named(spec, None)
    read = read_serving_text(launch, surroundings(spec, pool), engine="vllm", source="launch")
    priced = price_serving_pool(pool, (), goal=spec.goal)
    return price_option(build_inputs(read, spec=spec, serving_pool=priced), read.setting)


def drawn_requests(count: int, *, rate: float, seed: int = 5) -> Requests:
    """Draw prompts and answers of very different lengths, which come at random."""
    rng = np.random.default_rng(seed)
    return Requests(
        input_R=np.clip(rng.lognormal(6.5, 1.1, count), 16, 12_000).astype(np.int64),
        output_R=np.clip(rng.lognormal(5.0, 0.8, count), 4, 1500).astype(np.int64),
        arrival_s_R=np.cumsum(rng.exponential(1.0 / rate, count)),
    )


@dataclass(slots=True, kw_only=True)
class LoggingRank(EngineRank):
    """A rank that notes its steps: seconds, prompts, their tokens, those before, running, past."""

    noted: list[tuple[float, int, int, int, int, float]] = field(default_factory=list)

    def prompt_step(self) -> None:
        parts = [list(entry) for entry in self.partial]
        num, past = len(self.running), self.past
        before_s = self.now_s
        EngineRank.prompt_step(self)
        left = {entry[0]: entry[1] for entry in self.partial}
        read = [
            (left.get(request, self.inputs[request]) - done, done)
            for request, done in parts
            if left.get(request, self.inputs[request]) > done
        ]
        tokens, before = sum(one for one, _ in read), sum(done for _, done in read)
        self.noted.append((self.now_s - before_s, len(read), tokens, before, num, past))

    def jump(self) -> None:
        num, past, steps = len(self.running), self.past, self.step
        EngineRank.jump(self)
        for done in range(self.step - steps):
            seconds = self.times.decode_step_s(num, past / num + done)
            self.noted.append((seconds, 0, 0, 0, num, past + done * num))


def served_by(option: Option, true: StepCorrections, requests: Requests) -> LoggingRank:
    """Serve requests on a server with true corrections."""
    priced = corrected_option(option, true)
    times = option_step_times(
        priced,
        requests,
        most_tokens=option.step_tokens + option.running,
        most_running=option.running,
    )
    rules = engine_rules(
        option.iteration.traits,
        step_tokens=option.step_tokens,
        kv_tokens=option.kv_tokens,
        most_running=option.running,
        is_chunked=option.is_chunked,
    )
    rank = LoggingRank.of(requests, times=times, rules=rules, observe=None)
    rank.send_first(requests, concurrency=1)
    while len(rank.end_s) < len(requests.input_R):
        rank.turn()
    return rank


def noise(count: int, *, seed: int = 3) -> np.ndarray:
    return np.exp(0.05 * np.random.default_rng(seed).normal(size=count))


def passed_steps(rank: LoggingRank) -> list[str]:
    """Return the steps as lines of forward-pass metrics."""
    return [
        json.dumps(
            {
                "version": 1,
                "worker_id": "w",
                "dp_rank": 0,
                "counter_id": number,
                "wall_time": seconds * by,
                "scheduled_requests": {
                    "num_prefill_requests": prompts,
                    "sum_prefill_tokens": tokens,
                    "var_prefill_length": 0.0,
                    "sum_prefill_kv_tokens": before,
                    "num_decode_requests": running,
                    "sum_decode_kv_tokens": int(past),
                    "var_decode_kv_tokens": 0.0,
                },
                "queued_requests": {},
            }
        )
        for number, ((seconds, prompts, tokens, before, running, past), by) in enumerate(
            zip(rank.noted, noise(len(rank.noted)), strict=True)
        )
    ]


def vllm_steps(rank: LoggingRank, *, cache_tokens: int, gap_s: float = 0.0) -> list[str]:
    """Return the steps as vLLM logs them, without the seconds before each."""
    lines = [
        "(EngineCore pid=7) INFO 11-30 10:00:00 [core.py:134] Initializing a V1 LLM engine"
        " (v0.33.0) with config: model='/models/Qwen3-30B-A3B', tokenizer='x'",
        "INFO 11-30 10:00:00 [kv_cache_utils.py:2328] GPU KV cache size:"
        f" {cache_tokens:,} tokens, ",
    ]
    at_s = 0.0
    for number, ((seconds, prompts, tokens, _, running, past), by) in enumerate(
        zip(rank.noted, noise(len(rank.noted)), strict=True)
    ):
        at_s += seconds * by
        clock = f"{10 + int(at_s) // 3600}:{int(at_s) // 60 % 60:02d}:{int(at_s) % 60:02d}"
        lines.append(
            f"(APIServer pid=5) INFO 11-30 {clock} [loggers.py:198] Engine 000:"
            f" Iteration({number}): {prompts} context requests, {tokens} context tokens,"
            f" {running} generation requests,"
            f" {running} generation tokens, iteration elapsed time:"
            f" {(seconds * by - gap_s) * 1e3:.2f} ms, GPU KV cache usage:"
            f" {100.0 * (past + tokens) / cache_tokens:.1f}%"
        )
    return lines


def bench_result(
    option: Option, true: StepCorrections, rank: LoggingRank, requests: Requests
) -> str:
    """Return the requests as `vllm bench serve --save-detailed` stores them."""
    served: Served = rank.served(requests)
    client = engine_client(corrected_option(option, true).iteration)
    first_s_R = client_observed_ttft_s(served, client=client)
    each_s_R = (served.end_s_R - served.first_token_s_R) / np.maximum(requests.output_R - 1, 1)
    return json.dumps(
        {
            "model_id": "Qwen/Qwen3-30B-A3B",
            "completed": len(first_s_R),
            "start_times": (100.0 + served.arrival_s_R).tolist(),
            "input_lens": requests.input_R.tolist(),
            "output_lens": requests.output_R.tolist(),
            "ttfts": (first_s_R * noise(len(first_s_R))).tolist(),
            "itls": [
                [each_s] * (count - 1)
                for each_s, count in zip(each_s_R.tolist(), requests.output_R.tolist(), strict=True)
            ],
            "errors": [""] * len(first_s_R),
        }
    )
