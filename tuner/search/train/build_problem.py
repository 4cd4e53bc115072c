"""Construction of the problem that is searched, from a spec and the data of its machines.

Options that no published run prices (offloading; CUDA graphs of a whole iteration in models with
experts) are left out unless the spec names them. What no device or target can do is refused in one
line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tuner.config.columns import Strategies
from tuner.config.knobs import OFFLOADS, PRICED_DISPATCHERS
from tuner.config.shapes import number, single
from tuner.config.tune_columns import stack_of, tune_columns
from tuner.costs.train.adapters import num_adapter_parameters
from tuner.costs.train.attention import packed_columns
from tuner.costs.train.calibration import Residuals, constants_of
from tuner.costs.train.columns_of import PRECISION_OF, hardware_of_pool, shape_of_model
from tuner.costs.train.expert_imbalance import expert_imbalances
from tuner.costs.train.measured_profile import MeasuredProfile
from tuner.costs.train.memory_constants import memory_constants
from tuner.costs.train.packing import RULES, PackedRows, pack_rows
from tuner.devices.datasheet import Datasheet, Generation
from tuner.errors import SpecError
from tuner.prices.ops import Prices
from tuner.prices.train.constants import Software
from tuner.search.train.problem import TrainProblem
from tuner.search.train.regimes import priced_release, regime_of
from tuner.spec.cluster import Pool
from tuner.spec.documents import documents_of_law
from tuner.spec.goal import TWO_LEVELS
from tuner.spec.search import Search as Limits
from tuner.spec.spec import Spec

UNPRICED: Final[Mapping[str, str]] = {
    "allgather": "is not priced: it brings every token of the group to every rank, which pays off"
    " in small groups only",
    "hierarchical": "is priced for the reference step alone, on a profile of `moetune profile`",
}
"""Dispatchers that no formula here prices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedPool:
    """A pool with the data that prices it."""

    pool: Pool
    sheet: Datasheet
    residuals: Residuals | None
    measured: MeasuredProfile | None = None
    """Kernels, collectives and memory; None: those of the datasheet."""

    @property
    def memory_limit_bytes(self) -> float:
        """Return the bytes of one device's memory that a plan may use."""
        measured = None if self.measured is None else self.measured.memory_bytes
        stated = self.pool.memory_per_device or measured or self.sheet.memory_bytes
        return stated * self.pool.usable_memory_ratio


def price_pool(
    pool: Pool, *, residuals: Residuals | None, measured: MeasuredProfile | None = None
) -> PricedPool:
    """Describe a pool by its datasheet and its measured profile.

    Residuals fitted on the machine itself go before those given.

    Raises:
        UnknownDeviceError: no description of the pool's device.
    """
    if measured is None:
        return PricedPool(pool=pool, sheet=pool.sheet, residuals=residuals)
    return PricedPool(
        pool=pool,
        sheet=measured.sheet(pool),
        residuals=measured.own_residuals or residuals,
        measured=measured,
    )


