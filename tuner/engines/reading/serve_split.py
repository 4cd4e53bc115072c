"""Checks of the parallel degrees in flags, each error in one line with the nearest legal value.

Only what no release can launch is refused here; each release's manifest refuses what it lacks
(tuner/catalog/serve_rules/rules.py).
"""

from collections.abc import Iterator, Mapping

from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.catalog.serve_rules.rules import nodes_needed
from tuner.catalog.serve_rules.traits import EngineTraits
from tuner.costs.serve.decoder import decoder_of
from tuner.costs.serve.engine import InstanceDegrees
from tuner.engines.reading.arguments import Flags
from tuner.engines.reading.nearest import nearest_divisor
from tuner.engines.reading.serve_launch import Surroundings
from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.serving.expert_slots import are_even, even_counts, even_ranks


def pipeline_stages(flags: Flags, name: str, *, around: Surroundings) -> int:
    """Return the stages of the pipeline inside an instance.

    Raises:
        SpecError: there are more than layers.
    """
    stages = flags.number(name) or 1
    max_stages = around.model.most_stages
    if stages > max_stages:
        raise SpecError(
            f"{flags.source}: --{name} {stages} stages of {max_stages} layers; the nearest is"
            f" {max_stages}"
        )
    return stages


def spread_machines(flags: Flags, *, devices: int, stages: int, around: Surroundings) -> int:
    """Return the machines over which a launch spreads stages; 1: the fewest that hold it.

    Args:
        flags: flags of the launch.
        devices: devices of the instance.
        stages: stages of its pipeline.
        around: the launch's surroundings.

    Raises:
        SpecError: there are more machines than the pool has, or other numbers of stages on them.
    """
    is_unset = any("$" in word for word in flags.values.get("nnodes", ()))
    nodes = 1 if is_unset else flags.number("nnodes") or 1
    pool = around.pool
    fewest = nodes_needed(devices, devices_per_node=pool.devices_per_node)
    if nodes > max(pool.nodes, fewest):
        raise SpecError(
            f"{flags.source}: --nnodes {nodes} is more than the {pool.nodes} machines of"
            f" {pool.name}; the nearest is {pool.nodes}"
        )
    if stages == 1 or nodes <= fewest:
        return 1
    if stages % nodes:
        raise SpecError(
            f"{flags.source}: --nnodes {nodes} does not divide {stages} stages of a pipeline; the"
            f" nearest is {nearest_divisor(stages, nodes)}, or state devices_per_node as it is"
        )
    return nodes


def check_heads(flags: Flags, name: str, *, ranks: int, model_heads: int, factor: int) -> None:
    """Refuse attention heads that do not divide over ranks.

    Args:
        flags: of the launch.
        name: of the flag that sets the tensor degree.
        ranks: tensor ranks of attention.
        model_heads: query heads.
        factor: how many times `ranks` the flag states.

    Raises:
        SpecError: the heads do not divide.
    """
    if model_heads % ranks:
        near = nearest_divisor(model_heads, ranks)
        raise SpecError(
            f"{flags.source}: --{name} {ranks * factor} deals {model_heads} attention heads to"
            f" {ranks} ranks; the nearest that divides is --{name} {near * factor}"
        )


def context_ranks(flags: Flags, name: str, *, ranks: int, around: Surroundings) -> int:
    """Return the tensor ranks that share the positions of a cache (decode context parallelism).

    Raises:
        SpecError: their keys are not equal, so that they have none to share.
    """
    context = flags.number(name) or 1
    copies = decoder_of(around.model).cache_copies(ranks)
    if copies % context:
        raise SpecError(
            f"{flags.source}: --{name} {context}: of {ranks} tensor ranks {copies} keep the same"
            f" keys of {around.model.name} in every layer, and no more can share their positions;"
            f" the nearest is {nearest_divisor(copies, context)}"
        )
    return context


def context_notes(context: int, *, is_aggregated: bool) -> Iterator[str]:
    """Yield what is not known of the times of launches with context ranks."""
    if context > 1:
        yield (
            f"decode context parallelism {context}: the cache is exact, times follow from bytes and"
            " no published run"
        )
        if not is_aggregated:
            yield "transfers of its caches are priced as if every tensor rank kept all positions"


