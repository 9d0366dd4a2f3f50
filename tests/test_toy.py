"""Every toy density integrates to one, and its samples and its entropy are those of that density."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from quarflow.data.toy import (
    TOYS,
    Checkerboard,
    EightGaussians,
    GaussianMixture,
    Moons,
    Rings,
    Spirals,
    TwoUniforms,
    mixture_of_gaussians,
    toy,
)

DENSITIES = {
    **TOYS,
    "overlapping_uniforms": lambda: TwoUniforms((-1, 2), (0.5, 4), weight=0.3),
    "skewed_mixture": lambda: GaussianMixture(
        [[-1, 0.5], [1, 1]], [[[1, 0.6], [0.6, 0.5]], [[0.2, -0.1], [-0.1, 0.3]]], [1, 3]
    ),
    "random_mixture": lambda: mixture_of_gaussians(features=1, components=3, seed=2),
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def quadrature(density):
    """Midpoints of [-7, 7]^d, in cells that end where the densities jump; log p there; the cells' volume."""
    width = 1 / 16
    axis = (torch.arange(14 * 16, dtype=torch.float64) + 0.5) * width - 7
    x = torch.cartesian_prod(*[axis] * density.features).reshape(-1, density.features)
    return x, torch.cat([density.log_prob(piece) for piece in x.split(1024)]), width**density.features


def statistics(x, log_prob):
    """Moments, waves that see fine structure, and the log-density itself: (batch, statistics)."""
    waves = x @ torch.tensor([[1.0, 2.0, 5.0, 9.0], [-3.0, 0.5, 4.0, 2.0]], dtype=x.dtype)[: x.shape[-1]]
    second = (x[:, :, None] * x[:, None]).flatten(1)
    return torch.cat([x, second, waves.cos(), waves.sin(), log_prob.clamp(min=-1e3)[:, None]], -1)


@pytest.mark.parametrize("name", DENSITIES)
def test_integrates_to_one_and_samples_follow_it(name):
    density = DENSITIES[name]()
    x, log_p, volume = quadrature(density)
    p = log_p.exp()
    assert p.sum().item() * volume == pytest.approx(1, abs=1e-6)

    expected = (p[:, None] * statistics(x, log_p)).sum(0) * volume
    draws = density.sample(20_000, generator(), torch.float64)
    values = statistics(draws, density.log_prob(draws))
    error = values.std(0) / math.sqrt(len(draws))
    # A constant statistic (log p of a uniform density) has no spread: only the quadrature's rounding is left.
    assert ((values.mean(0) - expected).abs() <= 5 * error + 1e-9).all()


@pytest.mark.parametrize("name", DENSITIES)
def test_entropy(name):
    density = DENSITIES[name]()
    _, log_p, volume = quadrature(density)
    true = -torch.special.xlogy(log_p.exp(), log_p.exp()).sum().item() * volume
    nats, error = density.entropy(20_000)
    assert abs(nats - true) <= 5 * error + 1e-9
    assert error < 0.02
    assert density.entropy(20_000) == (nats, error)


def test_eight_gaussians_are_those_of_ffjord():
    density = EightGaussians()
    means = 2 * math.sqrt(2) * torch.tensor([[1, 0], [math.sqrt(0.5), math.sqrt(0.5)], [0, 1]])
    torch.testing.assert_close(density.means[:3].float(), means)
    at_a_mode = math.log(1 / 8) - math.log(2 * math.pi * 0.125)
    assert density.log_prob(density.means).tolist() == pytest.approx([at_a_mode] * 8, rel=1e-6)


def test_gaussian_mixture_is_that_of_torch():
    density = mixture_of_gaussians(features=5, components=4, seed=1)
    covariances = density.factors @ density.factors.mT
    judge = MixtureSameFamily(Categorical(density.weights), MultivariateNormal(density.means, covariances))
    x = 3 * torch.randn(6, 2, 5, dtype=torch.float64)
    torch.testing.assert_close(density.log_prob(x), judge.log_prob(x), rtol=1e-12, atol=0)
    eigenvalues = torch.linalg.eigvalsh(covariances)
    assert eigenvalues.min() >= 1 / 16 - 1e-12
    assert eigenvalues.max() <= 1 + 1e-12


