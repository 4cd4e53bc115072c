"""Shell text whose conditions and own folder are known without running it."""

import time
from typing import Any

import pytest

from tests.rows import each_row
from tuner.engines.reading.shell_words import shell_text
from tuner.errors import SpecError

SCRIPT = """
USE=${USE:-1}
OTHER=${OTHER:-0}
ARGS=(--a 1)
if [ "${USE}" = 1 ]; then
  ARGS+=(--fsdp)
else
  ARGS+=(--not-fsdp)
fi
if [[ $OTHER == "1" ]]; then ARGS+=(--other); elif [ "$USE" -eq 1 ]; then ARGS+=(--elif); fi
if [ "$OTHER" -ne 1 ]; then
  if [ -z "$USE" ]; then ARGS+=(--empty); else ARGS+=(--nested); fi
fi
if [ "$OTHER" = 1 ]; then
  for i in 1 2; do ARGS+=(--loop); done
fi
if [ -n "$NOBODY_SAYS" ]; then ARGS+=(--unknown); fi
if [ "$USE" = 1 ] && [ "$NOBODY_SAYS" = 2 ]; then ARGS+=(--compound); fi
python train.py "${ARGS[@]}"
"""


@each_row(
    ("environment", "taken", "looped"),
    (
        ({}, ["--fsdp", "--elif", "--nested"], []),
        ({"USE": "0"}, ["--not-fsdp", "--nested"], []),
        # A loop is named and not run.
        ({"OTHER": "1"}, ["--fsdp", "--other"], ["ARGS+=--loop"]),
    ),
)
def test_a_condition_whose_sides_are_written_out_takes_its_branch(
    environment: dict[str, Any], taken: Any, looped: Any
) -> None:
    result = shell_text(SCRIPT, source="run.sh", environment=environment)
    assert result.commands[-1].words == ("python", "train.py", "--a", "1", *taken)
    # False and unknown is false, whatever the unknown.
    compound = [] if environment.get("USE") == "0" else ["ARGS+=--compound"]
    assert [*result.skipped] == [*looped, "ARGS+=--unknown", *compound]


@each_row(
    ("text", "printed"),
    (
        ("A=2; B=8\nrun $((A * B))", ["16"]),
        ("A=2\nrun --x=$(( (A + 1) * 4 % 5 ))", ["--x=2"]),
        (
            "A=2; B=4\nrun $(expr 16 / $A / $B) `expr $A \\* 3` $(expr length x)",
            ["2", "6", "$(expr", "length", "x)"],
        ),
        ("A=2\nrun $(( A > 8 ? A : 8 )) $((A*UNSET))", ["8", "$((A*UNSET))"]),
        ("A=4\nif (( A >= 4 )); then B=(--ge); fi\nrun ${B[@]}", ["--ge"]),
        ('A=4\nif [ "$A" -gt 4 ]; then B=1; elif [[ $A -le 4 ]]; then B=2; fi\nrun $B', ["2"]),
        ("A=4\nif [ $A -lt 4 ]; then B=1; else B=2; fi\nrun $B", ["2"]),
        ('if [[ ! -z "" || 1 -eq 2 ]]; then B=1; else B=2; fi\nrun $B', ["2"]),
        ("run $((1/0)) $((2**9)) $((" + "9*" * 30 + "9))", ["$((1/0))", "$((2**9))"]),
    ),
)
def test_arithmetic_and_its_tests_take_bare_names_and_spaces(text: str, printed: Any) -> None:
    words = shell_text(text, source="run.sh").commands[-1].words
    assert words[1 : 1 + len(printed)] == tuple(printed), text


@each_row(
    ("text", "taken"),
    (
        ('A=8\n[ "$A" -gt 1 ] && B+=(--one)\n[[ $A -gt 8 ]] && B+=(--no)', ["--one"]),
        ('A=8\n[ "$A" -gt 1 ] || B+=(--no)\n[[ $A -gt 8 ]] || B+=(--one)', ["--one"]),
        ("mkdir x && B+=(--one)", ["--one"]),
        ('[ -n "$NOBODY_SAYS" ] && B+=(--unknown)', []),
        ("pgrep x || B+=(--unknown)", []),
    ),
)
def test_a_test_decides_the_command_that_it_is_joined_to(text: str, taken: Any) -> None:
    result = shell_text(f"B=()\n{text}\nrun ${{B[@]}}", source="run.sh")
    assert result.commands[-1].words == ("run", *taken), text
    assert bool(result.skipped) == (not taken), text


