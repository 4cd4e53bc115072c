"""The command of an engine's server as bash, and the variables that it reads.

    MODEL        path or name of the weights
    DRAFT_MODEL  the same of a draft layer that is trained separately
    PORT         of its HTTP server; the next 199 belong to the instance, too, and SGLang uses a few
                 from PORT + 233 on (ZMQ_TCP_PORT_DELTA), clear of the next instance's
    NNODES       machines of the instance; NODE_RANK: this machine; MASTER_ADDR: the first one
    HOST_IP      address under which other instances reach this machine
    PLACEMENT    folder of an expert placement, where one is served

Words are literal bash: text from elsewhere passes through `shlex.quote` first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner.engines.serving.shape import GroupShape

PORTS_PER_INSTANCE = 200
FIRST_PORT = 30_000

RENDEZVOUS = '"$((PORT + 100))"'
"""Rendezvous port of an instance's machines; SGLang also uses the ports after it."""
BOOTSTRAP_OFFSET = 10
BOOTSTRAP = f'"$((PORT + {BOOTSTRAP_OFFSET}))"'
"""Port at which decode instances request KV caches from a prefill instance."""
SIDE_CHANNEL_OFFSET = 20
SIDE_CHANNEL = f'"$((PORT + {SIDE_CHANNEL_OFFSET}))"'
"""First of the side-channel ports (worker handshake), one per data-parallel rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """One process of an instance."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Values as bash words."""
    before: str = ""
    """Bash that runs first."""

    @property
    def bash(self) -> str:
        """The lines that start the server."""
        exports = "".join(f"export {name}={value}\n" for name, value in self.environment.items())
        return f"{exports}{self.before}exec " + " \\\n  ".join(self.words) + "\n"


MODEL_CHECK = ': "${MODEL:?set MODEL to the path or name of the weights}"\n'
DRAFT_CHECK = ': "${DRAFT_MODEL:?set DRAFT_MODEL to the path or name of the EAGLE draft layer}"\n'


def checks(*, draft_model: bool) -> str:
    """Return bash that fails if no weights are named."""
    return MODEL_CHECK + (DRAFT_CHECK if draft_model else "")


def variables(shape: GroupShape, *, has_rendezvous: bool, draft_model: bool = False) -> str:
    """Return bash that sets the variables and refuses another number of machines.

    Args:
        shape: what is started.
        has_rendezvous: the machines of an instance rendezvous at the address of the first;
            otherwise a launcher such as MPI connects them.
        draft_model: DRAFT_MODEL is read.
    """
    lines = [
        f'PORT="${{PORT:-{FIRST_PORT}}}"',
        'HOST_IP="${HOST_IP:-$(hostname -i)}"',
        'HOST_IP="${HOST_IP%% *}"',
    ]
    if shape.nodes > 1:
        lines += [
            f'NNODES="${{NNODES:-{shape.nodes}}}"',
            f'case "$NNODES" in 1 | {shape.nodes}) ;; *)',
            f'  echo "NNODES $NNODES is neither 1 nor {shape.nodes}, the machines of one instance"'
            " >&2",
            "  exit 2 ;;",
            "esac",
        ]
    if shape.nodes > 1 and has_rendezvous:
        lines += [
            "if (( NNODES > 1 )); then",
            '  : "${NODE_RANK:?set NODE_RANK and MASTER_ADDR}"',
            '  : "${MASTER_ADDR:?set NODE_RANK and MASTER_ADDR}"',
            "fi",
            'NODE_RANK="${NODE_RANK:-0}"',
        ]
    return checks(draft_model=draft_model) + "".join(f"{line}\n" for line in lines)