def build_problem(spec: Spec, priced_pool: PricedPool) -> TrainProblem:
    """Build the problem to search.

    Raises:
        SpecError: spare nodes leave none, or the routing is of another model.
    """
    tuned = tuned_columns(spec)
    gradient_bytes = int(tuned.pop("gradient_bytes", 0)) or _gradient_bytes(spec)
    target = spec.programs.first
    capabilities = spec.programs.launchable(
        model=spec.model,
        precision=spec.goal.precision,
        gradient_bytes=gradient_bytes,
        adapters=spec.goal.adapters,
    )
    precision = PRECISION_OF[spec.goal.precision.value]
    release = priced_release(spec.programs, spec.goal.engine, priced_pool.residuals).release
    regime = regime_of(
        target,
        priced_pool.sheet,
        precision=spec.goal.precision.value,
        has_experts=spec.model.moe is not None,
        release=release,
    )
    memory_family = target.memory_family or target.family
    routing, record = spec.goal.routing, spec.routing
    mtp = spec.model.mtp_num_layers if capabilities.mtp else 0
    shape = shape_of_model(spec.model, mtp_layers=mtp)
    rows = packed_rows(spec)
    _refuse_precision(spec, priced_pool.sheet)
    _refuse_dispatcher(spec)
    _refuse_host_checkpoints(spec)
    hardware = hardware_of_pool(priced_pool.sheet, priced_pool.pool, precision=precision)
    constants = single(constants_of([regime], priced_pool.residuals))
    prices: Prices | None = None
    if priced_pool.measured is not None:
        prices = priced_pool.measured.prices(
            hardware, constants, precision=spec.goal.precision.value
        )
        hardware = priced_pool.measured.linked(hardware, constants)
    return TrainProblem(
        model=spec.model,
        shape=shape,
        hardware=hardware,
        constants=constants,
        software=regime.software,
        memory_constants=single(memory_constants([regime.software], [memory_family])),
        prices=prices,
        num_devices=planned_devices(spec, priced_pool.pool),
        memory_limit_bytes=priced_pool.memory_limit_bytes,
        usable_memory_ratio=priced_pool.pool.usable_memory_ratio,
        host_limit_bytes=priced_pool.pool.host_limit_bytes(
            None if priced_pool.measured is None else priced_pool.measured.profile
        ),
        devices_per_node=priced_pool.pool.devices_per_node,
        sequence_length=spec.goal.sequence_length,
        global_batch_size=spec.goal.global_batch_size,
        capabilities=capabilities,
        limits=_limits(spec, is_packed=rows is not None),
        precision=spec.goal.precision.value,
        linear_bytes=1.0 if precision.is_narrow else 0.0,
        gradient_bytes=float(gradient_bytes),
        tuned=tuned,
        rows=rows,
        packed={} if rows is None else packed_columns(shape, rows),
        expert_imbalance=(
            None
            if routing is None or record is None
            else expert_imbalances(spec.model, record, routing.phase)
        ),
        price_per_device_hour=priced_pool.pool.price_per_device_hour,
    )


def packed_rows(spec: Spec) -> PackedRows | None:
    """Pack the documents of the goal, or those of the data set that its files name.

    None: every sequence is one document, for all that is known.

    Raises:
        SpecError: the goal has documents, and a target does not keep those of a row apart.
    """
    able, capacity = spec.programs.capabilities(), spec.goal.sequence_length
    rule = next((name for name in RULES if name in able.packing), None)
    documents, usual = spec.documents, spec.programs.first.tuning_documents
    if usual is not None:
        law = usual(spec.model, spec.goal.adapters)
        rule = None if law is None else rule
        documents = documents or (None if law is None else documents_of_law(law))
    if spec.documents is not None and rule is None:
        packing = [
            name for name, target in spec.programs.known.items() if target.capabilities.packing
        ]
        raise SpecError(
            f"goal.sequence_lengths: {' and '.join(able.names)} lets documents of a row attend to"
            f" each other, or does not pack; {', '.join(packing)} keep them apart"
        )
    if documents is None or rule is None:
        return None
    return pack_rows(documents, rule=rule, capacity=capacity, too_long=spec.goal.too_long)


def tuned_columns(spec: Spec) -> dict[str, float]:
    """Return the columns of what the goal trains on the first program's stack."""
    target = spec.programs.first
    stack = stack_of(Software(target.software), target.family)
    return tune_columns(spec.goal.adapters, spec.model, stack)


def adapter_parameters(spec: Spec) -> float:
    """Count what is trained beside frozen weights; 0 where all weights are."""
    if spec.goal.adapters is None:
        return 0.0
    shape = shape_of_model(spec.model, mtp_layers=0)
    strategies = Strategies(
        sequence=1.0, micro_batch=1.0, num_microbatches=1.0, **tuned_columns(spec)
    )
    return number(num_adapter_parameters(shape, strategies))


def _refuse_precision(spec: Spec, sheet: Datasheet) -> None:
    """Refuse a precision that the device has no units for.

    fp8 needs fp8 units; block scales of 32 values (MXFP8) and fp4 need those of Blackwell. The
    engines' MXFP8 stops on compute capability 12 (`check_mxfp8_support` of TransformerEngine
    2.14). fp32 runs on units whose efficiency no published run shows.
    """
    name = spec.goal.precision.value
    if name == "fp32":
        raise SpecError("goal.precision: 'fp32' is priced on measured profiles only; bf16 works")
    needs = "fp4" if name == "nvfp4" else "fp8" if "fp8" in name else "bf16"
    can = needs in sheet.flop_per_s and (
        name != "mxfp8" or sheet.generation is Generation.BLACKWELL
    )
    if not can:
        raise SpecError(
            f"goal.precision: {sheet.name} has no units for {name!r}; "
            f"{'fp8-tensorwise' if 'fp8' in sheet.flop_per_s else 'bf16'} works"
        )


