"""Latency as a client sees it, and the rules by which an engine fills its steps.

    TPOT    (end - first token) / (output tokens - 1)
    TTFT    queue and prefill, plus (1.5 + k) mean TPOT, plus c seconds

A request that comes waits on average half of the step under way; the engine hands out its first
token one step after it was computed; k further steps where a launch streams tokens at intervals; c
seconds pass in the HTTP server, the tokeniser and the client (`client_s` of the engine's traits).
Where an engine's own steps were measured, TTFT is queue and prefill, plus c.

A closed loop of C requests sends C at once, ten times as many in all, and each a moment after a
request has ended, as benchmark clients do (github.com/SemiAnalysisAI/InferenceX, benchmarks/). That
first burst is part of the means that such benchmarks report.

Plans, estimates and backtests all go through here, so that one launch has one prediction.

Letters: R requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.catalog.serve_rules.traits import Batching, EngineTraits
from tuner.costs.serve.iteration import Iteration
from tuner.simulate.serving.batching import Rules
from tuner.simulate.serving.load import Served
from tuner.simulate.serving.steps import StepTimes

ROUNDS: Final = 10
"""Requests of a closed loop in all, in multiples of its concurrency."""
DELAY_S: Final = 10e-3
"""Seconds from the end of a request until the client of a closed loop has sent the next one,
mean."""
STEPS_BEFORE_TOKEN: Final = 1.5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOverhead:
    """Delays between an engine's steps and the client."""

    overhead_s: float
    stream_steps: float = 0.0
    """Steps that a token waits to be handed out."""
    waits_for_steps: bool = True
    """Whether a token waits for steps: not where the overhead is what a prompt on an idle server
    took beyond its own step."""

    def late_s(self, step_s: float) -> float:
        """Seconds that a first token comes after its prompt was read."""
        before = STEPS_BEFORE_TOKEN if self.waits_for_steps else 0.0
        return (before + self.stream_steps) * step_s + self.overhead_s


def engine_client(iteration: Iteration) -> ClientOverhead:
    """Return the client of an engine."""
    host, factor = iteration.machine.host, iteration.machine.corrections.request
    if host is None:
        return ClientOverhead(overhead_s=factor * iteration.traits.client_s)
    return ClientOverhead(overhead_s=factor * host.request_s, waits_for_steps=False)


def client_observed_ttft_s(served: Served, *, client: ClientOverhead) -> Floats:
    """Return every request's time to its first token as its client sees it."""
    tpot_s_R = served.tpot_s_R
    each_s = float(np.mean(tpot_s_R)) if len(tpot_s_R) else 0.0
    return np.asarray(served.ttft_s_R + client.late_s(each_s))


def engine_rules(
    traits: EngineTraits,
    *,
    step_tokens: int,
    kv_tokens: float,
    most_running: int = 2**31,
    poll_steps: int = 1,
    is_chunked: bool | None = None,
) -> Rules:
    """Return how an engine batches on one attention-data rank.

    Args:
        traits: of the engine.
        step_tokens: budget of a step that holds prompts.
        kv_tokens: that the rank has room for.
        most_running: sequences of the rank.
        poll_steps: between two polls for requests.
        is_chunked: whether chunked prefill is on, where the engine can do both; None: its default.
    """
    batching = traits.batching
    if is_chunked is not None and batching is not Batching.PREFILL_FIRST:
        batching = Batching.CHUNKED if is_chunked else Batching.WHOLE
    return Rules(
        batching=batching,
        step_tokens=step_tokens,
        kv_tokens=kv_tokens,
        most_running=most_running,
        reserves_output=traits.reserves_output,
        poll_steps=poll_steps,
    )


def waiting_ranks(iteration: Iteration) -> int:
    """Return the ranks whose steps end together; 1: none waits for others."""
    return iteration.degrees.attention_data if iteration.waits_for_ranks else 1


def prefill_step_seconds(
    all_busy: StepTimes,
    one_busy: StepTimes,
    *,
    ranks: int,
    step_tokens: int,
    computed_ratio: float = 1.0,
) -> Callable[[int, int], float]:
    """Return the seconds of a prefill worker's step by its longest prompt and its busy ranks.

    Args:
        all_busy: of a rank when all prefill.
        one_busy: of a rank when the others only serve their experts.
        ranks: of the worker.
        step_tokens: budget of a step; longer prompts take several.
        computed_ratio: of a prompt; the rest is found in the prefix cache and attended to.
    """

    def prompt_s(tokens: int, busy: int) -> float:
        share = (busy - 1) / (ranks - 1) if ranks > 1 else 1.0
        done = tokens - max(round(tokens * computed_ratio), 1)
        total_s = 0.0
        while done < tokens:
            part = min(step_tokens, tokens - done)
            ended = int(done + part == tokens)
            all_s = all_busy.prompt_step_s(part, done, ended=ended)
            if share < 1.0:
                one_s = one_busy.prompt_step_s(part, done, ended=ended)
                all_s = one_s * (1.0 - share) + all_s * share
            total_s += all_s
            done += part
        return total_s

    return prompt_s
