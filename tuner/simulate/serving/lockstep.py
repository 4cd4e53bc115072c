"""Attention-data ranks of one instance, which share the experts, so that their steps end together.

Each rank fills its own steps (batching.py). While none reads a prompt all of them take equal steps.
Where one does, the others take a step beside it, as long as its own: a prompt delays the running
sequences of every rank, and prompts that come one after the other to R ranks delay them R times.
The experts then compute for the tokens that the ranks have together.

A closed loop is simulated with its ranks together. Open loads are simulated on one rank, whose
steps without prompts wait for those of the others as long as they do on average: where a rank reads
prompts in a share s of its steps, one of R - 1 others reads in 1 - (1 - s)^(R - 1) of them.

Source: vLLM, pull requests 44558 and 51199 (an engine that reads a prompt takes a much longer
    iteration, for which the others wait; DeepSeek-R1 with DP 8: 275 ms between tokens, 32 without
    prompts); SGLang, pull request 35017 (ranks schedule locally and take part in one collective).

Not covered: more ranks than `MOST_RANKS` of a closed loop, of which so many are simulated; a rank
that gets what another has no room for; bursts of an open load that come to all ranks at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.catalog.serve_rules.traits import Batching
from tuner.prices.serve.curves import Floats
from tuner.simulate.serving.batching import EngineRank, Rules, engine_rank, simulate
from tuner.simulate.serving.load import Requests, Served, of_a_peer
from tuner.simulate.serving.steps import StepTimes

MOST_RANKS: Final = 8
"""Ranks that are simulated together, at most."""
MOST_REQUESTS: Final = 1500
"""Requests of all ranks that are simulated together: an estimate stays within its 3 s."""
MOST_SETTLING_ROUNDS: Final = 100
"""Rounds in which the mean seconds of a token settle, at most."""
SETTLED_RATIO: Final = 1e-4
"""Change of these seconds from round to round at which they are settled."""
SEED: Final = 20_251


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSteps:
    """Steps of ranks that wait for each other, of which some read prompts."""

    ratio: Floats
    """Share of steps in which any rank reads a prompt."""
    others_ratio: Floats
    """Share of the other ranks that read a prompt in such a step, too."""
    seconds: Floats
    """Mean seconds of a step in which any rank reads a prompt."""


def prompt_steps(own_ratio: Floats, *, ranks: int, least_s: Floats, full_s: Floats) -> PromptSteps:
    """Return how often ranks read prompts, each of them in a share of its own steps.

    The ranks are taken to be independent of each other, though long steps gather prompts.

    Args:
        own_ratio: steps of each rank that read prompts, 0 to 1.
        ranks: that wait for each other, two or more.
        least_s: seconds of a step in which one rank reads.
        full_s: seconds of one in which all do.
    """
    own_ratio = np.clip(own_ratio, 1e-9, 1.0)
    ratio = 1.0 - (1.0 - own_ratio) ** ranks
    others_ratio = (ranks * own_ratio / ratio - 1.0) / (ranks - 1)
    seconds = least_s + others_ratio * (full_s - least_s)
    return PromptSteps(ratio=ratio, others_ratio=others_ratio, seconds=seconds)


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
    count = len(requests.input_R)
    if requests.arrival_s_R is not None:
        rate_per_s = count / max(float(requests.arrival_s_R[-1]), 1e-9)
        times = beside_peers(
            times, requests=requests, rules=rules, ranks=ranks, rate_per_s=rate_per_s
        )
        ranks = 1
    if ranks == 1:
        return simulate(requests, times=times, rules=rules, concurrency=concurrency)
    ranks = min(ranks, MOST_RANKS, max(MOST_REQUESTS // count, 2))
    return simulate_together(
        requests, times=times, rules=rules, ranks=ranks, concurrency=concurrency
    )


def beside_peers(
    times: StepTimes,
    *,
    requests: Requests,
    rules: Rules,
    ranks: int,
    rate_per_s: float = math.inf,
    concurrency: float = math.inf,
) -> StepTimes:
    """Return the steps of a rank that waits for prompts of its peers as long as it does on average.

    Args:
        times: of a rank whose peers have as many tokens.
        requests: whose lengths all ranks have.
        rules: of the engine.
        ranks: that share the experts.
        rate_per_s: requests of a rank; infinite: a closed loop.
        concurrency: requests of a rank in flight in a closed loop.
    """
    if ranks == 1:
        return times
    mean = _mean_request(requests, times)
    if not mean.computed:
        return times
    is_mixed = rules.batching is not Batching.PREFILL_FIRST
    most_running = min(float(rules.most_running), concurrency)
    token_s, waited_s, others_ratio = times.decode_step_s(1, mean.past), 0.0, 1.0
    for _ in range(MOST_SETTLING_ROUNDS):
        running = min(rate_per_s * mean.steps * token_s, most_running)
        num = max(math.ceil(running), 1)
        beside = num if is_mixed else 0
        tokens = running / mean.steps * mean.read_ratio * mean.computed
        room = max(rules.step_tokens - beside * times.checked_tokens, 1)
        chunk = min(max(round(tokens), mean.computed), room)
        decode_s = times.decode_step_s(num, mean.past)
        full_s = mean.prompt_step_s(times, chunk, running=beside)
        least_s = times.together_s(full_s, chunk, others_ratio=0.0)
        ratio = min(tokens / chunk, 1.0)
        own_ratio = ratio if is_mixed else ratio / (1.0 + ratio)
        steps = prompt_steps(
            np.array(own_ratio),
            ranks=ranks,
            least_s=np.array(max(least_s, decode_s)),
            full_s=np.array(max(full_s, decode_s)),
        )
        more_s = float(steps.seconds) - decode_s
        waits_ratio = (float(steps.ratio) - own_ratio) / max(1.0 - own_ratio, 1e-9)
        waited_s, others_ratio = waits_ratio * more_s, float(steps.others_ratio)
        last_s, token_s = token_s, decode_s + float(steps.ratio) * more_s
        token_s /= 1.0 if is_mixed else 1.0 - own_ratio
        if abs(token_s - last_s) <= SETTLED_RATIO * token_s:
            break
    return replace(times, waited_s=waited_s, others_ratio=others_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeanRequest:
    """Mean request of a rank."""

    before: int
    """Tokens of its prompt that are in the prefix cache."""
    computed: int
    """Tokens of its prompt that are not."""
    read_ratio: float
    """Share of requests whose prompts are read here."""
    past: float
    """Tokens in the cache of a running sequence."""
    steps: int
    """Steps that its output takes."""

    def prompt_step_s(self, times: StepTimes, tokens: int, *, running: int) -> float:
        """Price a step that reads so many tokens of such prompts beside running sequences."""
        prompts = tokens / self.computed
        seconds = times.prefill_s(self.before + self.computed) - times.prefill_s(self.before)
        return times.mixed_s(
            tokens, prompts * seconds, running=running, past=self.past, ended=math.ceil(prompts)
        )


def _mean_request(requests: Requests, times: StepTimes) -> _MeanRequest:
    read_R = np.ones(len(requests.input_R), dtype=bool)
    if requests.prefilled_R is not None:
        read_R = ~requests.prefilled_R
    before = computed = 0
    if read_R.any():
        before = round(float(np.array(requests.cached)[read_R].mean()))
        computed = max(round(float(requests.input_R[read_R].mean())) - before, 1)
    outputs = max(float(requests.output_R.mean()) - 1.0, 1.0)
    return _MeanRequest(
        before=before,
        computed=computed,
        read_ratio=float(read_R.mean()),
        past=float(requests.input_R.mean()) + 0.5 * outputs,
        steps=times.steps_of(round(outputs)),
    )


def simulate_together(
    requests: Requests, *, times: StepTimes, rules: Rules, ranks: int, concurrency: int = 1
) -> Served:
    """Serve requests on one of so many ranks, step by step with the others."""
    rng = np.random.default_rng(SEED)
    every = [requests, *(of_a_peer(requests, rng=rng) for _ in range(ranks - 1))]
    engines = [
        engine_rank(rank_requests, times=times, rules=rules, concurrency=concurrency)
        for rank_requests in every
    ]
    while len(engines[0].end_s) < len(requests.input_R):
        _turn(engines)
    return engines[0].served(requests)


def _turn(engines: Sequence[EngineRank]) -> None:
    """Go on to the next moment at which something changes on any rank."""
    reads = False
    for engine in engines:
        engine.arrive()
        if engine.waiting:
            engine.admit()
        if engine.partial:
            reads = True
    if reads:
        _prompt_step(engines)
    elif any(engine.running for engine in engines):
        _jump(engines)
    else:
        coming_s = min(engine.coming[0][0] for engine in engines if engine.coming)
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
    coming = [e.coming[0][0] - now_s for e in engines if e.coming and not e.running]
    if coming:
        steps = min(steps, max(int(np.ceil(min(coming) / step_s)), 1))
    _go_to(engines, now_s + steps * step_s)
    for engine in running:
        engine.advance(steps)


def _go_to(engines: Sequence[EngineRank], now_s: float) -> None:
    for engine in engines:
        engine.now_s = now_s
