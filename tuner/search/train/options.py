"""The execution options of given degrees: ZeRO, recomputation, overlap, CUDA graphs, offloading.

An option is one choice on each of a dozen axes. All together are their product, which is far too
long to list for every combination of degrees. Axes therefore stay separate: a rule names the axes
that it ties together, and counting multiplies the independent ones.

    zero_stage          0 .. 3
    recompute           none, every set of the model's modules, the first quarter, half and three
                        quarters of each stage's layers, all of them
    chunks              MemFine's pieces of a MoE layer (arXiv:2511.21431, section 6)
    the knobs that tuner/config/knobs.py says are searched
    sharding            of the training state: over all ranks, or a copy per scale-up domain

What a model cannot have (the experts' axes in a dense one) is not in its product. Rules read a few
booleans about the degrees, `Facts`.

Letters: A choices of one axis, T rows of a table of some axes together.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from profilers.steps.config import LayerKind, Recompute
from tuner.arrays import Ints
from tuner.config.knobs import searched
from tuner.search.train.axes import (
    CHUNKS,
    LAYER_SHARES,
    SHARDINGS,
    Choice,
    Facts,
    OptionRule,
    RecomputeChoice,
)
from tuner.search.train.option_rules import option_rules
from tuner.search.train.problem import TrainProblem
from tuner.search.train.rules import Mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptionSpace:
    """All axes of a problem with their choices, and the rules between them."""

    choices: Mapping[str, tuple[Choice, ...]]
    rules: tuple[OptionRule, ...]

    @property
    def num_options(self) -> int:
        """Options of every combination of degrees, legal or not."""
        return math.prod(len(choices) for choices in self.choices.values())

    def legal(self, facts: Facts) -> Ints:
        """List the legal options as choices on every axis, [T, axes]."""
        axes = tuple(self.choices)
        options = np.zeros((1, len(axes)), dtype=np.int64)
        for component in self._components():
            first = self._first_broken(facts, component, self._rules_within(component))
            sizes = [len(self.choices[axis]) for axis in component]
            chosen = np.stack(np.unravel_index(np.flatnonzero(first < 0), sizes), axis=1)
            at = [axes.index(axis) for axis in component]
            repeated = np.repeat(options, len(chosen), axis=0)
            repeated[:, at] = np.tile(chosen, (len(options), 1))
            options = repeated
        return options

    def count_legal(self, facts: Facts) -> tuple[int, dict[str, int]]:
        """Count the legal options, and the others by the first rule they break."""
        firsts = [
            self._first_broken(facts, component, self._rules_within(component))
            for component in self._components()
        ]
        left = self.num_options
        illegal: dict[str, int] = {}
        for index, rule in enumerate(self.rules):
            still = math.prod(int(((first < 0) | (first > index)).sum()) for first in firsts)
            if still < left:
                illegal[rule.text] = left - still
                left = still
        return left, illegal

    def _rules_within(self, axes: Sequence[str]) -> list[tuple[int, OptionRule]]:
        chosen = set(axes)
        return [(i, rule) for i, rule in enumerate(self.rules) if chosen.issuperset(rule.axes)]

    def _first_broken(
        self, facts: Facts, axes: tuple[str, ...], rules: Sequence[tuple[int, OptionRule]]
    ) -> Ints:
        """The index of the first rule that each row of the axes' product breaks, or -1."""
        sizes = [len(self.choices[axis]) for axis in axes]
        first = np.full(sizes, -1, dtype=np.int64)
        for index, rule in rules:
            broken = self._broken(facts, rule)
            order = [rule.axes.index(axis) for axis in axes if axis in rule.axes]
            shape = [len(self.choices[axis]) if axis in rule.axes else 1 for axis in axes]
            here = np.broadcast_to(broken.transpose(order).reshape(shape), sizes)
            first[(first < 0) & here] = index
        return first.ravel()

    def _broken(self, facts: Facts, rule: OptionRule) -> Mask:
        lists = [self.choices[axis] for axis in rule.axes]
        flat = [rule.is_broken(facts, *chosen) for chosen in itertools.product(*lists)]
        return np.array(flat, dtype=np.bool_).reshape([len(choices) for choices in lists])

    def _components(self) -> list[tuple[str, ...]]:
        """Axes that rules tie together, directly or through others."""
        groups = [{axis} for axis in self.choices]
        for rule in self.rules:
            tied = [group for group in groups if group & set(rule.axes)]
            groups = [group for group in groups if group not in tied]
            groups.append(set().union(*tied))
        return [tuple(axis for axis in self.choices if axis in group) for group in groups]


def option_space(problem: TrainProblem) -> OptionSpace:
    """Build the axes of a problem and the rules between them."""
    has_experts = problem.model.num_moe_layers > 0
    plain: dict[str, tuple[Choice, ...]] = {
        knob.field: knob.choices[:1] if knob.of_experts and not has_experts else knob.choices
        for knob in searched()
    }
    choices: dict[str, tuple[Choice, ...]] = {
        "zero_stage": plain.pop("zero_stage"),
        "recompute": tuple(_recompute_choices(problem)),
        "chunks": CHUNKS if has_experts else (1,),
        **plain,
        "sharding": SHARDINGS,
    }
    return OptionSpace(choices=choices, rules=option_rules(problem))


def _recompute_choices(problem: TrainProblem) -> Iterator[RecomputeChoice]:
    model = problem.model
    has_experts = model.num_moe_layers > 0
    has = {
        "core_attn": True,
        "layernorm": True,
        "mla_up_proj": model.attention.kind == "mla",
        "mlp": LayerKind.DENSE in model.layers,
        "moe_act": has_experts,
        "shared_experts": model.moe is not None and model.moe.shared_ffn_size > 0,
        "moe": has_experts,
    }
    modules = [module for module, present in has.items() if present]
    yield RecomputeChoice(level=Recompute.NONE)
    for count in range(1, len(modules) + 1):
        for chosen in itertools.combinations(modules, count):
            # Recomputing a MoE layer includes its activation and its shared experts.
            if "moe" in chosen and {"moe_act", "shared_experts"} & set(chosen):
                continue
            yield RecomputeChoice(level=Recompute.SELECTIVE, modules=frozenset(chosen))
    for share in LAYER_SHARES:
        yield RecomputeChoice(level=Recompute.FULL, share=share)
