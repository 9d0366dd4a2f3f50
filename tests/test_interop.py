"""Neighbours: our transforms under zuko's own kind of tests, mixed flows, wrapped zuko flows, and a quiet import."""

import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import quarflow as qf
from quarflow import interop
from quarflow.interop import from_zuko, to_torch, to_zuko
from quarflow.nn.triangular import TriangularNet
from quarflow.solvers import NotConverged
from quarflow.transforms import ActNorm, Chain, LULinear, Residual, Reverse, Transform
from quarflow.transforms.autoregressive import MaskedAffine
from quarflow.transforms.bnaf import BNAF
from quarflow.transforms.coupling import AffineCoupling
from quarflow.transforms.planar import Planar, Sylvester

zuko = pytest.importorskip("zuko")

TRANSFORMS: dict[str, Callable[[int, int], Transform]] = {
    "Residual": lambda features, context: Residual(TriangularNet(features, (8, 8), context)),
    "MaskedAffine": lambda features, context: MaskedAffine(features, context, hidden=(16,)),
    "AffineCoupling": lambda features, context: AffineCoupling(features, context, hidden=(16,)),
    "Planar": lambda features, context: Planar(features, context),
    "Sylvester": lambda features, context: Sylvester(features, context),
    "BNAF": lambda features, context: BNAF(features, context, hidden=(4,)),
    "Chain": lambda features, context: Chain(
        [
            ActNorm(features, context),
            Residual(TriangularNet(features, (8,), context)),
            Reverse(),
            LULinear(features),
            Residual(TriangularNet(features, (8,), context)),
        ]
    ),
}


def ours(name: str, context: int = 0) -> Transform:
    """With weights far from the identity, in float64."""
    transform = TRANSFORMS[name](3, context).double()
    with torch.no_grad():
        for p in transform.parameters():
            p.normal_().mul_(0.5)
    return transform


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def noise(features: int = 3) -> torch.nn.Module:
    loc, scale = torch.zeros(features, dtype=torch.float64), torch.ones(features, dtype=torch.float64)
    return zuko.lazy.UnconditionalDistribution(zuko.distributions.DiagNormal, loc, scale, buffer=True)


def mixed(context: int = 0) -> torch.nn.Module:
    """Ours next to zuko's own."""
    first, second = (ours("Residual", context), ours("BNAF", context))
    own = zuko.flows.MaskedAutoregressiveTransform(3, context, hidden_features=(16,)).double()
    return zuko.flows.Flow([to_zuko(first), own, to_zuko(LULinear(3).double()), to_zuko(second)], noise())


# torch.distributions.


@pytest.mark.parametrize("context", [0, 2])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_as_a_torch_transform(name, context):
    transform = ours(name, context)
    x, c = randn(64, 3), randn(64, 2) if context else None
    t = to_torch(transform, c)
    assert t.bijective
    assert t.domain.event_dim == t.codomain.event_dim == t.event_dim == 1
    assert t.forward_shape(x.shape) == t.inverse_shape(x.shape) == x.shape
    y, ladj = t.call_and_ladj(x)
    assert y.shape == x.shape
    assert ladj.shape == (64,)
    assert torch.equal(t(x), y)
    assert torch.equal(t.log_abs_det_jacobian(x, y), ladj)
    assert t.inv.inv is t
    back, back_ladj = t.inv.call_and_ladj(y)
    assert torch.allclose(back, x, atol=1e-8)
    assert torch.allclose(t.inv(y), x, atol=1e-8)
    assert torch.allclose(back_ladj, -ladj, atol=1e-6)
    one = to_torch(transform, None if c is None else c[0])
    jacobian = torch.autograd.functional.jacobian(one, x[0])
    assert torch.allclose(one.log_abs_det_jacobian(x[0], one(x[0])), torch.linalg.slogdet(jacobian).logabsdet)
    assert transform.__class__.__name__ in repr(t)


def test_batch_shapes_are_broadcast():
    t = ours("MaskedAffine", 2)
    c, x = randn(4, 1, 2), randn(5, 3)
    y, ladj = to_torch(t, c).call_and_ladj(x)
    assert y.shape == (4, 5, 3)
    assert ladj.shape == (4, 5)
    assert torch.allclose(y[2, 3], t(x[3:4], c[2])[0][0])
    assert to_torch(t, c[0, 0])(x[0]).shape == (3,)


def test_a_cached_transform_evaluates_once_for_each_pair():
    calls = []

    class Counted(Transform):
        def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            calls.append("forward")
            return x.exp(), x.sum(1)

        def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
            calls.append("inverse")
            return z.log(), -z.log().sum(1)

    cached = to_torch(Counted()).with_cache()
    assert cached.with_cache() is cached
    x = torch.randn(5, 2)
    y, ladj = cached.call_and_ladj(x)
    assert cached(x) is y
    assert cached.inv(y) is x
    assert cached.log_abs_det_jacobian(x, y) is ladj
    assert calls == ["forward"]
    fresh = torch.rand(5, 2)
    back, back_ladj = cached.inv.call_and_ladj(fresh)
    assert cached(back) is fresh
    assert torch.equal(back_ladj, -back.sum(1))
    assert calls == ["forward", "inverse"]
    assert torch.equal(cached.log_abs_det_jacobian(x, y), ladj), "another pair than the cached one"
    calls.clear()
    plain = cached.with_cache(0)
    assert plain(x) is not plain(x)
    assert calls == ["forward", "forward"]
    with pytest.raises(ValueError, match="cache_size"):
        to_torch(Counted(), cache_size=2)


