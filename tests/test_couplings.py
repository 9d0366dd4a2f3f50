"""Couplings of images, 1x1 convolutions, the split with a learned prior, mixtures and variational dequantisation.

Their laws are those of test_laws.py and test_images.py; here is what each of them claims beyond.
"""

from __future__ import annotations

import math

import pytest
import torch
from registry import far
from torch import Tensor

import quarflow as qf
from quarflow import transforms as t
from quarflow.nn.conditioners import AttentionConditioner, Conv, ConvConditioner, PixelFeatures, board, colours
from quarflow.solvers import unchecked
from quarflow.transforms.coupling import mixture_logit, mixture_logit_root


def test_a_rotation_turns_channels_and_keeps_volume() -> None:
    f = t.LULinear(6, rotation=True).double()
    x = torch.randn(3, 6, 2, 5, dtype=torch.float64)
    z, ladj = f(x)
    assert torch.allclose(z.square().sum(1), x.square().sum(1), rtol=1e-5)  # the rotation is one in float32
    assert ladj.abs().max() < 1e-4
    assert (z - x).abs().max() > 0.1
    # Every pixel alone, as a vector.
    assert torch.allclose(f(x[:, :, 1, 3])[0], z[:, :, 1, 3])
    assert torch.allclose(f(x[:, :, 0])[0], z[:, :, 0])


def test_the_colours_of_a_checkerboard() -> None:
    x = torch.arange(24).view(1, 4, 6)
    first, second = colours(x)
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij")
    assert first.flatten().tolist() == x[0][(rows + columns) % 2 == 0].tolist()
    assert second.flatten().tolist() == x[0][(rows + columns) % 2 == 1].tolist()
    assert torch.equal(board(first, second), x)


@pytest.mark.parametrize("split", ["half", "checkerboard"])
@pytest.mark.parametrize("swap", [False, True])
def test_what_stays_stays_and_the_rest_changes(split: str, swap: bool) -> None:
    net = ConvConditioner(4 if split == "checkerboard" else 2, 4 if split == "checkerboard" else 2, 2, (8, 8))
    f = far(t.AffineCoupling(4, net=net, split=split, swap=swap), 0.5)
    x = torch.randn(2, 4, 4, 4, dtype=torch.float64)
    z = f(x)[0]
    (stay, change), (same, moved) = f.split(x), f.split(z)
    assert torch.equal(stay, same)
    assert (moved != change).all()


def test_finished_channels_have_a_learned_normal_prior() -> None:
    """The density is that of a normal with mean and deviation by a convolution of the channels that go on."""
    prior = far(t.LearnedPrior(4), 0.3)
    x = torch.randn(5, 4, 2, 2, dtype=torch.float64)
    z, ladj = prior(x)
    found = torch.distributions.Normal(0, 1).log_prob(z[:, :2]).flatten(1).sum(1) + ladj
    h = torch.nn.functional.conv2d(x[:, 2:], prior.net.last.weight, prior.net.last.bias, padding=1)
    shift, a = h.unflatten(1, (2, 2)).unbind(2)
    deviation = (-a / (1 + a.abs() / 7)).exp()
    wanted = torch.distributions.Normal(-shift * deviation, deviation).log_prob(x[:, :2]).flatten(1).sum(1)
    assert torch.allclose(found, wanted)
    assert torch.equal(z[:, 2:], x[:, 2:])


