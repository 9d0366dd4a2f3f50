"""Image models under the laws of the core, on small shapes, with autograd in float64 as the judge."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from registry import far
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import quarflow as qf
from quarflow import pixels
from quarflow import transforms as t
from quarflow.nn.activations import ACTIVATIONS
from quarflow.nn.bounds import gram_norm
from quarflow.nn.conditioners import AttentionConditioner, ConvConditioner, PixelFeatures
from quarflow.nn.convolution import ContractiveConvNet, TriangularConvNet, convolution_norm, convolutions
from quarflow.nn.triangular import TriangularNet
from quarflow.solvers import Bracketing

SIZE = (2, 3)
NETS = {
    f"{order}, {lipschitz}, {activation}, {'opened' if opening else 'first'}": {
        "order": order,
        "lipschitz": lipschitz,
        "activation": activation,
        "opening": opening,
    }
    for order, lipschitz, activation, opening in product(
        ("pixel", "channel"), ("coordinate", "diagonal"), ACTIVATIONS, (True, False)
    )
} | {
    "pixel, plain": {"trick": False},
    "channel, gram": {"order": "channel", "bound": "gram"},
    "pixel, gram, plain": {"lipschitz": "diagonal", "bound": "gram", "trick": False},
}
FLOWPP = {"hidden": 4, "depth": 1, "heads": 2, "components": 2}
MODELS = {
    "quar_image": lambda c: qf.models.quar_image((1, 4, 4), c, blocks=(1, 1), hidden=8),
    "channel order": lambda c: qf.models.quar_image((1, 4, 2), c, blocks=(2, 1), hidden=8, order="channel"),
    "one order": lambda c: qf.models.quar_image((2, 2, 2), c, blocks=(2, 1), hidden=8, mixing=None),
    "factored out": lambda c: qf.models.quar_image(
        (1, 4, 4), c, blocks=(1, 1, 1), hidden=8, factor_out=True, activation="sine"
    ),
    "four channels": lambda c: qf.models.quar_image((4, 2, 2), c, blocks=(1,), hidden=8, order="channel"),
    "factored out, dense": lambda c: qf.models.quar_image(
        (3, 2, 2), c, blocks=(1, 1), hidden=12, factor_out=True, dense_blocks=1, dense_hidden=(2,)
    ),
    "dense": lambda c: qf.models.quar_image((1, 2, 4), c, blocks=(1, 1), hidden=8, dense_blocks=2),
    "residual_image": lambda c: qf.models.residual_image((1, 4, 4), c, blocks=(1, 1), hidden=6, logdet="full"),
    "residual_image, trick": lambda c: qf.models.residual_image(
        (2, 2, 2), c, blocks=(2,), hidden=6, logdet="full", trick=True, activation="elu"
    ),
    "residual_image, dense": lambda c: qf.models.residual_image(
        (1, 2, 4), c, blocks=(1, 1), hidden=6, logdet="full", dense_blocks=2, dense_hidden=(5, 4), mixing="reverse"
    ),
    "glow": lambda c: qf.models.glow((1, 4, 4), c, blocks=(2, 1), hidden=6),
    "glow, one scale": lambda c: qf.models.glow((3, 2, 2), c, blocks=(2,), hidden=6),
    "flowpp": lambda c: qf.models.flowpp((1, 4, 4), c, blocks=(2, 3), **FLOWPP),
    "flowpp, one scale": lambda c: qf.models.flowpp((3, 2, 2), c, blocks=(2,), **FLOWPP),
    "flowpp, variational": lambda c: qf.models.flowpp(
        (1, 4, 4), c, blocks=(1, 1), dequantisation="variational", dequantisation_depth=1, **FLOWPP
    ),
}


def conv(c: int, inputs: int = 1, targets: int = 1, outputs: int = 2) -> ConvConditioner:
    return ConvConditioner(inputs, targets, outputs, (5, 4), c)


def attention(c: int, inputs: int, outputs: int, size: tuple[int, int]) -> AttentionConditioner:
    return AttentionConditioner(inputs, inputs, outputs, size, hidden=4, depth=1, heads=2, context=c)


def inside_a_cell(c: int) -> t.Dequantisation:
    net = attention(6, 2, 5, (4, 1))
    steps = [t.ActNorm((2, 4, 2)), t.LULinear(2), t.MixtureCoupling(2, components=1, net=net, split="checkerboard")]
    return t.Dequantisation(t.Chain(steps), PixelFeatures(2, hidden=6, depth=1, context=c))


class Features(nn.Module):
    """Six features of all values and of the context."""

    def __init__(self, values: int, context: int) -> None:
        super().__init__()
        self.layer = nn.Linear(values + context, 6)

    def forward(self, k: Tensor, context: Tensor | None = None) -> Tensor:
        every = [k.flatten(1)] if context is None else [k.flatten(1), context]
        return self.layer(torch.cat(every, 1)).tanh()


def mixed(c: int) -> t.Transform:
    """QuAR blocks with every other part, convolutional."""
    cell = t.Chain([t.Residual(TriangularConvNet(2, 4, 6)), t.AffineCoupling(2, net=conv(6))])
    inner = t.Chain(
        [
            t.Squeeze(),
            t.LULinear(8, rotation=True),
            t.Residual(TriangularConvNet(8, 8, c)),
            t.MixtureCoupling(8, components=2, net=conv(c, 4, 4, 8)),
            t.LearnedPrior(8, c),
        ]
    )
    return t.Chain(
        [
            t.Dequantisation(cell, Features(16, c)),
            t.Logit(0.05),
            t.MultiScale([inner, t.Residual(TriangularConvNet(4, 4, c))]),
        ]
    )


def mixed_dense(c: int) -> t.Transform:
    """The same of vectors: a coupling of what is finished is its learned prior."""
    cell = t.Chain([t.Residual(TriangularNet(16, (2,), 6)), t.AffineCoupling(16, 6, (5,))])
    inner = t.Chain(
        [
            t.Residual(TriangularNet(16, (2, 2), c)),
            t.LULinear(16, rotation=True),
            t.MixtureCoupling(16, c, (5,), components=2),
            t.AffineCoupling(16, c, (5,), swap=True),
        ]
    )
    return t.Chain(
        [
            t.Reshape((2, 4, 2), (16,)),
            t.Dequantisation(cell, Features(16, c)),
            t.Logit(0.05),
            t.MultiScale([inner, t.Residual(TriangularNet(8, (3,), c))]),
            t.Reshape((16,), (2, 4, 2)),
        ]
    )


TRANSFORMS = {
    "squeeze": lambda c: t.Squeeze(),
    "reshape": lambda c: t.Reshape((2, 4, 2), (16,)),
    "actnorm of channels": lambda c: t.ActNorm((2, 1, 1), c),
    "standardise channels": lambda c: t.Standardise((2, 1, 1)),
    "reverse": lambda c: t.Reverse(),
    "multiscale": lambda c: t.MultiScale([t.Chain([t.ActNorm((2, 1, 1), c), t.Squeeze()]), t.ActNorm((4, 1, 1), c)]),
    "1x1 convolution": lambda c: t.LULinear(2),
    "1x1 convolution, rotation": lambda c: t.LULinear(2, rotation=True),
    "additive coupling": lambda c: t.AdditiveCoupling(2, net=conv(c, outputs=1)),
    "affine coupling": lambda c: t.AffineCoupling(2, net=conv(c)),
    "affine coupling, swapped": lambda c: t.AffineCoupling(2, net=conv(c), swap=True),
    "affine coupling, checkerboard": lambda c: t.AffineCoupling(2, net=conv(c, 2, 2), split="checkerboard"),
    "mixture coupling": lambda c: t.MixtureCoupling(2, components=3, net=conv(c, outputs=11)),
    "mixture coupling, checkerboard, attention": lambda c: t.MixtureCoupling(
        2, components=2, net=attention(c, 2, 8, (4, 1)), split="checkerboard", swap=True
    ),
    "split with a learned prior": lambda c: t.MultiScale(
        [t.Chain([t.Squeeze(), t.LearnedPrior(8, c)]), t.Affine((4, 1, 1), c)]
    ),
    "dequantisation": inside_a_cell,
    "quar between couplings": lambda c: t.Chain(
        [
            t.AffineCoupling(2, net=conv(c)),
            t.LULinear(2, rotation=True),
            t.Residual(TriangularConvNet(2, 4, c)),
            t.MixtureCoupling(2, components=2, net=conv(c, outputs=8), swap=True),
        ]
    ),
    "all parts": mixed,
    "all parts, dense": mixed_dense,
}

def images(*shape: int, context: int = 0) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(*shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(shape[0], context, generator=generator, dtype=torch.float64) if context else None


def jacobian(f, x: Tensor, c: Tensor | None = None) -> Tensor:
    """(rows, D, D) of ``f(x, c) -> value`` in the order of the axes as they are."""
    rows = []
    for i in range(len(x)):
        ci = None if c is None else c[i : i + 1]
        with sdpa_kernel(SDPBackend.MATH):  # the others have no batching rule
            j = torch.func.jacrev(lambda v, ci=ci: f(v, ci)[0].flatten())(x[i : i + 1])
        rows.append(j.flatten(1))
    return torch.stack(rows)


@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("name", NETS)
def test_the_network_is_triangular_exact_and_bounded(name: str, context: int) -> None:
    for channels in (1, 2, 3, 4):
        torch.manual_seed(0)
        net = far(TriangularConvNet(channels, 2 * channels, context, **NETS[name]), 1.0)
        x, c = images(2, channels, *SIZE, context=context)
        value, diagonal = net(4 * x - 2, c)
        axes = net.axes or (1, 2, 3)

        def ordered(v: Tensor, c: Tensor | None, axes=axes, net=net) -> list[Tensor]:
            back = torch.tensor((0, *axes)).argsort().tolist()
            return [net(v.permute(back), c)[0].permute(0, *axes)]

        j = jacobian(ordered, (4 * x - 2).permute(0, *axes), c)
        assert (j.triu(1) == 0).all()
        slopes = 1 + diagonal.permute(0, *axes).flatten(1)
        assert torch.allclose(slopes, 1 + j.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=0)
        assert (diagonal.abs() <= net.sigma).all()
        # Every entry that the order allows is used: three pixels of all channels before, and the pixel itself.
        assert (j[:, -1, :] != 0).any(0).sum() > channels
        for a, b in zip((value, diagonal), convolutions(net, 4 * x - 2, c), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
        for a, b in zip((value, diagonal), net.prepare(c)(4 * x - 2), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ["pixel", "channel"])
@pytest.mark.parametrize("activation", ["wave", "elu"])
def test_gradients_of_the_matrix_form_are_those_of_convolutions(
    order: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for channels, opening, context in product((1, 3), (True, False), (0, 2)):
        torch.manual_seed(0)
        net = far(TriangularConvNet(channels, 4 * channels, context, activation, order, opening), 0.7)
        x, c = images(3, channels, 4, 3, context=context)
        found = []
        for kernels in ("1", "0"):
            monkeypatch.setenv("QUARFLOW_KERNELS", kernels)
            v = x.clone().requires_grad_()
            value, diagonal = net(v, c)
            loss = (value.sin().sum((1, 2, 3)) * torch.tensor([1.0, 2.0, 0.5])).sum() - torch.log1p(diagonal).sum()
            found.append([loss.detach(), *torch.autograd.grad(loss, [v, *net.parameters()])])
        for a, b in zip(*found, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_second_derivatives_of_the_matrix_form() -> None:
    net = TriangularConvNet(2, 4, activation="sine").double()
    x = torch.randn(1, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(net, (x,))


@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_images(name: str, context: int) -> None:
    torch.manual_seed(0)
    # Noise that all but leaves its cell is beyond what the judge's own sigmoid resolves.
    f = far(TRANSFORMS[name](context), 0.2 if name.startswith("all parts") else 0.4)
    x, c = images(3, 2, 4, 2, context=context)
    z, ladj = f(x, c)
    truth = torch.linalg.slogdet(jacobian(f, x, c)).logabsdet
    assert ladj.shape == (3,)
    assert ((ladj - truth).abs() <= 1e-9 * truth.abs().clamp_min(1)).all()
    back, ladj_back = f.inverse(z, c)
    assert (back - x).abs().max() <= 1e-10
    assert torch.allclose(ladj_back, -ladj, rtol=1e-9, atol=1e-9)
    if context and any(name.endswith("context") for name, _ in f.named_parameters()):
        assert (f(x, -c)[0] != z).any()
    for out in ((z, ladj), f.inverse(z.detach(), c)):
        if not list(f.parameters()):
            break
        f.zero_grad()
        (out[0].square().sum() + out[1].sum()).backward()
        for parameter, p in f.named_parameters():
            assert p.grad is not None, parameter
            assert torch.isfinite(p.grad).all(), parameter
            assert (p.grad != 0).any(), parameter
    for a, b in zip(f(x, c), f.eval()(x, c), strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(1)
    same = TRANSFORMS[name](context).double()
    same.load_state_dict(f.state_dict())
    assert torch.equal(same(x, c)[0], z)
    single = f.float()(x.float(), None if c is None else c.float())
    assert all(out.dtype == torch.float32 for out in single)


@pytest.mark.parametrize("name", [n for n in TRANSFORMS if "coupling" in n or n == "dequantisation"])
def test_gradients_of_inverses_of_image_transforms(name: str) -> None:
    torch.manual_seed(0)
    f = far(TRANSFORMS[name](0), 0.3)
    x, _ = images(1, 2, 4, 2)
    z = f(x)[0].detach().requires_grad_()
    assert torch.autograd.gradcheck(f.inverse, (z,), eps=1e-7, rtol=1e-4, atol=1e-5)


def test_actnorm_of_channels_is_initialised_over_pixels() -> None:
    x, _ = images(50, 2, 3, 3)
    z = t.ActNorm((2, 1, 1)).double().initialise(5 * x + torch.arange(2.0).view(2, 1, 1))
    assert torch.allclose(z.mean((0, 2, 3)), torch.zeros(2, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(z.transpose(0, 1).flatten(1).std(1), torch.ones(2, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, context: int) -> None:
    torch.manual_seed(0)
    # Noise that all but leaves its cell is beyond what the judge's own sigmoid resolves.
    flow = far(MODELS[name](context), 0.2 if "variational" in name else 0.4).eval()
    x, c = images(2, *flow.event_shape, context=context)
    z, ladj = flow.transform(x, c)
    assert z.shape == x.shape
    truth = torch.linalg.slogdet(jacobian(flow.transform, x, c)).logabsdet
    assert torch.allclose(ladj, truth, rtol=1e-9, atol=1e-9)
    assert torch.equal(flow.log_prob(x, c), flow.base.log_prob(z) + ladj)
    back, ladj_back = flow.transform.inverse(z, c)
    assert (back - x).abs().max() <= 1e-10
    assert torch.allclose(ladj_back, -ladj, rtol=1e-9, atol=1e-9)
    flow.train().log_prob(x, c).sum().backward()
    for parameter, p in flow.named_parameters():
        assert p.grad is not None, parameter
        assert torch.isfinite(p.grad).all(), parameter
        assert (p.grad != 0).any(), parameter
    single = flow.float().eval().log_prob(x.float(), None if c is None else c.float())
    assert single.dtype == torch.float32
    assert flow.sample(2, None if c is None else c.float()).shape == x.shape


@pytest.mark.parametrize("order", ["pixel", "channel"])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_fresh_weights_are_finite(order: str, channels: int) -> None:
    flow = qf.models.quar_image((channels, 4, 4), blocks=(1, 1), hidden=24, order=order)
    assert all(bool(p.isfinite().all()) for p in flow.parameters())
    assert bool(flow.log_prob(torch.rand(3, channels, 4, 4)).isfinite().all())


@pytest.mark.parametrize("alpha", [1e-6, 0.05, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_beyond_what_a_sigmoid_resolves_have_a_density(alpha: float, dtype: torch.dtype) -> None:
    flow = qf.Flow(t.Chain([t.Logit(alpha), t.Affine((1, 8, 8))]), qf.bases.base("normal", (1, 8, 8))).to(dtype)
    flow.transform.steps[1].log_scale.data.fill_(-math.log(400))
    x = flow.sample(200)
    assert x.min() < 1e-30  # or below, as far as the density reaches
    assert x.max() > 1 - 1e-6
    assert flow.log_prob(x).isfinite().all()
    assert (x - 0.5).abs().max() <= 0.5 + alpha / (1 - 2 * alpha) + torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["factored out", "residual_image, dense", "glow", "flowpp, variational"])
def test_a_model_is_saved_and_loaded(tmp_path, name: str) -> None:
    flow = MODELS[name](2)
    x, c = images(3, *flow.event_shape, context=2)
    flow.initialise(x.float(), c.float())
    qf.save(flow, tmp_path / "m.qf")
    same = qf.load(tmp_path / "m.qf")
    assert torch.equal(same.log_prob(x.float(), c.float()), flow.eval().log_prob(x.float(), c.float()))


@pytest.mark.parametrize(
    ("name", "options", "published"),
    [
        # Kingma & Dhariwal 2018, by the layers of their code: 44.1 M.
        ("glow", {}, 44_135_856),
        # Ho et al. 2019, as their code says of itself: the ablation with uniform noise, and the model of the paper.
        ("flowpp", {}, 32_324_408),
        ("flowpp", {"hidden": 96, "dequantisation": "variational"}, 31_443_440),
    ],
)
def test_models_of_cifar10_have_their_published_size(name: str, options: dict, published: int) -> None:
    with torch.device("meta"):
        flow = getattr(qf.models, name)((3, 32, 32), **options)
    assert sum(p.numel() for p in flow.parameters()) == pytest.approx(published, rel=0.002)


def test_dropout_is_of_training_alone() -> None:
    flow = qf.models.flowpp((1, 4, 4), blocks=(2,), dropout=0.5, **FLOWPP).double()
    x, _ = images(3, 1, 4, 4)
    flow.initialise(x)
    assert not torch.equal(flow.log_prob(x), flow.log_prob(x))
    flow.eval()
    assert torch.equal(flow.log_prob(x), flow.log_prob(x))
    assert (flow.transform.inverse(flow.transform(x)[0])[0] - x).abs().max() < 1e-10


def test_variational_noise_is_a_bound_that_comes_closer() -> None:
    """Each pixel is one of two values at random: no bound is below one bit, and a smooth density has a wide cell."""
    torch.manual_seed(0)
    x = torch.randint(0, 2, (200, 1, 2, 2), dtype=torch.uint8) * 100
    found = {}
    for kind in ("uniform", "variational"):
        torch.manual_seed(0)
        flow = qf.models.flowpp((1, 2, 2), blocks=(1,), dequantisation=kind, dequantisation_depth=1, **FLOWPP)
        qf.fit(flow, x, max_steps=40, batch_size=50, learning_rate=1e-2, validation=0.0)
        found[kind] = qf.bits_per_dim(flow, x, draws=2).bpd
    assert 1 < found["variational"] < found["uniform"]  # the entropy of the images is one bit a pixel


def test_solvers_agree_and_report_the_true_residual() -> None:
    for order in ("pixel", "channel"):
        f = far(t.Residual(TriangularConvNet(2, 8, order=order)), 1.0)
        z, _ = images(3, 2, 3, 3)
        solution = f.solve(4 * z)
        assert solution.converged.all()
        assert torch.allclose(solution.residual, (f(solution.x)[0] - 4 * z).abs().flatten(1).amax(1), atol=4e-15)
        slow = t.Residual(f.net, solver=Bracketing()).solve(4 * z)
        assert (slow.x - solution.x).abs().max() < 1e-12
        assert solution.steps < slow.steps


def test_implicit_gradients_of_samples() -> None:
    torch.manual_seed(0)
    flow = far(MODELS["quar_image"](0), 0.3)
    z = torch.randn(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)

    def inverse(z: Tensor) -> Tensor:
        return flow.transform.inverse(z)[0]

    assert torch.autograd.gradcheck(inverse, (z,), eps=1e-6, rtol=1e-5, check_undefined_grad=False)


@pytest.mark.parametrize("shape", [(5, 2, 3, 4), (2, 6, 4, 4), (1, 1, 9, 9)])
def test_norm_of_a_convolution_is_a_bound_and_tight(shape) -> None:
    out, read, height, width = shape
    for seed in range(3):
        torch.manual_seed(seed)
        kernel = torch.randn(out, read, 3, 3, dtype=torch.float64)

        def conv(v, kernel=kernel, shape=shape):
            return torch.nn.functional.conv2d(v.view(1, shape[1], *shape[2:]), kernel, padding=1).flatten()

        matrix = torch.func.jacrev(conv)(torch.zeros(read * height * width, dtype=torch.float64))
        truth = torch.linalg.matrix_norm(matrix, 2)
        bound = convolution_norm(kernel, (height, width))
        assert truth <= bound
        assert bound <= 1.5 * truth
    assert torch.autograd.gradcheck(lambda k: convolution_norm(k, (2, 2)), kernel[:2, :2].clone().requires_grad_())
    point = torch.zeros(out, read, 3, 3, dtype=torch.float64)
    point[:, :, 1, 1] = kernel[:, :, 1, 1]
    assert convolution_norm(point, (height, width)) <= 1.02 * gram_norm(point[:, :, 1, 1])


def test_a_contractive_network_is_one() -> None:
    for trick, activation in product((True, False), ("elu", "lipswish", "sine")):
        net = far(ContractiveConvNet(2, (3, 3), 5, activation=activation, trick=trick, sigma=0.9), 2.0)
        x, _ = images(2, 2, 3, 3)
        j = jacobian(net, 4 * x)
        assert (torch.linalg.matrix_norm(j, 2) <= 0.9).all()
        value, pullback = net.linearise(x)
        v = torch.randn_like(x)
        wanted = torch.einsum("ni,nij->nj", v.flatten(1), jacobian(net, x))
        assert torch.allclose(pullback(v).flatten(1), wanted)
        assert torch.equal(value, net(x)[0])


def test_the_estimate_of_a_residual_flow_for_images_is_unbiased() -> None:
    torch.manual_seed(0)
    flow = far(qf.models.residual_image((1, 3, 3), blocks=(2,), hidden=6, sigma=0.6, alpha=0.05), 0.5).eval()
    exact = far(qf.models.residual_image((1, 3, 3), blocks=(2,), hidden=6, sigma=0.6, alpha=0.05, logdet="full"), 0.5)
    exact.load_state_dict(flow.state_dict())
    x, _ = images(1, 1, 3, 3)
    mean, error = flow.log_prob_with_error(x.expand(200, -1, -1, -1), draws=20)
    assert not flow.exact
    assert abs(mean.mean() - exact.log_prob(x)) < 4 * error.mean() / 200**0.5 + 1e-6


# Whole numbers.


def test_bits_per_dim_of_a_uniform_density_are_eight() -> None:
    """A flow that is the logit and its inverse has log-density zero: eight bits for each value."""

    class Uniform(t.Transform):
        def forward(self, x, context=None):
            z, ladj = torch.special.ndtri(x), x.new_zeros(len(x))
            return z, ladj + (0.5 * z.square() + 0.5 * math.log(2 * math.pi)).flatten(1).sum(1)

        def inverse(self, z, context=None):
            x = torch.special.ndtr(z)
            return x, -self.forward(x)[1]

    flow = qf.Flow(Uniform(), qf.bases.base("normal", (1, 2, 2))).double()
    x = torch.randint(1, 255, (20, 1, 2, 2), dtype=torch.uint8)
    found = pixels.bits_per_dim(flow, x, draws=3, batch_size=7)
    assert found.bpd == pytest.approx(8)
    assert found.n == 20
    assert found.noise_error < 1e-9


def test_bits_per_dim_are_those_of_the_formula() -> None:
    flow = MODELS["quar_image"](0)
    x = torch.randint(0, 256, (9, 1, 4, 4), dtype=torch.uint8)
    found = pixels.bits_per_dim(flow.train(), x, draws=2, batch_size=4, seed=3)
    assert flow.training
    generator, flow = torch.Generator().manual_seed(3), flow.eval()
    total = 0.0
    for _ in range(2):
        for part in x.split(4):
            v = (part + torch.rand(part.shape, generator=generator)) / 256
            total += flow.log_prob(v).double().sum().item()
    assert found.bpd == pytest.approx(8 - total / 18 / (16 * math.log(2)), rel=1e-6)


def test_dequantised_images_come_back() -> None:
    x = torch.arange(256, dtype=torch.uint8).repeat(50, 1)
    v = pixels.dequantise(x, torch.zeros(()))
    assert v.min() >= 0
    assert v.max() < 1
    assert torch.equal(pixels.quantise(v), x)
    assert torch.equal(pixels.quantise(v.double()), x)


def test_completion_keeps_the_rows_given_and_is_conditional() -> None:
    torch.manual_seed(0)
    for blocks in ((2,), (1, 1)):
        flow = far(qf.models.quar_image((1, 4, 4), blocks=blocks, hidden=8, mixing=None), 0.4)
        x, _ = images(6, 1, 4, 4)
        generators = [torch.Generator().manual_seed(1) for _ in range(2)]
        found = pixels.complete(flow, x, 2, generator=generators[0])
        assert torch.equal(found[:, :, :2], x[:, :, :2])
        assert (found[:, :, 2:] - x[:, :, 2:]).abs().max() > 1e-3
        # What is below in the image that is given does not matter.
        other = torch.cat([x[:, :, :2], torch.rand_like(x[:, :, 2:])], 2)
        assert torch.allclose(pixels.complete(flow, other, 2, generator=generators[1]), found, atol=1e-9)
        # Exact: of the noise, that of the rows given is theirs, and the rest the draws of the base.
        given = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
        given[:, :, :2] = True
        drawn = flow.base.sample(6, torch.Generator().manual_seed(1))
        wanted = torch.where(flow.transform.places(given), flow.transform(x)[0], drawn)
        assert torch.allclose(flow.transform(found)[0], wanted, atol=1e-8)


# Bad input.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: qf.models.quar_image((3, 8, 8), hidden=512), "hidden: expected a multiple of the 3 channels"),
        (lambda: qf.models.quar_image((1, 6, 6), hidden=16), "blocks: expected at most 2 scales"),
        (lambda: qf.models.quar_image((1, 8), hidden=16), r"shape: expected \(channels, height, width\)"),
        (lambda: qf.models.quar_image((1, 8, 8), blocks=(), hidden=16), "blocks: expected a tuple"),
        (lambda: qf.models.quar_image((1, 8, 8), blocks=(0,), hidden=16), "blocks: expected an integer >= 1"),
        (lambda: qf.models.quar_image((1, 8, 8), hidden=16, order="row"), "order: expected one of 'pixel'"),
        (lambda: qf.models.quar_image((1, 8, 8), hidden=16, lipschitz="network"), "lipschitz: expected one of"),
        (lambda: qf.models.quar_image((1, 8, 8), hidden=16, mixing="lu"), "mixing: expected one of 'reverse'"),
        (lambda: qf.models.quar_image((1, 8, 8), hidden=16, sigma=1.0), "sigma: expected"),
        (lambda: qf.models.residual_image((1, 8, 8), activation="clipswish"), "activation: expected one of a width"),
        (lambda: qf.models.glow((1, 28, 28)), "blocks: expected at most 2 scales"),
        (lambda: qf.models.glow((1, 8, 8), blocks=(1,), limit=0), "limit: expected a finite number > 0"),
        (lambda: qf.models.flowpp((1, 28, 28), blocks=(4, 4, 4)), "blocks: expected scales of an even width"),
        (lambda: qf.models.flowpp((1, 8, 8), dequantisation="none"), "dequantisation: expected one of 'uniform'"),
        (lambda: qf.models.flowpp((1, 8, 8), hidden=6), "hidden: expected a multiple of the 4 heads"),
        (lambda: t.Squeeze()(torch.zeros(1, 1, 3, 4)), "x: expected an even height"),
        (lambda: t.Reshape((1, 2), (3,)), "after: expected as many values"),
        (lambda: pixels.dequantise(torch.zeros(1, 1), torch.zeros(())), "x: expected images of dtype torch.uint8"),
        (
            lambda: pixels.bits_per_dim(MODELS["quar_image"](0), torch.zeros(1, 3, 4, 4, dtype=torch.uint8)),
            r"x: expected uint8 images \(n, 1, 4, 4\)",
        ),
        (lambda: pixels.complete(MODELS["quar_image"](0), torch.rand(1, 1, 4, 4), 2), "mixing='reverse'"),
        (
            lambda: pixels.complete(MODELS["one order"](0), torch.rand(1, 2, 2, 2), 1),
            "rows: expected a multiple of 2",
        ),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
