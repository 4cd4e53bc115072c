"""An attention server with its FFN server: read back, priced as planned, refused in one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.expect import refused
from tests.rows import each_row
from tuner.config.serve import Role
from tuner.errors import SpecError
from tuner.estimate.serving.estimate import estimate_serving, surroundings
from tuner.estimate.serving.registry import read_serving_text
from tuner.goals.serve_plan import price_serving_pool
from tuner.goals.serve_spec import read_serve_spec
from tuner.search.serve.instances import to_instances
from tuner.search.serve.options import step_seconds
from tuner.search.serve.solve_mode import build_serve_problem
from tuner.search.settings import SearchSettings
from tuner.spec.serving.spec import ServeSpec

MODELS = Path(__file__).parents[4] / "examples" / "models"
CELL = {
    "role": "attention",
    "connector": "P2pNcclAFDConnector",
    "host": "$AFD_HOST",
    "port": "$AFD_PORT",
    "num_attention_ranks": 4,
    "num_ffn_ranks": 2,
}


@pytest.fixture
def spec(tmp_path: Path) -> ServeSpec:
    return _spec(tmp_path, "0.30.0+afd")


def _spec(folder: Path, version: str) -> ServeSpec:
    path = folder / "spec.yaml"
    path.write_text(
        "schema_version: 1\n"
        f"model: {MODELS / 'qwen3-30b-a3b'}\n"
        "cluster: {pools: [{name: h100, device: h100-sxm, nodes: 2, devices_per_node: 8}]}\n"
        "goal:\n"
        "  kind: serve\n"
        f"  engine: {{name: vllm, version: {version}}}\n"
        "  traffic: {rate: 4/s, input_tokens: 2000, output_tokens: 200}\n"
        "  slo: {ttft: {p90: 3s}, tpot: {p90: 50ms}}\n"
        "  max_model_len: 8192\n"
        "  modes: [attention_expert]\n"
    )
    return read_serve_spec(path)


def _command(afd: Any = None, *, data: int = 4, more: str = "") -> str:
    config = json.dumps({"afd": CELL if afd is None else afd})
    return (
        f"vllm serve model --tensor-parallel-size 1 --data-parallel-size {data}"
        f" --enable-expert-parallel --additional-config '{config}' --max-num-seqs 64"
        f" --max-num-batched-tokens 1024 --max-model-len 8192 {more}"
    )


def _read(spec: ServeSpec, command: str) -> Any:
    around = surroundings(spec, spec.cluster.pools[0])
    return read_serving_text(command, around, engine="vllm", source="launch")


def test_an_attention_server_is_priced_as_the_cell_that_was_planned(spec: ServeSpec) -> None:
    serving_pools = tuple(price_serving_pool(pool, ()) for pool in spec.cluster.pools)
    problem = build_serve_problem(spec, serving_pools, SearchSettings())
    for option in problem.own_options["attention_expert"].options:
        attention, expert = to_instances(option, count=1)
        if attention.attention_tp > 1:
            continue
        afd = CELL | {
            "num_attention_ranks": attention.devices,
            "num_ffn_ranks": expert.devices,
        }
        halves = "--enable-dbo" if attention.two_batch_overlap else ""
        command = _command(afd, data=attention.devices, more=halves).replace(
            "--max-num-seqs 64", f"--max-num-seqs {attention.max_batch}"
        )
        result = estimate_serving(spec, _read(spec, command), serving_pool=serving_pools[0])
        assert result.fits, result.misfit
        assert result.instance.role is Role.ATTENTION
        assert result.instance.devices == attention.devices
        assert result.load is not None
        assert result.load.devices == option.devices
        # Options take steps between those that are priced; a launch is priced where it is.
        step_s = step_seconds(option.iteration, np.array([float(option.running)]), problem.demand)
        running = attention.attention_dp * option.running
        capacity = running / (problem.demand.output_tokens * float(step_s[0]))
        assert result.load.capacity_per_s == pytest.approx(capacity)
        assert not result.refused_by
        assert not result.changes


@each_row(
    ("afd", "data", "line"),
    [
        ({"role": "router"}, 4, "has no role of attention, ffn"),
        ([], 4, "has no role of attention, ffn"),
        (CELL | {"num_ffn_ranks": 0}, 4, "afd.num_ffn_ranks 0 is no number of ranks"),
        (CELL | {"num_ffn_ranks": "two"}, 4, "afd.num_ffn_ranks 'two' is no number of ranks"),
        (CELL, 8, "afd.num_attention_ranks 4 is not the 8 devices"),
        (CELL | {"role": "ffn"}, 4, "afd.num_ffn_ranks 2 is not the 4 devices"),
    ],
)
def test_a_cell_that_cannot_be_is_refused_in_a_line(
    afd: Any, data: int, line: str, spec: ServeSpec
) -> None:
    with refused(SpecError, match=line):
        _read(spec, _command(afd, data=data))


def test_an_ffn_server_without_attention_is_refused(spec: ServeSpec) -> None:
    launch = _read(spec, _command(CELL | {"role": "ffn"}, data=2))
    assert launch.role is Role.EXPERT
    serving_pool = price_serving_pool(spec.cluster.pools[0], ())
    with pytest.raises(SpecError, match="an FFN server serves no requests; estimate"):
        estimate_serving(spec, launch, serving_pool=serving_pool)


def test_a_release_without_the_plugin_and_too_few_attention_ranks_are_named(
    tmp_path: Path, spec: ServeSpec
) -> None:
    serving_pool = price_serving_pool(spec.cluster.pools[0], ())
    few = _read(spec, _command(CELL | {"num_ffn_ranks": 8}))
    (line,) = estimate_serving(spec, few, serving_pool=serving_pool).refused_by
    assert "num_attention_ranks to be at least num_ffn_ranks" in line
    other = _spec(tmp_path, "0.33.0")
    (line,) = estimate_serving(
        other, _read(other, _command()), serving_pool=serving_pool
    ).refused_by
    assert "vllm 0.30.0+afd does" in line
