"""What may be passed through to sbatch, and what may not."""

import pytest

from tests.rows import each_row
from tuner.errors import SpecError
from tuner.verify.slurm.options import ELSEWHERE, OWN, parse_options, without_overrides

OF_SBATCH = """
account acctg-freq batch bb bbf begin comment constraint container contiguous core-spec
cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution
exclude exclusive export export-file extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input kill-on-invalid-dep
licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice
no-kill nodefile nodelist ntasks-per-core ntasks-per-gpu ntasks-per-socket overcommit oversubscribe
partition power prefer priority profile propagate qos quiet reboot reservation signal
sockets-per-node spread-job switches thread-spec threads-per-core time time-min tmp uid
use-min-nodes verbose wait-all-nodes wckey
"""
"""Every long option of sbatch(1) of Slurm 22.05 that is the user's to set."""


def test_sites_own_options_are_passed_through_in_order() -> None:
    written = ("partition=gpu", "--account=a_1", "constraint=[rack1|rack2]", "gres=gpu:8")
    assert parse_options(written) == (
        ("partition", "gpu"),
        ("account", "a_1"),
        ("constraint", "[rack1|rack2]"),
        ("gres", "gpu:8"),
    )


@each_row(
    ("written", "said"),
    [
        ("partition", "is not name=value"),
        ("=gpu", "is not name=value"),
        ("Partition=gpu", "is not name=value"),
        ("nodes=4", "moetune sets it for every trial"),
        ("tasks-per-node=4", "moetune sets it for every trial"),
        ("output=/etc/passwd", "moetune sets it for every trial"),
        ("clusters=other", "jobs of this cluster alone"),
        ("comment=two words", "has a space"),
        ("comment=a\n#SBATCH --uid=0", "has a space"),
        ("comment=", "has a space"),
        ("comment=$(id)", "has a space"),
        ("comment='x'", "has a space"),
    ],
)
def test_what_could_be_misread_is_refused_with_the_way_out(written: str, said: str) -> None:
    with pytest.raises(SpecError, match=r"--slurm") as raised:
        parse_options([written])
    assert said in str(raised.value)


@each_row("name", OF_SBATCH.split())
def test_no_option_of_sbatch_is_taken_for_short_of_another(name: str) -> None:
    assert parse_options([f"{name}=1"]) == ((name, "1"),)


@each_row("owned", sorted(OWN | ELSEWHERE))
def test_nothing_short_of_an_option_that_is_not_to_be_set_gets_through(owned: str) -> None:
    for end in range(1, len(owned)):
        name = owned[:end]
        with pytest.raises(SpecError, match=f"^--slurm {name}: "):
            parse_options([f"{name}=1-4"])


@each_row("name", ["arra", "clust", "cluster", "no-requ", "outp", "t", "n"])
def test_what_is_short_of_one_is_told_to_be_written_in_full(name: str) -> None:
    with pytest.raises(SpecError, match=r"sbatch may read it as '.*'.*write the whole name"):
        parse_options([f"{name}=1-4"])


def test_a_flood_of_options_is_refused() -> None:
    with pytest.raises(SpecError, match="65 times; 64 are enough"):
        parse_options(["comment=x"] * 65)


def test_variables_of_sbatch_do_not_overrule_what_is_written() -> None:
    environment = {
        "HOME": "/root",
        "SBATCH_ACCOUNT": "a",
        "SBATCH_ARRAY_INX": "1-4",
        "SBATCH_JOB_NAME": "mine",
        "SBATCH_OPEN_MODE": "truncate",
        "SBATCH_PARTITION": "cpu",
        "SBATCH_TIMELIMIT": "1",
    }
    kept = {"HOME": "/root", "SBATCH_ACCOUNT": "a"}
    assert without_overrides((("partition", "gpu"), ("time", "10:00")), environment) == kept
    others = {"SBATCH_PARTITION": "cpu", "SBATCH_TIMELIMIT": "1"}
    assert without_overrides((), environment) == kept | others
