"""What the spec of a deployment says beyond its fields: prices, lengths, links, bare words."""

from pathlib import Path

import pytest

from tests.rows import each_row
from tuner.errors import SpecError
from tuner.spec.serving.read import ServeSpec, read_serve_spec
from tuner.spec.serving.traffic import ArrivalKind

MIXTRAL = Path(__file__).parents[4] / "examples" / "models" / "mixtral-8x7b"


def read(folder: Path, **changes: str) -> ServeSpec:
    given = {
        "pools": "{name: a, device: h100-sxm, devices_per_node: 8, price_per_device_hour: 3}",
        "links": "",
        "traffic": "{rate: 5/s, input_tokens: 2000, output_tokens: 300}",
        "extra": "objective: devices",
    } | changes
    spec = folder / "spec.yaml"
    spec.write_text(
        f"schema_version: 1\nmodel: {MIXTRAL}\n"
        f"cluster: {{pools: [{given['pools']}], links: [{given['links']}]}}\n"
        f"goal:\n  kind: serve\n  engine: {{name: vllm}}\n  traffic: {given['traffic']}\n"
        f"  {given['extra']}\n"
    )
    return read_serve_spec(spec)


TWO = (
    "{name: a, device: h100-sxm, devices_per_node: 8}, {name: b, device: h20, devices_per_node: 8}"
)
LINK = "bandwidth: 100Gbit/s, latency: 1us}"


@each_row(
    ("changes", "said"),
    [
        (
            {"extra": "objective: cost", "pools": TWO},
            "cost needs the price of every pool; state price_per_device_hour of 'a'",
        ),
        ({"extra": "max_model_len: 32769"}, "32769 exceeds the 32768 positions of mixtral-8x7b"),
        ({"extra": "max_model_len: 2299"}, "half of the requests have more than 2300 tokens"),
        ({"extra": "modes: []"}, "goal.modes: an empty list"),
        (
            {"traffic": "{input_tokens: 2000, output_tokens: 300}"},
            "one of 'concurrency', 'rate' or 'trace' is needed",
        ),
        (
            {
                "extra": "objective: rate",
                "traffic": "{concurrency: 8, input_tokens: 2000, output_tokens: 300}",
            },
            "'concurrency' is a closed loop; leave 'concurrency' out",
        ),
        (
            {
                "extra": "objective: rate",
                "traffic": "{rate: 8/s, requests: 9, input_tokens: 2000, output_tokens: 300}",
            },
            "objective 'rate' is that of a long run; leave 'requests' out",
        ),
        (
            {"pools": TWO, "links": f"{{between: [a, b], {LINK}, {{between: [b, a], {LINK}"},
            "'a' and 'b' are joined twice; keep one",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, **changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_costs_are_compared_where_every_pool_has_a_price(tmp_path: Path) -> None:
    assert read(tmp_path, extra="objective: cost").goal.objective == "cost"
    assert read(tmp_path, extra="max_model_len: 32768").goal.max_model_len == 32768


def test_the_words_on_and_off_are_keys_without_quotes(tmp_path: Path) -> None:
    lengths = "input_tokens: 100, output_tokens: 10"
    arrival = "arrival: {kind: on_off, on: 3s, off: 9s}"
    result = read(tmp_path, traffic=f"{{rate: 5/s, {arrival}, {lengths}}}").goal.traffic.arrival
    assert result is not None
    assert (result.kind, result.on, result.off) == (ArrivalKind.ON_OFF, 3.0, 9.0)


def test_traffic_needs_no_rate_where_it_is_looked_for(tmp_path: Path) -> None:
    lengths = "input_tokens: 2000, output_tokens: 300"
    for stated, kind in (("", None), ("arrival: {kind: gamma, cv: 2}, ", ArrivalKind.GAMMA)):
        spec = read(tmp_path, extra="objective: rate", traffic=f"{{{stated}{lengths}}}")
        assert spec.goal.traffic.rate == 1.0
        arrival = spec.goal.traffic.arrival
        assert (None if arrival is None else arrival.kind) == kind
    fixed = read(tmp_path, extra="objective: rate", traffic=f"{{rate: 5/s, {lengths}}}")
    assert fixed.goal.traffic.rate == 5.0
