"""What a benchmark client sends, from the arguments of its command, as its release builds prompts.

    vllm bench serve    vllm 0.32.0 and 0.33.0, benchmarks/datasets/datasets.py: RandomDataset,
                        PrefixRepetitionRandomDataset, TimedTrace; benchmarks/serve.py: get_request
    aiperf profile      aiperf 0.13.0, dataset/composer/synthetic.py, dataset/generator/prompt.py,
                        common/random_generator.py: sample_positive_normal_integer

A prompt is a row of segments (content, tokens). A cache holds the leading segments that some
earlier prompt began with.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Segments = tuple[tuple[Any, int], ...]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SentRequests:
    """The requests of a job, in the order in which it sends them."""

    prompts: list[Segments]
    output: Floats
    rate: float
    """Requests a second; infinite in a closed loop."""

    @cached_property
    def input(self) -> Floats:
        return np.array([sum(tokens for _, tokens in own) for own in self.prompts], dtype=float)

    def uncached(self, *, caches: int = 0) -> Floats:
        """Return the tokens that are in no cache: of each session's own, or of some in turn."""
        seen: dict[int, set[Any]] = {}
        fresh = []
        for number, own in enumerate(self.prompts):
            cache = seen.setdefault(number % caches if caches else 0, set())
            missing = sum(tokens for _, tokens in own)
            before, is_held = 0, True
            for content, tokens in own:
                before = hash((before, content))
                is_held = is_held and before in cache
                missing -= tokens * is_held
                cache.add(before)
            fresh.append(missing)
        return np.array(fresh, dtype=float)

    @property
    def prefixes(self) -> dict[Any, int]:
        """Return the requests that begin with each content."""
        found: dict[Any, int] = {}
        for own in self.prompts:
            found[own[0][0]] = found.get(own[0][0], 0) + 1
        return found


def sent_by_vllm(words: Sequence[str], file: str) -> SentRequests:
    """Simulate `vllm bench serve`."""
    option = _options(words)
    rng = np.random.default_rng(int(option.get("--seed", 0)))
    number = int(option["--num-prompts"])
    fresh = count()
    prompts: list[Segments] = []
    output: list[int] = []
    if option["--dataset-name"] == "random":
        ratio = json.loads(option["--random-range-ratio"])
        prefix = int(option.get("--random-prefix-len", 0))
        lengths = [
            rng.integers(math.floor(mean * (1 - r)), math.ceil(mean * (1 + r)) + 1, size=number)
            for mean, r in (
                (int(option["--random-input-len"]), ratio["input"]),
                (int(option["--random-output-len"]), ratio["output"]),
            )
        ]
        head = (("common", prefix),) if prefix else ()
        prompts = [(*head, (next(fresh), int(tokens))) for tokens in lengths[0]]
        output = lengths[1].tolist()
    elif option["--dataset-name"] == "prefix_repetition":
        named = {
            name: int(option[f"--prefix-repetition-{name}"])
            for name in ("num-prefixes", "prefix-len", "suffix-len", "output-len")
        }
        prompts = [
            ((("prefix", prefix), named["prefix-len"]), (next(fresh), named["suffix-len"]))
            for prefix in range(named["num-prefixes"])
            for _ in range(number // named["num-prefixes"])
        ]
        prompts = [prompts[one] for one in rng.permutation(len(prompts))]
        output = [named["output-len"]] * len(prompts)
    else:
        prompts, output = _of_file(file, int(option["--timed-trace-chunk-hash-size"]), number)
    rate = float(option.get("--request-rate", "nan"))
    if option["--dataset-name"] == "timed_trace" and "--no-self-timed" not in words:
        rate = _rate_of(file)
    return SentRequests(prompts, np.array(output, dtype=float), rate)


def sent_by_aiperf(words: Sequence[str], file: str) -> SentRequests:
    """Simulate `aiperf profile`."""
    option = _options(words)
    rng = np.random.default_rng(int(option.get("--random-seed", 0)))
    rate = float(option.get("--request-rate", "inf"))
    number = int(option.get("--request-count", file.count("\n")))
    if "--input-file" in option:
        assert option["--custom-dataset-type"] == "mooncake_trace"
        block_tokens = int(option["--prompt-input-tokens-block-size"])
        prompts, output = _of_file(file, block_tokens, number)
        # Times in a file are followed unless that is refused, beside a rate too (an error).
        rate = rate if "--no-fixed-schedule" in words else _rate_of(file)
        return SentRequests(prompts, np.array(output, dtype=float), rate)
    drawn = [
        positive_normal(
            float(option[f"--{kind}-mean"]), float(option[f"--{kind}-stddev"]), number, rng=rng
        )
        for kind in ("synthetic-input-tokens", "output-tokens")
    ]
    pool = int(option.get("--num-prefix-prompts", 0))
    length = int(option.get("--prefix-prompt-length", 0))
    prompts = [
        (
            *(((("prefix", int(rng.integers(pool))), length),) if pool else ()),
            (("fresh", one), int(tokens)),
        )
        for one, tokens in enumerate(drawn[0])
    ]
    return SentRequests(prompts, drawn[1], rate)


def positive_normal(mean: float, deviation: float, number: int, *, rng: Any) -> Floats:
    """Draw from a normal distribution again until it is positive, rounded up."""
    if not deviation:
        return np.full(number, max(1.0, round(mean)))
    drawn = rng.normal(mean, deviation, number)
    while (drawn < 0.0).any():
        drawn = np.where(drawn < 0.0, rng.normal(mean, deviation, number), drawn)
    return np.asarray(np.maximum(np.ceil(drawn), 1.0))


def _of_file(file: str, block_tokens: int, number: int) -> tuple[list[Segments], list[int]]:
    prompts, output = [], []
    length_of: dict[int, int] = {}
    for line in file.splitlines()[:number]:
        record = json.loads(line)
        left, own = record["input_length"], []
        for one in record["hash_ids"]:
            # vLLM stops where ids end; AIPerf refuses an id of two lengths.
            tokens = min(left, block_tokens)
            assert tokens > 0
            assert length_of.setdefault(one, tokens) == tokens
            own.append((one, tokens))
            left -= tokens
        assert not left
        prompts.append(tuple(own))
        output.append(record["output_length"])
    return prompts, output


def _rate_of(file: str) -> float:
    times = [json.loads(line)["timestamp"] for line in file.splitlines()]
    assert times == sorted(times)
    return 1e3 * len(times) / float(times[-1])


def _options(words: Sequence[str]) -> dict[str, str]:
    return {word: after for word, after in pairwise(words) if word[:2] == "--"}


SENT_BY: dict[str, Callable[[Sequence[str], str], SentRequests]] = {
    "bench_vllm.sh": sent_by_vllm,
    "bench_aiperf.sh": sent_by_aiperf,
}
