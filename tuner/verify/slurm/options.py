"""The user's sbatch options for trials, passed through as `#SBATCH` lines.

Names are checked for their form only, because clusters have their own; those that the launcher sets
are refused, and so are prefixes of them that sbatch would accept: it reads `arra=1-4` as
`array=1-4` (getopt_long(3)). Values must not contain characters that could end a line or start
another.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from tuner.errors import SpecError

Options = tuple[tuple[str, str], ...]
"""Long options of sbatch without their dashes, and their values."""

OWN: Final = frozenset(
    {
        "array",
        "chdir",
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
"""Options that the launcher sets: a trial is one job of a given shape, found by its name. Sbatch
also accepts `tasks-per-node`, though sbatch(1) does not list it."""

ELSEWHERE: Final = frozenset({"clusters", "cluster-constraint"})
"""Would submit jobs to a cluster that is not queried for them."""

VARIABLES: Final[Mapping[str, str]] = {
    "array": "SBATCH_ARRAY_INX",
    "bb": "SBATCH_BURST_BUFFER",
    "cpu-freq": "SBATCH_CPU_FREQ_REQ",
    "mem": "SBATCH_MEM_PER_NODE",
    "switches": "SBATCH_REQ_SWITCH",
    "time": "SBATCH_TIMELIMIT",
}
"""Variables of sbatch that are not named after their option."""

MOST_OPTIONS: Final = 64
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,63}")
_VALUE: Final = re.compile(r"[A-Za-z0-9_.,:;/@%+=&|!*()\[\]-]{1,1024}")


def parse_options(written: Iterable[str]) -> Options:
    """Read `name=value` pairs.

    Raises:
        SpecError: a pair is malformed, its name is set by the launcher, or its value is unsafe.
    """
    options = tuple(_parsed(pair) for pair in written)
    if len(options) > MOST_OPTIONS:
        raise SpecError(f"--slurm is given {len(options)} times; {MOST_OPTIONS} are enough")
    return options


def without_overrides(options: Options, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that override the lines of a batch script.

    In sbatch, environment variables take precedence (sbatch(1), input environment variables).
    """
    set_options = {*OWN, *(name for name, _ in options)}
    over = {VARIABLES.get(name, f"SBATCH_{name.upper().replace('-', '_')}") for name in set_options}
    return {name: value for name, value in environment.items() if name not in over}


def _parsed(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    name = name.removeprefix("--")
    if not equals or not _NAME.fullmatch(name):
        raise SpecError(
            f"--slurm {pair!r} is not name=value of an option of sbatch, e.g. partition=gpu"
        )
    if name in OWN:
        raise SpecError(f"--slurm {name}: moetune sets it for every trial; leave it out")
    if name in ELSEWHERE:
        raise SpecError(
            f"--slurm {name}: trials are jobs of this cluster alone; start moetune on the other one"
        )
    if meant := sorted(one for one in OWN | ELSEWHERE if one.startswith(name)):
        raise SpecError(
            f"--slurm {name}: sbatch may read it as {meant[0]!r}, which is not to be set; write the"
            " whole name of the option"
        )
    if not _VALUE.fullmatch(value):
        raise SpecError(
            f"--slurm {name}: {value!r} has a space, quote or other character that a batch script"
            " line must not have"
        )
    return name, value
