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
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from tuner.costs.serve.engine_steps import DecodePoint, PromptPoint

REPEATS: Final = 5
"""Of every prompt length."""
DECODE_TOKENS: Final = 24
"""Outputs of a decode point, at least; the requests whose prompts end first write more."""
MOST_OUTPUTS: Final = 256
REQUEST_TIMEOUT_S: Final = 120.0
MOST_LINE_BYTES: Final = 1 << 20


class StepsUnmeasurableError(Exception):
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
            begin_s = max(one.began_s + one.token_s[0] for one in streams)
            end_s = min(one.began_s + one.token_s[-1] for one in streams)
            inside = sum(
                begin_s < one.began_s + each <= end_s for one in streams for each in one.token_s
            )
            if end_s > begin_s and inside > sequences * DECODE_TOKENS // 2:
                past = prompt_tokens + statistics.mean(len(one.token_s) for one in streams) / 2.0
                return DecodePoint(
                    sequences=sequences,
                    past_tokens=round(past),
                    seconds=((end_s - begin_s) * sequences / inside,),
                )
            # The prompts of the others delay the first; it needs as many tokens as they take steps.
            outputs *= 2
        raise StepsUnmeasurableError(
            f"{sequences} requests of {prompt_tokens} tokens never ran at once"
        )

    def _prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(self.vocabulary) for _ in range(tokens)]

    def _streams(self, sequences: int, prompt_tokens: int, outputs: int) -> list["_Stream"]:
        prompts = [self._prompt(prompt_tokens) for _ in range(sequences)]
        done: list[_Stream | Exception | None] = [None] * sequences

        def send(at: int) -> None:
            try:
                done[at] = self._stream(prompts[at], outputs=outputs)
            except Exception as error:
                done[at] = error

        threads = [
            threading.Thread(target=send, args=(at,), daemon=True) for at in range(sequences)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in done:
            if isinstance(one, Exception):
                raise one
        return [one for one in done if isinstance(one, _Stream)]

    def _stream(self, prompt: Sequence[int], *, outputs: int) -> "_Stream":
        parts = urlsplit(self.url)
        is_https = parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=REQUEST_TIMEOUT_S)
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": outputs,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            began_s = time.perf_counter()
            connection.request(
                "POST", f"{parts.path.rstrip('/')}/v1/completions", json.dumps(body), headers
            )
            response = connection.getresponse()
            if response.status != http.client.OK:
                words = response.read(160).decode(errors="replace")
                raise StepsUnmeasurableError(f"status {response.status}: {words}")
            token_s = []
            while line := response.readline(MOST_LINE_BYTES):
                if line.startswith(b"data:") and b"[DONE]" not in line and _holds_token(line):
                    token_s.append(time.perf_counter() - began_s)
        except (OSError, http.client.HTTPException) as error:
            raise StepsUnmeasurableError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if not token_s:
            raise StepsUnmeasurableError("a request returned no token")
        return _Stream(began_s=began_s, token_s=tuple(token_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    began_s: float
    token_s: tuple[float, ...]
    """From the beginning of the request to each token."""


def _holds_token(line: bytes) -> bool:
    """Whether an event carries a token, not only the reason for the end or the usage."""
    try:
        choices = json.loads(line[len(b"data:") :])["choices"]
        return bool(choices) and isinstance(choices[0].get("text"), str)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
