"""Every field of a serving decision through every wording, command and reader."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import pytest

from tests.expect import present
from tests.printed import words_of
from tests.tuner.engines.serving.testing import (
    AFD_ENGINE,
    aggregated,
    attention_expert,
    disaggregated,
    islands,
    routed,
    sample_serving,
    shared_device,
    stages_beside,
)
from tests.tuner.models import example_model
from tuner.config.serve import Instances, Island, PlannedKvTransfer, ServeDecision, ServeRouter
from tuner.config.serve_words import short_serve
from tuner.engines.reading.serve_launch import ServingLaunch, Surroundings
from tuner.engines.serve_writers import SERVE_EMITTERS, emit_serving, unlaunchable
from tuner.engines.serving.scripts import emit
from tuner.engines.serving.shape import GroupShape, group_shapes
from tuner.errors import SpecError, UnknownTargetError
from tuner.estimate.serving.objects import object_commands
from tuner.estimate.serving.registry import read_serving_text
from tuner.estimate.serving.router_launch import read_router
from tuner.goals.registry import load_goal
from tuner.plans.serve import ServeAlternative, ServePlan, VerifiedServing
from tuner.report.content import Depth
from tuner.report.serve_page import serve_report
from tuner.spec.serving.routers import RouterPolicy

GOAL = load_goal("serve")

Fields = dict[str, Any]
NONE: Final[Mapping[str, str]] = MappingProxyType({})

DRAFTS: Final = {"speculative": {"draft_tokens": 2, "acceptance": 0.7, "method": "mtp"}}
INSTANCES: Final[Mapping[str, tuple[ServeDecision, ServeDecision]]] = {
    "role": (disaggregated(), aggregated()),
    "pool": (aggregated(), aggregated(pool="h200")),
    "island": (islands(), islands(names=("b", "a"))),
    "count": (aggregated(), aggregated(count=3)),
    "devices": (aggregated(), aggregated(devices=4, attention_dp=4, ep=4)),
    "attention_tp": (aggregated(), aggregated(attention_tp=2, attention_dp=4)),
    "attention_dp": (
        aggregated(attention_tp=8, attention_dp=1),
        aggregated(attention_tp=4, attention_dp=2),
    ),
    "moe_tp": (
        aggregated(attention_tp=8, attention_dp=1, ep=8),
        aggregated(attention_tp=8, attention_dp=1, moe_tp=8, ep=1),
    ),
    "ep": (
        aggregated(attention_tp=8, attention_dp=1, moe_tp=8, ep=1),
        aggregated(attention_tp=8, attention_dp=1, ep=8),
    ),
    "pp": (
        aggregated(attention_tp=8, attention_dp=1, moe_tp=8, ep=1),
        aggregated(attention_tp=4, attention_dp=1, moe_tp=4, ep=1, pp=2),
    ),
    "stage_machines": (stages_beside(stage_machines=1), stages_beside(stage_machines=2)),
    "dcp": (
        aggregated(attention_tp=8, attention_dp=1, ep=8),
        aggregated(attention_tp=8, attention_dp=1, ep=8, dcp=2),
    ),
    "max_batch": (aggregated(), aggregated(max_batch=128)),
    "max_batched_tokens": (aggregated(), aggregated(max_batched_tokens=4096)),
    "chunked_prefill": (aggregated(), aggregated(chunked_prefill=False)),
    "a2a_backend": (aggregated(a2a_backend="allgather"), aggregated(a2a_backend="deepep_normal")),
    "kv_tokens": (aggregated(), aggregated(kv_tokens=1_000_000)),
    "page_size": (aggregated(), aggregated(page_size=64)),
    "draft_tokens": (aggregated(), aggregated(draft_tokens=2)),
    "two_batch_overlap": (
        aggregated(a2a_backend="deepep_normal"),
        aggregated(a2a_backend="deepep_normal", two_batch_overlap=True),
    ),
    "redundant_experts": (aggregated(), aggregated(redundant_experts=8)),
    "prefill_share_ratio": (shared_device(), shared_device(prefill_share_ratio=0.6)),
    "memory_ratio": (aggregated(), aggregated(memory_ratio=0.8)),
}
"""By field: two deployments that differ in it, and in what must follow."""

DECISIONS: Final[Mapping[str, tuple[ServeDecision, ServeDecision]]] = {
    "mode": (disaggregated(), attention_expert()),
    "instances": (aggregated(), aggregated(count=3)),
    "handovers": (disaggregated(), disaggregated(connector="mooncake")),
    "islands": (islands(), islands(share=0.6)),
    "offload_above_tokens": (
        disaggregated(),
        disaggregated().model_copy(update={"offload_above_tokens": 4096}),
    ),
    "router": (aggregated(), routed(policy="weighted_least_requests")),
}
ROUTERS: Final[Mapping[str, tuple[ServeDecision, ServeDecision]]] = {
    "policy": (routed(policy="round_robin"), routed(policy="least_requests")),
    "decode_policy": (
        routed(by_role=True, policy="least_requests", decode_policy="least_requests"),
        routed(by_role=True, policy="least_requests", decode_policy="round_robin"),
    ),
    "cache_threshold": (
        routed(policy="cache_aware", cache_threshold=0.3),
        routed(policy="cache_aware", cache_threshold=0.1),
    ),
    "ranks": (
        routed(policy="cache_aware", cache_threshold=0.2),
        routed(policy="cache_aware", cache_threshold=0.2, ranks=8),
    ),
}
HANDOVERS: Final[Mapping[str, tuple[ServeDecision, ServeDecision]]] = {
    "from_pool": (disaggregated(), disaggregated(from_pool="h200")),
    "to_pool": (disaggregated(), disaggregated(to_pool="h200")),
    "connector": (disaggregated(), disaggregated(connector="mooncake")),
    "path": (disaggregated(), disaggregated(path="host")),
    "link": (
        disaggregated(
            connector="mooncake", decode={"count": 1, "devices": 4, "attention_dp": 4, "ep": 4}
        ),
        disaggregated(
            connector="mooncake",
            link="scale_up",
            decode={"count": 1, "devices": 4, "attention_dp": 4, "ep": 4},
        ),
    ),
    "request_bytes": (disaggregated(), disaggregated(request_bytes=2**31)),
    "seconds": (disaggregated(), disaggregated(seconds=0.02)),
}
ISLANDS: Final[Mapping[str, tuple[ServeDecision, ServeDecision]]] = {
    "name": (islands(), islands(names=("c", "b"))),
    "share_ratio": (islands(), islands(share=0.6)),
}
UNSAID: Final[Mapping[str, str]] = {
    "pool": "where a script is started decides it; estimate asks with --pool",
    "count": "a script is one instance; estimate asks with --instances",
    "dcp": "no plan has context ranks; estimate alone reads them",
    "kv_tokens": "what the engine finds room for, counted anew by estimate",
    "prefill_share_ratio": "lies in the file that --pdmux-config-path names, beside the script",
    "from_pool": "where scripts are started decides it",
    "to_pool": "where scripts are started decides it",
    "request_bytes": "predicted, not launched",
    "seconds": "predicted, not launched",
    "island": "names the folder that the scripts lie in",
    "name": "names the folder that the scripts of an island lie in",
    "share_ratio": "the router in front of the islands weighs them",
    "islands": "the router in front of the islands weighs them",
    "path": "the connector takes the device's memory where it can",
    "offload_above_tokens": "the router decides by length, not the server",
}
"""Fields that no server's command says."""
FIELDS: Final = {**HANDOVERS, **DECISIONS, **INSTANCES, **ROUTERS, **ISLANDS}


