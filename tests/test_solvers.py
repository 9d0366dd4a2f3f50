"""Solvers end, tell the truth, and shout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import quarflow as qf
from quarflow.nn.triangular import TriangularNet
from quarflow.solvers import Banach, Bracketing, Newton, NotConverged, implicit
from quarflow.transforms import Residual


def zigzag(x: Tensor) -> tuple[Tensor, Tensor]:
    """A slope that jumps between -0.97 and 0.97: Newton alone goes in circles on it."""
    m = x / 0.7 - torch.round(x / 0.7)
    return 0.97 * 0.7 * (m.abs() - 0.25), 0.97 * m.sign()


@pytest.mark.parametrize("solver", [Newton(), Bracketing(), Banach()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_each_solver_reaches_its_tolerance(solver: Newton | Banach, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    z = 3 * torch.randn(200, 4, dtype=dtype)
    net = TriangularNet(4, (8, 8), lipschitz="network", sigma=0.9).to(dtype)
    with torch.no_grad():
        s = solver(net, z, 0.9)
        assert s.converged.all()
        residual = (s.x + net(s.x)[0] - z).abs().amax(1)
    assert torch.allclose(residual, s.residual, atol=torch.finfo(dtype).eps * 20)
    assert residual.max() <= s.tolerance * 20


def test_newton_needs_its_net_and_has_it() -> None:
    z = torch.linspace(-5, 5, 2000, dtype=torch.float64).view(-1, 1)
    bare = z.clone()
    for _ in range(200):
        value, diagonal = zigzag(bare)
        bare = bare - (bare + value - z) / (1 + diagonal)
    assert (bare + zigzag(bare)[0] - z).abs().max() > 1e-3  # Newton without the bracket circles
    s = Newton()(zigzag, z, 0.97)
    assert s.converged.all()
    assert s.steps < 140


def test_bracketing_is_bounded_whatever_the_network_says() -> None:
    def liar(x: Tensor) -> tuple[Tensor, Tensor]:
        return 0.9 * x.sin(), torch.rand_like(x) * 1.8 - 0.9  # slopes that help nobody

    z = torch.linspace(-50, 50, 300, dtype=torch.float64).view(-1, 3)
    for solver in (Newton(), Bracketing()):
        s = solver(liar, z, 0.9)
        assert s.converged.all()
        assert s.steps <= 20 + 140 * 3


def test_failure_is_an_error_with_numbers_and_advice() -> None:
    torch.manual_seed(0)
    block = Residual(TriangularNet(3, (8,)).double(), solver=Banach(max_steps=3))
    z = torch.randn(5, 3, dtype=torch.float64)
    with pytest.raises(NotConverged, match=r"after 3 steps.*max_steps") as failure:
        block.inverse(z)
    s = failure.value.solution
    assert s is not None
    assert s.steps == 3
    assert not s.converged.all()
    assert torch.allclose(s.residual, (block(s.x)[0] - z).abs().amax(1))
    with pytest.raises(NotConverged, match="NaN"):
        Residual(TriangularNet(3, (8,)).double()).inverse(z * float("nan"))


def test_newton_without_a_diagonal_says_so() -> None:
    with pytest.raises(ValueError, match="Banach"):
        Newton()(lambda x: (0.5 * x, None), torch.ones(1, 1), 0.5)


@pytest.mark.parametrize("options", [{"tolerance": 0.0}, {"tolerance": -1.0}, {"max_steps": 0}])
def test_bad_options(options: dict[str, float]) -> None:
    for solver in (Newton, Banach, Bracketing):
        with pytest.raises(ValueError, match=next(iter(options))):
            solver(**options)


def test_weights_that_rounding_defeats_are_an_error() -> None:
    torch.manual_seed(13)
    flow = qf.models.quar(13, blocks=4, hidden=(8, 8), activation="elu")
    with torch.no_grad():
        for name, p in flow.named_parameters():
            if name.endswith("weight"):
                p.mul_(100)
    x = torch.randn(100, 13)
    z = flow.transform(x)[0]
    with qf.solvers.unchecked():
        assert (flow.transform.inverse(z)[0] - x).abs().max() > 1e-3
    with pytest.raises(NotConverged, match=r"ill-conditioned.*float64"):
        flow.transform.inverse(z)
    # A draw is right whatever rounding does to its z.
    assert flow.sample(100).shape == (100, 13)


def test_images_are_solved_as_they_are() -> None:
    def net(x: Tensor) -> tuple[Tensor, Tensor]:
        return 0.5 * x.sin(), 0.5 * x.cos()

    z = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    s = Newton()(net, z, 0.5)
    assert s.x.shape == z.shape
    assert s.diagonal is not None
    assert s.diagonal.shape == z.shape
    assert (s.x + net(s.x)[0] - z).abs().max() < 1e-13


@pytest.mark.parametrize("context", [0, 2])
def test_implicit_gradients_against_finite_differences(context: int) -> None:
    torch.manual_seed(0)
    # No kinks, so that differences of samples have a limit.
    flow = qf.models.quar(3, context, blocks=2, hidden=(5, 4), activation="sine").double()
    z = torch.randn(4, 3, dtype=torch.float64)
    c = torch.randn(4, context, dtype=torch.float64) if context else None
    weights, slopes = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def loss(z: Tensor) -> Tensor:
        x, ladj = flow.transform.inverse(z, c)
        return (weights * x).sum() + (slopes * ladj).sum()

    inputs = [z.requires_grad_(), *flow.parameters()]
    if c is not None:
        inputs.append(c.requires_grad_())
    gradients = torch.autograd.grad(loss(z), inputs)
    for p, g in zip(inputs, gradients, strict=True):
        direction = torch.randn_like(p)
        step = 1e-5
        with torch.no_grad():
            p.add_(step * direction)
            above = loss(z)
            p.sub_(2 * step * direction)
            below = loss(z)
            p.add_(step * direction)
        truth = (above - below) / (2 * step)
        assert ((g * direction).sum() - truth).abs() <= 1e-6 * truth.abs().clamp_min(1e-3), p.shape


def test_implicit_gradient_of_a_plain_function() -> None:
    scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z = torch.linspace(-2, 2, 5, dtype=torch.float64).view(-1, 1).requires_grad_()

    def net(x: Tensor) -> tuple[Tensor, None]:
        return scale * x.sin(), None

    with torch.no_grad():
        s = Banach(tolerance=1e-15)(net, z, 0.5)
    x = implicit(net, s, z)
    g_scale, g_z = torch.autograd.grad(x.sum(), [scale, z])
    slope = 1 + 0.5 * s.x.cos()
    assert torch.allclose(g_z, 1 / slope)
    assert torch.allclose(g_scale, -(s.x.sin() / slope).sum())
