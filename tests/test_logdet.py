"""Log-determinants of blocks without a triangular Jacobian, against the whole Jacobian; and their network's bound.

Estimates are held to a confidence interval of 4 standard errors. The noise of a trace, the larger part of the error,
would hide what the roulette does: `AllSigns` averages it out, which leaves the random number of terms alone.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import quarflow as qf
from quarflow.logdet import (
    DiagonalLogDet,
    Estimate,
    FullLogDet,
    RouletteLogDet,
    SeriesLogDet,
    drawing,
    jacobian,
    linearise,
)
from quarflow.nn.dense import ContractiveNet
from quarflow.nn.triangular import TriangularNet
from quarflow.solvers import Banach
from quarflow.transforms import Residual

FEATURES = 3
SIGMAS = (0.5, 0.9, 0.97)


class AllSigns(RouletteLogDet):
    """Every vector of signs in turn, instead of random ones: 8 rows have the exact trace."""

    def noise(self, x: Tensor) -> Tensor:
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=FEATURES)), dtype=x.dtype)
        return signs.repeat(len(x) // len(signs), 1)


class Opaque(nn.Module):
    """A network that gives values alone: products with its Jacobian come from autograd."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, None]:
        return self.net(x, context)[0], None


def tight(sigma: float, seed: int = 0, context: int = 0, **options: object) -> ContractiveNet:
    """A network that all but reaches its bound: orthogonal layers and mostly steep activations."""
    torch.manual_seed(seed)
    net = ContractiveNet(FEATURES, (FEATURES, FEATURES), context, **{"activation": "elu", **options}, sigma=sigma)
    for layer in net.layers:
        nn.init.orthogonal_(layer.weight, 3.0)
        nn.init.normal_(layer.bias)
    return net.double()


def points(rows: int = 4, context: int = 0) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, FEATURES + context, generator=generator, dtype=torch.float64)
    return x[:, :FEATURES], x[:, FEATURES:] if context else None


