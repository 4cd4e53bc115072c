"""Whatever is refused is refused in exactly one line of stderr, with its exit code."""

from pathlib import Path

import pytest

from tests.tuner.cli.refusals import refusal
from tests.tuner.models import MODELS
from tuner.cli.app import run

REFUSED = (
    "plan missing.yaml -o out",
    "plan",
    "plan -o",
    "plan --nope -o out",
    "plan a.yaml b.yaml -o out",
    "plan -o out",
    "plan -o out --top 0 a.yaml",
    "plan -o out --top many a.yaml",
    "plan -o out --time-limit soon a.yaml",
    "plan -o out --time-limit -1s a.yaml",
    "plan -o out --goal dance",
    "plan -o out --model {mixtral} --device h100-sxm",
    "plan -o out --model {mixtral} --device h1000 --devices 8",
    "plan -o out --model {mixtral} --device h100-sxm --devices many",
    "plan -o out --model {mixtral} --device h100-sxm --devices 64 --precision fp32",
    "plan -o out --model missing.json --device h100-sxm --devices 8",
    "plan -o out --goal serve --model {mixtral} --device h100-sxm --devices 8 --engine nope",
    "frobnicate",
    "--nope",
    "verify",
    "verify nowhere",
    "verify nowhere/plan.json",
    "verify nowhere --trials 0",
    "verify nowhere --launcher ship",
    "explain",
    "explain nowhere",
    "explain nowhere/plan.json",
    "explain nowhere --what-if nodes",
    "report nowhere",
    "report nowhere/plan.json --format gif",
    "estimate",
    "estimate missing.yaml --launch run.sh",
    "estimate missing.yaml",
    "estimate missing.yaml --launch run.sh --format gif",
    "check nowhere",
    "check nowhere --jobs 0",
    "backtest missing.csv",
    "calibrate nowhere missing.csv -o out",
    "schema",
    "schema nothing",
    "profile",
    "profile show nowhere",
    "profile diff nowhere elsewhere",
    "profile import nothing -o out",
    "profile --suite nothing -o out",
    "init --goal dance -o spec.yaml",
    "doctor extra",
)


def test_every_refusal_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    failures = []
    for words in REFUSED:
        code = run(words.format(mixtral=MODELS / "mixtral-8x7b" / "config.json").split())
        printed = capsys.readouterr()
        said = f"moetune {words}: exit {code}: {printed.err!r}, stdout {printed.out[:60]!r}"
        if code != 2 or printed.out:
            failures.append(said)
        if len(printed.err.splitlines()) != 1 or not printed.err.startswith("moetune: "):
            failures.append(said)
    assert not failures, "\n".join(failures)


def test_a_usage_error_says_where_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, ["plan", "--nope", "-o", "out"])
    assert said.endswith(". Try 'moetune plan --help'.")
    assert ".." not in said
