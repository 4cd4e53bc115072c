"""Public launches of SGLang and vLLM: estimates beside what is published about them.

    python tests/benchmarks/serving_launches.py [TABLES...]

For every launch in data/serving_launches.json: whether it is predicted to fit, tokens of a rank's
cache against the published count, tokens a second against the published rate. Kernels come from
TABLES (profiles or a folder of aiconfigurator's tables), else from datasheets. The memory rule is
that of the launch's release (tuner/engines/registry.py). Aims: no launch that ran is
refused, every one that did not is; counts within 10 %, rates within 25 %. Misses are marked. Exit
code 1: a miss. Entries marked `formed` were used when the rules were written.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.estimate.serving.estimate import estimate_serving, pool_named, surroundings
from tuner.estimate.serving.records import ServingEstimate
from tuner.estimate.serving.registry import read_serving_text
from tuner.goals.serve_plan import price_serving_pool
from tuner.goals.serve_spec import read_serve_spec

DATA = Path(__file__).with_name("data") / "serving_launches.json"
MODELS = Path(__file__).parents[2] / "examples/models"
KV_AIM = 0.10
RATE_AIM = 0.25
NODE_DEVICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """One launch, and the errors of its estimate."""

    id: str
    formed: bool
    runs: bool
    fits: bool
    is_read: bool = True
    """Its flags are understood; a launch that is not says nothing of memory."""
    kv_tokens: tuple[int, int] | None
    """Predicted and published."""
    tokens_per_s: tuple[float, float] | None
    reason: str

    @property
    def misses(self) -> tuple[str, ...]:
        """The aims that are missed."""
        if not self.is_read:
            return ("not read",)
        result = []
        if self.runs != self.fits:
            result.append("refused" if self.runs else "not refused")
        for name, pair, aim in (
            ("KV tokens", self.kv_tokens, KV_AIM),
            ("tokens/s", self.tokens_per_s, RATE_AIM),
        ):
            if pair is not None and abs(pair[0] / pair[1] - 1.0) > aim:
                result.append(name)
        return tuple(result)


def read_launches(path: Path = DATA) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """Return the launches, each with all of its facts, and the models that they define."""
    stored = json.loads(path.read_text())
    result: dict[str, dict[str, Any]] = {}
    for entry in stored["launches"]:
        result[entry["id"]] = {"formed": False} | result.get(entry.get("like", ""), {}) | entry
    return list(result.values()), stored["models"]


def evaluate_launch(
    entry: Mapping[str, Any], models: Mapping[str, Any], profiles: Sequence[Path] = ()
) -> LaunchResult:
    """Estimate one launch."""
    try:
        result = _estimate(entry, models, profiles)
    except TunerError as error:
        return LaunchResult(
            id=entry["id"],
            formed=entry["formed"],
            runs=entry["runs"],
            fits=False,
            is_read=False,
            kv_tokens=None,
            tokens_per_s=None,
            reason=str(error),
        )
    kv, rate = entry.get("kv_tokens"), entry.get("tokens_per_s")
    return LaunchResult(
        id=entry["id"],
        formed=entry["formed"],
        runs=entry["runs"],
        fits=result.fits,
        kv_tokens=None if kv is None else (result.logged_kv_tokens, kv),
        tokens_per_s=None if rate is None else (_rate(entry, result), rate),
        reason=result.misfit,
    )


def _estimate(
    entry: Mapping[str, Any], models: Mapping[str, Any], profiles: Sequence[Path]
) -> ServingEstimate:
    with tempfile.TemporaryDirectory() as folder:
        model: Path = MODELS / entry["model"]
        if entry["model"] in models:
            model = Path(folder) / "config.json"
            model.write_text(json.dumps(models[entry["model"]]))
        pool = {"name": "pool", "device": entry["device"], "nodes": entry["nodes"]}
        goal = {
            "kind": "serve",
            "engine": {"name": entry["engine"]},
            "traffic": entry["traffic"],
            "slo": {"ttft": {"p90": "60s"}, "tpot": {"p90": "1s"}},
            "quantization": entry["quantization"],
        }
        path = Path(folder) / "spec.yaml"
        # JSON is YAML.
        spec_text = json.dumps(
            {
                "schema_version": 1,
                "model": str(model),
                "cluster": {"pools": [pool | {"devices_per_node": NODE_DEVICES}]},
                "goal": goal,
                "emit": [],
            }
        )
        path.write_text(spec_text)
        spec = read_serve_spec(path)
    named = pool_named(spec, None)
    launch = read_serving_text(
        entry["command"], surroundings(spec, named), engine=entry["engine"], source=entry["id"]
    )
    return estimate_serving(
        spec,
        launch,
        serving_pool=price_serving_pool(named, tuple(profiles)),
        release=entry["release"],
    )


def _rate(entry: Mapping[str, Any], result: ServingEstimate) -> float:
    """Tokens a second as the source counts them; 0 where the launch is refused."""
    if result.load is None:
        return 0.0
    nodes, traffic = result.load.devices / NODE_DEVICES, entry["traffic"]
    if entry["counts"] == "output":
        return result.load.output_tokens_per_s
    kind = "input_tokens" if entry["counts"] == "input" else "output_tokens"
    return float(result.load.capacity_per_s * traffic[kind] / nodes)


def _lines(launch_result: LaunchResult) -> Iterator[str]:
    said = [f"{launch_result.id}{' (formed)' if launch_result.formed else ''}:"]
    said.append("fits" if launch_result.fits else "does not fit")
    said.append("and ran" if launch_result.runs else "and did not run")
    if launch_result.kv_tokens is not None:
        own, known = launch_result.kv_tokens
        said.append(f"| KV tokens {own} of {known} ({own / known - 1.0:+.1%})")
    if launch_result.tokens_per_s is not None:
        rate, seen = launch_result.tokens_per_s
        said.append(f"| tokens/s {rate:.0f} of {seen:.0f} ({rate / seen - 1.0:+.1%})")
    if launch_result.misses:
        said.append(f"| MISSES {', '.join(launch_result.misses)}")
    yield " ".join(said)
    if launch_result.reason:
        yield f"    {launch_result.reason}"


def main(arguments: Sequence[str]) -> int:
    """Print every launch and return 1 if any misses an aim."""
    launches, models = read_launches()
    result = [
        evaluate_launch(entry, models, [Path(one) for one in arguments]) for entry in launches
    ]
    for one in result:
        for line in _lines(one):
            sys.stdout.write(line + "\n")
    for name, own in (("all", result), ("not formed", [one for one in result if not one.formed])):
        right = sum(one.is_read and one.runs == one.fits for one in own)
        counts = [one.kv_tokens for one in own if one.kv_tokens is not None]
        near = sum(abs(pair[0] / pair[1] - 1.0) <= KV_AIM for pair in counts)
        rates = [one.tokens_per_s for one in own if one.tokens_per_s is not None]
        good = sum(abs(pair[0] / pair[1] - 1.0) <= RATE_AIM for pair in rates)
        sys.stdout.write(
            f"{name}: {right} of {len(own)} said right; KV tokens within 10 %: {near} of"
            f" {len(counts)}; tokens/s within 25 %: {good} of {len(rates)}\n"
        )
    return int(any(one.misses for one in result))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