def _plan(decision: ServeDecision, other: ServeDecision) -> ServePlan:
    verified = _verified(decision, "sglang")
    beside = ServeAlternative(
        decision=other,
        predicted=present(verified.plan.predicted),
        within_band=True,
        lost_by="nothing",
    )
    return verified.plan.model_copy(update={"alternatives": (beside,)})


def _verified(decision: ServeDecision, engine: str) -> VerifiedServing:
    model = example_model("deepseek-v3")
    goal: Fields = {"quantization": "fp8_block"}
    if engine == "vllm" and decision.mode == "attention_expert":
        goal |= AFD_ENGINE
    if any(group.draft_tokens for group in decision.instances):
        goal |= DRAFTS
    return sample_serving(
        model,
        decision,
        engine=engine,
        goal=goal,
        devices={"h100": "h200-sxm", "h200": "h200-sxm"},
        waived="test",
    )


def test_every_field_has_a_pair_of_deployments() -> None:
    walked: Mapping[type, Mapping[str, Any]] = {
        Instances: INSTANCES,
        ServeDecision: DECISIONS,
        PlannedKvTransfer: HANDOVERS,
        ServeRouter: ROUTERS,
        Island: ISLANDS,
    }
    for kind, pairs in walked.items():
        assert set(pairs) == set(kind.model_fields), kind.__name__  # type: ignore[attr-defined] # of a pydantic model
    assert set(UNSAID) <= set(FIELDS)


