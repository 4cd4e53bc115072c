"""Plans and estimates on profiles of accelerators: what is measured counts, the rest is named."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from profilers.interpolation import fit_rows
from profilers.records import (
    Case,
    Machine,
    Measurement,
    Profile,
    ProfileHeader,
    Source,
    TableInfo,
)
from profilers.store import write_profile
from tests.expect import present
from tuner import api
from tuner.costs.train.calibration import GENERIC_BAND, Residuals
from tuner.costs.train.columns_of import hardware_of_pool
from tuner.devices.catalogue import find_device
from tuner.engines.megatron_lm import read as megatron
from tuner.errors import PlanUnreadableError, SpecError
from tuner.estimate.estimate import estimate
from tuner.goals.train_folder import write_plan
from tuner.goals.train_spec import read_spec
from tuner.plans.train import Plan
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.ops import gemm
from tuner.prices.train.collective_ratios import MeasuredHardware
from tuner.prices.train.collectives import Group, all_gather_s, all_reduce_s, all_to_all_s
from tuner.prices.train.constants import Constants, GemmPrecision
from tuner.prices.train.measured_links import with_measured_links
from tuner.spec.cluster import Pool
from tuner.verify.verification import Effort, Watcher

ROOT = Path(__file__).parents[4]
MODELS = ROOT / "examples" / "models"
POOL = Pool(name="p", device="h200-sxm", nodes=1, devices_per_node=8)
SHEET = hardware_of_pool(find_device("h200-sxm"), POOL, precision=GemmPrecision.BF16)
SIMPLE: dict[str, Any] = {
    "pipeline_model_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "micro_batch_size": 1,
}
LAUNCH = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --micro-batch-size 1 "
    "--global-batch-size 64 --seq-length 4096 --hidden-dropout 0 --attention-dropout 0 "
    "--use-distributed-optimizer --expert-model-parallel-size 8 --moe-grouped-gemm"
)

StoreProfile = Callable[..., Path]
WriteSpec = Callable[..., Path]


def rows_of(*, slower: float, largest: int) -> Iterator[Measurement]:
    """Products as the datasheet has them, times `slower`; an all-gather on one node; storage."""
    sheet = DatasheetPrices(hardware=SHEET, constants=Constants())
    sizes = [32, 512, 2048, 4096, largest]
    for m in sizes:
        for n in sizes:
            for k in sizes:
                case = Case(
                    operation="gemm",
                    dtype="bf16",
                    direction="forward",
                    axes={"m": m, "n": n, "k": k},
                )
                time_s = slower * float(sheet.seconds(gemm(float(m), float(n), float(k))))
                yield Measurement(case=case, times_s=(time_s,))
    for ranks in (2, 8):
        for power in (0, 20, 28, 40):
            axes = {"bytes": 2**power, "ranks": ranks, "stride": 1, "world": 8}
            case = Case(operation="collective", kind="all_gather", axes=axes)
            yield Measurement(case=case, times_s=(1e-5 + 2**power / 100e9,))
    case = Case(operation="storage", kind="write", axes={"bytes": 2**30})
    yield Measurement(case=case, times_s=(2.0,))


def stored(path: Path, rows: list[Measurement], *, device: str = "NVIDIA H200") -> Path:
    operations = {row.case.operation for row in rows}
    machine = Machine(
        hostname="h",
        device=device,
        device_kind="cuda",
        num_devices=8,
        memory_bytes_per_device=140 * 10**9,
        cores=1,
        host_memory_bytes=0,
        world=8,
        threads_per_rank=1,
        oversubscribed=False,
        libraries={},
    )
    tables = {
        name: TableInfo(
            rows=sum(row.case.operation == name for row in rows), complete=True, seconds=0.0
        )
        for name in operations
    }
    header = ProfileHeader(
        moetune_version="0", created="2026-01-01T00:00:00+00:00", machine=machine, tables=tables
    )
    write_profile(path, Profile(header=header, measurements=tuple(rows)))
    return path


@pytest.fixture
def store_profile(tmp_path: Path) -> StoreProfile:
    def make(name: str = "profile", *, slower: float = 1.0, largest: int = 65536) -> Path:
        return stored(tmp_path / name, list(rows_of(slower=slower, largest=largest)))

    return make


@pytest.fixture
def write_spec(tmp_path: Path) -> WriteSpec:
    def make(*, nodes: int = 1, model: str = "olmoe-1b-7b", **goal: Any) -> Path:
        file = tmp_path / "spec.yaml"
        pool = {"name": "p", "device": "h200-sxm", "nodes": nodes, "devices_per_node": 8}
        goal_keys = {"kind": "train", "sequence_length": 4096, "global_batch_size": 64} | goal
        content = {
            "schema_version": 1,
            "model": str(MODELS / model / "config.json"),
            "cluster": {"pools": [pool]},
            "goal": goal_keys,
            "search": SIMPLE,
            "emit": ["megatron-bridge"],
        }
        file.write_text(yaml.safe_dump(content))
        return file

    return make


def planned(spec: Path, *profiles: Path) -> Plan:
    made = api.plan(spec, profiles=profiles, time_limit_s=30.0, calibrated=False).plan
    assert made.predicted is not None
    return made


def step_s(made: Plan) -> float:
    return present(made.predicted).step_time_s


def test_slower_products_make_a_slower_step(
    write_spec: WriteSpec, store_profile: StoreProfile
) -> None:
    spec = write_spec()
    as_fast = planned(spec, store_profile("one"))
    assert step_s(as_fast) < 0.99 * step_s(planned(spec, store_profile("two", slower=2.0)))
    assert as_fast.provenance.profile_source == {"p": "measured"}
    assert set(as_fast.provenance.profile_sha256) == {"p"}


def test_what_the_profile_lacks_is_named(
    write_spec: WriteSpec, store_profile: StoreProfile
) -> None:
    notes = " ".join(planned(write_spec(), store_profile()).provenance.notes)
    assert "the datasheet prices: grouped_gemm bf16, attention, attention backward" in notes
    assert "all_to_all inside a scale-up domain" in notes
    assert "all_gather" not in notes
    assert "between domains" not in notes


def test_extrapolated_products_are_named_and_widen_the_band(
    write_spec: WriteSpec, store_profile: StoreProfile
) -> None:
    spec = write_spec()
    inside = planned(spec, store_profile("one"))
    beyond = planned(spec, store_profile("two", largest=8192))
    assert not inside.provenance.extrapolated
    assert any(name.startswith("gemm bf16 forward") for name in beyond.provenance.extrapolated)

    def width(made: Plan) -> float:
        low, high = present(made.predicted).step_time_s_band
        return high / low

    assert width(inside) >= GENERIC_BAND[1] / GENERIC_BAND[0]
    assert width(beyond) > width(inside)


def test_the_band_covers_what_the_datasheet_says(
    write_spec: WriteSpec, store_profile: StoreProfile
) -> None:
    made = planned(write_spec(), store_profile(slower=4.0))
    low, high = present(made.predicted).step_time_s_band
    assert low < GENERIC_BAND[0] * step_s(made)
    assert high == pytest.approx(GENERIC_BAND[1] * step_s(made), rel=0.01)


def test_the_profile_is_copied_into_the_plan_and_its_memory_is_used(
    write_spec: WriteSpec, store_profile: StoreProfile, tmp_path: Path
) -> None:
    made = api.plan(write_spec(), profiles=(store_profile(),), time_limit_s=30.0)
    written = write_plan(tmp_path / "plan", made.plan, spec=made.spec, profiles=made.profiles)
    assert (tmp_path / "plan" / "used" / "profile" / "gemm.parquet").is_file()
    assert "used/profile/profile.json" in written.files
    assert max(made.plan.predicted.peak_memory_bytes if made.plan.predicted else ()) < 0.95 * 140e9
    with pytest.raises(PlanUnreadableError, match="trials run the reference engine"):
        api.verify(
            tmp_path / "plan",
            effort=Effort(trials=1, steps=1),
            resume=False,
            watcher=Watcher(started=lambda *_: None, ended=lambda _: None),
        )


def test_measured_storage_decides_the_checkpoints(
    write_spec: WriteSpec, store_profile: StoreProfile
) -> None:
    failing = {
        "reliability": {
            "device_mtbf": "5000h",
            "restart": "10min",
            "checkpoint": {"asynchronous": False},
        }
    }
    spec = write_spec(**failing)
    usual, measured = planned(spec), planned(spec, store_profile())
    assert present(present(measured.predicted).run) != present(present(usual.predicted).run)


def test_residuals_of_the_profile_go_first(
    write_spec: WriteSpec, store_profile: StoreProfile
) -> None:
    folder = store_profile()
    spec = write_spec()
    before = step_s(api.plan(spec, profiles=(folder,), time_limit_s=30.0).plan)
    own = Residuals.model_validate(
        {
            "origin": "runs of our own",
            "data_sha256": "0",
            "rows": 8,
            "groups": 4,
            "stated_ratio": 0.9,
            "covered_ratio": None,
            "corrections": [{"where": {}, "factors": {"straggler_factor": 3.0}}],
            "bands": [{"where": {}, "low": 0.9, "high": 1.1, "groups": 4, "rows": 8}],
        }
    )
    (folder / "residuals.json").write_text(own.model_dump_json())
    made = api.plan(spec, profiles=(folder,), time_limit_s=30.0).plan
    assert step_s(made) > 1.05 * before
    assert any("runs of our own" in note for note in made.provenance.notes)
    (folder / "residuals.json").write_text(json.dumps({"rows": 1}))
    with pytest.raises(SpecError, match=r"residuals\.json"):
        api.plan(spec, profiles=(folder,), time_limit_s=30.0)


def test_measured_collectives_correct_the_formulas_of_like_groups() -> None:
    own = Constants()
    machine = with_measured_links(SHEET, own, fit_rows(list(rows_of(slower=1.0, largest=8192))))
    assert isinstance(machine, MeasuredHardware)
    eight, four = Group(ranks=8.0, inside=8.0), Group(ranks=4.0, inside=4.0)
    # Measured: 10 us and 100 GB/s.
    assert float(all_gather_s(2.0**28, eight, machine, own)) == pytest.approx(
        1e-5 + 2**28 / 100e9, rel=1e-6
    )
    assert not machine.collectives.outside
    ratio = all_gather_s(2.0**28, four, machine, own) / all_gather_s(2.0**28, four, SHEET, own)
    assert float(ratio) > 1.5
    assert list(machine.collectives.outside) == ["all_gather"]
    apart = Group(ranks=8.0, inside=1.0)
    assert all_gather_s(1e6, apart, machine, own) == all_gather_s(1e6, apart, SHEET, own)
    assert all_reduce_s(1e6, eight, machine, own) == all_reduce_s(1e6, eight, SHEET, own)


def test_expert_exchanges_are_read_by_what_a_rank_sends() -> None:
    own = Constants()
    axes = {"tokens": 4096, "hidden": 4096, "top_k": 8, "experts": 64, "ranks": 8, "nodes": 1}
    rows = [
        Measurement(
            case=Case(
                operation="expert_all_to_all",
                kind=f"deepep_normal_{half}",
                axes={**axes, "units": units},
            ),
            source=Source.IMPORTED,
            times_s=(time_s,),
        )
        for half, units, time_s in (
            ("dispatch", 20, 3e-4),
            ("dispatch", 24, 2e-4),
            ("combine", 20, 4e-4),
        )
    ]
    machine = with_measured_links(SHEET, own, {}, rows)
    group = Group(ranks=8.0, inside=8.0)
    # Sent by a rank: its tokens, each to the expected number of other ranks that want it.
    sent = 2.0 * 4096 * 4096 * (8.0 * (1.0 - math.comb(56, 8) / math.comb(64, 8))) * 7.0 / 8.0
    assert float(all_to_all_s(sent, 0.0, group, machine, own, is_merged=1.0)) == pytest.approx(3e-4)
    plain = all_to_all_s(sent, 0.0, group, machine, own)
    assert float(plain) == pytest.approx(float(all_to_all_s(sent, 0.0, group, SHEET, own)))


def test_an_estimate_takes_the_profile_too(
    write_spec: WriteSpec, store_profile: StoreProfile
) -> None:
    spec = read_spec(write_spec())
    launch = megatron.read(LAUNCH, source="run.sh")
    slow = api.measured_profile(spec, (store_profile(slower=3.0),), calibrated=False)
    on_sheet, on_profile = estimate(spec, launch), estimate(spec, launch, measured=slow)
    assert on_profile.step_time_s > 1.01 * on_sheet.step_time_s
    assert any("the datasheet prices: " in note for note in on_profile.notes)
    low, high = on_profile.step_time_s_band
    assert high / low > GENERIC_BAND[1] / GENERIC_BAND[0]


def test_a_profile_of_another_device_is_refused_for_one_of_several(
    write_spec: WriteSpec, store_profile: StoreProfile, tmp_path: Path
) -> None:
    other = stored(
        tmp_path / "other", list(rows_of(slower=1.0, largest=8192)), device="NVIDIA B200"
    )
    made = planned(write_spec(), other, store_profile("own"))
    assert any("NVIDIA H200, own" in note for note in made.provenance.notes)
    third = stored(tmp_path / "third", list(rows_of(slower=1.0, largest=8192)), device="NVIDIA H20")
    with pytest.raises(SpecError, match="NVIDIA H20"):
        planned(write_spec(), other, third)


def test_a_plan_on_imported_tables_is_made(tmp_path: Path, write_spec: WriteSpec) -> None:
    gathers = [
        row.model_copy(update={"source": Source.IMPORTED})
        for row in rows_of(slower=1.0, largest=32)
        if row.case.operation == "collective"
    ]
    made = planned(write_spec(nodes=2), stored(tmp_path / "h200", gathers))
    assert made.provenance.profile_source == {"p": "imported"}
    assert made.decision is not None
    notes = " ".join(made.provenance.notes)
    assert "all_gather between domains" in notes
    assert "all_gather inside" not in notes


def test_of_heterogeneous_pools_each_takes_the_profile_of_its_device(
    write_spec: WriteSpec, store_profile: StoreProfile
) -> None:
    file = write_spec()
    content = yaml.safe_load(file.read_text())
    other = {"name": "q", "device": "h100-sxm", "nodes": 1, "devices_per_node": 8}
    content["cluster"]["pools"].append(other)
    content["cluster"]["links"] = [{"between": ["p", "q"], "bandwidth": "50GB/s", "latency": "5us"}]
    content["search"] = {
        "micro_batch_size": 1,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": 1,
    }
    file.write_text(yaml.safe_dump(content))
    made = planned(file, store_profile(largest=8192))
    assert made.provenance.profile_source == {"p": "measured", "q": "datasheet"}
    assert "the datasheet prices: grouped_gemm bf16" in " ".join(made.provenance.notes)
    assert any("gemm bf16 forward" in name for name in made.provenance.extrapolated)
    low, high = present(made.predicted).step_time_s_band
    assert high / low > GENERIC_BAND[1] / GENERIC_BAND[0]


def test_a_restart_that_is_not_stated_is_refused(
    write_spec: WriteSpec, store_profile: StoreProfile
) -> None:
    with pytest.raises(SpecError, match=r"goal.reliability.restart is missing"):
        planned(write_spec(reliability={"device_mtbf": "5000h"}), store_profile("without"))
