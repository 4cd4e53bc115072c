import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).with_name("placement_methods.py")
    spec = importlib.util.spec_from_file_location("placement_methods", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_clusters_of_two_ranks_are_ordered(benchmark: ModuleType) -> None:
    assert "32 pairings: optimal" in benchmark.named((2, 3), time_limit_s=5.0)
