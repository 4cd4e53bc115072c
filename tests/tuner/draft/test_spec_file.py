"""Specs from a few answers: accepted as they are, or refused in one line."""

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.expect import refused
from tests.rows import each_row
from tuner.draft import place, serve, train
from tuner.draft.place import parse_workloads
from tuner.draft.spec_file import draft_spec, fill_values, temporary_spec
from tuner.errors import SpecError
from tuner.goals.serve_spec import read_serve_spec
from tuner.goals.train_spec import read_spec
from tuner.spec.files import home_expanded

DRAFTS = (train.DRAFT, serve.DRAFT, place.DRAFT)
ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "examples" / "models" / "mixtral-8x7b")
MACHINES = {"model": MODEL, "device": "H100 SXM", "devices": "64"}


def test_a_training_spec_says_what_was_answered() -> None:
    values = fill_values(train.DRAFT, {**MACHINES, "batch": "512", "emit": "megatron-lm,slurm"})
    with temporary_spec(train.DRAFT, values) as path:
        spec = read_spec(path)
    (pool,) = spec.cluster.pools
    assert (pool.device, pool.nodes, pool.devices_per_node) == ("h100-sxm", 8, 8)
    assert (spec.goal.sequence_length, spec.goal.global_batch_size) == (4096, 512)
    assert spec.emit == ("megatron-lm", "slurm")
    assert spec.model.name == "mixtral-8x7b"


def test_a_deployment_spec_says_what_was_answered() -> None:
    values = fill_values(
        serve.DRAFT,
        {**MACHINES, "engine": "vllm", "concurrency": "64", "ttft": "1s", "emit": "none"},
    )
    with temporary_spec(serve.DRAFT, values) as path:
        spec = read_serve_spec(path)
    assert spec.goal.traffic.concurrency == 64
    assert spec.goal.slo.ttft.p90 == 1.0
    assert spec.goal.slo.tpot.p90 == 0.05
    assert spec.emit == ()


def test_a_deployment_takes_the_released_type_and_the_named_engine() -> None:
    models = ROOT / "examples" / "models"
    for model, quantization in (
        ("deepseek-v3", "fp8_block"),
        ("gpt-oss-120b", "mxfp4"),
        ("mixtral-8x7b", "bf16"),
    ):
        given_answers = {**MACHINES, "model": str(models / model), "rate": "2/s"}
        result = fill_values(serve.DRAFT, {**given_answers, "emit": "vllm,slurm"})
        assert (result["quantization"], result["engine"]) == (quantization, "vllm")
        with temporary_spec(serve.DRAFT, result) as path:
            assert read_serve_spec(path).goal.quantization == quantization
    stated = {**given_answers, "engine": "vllm@0.33.0", "quantization": "fp8"}
    with temporary_spec(serve.DRAFT, fill_values(serve.DRAFT, stated)) as path:
        goal = read_serve_spec(path).goal
    assert (goal.engine.name, goal.engine.version, goal.quantization) == ("vllm", "0.33.0", "fp8")


def test_fewer_devices_than_a_server_has_are_one_machine() -> None:
    with temporary_spec(
        train.DRAFT, fill_values(train.DRAFT, {**MACHINES, "devices": "2"})
    ) as path:
        (pool,) = read_spec(path).cluster.pools
    assert (pool.nodes, pool.devices_per_node) == (1, 2)


def test_paths_are_relative_to_the_file_or_absolute() -> None:
    values = fill_values(train.DRAFT, MACHINES)
    text = draft_spec(train.DRAFT, values, folder=ROOT / "examples" / "new")
    assert yaml.safe_load(text)["model"] == "../models/mixtral-8x7b"
    text = draft_spec(train.DRAFT, values, folder=None)
    assert yaml.safe_load(text)["model"] == MODEL


@each_row(
    ("goal", "given_answers", "said"),
    [
        ("train", {}, "--model, --device, --devices missing: a 'train' spec"),
        ("train", {**MACHINES, "rate": "2/s"}, "--rate does not apply to a 'train' goal"),
        ("train", {**MACHINES, "model": "/nowhere"}, "--model: "),
        ("train", {**MACHINES, "device": "h1"}, "--device: no device description is named 'h1'"),
        ("train", {**MACHINES, "devices": "12"}, "the nearest that do: 8 and 16"),
        ("train", {**MACHINES, "devices": "many"}, "--devices: 'many' is not a whole number"),
        ("train", {**MACHINES, "batch": "0"}, "--batch: '0' is not a whole number in 1"),
        ("train", {**MACHINES, "precision": "int4"}, "--precision: 'int4' is not one of bf16"),
        ("train", {**MACHINES, "emit": "nemo"}, "no target is named 'nemo'"),
        ("serve", MACHINES, "--concurrency or --rate is missing"),
        ("serve", {**MACHINES, "rate": "2"}, "--rate: '2' has no unit"),
        ("serve", {**MACHINES, "rate": "2/s", "concurrency": "3"}, "keep one"),
        ("serve", {**MACHINES, "rate": "2/s", "ttft": "0s"}, "--ttft: '0s' must be more"),
        (
            "serve",
            {**MACHINES, "rate": "2/s", "engine": "sglang", "emit": "vllm"},
            "another engine than 'sglang'",
        ),
        ("serve", {**MACHINES, "rate": "2/s", "engine": "vllm@0.1"}, "--engine: no vllm '0.1' is"),
        ("serve", {**MACHINES, "rate": "2/s", "engine": "tgi"}, "--engine: 'tgi' is not one of"),
        ("place", {"ranks": "8"}, "--workload missing"),
        ("place", {"ranks": "8", "workload": "chat"}, "'chat' is not NAME=PATH"),
        ("place", {"ranks": "8", "workload": "chat=/nowhere"}, "--workload: /nowhere"),
        ("place", {"ranks": "9999", "workload": "a=b"}, "--workload: b"),
    ],
)
def test_an_answer_that_cannot_be_is_one_line(
    goal: str, given_answers: dict[str, str], said: str
) -> None:
    (draft,) = (one for one in DRAFTS if one.kind == goal)
    with refused(SpecError, said):
        fill_values(draft, given_answers)


def test_what_a_target_cannot_launch_is_refused_before_anything_is_written() -> None:
    values = fill_values(train.DRAFT, {**MACHINES, "emit": "torchtitan", "precision": "nvfp4"})
    with pytest.raises(SpecError, match="torchtitan has no precision 'nvfp4'"):
        draft_spec(train.DRAFT, values, folder=None)


@settings(max_examples=60, deadline=None)
@example("~0")
@example(".")
@given(st.text(min_size=1, max_size=30).filter(lambda text: "\0" not in text))
def test_names_and_paths_read_back_as_they_were_typed(name: str) -> None:
    workload = name.replace(",", "").replace("=", "").strip()
    if not workload or "/" in workload or not workload.isprintable():
        return
    values = {
        "objective": "balance",
        "ranks": "8",
        "ranks-per-node": "",
        "redundant-experts": "",
        "workload": f"{workload}={workload}",
        "emit": "eplb",
    }
    try:
        requested = parse_workloads(values["workload"])
    except SpecError:
        return
    (written,) = yaml.safe_load(place.DRAFT.text(values, folder=None))["goal"]["workloads"]
    assert {written["name"]: Path(written["path"]).name} == {
        key: home_expanded(path).absolute().name for key, path in requested.items()
    }


def test_every_default_is_acceptable() -> None:
    for draft in DRAFTS:
        for field in draft.fields:
            if field.default and field.key != "devices":
                values = {"engine": "sglang", "model": MODEL, "input-tokens": "4000"}
                field.check(field.default, values)
