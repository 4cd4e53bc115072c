"""Small traces in the three formats."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

Form = Callable[[Sequence[tuple[float, int, int]]], str]


def azure(rows: Sequence[tuple[float, int, int]], *, suffix: str = "") -> str:
    start = datetime(2023, 11, 16, 23, 59, 50, tzinfo=UTC)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for time_s, prompt, output in rows:
        at = start + timedelta(microseconds=round(time_s * 1e6))
        lines.append(f"{at:%Y-%m-%d %H:%M:%S.%f}0{suffix},{prompt},{output}")
    return "\n".join(lines) + "\n"


def burst_gpt(rows: Sequence[tuple[float, int, int]]) -> str:
    lines = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
    lines += [f"{time_s},GPT-4,{one},{two},{one + two},API log" for time_s, one, two in rows]
    return "\n".join(lines) + "\n"


def mooncake(rows: Sequence[tuple[float, int, int]]) -> str:
    return "".join(
        json.dumps(
            {
                "timestamp": round(1e3 * time_s),
                "input_length": one,
                "output_length": two,
                "hash_ids": [1, 2],
            }
        )
        + "\n"
        for time_s, one, two in rows
    )


FORMATS: Final[dict[str, Form]] = {"azure": azure, "burstgpt": burst_gpt, "mooncake": mooncake}
