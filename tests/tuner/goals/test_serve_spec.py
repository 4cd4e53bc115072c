"""What the spec of a deployment says beyond its fields: prices, lengths, links, bare words."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.expect import present, refused
from tests.rows import each_row
from tuner.errors import SpecError
from tuner.goals.serve_spec import read_serve_spec
from tuner.spec.fields import SpecFolder
from tuner.spec.serving.expert_slots import are_even, even_counts, even_ranks, fewest_redundant
from tuner.spec.serving.lengths import LengthKind
from tuner.spec.serving.spec import ServeSpec
from tuner.spec.serving.traffic import ArrivalKind, Traffic

MIXTRAL = Path(__file__).parents[3] / "examples" / "models" / "mixtral-8x7b"


def read(folder: Path, **changes: str) -> ServeSpec:
    given = {
        "pools": "{name: a, device: h100-sxm, devices_per_node: 8, price_per_device_hour: 3}",
        "links": "",
        "traffic": "{rate: 5/s, input_tokens: 2000, output_tokens: 300}",
        "extra": "objective: devices",
        "engine": "vllm",
        "emit": "",
    } | changes
    spec = folder / "spec.yaml"
    spec.write_text(
        f"schema_version: 1\nmodel: {MIXTRAL}\n"
        f"cluster: {{pools: [{given['pools']}], links: [{given['links']}]}}\n"
        f"goal:\n  kind: serve\n  engine: {{name: {given['engine']}}}\n"
        f"  traffic: {given['traffic']}\n  {given['extra']}\nemit: [{given['emit']}]\n"
    )
    return read_serve_spec(spec)


TWO = (
    "{name: a, device: h100-sxm, devices_per_node: 8}, {name: b, device: h20, devices_per_node: 8}"
)
SCALED = "slo: {ttft: {p90: 1s}, tpot: {p90: 50ms}}"
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
        (
            {"emit": "vllm, keda", "extra": SCALED},
            "emit: keda scales the instances of kubernetes; write [kubernetes, keda]",
        ),
        (
            {"emit": "kubernetes, hpa, keda", "extra": SCALED},
            "emit: keda and hpa would both set the number of instances; keep one",
        ),
        (
            {"emit": "kubernetes, aibrix", "extra": SCALED, "engine": "trtllm"},
            "what is emitted for trtllm 1.3.0rc27 exports no count of them",
        ),
        ({"emit": "kubernetes, hpa"}, "emit: hpa needs goal.slo"),
        (
            {
                "emit": "kubernetes, hpa",
                "extra": SCALED,
                "traffic": "{concurrency: 8, input_tokens: 2000, output_tokens: 300}",
            },
            "emit: hpa needs an open load",
        ),
        (
            {"extra": f"{SCALED}\n  autoscaler: {{start_up: 1min}}"},
            "goal.autoscaler: emit names none; add keda or hpa or aibrix",
        ),
        *(
            ({"extra": f"autoscaler: {{{key}: {stated}}}"}, f"goal.autoscaler{said}")
            for key, stated, said in (
                ("start_up", "-5s", ".start_up: '-5s' must not be negative"),
                ("start_up", "0s", ": start_up 0 s is not between 1.00 s and 6.00 h"),
                ("start_up", "9h", ": start_up 9.00 h is not between 1.00 s and 6.00 h"),
                ("node_provisioning", "2d", ": node_provisioning 2.00 d is not between"),
                ("kv_usage", "0%", ".kv_usage"),
            )
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    with refused(SpecError, said):
        read(tmp_path, **changes)


def test_keys_are_read_in_their_own_words(tmp_path: Path) -> None:
    assert read(tmp_path, extra="objective: cost").goal.objective == "cost"
    assert read(tmp_path, extra="max_model_len: 32768").goal.max_model_len == 32768
    lengths = "input_tokens: 100, output_tokens: 10"
    arrival = "arrival: {kind: on_off, on: 3s, off: 9s}"
    result = present(
        read(tmp_path, traffic=f"{{rate: 5/s, {arrival}, {lengths}}}").goal.traffic.arrival
    )
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


# Counts that make experts even over ranks, against a search over all of them.


def test_sglangs_deployment_of_256_experts_on_72_ranks() -> None:
    # Four slots a rank: 288 - 256.
    assert fewest_redundant(256, 72) == 32
    assert are_even(256, 32, 72)
    assert even_counts(256, 16, 72) == (32,)
    assert even_counts(256, 40, 72) == (32, 104)
    assert even_ranks(256, 72) == (64, 128)


@each_row("experts", (8, 60, 64, 256))
@each_row("ranks", (2, 3, 12, 24, 72))
def test_named_counts_are_the_nearest_that_are_even(experts: int, ranks: int) -> None:
    even = [count for count in range(3 * ranks + experts) if are_even(experts, count, ranks)]
    assert fewest_redundant(experts, ranks) == even[0]
    for wanted in range(2 * ranks):
        below = [count for count in even if count <= wanted]
        above = [count for count in even if count > wanted]
        counts = (below[-1], above[0]) if below else (above[0],)
        assert even_counts(experts, wanted, ranks) == counts, (experts, ranks, wanted)
    sizes = [size for size in range(1, experts + 1) if experts % size == 0]
    assert set(even_ranks(experts, ranks)) == {
        *[size for size in sizes if size <= ranks][-1:],
        *[size for size in sizes if size >= ranks][:1],
    }


# The record of a traffic: what may stand together, and what is said where it may not.

LENGTHS = {"input_tokens": 4000, "output_tokens": 1000}


def read_traffic(fields: Mapping[str, object]) -> Traffic:
    return Traffic.model_validate(fields, context=SpecFolder(folder=Path("/specs")))


def test_loops_and_open_loads_are_read() -> None:
    traffic = read_traffic({"concurrency": 256, **LENGTHS, "prefix_hit": 0.5})
    assert traffic.is_closed_loop
    assert not traffic.is_replayed
    assert traffic.input_tokens is not None
    assert (traffic.input_tokens.kind, traffic.input_tokens.mean) == (LengthKind.FIXED, 4000)
    traffic = read_traffic(
        {
            "rate": "120/min",
            "arrival": {"kind": "gamma", "cv": 1.5},
            "input_tokens": {"kind": "lognormal", "mean": 1000, "cv": 1.0},
            "output_tokens": 10,
        }
    )
    assert traffic.rate == 2.0
    assert present(traffic.arrival).kind is ArrivalKind.GAMMA


def test_a_trace_is_found_beside_the_spec_and_replayed() -> None:
    traffic = read_traffic({"trace": "chat.csv"})
    assert traffic.trace == Path("/specs/chat.csv")
    assert traffic.is_replayed
    assert read_traffic({"trace": "chat.csv", "rate": "2/s"}).is_replayed
    assert not read_traffic({"trace": "chat.csv", "concurrency": 4}).is_replayed
    drawn = {"trace": "chat.csv", "rate": "2/s", "arrival": {"kind": "poisson"}}
    assert not read_traffic(drawn).is_replayed


@each_row(
    ("fields", "said"),
    [
        (LENGTHS, "one of 'concurrency', 'rate' or 'trace'"),
        ({**LENGTHS, "concurrency": 1, "rate": "1/s"}, "keep one"),
        ({**LENGTHS, "concurrency": 0}, "concurrency"),
        ({**LENGTHS, "rate": 20}, "20 has no unit; write it like '20/s'"),
        ({**LENGTHS, "rate": "20"}, "has no unit"),
        ({**LENGTHS, "rate": "0/s"}, "rate"),
        ({"trace": "a.csv", "arrival": {"kind": "poisson"}}, "'arrival' needs the mean 'rate'"),
        ({"concurrency": 4, "input_tokens": 4}, "missing 'output_tokens'"),
        ({"trace": "a.csv", "input_tokens": 4}, "the trace has its own 'input_tokens'"),
        ({**LENGTHS, "concurrency": 4, "prefix_hit": 1.0}, "prefix_hit"),
        ({**LENGTHS, "rate": "1/s", "arrival": {"kind": "gamma"}}, "gamma arrivals need 'cv'"),
        (
            {**LENGTHS, "rate": "1/s", "arrival": {"kind": "on_off", "on": "3s"}},
            "on_off arrivals need 'off'",
        ),
        (
            {**LENGTHS, "rate": "1/s", "arrival": {"kind": "poisson", "cv": 2}},
            "poisson arrivals have no 'cv'",
        ),
        ({**LENGTHS, "concurency": 4}, "concurency"),
        ({"trace": "a.csv", "requests": 9}, "a replayed trace has its own number of requests"),
        ({**LENGTHS, "concurrency": 4, "requests": 0}, "requests"),
        ({**LENGTHS, "concurrency": 4, "requests": 20_001}, "less than or equal to 20000"),
    ],
)
def test_what_contradicts_itself_is_refused(fields: Mapping[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        read_traffic(fields)


def test_a_share_of_a_traffic_is_of_its_rate_its_loop_and_its_requests() -> None:
    burst = read_traffic({**LENGTHS, "concurrency": 500, "requests": 500})
    half = burst.scaled(0.5)
    assert (half.concurrency, half.requests, half.rate) == (250, 250, None)
    run = read_traffic({**LENGTHS, "rate": "40/s", "requests": 600}).scaled(0.25)
    assert (run.concurrency, run.requests, run.rate) == (None, 150, 10.0)
    assert burst.sets_its_rate
    assert run.sets_its_rate
    assert not read_traffic({**LENGTHS, "rate": "40/s"}).sets_its_rate


@each_row("afd", ("a", "b"))
def test_the_modes_of_pools_are_those_of_any_of_their_releases(tmp_path: Path, afd: str) -> None:
    pools = TWO.replace("h20", "h100-sxm")
    plugin = f"engines: {{{afd}: {{name: vllm, version: 0.30.0+afd}}}}"
    spec = read(tmp_path, pools=pools, extra=plugin)
    assert "attention_expert" in spec.modes
    assert ("attention_expert" in spec.main_release.modes) == (afd == "a")
    assert "attention_expert" not in read(tmp_path, pools=pools).modes
