"""A bound is a bound: whatever the weights are, and whatever is done to break it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quarflow.nn.activations import ACTIVATIONS, activation
from quarflow.nn.bounds import BOUNDS, LIPSCHITZ, gram_norm, path_bound, power_norm
from quarflow.nn.triangular import TriangularNet


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    exponent=st.floats(-15, 15),
    seed=st.integers(0, 10**6),
    single=st.booleans(),
)
@settings(max_examples=200)
def test_gram_norm_is_above_the_norm_and_within_its_slack(
    rows: int, columns: int, exponent: float, seed: int, single: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = 10.0**exponent * torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    weight[1] = weight[1] @ weight[1].mT @ weight[1] / 10.0 ** (2 * exponent)  # a wider spectrum
    weight = weight.float() if single else weight
    truth = torch.linalg.matrix_norm(weight.double(), 2)
    bound = gram_norm(weight).double()
    assert (bound >= truth).all()
    assert (bound <= truth * (1.0101 if not single else 1.0102)).all()


def test_gram_norm_of_hard_cases() -> None:
    assert gram_norm(torch.tensor([[0.0, 1.0], [0.0, 0.0]])) >= 1  # the paper's claim for block matrices fails here
    assert gram_norm(torch.zeros(3, 3)) >= 0
    assert torch.isfinite(gram_norm(torch.full((512, 512), 1e18)))
    weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gram_norm, weight)


def test_power_norm_does_not_stay_with_yesterdays_vector() -> None:
    # The paper's example: after u = e_1 for diag(2, 1), an iteration that carries u over says 2 for diag(2, 3).
    torch.manual_seed(0)
    assert torch.allclose(power_norm(torch.diag(torch.tensor([2.0, 1.0]))), torch.tensor(2.0), rtol=1e-3)
    assert torch.allclose(power_norm(torch.diag(torch.tensor([2.0, 3.0]))), torch.tensor(3.0), rtol=1e-3)
    weight = torch.randn(5, 30, 20, dtype=torch.float64)
    truth = torch.linalg.matrix_norm(weight, 2)
    estimate = power_norm(weight, tolerance=1e-6, max_steps=1000)
    assert (estimate <= truth * (1 + 1e-12)).all()
    assert torch.allclose(estimate, truth, rtol=1e-3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_contract(name: str) -> None:
    act = activation(name).double()
    with torch.no_grad():
        for p in act.parameters():
            p.fill_(3.0)
    h = torch.cat([torch.linspace(-30, 30, 100_001, dtype=torch.float64), torch.tensor([1e-9, -1e-9, 1e3, -1e3])])
    h = h.view(1, 1, -1).requires_grad_()
    value, slope = act(h)
    assert value.shape[1] == act.width
    for i in range(act.width):
        (truth,) = torch.autograd.grad(value[:, i].sum(), h, retain_graph=True)
        assert torch.allclose(slope[:, i], truth[:, 0], rtol=1e-12, atol=1e-12)
    assert (slope.square().sum(1).sqrt() <= 1 + 1e-12).all()
    assert slope.square().sum(1).max() > 0.98  # a bound that is far from tight wastes sigma
    if act.curves is not None:
        smooth = h.detach()[..., ::7]
        value, slope, curve = act.curves(smooth / act.unit, True)
        fast = act.unit * value, act.times_slope(torch.ones_like(value), slope), act.bend * curve
        inputs = smooth.clone().requires_grad_()
        value, slope = act(inputs)
        (curve,) = torch.autograd.grad(slope.sum(), inputs)
        for got, wanted in zip(fast, (value, slope, curve), strict=True):
            assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12)
        assert act.curves(smooth / act.unit, False)[2] is None
        if act.recall is not None:
            value, s, curve = act.curves(smooth / act.unit, True)
            u = torch.linspace(-2, 2, s.numel(), dtype=s.dtype).view_as(s)
            again = act.recall(value, act.times_slope(u, s))
            assert torch.equal(again[0], s)
            assert torch.equal(again[1], curve * u)


def options() -> list[tuple[str, str, bool]]:
    return [
        (lipschitz, bound, trick)
        for lipschitz in LIPSCHITZ
        for bound in BOUNDS
        for trick in (True, False)
        if not (lipschitz == "network" and bound == "paths")
    ]


def ascend(net: TriangularNet, steps: int, generator: torch.Generator) -> torch.Tensor:
    """Weights and points moved by gradient ascent on the largest slope; the points where it ended."""
    x = (3 * torch.randn(64, net.features, generator=generator, dtype=torch.float64)).to(net.layers[0].weight.dtype)
    x.requires_grad_()
    optimizer = torch.optim.Adam([*net.parameters(), x], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        slopes = net(x)[1].abs()
        (-torch.logsumexp(20 * slopes, dim=0)).sum().backward()
        optimizer.step()
    return x.detach()


def attack(lipschitz: str, bound: str, trick: bool, dtype: torch.dtype, points: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in ("sine", "elu", "clipswish"):
        torch.manual_seed(1)
        net = TriangularNet(3, (6, 5), activation=name, lipschitz=lipschitz, bound=bound, trick=trick).to(dtype)
        x = ascend(net, 80, generator)
        net.eval()  # "power" is an estimate in training, and certified here
        found = net(x)[1].abs().max().item()
        noise = torch.randn(points, 3, generator=generator, dtype=torch.float64).to(dtype)
        with torch.no_grad():
            slopes = 1 + net(torch.cat([x, x[:1] + 0.1 * noise, 5 * noise]))[1]
        assert (slopes >= 1 - net.sigma).all(), slopes.min()
        assert (slopes <= 1 + net.sigma).all(), slopes.max()
        if trick and lipschitz == "coordinate" and bound == "paths":
            # The attack worked: the bound holds because it is one, not because nothing came near it.
            assert found > 0.9 * net.sigma, found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("lipschitz", "bound", "trick"), options())
def test_slopes_stay_within_the_bound_under_attack(
    lipschitz: str, bound: str, trick: bool, dtype: torch.dtype
) -> None:
    attack(lipschitz, bound, trick, dtype, points=5_000)


@pytest.mark.slow
def test_a_million_points_under_attack() -> None:
    for lipschitz, bound, trick in options():
        for dtype in (torch.float64, torch.float32):
            attack(lipschitz, bound, trick, dtype, points=500_000)


def test_network_bound_is_a_contraction() -> None:
    torch.manual_seed(0)
    for trick in (True, False):
        net = TriangularNet(4, (5, 6), lipschitz="network", trick=trick).double()
        ascend(net, 50, torch.Generator().manual_seed(0))
        x = torch.randn(50, 4, dtype=torch.float64)
        jacobian = torch.func.vmap(torch.func.jacrev(lambda x, net=net: net(x[None])[0][0]))(x)
        assert torch.linalg.matrix_norm(jacobian, 2).max() <= net.sigma


def test_path_bound_is_reached() -> None:
    # One path, all slopes at one: the bound is the slope itself, up to rounding.
    blocks = [torch.tensor([[[2.0], [0.0]]]), torch.tensor([[[3.0, 5.0]]])]
    assert 6 <= path_bound(blocks, [1]).item() <= 6 * (1 + 1e-5)


def test_zero_weights_are_the_identity() -> None:
    for lipschitz, bound, trick in options():
        net = TriangularNet(2, (3,), lipschitz=lipschitz, bound=bound, trick=trick)
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        value, diagonal = net(torch.ones(1, 2))
        assert (value == 0).all()
        assert (diagonal == 0).all()
        (value.sum() + diagonal.sum()).backward()
        assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)


def test_sigma_zero_is_allowed_and_leaves_the_diagonal() -> None:
    value, diagonal = TriangularNet(2, (3,), sigma=0.0)(torch.ones(1, 2))
    assert (diagonal == 0).all()
    assert torch.isfinite(value).all()
