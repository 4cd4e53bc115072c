"""The requests of a benchmark as a file, for traffic that the options of its clients do not draw.

`requests.jsonl` has Mooncake's format, a line a request: milliseconds, tokens, and ids of the
prompt's blocks. Equal leading ids are a common prefix. Both clients build prompts from it:

    vLLM      benchmarks/datasets/datasets.py (TimedTrace; 0.32.0, 0.33.0): random token ids for
              each block; ids must cover the prompt. Python's hash of an id seeds its block, so that
              runs share no prompts unless PYTHONHASHSEED is set
    AIPerf    dataset/generator/prompt.py (0.13.0): text for each block, seeded by --random-seed,
              the file and the id; an id has one length

Lengths are the quantiles of the traffic's distributions. Prompts of a session have about the same
length and begin with blocks of the session. Its first request finds none of them, so that those
after it share more than the planned ratio h, and caches that start empty hold h of all tokens:

    c = h sum(I) / sum(I of requests after the first of their session)

A session has T requests: as many as planned with (`TURNS`), or enough for c <= (1 + h) / 2. As many
sessions are under way as requests are in flight, or a few more, so that a session's next request
comes when the one before has about ended. Which session comes next is drawn within half of their
number, so that no round robin finds a session's instance by counting.

Letters: N requests in the order in which they are sent.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.simulate.serving.routed import TURNS
from tuner.spec.serving.lengths import LengthLaw, quantile_tokens
from tuner.spec.serving.requests import arrivals_s
from tuner.spec.serving.traffic import Arrival, Traffic

NAME: Final = "requests.jsonl"
MOST_IN_FILE: Final = 50_000
"""Requests of a file: 6 MB."""
ENGINE_BLOCK_TOKENS: Final = 16
"""Prefix caches of engines have blocks of so many tokens, or of a multiple."""
_PREFIX_BLOCKS: Final = 8
_FRESH_BLOCKS: Final = 2
"""Blocks of a mean prefix and of the rest of its prompt, so that they follow the lengths."""
_MOST_BLOCKS: Final = 32
"""Blocks of a mean prompt, where either is short."""
_FEWEST_SESSIONS: Final = 16
"""Sessions under way, where fewer requests are in flight: several for each of some instances."""
_ROUNDS: Final = 1.5
"""Sessions that a run has room for one after the other, so that few are cut at its ends."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BenchmarkRequests:
    """Requests with the blocks that their prompts have in common."""

    arrival_s_N: npt.NDArray[np.float64]
    input_N: Ints
    output_N: Ints
    session_N: Ints
    prefix_blocks_N: Ints
    """Leading blocks that are those of the session."""
    block_tokens: int

    def lines(self) -> Iterator[str]:
        """Yield the lines of the file."""
        stride = int(self.prefix_blocks_N.max())
        fresh = stride * (int(self.session_N.max()) + 1)
        columns = (self.arrival_s_N, self.input_N, self.output_N, self.session_N)
        for arrival_s, tokens, output, session, prefix in zip(
            *(column.tolist() for column in (*columns, self.prefix_blocks_N)), strict=True
        ):
            suffix = -(-tokens // self.block_tokens) - prefix
            ids = (
                *range(session * stride, session * stride + prefix),
                *range(fresh, fresh + suffix),
            )
            fresh += suffix
            yield (
                f'{{"timestamp":{1e3 * arrival_s:.3f},"input_length":{tokens},'
                f'"output_length":{output},"hash_ids":[{",".join(map(str, ids))}]}}\n'
            )


def session_turns(prefix_ratio: float) -> int:
    """Return the requests of a session whose prefixes are that share of all prompts."""
    return max(TURNS, math.ceil((1.0 + prefix_ratio) / (1.0 - prefix_ratio)))


def fewest_requests(traffic: Traffic, *, in_flight: float) -> int:
    """Return how many requests a run needs for most of its sessions to be whole."""
    if not traffic.prefix_hit or traffic.prefix_scope == "common":
        return 0
    return math.ceil(_ROUNDS * max(in_flight, _FEWEST_SESSIONS) * session_turns(traffic.prefix_hit))


def benchmark_requests(
    traffic: Traffic, *, count: int, in_flight: float, most_tokens: int
) -> BenchmarkRequests:
    """Draw the requests of traffic that is stated by distributions; the same ones every time.

    Args:
        traffic: with its distributions.
        count: of requests.
        in_flight: requests that are under way at a time, mean.
        most_tokens: of a prompt and its output, as the model or the goal cuts them.
    """
    if traffic.input_tokens is None or traffic.output_tokens is None:
        raise ValueError("traffic without a trace has length distributions")
    rng = np.random.default_rng(0)
    output_N = rng.permutation(_quantiles(traffic.output_tokens, count))
    output_N = np.minimum(output_N, most_tokens - 1)
    session_N = np.zeros(count, dtype=np.int64)
    if traffic.prefix_scope == "session":
        session_N = _sessions(
            count, turns=session_turns(traffic.prefix_hit), in_flight=in_flight, rng=rng
        )
    input_N = _by_session(_quantiles(traffic.input_tokens, count), session_N, rng=rng)
    input_N = np.minimum(input_N, most_tokens - output_N)
    is_first_N = np.zeros(count, dtype=np.bool_)
    is_first_N[np.unique(session_N, return_index=True)[1]] = True
    later_tokens = max(int(input_N[~is_first_N].sum()), 1)
    shared_ratio = min(traffic.prefix_hit * float(input_N.sum()) / later_tokens, 1.0)
    block_tokens = _block_tokens(input_N, shared_ratio)
    rate = 1.0 if traffic.rate is None else traffic.rate
    return BenchmarkRequests(
        arrival_s_N=arrivals_s(traffic.arrival or Arrival(), rate_per_s=rate, count=count, rng=rng),
        input_N=input_N,
        output_N=output_N,
        session_N=session_N,
        prefix_blocks_N=_prefix_blocks(
            shared_ratio * input_N / block_tokens, (input_N - 1) // block_tokens, is_first_N
        ),
        block_tokens=block_tokens,
    )


def _quantiles(law: LengthLaw, count: int) -> Ints:
    """Return lengths that have the law's distribution, in ascending order."""
    ratio_N = (np.arange(count) + 0.5) / count
    if law.values is not None:
        order = np.argsort(law.values)
        share = np.cumsum(np.array(law.weights or [1.0] * len(order))[order])
        place_N = np.searchsorted(share / share[-1], ratio_N)
        return np.asarray(np.minimum(np.array(law.values)[order][place_N], law.most))
    drawn = [quantile_tokens(law, ratio=ratio) for ratio in ratio_N.tolist()]
    return np.maximum(np.rint(drawn), 1).astype(np.int64)


def _sessions(count: int, *, turns: int, in_flight: float, rng: np.random.Generator) -> Ints:
    """Return the session of each request; those at the start are under way already."""
    active = max(_FEWEST_SESSIONS, math.ceil(in_flight))
    active = max(1, min(active, math.floor(count / turns / _ROUNDS)))
    visit_N, slot_N = np.divmod(np.arange(count), active)
    begun_N = rng.integers(turns, size=active)[slot_N]
    number_N = (visit_N + begun_N) // turns * active + slot_N
    order_N = np.argsort(np.arange(count) + 0.5 * active * rng.random(count))
    return np.unique(number_N[order_N], return_inverse=True)[1].astype(np.int64)


def _by_session(length_N: Ints, session_N: Ints, *, rng: np.random.Generator) -> Ints:
    """Deal out ascending lengths, neighbouring ones to a session, to its first request the longest.

    What that one leaves in a cache holds the prefixes of all others.
    """
    num_sessions = int(session_N.max()) + 1
    dealt_N = np.empty_like(length_N)
    if num_sessions == 1:
        dealt_N[0], dealt_N[1:] = length_N[-1], rng.permutation(length_N[:-1])
        return dealt_N
    place_N = np.argsort(rng.permutation(num_sessions)[session_N], kind="stable")
    dealt_N[place_N] = length_N[::-1]
    return dealt_N


def _prefix_blocks(
    wanted_N: npt.NDArray[np.float64], most_N: Ints, is_first_N: npt.NDArray[np.bool_]
) -> Ints:
    """Round to whole blocks that a prompt has room for, so that their sum is what is wanted.

    First requests of sessions, which share nothing, begin with as many as there is room for.
    """
    owed = 0.0
    blocks = []
    for wanted, limit, is_first in zip(
        wanted_N.tolist(), most_N.tolist(), is_first_N.tolist(), strict=True
    ):
        owed += 0.0 if is_first else wanted
        blocks.append(limit if is_first else min(max(round(owed), 0), limit))
        owed -= 0.0 if is_first else blocks[-1]
    return np.array(blocks, dtype=np.int64)


def _block_tokens(input_N: Ints, shared_ratio: float) -> int:
    """Return a multiple of an engine's block of which the mean prefix has a whole number."""
    if not shared_ratio:
        return int(input_N.max())
    wanted = min(shared_ratio / _PREFIX_BLOCKS, (1.0 - shared_ratio) / _FRESH_BLOCKS)
    wanted = float(input_N.mean()) * max(wanted, 1.0 / _MOST_BLOCKS)
    return ENGINE_BLOCK_TOKENS * max(1, round(wanted / ENGINE_BLOCK_TOKENS))
