"""Attention-data ranks of one instance, which share the experts, so that their steps end together.

Each rank fills its own steps (batching.py). While none reads a prompt all of them take equal steps.
Where one does, the others take a step beside it, as long as its own: a prompt delays the running
sequences of every rank, and prompts that come one after the other to R ranks delay them R times.
The experts then compute for the tokens that the ranks have together.

Source: vLLM, pull requests 44558 and 51199 (an engine that reads a prompt takes a much longer
    iteration, for which the others wait; DeepSeek-R1 with DP 8: 275 ms between tokens, 32 without
    prompts); SGLang, pull request 35017 (ranks schedule locally and take part in one collective).

Not covered: open loads, whose rates the search finds without waits of ranks for each other; more
ranks than `MOST_RANKS`, of which so many are simulated; a rank that gets what another has no room
for.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from tuner.simulate.serving.batching import EngineRank, Rules, engine_rank, served_by, simulate
from tuner.simulate.serving.load import Requests, Served, of_a_peer
from tuner.simulate.serving.steps import StepTimes

MOST_RANKS: Final = 8
"""Ranks that are simulated together, at most."""
SEED: Final = 20_251


def simulate_ranks(
    requests: Requests, *, times: StepTimes, rules: Rules, ranks: int, concurrency: int = 1
) -> Served:
    """Serve requests on one of so many ranks; the others get as many of the same lengths.

    Args:
        requests: of the rank, with arrivals, or without for a closed loop.
        times: seconds of steps.
        rules: of the engine.
        ranks: that share the experts; one waits for none.
        concurrency: requests of a rank in flight in a closed loop.
    """
    if ranks == 1:
        return simulate(requests, times=times, rules=rules, concurrency=concurrency)
    rng = np.random.default_rng(SEED)
    every = [requests, *(of_a_peer(requests, rng=rng) for _ in range(ranks - 1))]
    engines = [engine_rank(one, times=times, rules=rules, concurrency=concurrency) for one in every]
    while len(engines[0].end_s) < len(requests.input_R):
        _turn(engines)
    return served_by(engines[0], requests)


def _turn(engines: Sequence[EngineRank]) -> None:
    """Go on to the next moment at which something changes on any rank."""
    for engine in engines:
        engine.arrive()
        engine.admit()
    if any(engine.partial for engine in engines):
        _prompt_step(engines)
    elif any(engine.running for engine in engines):
        _jump(engines)
    else:
        coming_s = min(engine.arrivals[0][0] for engine in engines if engine.arrivals)
        _go_to(engines, max(engines[0].now_s, coming_s))


def _prompt_step(engines: Sequence[EngineRank]) -> None:
    """One step in which some ranks read prompts, the others beside them."""
    steps = [engine.filled() if engine.partial else engine.accompanying() for engine in engines]
    slowest = max(steps, key=lambda step: step.seconds)
    others = sum(step.tokens for step in steps) - slowest.tokens
    ratio = others / max((len(steps) - 1) * slowest.tokens, 1)
    seconds = engines[0].times.together_s(
        slowest.seconds, slowest.tokens, others_ratio=min(ratio, 1.0)
    )
    _go_to(engines, engines[0].now_s + seconds)
    for engine, step in zip(engines, steps, strict=True):
        engine.complete(step)


def _jump(engines: Sequence[EngineRank]) -> None:
    """Steps without prompts until a sequence ends or a request comes on any rank."""
    running = [engine for engine in engines if engine.running]
    ahead = [engine.ahead() for engine in running]
    steps = min(steps for steps, _ in ahead)
    if not steps:
        return
    step_s = max(seconds for _, seconds in ahead)
    now_s = engines[0].now_s
    coming = [e.arrivals[0][0] - now_s for e in engines if e.arrivals and not e.running]
    if coming:
        steps = min(steps, max(int(np.ceil(min(coming) / step_s)), 1))
    _go_to(engines, now_s + steps * step_s)
    for engine in running:
        engine.advance(steps)


def _go_to(engines: Sequence[EngineRank], now_s: float) -> None:
    for engine in engines:
        engine.now_s = now_s
