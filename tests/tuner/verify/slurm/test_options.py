"""What may be passed through to sbatch, and what may not."""

import pytest

from tests.expect import refused
from tests.rows import each_row
from tuner.errors import SpecError
from tuner.verify.slurm import OWN, parse_options

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
        ("comment=a\n--uid=0", "is not name=value"),
        ("nodes=4", "'nodes', which moetune sets for every trial"),
        ("output=/etc/passwd", "'output', which moetune sets for every trial"),
        ("clusters=other", "'clusters', which moetune sets for every trial"),
    ],
)
def test_what_could_be_misread_is_refused_with_the_way_out(written: str, said: str) -> None:
    with refused(SpecError, said, match=r"--slurm"):
        parse_options([written])


@each_row("name", OF_SBATCH.split())
def test_no_option_of_sbatch_is_taken_for_short_of_another(name: str) -> None:
    assert parse_options([f"{name}=1"]) == ((name, "1"),)


@each_row("owned", sorted(OWN))
def test_nothing_short_of_an_option_that_is_not_to_be_set_gets_through(owned: str) -> None:
    for end in range(1, len(owned) + 1):
        name = owned[:end]
        with pytest.raises(SpecError, match=f"^--slurm {name}: "):
            parse_options([f"{name}=1-4"])