@pytest.mark.parametrize("cache_size", [0, 1])
def test_a_transformed_distribution_is_the_flow(cache_size):
    flow = qf.models.quar(features=2, context=3, blocks=2, hidden=(8,)).double()
    c = randn(7, 3)
    base = torch.distributions.Normal(torch.zeros(7, 2, dtype=torch.float64), 1.0)
    t = to_torch(flow.transform, c, cache_size=cache_size)
    d = torch.distributions.TransformedDistribution(base, t.inv)
    assert d.batch_shape == (7,)
    assert d.event_shape == (2,)
    x = randn(7, 2)
    assert torch.allclose(d.log_prob(x), flow.log_prob(x, c))
    draws = d.rsample((4,))
    assert draws.shape == (4, 7, 2)
    expected = flow.log_prob(draws.reshape(-1, 2), c.expand(4, 7, 3).reshape(-1, 3)).view(4, 7)
    assert torch.allclose(d.log_prob(draws), expected)
    draws.sum().backward()
    assert all(p.grad is not None for p in flow.transform.transforms[2].parameters())


def test_an_inverse_that_fails_fails_here_too():
    with pytest.raises(NotConverged):
        to_torch(ours("BNAF")).inv(randn(4, 3) * torch.nan)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_torch(torch.nn.Linear(2, 2)), "transform: expected a quarflow Transform.*got Linear"),
        (lambda: to_zuko(torch.nn.Linear(2, 2)), "transform: expected a quarflow Transform.*got Linear"),
        (lambda: to_torch(Reverse(), event_dims=0), "event_dims: expected an integer >= 1; got 0"),
        (lambda: to_torch(Reverse(), context=1.0), "context: expected a tensor"),
        (lambda: from_zuko(torch.nn.Linear(2, 2), 2), "flow: expected a zuko.flows.Flow.*got Linear"),
        (lambda: from_zuko(zuko.flows.MAF(2), 3), "features: expected 2, as the flow has; got 3"),
        (lambda: from_zuko(zuko.flows.MAF(2), 2, -1), "context: expected an integer >= 0; got -1"),
    ],
)
def test_arguments_that_cannot_be_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# zuko's own kind of tests, over ours.


@pytest.mark.parametrize("name", TRANSFORMS)
def test_in_a_zuko_flow(name, tmp_path):
    flow = zuko.flows.Flow([to_zuko(ours(name, 5))], noise())

    x, c = randn(256, 3), randn(5)
    log_p = flow(c).log_prob(x)
    assert log_p.shape == (256,)
    assert log_p.requires_grad
    flow.zero_grad()
    (-log_p.mean()).backward()
    for label, p in flow.named_parameters():
        assert p.grad is not None, label

    assert flow(c).sample((32,)).shape == (32, 3)
    flow.zero_grad()
    flow(c).rsample().square().sum().sqrt().backward()
    for label, p in flow.named_parameters():
        assert p.grad is not None, label

    x, c = randn(256, 3), randn(256, 5)
    t = flow(c).transform
    assert torch.allclose(t.inv(t(x)), x, atol=1e-8)

    x, c = randn(3), randn(5)
    t = flow(c).transform
    jacobian = torch.autograd.functional.jacobian(t, x)
    assert torch.allclose(t.log_abs_det_jacobian(x, t(x)), torch.linalg.slogdet(jacobian).logabsdet)

    draw, log_p = flow(c).rsample_and_log_prob((8,))
    assert torch.allclose(flow(c).log_prob(draw), log_p)

    torch.save(flow, tmp_path / "flow.pth")
    other = torch.load(tmp_path / "flow.pth", weights_only=False)
    assert torch.equal(flow(c).log_prob(x), other(c).log_prob(x))
    assert repr(flow)


@pytest.mark.parametrize("context", [0, 2])
def test_next_to_zukos_own_transforms(context):
    flow = mixed(context)
    x, c = randn(16, 3), randn(16, 2) if context else None
    d = flow(c)
    z = d.transform(x)
    assert torch.allclose(d.transform.inv(z), x, atol=1e-6)
    log_p = d.log_prob(x)
    assert log_p.shape == (16,)
    row = flow(None if c is None else c[0])
    jacobian = torch.autograd.functional.jacobian(row.transform, x[0])
    expected = row.base.log_prob(z[0]) + torch.linalg.slogdet(jacobian).logabsdet
    assert torch.allclose(log_p[0], expected)
    log_p.sum().backward()
    assert all(p.grad is not None for p in flow.parameters())


