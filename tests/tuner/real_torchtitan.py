"""torchtitan itself, in a process of its own, as far as its configuration goes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

STAND_INS: Final = """
import importlib.abc, importlib.machinery, sys
from unittest.mock import MagicMock

ABSENT = (
    *("PIL", "datasets", "einops", "fla", "tensorboard", "tokenizers", "torch_checkpointing"),
    *("av", "requests", "torchvision", "wandb"),
)
KERNELS = "torchtitan.distributed.minimal_async_ep"

class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT or name.startswith(KERNELS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return MagicMock(__path__=[], __spec__=spec, __version__="9.9.9")
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Absent())
"""
"""It imports what trains and logs, and kernels of Triton, beside its configuration."""


def run_with_torchtitan(
    folder: Path, program: str, *arguments: str, **environment: str
) -> tuple[str, str]:
    """Run a program in a folder with torchtitan; return what it printed, to stdout and stderr."""
    pytest.importorskip("torchtitan.config", reason="torchtitan is not installed (extra: engines)")
    pytest.importorskip("spmd_types", reason="torchtitan was installed without spmd_types")
    (folder / "sitecustomize.py").write_text(STAND_INS)
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout.strip(), ran.stderr.strip()
