"""What a vendor decides, and which rules keep caches from passing between two of them."""

from pathlib import Path
from typing import Any

from tests.expect import refused
from tests.rows import each_row
from tuner.catalog.serve_rules.kv_cache import CacheKind, Connector
from tuner.catalog.serve_rules.vendor_pairs import (
    connector_between,
    portable_backend,
    vendor_refusals,
)
from tuner.catalog.serve_rules.vendors import TRAITS
from tuner.devices.catalogue import DEVICES
from tuner.devices.datasheet import Generation, Vendor
from tuner.engines.serving.releases import (
    ENGINES,
    RELEASES,
    engine_manifest,
    release_on,
)
from tuner.errors import SpecError, UnknownTargetError
from tuner.goals.serve_spec import read_serve_spec
from tuner.spec.cluster import Pool
from tuner.spec.serving.goal import Engine, ServeGoal

MODELS = Path(__file__).parents[4] / "examples" / "models"
OF_VENDOR = {
    Vendor.NVIDIA: Generation.HOPPER,
    Vendor.AMD: Generation.CDNA3,
    Vendor.HUAWEI: Generation.ASCEND,
}


def _goal(**changes: Any) -> ServeGoal:
    fields: dict[str, Any] = {
        "kind": "serve",
        "engine": {"name": "vllm"},
        "traffic": {"concurrency": 8, "input_tokens": 100, "output_tokens": 100},
    }
    return ServeGoal.model_validate(fields | changes)


def test_every_vendor_has_traits_and_releases_that_name_their_source() -> None:
    assert set(RELEASES) == set(TRAITS) == set(Vendor)
    assert {sheet.generation.vendor for sheet in DEVICES.values()} == set(Vendor)
    images: set[str] = set()
    for vendor, engines in RELEASES.items():
        assert set(engines) <= set(ENGINES)
        for name, releases in engines.items():
            for release in releases:
                assert (release.name, release.vendor) == (name, vendor)
                assert release.source
                images.add(release.image)
                for connector in release.connectors:
                    for cache in CacheKind:
                        release.connector_rules(Connector(connector), cache=cache)
    assert len(images) == sum(len(result) for one in RELEASES.values() for result in one.values())


@each_row(("vendor", "engines"), RELEASES.items())
def test_deepep_is_planned_on_nvidia_devices_only(vendor: Any, engines: Any) -> None:
    for releases in engines.values():
        has_deepep = any("deepep" in one for one in releases[0].a2a_backends)
        assert has_deepep == (vendor is Vendor.NVIDIA)


NVIDIA, AMD, HUAWEI = ("vllm", Vendor.NVIDIA), ("vllm", Vendor.AMD), ("vllm", Vendor.HUAWEI)
SGLANG = ("sglang", Vendor.NVIDIA)


@each_row(
    ("one", "other", "dtype", "rules"),
    [
        (NVIDIA, NVIDIA, "bf16", []),
        (NVIDIA, AMD, "bf16", []),
        (AMD, NVIDIA, "bf16", []),
        (NVIDIA, AMD, "fp8", ["kv_format"]),
        (AMD, AMD, "fp8", []),
        (NVIDIA, HUAWEI, "bf16", ["connector", "release", "host_path"]),
        (HUAWEI, NVIDIA, "bf16", ["connector", "release", "host_path"]),
        (HUAWEI, HUAWEI, "bf16", []),
        (SGLANG, ("sglang", Vendor.AMD), "bf16", ["host_path"]),
        (SGLANG, ("sglang", Vendor.HUAWEI), "bf16", ["connector", "host_path"]),
        (NVIDIA, SGLANG, "bf16", ["engine"]),
    ],
)
def test_which_pairs_break_which_rules(one: Any, other: Any, dtype: str, rules: list[str]) -> None:
    sides = tuple(
        engine_manifest(Engine.model_validate({"name": name}), vendor=vendor)
        for name, vendor in (one, other)
    )
    lines = vendor_refusals(
        *sides,
        connector=connector_between(*sides),
        cache=CacheKind.GROUPED,
        kv_cache_dtype=dtype,
        generations=(OF_VENDOR[one[1]], OF_VENDOR[other[1]]),
    )
    assert [line.removeprefix("rule ").partition(":")[0] for line in lines] == rules


def test_kernels_of_attention_that_two_vendors_share() -> None:
    sides = [
        engine_manifest(Engine(name="vllm"), vendor=one) for one in (Vendor.NVIDIA, Vendor.AMD)
    ]
    assert portable_backend(sides[0], sides[1], cache=CacheKind.GROUPED) == "TRITON_ATTN"
    assert portable_backend(sides[0], sides[1], cache=CacheKind.LATENT) == "TRITON_MLA"


def test_a_named_release_is_of_nvidia_where_a_plugin_follows_later() -> None:
    ascend = Pool(name="a", device="ascend-910b", devices_per_node=8)
    hopper = Pool(name="h", device="h100-sxm", devices_per_node=8)
    named = _goal(engine={"name": "vllm", "version": "0.33.0"})
    assert release_on(named, hopper).title == "vllm 0.33.0"
    assert release_on(named, ascend).title == "vllm 0.23.0 with vllm-ascend 0.23.0"
    other = _goal(engines={"a": {"name": "sglang"}})
    assert release_on(other, hopper).name == "vllm"
    assert release_on(other, ascend).name == "sglang"


def test_attention_and_ffn_servers_and_copies_of_experts_stay_where_they_were_described() -> None:
    named = _goal(engine={"name": "vllm", "version": "0.30.0+afd"})
    for device, release in (("h100-sxm", "0.30.0+afd"), ("mi300x", "0.33.0")):
        result = release_on(named, Pool(name="one", device=device, devices_per_node=8))
        assert result.release == release
        assert (
            (result.afd is not None) == ("attention_expert" in result.modes) == ("+afd" in release)
        )
    for vendor, engines in RELEASES.items():
        releases = (*engines["vllm"], *engines.get("sglang", ()))
        kept = {bool(one.redundant_architectures) for one in releases}
        assert kept == {vendor not in (Vendor.HUAWEI, Vendor.CPU)}


@each_row(
    ("goal", "device", "said"),
    [
        ("engine: {name: trtllm}", "mi300x", "trtllm does not serve on devices of amd"),
        ("engine: {name: trtllm}", "ascend-910b", "served by sglang or vllm"),
        ("engine: {name: vllm, version: '0.1'}", "mi300x", "no vllm '0.1' is described"),
        (
            "engine: {name: vllm}\n  engines: {there: {name: sglang}}",
            "mi300x",
            "no pool is named 'there'; pools: one, two",
        ),
        (
            "engine: {name: vllm}\n  engines: {two: {name: sglang, version: '9'}}",
            "mi300x",
            "no sglang '9' is described for devices of amd",
        ),
    ],
)
def test_engines_that_do_not_serve_a_pool_are_one_line(
    goal: str, device: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        f"schema_version: 1\nmodel: {MODELS / 'mixtral-8x7b'}\n"
        "cluster: {pools: [{name: one, device: h100-sxm, devices_per_node: 8},"
        f" {{name: two, device: {device}, devices_per_node: 8}}]}}\n"
        f"goal:\n  kind: serve\n  {goal}\n"
        "  traffic: {concurrency: 8, input_tokens: 100, output_tokens: 100}\n"
    )
    with refused((SpecError, UnknownTargetError), match=said):
        read_serve_spec(path)
