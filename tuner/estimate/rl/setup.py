"""A launch as a described step: both halves priced as their own launches are, lengths as the goal.

The trainer is a configuration of Megatron-LM (tuner/estimate/configuration.py), the rollout a side
of equal engines. Lengths are those of the goal, cut at the launch's limits.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.costs.rl.residuals import RlResiduals
from tuner.costs.rl.trainer import Trainer
from tuner.costs.serve.decoder import Formats, decoder_of
from tuner.costs.serve.iteration import Iteration
from tuner.costs.train.calibration import constants_of
from tuner.costs.train.columns_of import PRECISION_OF, stages_of_layouts
from tuner.engines.reading.mistakes import joined
from tuner.engines.reading.rl_launch import RlLaunch, mistakes
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.engines.targets import programs
from tuner.errors import SpecError
from tuner.estimate.configuration import Configuration, build_configuration
from tuner.estimate.estimate import pricing_setup, shipped_residuals
from tuner.estimate.legality import broken_rules
from tuner.estimate.prices import (
    PricingSetup,
    launch_memory_constants,
    model_shape,
    stage_layout,
    to_strategies,
)
from tuner.prices.serve.machine import ServingMachine
from tuner.simulate.rl.memory import Residency, RlMemory, moved_bytes, price_memory_of_step
from tuner.simulate.rl.rollout import Batch, RolloutSide, draw_batch
from tuner.simulate.rl.step import RlPlacement, RlStep, Updates
from tuner.spec.cluster import Cluster
from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec
from tuner.spec.rl import RlGoal
from tuner.spec.serving.lengths import LengthLaw, mean_tokens
from tuner.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RlInputs:
    """A spec with its model, ready to price launches."""

    goal: RlGoal
    train_spec: Spec
    """The spec as a trainer's launch is priced on it."""
    setup: PricingSetup
    residuals: RlResiduals
    """Corrections of a step."""

    @property
    def model(self) -> ModelSpec:
        """Return the model."""
        return self.train_spec.model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedStep:
    """A launch as a described step, with its memory."""

    launch: RlLaunch
    configuration: Configuration
    step: RlStep
    memory: RlMemory


def build_inputs(
    goal: RlGoal, cluster: Cluster, model: ModelSpec, *, residuals: RlResiduals, calibrated: bool
) -> RlInputs:
    """Return what launches are priced with.

    Raises:
        SpecError: not one pool with a device.
    """
    train_spec = Spec.model_validate(
        {
            "path": Path(),
            "model_path": Path(),
            "model": model,
            "cluster": cluster,
            "goal": TrainGoal(kind="train", sequence_length=1, global_batch_size=1),
            "programs": programs(("megatron-lm",)),
        }
    )
    corrections = shipped_residuals() if calibrated else None
    return RlInputs(
        goal=goal,
        train_spec=train_spec,
        setup=pricing_setup(train_spec, corrections),
        residuals=residuals,
    )


