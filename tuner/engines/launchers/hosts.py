"""Emits `hosts.txt` where a plan orders nodes: one host name per line, that of rank 0 first.

It contains names only, because Slurm reads it too (SLURM_HOSTFILE of srun). A name that the plan
does not know is a placeholder for a node of its pool.
"""

import re
from pathlib import PurePosixPath
from typing import Final

from tuner.engines.files import EmittedFile
from tuner.engines.launchers.shape import LaunchShape

HOSTS_NAME: Final = "hosts.txt"

_SAFE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def hosts_file(shape: LaunchShape) -> tuple[EmittedFile, ...]:
    """Return the file, or nothing if the order of nodes does not matter.

    Raises:
        ValueError: a name is not a valid host name.
    """
    if not shape.hosts:
        return ()
    return (
        EmittedFile(path=PurePosixPath(HOSTS_NAME), text="".join(f"{h}\n" for h in hosts(shape))),
    )


def hosts(shape: LaunchShape) -> tuple[str, ...]:
    """Return the names in a form that launchers accept; pool names may have any characters."""
    names = tuple(
        re.sub(r"[^A-Za-z0-9._-]+", "-", host).lstrip("-._") if host in shape.unnamed else host
        for host in shape.hosts
    )
    wrong = next((name for name in names if not _SAFE.fullmatch(name)), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} is no name of a host")
    return names


def notes(shape: LaunchShape) -> tuple[str, ...]:
    """Return what the user must know about the order, a line each."""
    if not shape.hosts:
        return ()
    lines = [f"Ranks follow {HOSTS_NAME}: its first line is the node with rank 0."]
    if shape.unnamed:
        names = zip(shape.hosts, hosts(shape), strict=True)
        first = next(name for host, name in names if host in shape.unnamed)
        lines.append(f"Lines like {first} are placeholders for nodes of that pool: replace them.")
    return tuple(lines)
