"""A spec of reinforcement learning, and launches of both frameworks."""

from pathlib import Path

import pytest

from tests.tuner.models import MODELS

LAUNCHES = Path(__file__).parent / "launches"


@pytest.fixture(scope="session")
def rl_spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rl") / "spec.yaml"
    path.write_text(
        "schema_version: 1\n"
        f"model: {MODELS / 'qwen3-30b-a3b'}\n"
        "cluster:\n"
        "  pools:\n"
        "    - {name: h100, device: h100-sxm, nodes: 4, devices_per_node: 8,"
        " host: {memory: 2TB}}\n"
        "goal:\n"
        "  kind: rl\n"
        "  prompt_tokens: 200\n"
        "  response_tokens: {kind: lognormal, mean: 1000, cv: 0.8}\n"
    )
    return path


@pytest.fixture(scope="session")
def launches() -> Path:
    return LAUNCHES
