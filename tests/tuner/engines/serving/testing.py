"""A verified deployment of round numbers, for tests of emitters."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import yaml

from tests.tuner.engines.testing import texts_of
from tuner.config.serve import (
    Instances,
    Island,
    PlannedKvTransfer,
    Role,
    ServeDecision,
    ServeRouter,
)
from tuner.engines.serve_writers import emit_serving
from tuner.plans.serve import (
    Latency,
    ServeCertificate,
    ServePlan,
    ServePrediction,
    ServeProvenance,
    ServeSpace,
    VerifiedServing,
)
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import ServeGoal


def sample_instances(role: Role, **changes: Any) -> Instances:
    """Return two instances of 8 devices, attention and experts spread over all of them."""
    fields: dict[str, Any] = {
        "role": role,
        "pool": "h100",
        "count": 2,
        "devices": 8,
        "attention_dp": 8,
        "ep": 8,
        "max_batch": 64,
        "max_batched_tokens": 8192,
        "chunked_prefill": True,
        "a2a_backend": "none",
    }
    return Instances.model_validate(fields | changes)


def aggregated(**changes: Any) -> ServeDecision:
    """Return two aggregated instances."""
    group = sample_instances(Role.AGGREGATED, **changes)
    return ServeDecision(mode="aggregated", instances=(group,))


def routed(*, by_role: bool = False, **router: Any) -> ServeDecision:
    """Return several instances behind a router: aggregated ones, or prefill and decode apart."""
    decode = {"count": 2, "devices": 8, "attention_dp": 8, "ep": 8}
    decision = disaggregated(decode=decode) if by_role else aggregated()
    return decision.model_copy(update={"router": ServeRouter.model_validate(router)})


def shared_device(**changes: Any) -> ServeDecision:
    """Return two instances whose devices prefill and decode share."""
    fields = {
        "attention_dp": 1,
        "attention_tp": 8,
        "chunked_prefill": False,
        "prefill_share_ratio": 0.4,
    }
    return ServeDecision(
        mode="shared_device",
        instances=(sample_instances(Role.AGGREGATED, **(fields | changes)),),
    )


def islands(
    *,
    names: tuple[str, str] = ("a", "b"),
    share: float = 0.75,
    pools: tuple[str, str] = ("h100", "h200"),
) -> ServeDecision:
    """Return two islands of one aggregated instance each."""
    return ServeDecision(
        mode="aggregated",
        instances=tuple(
            sample_instances(Role.AGGREGATED, island=name, pool=pool, count=1)
            for name, pool in zip(names, pools, strict=True)
        ),
        islands=(
            Island(name=names[0], share_ratio=share),
            Island(name=names[1], share_ratio=1.0 - share),
        ),
    )


def disaggregated(
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **transfer: Any,
) -> ServeDecision:
    """Return three prefill instances of 4 devices and a decode instance over two machines."""
    first = {"count": 3, "devices": 4, "attention_dp": 4, "ep": 4}
    last = {"count": 1, "devices": 16, "attention_dp": 16, "ep": 16}
    fields: dict[str, Any] = {
        "from_pool": "h100",
        "to_pool": "h100",
        "connector": "nixl",
        "path": "device",
        "request_bytes": 2**30,
        "seconds": 0.01,
    }
    return ServeDecision(
        mode="disaggregated",
        instances=(
            sample_instances(Role.PREFILL, **(first | (prefill or {}))),
            sample_instances(Role.DECODE, **(last | (decode or {}))),
        ),
        handovers=(PlannedKvTransfer.model_validate(fields | transfer),),
    )


def attention_expert(
    *,
    prefill: dict[str, Any] | None = None,
    attention: dict[str, Any] | None = None,
    expert: dict[str, Any] | None = None,
    **transfer: Any,
) -> ServeDecision:
    """Return three prefill instances, and two cells of 4 attention and 2 expert devices."""
    first = {"count": 3, "devices": 4, "attention_dp": 4, "ep": 4}
    small = {"max_batched_tokens": 1024, "chunked_prefill": True}
    four = {"devices": 4, "attention_dp": 4, "ep": 1, **small}
    two = {"devices": 2, "attention_dp": 2, "ep": 2, **small}
    return ServeDecision(
        mode="attention_expert",
        instances=(
            sample_instances(Role.PREFILL, **(first | (prefill or {}))),
            sample_instances(Role.ATTENTION, **(four | (attention or {}))),
            sample_instances(Role.EXPERT, **(two | (expert or {}))),
        ),
        handovers=disaggregated(**transfer).handovers,
    )


AFD_ENGINE: dict[str, Any] = {"engine": {"name": "vllm", "version": "0.30.0+afd"}}
"""The goal's engine for `attention_expert`."""


