"""Changes of one thing: those of memory and cache, and that advice is obeyed when it is pasted."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rows import each_row
from tests.tuner.estimate.serving.conftest import no_changes
from tuner.engines.reading.serve_launch import ServingLaunch
from tuner.estimate.serving.estimate import estimate_serving, pool_named, surroundings
from tuner.estimate.serving.records import ServingEstimate
from tuner.estimate.serving.registry import read_serving_launch
from tuner.goals.serve_plan import price_serving_pool
from tuner.spec.serving.spec import ServeSpec

Made = Callable[..., Any]
KIMI = {
    "model": "kimi-k2",
    "device": "h200-sxm",
    "nodes": 1,
    "slo": "{}",
    "extra": "quantization: fp8_block",
}
SHORT = "{concurrency: 64, input_tokens: 6000, output_tokens: 500}"


def whats(result: ServingEstimate) -> list[str]:
    return [change.what for change in result.changes]


def test_a_smaller_cache_type_alone_makes_a_launch_fit(deployment: Made) -> None:
    made = deployment(traffic="{concurrency: 2, input_tokens: 120000, output_tokens: 4000}", **KIMI)
    start = "vllm serve m --tensor-parallel-size 8 --max-model-len 131072"
    result = made.estimate(f"{start} --gpu-memory-utilization 0.95")
    assert not result.fits
    assert "the stated share of memory, 0.95, leaves" in result.misfit
    change = next(one for one in result.changes if one.what == "cache bf16 -> fp8")
    assert change.lines == ("--kv-cache-dtype fp8",)
    assert change.instance.kv_tokens == pytest.approx(2 * result.kv_tokens, rel=0.01)
    # Equal keys on eight ranks can share their positions instead.
    change = next(one for one in result.changes if one.what == "DCP 1 -> 8")
    assert change.lines == ("--decode-context-parallel-size 8",)
    assert change.instance.kv_tokens == pytest.approx(8 * result.kv_tokens, rel=0.01)


def test_shares_of_memory_are_named_and_larger_ones_tried(deployment: Made) -> None:
    made = deployment(slo="{}", traffic=SHORT)
    result = made.estimate("vllm serve m -tp 2 --gpu-memory-utilization 0.5 --max-model-len 8192")
    assert not result.fits
    assert "the stated share of memory, 0.5, leaves no KV cache beside" in result.misfit
    assert "memory share 0.5 -> 0.95" in whats(result)
    traffic = "{concurrency: 2, input_tokens: 30000, output_tokens: 500}"
    result = deployment(traffic=traffic, slo="{}").estimate("vllm serve m -tp 1")
    assert "of weights a device leave no room for a KV cache, whatever the share" in result.misfit


def test_the_longest_request_that_has_room_is_a_change(deployment: Made) -> None:
    made = deployment(
        model="gpt-oss-120b", slo="{}", traffic=SHORT, extra="quantization: mxfp4", nodes=1
    )
    result = made.estimate("vllm serve openai/gpt-oss-120b")
    assert not result.fits
    assert "the engine's default share of memory, 0.92, leaves" in result.misfit
    assert any(change.lines[0].startswith("--max-model-len") for change in result.changes)


def test_no_change_makes_it_fit_only_where_none_does(deployment: Made) -> None:
    few = deployment(nodes=1, slo="{}", traffic=SHORT).estimate("vllm serve m -tp 1")
    assert not few.fits
    assert {"TP 1 -> 2", "PP 1 -> 2"} <= {what.partition(",")[0] for what in whats(few)}
    none = deployment(model="deepseek-v3", nodes=1, slo="{}", traffic=SHORT)
    assert none.estimate("vllm serve m -tp 8").smallest_change is None


def test_changes_keep_what_does_not_limit_them(deployment: Made) -> None:
    result = deployment(slo="{}", traffic=SHORT).estimate("vllm serve m -tp 4 --max-num-seqs 8")
    assert not {"cache bf16 -> fp8"} & set(whats(result))
    bound = deployment(
        slo="{}", traffic="{concurrency: 512, input_tokens: 20000, output_tokens: 500}"
    ).estimate("vllm serve m -tp 2 --max-num-seqs 512 --gpu-memory-utilization 0.8")
    assert {"cache bf16 -> fp8", "memory share 0.8 -> 0.95"} <= set(whats(bound))
    assert bound.smallest_change is not None
    result = deployment().estimate("vllm serve m -tp 2 -pp 2 --max-model-len 8192")
    for change in result.changes:
        assert change.instance.pp == 2, change.what
    result = deployment(engine="trtllm", slo="{}", traffic=SHORT).estimate(
        "trtllm-serve serve m --tp_size 2"
    )
    assert any("without chunked prefill" in refusal for refusal in result.refused_by)
    assert {"TP 2 -> 4", "chunked prefill"} <= set(whats(result))


STARTS = {
    "vllm": "vllm serve m --tensor-parallel-size 2 --max-num-seqs 512 --gpu-memory-utilization 0.8",
    "sglang": "sglang serve m --tp-size 2 --max-running-requests 512 --mem-fraction-static 0.75",
    "trtllm": "trtllm-serve serve m --config options.yaml",
}


def pasted(start: str, lines: tuple[str, ...]) -> str:
    """Write flags into a command: those of the same name go, and what is to be without."""
    words = shlex.split(start)
    for line in lines:
        name, *values = line.removeprefix("without ").split(maxsplit=1)
        if name in words:
            at = words.index(name)
            has_value = at + 1 < len(words) and not words[at + 1].startswith("--")
            del words[at : at + 1 + has_value]
        if not line.startswith("without "):
            words += [name, *(value.strip("'") for value in values)]
    return shlex.join(words)


def merged(options: dict[str, Any], lines: tuple[str, ...]) -> dict[str, Any]:
    for line in lines:
        for name, value in yaml.safe_load(line).items():
            own = options.get(name)
            options[name] = own | value if isinstance(own, dict) else value
    return options


@each_row("engine", STARTS)
def test_advice_that_is_pasted_back_is_obeyed(
    deployment: Made, tmp_path: Path, engine: Any
) -> None:
    traffic = "{concurrency: 512, requests: 1024, input_tokens: 6000, output_tokens: 500}"
    spec = deployment(engine=engine, slo="{}", traffic=traffic).spec
    serving_pool = price_serving_pool(pool_named(spec, None), ())
    start = with_lines(spec, (), folder=tmp_path)
    changes = estimate_serving(spec, start, serving_pool=serving_pool).changes
    assert "cache bf16 -> fp8" in {change.what for change in changes}, engine
    assert any("memory share" in change.what for change in changes), engine
    for change in changes:
        if any(line.startswith("TRTLLM_") for line in change.lines):
            continue  # A variable of the environment.
        launch = with_lines(spec, change.lines, folder=tmp_path)
        again = estimate_serving(spec, launch, serving_pool=serving_pool, advise=no_changes)
        assert again.instance == change.instance, (engine, change.what, change.lines)
        assert again.load == change.load, (engine, change.what)


def with_lines(spec: ServeSpec, lines: tuple[str, ...], *, folder: Path) -> ServingLaunch:
    """Read the engine's start with lines of advice in it."""
    engine, pool = spec.goal.engine.name, pool_named(spec, None)
    text = STARTS[engine]
    if engine == "trtllm":
        options = {
            "tensor_parallel_size": 2,
            "max_batch_size": 512,
            "kv_cache_config": {"free_gpu_memory_fraction": 0.7},
        }
        (folder / "options.yaml").write_text(yaml.safe_dump(merged(options, lines)))
    else:
        text = pasted(text, lines)
    (folder / "launch.sh").write_text(text)
    return read_serving_launch(str(folder / "launch.sh"), surroundings(spec, pool), engine=engine)