def test_rings_are_smeared_circles():
    density = Rings()
    angle = torch.arange(2000, dtype=torch.float64) * (2 * math.pi / 2000)
    circle = torch.stack([angle.cos(), angle.sin()], -1)
    judge = GaussianMixture((density.radii[:, None, None] * circle).flatten(0, 1), scale=density.noise)
    x = torch.cat([2 * torch.randn(20, 2, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)])
    torch.testing.assert_close(density.log_prob(x), judge.log_prob(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("density", [Moons(), Spirals()])
def test_rows_of_gaussians_are_dense(density):
    """Neighbours within a standard deviation: then the sum ripples by 2 exp(-2 pi^2), a part in 10^8."""
    rows = density.means.reshape(2, -1, 2)
    assert rows.diff(dim=1).norm(dim=-1).max() <= density.factors[0, 0, 0]


def test_checkerboard_support():
    density = Checkerboard()
    corners = torch.tensor([[-4, -4], [-2, -2], [0, 0], [2, 2], [0, -4], [2, -2], [-4, 0], [-2, 2]])
    inside = corners + torch.rand(100, 1, 2) * 1.999
    assert (density.log_prob(inside) == -math.log(32)).all()
    flipped = inside * torch.tensor([-1, 1])
    assert (density.log_prob(flipped) == -math.inf).all()
    assert (density.log_prob(torch.tensor([[5.0, 5.0], [-5.0, -5.0], [1.0, -7.0]])) == -math.inf).all()


@given(st.tuples(*[st.integers(-20, 20)] * 2), st.tuples(*[st.integers(-20, 20)] * 2), st.floats(0, 1))
def test_entropy_of_any_two_uniforms(first, second, weight):
    if first[0] >= first[1] or second[0] >= second[1]:
        with pytest.raises(ValueError, match="interval"):
            TwoUniforms(first, second, weight)
        return
    density = TwoUniforms(first, second, weight)
    p = density.log_prob(torch.arange(-20, 20, dtype=torch.float64)[:, None] + 0.5).exp()
    assert p.sum().item() == pytest.approx(1)
    assert density.entropy()[0] == pytest.approx(-torch.special.xlogy(p, p).sum().item(), abs=1e-12)


@pytest.mark.parametrize("name", DENSITIES)
def test_draws_repeat_and_keep_to_their_generator(name):
    density = DENSITIES[name]()
    state = torch.get_rng_state()
    x = density.sample(50, generator(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert x.dtype == torch.get_default_dtype()
    assert torch.equal(x, density.sample(50, generator(3), torch.float64).to(x))
    assert not torch.equal(x, density.sample(50, generator(4)))
    assert not torch.equal(density.sample(50), density.sample(50))


@pytest.mark.parametrize("name", DENSITIES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_log_prob_takes_any_batch_shape_and_dtype(name, shape):
    density = DENSITIES[name]()
    points = density.sample(6, dtype=torch.float64)
    x = points[: math.prod(shape)].reshape(*shape, density.features)
    assert density.log_prob(x).shape == shape
    single = density.log_prob(x.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), density.log_prob(x.float().double()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["eight_gaussians", "moons", "rings"])
def test_the_score_is_the_gradient(name):
    x = TOYS[name]().sample(5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(TOYS[name]().log_prob, x)


def test_a_mixture_of_its_own_seed():
    a, b, c = (mixture_of_gaussians(4, 3, seed) for seed in (0, 0, 1))
    assert torch.equal(a.means, b.means)
    assert torch.equal(a.factors, b.factors)
    assert not torch.equal(a.means, c.means)


@pytest.mark.parametrize("name", ["moon", "", None])
def test_unknown_name(name):
    with pytest.raises(ValueError, match=r"one of eight_gaussians, moons.* got"):
        toy(name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: EightGaussians().log_prob(torch.zeros(3)), r"2 features .* got shape \(3,\)"),
        (lambda: EightGaussians().log_prob(torch.tensor(1.0)), "2 features"),
        (lambda: EightGaussians().log_prob(torch.zeros(3, 2, dtype=torch.int64)), "floating point .*int64"),
        (lambda: EightGaussians().log_prob([0.0, 0.0]), "floating point .*list"),
        (lambda: EightGaussians().sample(0), "n must be a positive integer"),
        (lambda: EightGaussians().sample(1.5), "n must be a positive integer"),
        (lambda: EightGaussians().entropy(1), "n must be .* at least 2"),
        (lambda: GaussianMixture([1.0, 2.0], scale=1), "means must have shape"),
        (lambda: GaussianMixture([[1.0]]), "covariances and scale .* neither"),
        (lambda: GaussianMixture([[1.0]], [[1.0]], scale=1), "covariances and scale .* both"),
        (lambda: GaussianMixture([[1.0]], scale=-1), "scale must be"),
        (lambda: GaussianMixture([[1.0, 0.0]], [[1.0]]), r"covariances must have shape \(1, 2, 2\)"),
        (lambda: GaussianMixture([[1.0, 0.0]], [[1.0, 2.0], [2.0, 1.0]]), "positive definite"),
        (lambda: GaussianMixture([[1.0, 0.0]], [[1.0, 0.5], [0.0, 1.0]]), "symmetric"),
        (lambda: GaussianMixture([[1.0], [2.0]], scale=1, weights=[1.0]), "weights must be 2"),
        (lambda: GaussianMixture([[1.0], [2.0]], scale=1, weights=[1.0, -1.0]), "weights must be 2"),
        (lambda: TwoUniforms(first=(1, 1)), "first must be an interval"),
        (lambda: TwoUniforms(second=(0, math.inf)), "second must be an interval"),
        (lambda: TwoUniforms(weight=1.5), "weight must lie"),
        (lambda: mixture_of_gaussians(0), "features must be"),
        (lambda: mixture_of_gaussians(2, components=-1), "components must be"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
