"""Launch of this process: as a single rank or one of many, and by which launcher.

A pure function of the environment. In order of precedence:

    torchrun   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    mpirun     OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE (Open MPI)
    mpirun     PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS (MPICH, Intel MPI)
    srun       SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, inside a step (SLURM_STEP_ID)
    mpirun     only PMI_RANK, PMI_SIZE (other process managers)

MPICH's mpirun starts its own helpers with srun where it finds Slurm, so that ranks inherit the
helper's SLURM_ variables: theirs come first. A batch script that is not yet inside a step is one
process.

Under srun and torchrun nodes are those that the launcher counts, even where several are one host;
mpirun does not say, and hosts are counted.

Under srun rank 0 runs on the first node of the list, where the others connect to it; so it does
under mpirun inside an allocation of Slurm. Elsewhere mpirun on several nodes needs MASTER_ADDR.
Where no port is given it is derived from the number of job and step, so that jobs on one node do
not connect to each other.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from profilers.errors import RankError

LOOPBACK = "127.0.0.1"
FIRST_PORT = 20_000
NUM_PORTS = 20_000
MOST_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Rank of this process and the address where the ranks connect."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node: int | None = 0
    """Number of this node, as the launcher counts them; None where it does not say."""
    node_name: str = ""
    """Slurm's name of this node; empty under other launchers."""
    master_address: str = LOOPBACK
    master_port: int = FIRST_PORT
    store_is_served: bool = False
    """The launcher keeps the store at that port; rank 0 must not open it again."""

    def __post_init__(self) -> None:
        for here, count in ((self.rank, self.world), (self.local_rank, self.local_world)):
            if not 0 <= here < count:
                raise RankError(
                    f"rank {here} of {count} does not exist; check the launcher's environment"
                )


def from_environment(environment: Mapping[str, str]) -> RankInfo:
    """Tell how this process was started.

    Raises:
        RankError: the launcher's variables are incomplete or contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _torchrun(environment)
    if "OMPI_COMM_WORLD_RANK" in environment:
        return _mpirun(environment, _OPEN_MPI)
    if "PMI_RANK" in environment and _HYDRA.local_rank in environment:
        return _mpirun(environment, _HYDRA)
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _srun(environment)
    if "PMI_RANK" in environment:
        return _mpirun(environment, _HYDRA)
    return RankInfo()


def first_host(nodelist: str) -> str:
    """First host of a Slurm list: `gpu[07-09,12],login` -> `gpu07`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodelist.strip())
    if match is None:
        raise RankError(f"SLURM_JOB_NODELIST {nodelist!r} names no host; set MASTER_ADDR")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def _torchrun(environment: Mapping[str, str]) -> RankInfo:
    world = _count(environment, "WORLD_SIZE")
    rank = _count(environment, "RANK")
    local_world = _count(environment, "LOCAL_WORLD_SIZE", default=world)
    return RankInfo(
        rank=rank,
        world=world,
        local_rank=_count(environment, "LOCAL_RANK", default=0),
        local_world=local_world,
        node=_count(environment, "GROUP_RANK", default=rank // max(local_world, 1)),
        master_address=environment.get("MASTER_ADDR", LOOPBACK),
        master_port=_port(environment, job=""),
        store_is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _mpirun(environment: Mapping[str, str], names: "_MpiNames") -> RankInfo:
    world = _count(environment, names.world)
    rank = _count(environment, names.rank)
    local_world = _count(environment, names.local_world, default=world)
    address = environment.get("MASTER_ADDR", LOOPBACK)
    if local_world < world and "MASTER_ADDR" not in environment:
        if not environment.get("SLURM_JOB_NODELIST"):
            raise RankError(
                "mpirun on several nodes does not say where rank 0 runs; export MASTER_ADDR=<its"
                " host> to all ranks (Open MPI: -x MASTER_ADDR=<host>)"
            )
        address = first_host(environment["SLURM_JOB_NODELIST"])
    return RankInfo(
        rank=rank,
        world=world,
        local_rank=_count(environment, names.local_rank, default=rank % max(local_world, 1)),
        local_world=local_world,
        node=None,
        master_address=address,
        master_port=_port(environment, job=environment.get("PMIX_NAMESPACE", "")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MpiNames:
    """Variables of one family of MPI implementations."""

    rank: str
    world: str
    local_rank: str
    local_world: str


_OPEN_MPI = _MpiNames(
    rank="OMPI_COMM_WORLD_RANK",
    world="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world="OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = _MpiNames(
    rank="PMI_RANK",
    world="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world="MPI_LOCALNRANKS",
)
"""MPICH and Intel MPI."""


def _srun(environment: Mapping[str, str]) -> RankInfo:
    # A shell that salloc opened is a step of one task inside a job of many.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    world = _count(environment, size)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    several = _count(environment, "SLURM_STEP_NUM_NODES", default=1) > 1
    address = first_host(nodes) if several else LOOPBACK
    local_rank = _count(environment, "SLURM_LOCALID")
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", str(world))
    node = _count(environment, "SLURM_NODEID", default=0)
    local_world = max(_tasks_here(tasks, node=node), 1)
    return RankInfo(
        rank=_count(environment, "SLURM_PROCID"),
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        node=node,
        node_name=environment.get("SLURMD_NODENAME", ""),
        master_address=environment.get("MASTER_ADDR", address),
        master_port=_port(
            environment,
            job=environment.get("SLURM_JOB_ID", "") + environment["SLURM_STEP_ID"],
        ),
    )


def _tasks_here(tasks_per_node: str, *, node: int) -> int:
    """Read Slurm's run-length list, e.g. `4(x2),1`: tasks on the node of this index."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise RankError(f"SLURM_STEP_TASKS_PER_NODE {tasks_per_node!r} is not a task list")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    if node >= len(counts):
        raise RankError(f"node {node} is not in SLURM_STEP_TASKS_PER_NODE {tasks_per_node!r}")
    return counts[node]


def _port(environment: Mapping[str, str], *, job: str) -> int:
    if "MASTER_PORT" in environment:
        port = _count(environment, "MASTER_PORT")
        if not 0 < port <= MOST_PORT:
            raise RankError(f"MASTER_PORT {port} is no port; set it to one of 1 to {MOST_PORT}")
        return port
    digits = "".join(re.findall(r"\d", job))[-9:]
    return FIRST_PORT + int(digits or "0") % NUM_PORTS


def _count(environment: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d{1,9}", text):
        raise RankError(f"{name} is {text!r}, must be a count; start it again with one launcher")
    return int(text)
