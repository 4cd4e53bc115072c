"""From a spec and what is known of its machines to the question that is searched.

What no published run prices (offloading, with experts graphs of a whole iteration) is left out
unless the spec names it; what no device or target can do is refused in one line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tuner.costs.analytic.calibration import Residuals, constants_of
from tuner.costs.analytic.columns_of import PRECISION_OF, hardware_of_pool, shape_of_model
from tuner.costs.analytic.constants import Precision
from tuner.costs.analytic.kernels import Kernels
from tuner.costs.analytic.measured_profile import MeasuredProfile
from tuner.costs.analytic.memory_constants import memory_constants
from tuner.costs.analytic.routing import busiest_ratios
from tuner.costs.analytic.shapes import single
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Datasheet, Generation
from tuner.errors import SpecError
from tuner.planner.analytic.axes import DISPATCHERS
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.regimes import regime_of
from tuner.planner.analytic.releases import priced_release
from tuner.spec.capabilities import intersection, launchable
from tuner.spec.cluster import Pool
from tuner.spec.search import Search as Limits
from tuner.spec.spec import Spec

UNPRICED: Final[Mapping[str, str]] = {
    "allgather": "is not priced: it brings every token of the group to every rank, which pays off"
    " in small groups only",
    "hierarchical": "is priced for the reference step alone, on a profile of `moetune profile`",
}
"""Dispatchers that no formula here prices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """What the plan rests on beside the spec."""

    pool: Pool
    sheet: Datasheet
    residuals: Residuals | None
    measured: MeasuredProfile | None = None
    """Kernels, collectives and memory; None: those of the datasheet."""

    @property
    def memory_limit_bytes(self) -> float:
        """What a plan may use of one device."""
        measured = None if self.measured is None else self.measured.memory_bytes
        stated = self.pool.memory_per_device or measured or self.sheet.memory_bytes
        return stated * self.pool.usable_memory_ratio


def site_of(
    pool: Pool, *, residuals: Residuals | None, measured: MeasuredProfile | None = None
) -> Site:
    """Describe a pool from its datasheet, and from what was measured there.

    Residuals that were fitted on the machine itself go before those given.

    Raises:
        UnknownDeviceError: no description of the pool's device.
    """
    if measured is None:
        return Site(pool=pool, sheet=find_device(pool.device or ""), residuals=residuals)
    return Site(
        pool=pool,
        sheet=measured.sheet(pool),
        residuals=measured.own_residuals or residuals,
        measured=measured,
    )


def question_of(spec: Spec, site: Site) -> Question:
    """State what is searched.

    Raises:
        SpecError: spare nodes leave none, or the routing is of another model.
    """
    gradient_bytes = _gradient_bytes(spec)
    capabilities = launchable(
        spec.emit, precision=spec.goal.precision, gradient_bytes=gradient_bytes
    )
    precision = PRECISION_OF[spec.goal.precision.value]
    release = priced_release(spec.emit, spec.goal.engine, site.residuals).release
    regime = regime_of(spec.emit, site.sheet, precision=spec.goal.precision.value, release=release)
    routing, record = spec.goal.routing, spec.routing
    is_low = precision is not Precision.BF16
    mtp = spec.model.mtp_num_layers if capabilities.mtp else 0
    _refuse_precision(spec, site.sheet)
    _refuse_dispatcher(spec)
    hardware = hardware_of_pool(site.sheet, site.pool, precision=precision)
    constants = single(constants_of([regime], site.residuals))
    kernels: Kernels | None = None
    if site.measured is not None:
        kernels = site.measured.kernels(hardware, constants, precision=spec.goal.precision.value)
        hardware = site.measured.linked(hardware, constants)
    return Question(
        model=spec.model,
        shape=shape_of_model(spec.model, mtp_layers=mtp),
        hardware=hardware,
        constants=constants,
        software=regime.software,
        memory_constants=single(memory_constants([regime.software], [regime.family])),
        kernels=kernels,
        num_devices=_num_devices(spec, site.pool),
        memory_limit_bytes=site.memory_limit_bytes,
        usable_memory_ratio=site.pool.usable_memory_ratio,
        sequence_length=spec.goal.sequence_length,
        global_batch_size=spec.goal.global_batch_size,
        capabilities=capabilities,
        limits=_limits(spec),
        precision=spec.goal.precision.value,
        element_bytes=4.0 if spec.goal.precision.value == "fp32" else 2.0,
        linear_bytes=1.0 if is_low else 0.0,
        gradient_bytes=float(gradient_bytes),
        busiest=(
            None
            if routing is None or record is None
            else busiest_ratios(spec.model, record, routing.phase)
        ),
        price_per_device_hour=site.pool.price_per_device_hour,
    )


def _refuse_precision(spec: Spec, sheet: Datasheet) -> None:
    """Refuse products that the device has no units for.

    fp8 needs fp8 units, block scales of 32 values (MXFP8) and fp4 those of Blackwell. fp32 runs on
    units that no published run tells the reached share of.
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

    Without this the search would end empty, and the rules that it counts would take the blame.
    """
    asked = spec.search.dispatcher
    able = intersection(spec.emit).dispatchers
    usable = [one for one in DISPATCHERS if one in able] if spec.model.moe else ["alltoall"]
    if asked is None or set(asked) & set(usable):
        return
    if spec.model.moe is None:
        reasons = ["a model without experts has nothing to dispatch"]
    else:
        engines = ", ".join(intersection(spec.emit).names)
        reasons = [
            f"{one!r} {UNPRICED.get(one, f'cannot be launched by {engines}')}" for one in asked
        ]
    works = ", ".join(map(repr, usable))
    raise SpecError(f"search.dispatcher: {'; '.join(reasons)}; {works} would do")


def _gradient_bytes(spec: Spec) -> int:
    """Return 4 unless the user names 2, the faster and leaner of the two.

    Raises:
        SpecError: the targets have none of those named.
    """
    asked = spec.search.gradient_bytes or (4,)
    able = intersection(spec.emit).gradient_bytes
    launchable = sorted(set(asked) & able)
    if not launchable:
        raise SpecError(
            f"search.gradient_bytes: {', '.join(map(str, asked))} cannot be launched by"
            f" {', '.join(spec.emit)}; {', '.join(map(str, sorted(able))) or 'nothing'} can"
        )
    return launchable[0]


def _limits(spec: Spec) -> Limits:
    """Leave out what no published run prices, unless the user names it.

    Offloading to host memory, and with experts graphs of a whole iteration, which need a capacity
    that may drop tokens.
    """
    asked = spec.search
    unasked: dict[str, object] = {
        name: (False,)
        for name in ("optimizer_offload", "activation_offload")
        if getattr(asked, name) is None
    }
    if spec.model.moe is not None and asked.cuda_graph is None:
        unasked["cuda_graph"] = ("none", "partial")
    return asked.model_copy(update=unasked)


def _num_devices(spec: Spec, pool: Pool) -> int:
    stated = spec.goal.reliability
    spare = 0 if stated is None else stated.spare_nodes
    if spare >= pool.nodes:
        raise SpecError(
            f"goal.reliability.spare_nodes: {spare} leaves none of the {pool.nodes} nodes of pool "
            f"{pool.name!r}; keep back {pool.nodes - 1} at most"
        )
    return (pool.nodes - spare) * pool.devices_per_node