def refuse_unpriced(flags: Flags, reasons: Mapping[str, str]) -> None:
    """Refuse splits that would change memory and times, and have no price.

    Args:
        flags: of the launch.
        reasons: what a flag does, by its name: a number of ranks (`...-size`), or a switch.

    Raises:
        SpecError: the launch has one.
    """
    for name, reason in reasons.items():
        is_number = name.endswith("-size")
        if (flags.number(name, least=0) or 0) > 1 if is_number else flags.is_on(name):
            raise SpecError(
                f"{flags.source}: {shown_value(flags.said(name))} {reason}, which has no price;"
                f" {'the nearest is 1' if is_number else 'leave it out'}"
            )


def check_experts(
    flags: Flags,
    name: str,
    degrees: InstanceDegrees,
    around: Surroundings,
    *,
    engine: ServingCapabilities,
    redundant: int = 0,
    redundant_flag: str = "",
    advice: str = "",
) -> None:
    """Refuse experts that do not divide over EP or MoE-TP ranks, redundant ones included.

    Args:
        flags: of the launch.
        name: of the flag that spreads experts.
        degrees: what the flags make of the instance.
        around: with the model.
        engine: whose models may have copies of experts.
        redundant: copies of experts in every layer.
        redundant_flag: that states them; empty: experts are split by MoE-TP.
        advice: appended to the number of ranks that divides.

    Raises:
        SpecError: they do not divide.
    """
    moe = around.model.moe
    if moe is None:
        return
    copies = moe.num_experts + redundant
    if not are_even(moe.num_experts, redundant, degrees.expert):
        near = even_ranks(copies, degrees.expert)
        nearest = (
            f"divides is {near[0]}" if len(near) == 1 else f"divide are {near[0]} and {near[1]}"
        )
        among = f" ({redundant} of them redundant)" if redundant else ""
        if redundant_flag and around.model.architecture in engine.redundant_architectures:
            counts = even_counts(moe.num_experts, redundant, degrees.expert)
            advice += f", or --{redundant_flag} {' or '.join(map(str, counts))}"
        raise SpecError(
            f"{flags.source}: --{name} spreads {copies} experts{among} over {degrees.expert}"
            f" ranks; the nearest that {nearest}{advice}"
        )
    if moe.expert_ffn_size % degrees.moe_tensor:
        width = nearest_divisor(moe.expert_ffn_size, degrees.moe_tensor)
        raise SpecError(
            f"{flags.source}: --{name} splits experts of width {moe.expert_ffn_size} into"
            f" {degrees.moe_tensor}; the nearest that divides is {width}"
        )


def check_devices(
    flags: Flags, name: str, *, devices: int, copies: int, around: Surroundings
) -> None:
    """Refuse more devices than the pool has.

    Raises:
        SpecError: there are too few.
    """
    pool = around.pool
    if devices * copies > pool.num_devices:
        raise SpecError(
            f"{flags.source}: --{name}: the launch takes {devices * copies} devices, pool"
            f" {pool.name!r} has {pool.num_devices}; the nearest is {pool.num_devices} in all"
        )


def check_length(flags: Flags, name: str, length: int | None, around: Surroundings) -> None:
    """Refuse requests longer than the model's positions.

    Raises:
        SpecError: they are.
    """
    longest = around.model.max_position
    if length is not None and length > longest:
        raise SpecError(
            f"{flags.source}: --{name} {length} is beyond the model's {longest} positions; the"
            f" nearest is {longest}"
        )


def memory_share(flags: Flags, name: str) -> float | None:
    """Return the share of memory that a flag gives the engine.

    Raises:
        SpecError: it is no share, or none at all.
    """
    share = flags.share(name)
    if share == 0.0:
        raise SpecError(f"{flags.source}: --{name} 0 leaves no memory; the nearest usual is 0.1")
    return share


def cache_format(
    flags: Flags,
    name: str,
    formats: dict[str, str],
    *,
    around: Surroundings,
    traits: EngineTraits,
) -> str:
    """Return the spec's name of the cache's type; `auto` is what the engine makes of the model.

    Raises:
        SpecError: it is not one that can be priced.
    """
    usual = traits.auto_cache(around.model, around.generation)
    return weight_format(flags, name, {"auto": usual, **formats}, usual)


def weight_format(flags: Flags, name: str, formats: dict[str, str], default: str) -> str:
    """Return the spec's name of the format that a flag sets.

    Raises:
        SpecError: it is not one that can be priced.
    """
    word = flags.word(name)
    if word is None:
        return default
    if word not in formats:
        raise SpecError(
            f"{flags.source}: --{name} {word!r:.60} has no price; there is {', '.join(formats)}"
        )
    return formats[word]
