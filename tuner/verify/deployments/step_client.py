"""Measures the steps of one running server by short requests to its OpenAI-compatible API.

    prompt    one request alone, of so many tokens, one output token: seconds to that token
    decode    so many requests at once: seconds between two tokens of each, while all of them run

Prompts are random token ids, so no prefix cache holds them. Nothing else may use the server.

Not covered: engines that stream several tokens at a time by default, which show a longer gap.
"""

import http.client
import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from tuner.costs.serve.engine_steps import DecodePoint, PromptPoint
from tuner.errors import EnvironmentMissingError
from tuner.verify.deployments.launcher import opened, request_failure

REPEATS: Final = 5
"""Requests of every prompt length."""
DECODE_TOKENS: Final = 24
"""Outputs of a decode point, at least; the requests whose prompts end first write more."""
MOST_OUTPUTS: Final = 256
REQUEST_TIMEOUT_S: Final = 120.0
MOST_LINE_BYTES: Final = 1 << 20


class StepsUnmeasurableError(EnvironmentMissingError):
    """The server refused a request, ended it early, or was too slow; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClient:
    """Sends requests to one server."""

    url: str
    model: str
    key: str
    vocabulary: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def prompt_point(self, tokens: int) -> PromptPoint:
        """Measure prompts of a length, one after another.

        Raises:
            StepsUnmeasurableError: a request fails.
        """
        return PromptPoint(
            tokens=tokens,
            seconds=tuple(
                self._stream(self._prompt(tokens), outputs=1).token_s[0] for _ in range(REPEATS)
            ),
        )

    def decode_point(self, sequences: int, prompt_tokens: int) -> DecodePoint:
        """Measure the gap between two tokens while so many requests run.

        Args:
            sequences: requests at once.
            prompt_tokens: of each.

        Raises:
            StepsUnmeasurableError: a request fails, or they never ran at once.
        """
        outputs = DECODE_TOKENS
        while outputs <= MOST_OUTPUTS:
            streams = self._streams(sequences, prompt_tokens, outputs)
            gaps = gaps_together(streams)
            if gaps is not None:
                past = (
                    prompt_tokens + statistics.mean(len(stream.token_s) for stream in streams) / 2.0
                )
                return DecodePoint(sequences=sequences, past_tokens=round(past), seconds=gaps)
            # The prompts of the others delay the first; it needs as many tokens as they take steps.
            outputs *= 2
        raise StepsUnmeasurableError(
            f"{sequences} requests of {prompt_tokens} tokens never ran at once"
        )

    def _prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(self.vocabulary) for _ in range(tokens)]

    def _streams(self, sequences: int, prompt_tokens: int, outputs: int) -> list["Stream"]:
        prompts = [self._prompt(prompt_tokens) for _ in range(sequences)]
        pool = ThreadPoolExecutor(sequences)
        try:
            waiting = [pool.submit(self._stream, prompt, outputs=outputs) for prompt in prompts]
            return [future.result() for future in waiting]
        finally:
            # Every request has its own deadline, and Ctrl-C must not wait for it.
            pool.shutdown(wait=False, cancel_futures=True)

    def _stream(self, prompt: Sequence[int], *, outputs: int) -> "Stream":
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": outputs,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        token_s: list[float] = []
        began_s = time.perf_counter()
        try:
            with opened(
                f"{self.url.rstrip('/')}/v1/completions",
                data=json.dumps(body).encode(),
                timeout_s=REQUEST_TIMEOUT_S,
                key=self.key,
            ) as response:
                while len(token_s) < outputs and (line := response.readline(MOST_LINE_BYTES)):
                    passed_s = time.perf_counter() - began_s
                    if passed_s > REQUEST_TIMEOUT_S:
                        raise StepsUnmeasurableError(f"a request took longer than {passed_s:.0f} s")
                    if line.startswith(b"data:") and b"[DONE]" not in line and _holds_token(line):
                        token_s.append(passed_s)
        except (OSError, http.client.HTTPException) as error:
            raise StepsUnmeasurableError(request_failure(error)) from error
        if not token_s:
            raise StepsUnmeasurableError("a request returned no token")
        return Stream(began_s=began_s, token_s=tuple(token_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One request that was served."""

    began_s: float
    token_s: tuple[float, ...]
    """Seconds from the beginning of the request to each token."""


def gaps_together(streams: Sequence[Stream]) -> tuple[float, ...] | None:
    """Return the seconds between two tokens of each stream, while all of them run.

    None where they do so for too few tokens.
    """
    begin_s = max(stream.began_s + stream.token_s[0] for stream in streams)
    end_s = min(stream.began_s + stream.token_s[-1] for stream in streams)
    gaps = []
    for stream in streams:
        inside = [
            at
            for offset_s in stream.token_s
            if begin_s <= (at := stream.began_s + offset_s) <= end_s
        ]
        if len(inside) <= DECODE_TOKENS // 2:
            return None
        gaps.append((inside[-1] - inside[0]) / (len(inside) - 1))
    return tuple(gaps) if min(gaps) > 0.0 else None


def _holds_token(line: bytes) -> bool:
    """Return whether an event carries a token (its text may be empty), not only the usage."""
    try:
        choices = json.loads(line[len(b"data:") :])["choices"]
        return bool(choices) and isinstance(choices[0].get("text"), str)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
