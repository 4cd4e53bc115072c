"""Folders of plans of every kind, and pages taken apart again."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tuner import api
from tuner.config.serve import Instances, PlannedKvTransfer, Role, ServeDecision
from tuner.errors import EnvironmentMissingError
from tuner.goals.place_folder import write_place_plan
from tuner.goals.place_plan import place
from tuner.goals.registry import goal_of_folder
from tuner.goals.serve_spec import read_serve_spec
from tuner.goals.train_folder import write_plan
from tuner.plans.serve import (
    Latency,
    ServeAlternative,
    ServeCertificate,
    ServeModeResult,
    ServePlan,
    ServePrediction,
    ServeProvenance,
    ServeSpace,
    ServeUnlaunchable,
)
from tuner.report.content import Report
from tuner.report.page import page_html
from tuner.report.picture import browser_path

EXAMPLES: Final = Path(__file__).parents[3] / "examples"
VOID: Final = frozenset({"meta", "link", "input", "br", "hr", "img"})

FEW: Final[Mapping[str, Any]] = {
    "tensor_model_parallel_size": [1],
    "context_parallel_size": [1],
    "pipeline_model_parallel_size": [2],
    "virtual_pipeline_model_parallel_size": [1, 4],
    "expert_model_parallel_size": [8],
    "zero_stage": [1],
    "micro_batch_size": [1],
}
"""Few enough candidates to search within a second or two."""


@dataclass(slots=True)
class Node:
    """An element of a page."""

    tag: str
    attributes: Mapping[str, str]
    children: "list[Node | str]" = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text inside."""
        return "".join(one if isinstance(one, str) else one.text for one in self.children)

    def all(self, tag: str = "", **attributes: str) -> "list[Node]":
        """Elements inside by tag and attributes, in order."""
        found: list[Node] = []
        for child in self.children:
            if isinstance(child, str):
                continue
            wanted = {name.rstrip("_").replace("_", "-"): one for name, one in attributes.items()}
            if tag in ("", child.tag) and all(
                child.attributes.get(name) == one for name, one in wanted.items()
            ):
                found.append(child)
            found += child.all(tag, **attributes)
        return found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


@pytest.fixture(scope="session")
def page_of() -> Callable[[Report], str]:
    """The page of a report, with a stand-in for Plotly's script."""
    return lambda report: page_html(report, "window.Plotly = {react: () => {}};")


@pytest.fixture(scope="session")
def parsed() -> Callable[[str], Node]:
    """A page as elements; fails where an element is ended that was not the last opened."""

    def parse(html: str) -> Node:
        reader = _Reader()
        reader.feed(html)
        reader.close()
        assert len(reader.open) == 1, f"<{reader.open[-1].tag}> never ends"
        return reader.root

    return parse


@pytest.fixture(scope="session")
def verified_folder() -> Path:
    """The stored training plan with its trials."""
    return EXAMPLES / "profiles" / "epyc-2-ranks"


@pytest.fixture(scope="session")
def train_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training plan from the datasheet."""
    folder = tmp_path_factory.mktemp("train")
    spec = {
        "schema_version": 1,
        "model": str(EXAMPLES / "models" / "mixtral-8x7b" / "config.json"),
        "cluster": {
            "pools": [{"name": "a100", "device": "a100-80gb", "nodes": 8, "devices_per_node": 8}]
        },
        "goal": {
            "kind": "train",
            "sequence_length": 4096,
            "global_batch_size": 256,
            "precision": "bf16",
        },
        "search": dict(FEW),
        "emit": ["megatron-lm"],
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    made = api.plan(folder / "spec.yaml", time_limit_s=20.0)
    write_plan(folder / "plan", made.plan, spec=made.spec, profiles=made.profiles)
    return folder / "plan"


@pytest.fixture(scope="session")
def place_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A placement of the recorded example."""
    folder = tmp_path_factory.mktemp("place") / "plan"
    made = place(EXAMPLES / "placement" / "balance.yaml", time_limit_s=3.0)
    write_place_plan(folder, made.plan, spec=made.spec, maps=made.maps)
    return folder


