"""What each engine can take of a placement, and how far the nearest legal question lies.

Every engine that writes one flat row a layer reads slot p as one of rank p // (slots / ranks), so
ranks must hold equally many. Read from SGLang 0.5.23, vLLM 0.33.0, vllm-ascend 182b75e,
TensorRT-LLM 1.3.0rc27's ep_load_balancer examples, deepseek-ai/EPLB d52c72d and Megatron Core
d98e8a6.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Generation
from tuner.spec.lp_memory import lp_misfit, smallest_lp_misfit

NO_BACKEND: Final = "none"
"""Of `--moe-a2a-backend`: every rank gathers all tokens and adds up its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOffer:
    """One dispatch rule of an engine's, with or without an all-to-all backend."""

    name: str
    """As `goal.dispatch` and the engine's option have it."""
    rule: str
    """What it does: a line of solvers/placement/dispatch/sampling.py."""
    has_backend: bool
    is_default: bool = False
    architectures: frozenset[str] | None = None
    """Models that run it; None: all."""
    generations: frozenset[Generation] | None = None
    """Devices that run it; None: all."""
    solves_program: bool = False
    """Solves a linear program for each layer, whose size is limited (lp_memory.py)."""
    cost: str = ""
    """What it takes at run time beyond the loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceTarget:
    """What one engine can take."""

    name: str
    release: str = ""
    """That its rules and files were read from; empty where it is no one release's."""
    dispatches: frozenset[str] | None = None
    """Values of `goal.dispatch` that it can run; None: whatever the runtime above it does."""
    offers: tuple[DispatchOffer, ...] = ()
    """Rules that it lets a launch choose among; empty: it has one."""
    a2a_backends: tuple[str, ...] = ()
    """Values of `goal.a2a_backend`, the default first; empty: its placement asks for none."""
    all_layers: bool = False
    """Its file has a row for every decoder layer, so their number must be known."""
    every_moe_layer: bool = False
    """It counts MoE layers, so that all of them must have been recorded."""
    replicas: bool = True
    """An expert may stand in several slots."""
    twins: bool = True
    """An expert may stand twice on one rank."""


_LP_ARCHITECTURES: Final = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "MistralLarge3ForCausalLM",
        "MistralLarge3ForCausalLMEagle",
    }
)
"""Whose idle ranks join the all-reduce of counts (sglang/srt/eplb/lplb_solver.py)."""

_LP_GENERATIONS: Final = frozenset({Generation.HOPPER, Generation.BLACKWELL})
"""Compute capability 9.0 and newer (sglang/kernels/ops/lplb/torch_solver.py)."""

_SGLANG_OFFERS: Final = (
    DispatchOffer(name="static", rule="static", has_backend=True, is_default=True),
    DispatchOffer(name="dynamic", rule="near_dynamic", has_backend=True),
    DispatchOffer(
        name="lp",
        rule="near_lp",
        has_backend=True,
        architectures=_LP_ARCHITECTURES,
        generations=_LP_GENERATIONS,
        solves_program=True,
        cost="an all-reduce and a linear program in every layer; nvidia-mathdx must be installed",
    ),
    DispatchOffer(name="dynamic", rule="dynamic", has_backend=False, is_default=True),
)
"""Without a backend the engine refuses `static` and `lp` (arg_groups/parallel_hook.py). With one,
each rank's table holds its near replicas only where it has any, whatever the rule
(eplb/expert_location.py), so that `lp` steers far sources alone."""

_SGLANG_BACKENDS: Final = (
    "deepep",
    "none",
    "mooncake",
    "nixl",
    "mori",
    "ascend_fuseep",
    "flashinfer",
    "megamoe",
    "deepep_v2",
    "ascend_tp",
    "pplx",
    "flashinfer_megamoe",
)
"""`--moe-a2a-backend` (arg_groups/fields/exec_.py); most wide deployments run DeepEP."""

_IN_TURN: Final = frozenset({"even", "dynamic"})
"""Engines that take replicas by a token's place: even on average."""