WORDINGS: Final[Mapping[str, Callable[[ServePlan, ServeDecision], str]]] = {
    "a cell of explain": lambda plan, decision: GOAL.words(decision),
    "a cell of the report": lambda plan, decision: short_serve(decision),
    "the screen of a plan": lambda plan, decision: words_of(serve_report(plan), depth=Depth.FIRST),
}


def test_deployments_that_differ_in_a_field_read_differently(none_of: Any) -> None:
    failures = []
    for field, (before, after) in FIELDS.items():
        plans = _plan(before, after), _plan(after, before)
        failures += [
            f"{name}: {field} reads alike"
            for name, say in WORDINGS.items()
            if say(plans[0], before) == say(plans[1], after)
        ]
        if not GOAL.differences(before, after):
            failures.append(f"explain's changes: none where {field} differs")
    none_of(failures)


ENGINES: Final = ("sglang", "vllm", "trtllm")


def _scripts(verified: VerifiedServing) -> dict[str, str] | None:
    """Return the scripts of a deployment by name; None where its router lacks a policy."""
    try:
        files = emit(verified, None)
    except UnknownTargetError:
        return None
    return {
        str(file.path): "\n".join(
            line for line in file.text.splitlines() if not line.startswith("#")
        )
        for file in files
        if file.path.name != "README.txt"
    }


def test_a_field_changes_what_is_emitted_or_is_refused(none_of: Any) -> None:
    failures = []
    for engine in ENGINES:
        for field, (before, after) in FIELDS.items():
            pair = _verified(before, engine), _verified(after, engine)
            if any(unlaunchable(one) for one in pair):
                continue
            before_files, after_files = map(_scripts, pair)
            if before_files is None or after_files is None or before_files != after_files:
                continue
            if field not in UNSAID:
                failures.append(f"{engine}: {field} changes no emitted file")
    none_of(failures)


def _read(launch: ServingLaunch) -> Fields:
    """Return what a command says of an instance, in the fields of a plan."""
    setting, degrees = launch.setting, launch.setting.degrees
    backend = setting.a2a_backend
    return {
        "role": launch.role,
        "devices": degrees.devices,
        "attention_tp": degrees.attention_tensor,
        "attention_dp": degrees.attention_data,
        "moe_tp": degrees.moe_tensor,
        "ep": degrees.expert,
        "pp": degrees.pipeline,
        "stage_machines": degrees.stage_machines,
        "max_batch": setting.running,
        "max_batched_tokens": setting.step_tokens,
        "chunked_prefill": setting.is_chunked,
        # Data ranks whose experts are spread gather when nothing else is said.
        "a2a_backend": "allgather" if backend == "none" and degrees.attention_data > 1 else backend,
        "page_size": setting.page_tokens,
        "draft_tokens": setting.draft_tokens,
        "two_batch_overlap": setting.two_batch_overlap,
        "redundant_experts": setting.redundant_experts,
        "memory_ratio": launch.memory_ratio,
    }


