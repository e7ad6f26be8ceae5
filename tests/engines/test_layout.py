from __future__ import annotations

import torch
from torch import Tensor

from vitscale.engines import layout
from vitscale.engines.average import MovingAverage
from vitscale.engines.layout import Piece
from vitscale.engines.normalize import telling


def pieces(lengths: list[int]) -> list[Piece]:
    return [
        Piece(f"p{number}", (length,), 0, {"param": torch.arange(float(length)), "ema": torch.zeros(length)})
        for number, length in enumerate(lengths)
    ]


def test_dealing_gives_each_piece_to_one_rank_and_balances() -> None:
    whole = pieces([100, 1, 60, 40, 2, 50, 50])
    dealt = [layout.deal(whole, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(piece.name for mine in dealt for piece in mine) == sorted(piece.name for piece in whole)
    sizes = [sum(len(piece) for piece in mine) for mine in dealt]
    assert max(sizes) - min(sizes) <= 3


def test_load_writes_through_views() -> None:
    memory = torch.zeros(10)
    piece = Piece("w", (4, 5), 6, {"param": memory[2:5]})
    asked = []

    def read(name: str, kind: str, start: int, length: int) -> Tensor:
        asked.append((name, kind, start, length))
        return torch.tensor([1.0, 2.0, 3.0])

    layout.load([piece], read)
    assert asked == [("w", "param", 6, 3)]
    assert memory.tolist() == [0, 0, 1, 2, 3, 0, 0, 0, 0, 0]
    (fragment,) = layout.fragments([piece])
    assert (fragment.name, fragment.kind, fragment.start, fragment.shape) == ("w", "param", 6, (4, 5))
    assert fragment.values.tolist() == [1, 2, 3]


def test_average_follows_its_formula_and_stays_where_nothing_was_applied() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    average = MovingAverage([weight], 0.75)
    expected = torch.tensor([1.0, 2.0])
    for applied, value in [(True, 3.0), (False, 100.0), (True, -1.0)]:
        with torch.no_grad():
            weight.fill_(value)
        average.update(torch.tensor(applied))
        if applied:
            expected = 0.75 * expected + 0.25 * value
        torch.testing.assert_close(average.values[0], expected)


def test_swapping_twice_restores_bits() -> None:
    weight = torch.nn.Parameter(torch.randn(5))
    average = MovingAverage([weight], 0.9)
    with torch.no_grad():
        weight.add_(torch.randn(5))
    before, mean = weight.detach().clone(), average.values[0].clone()
    average.swap()
    assert torch.equal(weight.detach(), mean)
    average.swap()
    assert torch.equal(weight.detach(), before)
    assert torch.equal(average.values[0], mean)


def test_infinite_loss_shows_in_the_gradient() -> None:
    logits = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor([1]))
    assert loss.isinf()
    (finite,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert finite.isfinite().all(), "which is why the gradient alone would not tell"
    (told,) = torch.autograd.grad(telling(loss), logits)
    assert told.isnan().all()


def test_finite_loss_keeps_its_gradient() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(telling(x * x), x)
    assert gradient == 6