def test_a_lazy_transform_alone_inverted_and_pickled():
    lazy = to_zuko(ours("MaskedAffine"))
    assert isinstance(lazy, zuko.lazy.LazyTransform)
    assert isinstance(lazy, interop.ZukoTransform)
    x = randn(4, 3)
    flow = zuko.flows.Flow(lazy, noise())
    assert torch.allclose(lazy.inv()(lazy()(x)), x)
    assert torch.equal(pickle.loads(pickle.dumps(flow))().log_prob(x), flow().log_prob(x))  # noqa: S301 (our own)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = interop.no_such_name


# zuko's flows as ours.


WRAPPED = {
    "NSF": lambda context: zuko.flows.NSF(2, context, transforms=2, bins=4, hidden_features=(16,)),
    "NAF": lambda context: zuko.flows.NAF(2, context, transforms=1, hidden_features=(16,), signal=4),
    "CNF": lambda context: zuko.flows.CNF(2, context, hidden_features=(8,)),
    "RealNVP": lambda context: zuko.flows.RealNVP(2, context, hidden_features=(16,)),
}


@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_flow_has_the_same_density(name, context):
    zuko_flow = WRAPPED[name](context).double()
    flow = from_zuko(zuko_flow, 2, context)
    x, c = randn(6, 2), randn(6, 3) if context else None
    assert torch.allclose(flow.log_prob(x, c), zuko_flow(c).log_prob(x))
    assert {id(p) for p in flow.parameters()} == {id(p) for p in zuko_flow.parameters()}
    z, ladj = flow.transform(x, c)
    back, back_ladj = flow.transform.inverse(z, c)
    assert torch.allclose(back, x, atol=1e-4)
    assert torch.allclose(back_ladj, -ladj, atol=1e-3)
    assert flow.exact
    draws, density = flow.sample_and_log_prob(5, None if c is None else c[0])
    assert draws.shape == (5, 2)
    assert density.dtype == torch.float64
    generator = torch.Generator()
    state = torch.get_rng_state()
    row = None if c is None else c[0]
    first, second = (flow.sample(5, row, generator=generator.manual_seed(k)) for k in (1, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, flow.sample(5, row, generator=generator.manual_seed(2)))
    assert torch.equal(state, torch.get_rng_state())


def test_a_wrapped_flow_says_when_it_is_an_estimate():
    assert not from_zuko(zuko.flows.CNF(2, exact=False), 2).exact


@pytest.mark.parametrize("context", [0, 1])
def test_a_wrapped_spline_flow_is_fitted_and_evaluated(context):
    x = 10 + torch.randn(400, 2) @ torch.tensor([[2.0, 1.0], [0.0, 0.3]])
    c = x[:, :1] if context else None
    flow = from_zuko(WRAPPED["NSF"](context), 2, context, standardise=True)
    before = qf.evaluate(flow, x, c)
    history = qf.fit(flow, x, c, max_steps=20, batch_size=200, progress=False)
    assert history.steps[-1] == 20
    assert qf.evaluate(flow, x, c).nats > before.nats + 1
    assert flow.sample(3, None if c is None else c[0]).shape == (3, 2)


def test_ours_learns_inside_a_zuko_flow():
    flow = zuko.flows.Flow([to_zuko(ours("Residual")), to_zuko(LULinear(3).double())], noise())
    wrapped = from_zuko(flow, 3)
    x = randn(300, 3) * 2 + 1
    before = qf.evaluate(wrapped, x).nats
    qf.fit(wrapped, x, max_steps=30, batch_size=100, progress=False)
    assert qf.evaluate(wrapped, x).nats > before + 0.2


def test_a_base_that_needs_the_context_is_refused():
    class Conditional(zuko.lazy.LazyDistribution):
        def forward(self, c: Tensor | None = None) -> torch.distributions.Distribution:
            return zuko.distributions.DiagNormal(c, torch.ones(2))

    flow = zuko.flows.Flow(zuko.flows.MAF(2, 2).transform, Conditional())
    with pytest.raises(ValueError, match=r"flow: expected a base that ignores the context.*got Conditional"):
        from_zuko(flow, 2, 2)


# What an import leaves alone.

LOOK = """
import random, sys, warnings
import torch
import torch.distributions as D

def look():
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "validation": D.Distribution._validate_args,
        "constraints": D.Distribution.__dict__["arg_constraints"],
        "methods": [dir(c) for c in (D.Distribution, D.Transform, torch.Tensor, torch.nn.Module)],
        "inverse": D.transforms._InverseTransform.__name__,
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32),
        "matmul": torch.get_float32_matmul_precision(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_grad_enabled()),
        "denormal": (torch.tensor(1e-40) * 1).item(),
        "seed": (torch.get_rng_state().tolist(), random.getstate()),
        "warnings": list(warnings.filters),
    }

before = look()
import quarflow
import quarflow.interop
after = look()
changed = [name for name in before if before[name] != after[name]]
heavy = [m for m in ("zuko", "sklearn", "matplotlib", "rich", "typer", "safetensors", "normflows") if m in sys.modules]
print(changed, heavy)
"""


def test_an_import_changes_nothing_in_torch():
    out = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    assert out.stdout.split("\n")[0] == "[] []"
