"""The user's sbatch options for trials, passed through as arguments of sbatch.

Names are checked for their form only, because clusters have their own; those that the launcher sets
are refused, and so are prefixes of them that sbatch would accept: it reads `arra=1-4` as
`array=1-4` (getopt_long(3)).
"""

import re
from collections.abc import Iterable
from typing import Final

from tuner.errors import SpecError

Options = tuple[tuple[str, str], ...]
"""Long options of sbatch without their dashes, and their values."""

OWN: Final = frozenset(
    {
        "array",
        "chdir",
        "cluster-constraint",
        "clusters",
        "error",
        "get-user-env",
        "job-name",
        "nodes",
        "no-requeue",
        "ntasks",
        "ntasks-per-node",
        "open-mode",
        "output",
        "parsable",
        "requeue",
        "tasks-per-node",
        "test-only",
        "wait",
        "wrap",
    }
)
"""Options that the launcher sets: a trial is one job of a given shape on this cluster, cancelled by
its name. Sbatch also accepts `tasks-per-node`, though sbatch(1) does not list it."""

_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,63}")


def parse_options(written: Iterable[str]) -> Options:
    """Read `name=value` pairs.

    Raises:
        SpecError: a pair is malformed, or its name is set by the launcher.
    """
    return tuple(_parsed(pair) for pair in written)


def _parsed(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    name = name.removeprefix("--")
    if not equals or not _NAME.fullmatch(name) or not value.isprintable():
        raise SpecError(
            f"--slurm {pair!r} is not name=value of an option of sbatch, e.g. partition=gpu"
        )
    if meant := sorted(one for one in OWN if one.startswith(name)):
        raise SpecError(
            f"--slurm {name}: sbatch reads it as {meant[0]!r}, which moetune sets for every trial;"
            " leave it out"
        )
    return name, value
