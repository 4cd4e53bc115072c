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

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Final, get_args

from tuner.catalog.target import LaunchFormat
from tuner.spec.serving.goal import EngineName

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

RL_ENGINES: Final = ("verl", "nemo_rl")
"""Folders of frameworks of reinforcement learning whose launches are read."""


def engine_file(folder: str, name: str) -> ModuleType:
    """Import a file of an engine's folder."""
    return import_module(f"tuner.engines.{folder}.{name}")


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