def stages_beside(*, stage_machines: int) -> ServeDecision:
    """Return prefill and decode in two stages of 4 devices, which share machines if spread."""
    stages = {"attention_dp": 1, "attention_tp": 4, "moe_tp": 4, "ep": 1, "pp": 2, "devices": 8}
    group = stages | {"count": 1, "stage_machines": stage_machines}
    return disaggregated(prefill=group, decode=group, connector="mooncake", link="scale_up")


def sample_serving(
    model: ModelSpec,
    decision: ServeDecision,
    *,
    engine: str = "sglang",
    emit: tuple[str, ...] = (),
    goal: dict[str, Any] | None = None,
    devices_per_node: int = 8,
    devices: Mapping[str, str] = MappingProxyType({}),
    waived: str = "",
) -> VerifiedServing:
    """Return a plan of round numbers for the decision; pools are of H100s unless `devices` says."""
    asked: dict[str, Any] = {
        "kind": "serve",
        "engine": {"name": engine},
        "traffic": {"concurrency": 256, "input_tokens": 4000, "output_tokens": 1000},
        "slo": {"ttft": {"p90": 2.0}, "tpot": {"p90": 0.05}},
        "max_model_len": 8192,
    }
    pools = sorted({group.pool for group in decision.instances})
    plan = ServePlan(
        model=model,
        cluster=Cluster(
            pools=tuple(
                Pool(
                    name=name,
                    device=devices.get(name, "h100"),
                    nodes=64,
                    devices_per_node=devices_per_node,
                )
                for name in pools
            )
        ),
        goal=ServeGoal.model_validate(asked | (goal or {})),
        emit=emit or (engine,),
        decision=decision,
        predicted=_PREDICTED,
        certificate=ServeCertificate(
            status="optimal",
            objective=1.0,
            bound=1.0,
            gap_ratio=0.0,
            space=ServeSpace(priced=1, bounded=0, illegal=0),
            within_band=0,
            solve_s=0.1,
            method="cbc",
        ),
        binding_constraint="tpot",
        provenance=ServeProvenance(
            moetune_version="0.1.0", spec_sha256="0" * 64, profile_source={"h100": "measured"}
        ),
    )
    return VerifiedServing(plan=plan, decision=decision, predicted=_PREDICTED, waived=waived)


_PREDICTED = ServePrediction(
    ttft_s=Latency(mean=0.5, p50=0.4, p90=0.9, p99=1.5),
    ttft_s_band=(0.4, 0.7),
    tpot_s=Latency(mean=0.02, p50=0.02, p90=0.03, p99=0.04),
    tpot_s_band=(0.018, 0.023),
    goodput_per_device=0.5,
    requests_per_s=14.0,
    output_tokens_per_s=14000.0,
    utilisation_ratio={"decode@h100": 0.8},
    memory_bytes={"decode@h100": 60 * 2**30},
    breakdown_s={"moe": 0.01},
)


def dynamo_graph(verified: VerifiedServing) -> tuple[str, Any]:
    """Return the text of Dynamo's graph.yaml and the deployment in it."""
    text = texts_of(emit_serving("dynamo", verified))["graph.yaml"]
    (graph,) = (
        each for each in yaml.safe_load_all(text) if each["kind"] == "DynamoGraphDeployment"
    )
    return text, graph
