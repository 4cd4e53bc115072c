"""Installed components, what each missing one disables, and the command that installs it.

Packages and their lowest versions come from the installed distribution's metadata, so this list
cannot drift from pyproject.toml. Nothing is changed or downloaded.

Not covered: whether driver and CUDA build match beyond what torch reports.
"""

import contextlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from profilers.records import Record
from tuner.report.picture import BROWSERS

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LOWEST: Final = re.compile(r">=\s*([0-9.]+)")

_TORCH_COSTS: Final = (
    "moetune profile and moetune verify cannot measure; plans need a stored profile"
)

_OPTIONAL: Final[Mapping[str, tuple[str, str]]] = {
    "transformers": (
        "the tests cannot compare parameter counts with the real models",
        "pip install {}",
    ),
    "plotly": (
        "moetune report writes Markdown (--format md) only: pages and pictures need it",
        "pip install {}",
    ),
    "psycopg": (
        "moetune verify --storage cannot reach PostgreSQL; a plan's folder can still be shared",
        "pip install {}",
    ),
    "aiconfigurator-core": (
        "moetune profile import aiconfigurator needs the folder of its tables named",
        "pip install {}",
    ),
    "megatron-core": (
        "the tests check Megatron-LM arguments against a stored list of flags only",
        "pip install --no-deps {}",
    ),
    "torchtitan": (
        "the tests do not check torchtitan files with its own classes",
        "pip install --no-deps {} tyro docstring_parser typeguard torchdata",
    ),
    "deepspeed": (
        "the tests do not check DeepSpeed files with its own parser",
        "pip install --no-deps setuptools wheel einops hjson msgpack py-cpuinfo && "
        "DS_BUILD_OPS=0 pip install --no-build-isolation --no-deps {}",
    ),
}
"""Features that each missing optional package disables, and the command that installs it."""

_PROGRAMS: Final[Mapping[str, tuple[tuple[str, ...], str, str]]] = {
    "torchrun": (
        ("torchrun", str(Path(sys.executable).with_name("torchrun"))),
        "emitted scripts cannot start here",
        "pip install 'moetune[torch]', or activate the environment that holds torch",
    ),
    "Slurm": (
        ("sbatch",),
        "emitted job.sbatch files cannot be submitted from this machine",
        "log in to a node of the cluster, or apt-get install slurm-client",
    ),
    "git": (
        ("git",),
        "moetune check --against git:REV cannot read a revision",
        "apt-get install git",
    ),
    "chromium": (
        BROWSERS,
        "moetune report --format png cannot draw the page; html and md need no browser",
        "apt-get install chromium",
    ),
}
"""Programs by name: files any of which will do, what their absence disables, and the remedy."""


class Component(Record):
    """One component of the environment."""

    name: str
    status: Literal["ok", "missing", "broken"]
    found: str = ""
    """Version, path or devices."""
    core: bool = False
    """Whether moetune needs it for every command."""
    costs: str = ""
    """Features that do not work without the component; empty if it is ok."""
    remedy: str = ""
    """The command that installs it; empty if it is ok."""


def examine(
    *,
    requirements: tuple[str, ...] | None = None,
    installed: Callable[[str], str] = version,
    which: Callable[[str], str | None] = shutil.which,
) -> tuple[Component, ...]:
    """Check everything that moetune uses.

    Args:
        requirements: of the distribution, as its metadata spells them; None reads the metadata.
        installed: version of a distribution; raises PackageNotFoundError.
        which: path of a program.
    """
    listed = tuple(requires("moetune") or ()) if requirements is None else requirements
    stated = {_NAME.findall(line)[0]: line.partition(";") for line in listed}

    def package(name: str, costs: str, remedy: str = "pip install {}", **more: Any) -> Component:
        line, found = stated.get(name, (name,))[0].strip(), ""
        with contextlib.suppress(PackageNotFoundError):
            found = installed(name)
        fit = remedy.format(f"'{line}'" if name in stated else name)
        return _component(name, found, costs=costs, remedy=fit, **more)

    def core_package(name: str) -> Component:
        found = package(name, "moetune cannot run without it", core=True)
        lowest = "".join(_LOWEST.findall(stated[name][0]))
        if found.status == "missing" or _release(found.found) >= _release(lowest):
            return found
        old = f"older than {lowest}, the oldest that moetune is written for"
        return package(name, "", core=True, fault=old)

    clash = "it clashes with ortools inside one process and may crash the solvers"
    highspy = package("highspy", "", "pip uninstall {}", fault=clash)
    return (
        Component(name="python", status="ok", found=platform.python_version(), core=True),
        *(core_package(name) for name, (*_, extra) in stated.items() if "extra" not in extra),
        _cbc(),
        *([highspy] if highspy.found else []),
        *_torch(package("torch", _TORCH_COSTS)),
        *(
            _component(name, next(filter(None, map(which, files)), ""), costs=costs, remedy=remedy)
            for name, (files, costs, remedy) in _PROGRAMS.items()
        ),
        *(package(name, costs, remedy) for name, (costs, remedy) in _OPTIONAL.items()),
    )


def _component(
    name: str, found: str, *, costs: str, remedy: str, fault: str = "", core: bool = False
) -> Component:
    """Return a component that is ok where it was found without a fault."""
    if found and not fault:
        return Component(name=name, status="ok", found=found, core=core)
    status: Literal["broken", "missing"] = "broken" if fault else "missing"
    costs = fault or costs
    return Component(name=name, status=status, found=found, core=core, costs=costs, remedy=remedy)


def _cbc() -> Component:
    found = ""
    if find_spec("pulp") is not None:
        from pulp.apis.coin_api import pulp_cbc_path

        found = str(pulp_cbc_path) if os.access(str(pulp_cbc_path), os.X_OK) else ""
    costs = "deployments, and placements by method moetuner, cannot be planned"
    remedy = "pip install --force-reinstall pulp"
    return _component("CBC", found, costs=costs, remedy=remedy, core=True)


def _torch(package: Component) -> Iterator[Component]:
    """Yield the package, broken if it cannot be imported, and the accelerators that it sees."""
    if package.status != "ok":
        yield package
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        found, remedy = f"{package.found}: {error}", "pip install --force-reinstall torch"
        yield _component("torch", found, costs="", remedy=remedy, fault=_TORCH_COSTS)
        return
    yield package
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield _component(
        "accelerators",
        f"{count} x {torch.cuda.get_device_name(0)}" if count else "",
        costs="profiles and trials run on the CPU and say nothing about a GPU",
        remedy="run on a machine with a GPU and a CUDA build of torch",
    )


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])
