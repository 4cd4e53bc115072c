"""Which kernels a deployment's plan was priced on, and whether they are still found."""

from pathlib import Path

import pytest

from tests.printed import words_of
from tests.tuner.models import MODELS
from tuner.explain.explanation import explain
from tuner.goals.serve_folder import write_serve_plan
from tuner.goals.serve_kernels import kernel_hashes, kernels_changed
from tuner.goals.serve_plan import deploy
from tuner.plans.what_if import LimitChange
from tuner.report.serve_page import serve_report
from tuner.spec.cluster import Cluster, Pool

CLUSTER = Cluster(
    pools=tuple(
        Pool(name=name, device=device, nodes=1, devices_per_node=8)
        for name, device in (("new", "h100-sxm"), ("old", "l40s"))
    )
)


def tables(folder: Path, content: bytes = b"times") -> Path:
    """Lay out a table where aiconfigurator has it; only its name and bytes count here."""
    file = folder / "h100_sxm" / "sglang" / "0.5.9" / "gemm_perf.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return folder


def test_tables_of_a_device_change_the_hash_of_its_pools_alone(tmp_path: Path) -> None:
    plain = kernel_hashes(CLUSTER, ())
    assert plain["new"] != plain["old"]
    found = kernel_hashes(CLUSTER, (tables(tmp_path / "one"),))
    assert found["new"] != plain["new"]
    assert found["old"] == plain["old"]
    # A copy elsewhere is the same; other times are not.
    assert kernel_hashes(CLUSTER, (tables(tmp_path / "two"),)) == found
    assert kernel_hashes(CLUSTER, (tables(tmp_path / "two", b"other"),))["new"] != found["new"]


def test_pools_whose_kernels_changed_are_named(tmp_path: Path) -> None:
    folder = tables(tmp_path)
    planned = kernel_hashes(CLUSTER, (folder,))
    assert kernels_changed(planned, CLUSTER, (folder,)) == ()
    (told,) = kernels_changed(planned, CLUSTER, ())
    assert "for new:" in told
    # Plans of older releases hold no hashes.
    assert kernels_changed({}, CLUSTER, ()) == ()


SPEC = f"""
schema_version: 1
model: {MODELS / "mixtral-8x7b"}
cluster: {{pools: [{{name: a, device: h100-sxm, nodes: 1, devices_per_node: 8}}]}}
goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{rate: 2/s, input_tokens: 1000, output_tokens: 100}}
  slo: {{ttft: {{p90: 3s}}, tpot: {{p90: 50ms}}}}
  modes: [aggregated]
"""


def test_installed_tables_change_no_answer_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    plain = deploy(spec, time_limit_s=20.0).plan
    # Their bytes are no Parquet file: whoever read them would fail.
    package = tables(tmp_path / "aiconfigurator_core" / "systems").parent
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    installed = deploy(spec, time_limit_s=20.0).plan
    assert installed.decision == plain.decision
    assert installed.predicted == plain.predicted
    for plan in (plain, installed):
        assert plan.provenance.profile_source == {"a": "datasheet"}
        assert "kernels datasheet" in words_of(serve_report(plan))
    assert plain.provenance.kernels_sha256 == installed.provenance.kernels_sha256
    (note,) = set(installed.provenance.notes) - set(plain.provenance.notes)
    assert f"--profile {package / 'systems'}" in note


@pytest.mark.slow
def test_explain_says_where_other_kernels_are_found(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC)
    made = deploy(spec, time_limit_s=20.0)
    asked = (LimitChange(key="rate", value="x2"),)
    write_serve_plan(tmp_path / "plan", made.plan, spec=made.spec)
    assert not explain(tmp_path / "plan", changes=asked).why.notes
    own = made.plan.provenance.model_copy(update={"kernels_sha256": {"a": "0" * 64}})
    other = made.plan.model_copy(update={"provenance": own})
    write_serve_plan(tmp_path / "other", other, spec=made.spec)
    (note,) = explain(tmp_path / "other", changes=asked).why.notes
    assert "other kernels are found now" in note