PLACE_TARGETS: Final[Mapping[str, PlaceTarget]] = {
    target.name: target
    for target in (
        PlaceTarget(
            name="sglang",
            release="0.5.23",
            all_layers=True,
            dispatches=frozenset({"even", "static", "dynamic", "lp"}),
            offers=_SGLANG_OFFERS,
            a2a_backends=_SGLANG_BACKENDS,
        ),
        PlaceTarget(name="trtllm", release="1.3.0rc27", dispatches=_IN_TURN),
        PlaceTarget(name="vllm", release="0.33.0", every_moe_layer=True, dispatches=_IN_TURN),
        PlaceTarget(
            name="vllm-ascend",
            release="182b75e",
            every_moe_layer=True,
            twins=False,
            dispatches=_IN_TURN,
        ),
        PlaceTarget(name="eplb", release="d52c72d"),
        PlaceTarget(name="megatron", release="d98e8a6", replicas=False),
    )
}
"""By the name users type."""


def dispatch_refusal(
    target: PlaceTarget,
    *,
    dispatch: str | None,
    a2a_backend: str | None,
    architecture: str | None,
    device: str | None,
) -> str | None:
    """Return why the engine cannot run a rule with a backend; None where it can.

    Args:
        target: of `PLACE_TARGETS`.
        dispatch: as the goal says; None: whichever is best.
        a2a_backend: as the goal says; None: what suits the rule.
        architecture: of the model; None where none is named.
        device: of the ranks, as a cluster names it; None where none is named.
    """
    known = target.dispatches
    if dispatch is not None and known is not None and dispatch not in known:
        said = ", ".join(sorted(known))
        return f"goal.dispatch: {target.name} has no rule {dispatch!r}; it runs {said}"
    if not target.offers:
        return None
    if a2a_backend is not None and a2a_backend not in target.a2a_backends:
        said = ", ".join(target.a2a_backends)
        return f"goal.a2a_backend: {target.name} has no {a2a_backend!r}; it has {said}"
    # `even` stands for the engine's nearest, which either has.
    if dispatch in (None, "even"):
        return None
    backend = backend_of(target, dispatch=dispatch, a2a_backend=a2a_backend)
    offers = offered(target, dispatch, backend)
    if not offers:
        return (
            f"goal.dispatch: {target.name} runs {dispatch!r} beside an all-to-all backend only, not"
            f" with goal.a2a_backend none; say {target.a2a_backends[0]}, or dispatch dynamic"
        )
    misfit = launch_misfit(target, offers[0], architecture=architecture, device=device)
    if misfit is None or not misfit.is_known:
        # Whoever names the rule answers for what the spec leaves open.
        return None
    return f"goal.dispatch: {misfit.words}; say static or dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchMisfit:
    """Why a launch cannot run an offer, or cannot be known to."""

    is_known: bool
    """The spec says what does not fit; else it names no model or no devices."""
    words: str


def launch_misfit(
    target: PlaceTarget,
    offer: DispatchOffer,
    *,
    architecture: str | None,
    device: str | None,
) -> LaunchMisfit | None:
    """Return what of a model or its devices keeps an offer from running; None: nothing."""
    engine = f"{target.name} {target.release}"
    models = offer.architectures
    if models is not None and architecture is not None and architecture not in models:
        all_models = ", ".join(sorted(models))
        words = f"{engine} runs {offer.name!r} for {all_models}, not for {architecture}"
        return LaunchMisfit(is_known=True, words=words)
    generations = offer.generations
    named = " or ".join(sorted(one.value.capitalize() for one in generations or ()))
    if generations is not None and device and find_device(device).generation not in generations:
        words = f"{engine} runs {offer.name!r} on {named} devices, not on {device}"
        return LaunchMisfit(is_known=True, words=words)
    if models is not None and architecture is None:
        words = f"{engine} runs {offer.name!r} for some models, and the spec names no model"
        return LaunchMisfit(is_known=False, words=words)
    if generations is not None and not device:
        words = f"{engine} runs {offer.name!r} on {named} devices, and the spec names no devices"
        return LaunchMisfit(is_known=False, words=words)
    return None


def rows_misfit(
    target: PlaceTarget, offer: DispatchOffer, rows: Iterable[Sequence[int]], *, ranks: int
) -> str | None:
    """Return what of a placement's rows keeps an offer from running; None: nothing."""
    misfit = lp_misfit(rows, ranks=ranks) if offer.solves_program else None
    return None if misfit is None else f"{target.name} {target.release}: {offer.name!r} {misfit}"


def program_refusal(
    target: PlaceTarget, *, dispatch: str | None, num_slots: int, num_experts: int, ranks: int
) -> str | None:
    """Return why no placement of a shape can run a rule that the goal names; None: some can."""
    if not any(offer.solves_program for offer in target.offers if offer.name == dispatch):
        return None
    misfit = smallest_lp_misfit(num_slots=num_slots, num_experts=num_experts, ranks=ranks)
    if misfit is None:
        return None
    return (
        f"goal.dispatch: {target.name} {target.release}: {dispatch!r} {misfit}, however"
        f" {num_slots} slots on {ranks} ranks are filled; say static or dynamic"
    )


