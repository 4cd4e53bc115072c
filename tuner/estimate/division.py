"""The layers of every pipeline stage: as the launch says, or as its engine divides them.

Megatron-LM divides evenly or refuses; flags make embedding and loss count as layers, and set
other counts for the first and last rank. torchtitan gives the remainder of the division to the
earlier stages. An explicit layout is used as written, and so are the letters of a hybrid.
"""

from collections.abc import Iterator
from itertools import accumulate

from tuner.engines.reading.hybrid_pattern import layer_letters, mtp_letters
from tuner.engines.reading.launch import LaunchSettings, StageContent
from tuner.engines.reading.nearest import nearest_divisor, nearest_multiple
from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.model import ModelSpec


def place_layers(launch: LaunchSettings, model: ModelSpec) -> tuple[StageContent, ...]:
    """Return what every stage holds, in execution order.

    Raises:
        SpecError: the layers cannot be placed as the launch says; the message names the nearest
            layout.
    """
    if launch.mtp_layers > model.num_layers:
        raise SpecError(
            f"{launch.source}: {launch.name('mtp_layers')} {launch.mtp_layers} exceeds the "
            f"{model.num_layers} layers of {model.name}; 1 is usual"
        )
    stated = [
        launch.name(field)
        for field in ("layout", "letters", "layers_per_virtual_stage", "virtual_pipeline")
        if getattr(launch, field)
    ]
    if len(stated) > 1:
        raise SpecError(
            f"{launch.source}: {' and '.join(stated)} both say how layers are cut; keep one"
        )
    if launch.letters:
        _check_letters(launch, model)
    if len(launch.letters) > 1:
        launch = launch.model_copy(update={"layout": tuple(_lettered(launch, model))})
        return _explicit(launch, model, name=launch.name("letters"))
    if launch.layout:
        return _explicit(launch, model, name=launch.name("layout"))
    if launch.first_stage_layers or launch.last_stage_layers:
        return _contents(list(_stated_end_stages(launch, model)), launch.mtp_layers)
    return _contents(list(_divided(launch, model)), launch.mtp_layers)


def _check_letters(launch: LaunchSettings, model: ModelSpec) -> None:
    """Refuse the pattern of another model."""
    stated, expected = "".join(launch.letters), "".join(layer_letters(model))
    name = launch.name("letters")
    if len(stated) != len(expected):
        raise SpecError(
            f"{launch.source}: {name} holds {len(stated)} layers, but {model.name} of the spec is "
            f"{len(expected)} of them; name the model that is launched"
        )
    for number, (letter, expected_letter) in enumerate(zip(stated, expected, strict=True), start=1):
        if letter != expected_letter:
            raise SpecError(
                f"{launch.source}: {name}: layer {number} is {letter}, but of {model.name} it "
                f"is {expected_letter}; name the model that is launched"
            )
    if launch.mtp_letters not in ("", mtp_letters(model)):
        raise SpecError(
            f"{launch.source}: {name} predicts tokens with {shown_value(launch.mtp_letters)}, but "
            f"such a layer of {model.name} is {shown_value(mtp_letters(model))}"
        )


def _lettered(launch: LaunchSettings, model: ModelSpec) -> Iterator[StageContent]:
    """Yield the stages of a pattern, in layers of the model."""
    boundaries = list(accumulate(len(layer) for layer in layer_letters(model)))
    last, end, before = len(launch.letters) - 1, 0, 0
    for number, letters in enumerate(launch.letters):
        end += len(letters)
        if end and end not in boundaries:
            raise SpecError(
                f"{launch.source}: {launch.name('letters')}: stage {number + 1} ends between the "
                f"mixer and the network of a layer of {model.name}; such a stage is not priced"
            )
        layers = boundaries.index(end) + 1 if end else 0
        yield StageContent(
            layers=layers - before,
            embedding=number == 0,
            mtp_layers=launch.mtp_layers if number == last else 0,
            loss=number == last,
        )
        before = layers


def _explicit(launch: LaunchSettings, model: ModelSpec, *, name: str) -> tuple[StageContent, ...]:
    layers = sum(stage.layers for stage in launch.layout)
    if layers != model.num_layers:
        raise SpecError(
            f"{launch.source}: {name} holds {layers} transformer layers, {model.name} has "
            f"{model.num_layers}; place {model.num_layers}"
        )
    mtp = sum(stage.mtp_layers for stage in launch.layout)
    if mtp != launch.mtp_layers and launch.engine.is_megatron:
        raise SpecError(
            f"{launch.source}: {name} holds {mtp} MTP layers, {launch.name('mtp_layers')} says "
            f"{launch.mtp_layers}; make them agree"
        )
    if len(launch.layout) % launch.pipeline:
        raise SpecError(
            f"{launch.source}: {name} has {len(launch.layout)} stages, not divisible by "
            f"{launch.name('pipeline')} {launch.pipeline}; the nearest number is "
            f"{nearest_multiple(len(launch.layout), launch.pipeline)}"
        )
    return launch.layout


