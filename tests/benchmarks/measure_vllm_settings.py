"""Measures settings of vLLM's engine under one load; run with the Python of a vLLM for CPUs as

    python tests/benchmarks/measure_vllm_settings.py MODEL OUT.json [--rounds 3] [--core 1]
        [--steps ENGINE.json]

MODEL is what examples/serving/cpu/make_model.py wrote. Each launch is a fresh process with vLLM's
`LLMEngine` (0.32.0), random weights and one core, without the HTTP server. The requests are sent in
a closed loop, which repeats to a few percent; near its capacity an open one multiplies them. A
round launches every setting once, in an order of its own, so that the repeats of a setting are far
apart in time. OUT.json grows launch by launch; a second run goes on where it ended.

    traffic    prompts log-normal about 200 tokens (16 to 768), answers about 28 (4 to 96)
    ttft_s     from a request's sending to its first token
    tpot_s     of a request: from its first token to its last, a token
    request_s  from sending to the last token
    wall_s     of all requests

With `--steps` OUT.json becomes instead what `moetune profile --suite engine` writes, the times of
single prompts and of decoding batches, of this engine in this process; ENGINE.json is another one
of the same model, whose other fields it keeps.

tests/benchmarks/steering.py reads both.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

KNOBS: Final[Mapping[str, tuple[int, ...]]] = {
    "max_num_batched_tokens": (128, 256, 512, 1024),
    "max_num_seqs": (4, 8, 16, 32),
    "long_prefill_token_threshold": (0, 128),
    "block_size": (32, 128),
}
CONCURRENCY: Final = 24
"""Requests in flight."""
REQUESTS: Final = 72
WARM_UP: Final = 4
"""Requests before, not counted."""
MAX_MODEL_LEN: Final = 1024

Request = tuple[int, int]
"""Tokens of the prompt and of the answer."""


def requests_of(seed: int = 0) -> tuple[Request, ...]:
    """Return the requests of every launch, in order."""
    draw = random.Random(seed)

    def tokens(median: int, spread: float, low: int, high: int) -> int:
        return round(min(high, max(low, draw.lognormvariate(math.log(median), spread))))

    return tuple((tokens(200, 0.7, 16, 768), tokens(28, 0.6, 4, 96)) for _ in range(REQUESTS))


def all_settings() -> Iterator[dict[str, int]]:
    """Return every combination of the knobs."""
    for values in itertools.product(*KNOBS.values()):
        yield dict(zip(KNOBS, values, strict=True))


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return mean, P50 and P90, rounded to 10 microseconds."""
    ordered = sorted(values)
    known = {
        "mean": statistics.fmean(ordered),
        "p50": ordered[len(ordered) // 2],
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
    }
    return {name: round(value, 5) for name, value in known.items()}


def play(engine: Any, requests: Sequence[Request], *, name: str) -> dict[str, Any]:
    """Send requests to an engine and return its latencies in seconds."""
    SamplingParams = import_module("vllm").SamplingParams

    draw = random.Random(1)
    waiting = [(f"{name}{at}", one) for at, one in enumerate(requests)][::-1]
    sent: dict[str, float] = {}
    firsts: dict[str, float] = {}
    lasts: dict[str, float] = {}
    begin = time.perf_counter()
    while len(lasts) < len(requests):
        while waiting and len(sent) - len(lasts) < CONCURRENCY:
            key, (prompt, answer) = waiting.pop()
            tokens = [draw.randrange(256) for _ in range(prompt)]
            wanted = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
            sent[key] = time.perf_counter() - begin
            engine.add_request(key, {"prompt_token_ids": tokens}, wanted)
        outputs = engine.step()
        now = time.perf_counter() - begin
        for one in outputs:
            firsts.setdefault(one.request_id, now)
            if one.finished:
                lasts[one.request_id] = now
    keys = list(sent)
    answers = [max(1, answer - 1) for _, answer in requests]
    return {
        "ttft_s": quantiles([firsts[key] - sent[key] for key in keys]),
        "tpot_s": quantiles(
            [(lasts[key] - firsts[key]) / count for key, count in zip(keys, answers, strict=True)]
        ),
        "request_s": quantiles([lasts[key] - sent[key] for key in keys]),
        "wall_s": round(max(lasts.values()), 4),
    }


def steps(model: Path, other: Path) -> dict[str, Any]:
    """Measure prompts alone and decoding batches, as an engine's profile has them."""
    engine = started(model, {"max_num_seqs": 32, "max_num_batched_tokens": 1024})
    play(engine, [(256, 8)] * WARM_UP, name="warm")
    profile: dict[str, Any] = json.loads(other.read_text())
    own = next(one for one in profile["launches"] if one["tensor_parallel"] == 1)
    for number, point in enumerate(own["prompts"]):
        alone = [
            play(engine, [(point["tokens"], 1)], name=f"prompt {number} {at} ")["wall_s"]
            for at in range(5)
        ]
        point["seconds"] = alone
    for number, point in enumerate(own["decodes"]):
        point["seconds"] = decode_steps(
            engine, point["sequences"], point["past_tokens"], name=f"decode {number} "
        )
    return {**profile, "launches": [own], "command": "measure_vllm_settings.py --steps"}


def decode_steps(engine: Any, sequences: int, past: int, *, name: str) -> list[float]:
    """Return the seconds of steps in which so many sequences decode, none reads its prompt."""
    wanted = import_module("vllm").SamplingParams(max_tokens=96, ignore_eos=True, temperature=0.0)
    for at in range(sequences):
        tokens = [(7 * place + at) % 256 for place in range(past - 8)]
        engine.add_request(f"{name}{at}", {"prompt_token_ids": tokens}, wanted)
    reading = {f"{name}{at}" for at in range(sequences)}
    while reading:
        reading -= {one.request_id for one in engine.step()}
    seconds = []
    for _ in range(12):
        begin = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin)
    while engine.has_unfinished_requests():
        engine.step()
    return [round(statistics.median(seconds), 6)]