@pytest.fixture(scope="session")
def serve_plan() -> ServePlan:
    """A deployment whose numbers are made up; only how they are shown is tested."""
    spec = read_serve_spec(EXAMPLES / "serving" / "mixed-pool.yaml")
    prefill = Instances(
        role=Role.PREFILL,
        pool="h100",
        count=2,
        devices=2,
        attention_dp=2,
        ep=2,
        max_batch=1,
        max_batched_tokens=8192,
        kv_tokens=355_310,
    )
    decode = Instances(
        role=Role.DECODE,
        pool="h20",
        count=3,
        devices=2,
        attention_dp=2,
        ep=2,
        max_batch=107,
        max_batched_tokens=8192,
        kv_tokens=585_997,
    )
    disaggregated = ServeDecision(
        mode="disaggregated",
        instances=(prefill, decode),
        handovers=(
            PlannedKvTransfer(
                from_pool="h100",
                to_pool="h20",
                connector="nixl",
                path="device",
                request_bytes=260_964_352,
                seconds=0.025,
            ),
        ),
    )
    together = ServeDecision(
        mode="aggregated",
        instances=(prefill.model_copy(update={"role": Role.AGGREGATED, "max_batch": 64}),),
    )
    predicted = ServePrediction(
        ttft_s=Latency(mean=0.33, p50=0.14, p90=0.58, p99=4.0),
        ttft_s_band=(0.25, 0.75),
        tpot_s=Latency(mean=0.031, p50=0.030, p90=0.039, p99=0.054),
        tpot_s_band=(0.024, 0.040),
        goodput_per_device=2.0,
        requests_per_s=20.0,
        output_tokens_per_s=7659.0,
        utilisation_ratio={"prefill@h100": 0.46, "decode@h20": 0.49},
        memory_bytes={"prefill@h100": 48_672_922_214, "decode@h20": 85_320_980_492},
        cost_per_hour=21.0,
        breakdown_s={"experts": 0.0236, "attention": 0.0098, "scheduler": 0.001},
    )
    return ServePlan(
        model=spec.model,
        cluster=spec.cluster,
        goal=spec.goal,
        emit=("vllm",),
        decision=disaggregated,
        predicted=predicted,
        certificate=ServeCertificate(
            status="optimal",
            objective=21.0,
            bound=21.0,
            gap_ratio=0.0,
            space=ServeSpace(priced=169, bounded=0, illegal=15),
            within_band=3,
            solve_s=0.4,
            method="milp",
        ),
        binding_constraint="tpot p90",
        alternatives=(
            ServeAlternative(
                decision=together, predicted=predicted, within_band=True, lost_by="nothing"
            ),
        ),
        modes=(
            ServeModeResult(
                mode="disaggregated",
                status="chosen",
                devices=10,
                cost_per_hour=21.0,
                ttft_s=0.33,
                tpot_s=0.031,
            ),
            ServeModeResult(mode="attention_expert", status="none", told="no room"),
        ),
        unlaunchable=(ServeUnlaunchable(feature="experts apart", gain_ratio=0.1),),
        provenance=ServeProvenance(
            moetune_version="0.1.0", spec_sha256="ab" * 32, profile_source={"h100": "datasheet"}
        ),
        files=("launch/vllm/run.sh", "plan.json"),
    )


@pytest.fixture(scope="session")
def serve_folder(serve_plan: ServePlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "plan.json").write_text(serve_plan.model_dump_json(), encoding="utf-8")
    (folder / "launch" / "vllm").mkdir(parents=True)
    (folder / "launch" / "vllm" / "run.sh").write_text("vllm serve\n", encoding="utf-8")
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A plan, `plan.json` as plain values, its report, and its page as text and as elements."""

    folder: Path
    plan: Any
    report: Report
    html: str
    page: Node


@pytest.fixture(scope="session")
def shown(
    verified_folder: Path,
    train_folder: Path,
    serve_folder: Path,
    place_folder: Path,
    page_of: Callable[[Report], str],
    parsed: Callable[[str], Node],
) -> Callable[[str], Shown]:
    """The plan of a kind, made once: shown("verified"), "train", "serve" or "place"."""
    folders = {
        "verified": verified_folder,
        "train": train_folder,
        "serve": serve_folder,
        "place": place_folder,
    }

    @cache
    def of_kind(kind: str) -> Shown:
        folder = folders[kind]
        report = goal_of_folder(folder).report(folder)
        html = page_of(report)
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        return Shown(folder=folder, plan=plan, report=report, html=html, page=parsed(html))

    return of_kind


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a plan's folder for one test."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture(scope="session")
def browser() -> str:
    """An installed Chromium."""
    try:
        return browser_path()
    except EnvironmentMissingError as error:
        pytest.skip(str(error))
