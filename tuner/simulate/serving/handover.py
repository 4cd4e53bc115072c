"""Prefill and decode apart: prompts first come first served, then ranks that take caches over.

A prefill rank works on one prompt at a time. Its request goes to a decode rank in turn, arrives
after the transfer, and runs as soon as there is room; the first token is the prefill's, the others
come a step each. Between two events all steps are taken in one jump, as in batching.py.

Not covered: caches that are sent while the prompt is still computed, and prompts that share a step.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.simulate.serving.load import Served
from tuner.simulate.serving.steps import StepTimes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def prefilled_s(arrival_s_R: Floats, prompt_s_R: Floats, *, ranks: int) -> Floats:
    """Return when each prompt is done; a prompt goes to the rank that is free first."""
    free_s = [0.0] * ranks
    heapq.heapify(free_s)
    done_s = np.empty_like(arrival_s_R)
    for request, (arrival_s, prompt_s) in enumerate(
        zip(arrival_s_R.tolist(), prompt_s_R.tolist(), strict=True)
    ):
        end_s = max(arrival_s, heapq.heappop(free_s)) + prompt_s
        heapq.heappush(free_s, end_s)
        done_s[request] = end_s
    return done_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRank:
    """How a decode rank runs."""

    times: StepTimes
    most_running: int
    kv_tokens: float


def decoded_s(arrival_s_R: Floats, input_R: Ints, output_R: Ints, *, rank: DecodeRank) -> Floats:
    """Return when each answer ends on one rank; caches arrive at the stated times, ascending."""
    end_s = np.array(arrival_s_R, dtype=np.float64)
    waiting = [number for number in range(len(end_s)) if output_R[number] > 1]
    running: list[tuple[int, int]] = []
    now_s, step, past, reserved, at = 0.0, 0, 0, 0, 0
    inputs, outputs = input_R.tolist(), output_R.tolist()
    arrivals = arrival_s_R.tolist()
    while at < len(waiting) or running:
        while at < len(waiting) and arrivals[waiting[at]] <= now_s:
            request = waiting[at]
            need = inputs[request] + outputs[request]
            is_full = len(running) >= rank.most_running or reserved + need > rank.kv_tokens
            if is_full and running:
                break
            heapq.heappush(running, (step + outputs[request] - 1, request))
            reserved += need
            past += inputs[request] + 1
            at += 1
        if not running:
            now_s = arrivals[waiting[at]]
            continue
        steps = running[0][0] - step
        num = len(running)
        seconds = rank.times.decode_step_s(num, past / num + 0.5 * (steps - 1))
        has_room = num < rank.most_running
        if has_room and at < len(waiting) and now_s < arrivals[waiting[at]]:
            until_s = arrivals[waiting[at]] - now_s
            steps = max(1, min(steps, int(np.ceil(until_s / seconds))))
            seconds = rank.times.decode_step_s(num, past / num + 0.5 * (steps - 1))
        now_s += steps * seconds
        step += steps
        past += steps * num
        while running and running[0][0] <= step:
            _, request = heapq.heappop(running)
            end_s[request] = now_s
            past -= inputs[request] + outputs[request]
            reserved -= inputs[request] + outputs[request]
    return end_s


def served_apart(
    *,
    arrival_s_R: Floats,
    input_R: Ints,
    output_R: Ints,
    prompt_s: Callable[[Ints], Floats],
    prefill_ranks: int,
    handover_s: Callable[[Ints], Floats],
    decode_ranks: int,
    rank: DecodeRank,
) -> Served:
    """Serve all requests on prefill and decode ranks.

    Args:
        arrival_s_R: ascending.
        input_R: tokens of prompts.
        output_R: tokens of answers.
        prompt_s: seconds of prompts of given lengths.
        prefill_ranks: that work side by side.
        handover_s: seconds of moving caches of given lengths.
        decode_ranks: that take requests in turn.
        rank: one of them.
    """
    first_s_R = prefilled_s(arrival_s_R, prompt_s(input_R), ranks=prefill_ranks)
    ready_s_R = first_s_R + handover_s(input_R)
    order = np.argsort(ready_s_R, kind="stable")
    end_s_R = np.empty_like(ready_s_R)
    for number in range(decode_ranks):
        mine = order[number::decode_ranks]
        end_s_R[mine] = decoded_s(ready_s_R[mine], input_R[mine], output_R[mine], rank=rank)
    return Served(
        arrival_s_R=arrival_s_R,
        first_token_s_R=first_s_R,
        end_s_R=end_s_R,
        output_R=output_R,
    )
