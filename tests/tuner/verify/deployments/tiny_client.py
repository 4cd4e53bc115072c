"""A client that measures a tiny server and writes what vLLM's or SGLang's client would.

    python tiny_client.py URL RESULT --form vllm|sglang [--requests 6] [--concurrency 3]
        [--tokens 5] [--ttft-limit 1.0] [--exit CODE] [--text TEXT]

Percentiles are nearest ranks. `--text` is written in place of a result.
"""

import argparse
import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def request(url: str, tokens: int) -> tuple[float, float] | None:
    """Return (first token, end), seconds after the start; None when the request failed."""
    parts = urlsplit(url)
    start = time.perf_counter()
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    body = json.dumps({"model": "tiny", "prompt": "a b c d", "max_tokens": tokens, "stream": True})
    try:
        connection.request("POST", "/v1/completions", body)
        reply = connection.getresponse()
        if reply.status != 200:
            return None
        reply.readline()
        first = time.perf_counter() - start
        reply.read()
        return first, time.perf_counter() - start
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def summary(name: str, times: list[float]) -> dict[str, Any]:
    ranked = sorted(times)

    def at(percent: int) -> float:
        return 1000.0 * ranked[min(len(ranked) - 1, len(ranked) * percent // 100)]

    return {
        f"mean_{name}_ms": 1000.0 * sum(times) / len(times),
        f"median_{name}_ms": at(50),
        f"std_{name}_ms": 0.0,
        f"p90_{name}_ms": at(90),
        f"p99_{name}_ms": at(99),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("result")
    parser.add_argument("--form", default="vllm")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=5)
    parser.add_argument("--ttft-limit", type=float, default=1.0)
    parser.add_argument("--exit", type=int, default=0)
    parser.add_argument("--text")
    options = parser.parse_args()
    if options.exit:
        sys.exit("ValueError: the client broke" if options.exit == 1 else options.exit)
    if options.text is not None:
        with Path(options.result).open("w") as file:
            file.write(options.text)
        return
    start = time.perf_counter()
    with ThreadPoolExecutor(options.concurrency) as pool:
        found = list(
            pool.map(lambda _: request(options.url, options.tokens), range(options.requests))
        )
    duration = time.perf_counter() - start
    done = [one for one in found if one]
    if not done:
        sys.exit("ValueError: the client broke: no request came through")
    good = sum(first <= options.ttft_limit for first, _ in done)
    values: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "total_input_tokens": 4 * len(done),
        "total_output_tokens": options.tokens * len(done),
        "request_throughput": len(done) / duration,
        "output_throughput": options.tokens * len(done) / duration,
        **summary("ttft", [first for first, _ in done]),
        **summary("tpot", [(end - first) / (options.tokens - 1) for first, end in done]),
        "request_goodput": good / duration,
    }
    if options.form == "vllm":
        values |= {"num_prompts": len(found), "failed": len(found) - len(done)}
    with Path(options.result).open("a") as file:
        file.write(json.dumps(values) + "\n")


main()
