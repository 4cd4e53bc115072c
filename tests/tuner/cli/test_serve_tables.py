"""From others' measured kernels to a plan on them, through the command line."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rows import each_row
from tests.tuner.cli.refusals import output, refusal
from tests.tuner.models import MODELS
from tuner.cli.app import run

NOTE = "h200: from the datasheet"


@pytest.fixture
def systems(tmp_path: Path) -> Path:
    """A folder as aiconfigurator lays it out: matrix products of two engines on an H200."""
    folder = tmp_path / "systems"
    data = folder / "data" / "h200_sxm"
    data.mkdir(parents=True)
    (folder / "h200_sxm.yaml").write_text(
        "data_dir: data/h200_sxm\n"
        "gpu: {mem_capacity: 141000000000, mem_bw: 4.8e12}\nnode: {num_gpus_per_node: 8}\n"
    )
    for engine, factor in (("sglang", 1.0), ("vllm", 2.0)):
        rows = [
            {
                "device": "NVIDIA H200",
                "kernel_source": "cublas",
                "gemm_dtype": "bfloat16",
                "m": m,
                "n": n,
                "k": k,
                "latency": factor * 1e-9 * (m + 100) * n * k / 1e3,
            }
            for m in (1, 64, 4096)
            for n in (1024, 65536)
            for k in (1024, 16384)
        ]
        file = data / "gemm" / engine / "1.2.0" / "gemm_perf.parquet"
        file.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), file)
    return folder


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "spec.yaml"
    file.write_text(
        f"schema_version: 1\nmodel: {MODELS / 'mixtral-8x7b'}\n"
        "cluster: {pools: [{name: h200, device: h200-sxm, devices_per_node: 8}]}\n"
        "goal:\n  kind: serve\n  engine: {name: sglang}\n"
        "  traffic: {rate: 0.5/s, input_tokens: 500, output_tokens: 50}\n"
        "  slo: {ttft: {p90: 90s}, tpot: {p90: 9s}}\n  modes: [aggregated]\n"
    )
    return file


def planned(
    spec: Path, out: Path, capsys: pytest.CaptureFixture[str], *profiles: Path
) -> dict[str, object]:
    words = [word for path in profiles for word in ("--profile", str(path))]
    assert run(["plan", str(spec), "-o", str(out), "--json", *words]) == 0
    plan: dict[str, object] = json.loads(capsys.readouterr().out)
    return plan


def test_an_import_is_planned_on_as_the_folder_itself_is(
    systems: Path, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "profile"
    words = ["profile", "import", "aiconfigurator", str(systems), "--system", "h200_sxm"]
    table = json.loads(output(capsys, [*words, "-o", profile, "--engine", "sglang", "--json"]))[
        "tables"
    ]["gemm"]
    assert (table["rows"], table["note"]) == (12, "12 rows of sglang 1.2.0 cublas")
    stored = pq.read_table(profile / "gemm.parquet").to_pylist()
    # 1e-9 (m + 100) n k / 1000 ms at m = 1, n = k = 1024: 1.06e-4 ms
    first = next(row for row in stored if (row["m"], row["n"], row["k"]) == (1, 1024, 1024))
    assert first["times_s"] == [pytest.approx(1e-15 * 101 * 1024**2)]
    assert first["source"] == "imported"
    from_profile = planned(spec, tmp_path / "a", capsys, profile)
    from_folder = planned(spec, tmp_path / "b", capsys, systems)
    for plan, source in ((from_profile, "profile"), (from_folder, "tables")):
        provenance = plan["provenance"]
        assert isinstance(provenance, dict)
        assert provenance["profile_source"] == {"h200": source}
        (note,) = [note for note in provenance["notes"] if note.startswith(NOTE)]
        assert "attention" in note
        assert "gemm" not in note
    assert from_profile["predicted"] == from_folder["predicted"]


def test_several_engines_are_told_apart(
    systems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "import", "aiconfigurator", str(systems)]
    out = ["-o", str(tmp_path / "out")]
    assert "'h900' has no tables there; those with tables: h200_sxm" in refusal(
        capsys, [*words, *out, "--system", "h900", "--engine", "vllm"]
    )
    assert "'lmdeploy' has no tables there" in refusal(
        capsys, [*words, *out, "--engine", "lmdeploy"]
    )
    assert not (tmp_path / "out").exists()
    assert run([*words, *out]) == 0
    assert {one.name for one in (tmp_path / "out").iterdir()} == {"sglang", "vllm"}


@each_row("place", [".", "nowhere"])
def test_a_folder_without_tables_is_one_line(
    place: str, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(spec), "-o", str(tmp_path / "out"), "--profile", str(tmp_path / place)]
    last = refusal(capsys, words).splitlines()[-1]
    assert "is neither a stored profile nor a folder of tables" in last
    assert not (tmp_path / "out").exists()
