"""Notes on the assumptions behind a plan's numbers, one line each."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from profilers.records import Profile
from tuner.catalog.programs import background_checkpoint_obstacle
from tuner.config.host_memory import RENAMED, STATED_AS
from tuner.engines.assumptions import plan_assumptions
from tuner.engines.targets import programs
from tuner.faults.failure_rates import observed_rates
from tuner.faults.measured import (
    host_memory_rates,
    load_bytes_per_s,
    node_bytes_per_s,
)
from tuner.faults.resolved import (
    HOST_MEMORY_BYTES_PER_S,
    USUAL_NODE_BYTES_PER_S,
)
from tuner.goals.profiles import is_of_device
from tuner.plans.train import Plan
from tuner.report.run_section import run_notes
from tuner.search.reasons import MEMORY_LIMIT, unmeasured_links, zero_experts_note
from tuner.search.reference.layer_costs import PricedMachine
from tuner.search.train.build_problem import packed_rows
from tuner.spec.cluster import Pool
from tuner.spec.spec import Spec
from tuner.units import format_bytes, format_bytes_per_s, format_counted, format_ratio, format_s
from tuner.verify.launches import REFERENCE

if TYPE_CHECKING:
    from tuner.costs.train.measured_profile import MeasuredProfile


def analytic_notes(
    spec: Spec, measured: Mapping[str, "MeasuredProfile"], *, calibrated: bool
) -> tuple[str, ...]:
    """Return the assumptions of a plan on the analytic model."""
    notes = []
    if spec.routing is None and spec.model.moe is not None:
        notes.append("routing is assumed balanced: no recording was given (goal.routing)")
    notes += _rows_notes(spec)
    if spec.model.moe is not None and spec.model.moe.zero_experts:
        notes.append(zero_experts_note(spec.model.moe))
    notes += _reliability_notes(
        spec, {name: pool_profile.profile for name, pool_profile in measured.items()}
    )
    if measured:
        if calibrated and not all(pool_profile.own_residuals for pool_profile in measured.values()):
            notes.append("what was not measured is corrected by residuals of published runs")
        return tuple(notes)
    if calibrated:
        notes.append(
            "planned on the device's datasheet and on residuals of published runs; measure your "
            "machine with `moetune profile`"
        )
    else:
        notes.append("planned on the device's datasheet only: the error band is wide")
    return tuple(notes)


def _rows_notes(spec: Spec) -> Iterator[str]:
    """Say which documents are packed where the goal states none, and what is not priced."""
    rows = packed_rows(spec)
    if rows is not None and spec.documents is None:
        yield (
            f"the launch packs the samples that its recipe names, some"
            f" {rows.capacity / rows.documents_per_row:.0f} tokens each; state the lengths of yours"
            " (goal.sequence_lengths)"
        )
    if rows is not None:
        yield (
            "waits for rows that cost more than others are not priced over several pools"
            if len(spec.cluster.pools) > 1
            else "the bound knows no waits for rows that cost more than others; the gap holds them"
        )


def _reliability_notes(spec: Spec, measured: Mapping[str, Profile]) -> Iterator[str]:
    """Yield what the forecast of failures assumes."""
    yield from _assumed_checkpoints(spec, measured)
    yield from _assumed_host_memory(spec, measured)
    yield from _measured_loads(spec, measured)
    yield from _failure_notes(spec)
    stated = spec.goal.reliability
    if stated is not None and stated.checkpoint.keeps_host_copies and len(spec.cluster.pools) > 1:
        yield "checkpoints on hosts are not priced over several pools at once"
    yield from _assumed_losses(spec)
    if stated is not None and stated.checkpoint.host_memory is not None:
        yield RENAMED


def with_assumptions(plan: Plan) -> Plan:
    """Add what a plan assumes and what it leaves unused to its notes."""
    run = None if plan.predicted is None else plan.predicted.run
    notes = [*plan.provenance.notes, *_batch_notes(plan)]
    if run is not None:
        notes += run_notes(run)
    if plan.decision is not None:
        notes += [*_write_mode_notes(plan), *_restart_notes(plan)]
        notes += plan_assumptions(
            programs(plan.emit).chosen,
            plan.model,
            plan.goal,
            plan.decision,
        )
    provenance = plan.provenance.model_copy(update={"notes": tuple(notes)})
    return plan.model_copy(update={"provenance": provenance})


def _batch_notes(plan: Plan) -> Iterator[str]:
    """Name the nearest global batches that use every node, where this one leaves some unused."""
    if len(plan.cluster.pools) > 1:
        return
    (pool,), decision, stated = plan.cluster.pools, plan.decision, plan.goal.reliability
    run = None if plan.predicted is None else plan.predicted.run
    choice = None if run is None else run.spares
    nodes = pool.nodes - (0 if stated is None else stated.num_spare_nodes)
    if choice is not None:
        nodes = choice.pool_nodes - choice.chosen.spare_nodes
    devices = nodes * pool.devices_per_node
    if decision is not None and decision.num_devices >= devices:
        return
    if decision is None and any(
        relaxation.limit == MEMORY_LIMIT for relaxation in plan.relaxations
    ):
        return
    widest = pool.devices_per_node
    if decision is not None:
        widest = decision.num_devices // decision.data_parallel_size
    # The devices of a replica: the plan's, or the next fewer that divide the nodes.
    width = max(size for size in range(1, widest + 1) if devices % size == 0)
    replicas, batch = devices // width, plan.goal.global_batch_size
    below = batch // replicas * replicas
    if below == batch:
        return
    near = " or ".join(f"{sequences:,}" for sequences in (below, below + replicas) if sequences)
    yield (
        f"a global batch of {near} sequences would use all of {nodes} nodes:"
        f" {replicas} replicas of {format_counted(width, 'device')} do not divide {batch:,}"
    )


def _write_mode_notes(plan: Plan) -> Iterator[str]:
    """Say how checkpoints are written where the spec leaves it open, or asks for what cannot be."""
    stated = plan.goal.reliability
    run = None if plan.predicted is None else plan.predicted.run
    if stated is None or run is None or plan.decision is None or not stated.checkpoint.asynchronous:
        return
    if run.checkpoint_in_background:
        if stated.checkpoint.asynchronous == "auto":
            yield "checkpoints are written in the background"
        return
    reason = background_checkpoint_obstacle(
        programs(plan.emit).capabilities(), zero_stage=plan.decision.zero_stage
    )
    pool = plan.cluster.pools[0]
    copied = run.checkpoint_bytes * pool.devices_per_node / plan.decision.num_devices
    limit = pool.host_limit_bytes(None)
    if not reason and limit is not None and copied > limit:
        reason = f"a copy takes more of a node's memory than {format_bytes(limit)} ({STATED_AS})"
    yield (
        "training waits until checkpoints are written: "
        f"{reason or 'more of the time trains than with writes in the background'}"
    )


def _restart_notes(plan: Plan) -> Iterator[str]:
    """Say how the job restarts after failures of processes alone, where the spec has two ways."""
    stated, decision = plan.goal.reliability, plan.decision
    if stated is None or decision is None or stated.in_process_restart is None:
        return
    reason = programs(plan.emit).in_process_restart_obstacle(zero_stage=decision.zero_stage)
    if reason:
        yield f"goal.reliability.in_process_restart has no effect: {reason}"
    run = None if plan.predicted is None else plan.predicted.run
    restart = None if run is None else run.process_restart
    if restart is None:
        return
    inside_s, full_s = format_s(restart.in_process_s), format_s(restart.full_s)
    if restart.decision == "full":
        yield (
            f"after failures of processes alone all of them start again in {full_s}: a restart"
            f" inside them takes {inside_s}"
        )
        return
    ratios = (restart.effective_time_ratio, restart.full_effective_time_ratio)
    inside, full = (format_ratio(ratio, digits=2) for ratio in ratios)
    yield (
        f"after failures of processes alone the job restarts inside them in {inside_s}: {inside} of"
        f" the time trains, against {full} if all processes started again in {full_s}"
    )


def _failure_notes(spec: Spec) -> Iterator[str]:
    """Say what the failure log shows."""
    if spec.failures is None:
        return
    for rate in observed_rates(spec.failures):
        if rate.count:
            whose = "device" if rate.component == "device" else "machine"
            low, high = map(format_s, rate.mtbf_s_band)
            yield (
                f"{rate.count:,} failures of {rate.component} in the log: one in"
                f" {format_s(rate.mtbf_s)} of a {whose} (between {low} and {high})"
            )


def _assumed_losses(spec: Spec) -> Iterator[str]:
    """Note the assumed share of losses that take replicas along where copies may be on hosts."""
    stated = spec.goal.reliability
    if stated is None or not stated.checkpoint.keeps_host_copies:
        return
    if "lost_together" not in stated.model_fields_set:
        yield (
            f"{format_ratio(stated.lost_together)} of lost machines are assumed to take the"
            " replicas of their copies along, e.g. with a rack; checkpoints on shared storage are"
            " as rare as that allows: set goal.reliability.lost_together, or checkpoint.interval"
        )


def _assumed_checkpoints(spec: Spec, measured: Mapping[str, Profile]) -> Iterator[str]:
    """Note the assumed checkpoint bandwidth where it is neither stated nor measured."""
    stated = spec.goal.reliability
    if stated is None or stated.checkpoint.bandwidth is not None:
        return
    assumed = [
        pool.name
        for pool in spec.cluster.pools
        if pool.name not in measured or node_bytes_per_s(measured[pool.name], kind="write") is None
    ]
    if assumed:
        where = f" of pool {', '.join(assumed)}" if len(spec.cluster.pools) > 1 else ""
        yield (
            f"checkpoint bandwidth is assumed to be {format_bytes_per_s(USUAL_NODE_BYTES_PER_S)} a"
            f" machine{where}; set goal.reliability.checkpoint.bandwidth (all machines"
            " together) or measure it with `moetune profile --suite storage`"
        )


def _assumed_host_memory(spec: Spec, measured: Mapping[str, Profile]) -> Iterator[str]:
    """Note the assumed rates of host memory where checkpoints rest on them."""
    stated = spec.goal.reliability
    if stated is None:
        return
    keeps_copies = stated.checkpoint.keeps_host_copies
    pools = (pool.name for pool in spec.cluster.pools)
    is_measured = all(
        name in measured
        and host_memory_rates(measured[name]).keys() >= HOST_MEMORY_BYTES_PER_S.keys()
        for name in pools
    )
    if is_measured or not (keeps_copies or stated.checkpoint.asynchronous):
        return
    usual = {kind: format_bytes_per_s(rate) for kind, rate in HOST_MEMORY_BYTES_PER_S.items()}
    files = ""
    if keeps_copies:
        files = f", files in memory to be written at {usual['save']} and read at {usual['load']}"
    yield (
        "what a device saves is assumed to be copied into its host's memory at"
        f" {usual['fresh']}{files}; measure that with `moetune profile"
        " --suite storage`"
    )


def _measured_loads(spec: Spec, measured: Mapping[str, Profile]) -> Iterator[str]:
    """Say how fast checkpoints are loaded where that was measured."""
    if spec.goal.reliability is None:
        return
    for pool in spec.cluster.pools:
        ranks = spec.programs.loading_ranks(devices_per_node=pool.devices_per_node)
        if pool.name not in measured or not ranks:
            continue
        rate = load_bytes_per_s(measured[pool.name], ranks=ranks)
        if rate is not None:
            yield (
                f"a machine of pool {pool.name!r} loads {format_bytes_per_s(rate)} of a checkpoint"
                " at most, as the profile measured with PyTorch's distributed format"
            )


def profile_notes(spec: Spec, measured: Mapping[str, "MeasuredProfile"]) -> Iterator[str]:
    """Describe each profile, and the residuals stored with it."""
    for pool in spec.cluster.pools:
        if pool.name not in measured:
            continue
        pool_profile = measured[pool.name]
        header = pool_profile.profile.header
        yield (
            f"pool {pool.name!r}: {pool_profile.source} on {header.machine.device}, "
            f"{pool_profile.path.name}"
        )
        if pool.device is not None and not is_of_device(header, pool):
            yield (
                f"the profile was measured on {header.machine.device!r}, the pool says "
                f"{pool.device!r}"
            )
        if pool_profile.own_residuals is not None:
            yield f"residuals of the profile itself: {pool_profile.own_residuals.origin}"
        for name, info in sorted(header.tables.items()):
            if not info.complete:
                yield f"table {name}: {info.note}"


def reference_notes(
    spec: Spec, pool: Pool, profile: Profile, machine: PricedMachine
) -> tuple[str, ...]:
    """Return the assumptions of a plan on the reference engine's profile."""
    measured = profile.header.machine
    notes = []
    if spec.routing is None and spec.model.moe is not None:
        notes.append("routing is assumed balanced: no recording was given (goal.routing)")
    if pool.device is not None and pool.device.casefold() not in measured.device.casefold():
        notes.append(
            f"the profile was measured on {measured.device!r}, the pool says {pool.device!r}"
        )
    notes += unmeasured_links(
        measured_ranks=measured.world,
        measured_nodes=measured.nodes,
        devices=pool.num_devices,
        nodes=pool.nodes,
    )
    notes += _without_effect(spec, pool)
    notes += _reliability_notes(spec, {pool.name: profile})
    if measured.oversubscribed:
        notes.append("the profile ran more ranks than cores or accelerators")
    notes.append(
        "no probability of running out of memory is stated: there are no published peaks of the"
        " reference step; `moetune verify` measures them"
    )
    residual = machine.residual
    if residual.engine != REFERENCE:
        notes.append(
            "operations are those of the reference step, not"
            f" {residual.engine}'s own: "
            + (
                f"times are corrected by {residual.origin}"
                if residual.num_runs
                else "verify this plan, and plan again with its folder as --profile"
            )
        )
    if residual.num_runs == 0:
        notes.append(f"error band: {machine.residual.origin}")
    elif residual.release not in ("", measured.libraries.get("torch", "")):
        notes.append(
            f"error band: from torch {machine.residual.release}, the profile is of "
            f"{measured.libraries.get('torch', 'no torch')}"
        )
    notes += [
        f"table {name}: {info.note}"
        for name, info in sorted(profile.header.tables.items())
        if not info.complete
    ]
    return tuple(notes)


def _without_effect(spec: Spec, pool: Pool) -> tuple[str, ...]:
    """Name the spec's fields that have no effect here."""
    unused = {
        "cluster.links": bool(spec.cluster.links),
        f"cluster.pools.{pool.name}.nic": pool.nic is not None,
        f"cluster.pools.{pool.name}.nics_per_node": pool.nics_per_node is not None,
        f"cluster.pools.{pool.name}.oversubscription": pool.oversubscription != 1.0,
        f"cluster.pools.{pool.name}.scale_up_domain": pool.scale_up_domain is not None,
        f"cluster.pools.{pool.name}.link_matrix": pool.link_matrix is not None,
        "goal.engine": spec.goal.engine is not None,
        "goal.failed_start": spec.goal.failed_start is not None,
    }
    return tuple(
        f"{name} has no effect on a profile of the reference step"
        for name, is_set in unused.items()
        if is_set
    )
