"""Continuous batching on one engine, event by event.

    chunked         each step holds a token of every running sequence and fills the rest of its
                    budget with parts of prompts, first come first served
    whole           the same with whole prompts
    prefill first   while prompts wait that fit, steps hold prompts alone

A sequence gets its first token at the end of the step that ends its prompt and one more at every
step with running sequences, or with drafts as many as a step yields on average: an output then
takes the mean number of steps, rounded; nothing is drawn. It leaves with its last token. With
a pipeline of p stages a step here is a round of p micro-batches, which split the running sequences
evenly and have each the step's budget of prompts. Between two such events nothing changes but
the pasts, which grow evenly, so that all the steps until then are taken in one jump: as many times
the step with the mean past. The work per request is a few events, whatever its length.

Memory admits a request only if prompt and output fit beside what is reserved, or, where an engine
takes memory as outputs grow, if the prompt fits; when there is no more, the sequence that came last
is preempted and recomputed later. Engines may poll for requests every few steps only.

Requests whose prompts were prefilled elsewhere run as soon as memory admits them. Prefix hits take
memory and are attended to, but not computed.

Not covered: caches that are shared between requests, or evicted; priorities.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tuner.catalog.serve_rules.traits import Batching
from tuner.simulate.serving.load import Requests, RunningSequences, Served
from tuner.simulate.serving.steps import StepTimes

WATERMARK_RATIO: Final = 0.01
"""Share of the memory that stays free when a request is let in without room for its whole output
(vLLM, `watermark`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules by which an engine fills its steps."""

    batching: Batching
    step_tokens: int
    kv_tokens: float = math.inf
    most_running: int = 2**31
    reserves_output: bool = True
    """Memory is set aside for whole outputs; else it is taken as they grow, and the sequence that
    came last starts anew when there is no more."""
    poll_steps: int = 1
    """Steps from one look at what has come to the next, while sequences run."""
    preempts: bool = True
    """Whether sequences are sent back when there is no more memory, where it is taken as outputs
    grow."""


class FilledStep(NamedTuple):
    """Content of a rank's step in which prompts are read, on it or on one that it waits for."""

    tokens: int
    """Tokens of prompts and of running sequences."""
    seconds: float
    """Seconds of the step if every rank that shares its experts has as many tokens; 0 without
    any."""
    running: int
    """Sequences that get a token."""
    done: tuple[int, ...]
    """Requests whose prompts end."""


StepObserver = Callable[[int, float, int], None]
"""Observer of steps that running sequences take together: how many, the tokens of memory taken
before them, and the sequences, each of which takes as many more at every step as it yields."""


@dataclass(slots=True, kw_only=True)
class EngineRank(RunningSequences):
    """One attention-data rank of an engine at one moment."""

    times: StepTimes
    rules: Rules
    observe: StepObserver | None
    waiting: deque[int] = field(default_factory=deque)
    partial: deque[list[int]] = field(default_factory=deque)
    """Requests whose prompts are under way, with the tokens done."""
    prompts: int = 0
    """Tokens of the prompts under way."""
    reserved: int = 0
    """Tokens of memory that are set aside; not counted where outputs take it as they grow."""
    since_poll: int = 0
    grows: bool = field(init=False)
    """Outputs take memory as they grow, until there is no more."""

    def __post_init__(self) -> None:
        self.grows = self.rules.preempts and not self.rules.reserves_output

    def turn(self) -> None:
        """Go on to the next moment at which something changes."""
        self.arrive()
        joined = self.admit() if self.waiting else 0
        if self.partial:
            self.prompt_step()
        elif joined:
            # Others may come before the first of these ends.
            return
        elif self.running:
            self.jump()
        else:
            self.now_s = max(self.now_s, self.coming[0][0])

    def due_s(self) -> float:
        """Return when the next turn may be taken without missing what is sent here later.

        Running sequences alone need none before one of them ends; with nothing to do it is never.
        """
        if self.partial or self.waiting or (self.coming and self.running):
            return self.now_s
        if not self.running:
            return max(self.now_s, self.coming[0][0]) if self.coming else math.inf
        num, steps = len(self.running), self.running[0][0] - self.step
        if self.grows and num > 1:
            room = int((self.rules.kv_tokens - self.past) / (num * self.times.tokens_per_step))
            steps = max(min(steps, room), 0)
        middle = self.past / num + 0.5 * (steps - 1) * self.times.tokens_per_step
        return self.now_s + steps * self.times.decode_step_s(num, middle)

    def arrive(self) -> None:
        """Take in what has come by now."""
        if self.since_poll < self.rules.poll_steps and (self.running or self.partial):
            return
        self.since_poll = 0
        while self.coming and self.coming[0][0] <= self.now_s:
            at_s, request = heapq.heappop(self.coming)
            self.arrived_s[request] = at_s
            self.waiting.append(request)

    def admit(self) -> int:
        """Move waiting requests to those whose prompts are under way, as memory allows.

        Returns how many had been read elsewhere and run at once.
        """
        joined, rules = 0, self.rules
        room = rules.most_running - len(self.running) - len(self.partial)
        while self.waiting and room > 0:
            request = self.waiting[0]
            need = self.inputs[request]
            taken = self.past + self.prompts + WATERMARK_RATIO * rules.kv_tokens
            if rules.reserves_output:
                need += self.outputs[request]
                taken = self.reserved
            if taken + need > rules.kv_tokens and (self.running or self.partial):
                return joined
            self.waiting.popleft()
            self.reserved += self.inputs[request] + self.outputs[request]
            room -= 1
            if self.prefilled_elsewhere[request]:
                self.join(request)
                joined += 1
                continue
            self.prompts += self.inputs[request]
            self.partial.append([request, self.cached[request]])
        return joined

    def join(self, request: int) -> None:
        """Run a request whose prompt has been read; its first token is there."""
        self.first_s.setdefault(request, self.now_s)
        if self.outputs[request] == 1:
            self.finish(request)
        else:
            steps = self.times.steps_of(self.outputs[request] - 1)
            heapq.heappush(self.running, (self.step + steps, request))
            self.past += self.inputs[request] + 1

    def jump(self) -> None:
        """Steps without prompts until a sequence ends or a request comes."""
        steps, step_s = self.ahead()
        self.now_s += steps * step_s
        if steps:
            self.advance(steps)

    def ahead(self) -> tuple[int, float]:
        """Return the steps until a sequence ends or a request comes, and the seconds of each.

        There are 0 where memory has run out: the sequence that came last is sent back first.
        """
        running, times, coming = self.running, self.times, self.coming
        num, steps = len(running), running[0][0] - self.step
        gained = times.tokens_per_step
        if self.grows and num > 1:
            room = int((self.rules.kv_tokens - self.past) / (num * gained))
            if room < 1:
                self.preempt()
                return 0, 0.0
            steps = min(steps, room)
        coming_s = coming[0][0] if coming else math.inf
        if coming_s <= self.now_s:
            steps = min(steps, max(self.rules.poll_steps - self.since_poll, 1))
        mean_past = self.past / num
        step_s = times.decode_step_s(num, mean_past + 0.5 * (steps - 1) * gained)
        if self.now_s < coming_s < self.now_s + steps * step_s:
            first_s = times.decode_step_s(num, mean_past)
            steps = min(max(math.ceil((coming_s - self.now_s) / first_s), 1), steps)
            step_s = times.decode_step_s(num, mean_past + 0.5 * (steps - 1) * gained)
        return steps, step_s

    def preempt(self) -> None:
        """Send the sequence that came last back to wait; its cache is lost."""
        place = max(range(len(self.running)), key=lambda i: self.running[i][1])
        last, request = self.running[place]
        self.running[place] = self.running[-1]
        self.running.pop()
        heapq.heapify(self.running)
        whole = self.times.steps_of(self.outputs[request] - 1)
        stepped = whole - (last - self.step)
        self.past -= self.inputs[request] + 1 + stepped * self.times.tokens_per_step
        done = min(1 + round(stepped * self.times.tokens_per_step), self.outputs[request] - 1)
        left = self.outputs[request] - done
        self.reserved -= self.inputs[request] + self.outputs[request]
        # Its output so far is recomputed as part of its prompt.
        self.inputs[request] += done
        self.outputs[request] = left
        self.prefilled_elsewhere[request] = False
        self.waiting.appendleft(request)

    def advance(self, steps: int) -> None:
        """Every running sequence gets so many tokens; those with their last leave."""
        running = self.running
        if self.observe is not None:
            self.observe(steps, self.past + self.prompts, len(running))
        self.step += steps
        self.since_poll += steps
        self.past += steps * len(running) * self.times.tokens_per_step
        while running and running[0][0] <= self.step:
            _, request = heapq.heappop(running)
            whole = self.times.steps_of(self.outputs[request] - 1)
            self.past -= self.inputs[request] + 1 + whole * self.times.tokens_per_step
            self.finish(request)

    def finish(self, request: int) -> None:
        """Note the end, and send what a closed loop sends then."""
        self.end_s[request] = self.now_s
        self.reserved -= self.inputs[request] + self.outputs[request]
        self.send_after(request, self.now_s)

    def prompt_step(self) -> None:
        """One step with prompts, beside running sequences unless prefill goes first."""
        step = self.filled()
        self.now_s += step.seconds
        self.complete(step)

    def filled(self) -> FilledStep:
        """Fill a step with prompts and running sequences."""
        is_mixed, times = self.rules.batching is not Batching.PREFILL_FIRST, self.times
        num = len(self.running) if is_mixed else 0
        taken = -(-num // times.micro_batches) * times.checked_tokens
        tokens, seconds, done = self._fill(taken)
        past = self.past / num if num else 0.0
        parts = min(-(-tokens // self.rules.step_tokens), times.micro_batches)
        return FilledStep(
            tokens=tokens + taken,
            seconds=times.mixed_s(
                tokens, seconds, running=num, past=past, ended=len(done), parts=max(parts, 1)
            ),
            running=num,
            done=tuple(done),
        )

    def accompanying(self) -> FilledStep:
        """Return the step of a rank without prompts beside that of one with some."""
        num, times = len(self.running), self.times
        if not num:
            return FilledStep(tokens=0, seconds=0.0, running=0, done=())
        tokens = -(-num // times.micro_batches) * times.checked_tokens
        seconds = times.decode_step_s(num, self.past / num)
        return FilledStep(tokens=tokens, seconds=seconds, running=num, done=())

    def complete(self, step: FilledStep) -> None:
        """Take in what a step gave; the clock stands at its end."""
        if step.running:
            self.advance(1)
        else:
            self.since_poll += 1
        for request in step.done:
            self.prompts -= self.inputs[request]
            self.join(request)

    def _fill(self, taken: int) -> tuple[int, float, list[int]]:
        """Choose tokens of prompts for a step: how many, their attention, prompts that end.

        Args:
            taken: tokens of running sequences in a micro-batch.
        """
        budget = max(self.rules.step_tokens - taken, 1) * self.times.micro_batches
        is_whole = self.rules.batching is Batching.WHOLE
        tokens, seconds = 0, 0.0
        done: list[int] = []
        while self.partial and tokens < budget:
            entry = self.partial[0]
            request, before = entry
            part = self.inputs[request] - before
            if part > budget - tokens:
                if is_whole and tokens:
                    break
                if not is_whole:
                    part = budget - tokens
            seconds += self.times.prefill_s(before + part) - self.times.prefill_s(before)
            tokens += part
            entry[1] = before + part
            if entry[1] == self.inputs[request]:
                done.append(request)
                self.partial.popleft()
        return tokens, seconds, done


def simulate(
    requests: Requests,
    *,
    times: StepTimes,
    rules: Rules,
    concurrency: int = 1,
    observe: StepObserver | None = None,
) -> Served:
    """Serve all requests on one rank.

    Args:
        requests: with arrivals, or without for a closed loop.
        times: seconds of steps.
        rules: of the engine.
        concurrency: requests in flight in a closed loop.
        observe: called at every step.
    """
    rank = engine_rank(requests, times=times, rules=rules, concurrency=concurrency, observe=observe)
    while len(rank.end_s) < len(requests.input_R):
        rank.turn()
    return rank.served(requests)


def engine_rank(
    requests: Requests,
    *,
    times: StepTimes,
    rules: Rules,
    concurrency: int = 1,
    observe: StepObserver | None = None,
) -> EngineRank:
    """Return a rank before its first request."""
    rank = EngineRank.of(requests, times=times, rules=rules, observe=observe)
    rank.send_first(requests, concurrency=concurrency)
    return rank