def _refuse_dispatcher(spec: Spec) -> None:
    """Refuse dispatchers of which none can be both priced here and launched.

    Otherwise the search would end empty, and its rule counts would name the wrong reason.
    """
    requested = spec.search.dispatcher
    able = spec.programs.capabilities().dispatchers
    usable = (
        [dispatcher for dispatcher in PRICED_DISPATCHERS if dispatcher in able]
        if spec.model.moe
        else ["alltoall"]
    )
    if requested is None or set(requested) & set(usable):
        return
    if spec.model.moe is None:
        reasons = ["a model without experts has nothing to dispatch"]
    else:
        engines = ", ".join(spec.programs.capabilities().names)
        reasons = [
            f"{dispatcher!r} {UNPRICED.get(dispatcher, f'cannot be launched by {engines}')}"
            for dispatcher in requested
        ]
    works = ", ".join(map(repr, usable))
    raise SpecError(f"search.dispatcher: {'; '.join(reasons)}; {works} would do")


def _refuse_host_checkpoints(spec: Spec) -> None:
    """Refuse stated checkpoints on hosts that the targets do not have."""
    stated, able = spec.goal.reliability, spec.programs.capabilities()
    if stated is None or stated.checkpoint.levels != TWO_LEVELS:
        return
    if not able.host_checkpoint_zero_stages:
        reason = spec.programs.host_checkpoint_obstacle(zero_stage=0, offloads_optimizer=False)
        raise SpecError(f"goal.reliability.checkpoint.levels: {reason}; or write auto")


def _gradient_bytes(spec: Spec) -> int:
    """Return 4 unless the user names 2, which is faster and takes less memory.

    Raises:
        SpecError: the targets have none of those named.
    """
    requested = spec.search.gradient_bytes or (4,)
    able = spec.programs.capabilities().gradient_bytes
    launchable = sorted(set(requested) & able)
    if not launchable:
        raise SpecError(
            f"search.gradient_bytes: {', '.join(map(str, requested))} cannot be launched by"
            f" {', '.join(spec.emit)}; {', '.join(map(str, sorted(able))) or 'nothing'} can"
        )
    return launchable[0]


def _limits(spec: Spec, *, is_packed: bool) -> Limits:
    """Leave out what no published run prices, unless the user names it.

    That is offloading to host memory, and in models with experts CUDA graphs of a whole iteration,
    which need a capacity factor that may drop tokens.
    """
    requested = spec.search
    defaults: dict[str, object] = {
        name: (False,) for name in OFFLOADS if getattr(requested, name) is None
    }
    if spec.model.moe is not None and requested.cuda_graph is None:
        defaults["cuda_graph"] = ("none", "partial")
    if is_packed and spec.programs.capabilities().packing_needs_single_rows:
        defaults |= _single_rows(spec)
    return requested.model_copy(update=defaults)


def _single_rows(spec: Spec) -> dict[str, object]:
    """Return the limits of a target that packs micro-batches of one row alone.

    Padded to whole sequences, documents that the goal does not state may have others if asked for.
    """
    needed: dict[str, object] = {"micro_batch_size": 1, "cuda_graph": "none"}
    for name, value in tuple(needed.items()):
        requested = getattr(spec.search, name)
        if requested is not None and value not in requested:
            if spec.documents is None:
                return {}
            raise SpecError(
                f"search.{name}: packed rows (goal.sequence_lengths) need {value} in"
                f" {', '.join(spec.emit)}, and {', '.join(map(str, requested))} is asked for"
            )
    return {name: (value,) for name, value in needed.items()}


def planned_devices(spec: Spec, pool: Pool) -> int:
    """Devices of a pool without those of the spare nodes."""
    stated = spec.goal.reliability
    spare = 0 if stated is None else stated.num_spare_nodes
    if spare >= pool.nodes:
        raise SpecError(
            f"goal.reliability.spare_nodes: {spare} leaves none of the {pool.nodes} nodes of pool "
            f"{pool.name!r}; keep back {pool.nodes - 1} at most"
        )
    return (pool.nodes - spare) * pool.devices_per_node
