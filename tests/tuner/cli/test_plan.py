"""`moetune plan` as it is typed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from profilers.records import Profile
from tests.expect import contains
from tests.printed import flat
from tests.rows import each_row
from tests.tuner.cli.refusals import Captured, output, refusal
from tuner import api
from tuner.cli import app as frame
from tuner.goals.train_folder import read_plan
from tuner.plans.folder import PLAN_NAME
from tuner.plans.train import Plan
from tuner.search.progress import PlanningEvent
from tuner.units import format_ratio

SHEET_SPEC = (
    Path(__file__).parents[3] / "examples" / "worked" / "mixtral-8x7b-64-a100" / "spec.yaml"
)

FEW = {
    "tensor_model_parallel_size": [1, 2],
    "context_parallel_size": [1],
    "virtual_pipeline_model_parallel_size": [1, 4],
    "expert_model_parallel_size": [8],
    "micro_batch_size": [1],
}
"""Few enough candidates to search within two seconds."""

Spec = Callable[..., Path]
Store = Callable[[Path, Profile], Path]


@pytest.fixture
def sheet_spec(tmp_path: Path) -> Callable[..., Path]:
    """The example with few candidates: sheet_spec(zero_stage=[1]) -> its spec."""

    def written(**search: list[int]) -> Path:
        spec = yaml.safe_load(SHEET_SPEC.read_text(encoding="utf-8"))
        model = str((SHEET_SPEC.parent / spec["model"]).resolve())
        path = tmp_path / "spec.yaml"
        changed = spec | {"model": model, "search": FEW | search}
        path.write_text(yaml.safe_dump(changed), encoding="utf-8")
        return path

    return written


def _plan(spec: Path, out: Path, *options: str) -> int:
    return frame.run(["plan", str(spec), "-o", str(out), *options])


def test_it_says_the_decision_what_is_proven_and_what_binds(
    bound_spec: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "plan"
    assert _plan(bound_spec, out) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    plan = read_plan(out)
    assert plan.decision is not None
    contains(
        printed.out,
        "\nmodel          bound0, ",
        "\nplan           2 devices: TP 1, ",
        f"ZeRO {plan.decision.zero_stage}, micro-batch {plan.decision.micro_batch_size}",
        "\nCertificate: proven optimal under the model (",
    )
    assert f"Bound by {plan.binding_constraint}" in flat(printed.out)
    contains(
        printed.out,
        f"\n{len(plan.provenance.notes)} notes, shown by --verbose",
        f"next: moetune verify {out}",
    )
    text = output(capsys, ["plan", bound_spec, "-o", out, "--verbose"])
    assert "\n- routing is assumed balanced" in text


def test_json_is_the_stored_plan(bound_spec: Path, tmp_path: Path, capsys: Captured) -> None:
    text = output(capsys, ["plan", bound_spec, "-o", tmp_path / "plan", "--json", "--top", "2"])
    assert text == (tmp_path / "plan" / PLAN_NAME).read_text()
    assert Plan.model_validate_json(text).files
    fields = json.loads(text)
    assert fields["certificate"]["status"] == "optimal"
    low, high = fields["predicted"]["step_time_s_band"]
    assert low < fields["predicted"]["step_time_s"] < high


def test_what_does_not_fit_is_exit_code_1_with_the_nearest_way_out(
    tiny_spec: Spec,
    analytic_profile: Profile,
    store_profile: Store,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    store_profile(tmp_path / "profile", analytic_profile)
    search = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    spec = tiny_spec(pool={"memory_per_device": "1MiB"}, search=search)
    contains(
        flat(output(capsys, ["plan", spec, "-o", tmp_path / "plan"], code=1)),
        "Certificate: infeasible (",
        "limit not met memory_per_device",
        "Changes that make a configuration fit",
        " more per device",
    )
    assert not (tmp_path / "plan" / "launch").exists()
    assert "Changes that make a configuration fit" in output(
        capsys, ["explain", tmp_path / "plan", "--what-if", "none"], code=1
    )
    assert "the plan has nothing to launch" in refusal(capsys, ["verify", tmp_path / "plan"])


def test_a_former_layout_solver_is_noted_in_one_line(
    bound_spec: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert _plan(bound_spec, tmp_path / "plan", "--solver", "milp") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--solver milp: ignored, ")
    assert line in read_plan(tmp_path / "plan").provenance.notes


def test_a_solver_that_changes_nothing_is_refused(
    sheet_spec: Spec, tmp_path: Path, capsys: Captured
) -> None:
    for spec, why in (
        (sheet_spec(), "only a plan on a profile of the reference step reads it"),
        ("serving/mixed-pool.yaml", "a plan of goal.kind 'serve' solves no layout"),
        ("placement/balance.yaml", "a plan of goal.kind 'place' solves no layout"),
    ):
        assert _plan(SHEET_SPEC.parents[2] / spec, tmp_path / "plan", "--solver", "exact") == 2, (
            spec
        )
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"moetune: --solver exact: {why}")


@each_row(
    ("options", "line"),
    [
        (["--solver", "zzz"], "moetune: --solver zzz: only a plan on a profile of the reference "),
        (["--time-limit", "60"], "moetune: --time-limit: '60' has no unit"),
        (["--time-limit", "1 fortnight"], "moetune: --time-limit: "),
        (["--time-limit", "0s"], "moetune: --time-limit: '0s' must be more than nothing"),
        (["--top", "0"], "moetune: Invalid value for '--top'"),
        (["--profile", "/nowhere"], "moetune: /nowhere does not exist"),
        (["--bogus"], "moetune: No such option: --bogus"),
    ],
)
def test_a_wrong_option_is_one_line(
    bound_spec: Path, tmp_path: Path, capsys: Captured, options: list[str], line: str
) -> None:
    assert refusal(capsys, ["plan", bound_spec, "-o", tmp_path / "plan", *options]).startswith(line)
    assert not (tmp_path / "plan").exists()


def test_a_missing_spec_and_a_missing_out_are_one_line(tmp_path: Path, capsys: Captured) -> None:
    spec = tmp_path / "none.yaml"
    assert "none.yaml" in refusal(capsys, ["plan", spec, "-o", tmp_path / "plan"])
    assert "--out" in refusal(capsys, ["plan", spec])


@each_row("place", ["{tmp}/file/plan", "/sys/moetune-plan"])
def test_a_place_that_cannot_be_written_is_exit_code_3(
    bound_spec: Path, tmp_path: Path, capsys: Captured, place: str
) -> None:
    (tmp_path / "file").write_text("")
    line = refusal(capsys, ["plan", bound_spec, "-o", place.format(tmp=tmp_path)], code=3)
    assert line.startswith("moetune: cannot write ")
    assert "choose another place with -o" in line


def test_help_lists_every_option(capsys: Captured) -> None:
    text = output(capsys, ["plan", "--help"])
    for option in ("--out", "--profile", "--top", "--time-limit", "--json"):
        assert option in text


def test_what_was_preferred_and_what_room_is_left_in_memory_is_said(
    sheet_spec: Spec, tmp_path: Path, capsys: Captured
) -> None:
    printed = output(capsys, ["plan", sheet_spec(), "-o", tmp_path / "plan"])
    plan = read_plan(tmp_path / "plan")
    assert plan.preferred is not None
    assert plan.preferred.reasons[0] in printed
    contains(
        printed,
        f"{format_ratio(plan.preferred.slower_ratio)} slower than the fastest found",
        "chance of running out of memory",
    )
    assert "preference:" in output(capsys, ["explain", tmp_path / "plan", "--what-if", "none"])


def test_a_search_tells_its_stages_and_json_stays_alone_on_stdout(
    sheet_spec: Spec, tmp_path: Path, capsys: Captured
) -> None:
    events: list[PlanningEvent] = []
    spec = sheet_spec(
        tensor_model_parallel_size=[1], pipeline_model_parallel_size=[2], zero_stage=[1]
    )
    api.plan(spec, watch=events.append)
    stages = list(dict.fromkeys(one.stage for one in events))
    assert stages == ["space", "bounds", "search", "choice", "memory", "targets"]
    assert any("gap" in one.text for one in events)
    assert frame.run(["plan", str(spec), "-o", str(tmp_path / "plan"), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert Plan.model_validate_json(printed.out).decision is not None


def _interrupted_in_its_search(out: Path) -> int | None:
    """Exit code of a plan that met Ctrl-C in its search; None: it ended before the word was out."""
    command = [sys.executable, "-m", "tuner", "plan", str(SHEET_SPEC), "-o", str(out)]
    terminal, its_end = os.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=its_end) as started:
        os.close(its_end)
        shown = b""
        try:
            # Not earlier: interrupted while it imports, Python may end by the signal itself.
            while b"search" not in shown:
                shown += os.read(terminal, 1024)
        except OSError:
            # Nobody holds the other end any more.
            started.communicate(timeout=60)
            assert started.returncode == 0, shown
            return None
        finally:
            started.send_signal(signal.SIGINT)
            started.communicate(timeout=60)
            os.close(terminal)
    return started.returncode


def test_ctrl_c_in_a_search_says_130_and_leaves_nothing(tmp_path: Path) -> None:
    # Where the machine is busy a search may pass between two looks at its progress.
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        code = _interrupted_in_its_search(folder / "plans" / "plan")
        if code is not None:
            break
    assert code == 130
    assert list(folder.iterdir()) == []
