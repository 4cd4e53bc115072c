"""Chooses the network of a trial by the user's command: its own namespace where that is safe.

Engines that require `env://` rendezvous through a TCPStore, which listens on every address of the
machine without authentication (tuner/engines/launchers/torchrun.py). A command that is known to
stay on this machine therefore runs in a namespace with loopback only (tuner/verify/own_network.py):

    bash {launch}/run.sh ...    what we emitted, with one node
    torchrun ...                of one node, or `python -m torch.distributed.run ...`

Anything else may need the network (srun, mpirun, ssh, docker, a script of the user's) and keeps the
host's, as do decisions of several nodes. Then, and if no namespace can be created, a message says
what listens. A program that downloads data or a tokenizer fails without a network; `--network host`
gives it the host's.

Not covered: deployments, whose clients connect over loopback from here.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from profilers.local_ranks import LOOPBACK_ONLY
from tuner.verify import own_network
from tuner.verify.launcher import LaunchResult

Network = Literal["own", "host"]

SHELLS: Final = frozenset({"bash", "sh"})
PYTHON: Final = re.compile(r"(pypy|python)[0-9.]*")
TORCHRUN_MODULE: Final = ("-m", "torch.distributed.run")
PLACES: Final = ("nnodes", "rdzv-endpoint", "master-addr")
"""Options of torchrun that may name other machines; it accepts prefixes of them."""
SHORTEST: Final = len("nn")
OPTION: Final = re.compile(r"--([a-z][a-z_-]*)(?:=(.*))?")
PLACE_VARIABLES: Final = ("PET_NNODES", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR")
"""Environment variables of those options."""
HERE: Final = re.compile(r"1|(localhost|127\.0\.0\.1)(:\d+)?")
"""Their values for a job on this machine."""
PROBE_S: Final = 10.0
NEEDS_NETWORK: Final = re.compile(
    r"name resolution|Name or service not known|Network is unreachable|No route to host"
    r"|Failed to resolve|Max retries exceeded|EAI_AGAIN"
)
"""Error messages of programs that need more than loopback."""

DANGER: Final = (
    "while one runs, PyTorch's rendezvous (torchrun, env://) listens on every address of it without"
    " authentication"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A command as it is started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    is_own: bool
    """Whether it runs in its own network namespace."""

    def explained(self, result: LaunchResult, *, tail: str) -> LaunchResult:
        """Add the remedy to the result of a trial that failed for lack of a network."""
        if not self.is_own or result.status != "crashed" or not NEEDS_NETWORK.search(tail):
            return result
        remedy = "it had no network but loopback: --network host gives it this machine's"
        return replace(result, reason=f"{result.reason}; {remedy}")


@dataclass(slots=True, kw_only=True)
class TrialNetwork:
    """Decides for each trial; prints a message once if trials are reachable from outside."""

    choice: Network = "own"
    on_message: Callable[[str], None] = field(default=lambda _line: None)
    probe: Callable[[], str] = field(default=lambda: obstacle())
    _obstacle: str | None = None
    _has_reported: bool = False

    def start(
        self,
        command: Sequence[str],
        *,
        script: Path,
        nodes: int,
        environment: Mapping[str, str],
    ) -> Start:
        """Return how a command is started.

        Args:
            command: of the trial.
            script: `run.sh` that was emitted for it.
            nodes: of its decision.
            environment: of the command.
        """
        reason = self._reason(command, script=script, nodes=nodes, environment=environment)
        if reason:
            if not self._has_reported:
                self.on_message(f"trials share this machine's network, {reason}: {DANGER}")
            self._has_reported = True
            return Start(command=tuple(command), environment=environment, is_own=False)
        return Start(
            command=(sys.executable, "-IS", own_network.__file__, *command),
            # No other network interface exists there, whatever a login script sets.
            environment={**environment, **LOOPBACK_ONLY},
            is_own=True,
        )

    def _reason(
        self, command: Sequence[str], *, script: Path, nodes: int, environment: Mapping[str, str]
    ) -> str:
        """Return why a command keeps the host's network; empty if it does not."""
        if self.choice == "host":
            return "as --network host says"
        if nodes > 1 or environment.get("NNODES", "1") != "1":
            return "as their nodes must reach each other"
        if any(not HERE.fullmatch(environment.get(name) or "1") for name in PLACE_VARIABLES):
            return "as PET_ variables of torchrun name other machines"
        if not stays_here(command, script=script):
            return "as only 'bash {launch}/run.sh' and torchrun are known to work without it"
        if self._obstacle is None:
            self._obstacle = self.probe()
        if self._obstacle:
            return f"as no network namespace can be created here ({self._obstacle})"
        return ""


def stays_here(command: Sequence[str], *, script: Path) -> bool:
    """Whether a single-node command is known to start nothing on other machines."""
    program, *words = command
    if shutil.which(program) is None:
        return False
    name = Path(program).name
    if Path(program) == script or (name in SHELLS and words[:1] == [str(script)]):
        return True
    if PYTHON.fullmatch(name):
        while words[:1] and words[0] in ("-P", "-u", "-S"):
            words = words[1:]
        if tuple(words[:2]) != TORCHRUN_MODULE:
            return False
    elif name != "torchrun":
        return False
    for word, following in zip(words, [*words[1:], ""], strict=True):
        named = OPTION.fullmatch(word)
        if named and _is_place(named[1]) and not HERE.fullmatch(named[2] or following):
            return False
    return True


def _is_place(option: str) -> bool:
    name = option.replace("_", "-")
    return len(name) >= SHORTEST and any(place.startswith(name) for place in PLACES)


def obstacle() -> str:
    """Try to create a network namespace; return why that fails, or an empty string."""
    try:
        done = subprocess.run(
            [sys.executable, "-IS", own_network.__file__],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit {done.returncode}")[:200]