UNREAD: Final[Mapping[tuple[str, str], str]] = {
    ("sglang decode", "max_batched_tokens"): "an instance that only decodes reads no prompts",
    ("vllm decode", "max_batched_tokens"): "under low-latency DeepEP its batch is the budget",
    ("trtllm prefill", "stage_machines"): "MPI starts its ranks where the launcher has them",
    ("trtllm decode", "stage_machines"): "MPI starts its ranks where the launcher has them",
}
"""By engine and role, and field: what no launch of it says."""
NO_SERVER: Final[Mapping[str, str]] = {
    "slurm": "starts the scripts of the engine's folder, which are read",
    "local": "starts the scripts of the engine's folder, which are read",
}
"""Targets whose own files hold no server."""
READ_BY: Final[Mapping[str, Callable[[str], str]]] = {
    "sglang": lambda group: f"{group}.sh",
    "vllm": lambda group: f"{group}.sh",
    "trtllm": lambda group: f"{group}.sh",
    "kubernetes": lambda group: "deployment.yaml",
    "dynamo": lambda group: "graph.yaml",
}
"""Targets whose files are read, and which of them starts a group."""


def _wanted(group: Instances) -> Fields:
    found = group.model_dump()
    if group.a2a_backend == "none" and group.attention_dp > 1:
        found["a2a_backend"] = "allgather"
    return found


def _deployments() -> list[tuple[str, ServeDecision]]:
    """Return every decision of the pairs above once, and two that only one of all has."""
    found = {
        repr(decision): (field, decision) for field, pair in FIELDS.items() for decision in pair
    }
    copies = {"devices": 12, "attention_dp": 12, "ep": 12, "redundant_experts": 8}
    return [
        *found.values(),
        ("copies", aggregated(**copies)),
        ("copies apart", disaggregated(decode=copies | {"a2a_backend": "deepep_low_latency"})),
    ]


def _targets(engine: str, number: int, *, every: bool) -> Iterator[str]:
    """Yield whose files of a deployment are read: the engine's own, and others in turn."""
    yield engine
    for place, target in enumerate([target for target in READ_BY if target not in ENGINES]):
        if every or (number + place - ENGINES.index(engine)) % len(ENGINES) == 0:
            yield target


def _read_back(*, every: bool) -> Iterator[tuple[str, GroupShape, ServingLaunch | SpecError]]:
    """Yield what is read of every group in the files of targets that start servers."""
    for engine in ENGINES:
        for number, (what, decision) in enumerate(_deployments()):
            verified = _verified(decision, engine)
            if unlaunchable(verified):
                continue
            for target in _targets(engine, number, every=every):
                files = _emitted(target, verified)
                for shape in group_shapes(verified) if files else ():
                    at = f"{engine} by {target}: {shape.name} ({what})"
                    text = files[READ_BY[target](shape.name)]
                    try:
                        yield at, shape, _launch(text, verified, shape, beside=files)
                    except SpecError as error:
                        yield at, shape, error


def _emitted(target: str, verified: VerifiedServing) -> dict[str, str]:
    """Return the files of a target by name; none where it refuses to start such instances."""
    try:
        return {str(file.path): file.text for file in emit_serving(target, verified)}
    except UnknownTargetError:
        return {}


def _unlike(shape: GroupShape, launch: ServingLaunch, *, has_count: bool) -> Iterator[str]:
    """Yield fields that are read as something else."""
    found, wanted = _read(launch), _wanted(shape.group)
    assert set(found) == set(Instances.model_fields) - set(UNSAID)
    if has_count:
        found["count"] = launch.replicas
    yield from (name for name, value in found.items() if value != wanted[name])


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_emitted_file_reads_back_to_its_instances(none_of: Any, *, every: bool) -> None:
    assert set(READ_BY) | set(NO_SERVER) == set(SERVE_EMITTERS)
    failures: list[str] = []
    needed, read = set[tuple[str, str]](), dict.fromkeys(READ_BY, 0)
    for at, shape, launch in _read_back(every=every):
        if isinstance(launch, SpecError):
            failures.append(f"{at}: {launch}")
            continue
        engine, _, target = at.partition(":")[0].partition(" by ")
        read[target] += 1
        for name in _unlike(shape, launch, has_count=target not in ENGINES):
            key = (f"{engine} {shape.group.role.value}", name)
            needed.add(key)
            if key not in UNREAD:
                failures.append(f"{at}: {name} reads back as something else: {launch.setting}")
        failures += [f"{at}: unknown flag {flag}" for flag in launch.flags.ignored]
    failures += [f"stale: {entry}" for entry in set(UNREAD) - needed]
    failures += [f"{target}: no file was read" for target, count in read.items() if not count]
    none_of(failures)


