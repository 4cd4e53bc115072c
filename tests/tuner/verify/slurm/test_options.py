"""What may be passed through to sbatch, and what may not."""

import pytest

from tuner.errors import SpecError
from tuner.verify.slurm.options import parsed_options


def test_sites_own_options_are_passed_through_in_order() -> None:
    written = ("partition=gpu", "--account=a_1", "constraint=[rack1|rack2]", "gres=gpu:8")
    assert parsed_options(written) == (
        ("partition", "gpu"),
        ("account", "a_1"),
        ("constraint", "[rack1|rack2]"),
        ("gres", "gpu:8"),
    )


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("partition", "is not name=value"),
        ("=gpu", "is not name=value"),
        ("Partition=gpu", "is not name=value"),
        ("nodes=4", "moetune sets it for every trial"),
        ("output=/etc/passwd", "moetune sets it for every trial"),
        ("clusters=other", "jobs of this cluster alone"),
        ("comment=two words", "holds a space"),
        ("comment=a\n#SBATCH --uid=0", "holds a space"),
        ("comment=", "holds a space"),
        ("comment=$(id)", "holds a space"),
        ("comment='x'", "holds a space"),
    ],
)
def test_what_could_be_misread_is_refused_with_the_way_out(written: str, said: str) -> None:
    with pytest.raises(SpecError, match=r"--slurm") as raised:
        parsed_options([written])
    assert said in str(raised.value)


def test_a_flood_of_options_is_refused() -> None:
    with pytest.raises(SpecError, match="65 times; 64 are enough"):
        parsed_options(["comment=x"] * 65)
