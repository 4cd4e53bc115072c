"""Specs of deployments that cannot be: one line on stderr, the right exit code, no plan folder.

2 is input that is wrong, 1 a question that has no good answer.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.printed import unwrapped
from tests.rows import each_row
from tests.tuner.cli.refusals import output
from tests.tuner.models import MODELS
from tuner.cli.app import run

LENGTHS = "input_tokens: 1000, output_tokens: 50"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TWO_NODES = "{name: a, device: h100-sxm, nodes: 2, devices_per_node: 8}"
ONE_NODE = "{name: a, device: h100-sxm, devices_per_node: 2}"
APART = (
    "{name: a, device: h100-sxm, devices_per_node: 2},"
    " {name: b, device: h100-sxm, devices_per_node: 2}"
)

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(**changes: str) -> Path:
        given = {
            "model": str(MODELS / "mixtral-8x7b"),
            "pools": TWO_NODES,
            "links": "",
            "engine": "{name: vllm}",
            "traffic": f"{{rate: 2/s, {LENGTHS}}}",
            "slo": "{ttft: {p90: 2s}, tpot: {p90: 60ms}}",
            "more": "objective: devices",
            "emit": "[vllm]",
        } | changes
        spec = tmp_path / "spec.yaml"
        spec.write_text(
            f"schema_version: 1\nmodel: {given['model']}\n"
            f"cluster: {{pools: [{given['pools']}], links: [{given['links']}]}}\n"
            f"goal:\n  kind: serve\n  engine: {given['engine']}\n  traffic: {given['traffic']}\n"
            f"  slo: {given['slo']}\n  {given['more']}\nemit: {given['emit']}\n",
            encoding="utf-8",
        )
        return spec

    return written


def traced(text: str) -> dict[str, str]:
    """A trace beside the spec."""
    return {"traffic": "{trace: trace}", "trace": text}


def mooncake(*rows: tuple[object, object, object]) -> str:
    names = ("timestamp", "input_length", "output_length")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


@each_row(
    ("changes", "said"),
    [
        ({"slo": "{ttft: {p90: 0s}}"}, "slo.ttft.p90: 0.0 should be greater than 0"),
        ({"slo": "{tpot: {p90: nan s}}"}, "'nan s' is not a number with a unit"),
        ({"slo": "{tpot: {p90: inf s}}"}, "'inf s' is not a number with a unit"),
        ({"slo": "{tpot: {p95: 1s}}"}, "p95: unknown key"),
        ({"traffic": f"{{rate: 0/s, {LENGTHS}}}"}, "rate: 0.0 should be greater than 0"),
        ({"traffic": f"{{rate: .nan, {LENGTHS}}}"}, "has no unit"),
        ({"traffic": f"{{concurrency: 1000001, {LENGTHS}}}"}, "concurrency"),
        ({"traffic": "{rate: 2/s, input_tokens: 10, output_tokens: 0}"}, "output_tokens.mean: 0"),
        ({"traffic": f"{{rate: 2/s, {LENGTHS}, prefix_hit: 1.0}}"}, "should be less than 1"),
        ({"traffic": f"{{rate: 2/s, {LENGTHS}, prefix_hit: .nan}}"}, "prefix_hit"),
        ({"traffic": "{trace: nowhere.csv}"}, "cannot read the trace"),
        (traced(mooncake((-5, 10, 10), (0, 10, 10))), "line 1: -5 is no time"),
        (traced(mooncake((5, 10, 10), (4, 10, 10))), "line 2: 4 is before the row above"),
        (traced(mooncake((0, 10, 10), (5, -1, 10))), "line 2: -1 is no number of tokens"),
        (traced(AZURE + "2023-11-16 18:17:05,nan,10\n"), "line 2: 'nan' is no number of tokens"),
        (traced(AZURE + "2023-11-16 18:17:05,10,0\n" * 9), "a load has two or more"),
        (traced(AZURE), "no request"),
        (traced(""), "the first line is of no known trace"),
        (traced(mooncake((0, 10, 10), (0, 10, 10))), "come at once"),
        ({"more": "routing: {path: nowhere.json}"}, "nowhere.json"),
        ({"more": "placement: nowhere.json"}, "placement"),
        (
            {"more": "speculative: {draft_tokens: 2, acceptance: 0.5}"},
            "no heads for further tokens",
        ),
        ({"more": "speculative: {draft_tokens: 0, acceptance: 0.5}"}, "draft_tokens: 0"),
        ({"pools": ""}, "an empty list"),
        ({"pools": f"{TWO_NODES}, {TWO_NODES}"}, "two pools are named 'a'"),
        ({"pools": "{name: a, device: h900, devices_per_node: 8}"}, "'h900'"),
        ({"pools": f"{{name: {'x' * 300}, device: h20, devices_per_node: 8}}"}, "200 characters"),
        ({"links": "{between: [a, z], bandwidth: 1Gbit/s, latency: 1us}"}, "no pool is named 'z'"),
        ({"more": "modes: []"}, "goal.modes: an empty list"),
        ({"more": "objective: cost"}, "cost needs the price of every pool"),
        ({"more": "max_model_len: 2000000"}, "exceeds the 32768 positions"),
        ({"more": "max_model_len: 100"}, "max_model_len is 100"),
        ({"engine": "{name: vllm, version: '99.9'}"}, "no vllm '99.9' is described"),
        ({"engine": "{name: tgi}"}, "'tgi' should be"),
        ({"emit": "[helm]"}, "'helm' is no serving target"),
        ({"emit": "[sglang]"}, "the deployment is for vllm, not sglang"),
        ({"model": "/nowhere"}, "cannot read the model config"),
        ({"more": f"objective: devices\n  # {'x' * 1_000_001}"}, "larger than 1000000 bytes"),
    ],
)
def test_wrong_input_is_one_line_and_no_plan(
    changes: Mapping[str, str],
    said: str,
    write: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = dict(changes)
    if "trace" in changes:
        (tmp_path / "trace").write_text(changes.pop("trace"))
    assert run(["plan", str(write(**changes)), "-o", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = [one for one in printed.err.splitlines() if not one.startswith("planning:")]
    assert said in line
    assert len(line) < 700
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@each_row(
    ("changes", "binding"),
    [
        ({"slo": "{ttft: {p90: 1us}}", "pools": ONE_NODE}, "ttft"),
        ({"slo": "{tpot: {p90: 1us}}", "pools": ONE_NODE}, "tpot"),
        ({"traffic": f"{{rate: 1e9/s, {LENGTHS}}}", "pools": ONE_NODE}, "devices"),
        ({"traffic": f"{{concurrency: 1000000, {LENGTHS}}}", "pools": ONE_NODE}, "devices"),
        ({"model": str(MODELS / "deepseek-v3"), "pools": ONE_NODE}, "memory"),
        ({"more": "modes: [attention_expert]", "pools": ONE_NODE}, "release"),
        ({"more": "modes: [prefill_offload]", "pools": ONE_NODE}, "release"),
        ({"pools": APART, "more": "modes: [disaggregated]"}, "link"),
    ],
)
def test_a_question_without_a_good_answer_ends_with_1_and_says_what_binds(
    changes: Mapping[str, str],
    binding: str,
    write: Write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert f"Infeasible because of: {binding}" in unwrapped(
        output(capsys, ["plan", write(**changes), "-o", tmp_path / "out"], code=1)
    )
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["decision"] is None
    assert plan["binding_constraint"].startswith(binding)
    assert not (tmp_path / "out" / "launch").exists()


@pytest.mark.slow
@each_row(
    "changes",
    [
        {"traffic": "{rate: 2/s, input_tokens: 1, output_tokens: 1}"},
        {"traffic": f"{{rate: 1e-9/s, {LENGTHS}}}"},
        {
            "pools": APART,
            "links": "{between: [a, b], bandwidth: 400Gbit/s, latency: 1us}",
            "more": "modes: [disaggregated]",
        },
        {"traffic": "{concurrency: 4, input_tokens: 1000, output_tokens: 1}"},
        {"traffic": f"{{rate: 2/s, {LENGTHS}, prefix_hit: 0.999}}"},
        {"traffic": f"{{rate: 2/s, arrival: {{kind: on_off, on: 1s, off: 1s}}, {LENGTHS}}}"},
        {"slo": "{}"},
        {"pools": "{name: a, device: h100-sxm, nodes: 100000, devices_per_node: 8}"},
        {"pools": '{name: "プール $(id)\\n; --- ../x", device: h100-sxm, devices_per_node: 8}'},
        {"pools": "{name: a, device: h100-sxm, devices_per_node: 7}"},
        traced(
            AZURE
            + "".join(f"2023-11-16 0{h}:00:{s:02d},500,50\n" for h in (1, 7) for s in range(60))
        ),
    ],
)
def test_what_is_odd_but_possible_is_planned(
    changes: dict[str, str], write: Write, tmp_path: Path
) -> None:
    changes = dict(changes)
    if "trace" in changes:
        (tmp_path / "trace").write_text(changes.pop("trace"))
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert run(["plan", str(write(**changes)), "-o", str(tmp_path / "out")]) == 0
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["decision"]["instances"]
    assert all((tmp_path / "out" / file).is_file() for file in plan["files"])