def _launch(
    text: str, verified: VerifiedServing, shape: GroupShape, *, beside: Mapping[str, str] = NONE
) -> ServingLaunch:
    pools = verified.plan.cluster.pools
    return read_serving_text(
        text,
        Surroundings(
            model=verified.plan.model,
            pool=next(one for one in pools if one.name == shape.group.pool),
        ),
        engine=verified.plan.goal.engine.name,
        source=shape.name,
        role=shape.group.role.value if text.startswith("#!") else shape.name,
        beside=lambda word: beside.get(word.rpartition("/")[2]),
    )


ROUTER_FILES: Final[Mapping[str, str]] = {
    "sglang": "router.sh",
    "vllm": "router.sh",
    "trtllm": "router.sh",
    "kubernetes": "deployment.yaml",
    "dynamo": "graph.yaml",
}


def _equals(read: ServeRouter | None, wanted: ServeRouter, target: str) -> bool:
    if read is None:
        return False
    if target == "dynamo":
        # One policy for both roles, the one of a role with a choice.
        return read.policy in (wanted.policy, wanted.decode_policy)
    if wanted.cache_threshold is None:
        read = read.model_copy(update={"cache_threshold": None})
    weighted, least = RouterPolicy.WEIGHTED_LEAST_REQUESTS, RouterPolicy.LEAST_REQUESTS
    if wanted.policy is weighted and read.policy is least:
        # Instances of one kind weigh the same.
        read = read.model_copy(update={"policy": weighted})
    return read == wanted


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_emitted_router_reads_back_to_its_policies(none_of: Any, *, every: bool) -> None:
    assert set(ROUTER_FILES) | set(NO_SERVER) == set(SERVE_EMITTERS)
    failures: list[str] = []
    seen: set[tuple[str, str, RouterPolicy]] = set()
    for engine in ENGINES:
        for apart in (False, True):
            for number, policy in enumerate(RouterPolicy):
                threshold = 0.2 if policy is RouterPolicy.CACHE_AWARE else None
                wanted = ServeRouter(
                    policy=policy,
                    decode_policy=policy if apart else None,
                    cache_threshold=threshold,
                )
                verified = _verified(routed(by_role=apart, **wanted.model_dump()), engine)
                for target in _targets(engine, number, every=every):
                    name = ROUTER_FILES[target]
                    if target == "dynamo":
                        wanted = wanted.model_copy(update={"cache_threshold": None})
                    text = _emitted(target, verified).get(name)
                    if text is None:
                        continue
                    texts = object_commands(text, source=name)
                    read = [
                        found
                        for one in ([text] if texts is None else [each.text for each in texts])
                        if (found := read_router(one, source=name)) is not None
                    ]
                    if len(read) != 1 or not _equals(read[0].router, wanted, target):
                        failures.append(f"{engine} by {target}: {wanted} is read as {read}")
                    seen.add((engine, target, policy))
    assert {policy for _, _, policy in seen} == set(RouterPolicy)
    assert {target for _, target, _ in seen} == set(ROUTER_FILES)
    none_of(failures)


def test_files_without_a_server_say_so(none_of: Any) -> None:
    failures = []
    for engine in ENGINES:
        verified = _verified(disaggregated(), engine)
        for target in NO_SERVER:
            for file in emit_serving(target, verified):
                try:
                    launch = _launch(file.text, verified, group_shapes(verified)[0])
                except SpecError as error:
                    if not any(said in str(error) for said in ("starts no server", "is not read")):
                        failures.append(f"{target}/{file.path}: {error}")
                    continue
                failures.append(f"stale: {target}/{file.path} starts a {launch.role} server")
    none_of(failures)
