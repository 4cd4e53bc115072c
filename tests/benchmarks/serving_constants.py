"""Cross-validation of constants that were inferred from published serving rows.

    python tests/benchmarks/serving_constants.py RUNS.csv [TABLES]

Every constant is set to other values, one at a time. For each pair (model, engine) the value that
is best on all other pairs is chosen, the shipped one included, and evaluated on the pair. Where the
choice makes held-out pairs worse the constant is best left as it is; one whose neutral value is no
worse across pairs should be removed. Errors are means of |log(measured / predicted)| of TTFT and
TPOT together, aggregated rows, pairs under one driver with equal weight.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.benchmarks.published_serving import distinct, documented
from tuner.backtest.serving import launches, prediction
from tuner.backtest.serving.backtest import predict_pairs
from tuner.backtest.serving.launches import Cells
from tuner.backtest.serving.rows import read_cells
from tuner.backtest.serving.scores import Pair, tpot, ttft
from tuner.costs.serve import iteration
from tuner.engines.registry import serve_traits
from tuner.engines.serve_rules.traits import EngineTraits
from tuner.simulate.serving import client

Patches = Sequence[tuple[Any, str, object]]


def _with(traits: Mapping[str, EngineTraits], *modules: Any) -> Patches:
    made = {**serve_traits(), **traits}
    return [(module, "serve_traits", lambda: made) for module in modules]


def _scheduler(factor: float) -> Patches:
    made = {
        name: replace(own, scheduler_s=factor * own.scheduler_s)
        for name, own in serve_traits().items()
    }
    return _with(made, iteration, prediction, client)


def _client(seconds: float, *engines: str) -> Patches:
    made = {name: replace(serve_traits()[name], client_s=seconds) for name in engines}
    return _with(made, client, prediction)


VARIANTS: Mapping[str, Mapping[str, Patches]] = {
    "client": {
        f"{1e3 * seconds:g} ms": _client(seconds, "vllm", "trtllm") for seconds in (0.0, 0.03)
    },
    "SGLang's client": {
        f"{1e3 * seconds:g} ms": _client(seconds, "sglang") for seconds in (0.015, 0.05, 0.15)
    },
    "steps before a token": {
        f"{steps:g}": [(client, "STEPS_BEFORE_TOKEN", steps)] for steps in (0.5, 1.0, 3.0)
    },
    "host seconds a sequence": {
        f"{1e6 * seconds:g} us": [(launches, "SEQUENCE_S", seconds)]
        for seconds in (0.0, 12e-6, 40e-6)
    },
    "clocks of a busy device": {
        f"{factor:g}": [(iteration, "SUSTAINED_FACTOR", factor)] for factor in (1.0, 1.2)
    },
    "client delay": {
        f"{1e3 * seconds:g} ms": [(prediction, "DELAY_S", seconds)] for seconds in (3e-3, 30e-3)
    },
    "scheduler": {"half": _scheduler(0.5)},
}
SHIPPED = "as shipped"


def main(arguments: Sequence[str]) -> int:
    """Print every constant's choices."""
    rows, folders = read_cells(Path(arguments[0])), [Path(one) for one in arguments[1:]]
    shipped = summarise_errors(rows, folders, ())
    for constant, values in VARIANTS.items():
        result = {
            name: summarise_errors(rows, folders, patches) for name, patches in values.items()
        }
        sys.stdout.write(chosen(constant, {SHIPPED: shipped, **result}) + "\n")
        sys.stdout.flush()
    return 0


def summarise_errors(
    rows: Sequence[Cells], folders: Sequence[Path], patches: Patches
) -> dict[tuple[str, str], float]:
    """Return the error of every pair under every driver."""
    with ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(patch.object(module, name, value))
        pairs = predict_pairs(distinct([*map(documented, rows)]), profiles=folders).pairs
    result: dict[tuple[str, str], list[float]] = {}
    for pair in pairs:
        launch = pair.launch
        if not launch.is_disaggregated:
            key = (f"{launch.decoder.network}|{launch.engine}", launch.harness)
            result.setdefault(key, []).append(_size(pair))
    return {key: float(np.mean(sizes)) for key, sizes in result.items()}


def chosen(constant: str, error_by: Mapping[str, Mapping[tuple[str, str], float]]) -> str:
    """Return the value chosen without each pair, and the pair's error with it."""
    keys = list(error_by[SHIPPED])
    choices: dict[str, int] = {}
    gained = []
    for pair in dict.fromkeys(pair for pair, _ in keys):
        others = [key for key in keys if key[0] != pair] or keys
        best = min(error_by, key=lambda name: sum(error_by[name][key] for key in others))
        choices[best] = choices.get(best, 0) + 1
        own = [key for key in keys if key[0] == pair]
        gained.append(np.mean([error_by[best][key] - error_by[SHIPPED][key] for key in own]))
    printed = ", ".join(f"{name} {count} times" for name, count in choices.items())
    return f"{constant}: chosen {printed}; left-out pairs {100 * np.mean(gained):+.2f} points"


def _size(pair: Pair) -> float:
    return sum(
        abs(float(np.log(measured / predicted))) for predicted, measured in (ttft(pair), tpot(pair))
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
