"""SGLang's own reading of an emitted placement, where its package is installed.

    python -m venv ENGINE && ENGINE/bin/pip install --no-deps sglang==0.5.23
    PYTHONPATH=ENGINE/lib/python3.11/site-packages python tests/benchmarks/placement_dispatch.py

Only `sglang/srt/eplb/expert_location.py` is run, with stand-ins for the modules around it, so that
no device and none of the package's dependencies are needed.
"""

import importlib.util
import re
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tests.expect import present

RELEASE: Final = "0.5.23"
"""The release that our rules follow; another one may draw differently."""
NAME: Final = "sglang.srt.eplb.expert_location"


def expert_location_file() -> Path | None:
    """Find the engine's file without importing its package."""
    with suppress(ImportError, ValueError):
        result = importlib.util.find_spec("sglang")
        for folder in () if result is None else result.submodule_search_locations or ():
            file = Path(folder, "srt/eplb/expert_location.py")
            if file.exists():
                return file
    return None


class ExpertLocation:
    """The engine's module for a server of given sizes."""

    def __init__(self, file: Path) -> None:
        self._moe = SimpleNamespace(
            moe_a2a_backend="deepep", ep_dispatch_algorithm="static", ep_join_mode=None
        )
        self._parallel = SimpleNamespace(elastic_ep_initial_size=None)
        self._modules = self._stand_ins(file.read_text())
        self._module = self._load(file)

    def get_model_config_for_expert_location(self, config: Any) -> Any:
        """Return what the model's class would."""
        return self._module.ModelConfigForExpertLocation(**vars(config))

    def read(
        self, location: str, *, layers: int, experts: int, redundant: int, ranks: int, nodes: int
    ) -> list[Any]:
        """Return each rank's reading of `--init-expert-location`."""
        self._moe.init_expert_location = location
        self._moe.ep_num_redundant_experts = redundant
        self._parallel.ep_size, self._parallel.nnodes = ranks, nodes
        model = SimpleNamespace(
            hf_config=SimpleNamespace(num_layers=layers, num_logical_experts=experts)
        )
        with _Modules(self._modules):
            return [
                self._module.compute_initial_expert_location_metadata(model, moe_ep_rank=rank)
                for rank in range(ranks)
            ]

    def targets(
        self, location: str, *, layers: int, experts: int, redundant: int, ranks: int, nodes: int
    ) -> npt.NDArray[np.int64]:
        """Return whose replica each rank uses under `static`, `[ranks][layers][experts]`."""
        read = self.read(
            location, layers=layers, experts=experts, redundant=redundant, ranks=ranks, nodes=nodes
        )
        slot_HLE = np.array([one.logical_to_rank_dispatch_physical_map.numpy() for one in read])
        return np.asarray(slot_HLE // ((experts + redundant) // ranks), dtype=np.int64)

    def _stand_ins(self, source: str) -> dict[str, ModuleType]:
        names = {"sglang", "sglang.srt", "sglang.srt.eplb", "sglang.srt.elastic_ep"}
        names |= set(re.findall(r"from (sglang[\w.]*) import", source))
        members: dict[str, dict[str, Any]] = {
            "sglang.srt.runtime_context": {
                "get_exec": lambda: SimpleNamespace(moe=self._moe),
                "get_parallel": lambda: self._parallel,
                "get_device": lambda: SimpleNamespace(device="cpu"),
                "get_resources": lambda: None,
            },
            "sglang.srt.elastic_ep.elastic_ep": {"elastic_expanded_world_enabled": lambda: False},
            "sglang.srt.model_loader": {"get_model_architecture": lambda config: (self, None)},
        }
        modules = {}
        for name in sorted(names | set(members)):
            modules[name] = ModuleType(name)
            modules[name].__dict__.update(members.get(name, {}), __path__=[])
        return modules

    def _load(self, file: Path) -> Any:
        spec = present(importlib.util.spec_from_file_location(NAME, file))
        module = importlib.util.module_from_spec(spec)
        self._modules[NAME] = module
        with _Modules(self._modules):
            present(spec.loader).exec_module(module)
        return module


class _Modules:
    """Temporary modules in `sys.modules`."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules
        self._before: dict[str, ModuleType | None] = {}

    def __enter__(self) -> None:
        self._before = {name: sys.modules.get(name) for name in self._modules}
        sys.modules.update(self._modules)

    def __exit__(self, *_: object) -> None:
        for name, module in self._before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