def launch(model: Path, settings: Mapping[str, int]) -> dict[str, Any]:
    """Start an engine, send it the requests, and return what was measured."""
    begin = time.perf_counter()
    engine = started(model, settings)
    start_s = round(time.perf_counter() - begin, 2)
    play(engine, [(256, 8)] * WARM_UP, name="warm")
    return {"start_s": start_s, **play(engine, requests_of(), name="request")}


def started(model: Path, settings: Mapping[str, int]) -> Any:
    """Start an engine in this process."""
    arguments = import_module("vllm.engine.arg_utils").EngineArgs(
        model=str(model),
        load_format="dummy",
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        enforce_eager=True,
        **settings,
    )
    engine = import_module("vllm.v1.engine.llm_engine").LLMEngine
    return engine.from_engine_args(arguments)


def in_child(model: Path, settings: Mapping[str, int]) -> dict[str, Any] | None:
    """Run a launch in a process of its own; None if it failed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps(launch(model, settings)).encode())
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"{settings}: {error}\n")
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def main() -> None:
    """Measure what the file does not hold yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--steps", type=Path)
    given = parser.parse_args()
    os.sched_setaffinity(0, {given.core})
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(given.core),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # Modules are imported once, before the forks; no thread is started by that.
    for name in (
        "vllm.model_executor.models.mixtral",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.worker.cpu_worker",
    ):
        import_module(name)

    if given.steps is not None:
        given.out.write_text(json.dumps(steps(given.model, given.steps), indent=1) + "\n")
        return
    known = json.loads(given.out.read_text()) if given.out.is_file() else []
    done = {(one["round"], *one["settings"].values()) for one in known}
    for number in range(given.rounds):
        order = list(all_settings())
        random.Random(number).shuffle(order)
        for settings in order:
            if (number, *settings.values()) in done:
                continue
            measured = in_child(given.model, settings)
            known.append({"round": number, "settings": settings, "measured": measured})
            rows = ",\n".join(json.dumps(one) for one in known)
            fresh = given.out.with_suffix(".new")
            fresh.write_text(f"[\n{rows}\n]\n")
            fresh.replace(given.out)
            sys.stdout.write(f"{len(known)} {settings} {measured and measured['request_s']}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