def _stated_end_stages(launch: LaunchSettings, model: ModelSpec) -> Iterator[int]:
    """Yield layers of every stage where the first or last rank's are stated; the rest is even."""
    first, last = launch.first_stage_layers, launch.last_stage_layers
    virtual = launch.virtual_pipeline or 1
    inner_ranks = launch.pipeline - bool(first) - bool(last)
    inner = model.num_layers - (first or 0) - (last or 0)
    rank_layers = inner // inner_ranks if inner_ranks > 0 else 0
    whole = inner_ranks >= 0 and rank_layers * max(inner_ranks, 0) == inner
    counts = [
        first or rank_layers,
        *[rank_layers] * max(0, launch.pipeline - 2),
        last or rank_layers,
    ]
    counts = counts[: launch.pipeline]
    if not whole or any(count % virtual or count <= 0 for count in counts):
        raise SpecError(
            f"{launch.source}: {launch.name('first_stage_layers')} {first or 'not set'} and "
            f"{launch.name('last_stage_layers')} {last or 'not set'} leave {inner} of "
            f"{model.num_layers} layers for {inner_ranks} pipeline ranks with {virtual} chunks "
            "each, which is no even division; say it with --pipeline-model-parallel-layout"
        )
    for _ in range(virtual):
        yield from (count // virtual for count in counts)


def _divided(launch: LaunchSettings, model: ModelSpec) -> Iterator[int]:
    """Yield layers of every stage, divided as the engine does."""
    first, last = launch.embedding_as_layers, launch.loss_as_layers
    if max(first, last) > model.num_layers:
        raise SpecError(
            f"{launch.source}: embedding or loss counts as {max(first, last)} layers, more than "
            f"the {model.num_layers} of {model.name}; 1 is usual"
        )
    total = model.num_layers + first + last
    if launch.pipeline == 1 and launch.uneven_division:
        yield model.num_layers
        return
    stages = _num_stages(launch, total)
    if total % stages and not launch.uneven_division:
        raise SpecError(
            f"{launch.source}: {total} layers ({model.num_layers} of {model.name}"
            f"{', embedding and loss counted' if first or last else ''}) are not divisible by "
            f"{stages} stages; "
            f"the nearest number of stages is {nearest_divisor(total, stages)}, or place them with "
            f"{launch.name('layout')}"
        )
    counts = _front_loaded(
        model.num_layers, min(stages, total), embedding_loss_layers=(first, last)
    )
    if stages > total or min(counts) < 0:
        raise SpecError(
            f"{launch.source}: {stages} stages are too many for {model.num_layers} layers; the "
            f"most are {total}"
        )
    yield from counts


def _num_stages(launch: LaunchSettings, total: int) -> int:
    stage_layers = launch.layers_per_virtual_stage
    if stage_layers is None:
        virtual = launch.virtual_pipeline or 1
        if virtual > 1 and launch.pipeline == 1:
            raise SpecError(
                f"{launch.source}: {launch.name('virtual_pipeline')} {virtual} needs "
                f"{launch.name('pipeline')} above 1; set it to 2 or leave interleaving out"
            )
        return launch.pipeline * virtual
    stages = -(-total // stage_layers) if launch.uneven_division else total // stage_layers
    whole = launch.uneven_division or stages * stage_layers == total
    if not whole or stages % launch.pipeline or not stages:
        share = total // launch.pipeline
        raise SpecError(
            f"{launch.source}: {launch.name('layers_per_virtual_stage')} {stage_layers} does not "
            f"cut {total} layers into stages for {launch.name('pipeline')} {launch.pipeline}; "
            + (
                f"the nearest that does is {nearest_divisor(share, stage_layers)}"
                if total % launch.pipeline == 0
                else f"{total} is not divisible by {launch.pipeline}: place the layers with "
                f"{launch.name('layout')}"
            )
        )
    return stages


def front_loaded(
    num_layers: int, num_stages: int, *, embedding_loss_layers: tuple[int, int], mtp_layers: int = 0
) -> tuple[StageContent, ...]:
    """Spread layers as torchtitan does; embedding and loss count as `embedding_loss_layers`.

    Returns:
        Every stage; empty where a stage would hold a negative number of layers.
    """
    counts = _front_loaded(num_layers, num_stages, embedding_loss_layers=embedding_loss_layers)
    return _contents(counts, mtp_layers) if min(counts) >= 0 else ()


def _front_loaded(
    num_layers: int, num_stages: int, *, embedding_loss_layers: tuple[int, int]
) -> list[int]:
    if num_stages == 1:
        return [num_layers]
    share, rest = divmod(num_layers + sum(embedding_loss_layers), num_stages)
    counts = [share + (stage < rest) for stage in range(num_stages)]
    counts[0] -= embedding_loss_layers[0]
    counts[-1] -= embedding_loss_layers[1]
    return counts


def balanced(num_layers: int, num_stages: int, *, mtp_layers: int = 0) -> tuple[StageContent, ...]:
    """Spread layers evenly; the remainder goes to the inner stages.

    With a remainder, the first and last stages, which hold embedding, loss and multi-token
    prediction, get the smaller share first.
    """
    share, rest = divmod(num_layers, num_stages)
    counts = [share] * num_stages
    inner = [*range(1, num_stages - 1), 0, num_stages - 1][:num_stages]
    for stage in inner[:rest]:
        counts[stage] += 1
    return _contents(counts, mtp_layers)


def _contents(counts: list[int], mtp_layers: int) -> tuple[StageContent, ...]:
    last = len(counts) - 1
    return tuple(
        StageContent(
            layers=count,
            embedding=stage == 0,
            mtp_layers=mtp_layers if stage == last else 0,
            loss=stage == last,
        )
        for stage, count in enumerate(counts)
    )