def whole(net: nn.Module, x: Tensor, context: Tensor | None = None) -> Tensor:
    """``dF/dx`` by autograd through the network's values, (batch, D, D)."""
    rows = [torch.autograd.grad(net(x, context)[0][:, i].sum(), x, create_graph=True)[0] for i in range(x.shape[1])]
    return torch.stack(rows, 1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distance(draws: Tensor, truth: Tensor, error_at_most: float) -> float:
    """Of the mean of draws (n, ...) from the truth, in standard errors, which must be small to say anything."""
    error = draws.std(0) / len(draws) ** 0.5
    assert error.max() <= error_at_most, error.max()
    # Once the exact terms are nearly all there is, rounding is what remains.
    return ((draws.mean(0) - truth).abs() / (error + 1e-10)).max().item()


# The exact one.


@pytest.mark.parametrize("context", [0, 2])
@pytest.mark.parametrize("wrap", [lambda net: net, Opaque])
@pytest.mark.parametrize("activation", ["elu", "lipswish", "clipswish", "sine", "tanh"])
def test_full_is_that_of_the_jacobian(activation: str, wrap: Callable, context: int) -> None:
    x, c = points(context=context)
    x.requires_grad_()
    torch.manual_seed(0)
    net = ContractiveNet(FEATURES, (5, 4), context, activation).double()
    value, ladj = FullLogDet()(wrap(net), x, c)
    j = whole(net, x, c)
    assert torch.equal(value, net(x, c)[0])
    assert torch.allclose(ladj, torch.linalg.slogdet(torch.eye(FEATURES) + j)[1], rtol=1e-12, atol=1e-12)
    assert torch.allclose(jacobian(linearise(wrap(net), x, c)[1], x), j, rtol=1e-12, atol=1e-14)


def test_full_and_diagonal_agree_on_a_triangular_network() -> None:
    net = TriangularNet(FEATURES, (4,)).double()
    x, _ = points()
    for p, q in zip(FullLogDet()(net, x), DiagonalLogDet()(net, x), strict=True):
        assert torch.allclose(p, q, rtol=1e-12, atol=1e-14)


# The truncated one.


@pytest.mark.parametrize("sigma", SIGMAS)
def test_series_comes_as_near_as_its_bound_says(sigma: float) -> None:
    net, (x, _) = tight(sigma), points()
    truth = FullLogDet()(net, x)[1]
    off = {n: (SeriesLogDet(n, trace="exact")(net, x)[1] - truth).abs().max().item() for n in (2, 4, 16, 64)}
    for terms, gap in off.items():
        assert gap <= FEATURES * sigma ** (terms + 1) / (terms + 1) / (1 - sigma) + 1e-14
    assert off[2] > off[4] > off[16] > 1e-10  # biased, as it says
    assert off[64] < 1e-6


def test_hutchinson_series_has_the_mean_of_the_exact_trace() -> None:
    net, (x, _) = tight(0.9), points()
    draws = SeriesLogDet(4)(net, x.repeat(20_000, 1))[1].view(-1, len(x)).detach()
    assert distance(draws, SeriesLogDet(4, trace="exact")(net, x)[1], error_at_most=0.02) <= 4
    assert distance(draws, SeriesLogDet(3, trace="exact")(net, x)[1], error_at_most=0.02) > 4


# The roulette: values.


@pytest.mark.parametrize("distribution", ["poisson", "geometric"])
@pytest.mark.parametrize("exact_terms", [0, 2])
def test_weights_have_mean_one(distribution: str, exact_terms: int) -> None:
    logdet = RouletteLogDet(exact_terms, distribution, rate=1.5, per_row=True)
    logdet.generator = seeded()
    weights = logdet.weights(torch.empty(100_000, 1, dtype=torch.float64))
    assert (weights[:exact_terms] == 1).all()
    common = (weights > 0).double().mean(1) > 1e-3  # terms seen often enough to have a standard error
    assert int(common.sum()) >= exact_terms + 6
    assert distance(weights[exact_terms:][common[exact_terms:]].mT, torch.tensor(1.0), 0.1) <= 4


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("train", [True, False], ids=["train", "test"])
@pytest.mark.parametrize("distribution", ["poisson", "geometric"])
def test_mean_of_the_roulette_is_the_log_det(distribution: str, train: bool, sigma: float) -> None:
    # Moduli of eigenvalues of up to 0.76 sigma: a Poisson number of terms needs them to stay away from 1.
    net, (x, _) = tight(sigma), points()
    signs, draws = 2**FEATURES, 5000
    with torch.no_grad():
        truth = FullLogDet()(net, x)[1]
        logdet = AllSigns(distribution=distribution, per_row=True).train(train)
        logdet.generator = seeded()
        ladj = logdet(net, x.repeat_interleave(draws * signs, 0))[1].view(len(x), draws, signs).mean(2).mT
    error = 4e-3 if train else 5e-6
    assert distance(ladj, truth, error) <= 4
    if train or sigma > 0.5:  # the test would see the random terms left out, or in without their weight
        truncated = SeriesLogDet(2 if train else 20, trace="exact")(net, x)[1]
        assert distance(ladj, truncated, error) > 20


def test_geometric_reaches_norms_near_one_where_its_variance_is_finite() -> None:
    net, (x, _) = tight(0.97, seed=4), points()
    assert torch.linalg.eigvals(jacobian(linearise(net, x)[1], x)).abs().max() > 0.94
    signs, draws = 2**FEATURES, 1000
    with torch.no_grad():
        logdet = AllSigns(distribution="geometric", rate=0.97**2 / (1 - 0.97**2) + 1, per_row=True)
        logdet.generator = seeded()
        ladj = logdet(net, x.repeat_interleave(draws * signs, 0))[1].view(len(x), draws, signs).mean(2).mT
        assert distance(ladj, FullLogDet()(net, x)[1], 0.015) <= 4
        assert distance(ladj, SeriesLogDet(20, trace="exact")(net, x)[1], 0.015) > 10


@pytest.mark.parametrize("train", [True, False], ids=["train", "test"])
@pytest.mark.parametrize("distribution", ["poisson", "geometric"])
def test_flow_with_its_standard_error(distribution: str, train: bool) -> None:
    options = {"features": 2, "context": 1, "blocks": 2, "hidden": (16, 16), "activation": "elu"}
    flow = qf.models.residual(**options, distribution=distribution).train(train)
    exact = qf.models.residual(**options, logdet="full")
    exact.load_state_dict(flow.state_dict())
    assert exact.exact
    assert not flow.exact
    x, c = torch.randn(5, 2, generator=seeded()), torch.randn(5, 1, generator=seeded(1))
    truth, none = exact.log_prob_with_error(x, c, draws=2)
    assert torch.equal(truth, exact.log_prob(x, c))
    assert (none == 0).all()
    mean, error = flow.log_prob_with_error(x, c, draws=300, generator=seeded())
    assert error.max() < 0.02
    assert ((mean - truth).abs() <= 4 * error + 1e-5).all()
    # The error is that of the mean: it falls with the root of the number of draws.
    few = flow.log_prob_with_error(x, c, draws=30, generator=seeded(1))[1]
    assert 0.5 < (few / error).mean() / 10**0.5 < 2


def test_evaluation_has_twenty_exact_terms_and_two_more() -> None:
    logdet = RouletteLogDet()
    counts = {True: [], False: []}
    for train in counts:
        logdet.train(train)
        logdet.generator = seeded()
        counts[train] = [len(logdet.weights(torch.empty(1, 1))) for _ in range(1000)]
    assert min(counts[True]) == 2
    assert min(counts[False]) == 20
    assert sum(counts[True]) / 1000 == pytest.approx(4, abs=0.2)
    assert sum(counts[False]) / 1000 == pytest.approx(22, abs=0.2)


# The roulette: gradients.


def tensors(net: nn.Module, *inputs: Tensor | None) -> list[Tensor]:
    return [t for t in (*inputs, *net.parameters()) if t is not None]


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize(
    ("distribution", "gradient", "memory_saving"),
    [
        ("poisson", "neumann", True),
        ("poisson", "neumann", False),
        ("poisson", "series", False),
        ("geometric", "neumann", True),
    ],
)
def test_mean_of_the_gradients_is_the_gradient(
    distribution: str, gradient: str, memory_saving: bool, sigma: float
) -> None:
    net, (x, c) = tight(sigma, seed=1, context=1), points(context=1)
    x, c = x[:1].requires_grad_(), c[:1].requires_grad_()
    truth = torch.autograd.grad(FullLogDet()(net, x, c)[1].sum(), tensors(net, x, c), materialize_grads=True)
    logdet = AllSigns(distribution=distribution, gradient=gradient, memory_saving=memory_saving, per_row=True)
    logdet.generator = seeded()
    draws = []
    for _ in range(40):
        ladj = logdet(net, x.expand(2**FEATURES * 25, -1), c.expand(2**FEATURES * 25, -1))[1].mean()
        found = torch.autograd.grad(ladj, tensors(net, x, c), materialize_grads=True)
        draws.append(torch.cat([g.flatten() for g in found]))
    truth = torch.cat([g.flatten() for g in truth])
    assert truth.abs().max() > 0.3
    assert distance(torch.stack(draws), truth, error_at_most=0.01) <= 4


def test_mean_of_the_gradients_in_evaluation_is_the_gradient() -> None:
    net, (x, _) = tight(0.9, activation="sine"), points(1)
    x.requires_grad_()
    truth = torch.autograd.grad(FullLogDet()(net, x)[1].sum(), x)[0]
    rows = x.expand(20_000, -1)
    with drawing(logdet := RouletteLogDet(per_row=True).eval(), seeded()):
        ladj = logdet(net, rows)[1]
    draws = torch.autograd.grad(ladj.sum(), rows)[0]
    assert distance(draws, truth[0], error_at_most=0.01) <= 4


WEIGHTS = {"equal": [1.0, 1.0, 1.0], "first 0": [0.0, 1.0, 1.0], "mixed": [0.3, -2.0, 1.0]}


@pytest.mark.parametrize("wrap", [lambda net: net, Opaque])
@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("memory_saving", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_gradient_for_any_weights_of_the_rows(weights: str, memory_saving: bool, per_row: bool, wrap: Callable) -> None:
    """The Neumann estimate with the same draws, from the whole Jacobian and plain autograd."""
    w = torch.tensor(WEIGHTS[weights], dtype=torch.float64)
    net, (x, c) = tight(0.9, context=2, activation="lipswish", trick=True), points(3, context=2)
    x.requires_grad_()
    c.requires_grad_()
    logdet = RouletteLogDet(memory_saving=memory_saving, per_row=per_row)
    with drawing(logdet, seeded()):
        value, ladj = logdet(wrap(net), x, c)
    found = torch.autograd.grad((w * ladj).sum() + value.square().sum(), tensors(net, x, c))

    with drawing(logdet, seeded()):
        terms, noise = logdet.weights(x), logdet.noise(x)
    j = whole(net, x, c)
    inverse = power = torch.eye(FEATURES, dtype=x.dtype).expand(3, -1, -1)
    series = torch.zeros_like(power)
    for k, term in enumerate(terms, 1):
        power = power @ j.detach()
        series = series - (-1) ** k / k * term[:, None, None] * power
        inverse = inverse + (-1) ** k * term[:, None, None] * power
    assert torch.allclose(ladj, torch.einsum("bi,bij,bj->b", noise, series, noise), rtol=1e-10, atol=1e-12)
    slope = torch.einsum("bi,bij,bjk,bk->b", noise, inverse, j, noise)
    plain = torch.autograd.grad((w * slope).sum() + net(x, c)[0].square().sum(), tensors(net, x, c))
    for p, q in zip(found, plain, strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-11)


class Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_bytes(logdet: Estimate, net: nn.Module, x: Tensor) -> int:
    """Bytes of tensors as large as the batch that wait for the backward pass."""
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(t: Tensor) -> Kept:
        alive.add(kept := Kept(t))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        out = logdet(net, x)
    gc.collect()
    storages = {k.tensor.untyped_storage().data_ptr(): k.tensor.untyped_storage().nbytes() for k in alive}
    assert out[1].requires_grad
    return sum(n for n in storages.values() if n >= x.untyped_storage().nbytes())


def test_memory_saving_saves_memory() -> None:
    net, x = ContractiveNet(4, (32, 32), activation="elu"), torch.randn(1000, 4)
    logdets = {
        "saving": RouletteLogDet(),
        "neumann": RouletteLogDet(memory_saving=False),
        "series": RouletteLogDet(gradient="series"),
    }
    size = {}
    for name, logdet in logdets.items():
        with drawing(logdet, seeded()):
            size[name] = kept_bytes(logdet, net, x)
    assert 0 < size["saving"] < 0.6 * size["neumann"]
    assert size["neumann"] < 0.6 * size["series"]


def test_second_derivatives_are_refused_where_they_would_be_wrong() -> None:
    net, (x, _) = tight(0.9), points()
    x.requires_grad_()
    (g,) = torch.autograd.grad(RouletteLogDet()(net, x)[1].sum(), x, create_graph=True)
    assert not g.requires_grad
    (g,) = torch.autograd.grad(RouletteLogDet().eval()(net, x)[1].sum(), x, create_graph=True)
    assert torch.autograd.grad(g.sum(), x)[0].abs().max() > 0


# Draws.


@pytest.mark.parametrize("train", [True, False], ids=["train", "test"])
def test_the_same_generator_gives_the_same_numbers(train: bool) -> None:
    flow = qf.models.residual(features=2, blocks=2, hidden=(8,)).train(train)
    x = torch.randn(6, 2)
    once = flow.log_prob(x, generator=seeded())
    assert torch.equal(once, flow.log_prob(x, generator=seeded()))
    assert not torch.equal(once, flow.log_prob(x, generator=seeded(1)))
    for p, q in zip(
        flow.log_prob_with_error(x, generator=seeded()),
        flow.log_prob_with_error(x, generator=seeded()),
        strict=True,
    ):
        assert torch.equal(p, q)
    draws = [flow.eval().sample_and_log_prob(3, generator=seeded()) for _ in range(2)]
    assert all(torch.equal(p, q) for p, q in zip(*draws, strict=True))
    # Without one, torch's own decides; and a generator is not kept.
    torch.manual_seed(5)
    once = flow.log_prob(x)
    torch.manual_seed(5)
    assert torch.equal(once, flow.log_prob(x))
    assert not torch.equal(once, flow.log_prob(x))
    assert all(m.generator is None for m in flow.modules() if isinstance(m, Estimate))


def test_wrong_options_say_so() -> None:
    for make, message in [
        (lambda: RouletteLogDet(exact_terms=-1), "exact_terms: expected an integer >= 0; got -1"),
        (lambda: RouletteLogDet(distribution="uniform"), "distribution: expected one of 'poisson'"),
        (lambda: RouletteLogDet(rate=0.0), "rate: expected a finite number > 0"),
        (lambda: RouletteLogDet(eval_rate=-1.0), "eval_rate: expected a finite number > 0"),
        (lambda: RouletteLogDet(gradient="exact"), "gradient: expected one of 'neumann'"),
        (lambda: SeriesLogDet(0), "terms: expected an integer >= 1"),
        (lambda: SeriesLogDet(3, trace="full"), "trace: expected one of 'hutchinson'"),
        (lambda: ContractiveNet(2, hidden=()), "hidden: expected units of each hidden layer"),
        (lambda: ContractiveNet(2, sigma=1.0), "sigma: expected a number in"),
        (lambda: ContractiveNet(2, bound="paths"), "bound: expected one of 'gram'"),
        (lambda: qf.models.residual(2, logdet="diagonal"), "logdet: expected one of 'roulette'"),
        (lambda: qf.models.residual(2, solver="newton"), "solver: expected one of 'banach'"),
        (lambda: qf.models.residual(2).log_prob_with_error(torch.zeros(1, 2), draws=1), "draws: expected"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


# The network and its bound.


def adverse(net: ContractiveNet) -> Iterator[str]:
    """Weights that strain the bound, one after the other."""
    n = net.layers[0].weight
    yield "fresh"
    with torch.no_grad():
        for scale in (1e-8, 1e-3, 10.0, 1e4):
            for layer in net.layers:
                layer.weight.copy_(scale * torch.randn_like(layer.weight))
                layer.bias.copy_(scale * torch.randn_like(layer.bias))
            yield f"scale {scale}"
        for layer in net.layers:  # rank one, aligned from layer to layer
            layer.weight.fill_(7.0)
            layer.bias.zero_()
        yield "aligned"
        for layer in net.layers:
            nn.init.orthogonal_(layer.weight, 5.0)
        yield "orthogonal"
        net.layers[1].weight.zero_()
        yield "zero"
        if net.theta is not None:
            net.theta.fill_(-1e3)
            for layer in net.layers:
                layer.weight.copy_(torch.eye(*layer.weight.shape, dtype=n.dtype))
            yield "no room"


@pytest.mark.parametrize("trick", [True, False])
@pytest.mark.parametrize("activation", ["elu", "lipswish", "clipswish", "sine", "tanh"])
def test_the_contraction_bound_holds(activation: str, trick: bool) -> None:
    largest = 0.0
    for sigma in SIGMAS:
        torch.manual_seed(0)
        net = ContractiveNet(5, (12, 8), 2, activation, sigma, trick).double()
        x = torch.cat([torch.zeros(1, 5), torch.randn(30, 5), 10 * torch.randn(30, 5)]).double()
        c = 5 * torch.cat([torch.zeros(1, 2), torch.randn(60, 2)]).double()
        for name in adverse(net):
            norm = torch.linalg.matrix_norm(jacobian(linearise(net, x, c)[1], x), 2).max().item()
            assert norm <= sigma, name
            assert torch.isfinite(net(x, c)[0]).all()
            largest = max(largest, norm / sigma)
    # A bound that is never approached would be another mistake.
    assert largest > (0.5 if activation == "clipswish" else 0.8), largest


def test_the_power_bound_is_certified_outside_of_training_steps() -> None:
    torch.manual_seed(0)
    net, (x, _) = ContractiveNet(FEATURES, (20, 20), bound="power", sigma=0.9).double(), points()
    estimate = [torch.linalg.matrix_norm(w, 2) for w in net.weights()]
    certified = [torch.linalg.matrix_norm(w, 2) for w in net.eval().weights()]
    share = 0.9 ** (1 / 3)
    assert all(n <= share for n in certified)
    assert all(n <= share * 1.01 for n in estimate)
    with torch.no_grad():
        assert torch.equal(net.train()(x)[0], net.eval()(x)[0])


@pytest.mark.parametrize("context", [0, 2])
@pytest.mark.parametrize("sigma", SIGMAS)
def test_banach_round_trip(sigma: float, context: int) -> None:
    net, (x, c) = tight(sigma, context=context, seed=1), points(20, context)
    for logdet in (FullLogDet(), RouletteLogDet()):
        block = Residual(net, logdet, Banach())
        assert block.exact == logdet.exact
        z, ladj = block(x, c)
        with torch.no_grad():
            back, ladj_back = block.inverse(z, c)
        assert (back - x).abs().max() <= 1e-12
        if block.exact:
            assert torch.allclose(ladj_back, -ladj, rtol=0, atol=1e-11)


def test_gradient_of_the_inverse() -> None:
    net, (x, _) = tight(0.9), points()
    block = Residual(net, FullLogDet(), Banach())
    z = block(x)[0].detach().requires_grad_()
    back, ladj = block.inverse(z)
    g = torch.randn_like(z)
    found = torch.autograd.grad((g * back).sum() + ladj.sum(), z)[0]
    y = x.clone().requires_grad_()
    eye = torch.eye(FEATURES, dtype=x.dtype)
    inner = torch.autograd.grad(-FullLogDet()(net, y)[1].sum(), y)[0]
    truth = torch.linalg.solve((eye + whole(net, y)).mT, (g + inner)[..., None])[..., 0]
    assert torch.allclose(found, truth, rtol=1e-9, atol=1e-11)


# The model.


def test_residual_flow_learns_and_is_saved(tmp_path: pytest.TempPathFactory) -> None:
    torch.manual_seed(0)
    x = torch.randn(600, 1) * torch.tensor([[1.0, -0.9]]) + 0.3 * torch.randn(600, 2)
    flow = qf.models.residual(features=2, blocks=2, hidden=(16,), memory_saving=True)
    flow.initialise(x)
    before = qf.evaluate(flow, x).nats
    qf.fit(flow, x, max_steps=60, learning_rate=1e-2, batch_size=200, progress=False)
    assert qf.evaluate(flow, x).nats > before + 0.2
    qf.save(flow, tmp_path / "flow.qf")
    loaded = qf.load(tmp_path / "flow.qf")
    assert loaded.config == flow.config
    assert torch.equal(loaded.log_prob(x, generator=seeded()), flow.log_prob(x, generator=seeded()))
    assert torch.isfinite(flow.sample(100)).all()
