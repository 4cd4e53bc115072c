"""The smallest case of the benchmark: 24 devices, over which 256 experts are even with copies."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).with_name("serving_copies.py")


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serving_copies", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_copies_of_experts_let_24_devices_serve_more_than_16() -> None:
    own = _benchmark()
    without, with_copies = (
        own.planned("h100-sxm", 3, None, is_recorded=False, has_copies=has_copies)
        for has_copies in (False, True)
    )
    assert without.decision.num_devices == 16
    assert with_copies.decision.num_devices == 24
    assert with_copies.decision.instances[0].redundant_experts == 8
    assert own.worth(with_copies) > 1.2 * own.worth(without)