def rule_run(target: PlaceTarget, *, dispatch: str, a2a_backend: str) -> str:
    """Return what an engine started with a rule and a backend does, by the solvers' name.

    Engines that offer no choice take replicas in turn: an even split.
    """
    beside = offered(target, dispatch, a2a_backend) if target.offers else ()
    return beside[0].rule if beside else "even"


def same_loads(rule: str, other: str) -> bool:
    """Whether two rules, by the solvers' names, give ranks the same expected loads."""
    return rule == other or {rule, other} <= _IN_TURN


def offered(
    target: PlaceTarget, dispatch: str | None, a2a_backend: str
) -> tuple[DispatchOffer, ...]:
    """Return the offers of a rule, or of all, beside a backend."""
    has_backend = a2a_backend != NO_BACKEND
    return tuple(
        offer
        for offer in target.offers
        if offer.has_backend == has_backend and dispatch in (None, offer.name)
    )


def backend_of(target: PlaceTarget, *, dispatch: str | None, a2a_backend: str | None) -> str:
    """Return the backend that a launch names.

    Where the goal names none, it is the target's default, but `none` for the rules that were judged
    as an even split before it could be said: `dynamic` and `even`.
    """
    if a2a_backend is not None:
        return a2a_backend
    return NO_BACKEND if dispatch in ("dynamic", "even") else target.a2a_backends[0]


def shape_refusals(
    target: PlaceTarget, *, slots_per_rank: Sequence[int], num_experts: int, num_layers: int | None
) -> tuple[str, ...]:
    """Return what keeps the engine from taking any placement of this shape, a line each.

    Args:
        target: of `PLACE_TARGETS`.
        slots_per_rank: of every rank.
        num_experts: logical experts of a layer.
        num_layers: decoder layers of the model, None where nobody says.
    """
    refused = []
    ranks, slots = len(slots_per_rank), sum(slots_per_rank)
    if len(set(slots_per_rank)) > 1:
        refused.append(
            f"{target.name}: ranks hold {min(slots_per_rank)} to {max(slots_per_rank)} slots, the"
            f" engine gives every rank as many; nearest: {_nearest(ranks, slots, num_experts)}"
        )
    if not target.replicas and slots != num_experts:
        refused.append(
            f"{target.name}: {slots} slots for {num_experts} experts, the engine keeps one copy of"
            f" an expert; nearest: redundant_experts 0 on {_dividing(num_experts, ranks)} ranks"
        )
    if target.all_layers and num_layers is None:
        refused.append(
            f"{target.name}: its file has a row for every decoder layer, and the recordings neither"
            " say how many there are nor begin with layer 0 and have no gap; name `model` in the"
            " spec"
        )
    return tuple(refused)


def table_refusals(
    target: PlaceTarget,
    *,
    physical_to_logical: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    slots_per_rank: Sequence[int],
) -> tuple[str, ...]:
    """Return what keeps the engine from taking this very table: the first place of each kind."""
    if target.twins:
        return ()
    ends = [0]
    for slots in slots_per_rank:
        ends.append(ends[-1] + slots)
    for layer, row in zip(layer_ids, physical_to_logical, strict=True):
        for rank, (first, end) in enumerate(pairwise(ends)):
            held = row[first:end]
            twin = next((expert for expert in held if held.count(expert) > 1), None)
            if twin is not None:
                return (
                    f"{target.name}: layer {layer} holds expert {twin} twice on rank {rank}, the"
                    " engine can address it once; give it fewer redundant_experts, or emit for"
                    " another engine",
                )
    return ()


def _nearest(ranks: int, slots: int, num_experts: int) -> str:
    """Name the equal slots just below and above, as far as they hold every expert."""
    below = slots // ranks
    legal = [each for each in (below, below + 1) if each * ranks >= num_experts]
    return " or ".join(
        f"slots_per_rank {each} (redundant_experts {each * ranks - num_experts})" for each in legal
    )


def _dividing(num_experts: int, ranks: int) -> int:
    """Return the number of ranks nearest to `ranks` that divides the experts; ties: the fewer."""
    divisors = (each for each in range(1, num_experts + 1) if num_experts % each == 0)
    return min(divisors, key=lambda each: (abs(each - ranks), each))
