"""Logs of public launches, predicted anew; what misses is named, with the reason.

The figures stand in README.md beside this, under "Start-up logs".
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("start_up_logs.py")
SAID_WRONG = {
    # An image of its own stores experts of mxfp4 in a quarter more bytes.
    "sglang-v4-pro-8-h200",
    # Its checkpoint leaves attention in bf16, which `fp8` does not say; a release before V1.
    "vllm-llama-405b-8-h100",
}
MISSES = {
    ("sglang-v4-pro-8-h200", "weights_gib"),
    ("vllm-llama-405b-8-h100", "weights_gib"),
    ("vllm-llama-405b-8-h100", "kv_tokens"),
    # 5.3 GiB of weights are not explained.
    ("vllm-glm-5.3-8-h200", "cache_gib"),
    # A release that gave itself another share of memory.
    ("sglang-v3.2-dp8-b200", "cache_gib"),
    ("sglang-v3.2-dp8-b200", "kv_tokens"),
    # 0.2 GiB more activations than are counted, where 3.1 GiB of cache are left.
    ("vllm-llama-3.1-8b-3090-29k", "kv_tokens"),
    # Its steps are inferred: 4,096 tokens, two in flight.
    ("vllm-v4-flash-tp2-h20-1m", "cache_gib"),
    ("vllm-v4-flash-tp2-h20-1m", "kv_tokens"),
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("start_up_logs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["start_up_logs"] = module
    spec.loader.exec_module(module)
    return module


def test_logs_of_public_launches_are_predicted(script: ModuleType) -> None:
    results = [script.evaluate_row(row) for row in script.read_rows()]
    assert {one.id for one in results if not one.is_said_right} == SAID_WRONG
    far = {(one.id, name) for one in results for name in one.figures if not one.is_near(name)}
    assert far == MISSES
    right, total, near, figures = script.shares(results)
    assert total >= 40
    assert right >= 0.95 * total
    assert near >= 0.70 * figures
