"""What benchmarks share: arguments, printing, figures beside bars, seconds of calls."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def parse(
    doc: str | None, options: Mapping[str, Any], arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the arguments of a script.

    Args:
        doc: the script's docstring, whose first line describes it.
        options: by name with its dashes: False for a switch; a type for what must be given; a
            default, whose type the value has; a type and a default; or a mapping of what
            `add_argument` takes.
        arguments: what was typed; None: this process's own.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, option in options.items():
        parser.add_argument(name, **_keywords(name, option))
    return parser.parse_args(arguments)


def _keywords(name: str, option: Any) -> Mapping[str, Any]:
    if isinstance(option, Mapping):
        return option
    if option is False:
        return {"action": "store_true"}
    if isinstance(option, type):
        return {"type": option}
    kind, default = option if isinstance(option, tuple) else (type(option), option)
    is_positional = {} if name.startswith("-") else {"nargs": "?"}
    return {"type": kind, "default": default, **is_positional}


def say(*lines: str) -> None:
    """Print lines at once."""
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def is_missed(name: str, value: float | None, aim: float | None, *, is_most: bool = True) -> bool:
    """Print a ratio in percent beside its aim, and return whether it misses it."""
    if value is None or aim is None:
        say(f"{name}: {'nothing to measure' if value is None else f'{100 * value:.2f} %'}")
        return False
    misses = value > aim if is_most else value < aim
    say(f"{name}: {100 * value:.2f} %, aim {100 * aim:.1f} %, {'MISSED' if misses else 'reached'}")
    return misses


def errors_line(name: str, errors: Sequence[float], bound: float) -> str:
    """Return the median and the largest of some errors beside their bound."""
    sizes = np.abs(errors)
    return (
        f"{name:44} {len(sizes):3} runs  median {np.median(sizes):6.1%}"
        f"  largest {np.max(sizes):6.1%}  (at most {bound:.0%})"
    )


def timed(call: Callable[[], T]) -> tuple[T, float, float]:
    """Return what a call returns, and its seconds of clock and processor."""
    wall_s, used_s = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - wall_s, time.process_time() - used_s


def machine() -> str:
    """Return what a figure of speed depends on."""
    name = platform.processor() or platform.machine()
    return f"machine: {name}, {os.cpu_count()} cores, numpy {np.__version__}"
