"""The engines that there are: one folder each, and what its files must be called.

    capabilities.py   what its releases can launch; a training engine lists them in `TARGETS`
    write.py          its launch files: the function that a target names, `emit`
    read.py           launches of it as settings; `FORMATS` in capabilities.py names the readers
    metrics.py        `read`: step times in its output; `METRICS` in capabilities.py names it
    kv.py             pages and transfers of the KV caches of a serving engine

A serving engine has `RELEASES` in capabilities.py, each with the engine's traits (they are found in
tuner/engines/serving/releases.py); `server` in write.py, and there
`command_files` where its command reads files, and `DYNAMO` where Dynamo has it; `SERVER`, `read`
and `knob_flags` in read.py. Its folder has the engine's name; a plugin has a folder of its own. An
engine that takes a placement has `PLACE_TARGET` in capabilities.py, and `emit` in placement.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Final, get_args

from tuner.catalog.manifest import Capabilities
from tuner.catalog.saved_bytes import SavedBytes
from tuner.spec.serving.goal import EngineName
from tuner.spec.tune import Adapters

TRAIN_ENGINES: Final = (
    "reference",
    "megatron_lm",
    "megatron_bridge",
    "ms_swift",
    "torchtitan",
    "deepspeed",
    "peft",
)
"""Folders, in the order in which their targets are listed."""
SERVE_ENGINES: Final = (*get_args(EngineName), "vllm_afd", "vllm_ascend")
"""Folders; a release with a plugin comes after those without, so that it must be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A release of a training engine that users name in `emit`."""

    capabilities: Capabilities
    family: str
    """Published runs that it resembles, for its residuals (tuner/search/train/regimes.py)."""
    memory_family: str = ""
    """Family of its memory constants (tuner/costs/train/memory_constants.py); empty: `family`."""
    software: str
    """Generation of that software, as `tuner.prices.train.constants.Software` names it."""
    runs_same_layers: bool = True
    """The published runs of `family` are of its own layers, so that their band holds for it."""
    on_processors: Capabilities | None = None
    """Capabilities where the profile was measured on processors; None: the same."""
    saved_bytes: Callable[[Adapters | None, int, str], SavedBytes]
    """Function that returns bytes of a parameter in checkpoints, by what is trained, the zero_stage
    and the precision."""
    emitter: str = "emit"
    """Function of write.py: (verified) -> tuple of EmittedFile."""

    @property
    def name(self) -> str:
        """The name that users type."""
        return self.capabilities.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFormat:
    """One format of an engine's launch files."""

    name: str
    """Name that users choose with --format."""
    suffixes: tuple[str, ...] = ()
    """Endings of files that have this format unless --format says otherwise; empty: by --format
    alone, and Megatron-LM's arguments for all other files (tuner/estimate/registry.py)."""
    reader: str = "read"
    """Function of read.py: (text, source=...) -> LaunchSettings."""
    recognised_by: str = ""
    """Function of read.py: whether a text is of this format, before its ending is looked at."""


def engine_file(folder: str, name: str) -> ModuleType:
    """Import a file of an engine's folder."""
    return import_module(f"tuner.engines.{folder}.{name}")


def train_targets() -> Iterator[tuple[str, Target]]:
    """Yield every target of training with the folder of its engine."""
    for folder in TRAIN_ENGINES:
        for target in engine_file(folder, "capabilities").TARGETS:
            yield folder, target


def launch_formats() -> Iterator[tuple[str, LaunchFormat]]:
    """Yield every format of launch files with the folder of its engine."""
    for folder in TRAIN_ENGINES:
        for launch_format in getattr(engine_file(folder, "capabilities"), "FORMATS", ()):
            yield folder, launch_format


def metrics_folders() -> Iterator[tuple[str, str]]:
    """Yield the name of every engine whose output is read, with its folder."""
    for folder in TRAIN_ENGINES:
        if name := getattr(engine_file(folder, "capabilities"), "METRICS", ""):
            yield name, folder