def test_documents_and_redirections_lose_no_words() -> None:
    result = shell_text(
        "TP=4\ncat <<EOF > /tmp/options.yaml\ntp: $TP\nnote: don't\nEOF\n"
        'C=$(cat <<\'END\'\n{"a": "it\'s"}\nEND\n)\n'
        "bash <<'EOF'\nrun $TP \"$C\"\nEOF\n",
        source="run.sh",
    )
    assert result.files == {"options.yaml": "tp: 4\nnote: don't\n"}
    assert result.commands[-1].words == ("run", "4", '{"a":', '"it\'s"}')
    text = "run <MODEL> --a 1 >> log.txt 2>&1 --b 2 < in &> out --c"
    words = shell_text(text, source="run.sh").commands[0].words
    assert words == ("run", "<MODEL>", "--a", "1", "--b", "2", "--c")


def test_what_only_a_running_shell_knows_is_named() -> None:
    for text in (
        'H=`hostname`\nif [ "$H" = n0 ]; then A=1; fi',
        'TP=1\nif nvidia-smi; then TP=8; fi\nif [ "$TP" = 1 ]; then A=1; fi',
        'TP=1\nread TP\nif [ "$TP" = 1 ]; then A=1; fi',
        'TP=1\nsource settings.sh\nif [ "$TP" = 1 ]; then A=1; fi',
        "M=y\nif [[ $M == [Yy] ]]; then A=1; fi",
        'if [ -n "${SLURM_JOB_ID:-}" ]; then A=1; fi',
        'if [ "${SLURM_NNODES:-1}" = 1 ]; then A=1; fi',
    ):
        result = shell_text(f'{text}\nrun "$A"', source="run.sh")
        assert result.skipped[-1] == "A=1", text
        assert result.commands[-1].words == ("run", "$A")
    again = shell_text(
        'source lib.sh\nTP=1\nif [ "$TP" = 1 ]; then A=1; fi\nrun $A', source="run.sh"
    )
    assert again.commands[-1].words == ("run", "1")
    padded = shell_text("N=08\nif [ $N -eq 8 ]; then A=1; fi\nrun $A", source="run.sh")
    assert padded.commands[-1].words == ("run", "1")


@each_row(
    "folder",
    [
        '"$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"',
        '$( cd "$( dirname "${BASH_SOURCE[0]}" )" >/dev/null 2>&1 && pwd -P )',
        '"$(CDPATH= cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null && pwd)"',
        '$(dirname "$0")',
        "$(dirname $0)",
    ],
)
def test_the_folder_of_the_script_is_known(folder: str) -> None:
    read: list[str] = []

    def beside(name: str) -> str:
        read.append(name)
        return "--tensor-model-parallel-size 2\n# --not this\n"

    text = f'HERE={folder}\nmapfile -t ARGS < <(grep -v "^#" "$HERE/args.txt")\nrun "${{ARGS[@]}}"'
    result = shell_text(text, source="run.sh", beside=beside)
    assert read == ["./args.txt"]
    assert result.commands[-1].words == ("run", "--tensor-model-parallel-size", "2")


def test_loops_without_end_are_refused_at_once() -> None:
    begun_s = time.process_time()
    for text in ("for\n" * 49_000, "if true; then\n" * 10_000, "while [ 1 ]; do " * 10_000):
        with pytest.raises(SpecError, match="more than 100 tests and loops"):
            shell_text(text, source="run.sh")
    assert time.process_time() - begun_s < 20.0


def test_arguments_are_shifted_by_their_number_and_do_not_double_without_end() -> None:
    (command,) = shell_text("set -- a b c\nshift 2\nserve $1 $#", source="x").commands
    assert command.words[:2] == ("serve", "c")
    with pytest.raises(SpecError, match="characters"):
        shell_text("set -- a b\n" + 'set -- "$@" "$@"\n' * 40, source="x")