def test_convolutions_start_with_unit_outputs_whatever_comes_in() -> None:
    f = t.MixtureCoupling(5, components=1, net=AttentionConditioner(2, 3, 5, (4, 4), hidden=8, depth=2)).double()
    x = 100 * torch.randn(50, 5, 4, 4, dtype=torch.float64) + 30
    z = f.initialise(x)
    assert torch.allclose(z, f(x)[0])
    outputs = f.net(x[:, :2]).movedim(-1, 2).flatten(1, 2)
    assert torch.allclose(outputs.mean((0, 2, 3)), torch.zeros(15, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(outputs.std((0, 2, 3)), torch.full((15,), 0.1, dtype=torch.float64))
    # Channels that do not vary are left as they are.
    constant = Conv(1, 2)
    before = constant.weight.clone()
    constant.normalise(torch.ones(4, 2, 3, 3))
    assert torch.equal(constant.weight, before)


def random_mixture(n: int, components: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(components)
    a, m, s = torch.randn(3, n, components, generator=generator, dtype=torch.float64)
    return (3 * a).log_softmax(1), spread * m, (3 * s).clamp(-7, 7)


def test_the_logit_of_a_mixture_is_that_of_its_distribution_function() -> None:
    w, m, s = random_mixture(50, 4, 1.0)
    x = torch.randn(50, dtype=torch.float64)
    cdf = (w.exp() * torch.sigmoid((x[:, None] - m) / s.exp())).sum(1)
    value, log_slope = mixture_logit(x, w, m, s)
    inner = (cdf > 1e-6) & (cdf < 1 - 1e-6)
    assert inner.sum() > 20
    assert torch.allclose(value[inner], torch.logit(cdf)[inner], rtol=1e-8)
    gradient = torch.autograd.functional.jacobian(lambda x: mixture_logit(x, w, m, s)[0], x).diagonal()
    assert torch.allclose(log_slope, gradient.log(), rtol=1e-9)


@pytest.mark.parametrize("components", [1, 2, 32])
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_roots_of_mixtures_are_met_to_rounding_in_steps_and_plateaus(components: int, spread: float) -> None:
    """Scales from e^-7 to e^7 around means far apart: steep steps with flat stretches between."""
    w, m, s = random_mixture(2000, components, spread)
    y = 10 * torch.randn(2000, dtype=torch.float64)
    x = mixture_logit_root(y, w, m, s)
    value, log_slope = mixture_logit(x, w, m, s)
    rounding = 1 + y.abs() + log_slope.exp() * (1 + x.abs())
    assert ((value - y).abs() <= 32 * torch.finfo(torch.float64).eps * rounding).all()


def test_a_mixture_without_a_root_is_an_error() -> None:
    w, m, s = random_mixture(3, 2, 1.0)
    with pytest.raises(qf.NotConverged, match="the inverse of a mixture coupling"):
        mixture_logit_root(torch.tensor([0.0, math.nan, 1.0], dtype=torch.float64), w, m, s)


def test_gradients_of_roots_are_those_of_the_exact_inverse() -> None:
    w, m, s = random_mixture(5, 3, 1.0)
    y = torch.randn(5, dtype=torch.float64)
    tensors = [p.requires_grad_() for p in (y, w.detach(), m, (s / 3).detach())]
    assert torch.autograd.gradcheck(mixture_logit_root, tensors, rtol=1e-4)


def dequantisation(scale: float, seed: int = 0) -> t.Dequantisation:
    net = AttentionConditioner(1, 1, 5, (2, 1), hidden=4, depth=1, heads=2, context=4)
    couple = t.MixtureCoupling(1, components=1, net=net, split="checkerboard")
    f = t.Dequantisation(t.Chain([t.ActNorm((1, 2, 2)), couple]), PixelFeatures(1, hidden=4, depth=1))
    return far(f, scale, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dequantisation_keeps_whole_numbers_and_is_finite_on_their_edges(dtype: torch.dtype) -> None:
    f = dequantisation(0.7).to(dtype)
    k = torch.arange(256).repeat_interleave(4).view(256, 1, 2, 2)
    for u in (torch.zeros(256, 1, 2, 2), torch.rand(256, 1, 2, 2)):
        x = (k.to(dtype) + u.to(dtype)) / 256
        z, ladj = f(x)
        assert torch.equal(qf.pixels.quantise(z), k.to(torch.uint8))
        assert torch.isfinite(ladj).all()
    with unchecked():
        back = f.inverse(z)[0]
    assert torch.equal(qf.pixels.quantise(back), k.to(torch.uint8))


def test_draws_of_a_flow_with_learned_noise_have_its_density_also_beyond_the_unit_interval() -> None:
    """The logit of published flows reaches a little beyond [0, 1], and so do their draws."""
    steps = [dequantisation(0.1), t.Logit(0.1), t.Affine((1, 2, 2))]
    flow = qf.Flow(t.Chain(steps), qf.bases.base("normal", (1, 2, 2))).double()
    with torch.no_grad():
        flow.transform.steps[2].log_scale.fill_(-2)
    x, log_prob = flow.sample_and_log_prob(500)
    assert ((x < 0) | (x > 1)).float().mean() > 0.1
    assert torch.allclose(flow.log_prob(x), log_prob, rtol=1e-6)


def test_noise_has_a_density_in_each_cell_that_depends_on_the_image() -> None:
    """The change of volume, averaged over a cell of the outcome, is one: q integrates to one."""
    f = dequantisation(0.4)
    generator = torch.Generator().manual_seed(0)
    v = torch.rand(10_000, 1, 2, 2, generator=generator, dtype=torch.float64)
    slopes = []
    for level in (0, 200):
        with torch.no_grad(), unchecked():
            q = f.inverse((level + v) / 256)[1].exp()
        assert abs(q.mean() - 1) < 5 * q.std() / 100
        assert q.std() > 0.1
        slopes.append(q[0])
    assert slopes[0] != slopes[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: t.AffineCoupling(1), "features: coupling needs at least 2 features"),
        (lambda: t.AffineCoupling(2, split="quarters"), "split: expected one of 'half', 'checkerboard'"),
        (lambda: t.AffineCoupling(2, split="checkerboard"), "net: expected a network of images"),
        (lambda: t.MixtureCoupling(2, components=0), "components: expected an integer >= 1"),
        (lambda: t.LearnedPrior(1), "channels: expected an integer >= 2"),
        (lambda: colours(torch.zeros(1, 2, 3)), "x: expected an even width for a checkerboard"),
        (lambda: AttentionConditioner(1, 1, 2, (2, 2), hidden=6), "hidden: expected a multiple of the 4 heads"),
        (lambda: AttentionConditioner(1, 1, 2, (2, 2), dropout=1.0), r"dropout: expected a number in \[0, 1\)"),
        (lambda: ConvConditioner(0, 1), "inputs: expected an integer >= 1"),
        (lambda: t.Dequantisation(t.Affine(1), torch.nn.Identity(), levels=1), "levels: expected an integer >= 2"),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
