"""What a training plan launches, as a section."""

from collections.abc import Iterator

from tuner.config.train import TrainDecision
from tuner.config.train_words import DEGREES, stages_words, train_extras, unequal_words
from tuner.plans.train import Plan
from tuner.report.content import Cell, NamedValues, Section, Table, number, some, word
from tuner.spec.accounting import active_parameters, num_parameters
from tuner.units import format_count


def decision_section(plan: Plan, decision: TrainDecision) -> Section:
    """Say which degrees, stages and extras are launched, and where."""
    d = decision
    degrees = [(name, field, getattr(d, field)) for field, name in DEGREES.items()]
    table = Table(
        caption="Parallel degrees, ZeRO stage and micro-batch",
        header=("", *(name for name, *_ in degrees)),
        rows=(
            (word("degree"), *(number(value, key=f"decision.{key}") for _, key, value in degrees)),
        ),
    )
    extras = train_extras(decision)
    facts = (
        ("stages", word(stages_words(decision))),
        ("micro-batches per step", _microbatches(plan, d)),
        ("with", word(", ".join(extras) or "nothing else")),
        ("rank order", word(d.rank_order)),
        ("launched by", word(", ".join(plan.emit))),
        *_model_facts(plan),
    )
    return Section(
        name="decision",
        heading="What to launch",
        blocks=some(table, NamedValues(facts=facts), _where(plan)),
    )


def _microbatches(plan: Plan, decision: TrainDecision) -> Cell:
    batch = plan.goal.global_batch_size
    unequal = unequal_words(decision, global_batch_size=batch)
    return (
        word(f"{unequal} on the replicas") if unequal else number(decision.num_microbatches(batch))
    )


def _model_facts(plan: Plan) -> Iterator[tuple[str, Cell]]:
    model = plan.model
    yield (
        "model",
        word(
            f"{format_count(num_parameters(model))} parameters, "
            f"{format_count(active_parameters(model))} active per token"
        ),
    )
    yield "precision", word(plan.goal.precision.value)


def _where(plan: Plan) -> Table | None:
    """Say which pool runs which stage, for heterogeneous pools."""
    if plan.placement is None or not plan.placement.stages:
        return None
    return Table(
        caption="Where the stages run",
        header=("stage", "pool", "layers", "devices"),
        rows=tuple(
            (
                word(index),
                word(stage.pool),
                number(stage.layers, key=f"placement.stages.{index}.layers"),
                number(stage.devices, key=f"placement.stages.{index}.devices"),
            )
            for index, stage in enumerate(plan.placement.stages)
        ),
    )
