"""One launch of reinforcement learning, as its reader understood it: two halves and the batch.

The training half is the launch of a trainer (launch.py), which its reader makes of the framework's
names; `samples_per_update` sequences are an optimizer step of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from tuner.costs.rl.packing import PackingRule, TokenBudget
from tuner.costs.serve.engine import InstanceDegrees
from tuner.engines.megatron_lm.read import settings_of
from tuner.engines.reading.arguments import Flags
from tuner.engines.reading.launch import LaunchSettings
from tuner.engines.reading.nearest import nearest_divisor
from tuner.engines.reading.sections import Sections
from tuner.errors import SpecError
from tuner.prices.weight_sync import SyncPath
from tuner.simulate.rl.step import RlPlacement
from tuner.spec.complaint import complaint
from tuner.spec.model import ModelSpec

MOST_SAMPLES: Final = 65_536
"""Responses of a step, at most: simulating more takes minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlLaunch:
    """One launch."""

    source: str
    framework: str
    """Framework and the release that its defaults are of, `verl 0.9`."""
    trainer: LaunchSettings
    placement: RlPlacement
    versions: float = 0.0
    """Versions of the weights that responses may be behind; 0: on-policy."""
    devices_per_node: int
    rollout_devices: int
    """Devices that roll out: those of the trainer where colocated."""

    prompts: int
    samples: int
    """Responses of a prompt."""
    samples_per_update: int
    """Responses of one optimizer step."""
    epochs: int = 1
    longest_prompt: int
    longest_response: int
    max_model_len: int | None = None
    """Longest sequence of the engine; None: prompt and response."""
    train_budget: TokenBudget
    forward_budget: TokenBudget
    recomputes_old: bool
    """Old log-probabilities take a forward pass."""
    has_reference: bool
    has_critic: bool

    engine: str
    engine_release: str = ""
    """Release of the engine; empty: the newest."""
    weight_format: str = "bf16"
    """Format of all weights of the engine."""
    sequence_s: float = 0.0
    """Host seconds per running sequence and decode step, where a release schedules none ahead."""
    degrees: InstanceDegrees
    memory_ratio: float
    most_running: int
    step_tokens: int
    is_eager: bool
    sleeps: bool
    """Engines free their memory while the trainer works on their devices."""
    sleep_keeps_weights: bool
    """Sleeping engines keep their weights in host memory."""
    path: SyncPath
    bucket_bytes: float
    """Bytes of the buffer that weights pass through."""

    offloads_weights: bool
    """Weights and gradients of the trainer leave its devices while it does not work."""
    offloads_optimizer: bool
    """The state of the optimizer does."""
    offloads_reference: bool
    spelled: Mapping[str, str]
    """Spelling of the fields above in the launch."""
    ignored: tuple[str, ...] = ()
    """Settings that change nothing in the prediction."""
    notes: tuple[str, ...] = field(default=())

    @property
    def all_samples(self) -> int:
        """Return the responses of a step."""
        return self.prompts * self.samples

    @property
    def devices(self) -> int:
        """Return the devices of both sides."""
        is_colocated = self.placement is RlPlacement.COLOCATED
        return (self.trainer.devices or 0) + (0 if is_colocated else self.rollout_devices)

    @property
    def forwards(self) -> int:
        """Return the forward passes for log-probabilities and values."""
        return self.recomputes_old + self.has_reference + self.has_critic

    def name(self, field_name: str) -> str:
        """Return how the launch spells a field."""
        return self.spelled.get(field_name, field_name)


