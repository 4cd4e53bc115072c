"""Installed components, what each missing one disables, and the command that installs it.

Packages and their lowest versions come from the installed distribution's metadata, so this list
cannot drift from pyproject.toml. Nothing is changed or downloaded.

Not covered: whether driver and CUDA build match beyond what torch reports.
"""

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

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
        "pip install {requirement}",
    ),
    "plotly": (
        "moetune report writes Markdown (--format md) only: pages and pictures need it",
        "pip install {requirement}",
    ),
    "psycopg": (
        "moetune verify --storage cannot reach PostgreSQL; a plan's folder can still be shared",
        "pip install {requirement}",
    ),
    "aiconfigurator-core": (
        "moetune profile import aiconfigurator needs the folder of its tables named",
        "pip install {requirement}",
    ),
    "megatron-core": (
        "the tests check Megatron-LM arguments against a stored list of flags only",
        "pip install --no-deps {requirement}",
    ),
    "torchtitan": (
        "the tests do not check torchtitan files with its own classes",
        "pip install --no-deps {requirement} tyro docstring_parser typeguard torchdata",
    ),
    "deepspeed": (
        "the tests do not check DeepSpeed files with its own parser",
        "pip install --no-deps setuptools wheel einops hjson msgpack py-cpuinfo && "
        "DS_BUILD_OPS=0 pip install --no-build-isolation --no-deps {requirement}",
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
    return (
        Component(name="python", status="ok", found=platform.python_version(), core=True),
        *(
            _package(
                *_parsed(line),
                installed=installed,
                costs="moetune cannot run without it",
                remedy=f"pip install '{line}'",
                core=True,
            )
            for line in listed
            if "extra" not in line
        ),
        _cbc(),
        *_clashing(installed),
        *_torch(listed, installed),
        *(_program(name, *facts, which=which) for name, facts in _PROGRAMS.items()),
        *(
            _package(
                name,
                installed=installed,
                costs=costs,
                remedy=remedy.format(
                    requirement=_command_for(name, listed).removeprefix("pip install ")
                ),
            )
            for name, (costs, remedy) in _OPTIONAL.items()
        ),
    )


def _package(
    name: str,
    lowest: str = "",
    *,
    installed: Callable[[str], str],
    costs: str,
    remedy: str,
    core: bool = False,
) -> Component:
    status: Literal["missing", "broken"] = "missing"
    try:
        version = installed(name)
    except PackageNotFoundError:
        version = ""
    else:
        if _release(version) >= _release(lowest):
            return Component(name=name, status="ok", found=version, core=core)
        status, costs = "broken", f"older than {lowest}, the oldest that moetune is written for"
    return Component(name=name, status=status, found=version, core=core, costs=costs, remedy=remedy)


def _program(
    name: str,
    files: tuple[str, ...],
    costs: str,
    remedy: str,
    *,
    which: Callable[[str], str | None],
) -> Component:
    path = next(filter(None, map(which, files)), None)
    if path is None:
        return Component(name=name, status="missing", costs=costs, remedy=remedy)
    return Component(name=name, status="ok", found=path)


def _clashing(installed: Callable[[str], str]) -> Iterator[Component]:
    try:
        present = installed("highspy")
    except PackageNotFoundError:
        return
    yield Component(
        name="highspy",
        status="broken",
        found=present,
        costs="it clashes with ortools inside one process and may crash the solvers",
        remedy="pip uninstall highspy",
    )


def _cbc() -> Component:
    if find_spec("pulp") is not None:
        from pulp.apis.coin_api import pulp_cbc_path

        if os.access(str(pulp_cbc_path), os.X_OK):
            return Component(name="CBC", status="ok", found=str(pulp_cbc_path), core=True)
    return Component(
        name="CBC",
        status="missing",
        core=True,
        costs="plans cannot be solved with the default solver",
        remedy="pip install --force-reinstall pulp",
    )


def _torch(listed: tuple[str, ...], installed: Callable[[str], str]) -> Iterator[Component]:
    remedy = _command_for("torch", listed)
    package = _package("torch", installed=installed, costs=_TORCH_COSTS, remedy=remedy)
    if package.status != "ok":
        yield package
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        broken = {"found": f"{package.found}: {error}", "costs": _TORCH_COSTS, "remedy": remedy}
        yield package.model_copy(update={"status": "broken", **broken})
        return
    yield package
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        yield Component(
            name="accelerators", status="ok", found=f"{count} x {torch.cuda.get_device_name(0)}"
        )
    else:
        yield Component(
            name="accelerators",
            status="missing",
            costs="profiles and trials run on the CPU and say nothing about a GPU",
            remedy="run on a machine with a GPU and a CUDA build of torch",
        )


def _command_for(name: str, listed: tuple[str, ...]) -> str:
    for line in listed:
        if _parsed(line)[0] == name:
            return f"pip install '{line.split(';')[0].strip()}'"
    return f"pip install {name}"


def _parsed(line: str) -> tuple[str, str]:
    """Return the name and the lowest version, which may be empty, of a requirement."""
    name, lowest = _NAME.match(line), _LOWEST.search(line.split(";")[0])
    if name is None:
        raise ValueError(f"{line!r} is not a requirement")
    return name[0], lowest[1] if lowest else ""


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])
