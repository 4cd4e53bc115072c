"""The router: weights that sum to one, the balancing loss's gradient, the loss-free bias."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from profilers.steps.config import StepConfig
from profilers.steps.instruments import Instruments
from profilers.steps.layout import ParallelState
from profilers.steps.routing import TopKRouter
from profilers.steps.run import start
from tests.expect import present

Fields = dict[str, Any]
NUM_EXPERTS, TOP_K, TOKENS = 8, 2, 32


@pytest.fixture(scope="module")
def layout(tiny_config: Callable[..., Fields]) -> Iterator[ParallelState]:
    yield start(StepConfig.model_validate(tiny_config()), device=torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture
def instruments() -> Instruments:
    return Instruments(moe_layers=3, num_experts=NUM_EXPERTS, device=torch.device("cpu"))


@pytest.fixture
def router(
    tiny_config: Callable[..., Fields], layout: ParallelState, instruments: Instruments
) -> Callable[..., TopKRouter]:
    def built(**routing: Any) -> TopKRouter:
        config = StepConfig.model_validate(tiny_config(routing=routing))
        return TopKRouter(config, layout, instruments, moe_layer=1, name="router")

    return built


def test_weights_sum_to_one_and_loads_are_noted_in_the_first_pass_only(
    router: Callable[..., TopKRouter], instruments: Instruments
) -> None:
    module, x = router(), torch.randn(2, TOKENS, 32)
    experts_TK, weight_TK = module(x, None, is_first_pass=True)
    again_TK, _ = module(x, None, is_first_pass=False)
    torch.testing.assert_close(weight_TK.sum(dim=1), torch.ones(2 * TOKENS))
    assert (experts_TK == again_TK).all()
    assert instruments.load_LE.sum(dim=1).tolist() == [0, 2 * TOKENS * TOP_K, 0]


def test_the_auxiliary_loss_has_the_gradient_of_its_formula(
    router: Callable[..., TopKRouter],
) -> None:
    coefficient, global_batch = 0.3, 8
    x = torch.randn(2, TOKENS, 32)
    gradients = []
    for balancing in ("aux_loss", "none"):
        module = router(balancing=balancing, coefficient=coefficient)
        _, weight_TK = module(x, None, is_first_pass=True)
        torch.autograd.backward(weight_TK.square().sum())
        gradients.append(present(module.weight.grad))
    weight = module.weight.detach().requires_grad_()
    probability = (x @ weight.T).softmax(dim=-1)
    chosen = probability.topk(TOP_K).indices.flatten(1)
    f_BE = torch.stack([sequence.bincount(minlength=NUM_EXPERTS) for sequence in chosen])
    f_BE = f_BE * NUM_EXPERTS / (TOP_K * TOKENS)
    loss = coefficient * (f_BE * probability.mean(dim=1)).sum() / global_batch
    torch.autograd.backward(loss)
    torch.testing.assert_close(
        gradients[0] - gradients[1], present(weight.grad), rtol=1e-3, atol=1e-6
    )


def test_forced_experts_are_used_and_the_router_still_learns(
    router: Callable[..., TopKRouter],
) -> None:
    module = router(mode="forced", balancing="none")
    forced = torch.tensor([[[6, 1]] * TOKENS] * 2)
    experts_TK, weight_TK = module(torch.randn(2, TOKENS, 32), forced, is_first_pass=True)
    assert experts_TK.tolist() == [[6, 1]] * 2 * TOKENS
    torch.autograd.backward(weight_TK[:, 0].sum())
    # Only rounding is left for the others: the softmax's denominator cancels in the weights.
    size_E = present(module.weight.grad).abs().sum(dim=1)
    assert (size_E > 1e-4 * size_E.max()).nonzero().flatten().tolist() == [1, 6]


def test_the_bias_rises_for_idle_experts_and_steers_the_choice_not_the_weight(
    router: Callable[..., TopKRouter],
) -> None:
    module, x = router(balancing="loss_free", coefficient=0.5), torch.randn(1, TOKENS, 32)
    module.move_bias(torch.tensor([9, 1, 1, 1, 1, 1, 1, 1]))
    assert module.bias.tolist() == [-0.5] + [0.5] * 7
    module.move_bias(torch.tensor([9, 1, 9, 9, 9, 9, 9, 9]))
    experts_TK, weight_TK = module(x, None, is_first_pass=True)
    assert (experts_TK == 1).any(dim=1).all()
    probability = (x[0] @ module.weight.T).softmax(dim=-1).gather(1, experts_TK)
    torch.testing.assert_close(weight_TK, probability / probability.sum(dim=1, keepdim=True))