def mistakes(launch: RlLaunch, model: ModelSpec) -> Iterator[str]:
    """Yield what the launch cannot run with, in a line each."""
    samples, update, name = launch.all_samples, launch.samples_per_update, launch.name
    said = f"{name('prompts')} {launch.prompts} * {name('samples')} {launch.samples} = {samples}"
    if samples > MOST_SAMPLES:
        yield f"{said} samples are more than the {MOST_SAMPLES} of a step that are simulated"
    if update > samples:
        yield (
            f"{name('samples_per_update')}: an update of {update} samples is more than {said};"
            f" write at most {samples}"
        )
    elif samples % update:
        yield (
            f"{said} samples are not divisible by the {update} of an update"
            f" ({name('samples_per_update')}); the nearest that divides is"
            f" {nearest_divisor(samples, update)}"
        )
    trainer = launch.trainer
    ranks = trainer.tensor * trainer.context * trainer.pipeline
    data, rest = divmod(trainer.devices or 0, ranks)
    if data and not rest and min(update, samples) % data:
        yield (
            f"{name('samples_per_update')}: {min(update, samples)} samples of an update are not"
            f" divisible by {data} data-parallel ranks; the nearest multiple is"
            f" {max(round(min(update, samples) / data), 1) * data}"
        )
    longest = launch.longest_prompt + launch.longest_response
    said = f"{name('longest_response')} {launch.longest_response}"
    if launch.longest_prompt:
        said = f"{name('longest_prompt')} {launch.longest_prompt} + {said} = {longest}"
    said += " tokens"
    if longest > model.max_position:
        yield f"{said} exceed the {model.max_position} positions of {model.name}; shorten one"
    elif launch.max_model_len is not None and longest > launch.max_model_len:
        yield f"{said} exceed {name('max_model_len')} {launch.max_model_len}; raise it"
    tensor, heads = launch.degrees.attention_tensor, model.attention.num_heads
    if heads % tensor:
        yield (
            f"{name('degrees')} {tensor} does not divide {heads} heads; the nearest that does is"
            f" {nearest_divisor(heads, tensor)}"
        )
    if launch.rollout_devices % launch.degrees.devices:
        yield (
            f"{launch.rollout_devices} devices that roll out are not divisible by the"
            f" {launch.degrees.devices} of an engine ({name('degrees')}); the nearest is"
            f" {nearest_divisor(launch.rollout_devices, launch.degrees.devices)}"
        )


def trainer_settings(
    sections: Sections,
    keys: Mapping[str, str],
    *,
    more: Mapping[str, tuple[str, ...]],
    spelled: Mapping[str, str],
) -> LaunchSettings:
    """Read the training half as Megatron-LM's flags.

    Args:
        sections: settings of the launch.
        keys: setting by flag.
        more: flags that the framework sets itself.
        spelled: the launch's spelling of fields.

    Raises:
        SpecError: a setting cannot be read.
    """
    values = {flag: words for flag, key in keys.items() if (words := _words(sections.value(key)))}
    on = {flag for flag, words in values.items() if words == ("true",)}
    given = {
        **more,
        **{flag: () if flag in on else words for flag, words in values.items()},
    }
    kept = {flag: words for flag, words in given.items() if words != ("false",)}
    try:
        read = settings_of(Flags(source=sections.source, values=kept, notes=()))
    except ValidationError as error:
        raise SpecError(f"{sections.source}: {complaint(error, model=LaunchSettings)}") from error
    return read.model_copy(update={"spelled": {**read.spelled, **spelled}})


def _words(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, bool):
        return (str(value).lower(),)
    if isinstance(value, list):
        return tuple(map(str, value))
    return (str(value),)


def optional_number(sections: Sections, name: str) -> int | None:
    """Return a whole number; None where it is not set."""
    return None if sections.value(name) is None else sections.number(name, default=1)


def share(sections: Sections, name: str) -> float:
    """Return a share above 0, up to 1.

    Raises:
        SpecError: the value is none.
    """
    value = sections.value(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
        raise SpecError(f"{sections.source}: {name} {str(value)[:40]} is no share above 0, up to 1")
    return float(value)


def token_budget(
    *, is_packed: bool, tokens: int | None, sequences: int | None, rule: PackingRule, said: str
) -> TokenBudget:
    """Return the size of a micro-batch, in tokens where sequences are packed.

    Raises:
        SpecError: the size is missing.
    """
    size = tokens if is_packed else sequences
    if size is None:
        raise SpecError(f"{said} is missing; without it no micro-batch has a size")
    return TokenBudget(rule=rule if is_packed else PackingRule.COUNTED, size=size)
