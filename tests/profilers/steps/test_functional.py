"""Every hand-written derivative against finite differences, every layout against a plain loop."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from profilers.steps.experts import expert_ffn
from profilers.steps.functional import (
    expert_order,
    permute,
    rms_norm,
    rotary,
    rotary_tables,
    swiglu,
    unpermute,
)
from tests.expect import present
from tests.rows import each_row

FP64 = torch.float64


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=FP64, requires_grad=True)


def test_the_norm_and_experts_without_tokens_have_their_gradients() -> None:
    x, weight = _leaf(3, 5), _leaf(5)
    theirs = torch.nn.functional.rms_norm(x, (5,), weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, epsilon=1e-5), theirs)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, epsilon=1e-5), (x, weight))
    x, gate_up, down = _leaf(0, 4), _leaf(2, 10, 4), _leaf(2, 4, 5)
    torch.autograd.backward(expert_ffn(x, (0, 0), gate_up, down).sum())
    assert not present(gate_up.grad).any()


def test_swiglu_keeps_only_its_input_and_its_gradient_is_right() -> None:
    gate_up = _leaf(3, 8)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.data_ptr()) or tensor,  # type: ignore[func-returns-value]
        lambda tensor: tensor,
    ):
        product = swiglu(gate_up)
    assert kept == [gate_up.data_ptr()]
    torch.testing.assert_close(product, torch.nn.functional.silu(gate_up[:, :4]) * gate_up[:, 4:])
    assert torch.autograd.gradcheck(swiglu, (gate_up,))


def test_rotary_positions_make_scores_depend_on_the_distance_only() -> None:
    device = torch.device("cpu")
    cosine, sine = rotary_tables(9, head_dim=6, theta=100.0, dtype=FP64, device=device)
    query = rotary(torch.randn(6, dtype=FP64).expand(1, 9, 1, 6), cosine, sine)
    key = rotary(torch.randn(6, dtype=FP64).expand(1, 9, 1, 6), cosine, sine)
    score = query[0, :, 0] @ key[0, :, 0].T
    for distance in range(4):
        diagonal = score.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_unpermute_undoes_permute_and_sums_by_weight() -> None:
    x, weight = _leaf(7, 4), _leaf(7, 2)
    experts = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    order = expert_order(experts)
    assert experts.flatten()[order].tolist() == sorted(experts.flatten().tolist())

    def there_and_back(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return unpermute(permute(x, order, top_k=2), order, weight)

    torch.testing.assert_close(there_and_back(x, weight), x * weight.sum(dim=1, keepdim=True))
    assert torch.autograd.gradcheck(there_and_back, (x, weight))


def test_experts_equal_a_loop_even_when_some_have_no_tokens() -> None:
    counts = (3, 0, 2, 1)
    x, gate_up, down = _leaf(6, 4), _leaf(4, 10, 4), _leaf(4, 4, 5)
    expected = []
    for expert, (start, end) in enumerate(((0, 3), (3, 3), (3, 5), (5, 6))):
        gate, up = (x[start:end] @ gate_up[expert].T).chunk(2, dim=-1)
        expected.append((torch.nn.functional.silu(gate) * up) @ down[expert].T)
    torch.testing.assert_close(expert_ffn(x, counts, gate_up, down), torch.cat(expected))
    assert torch.autograd.gradcheck(lambda a, b, c: expert_ffn(a, counts, b, c), (x, gate_up, down))


@each_row("counts", [(17, 0, 40, 5), (33, 30), (70,), (1, 1, 1), (16, 48)])
@each_row(("hidden", "ffn"), [(8, 24), (24, 4)])
def test_ragged_experts_in_bf16_equal_those_in_fp32(
    counts: tuple[int, ...], hidden: int, ffn: int
) -> None:
    experts = len(counts)
    shapes = ((sum(counts), hidden), (experts, 2 * ffn, hidden), (experts, hidden, ffn))
    exact = [torch.randn(*shape).bfloat16().float().requires_grad_() for shape in shapes]
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    x, gate_up, down = exact
    expected = expert_ffn(x, counts, gate_up, down)
    x, gate_up, down = rounded
    y = expert_ffn(x, counts, gate_up, down)
    assert _error(y, expected) < 0.05
    gradient = torch.randn_like(expected).bfloat16()
    torch.autograd.backward(expected, gradient.float())
    torch.autograd.backward(y, gradient)
    for one, other in zip(rounded, exact, strict=True):
        assert _error(present(one.grad), present(other.grad)) < 0.05


def _error(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    return float((rounded.detach().float() - exact.detach()).norm() / exact.detach().norm())


class _Gemms(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Notes the rows, the inner size and the columns of every matrix product."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.shapes: set[tuple[int, int, int]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func.overloadpacket is torch.ops.aten.mm:
            left, right = args
            self.shapes.add((*left.shape, right.shape[1]))
        return func(*args, **(kwargs or {}))  # type: ignore[no-any-return]  # whatever func gives


def test_gemms_of_experts_whose_rows_vary_come_in_few_shapes() -> None:
    gate_up = torch.randn(3, 16, 8).bfloat16().requires_grad_()
    down = torch.randn(3, 8, 8).bfloat16().requires_grad_()
    with _Gemms() as gemms:
        for more in range(16):
            counts = (33 + more, 40, 48 - more)
            x = torch.randn(sum(counts), 8).bfloat16().requires_grad_()
            torch.autograd.backward(expert_ffn(x, counts, gate_up, down).sum())
    assert {rows for rows, _, _ in gemms.shapes if rows > 16} == {32, 48}
    assert {inner for _, inner, _ in gemms.shapes if inner > 16} == {48}
