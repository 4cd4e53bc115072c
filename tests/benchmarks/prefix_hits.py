"""Prefix hits of a trace with block hashes of prompts, by cache, instances and router.

    python tests/benchmarks/prefix_hits.py TRACE.jsonl [--cache 1000000] [--stay 20]

Computes the share of prompt tokens that hit the prefix caches: of one cache of several sizes, and
of several instances with a cache each, under round-robin and the cache-aware policy
(tuner/simulate/serving/prefix_hits.py). Sizes are tokens; `--cache` is that of one instance,
`--stay` the seconds that a request is in flight, by which the policy counts loads. Also printed:
how many requests are the next turn of another (tuner/spec/serving/turns.py). All requests of the
file are counted, from empty caches on.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.benchmarks.bars import parse, say
from tuner.simulate.serving.prefix_hits import by_prefix, hit_tokens, in_turn, prefix_hits
from tuner.spec.serving.traces import BLOCK_TOKENS, Blocks, trace_chunks
from tuner.spec.serving.turns import NONE, Sessions

SIZES = (64_000, 256_000, 1_000_000, 4_000_000, 16_000_000, 10**12)
INSTANCES = (1, 4, 16)


def lines_of(path: Path, *, cache_tokens: int, stay_s: float) -> Iterator[str]:
    """Count a trace and yield the results line by line."""
    chunks = list(trace_chunks(path, with_blocks=True))
    known = [chunk.blocks for chunk in chunks if chunk.blocks is not None]
    if not known or not any(len(one.id_B) for one in known):
        yield "the trace names no blocks"
        return
    blocks = Blocks(
        id_B=np.concatenate([one.id_B for one in known]),
        count_N=np.concatenate([one.count_N for one in known]),
    )
    input_N = np.concatenate([chunk.input_tokens_N for chunk in chunks])
    output_N = np.concatenate([chunk.output_tokens_N for chunk in chunks])
    arrival_s_N = np.concatenate([chunk.arrival_s_N for chunk in chunks])
    count = len(input_N)
    yield f"{count} requests, {input_N.mean():.0f} prompt tokens on average"

    def share(place_N: np.ndarray, blocks_each: int) -> float:
        hit_N = prefix_hits(blocks, place_N, cache_blocks=blocks_each)
        return float(hit_tokens(hit_N, input_N).sum() / input_N.sum())

    for size in SIZES:
        result = share(in_turn(count, 1), max(1, size // BLOCK_TOKENS))
        name = "unbounded" if size == SIZES[-1] else f"{size:,} tokens"
        yield f"one cache, {name}: {result:.1%}"
    each = max(1, cache_tokens // BLOCK_TOKENS)
    for instances in INSTANCES:
        chosen_N = by_prefix(
            blocks, arrival_s_N, instances=instances, cache_blocks=each, stay_s=stay_s
        )
        yield (
            f"{instances} instances of {cache_tokens:,} tokens: in turn"
            f" {share(in_turn(count, instances), each):.1%}, cache-aware"
            f" {share(chosen_N, each):.1%} (most requests on one:"
            f" {np.bincount(chosen_N).max() / count:.1%})"
        )
    sessions = Sessions()
    rows = zip(blocks.lists(), input_N.tolist(), output_N.tolist(), strict=True)
    turns = sum(
        sessions.add(own, input_tokens=tokens, output_tokens=answer) != NONE
        for own, tokens, answer in rows
    )
    yield f"{turns} requests ({turns / count:.1%}) are the next turn of another"


def main() -> None:
    """Print the lines."""
    given = parse(__doc__, {"trace": Path, "--cache": 1_000_000, "--stay": 20.0})
    for line in lines_of(given.trace, cache_tokens=given.cache, stay_s=given.stay):
        say(line)


if __name__ == "__main__":
    main()
