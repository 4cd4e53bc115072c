import pytest

from tests.rows import Failures
from tuner.devices.catalogue import DEVICES, find_device, spelling
from tuner.devices.datasheet import Generation
from tuner.errors import UnknownDeviceError

UNSOURCED = {"name", "aliases", "generation", "sources"}


def test_every_field_names_its_source() -> None:
    wrong = [
        name
        for name, sheet in DEVICES.items()
        if set(sheet.sources) != sheet.model_fields_set - UNSOURCED
        or any(len(source) <= 10 for source in sheet.sources.values())
    ]
    assert not wrong


def test_a_name_and_its_aliases_lead_back_to_the_device() -> None:
    wrong = [
        written
        for sheet in DEVICES.values()
        for name in (sheet.name, *sheet.aliases)
        for written in (name, f" {name.upper()} ", name.replace("-", "_"))
        if find_device(written) is not sheet
    ]
    assert not wrong


def test_no_name_means_two_devices() -> None:
    owner: dict[str, str] = {}
    for sheet in DEVICES.values():
        for written in {spelling(name) for name in (sheet.name, *sheet.aliases)}:
            assert owner.setdefault(written, sheet.name) == sheet.name


def test_peaks_are_dense_and_double_with_half_the_bits() -> None:
    failures = Failures()
    for name, sheet in DEVICES.items():
        peaks = sheet.flop_per_s
        with failures.of(name):
            if "fp8" in peaks:
                assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.015)
            if "tf32" in peaks:
                assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.015)
            if "fp4" in peaks:  # Two by bits; GeForce halves all but fp4 when it sums in fp32.
                assert 1.999 <= peaks["fp4"] / peaks["fp8"] <= 4.0
    failures.check()


def test_balances_of_rate_memory_and_links_are_plausible() -> None:
    failures = Failures()
    for name, sheet in DEVICES.items():
        if sheet.generation is Generation.PROCESSOR:
            continue  # No datasheet: a place holder until a profile is read.
        with failures.of(name):
            # A GEMM that reuses each byte some 30 (H20-3e) to 460 (GB10) times is bound by
            # arithmetic.
            assert 30 <= sheet.flop_per_s["bf16"] / sheet.memory_bytes_per_s <= 460
            # All of memory is read in 15 ms (A100-40) to 80 ms (L4), half a second from LPDDR5x.
            most_s = 0.5 if name == "gb10" else 0.081
            assert 0.01 <= sheet.memory_bytes / sheet.memory_bytes_per_s <= most_s
            assert sheet.scale_up_bytes_per_s < sheet.memory_bytes_per_s
            if sheet.scale_up_domain > 1:
                assert sheet.scale_out_bytes_per_s < sheet.scale_up_bytes_per_s
                assert sheet.host_bytes_per_s <= sheet.scale_up_bytes_per_s
            domain, node = sheet.scale_up_domain, sheet.devices_per_node
            assert domain % node == 0 or node % domain == 0
            # One unit does 0.5 to 4 Tera-operations per GHz and second between 1 and 3 GHz.
            assert 8e11 < sheet.flop_per_s["bf16"] / sheet.compute_units < 2e13
    failures.check()


PUBLISHED = {
    "DGX-GB200": "gb200-nvl72",
    "DGX-GB300": "gb300-nvl72",
    "DGX-H100": "h100-sxm",
    "DGX-B200": "b200-sxm",
    "DGX-B300": "b300-sxm",
    "A100": "a100-80gb-sxm",
    "A100-40GB": "a100-40gb-sxm",
    "A100-80GB": "a100-80gb-sxm",
    "H100-80GB": "h100-sxm",
    "H200-141GB": "h200-sxm",
    "B200-SXM": "b200-sxm",
    "H100-96GB-HBM2e-500W": "h100-96gb-hbm2e",
    "Ampere (A100-class)": "a100-80gb-sxm",
    "H800": "h800-sxm",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA A100-SXM4-40GB": "a100-40gb-sxm",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA B300 SXM6 AC": "b300-sxm",
    "AMD Instinct MI300X": "mi300x",
    "Ascend910B2": "ascend-910b",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-server",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "RTX 4090 48GB": "rtx-4090-48gb",
    "DGX Spark": "gb10",
    "NVIDIA GB10": "gb10",
    "AMD Instinct MI325X": "mi325x",
    "AMD Instinct MI355X": "mi355x",
    "H20-3e": "h20-3e",
    "NVIDIA GH200 480GB": "gh200-96gb",
    "NVIDIA RTX A6000": "rtx-a6000",
    "NVIDIA L20": "l20",
    "Ascend 910C": "ascend-910c",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
    "NVIDIA A800-SXM4-80GB": "a800-80gb-sxm",
}


def test_names_of_published_runs_and_of_drivers_are_known() -> None:
    assert {written: find_device(written).name for written in PUBLISHED} == PUBLISHED


def test_figures_that_are_easily_taken_wrong() -> None:
    assert DEVICES["h100-sxm"].flop_per_s["bf16"] == 989.4e12  # 1,979 is with sparsity
    assert DEVICES["h800-sxm"].scale_up_bytes_per_s == 200e9  # 400 is both directions
    assert DEVICES["h20-sxm"].flop_per_s["bf16"] == 148e12
    assert DEVICES["b300-sxm"].flop_per_s["fp8"] == DEVICES["b200-sxm"].flop_per_s["fp8"]
    assert (
        DEVICES["gb300-nvl72"].flop_per_s["fp4"] == 1.5 * DEVICES["gb200-nvl72"].flop_per_s["fp4"]
    )
    assert DEVICES["rtx-4090"].flop_per_s["bf16"] == 165.2e12  # 330 accumulates in fp16
    assert DEVICES["rtx-5090"].flop_per_s["bf16"] == 209.5e12  # 419 accumulates in fp16
    assert DEVICES["mi355x"].flop_per_s["bf16"] == 2516.6e12  # 5,033 is with sparsity
    assert DEVICES["ascend-910c"].flop_per_s["bf16"] == 376e12  # A die; 752 are a chip's.
    assert {DEVICES[name].scale_up_domain for name in ("gb200-nvl72", "gb300-nvl72")} == {72}


def test_every_generation_has_a_device() -> None:
    assert {sheet.generation for sheet in DEVICES.values()} == set(Generation)


def test_the_file_of_a_device_has_its_name() -> None:
    assert {name: sheet.name for name, sheet in DEVICES.items()} == {name: name for name in DEVICES}


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(UnknownDeviceError) as raised:
        find_device("h100-smx")
    message = str(raised.value)
    assert "'h100-smx'; did you mean 'h100-sxm'?" in message
    assert all(name in message for name in DEVICES)
    assert "device: {name: ..." in message
    assert "profile: FOLDER" in message
    assert "\n" not in message


def test_a_name_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(UnknownDeviceError, match=r"'abacus'; known: a100-40gb-sxm, "):
        find_device("abacus")
