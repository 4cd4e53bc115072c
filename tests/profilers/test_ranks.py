import pytest

from profilers.errors import RankError
from profilers.ranks import RankInfo, first_host, from_environment
from tests.expect import refused
from tests.rows import each_row

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "123456",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_a_process_of_no_launcher_is_a_single_rank() -> None:
    assert from_environment({"PATH": "/bin"}) == RankInfo()
    batch = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert from_environment(batch) == RankInfo()
    shell = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    shell |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
    shell["SLURM_STEP_TASKS_PER_NODE"] = "1"
    assert from_environment(shell).world == 1


def test_torchrun_says_everything_and_wins_inside_srun() -> None:
    info = from_environment(TORCHRUN)
    assert (info.rank, info.world, info.local_rank, info.local_world) == (3, 4, 1, 2)
    assert (info.master_address, info.master_port) == ("node0", 29500)
    assert not info.store_is_served
    assert from_environment({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).store_is_served
    assert from_environment({**SRUN, **TORCHRUN}).rank == 3


def test_srun_connects_on_the_first_node_of_its_step() -> None:
    info = from_environment(SRUN)
    assert (info.rank, info.world, info.local_rank, info.local_world) == (5, 6, 1, 2)
    assert info.master_address == "gpu07"
    assert info.master_port == from_environment({**SRUN, "SLURM_PROCID": "0"}).master_port
    assert info.master_port != from_environment({**SRUN, "SLURM_JOB_ID": "123457"}).master_port
    one = {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    one |= {"SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_LOCALID": "5"}
    info = from_environment(one)
    assert (info.master_address, info.local_world) == ("127.0.0.1", 6)
    other = from_environment({**SRUN, "SLURM_STEP_ID": "1"})
    assert other.master_port != from_environment(SRUN).master_port


def test_open_mpi_needs_an_address_or_slurms_nodes_beyond_one() -> None:
    info = from_environment(OPEN_MPI)
    assert (info.rank, info.world, info.local_rank, info.local_world) == (1, 2, 1, 2)
    assert info.master_address == "127.0.0.1"
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(RankError, match="MASTER_ADDR"):
        from_environment(several)
    assert from_environment({**several, "MASTER_ADDR": "head"}).master_address == "head"
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "SLURM_JOB_NODELIST": "gpu[07-09]"}
    assert from_environment(several).master_address == "gpu07"
    assert from_environment(OPEN_MPI).node is None
    found = from_environment({**SRUN, "SLURMD_NODENAME": "gpu09"})
    assert (found.node, found.node_name) == (2, "gpu09")


def test_ranks_of_mpich_inherit_their_helpers_slurm_variables() -> None:
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    assert from_environment({**SRUN, **hydra}).world == 4
    # With srun --mpi=pmi2 both name the same ranks.
    assert from_environment({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "6"}).local_world == 2
    info = from_environment({"PMI_RANK": "1", "PMI_SIZE": "3"})
    assert (info.rank, info.world, info.local_rank, info.local_world) == (1, 3, 1, 3)


@each_row(
    ("nodelist", "host"),
    [
        ("gpu[07-09,12],login", "gpu07"),
        ("a,b", "a"),
        ("host", "host"),
        ("rack[1,3]-n", "rack1-n"),
        ("n[0001-0512]", "n0001"),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@each_row(
    "change",
    [
        {"RANK": "4"},
        {"RANK": "-1"},
        {"RANK": "x"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "2"},
        {"MASTER_PORT": "http"},
        {"MASTER_PORT": "99999"},
    ],
)
def test_contradictions_are_refused_in_one_line(change: dict[str, str]) -> None:
    with refused(RankError):
        from_environment({**TORCHRUN, **change})


@each_row("tasks", ["", "2(x1)", "two"])
def test_a_task_list_without_this_node_is_refused(tasks: str) -> None:
    with pytest.raises(RankError, match="SLURM_STEP_TASKS_PER_NODE"):
        from_environment({**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks})
