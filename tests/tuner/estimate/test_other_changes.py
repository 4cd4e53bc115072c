"""Proposed lines of TOML and JSON launches do what was predicted, as those of Megatron-LM."""

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tuner.engines.deepspeed import read as deepspeed
from tuner.engines.reading.launch import LaunchSettings
from tuner.engines.torchtitan import read as torchtitan
from tuner.estimate.configuration import build_configuration
from tuner.estimate.decision import to_decision
from tuner.estimate.estimate import estimate, pricing_setup
from tuner.estimate.prices import price_configurations
from tuner.estimate.records import Change, Estimate
from tuner.spec.spec import Spec

LAUNCHES = Path(__file__).parent / "launches"
MakeSpec = Callable[..., Spec]
Nested = dict[str, Any]


def all_changes(result: Estimate) -> list[Change]:
    single = [result.smallest_change] if result.smallest_change else []
    return [*result.changes, *single, *([result.best_pair] if result.best_pair else [])]


def merged(values: Nested, more: Nested) -> Nested:
    both = dict(values)
    for key, value in more.items():
        inner = both.get(key)
        both[key] = merged(inner, value) if isinstance(inner, dict) else value
    return both


def without(values: Nested, name: str) -> Nested:
    section, _, rest = name.partition(".")
    if not rest:
        return {key: value for key, value in values.items() if key != section}
    return values | {section: without(values[section], rest)}


def toml_lines(values: Nested, prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from toml_lines(value, f"{prefix}{key}.")
        else:
            # What JSON writes of texts, numbers, truth and lists is TOML as well.
            yield f"{prefix}{key} = {json.dumps(value)}"


def check(result: Estimate, spec: Spec, relaunch: Callable[[Change], LaunchSettings]) -> None:
    assert all_changes(result)
    setup = pricing_setup(spec, None)
    for change in all_changes(result):
        own, _ = build_configuration(relaunch(change), spec)
        assert to_decision(own, spec.model) == change.decision
        (again,) = price_configurations((own,), setup)
        assert again.step_s == pytest.approx(change.step_time_s, rel=1e-9)


@each_row(
    ("name", "model", "nodes"),
    [("llama3-70b.toml", "llama-3.1-70b", 8), ("deepseek-16b.toml", "deepseek-v2-lite", 2)],
)
def test_toml(spec_of: MakeSpec, name: str, model: str, nodes: int) -> None:
    text = (LAUNCHES / name).read_text()
    spec = spec_of(model, nodes=nodes)

    def relaunch(change: Change) -> LaunchSettings:
        values = tomllib.loads(text)
        for line in change.lines:
            if line.startswith("remove "):
                values = without(values, line.removeprefix("remove "))
            else:
                values = merged(values, tomllib.loads(line))
        return torchtitan.read("\n".join(toml_lines(values)), source=name)

    check(estimate(spec, torchtitan.read(text, source=name)), spec, relaunch)


def test_json(spec_of: MakeSpec) -> None:
    text = (LAUNCHES / "zero3.json").read_text()
    spec = spec_of("llama-3.1-8b", nodes=8)

    def relaunch(change: Change) -> LaunchSettings:
        values = json.loads(text)
        for line in change.lines:
            if line.startswith("remove activation checkpointing"):
                del values["activation_checkpointing"]
            else:
                values = merged(values, json.loads("{" + line + "}"))
        return deepspeed.read(json.dumps(values), source="ds.json")

    check(estimate(spec, deepspeed.read(text, source="ds.json")), spec, relaunch)