def price_step_of(launch: RlLaunch, inputs: RlInputs) -> PricedStep:
    """Return a launch as a described step.

    Raises:
        SpecError: it contradicts itself, the model or the cluster.
    """
    setup, model = inputs.setup, inputs.model
    if wrong := [f"{launch.source}: {reason}" for reason in mistakes(launch, model)]:
        raise SpecError(joined(wrong, source=launch.source))
    if launch.devices > setup.pool.num_devices:
        raise SpecError(
            f"{launch.source}: starts on {launch.devices} devices, but the spec's cluster has"
            f" {setup.pool.num_devices}; name the cluster that is used"
        )
    configuration, _ = build_configuration(launch.trainer, inputs.train_spec)
    if broken := [*broken_rules(configuration, model, name=launch.trainer.name)]:
        raise SpecError(
            joined([f"{launch.source}: {reason}" for reason in broken], source=launch.source)
        )
    trainer, batch = _trainer(configuration, setup), _batch(launch, inputs)
    side = _side(launch, inputs)
    residency = Residency(
        offloads_weights=launch.offloads_weights,
        offloads_optimizer=launch.offloads_optimizer,
        offloads_reference=launch.offloads_reference,
        has_reference=launch.has_reference,
        has_critic=launch.has_critic,
        sleeps=launch.sleeps,
        sleep_keeps_weights=launch.sleep_keeps_weights,
        bucket_bytes=launch.bucket_bytes,
    )
    step = RlStep(
        placement=launch.placement,
        versions=launch.versions,
        release=launch.framework,
        batch=batch,
        trainer=trainer,
        train_budget=launch.train_budget,
        forward_budget=launch.forward_budget,
        updates=Updates(
            mini_batches=launch.all_samples // launch.samples_per_update,
            epochs=launch.epochs,
            forwards=launch.forwards,
            trained=1 + launch.has_critic,
        ),
        side=side,
        path=launch.path,
        offload_bytes=0.0,
    )
    micro = step.update_batches()
    is_colocated = launch.placement is RlPlacement.COLOCATED
    moved = moved_bytes(trainer.memory(micro), residency) if is_colocated else 0.0
    memory = price_memory_of_step(
        trainer,
        replace(micro, tokens=max(micro.tokens, float(_largest_micro(launch, batch)))),
        side,
        residency,
        placement=launch.placement,
        longest=launch.longest_prompt + launch.longest_response,
        devices_per_node=launch.devices_per_node,
    )
    return PricedStep(
        launch=launch,
        configuration=configuration,
        step=replace(step, offload_bytes=moved),
        memory=memory,
    )


def _largest_micro(launch: RlLaunch, batch: Batch) -> int:
    """Return the tokens of the largest micro-batch, which memory must hold."""
    longest = int(batch.length_N.max())
    if launch.train_budget.rule.counts_sequences:
        return launch.train_budget.size * longest
    return max(longest, min(launch.train_budget.size, int(batch.length_N.sum())))


def _trainer(configuration: Configuration, setup: PricingSetup) -> Trainer:
    precision = PRECISION_OF[configuration.priced_precision]
    return Trainer(
        shape=model_shape(configuration, setup),
        strategy=to_strategies(configuration, setup),
        hardware=setup.hardware(precision),
        constants=constants_of([setup.regime(configuration)], setup.residuals),
        memory_constants=launch_memory_constants(configuration, setup),
        stages=stages_of_layouts(setup.model, [stage_layout(configuration)]),
    )


def _batch(launch: RlLaunch, inputs: RlInputs) -> Batch:
    """Draw lengths by the goal's laws, cut at the launch's limits."""
    goal = inputs.goal
    prompt = goal.prompt_tokens
    if launch.longest_prompt:
        prompt = _cut(prompt, launch.longest_prompt)
    room = launch.longest_response
    if not launch.longest_prompt:
        # One limit holds prompt and response.
        room = max(launch.longest_response - math.ceil(mean_tokens(prompt)), 1)
    return draw_batch(
        prompts=launch.prompts,
        samples=launch.samples,
        prompt_tokens=prompt,
        response_tokens=_cut(goal.response_tokens, room),
    )


def _cut(law: LengthLaw, longest: int) -> LengthLaw:
    return law.model_copy(update={"most": min(law.most, longest)})


def _side(launch: RlLaunch, inputs: RlInputs) -> RolloutSide:
    setup, traits = inputs.setup, ENGINE_TRAITS[launch.engine]
    weights = launch.weight_format
    return RolloutSide(
        iteration=Iteration(
            decoder=replace(decoder_of(inputs.model), vision_elements=0),
            formats=Formats(
                attention=weights, output=weights, ffn=weights, experts=weights, kv="bf16"
            ),
            degrees=launch.degrees,
            traits=traits,
            machine=ServingMachine(sheet=setup.sheet, tables=None, engines=ENGINE_TRAITS),
            stream_s=traits.rank_stream_s(launch.degrees.attention_data),
            sequence_s=launch.sequence_s,
            is_eager=launch.is_eager,
            release=launch.engine_release,
        ),
        instances=launch.rollout_devices // launch.degrees.devices,
        step_tokens=launch.step_tokens,
        most_running=launch.most_running,
        memory_ratio=launch.memory_ratio,
        memory_bytes=setup.memory_capacity_bytes,
    )
