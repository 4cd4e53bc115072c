"""Memory of public launches of serving engines: weights, cache and its tokens beside their logs.

    python tests/benchmarks/start_up_logs.py

Every row of data/start_up_logs.csv is a launch as its user typed it: GiB of weights and of cache on
one device and tokens of a rank's cache as the engine logged them, and whether the server ran. The
memory rule is that of the row's release. A figure counts as right within 10 %, a launch where the
estimate accepts what ran and refuses what did not. Rows of half 1 were looked at when the rules
were written, those of half 2 were collected afterwards. Where a launch's source names another
device of the same memory, `device` is the one that stands in. On Hopper vLLM makes the workspace of
sparse attention over fp8 keys as it makes the model, so that "Model loading took" counts it
(0.28.0, v1/attention/backends/mla/flashmla_sparse.py, `FlashMLASparseImpl`). Exit code 1: a miss.
"""

import csv
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.costs.serve.decoder import AttentionKind
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.reserve import SCORE_BYTES, sparse_workspace_bytes
from tuner.devices.datasheet import Generation
from tuner.errors import TunerError
from tuner.estimate.serving.estimate import pool_named, surroundings
from tuner.estimate.serving.instance import (
    build_inputs,
    device_memory,
    logged_tokens,
    misfit_reason,
    price_option,
)
from tuner.estimate.serving.registry import read_serving_text
from tuner.goals.serve_plan import price_serving_pool
from tuner.goals.serve_spec import read_serve_spec

DATA = Path(__file__).with_name("data")
MODELS = Path(__file__).parents[2] / "examples/models"
AIM = 0.10
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class LogResult:
    """One launch: what was predicted, and what its log says."""

    id: str
    half: int
    runs: bool | None
    """None: the source does not say."""
    misfit: str
    figures: Mapping[str, tuple[float, float]]
    """Predicted and logged."""
    refused: str = ""
    """Why the launch could not be read."""

    @property
    def is_said_right(self) -> bool:
        """Whether what ran is accepted, and what did not is refused."""
        return not self.refused and self.runs in (None, not self.misfit)

    def is_near(self, name: str) -> bool:
        """Whether a figure is within the aim."""
        own, known = self.figures[name]
        return abs(own / known - 1.0) <= AIM


def read_rows() -> list[dict[str, str]]:
    """Return the launches."""
    with (DATA / "start_up_logs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def evaluate_row(row: Mapping[str, str]) -> LogResult:
    """Predict the memory of one launch."""
    misfit, own, refused = "", dict[str, float](), ""
    try:
        misfit, own = _predict(row)
    except TunerError as error:
        refused = str(error)
    known = {name: float(row[name]) for name in own if row[name]}
    return LogResult(
        id=row["id"],
        half=int(row["half"]),
        runs=None if not row["runs"] else row["runs"] == "yes",
        misfit=misfit,
        figures={name: (own[name], value) for name, value in known.items()},
        refused=refused,
    )


def _predict(row: Mapping[str, str]) -> tuple[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        own = json.loads((DATA / "start_up_models.json").read_text())
        own |= json.loads((DATA / "serving_launches.json").read_text())["models"]
        model: Path = MODELS / row["model"]
        if row["model"] in own:
            fields = own[row["model"]]
            base = MODELS / fields.pop("like", "") / "config.json"
            fields = (json.loads(base.read_text()) if base.exists() else {}) | fields
            model = Path(folder) / row["model"]
            model.mkdir()
            (model / "config.json").write_text(json.dumps(fields))
        pool = {"name": "pool", "device": row["device"], "nodes": 1}
        # JSON is YAML.
        text = {
            "schema_version": 1,
            "model": str(model),
            "cluster": {"pools": [pool | {"devices_per_node": int(row["devices"])}]},
            "goal": {
                "kind": "serve",
                "engine": {"name": row["engine"]},
                "traffic": {"concurrency": 1, "input_tokens": 512, "output_tokens": 128},
                "quantization": row["quantization"],
            },
            "emit": [],
        }
        path = Path(folder) / "spec.yaml"
        path.write_text(json.dumps(text))
        spec = read_serve_spec(path)
    named = pool_named(spec, None)
    around = surroundings(spec, named)
    launch = read_serving_text(row["command"], around, engine=row["engine"], source=row["id"])
    priced = price_serving_pool(named, ())
    inputs = build_inputs(launch, spec=spec, serving_pool=priced, release=row["release"])
    option = price_option(inputs, launch.setting)
    memory = device_memory(inputs, option, launch.setting)
    workspace = _loaded_workspace_bytes(
        option.iteration, step_tokens=launch.setting.step_tokens, longest=inputs.demand.most_tokens
    )
    return misfit_reason(inputs, option, launch.setting), {
        "weights_gib": (memory.weight_bytes + workspace) / GIB,
        "cache_gib": memory.cache_bytes / GIB,
        "kv_tokens": float(logged_tokens(inputs, option, launch.setting)),
    }


def _loaded_workspace_bytes(iteration: Iteration, *, step_tokens: int, longest: int) -> float:
    """Return what vLLM's log counts as loaded beside weights."""
    kinds = {one.attention.kind for one in iteration.decoder.layers}
    is_made = iteration.traits.name == "vllm" and AttentionKind.SPARSE_LATENT in kinds
    if not is_made or iteration.machine.sheet.generation is not Generation.HOPPER:
        return 0.0
    longest *= iteration.formats.kv == "fp8"
    made = sparse_workspace_bytes(iteration, step_tokens=step_tokens, longest=longest)
    return made - SCORE_BYTES


def _lines(result: LogResult) -> Iterator[str]:
    words = [f"{result.id}:"]
    words.append(result.refused or ("does not fit" if result.misfit else "fits"))
    if result.runs is not None:
        words.append("and ran" if result.runs else "and did not run")
    for name, (own, known) in result.figures.items():
        mark = "" if result.is_near(name) else " MISS"
        words.append(f"| {name} {own:.5g} of {known:.5g} ({own / known - 1.0:+.1%}){mark}")
    if not result.is_said_right:
        words.append("| SAID WRONG")
    yield " ".join(words)
    if result.misfit:
        yield f"    {result.misfit}"


def shares(results: list[LogResult]) -> tuple[int, int, int, int]:
    """Count launches that are said right, all of them, figures within the aim, all of them."""
    near = [one.is_near(name) for one in results for name in one.figures]
    return sum(one.is_said_right for one in results), len(results), sum(near), len(near)


def main() -> int:
    """Print every launch and return 1 if any misses an aim."""
    results = [evaluate_row(row) for row in read_rows()]
    for one in results:
        for line in _lines(one):
            sys.stdout.write(line + "\n")
    for half in (1, 2, 0):
        right, total, near, figures = shares([one for one in results if half in (0, one.half)])
        sys.stdout.write(
            f"{f'half {half}' if half else 'all'}: {right} of {total} said right, {near} of"
            f" {figures} figures within 10 %\n"
        )
    right, total, near, figures = shares(results)
    return int(right < total or near < figures)


if __name__ == "__main__":
    sys.exit(main())
