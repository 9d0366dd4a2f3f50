"""MAF, IAF, NICE, RealNVP, planar, radial, Sylvester and BNAF: the laws of a transform, and what each one claims."""

import pytest
import torch
from registry import RELATIVE_MODELS as MODELS
from registry import RELATIVES as TRANSFORMS
from torch import Tensor

import quarflow as qf
from quarflow.nn.masked import MADE, MaskedMLP, soft_clip
from quarflow.solvers import NotConverged, solve_increasing
from quarflow.transforms import Chain, Transform
from quarflow.transforms.autoregressive import MaskedAffine
from quarflow.transforms.bnaf import BNAF, PositiveBlockLinear, log_matmul_exp
from quarflow.transforms.coupling import AffineCoupling
from quarflow.transforms.planar import LEAST_SLOPE, Planar, Radial, Sylvester

CASES = [
    pytest.param(name, features, context, scale, id=f"{name}-{features}-{context}-{scale}")
    for name in TRANSFORMS
    for features in (2 if "Coupling" in name else 1, 5)
    for context in (0, 3)
    for scale in (0.5, 1.0, 2.0)
]


def far(transform: Transform, scale: float) -> Transform:
    """With weights far from the identity, in float64."""
    transform = transform.double()
    with torch.no_grad():
        for p in transform.parameters():
            p.normal_().mul_(scale)
    return transform


def case(name: str, features: int, context: int, scale: float) -> tuple[Transform, Tensor, Tensor | None]:
    transform = far(TRANSFORMS[name](features, context), scale)
    x = torch.randn(12, features, dtype=torch.float64)
    return transform, x, torch.randn(12, context, dtype=torch.float64) if context else None


def jacobians(transform: Transform, x: Tensor, c: Tensor | None) -> Tensor:
    def one(x: Tensor, c: Tensor | None) -> Tensor:
        return transform(x[None], None if c is None else c[None])[0][0]

    rows = [torch.func.jacrev(one)(x[i], None if c is None else c[i]) for i in range(len(x))]
    return torch.stack(rows).detach()


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool(((a - b).abs() <= tolerance * b.abs().clamp_min(1)).all())


# Laws, over all of them.


@pytest.mark.parametrize(("name", "features", "context", "scale"), CASES)
def test_log_det_is_that_of_autograd(name, features, context, scale):
    transform, x, c = case(name, features, context, scale)
    z, ladj = transform(x, c)
    assert z.shape == x.shape
    assert ladj.shape == (len(x),)
    assert z.dtype == ladj.dtype == torch.float64
    jacobian = jacobians(transform, x, c)
    if name.startswith(("Planar", "Radial", "Sylvester")):
        assert close(ladj, torch.linalg.slogdet(jacobian).logabsdet, 1e-9)
    else:
        assert jacobian.triu(1).abs().max() == 0
        diagonal = jacobian.diagonal(dim1=1, dim2=2)
        assert (diagonal > 0).all()
        assert close(ladj, diagonal.log().sum(1), 1e-9)


@pytest.mark.parametrize(("name", "features", "context", "scale"), CASES)
def test_inverse_is_the_inverse_or_says_that_it_is_not(name, features, context, scale):
    transform, x, c = case(name, features, context, scale)
    z, ladj = transform(x, c)
    try:
        back, back_ladj = Chain([transform]).inverse(z, c)
    except NotConverged:
        assert scale > 0.5, "at moderate weights nothing stands in the way"
        return
    assert close(back, x, 1e-8)
    assert close(back_ladj, -ladj, 1e-6)
    with torch.no_grad():
        assert close(transform.inverse(z, c)[0], back, 1e-9)


@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_reach_every_parameter_the_input_and_the_context(name, context):
    transform, x, c = case(name, 5, context, 0.5)
    for f in (transform.forward, transform.inverse):
        inputs = [t.clone().requires_grad_() for t in (x, c) if t is not None]
        transform.zero_grad()
        y, ladj = f(inputs[0], inputs[1] if context else None)
        (y.square().sum() + ladj.sum()).backward()
        for label, p in [*transform.named_parameters(), *zip(("x", "context"), inputs, strict=False)]:
            assert p.grad is not None, label
            assert torch.isfinite(p.grad).all(), label
            assert p.grad.abs().max() > 0, label


@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradient_of_the_inverse_is_that_of_finite_differences(name, context):
    transform, z, c = case(name, 5, context, 0.5)
    weight = torch.randn_like(z)
    tensors = [*transform.parameters(), z, *([] if c is None else [c])]
    directions = [torch.randn_like(t) for t in tensors]

    def value() -> Tensor:
        x, ladj = transform.inverse(z, c)
        return (weight * x).sum() + ladj.sum()

    for t in tensors:
        t.requires_grad_()
    gradients = torch.autograd.grad(value(), tensors)
    found = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    ends, step = [], 1e-6
    with torch.no_grad():
        for sign in (1, -2):
            for t, d in zip(tensors, directions, strict=True):
                t.add_(sign * step * d)
            ends.append(value())
    assert found.item() == pytest.approx(((ends[0] - ends[1]) / (2 * step)).item(), rel=1e-5)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_dtype_is_kept_and_float32_agrees_with_float64(name):
    transform, x, c = case(name, 5, 3, 0.5)
    z, ladj = transform(x, c)
    single = transform.float()
    z32, ladj32 = single(x.float(), c.float())
    assert z32.dtype == ladj32.dtype == torch.float32
    assert close(z32.double(), z, 1e-3)
    assert close(ladj32.double(), ladj, 1e-3)
    with qf.solvers.unchecked():
        back, back_ladj = single.inverse(z32, c.float())
    assert back.dtype == back_ladj.dtype == torch.float32
    assert close(back.double(), x, 1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        z16, ladj16 = single(x.float(), c.float())
    assert z16.dtype == ladj16.dtype == torch.float32
    assert torch.isfinite(z16).all()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_context_changes_the_map(name):
    transform, x, c = case(name, 5, 3, 0.5)
    assert not torch.allclose(transform(x, c)[0], transform(x, c + 1)[0])
    row = transform(x[3:4], c[3:4])
    assert torch.allclose(row[0][0], transform(x, c)[0][3], atol=1e-12)


# Models.


@pytest.mark.parametrize("context", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_models_have_densities_draws_and_files(name, context, tmp_path):
    flow = getattr(qf.models, name)(features=3, context=context, blocks=3, **MODELS[name]).double()
    assert qf.models.from_dict(flow.config.to_dict()) == flow.config
    x = 5 + 3 * torch.randn(50, 3, dtype=torch.float64)
    c = torch.randn(50, context, dtype=torch.float64) if context else None
    flow.initialise(x, c)
    far(flow.base, 0.3)
    with torch.no_grad():
        for p in flow.transform.parameters():
            p.add_(0.2 * torch.randn_like(p))
    log_prob = flow.log_prob(x, c)
    assert flow.exact
    draws, density = flow.sample_and_log_prob(50, c)
    assert close(flow.log_prob(draws, c), density, 1e-6)
    flow.rsample(50, c).sum().backward()
    qf.save(flow, tmp_path / "m.qf")
    assert torch.equal(qf.load(tmp_path / "m.qf").log_prob(x, c), log_prob)


@pytest.mark.parametrize("name", MODELS)
def test_models_learn(name):
    x = torch.randn(400, 2) @ torch.tensor([[2.0, 1.0], [0.0, 0.3]])
    flow = getattr(qf.models, name)(features=2, blocks=2, **MODELS[name] | {"base": "normal"})
    before = qf.evaluate(flow.initialise(x), x).nats
    history = qf.fit(flow, x, max_steps=40, batch_size=200, progress=False)
    assert history.stopped == "max_steps"
    assert qf.evaluate(flow, x).nats > before + 0.02


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nice", {"features": 1}, "features: coupling needs at least 2 features.*got 1"),
        ("realnvp", {"features": 1}, "features: coupling needs at least 2 features.*got 1"),
        ("maf", {"features": 0}, "features: expected an integer >= 1; got 0"),
        ("maf", {"hidden": 8}, "hidden: expected units of each hidden layer.*got 8"),
        ("iaf", {"hidden": (8, 0)}, "hidden: expected an integer >= 1; got 0"),
        ("maf", {"activation": "sine"}, "activation: expected one of .*'relu'.*got 'sine'"),
        ("maf", {"mixing": "random"}, "mixing: expected one of"),
        ("maf", {"sigma": 0.9}, "'maf' has no option 'sigma'"),
        ("planar", {"blocks": 0}, "blocks: expected an integer >= 1; got 0"),
        ("radial", {"base": "cauchy"}, "base: expected one of"),
        ("sylvester", {"rank": 3}, "rank: expected at most 2, the number of features; got 3"),
        ("bnaf", {"hidden": ()}, "hidden: expected units of each hidden layer.*got ()"),
        ("bnaf", {"context": -1}, "context: expected an integer >= 0; got -1"),
    ],
)
def test_options_that_cannot_be_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(qf.models, name)(**{"features": 2} | options)


# What each one claims.


def test_masks_of_a_small_network_written_out():
    net = MADE(3, outputs=1, hidden=(4,))
    assert net.layers[0].mask.tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert net.layers[1].mask.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]


def test_the_first_coordinate_bends_with_the_context():
    net = far(MADE(2, outputs=1, hidden=(8,), context=1), 1.0)
    c = torch.linspace(-2, 2, 5, dtype=torch.float64)[:, None]
    first = net(torch.zeros(5, 2, dtype=torch.float64), c)[:, 0, 0]
    assert first.diff().diff().abs().max() > 1e-3


def test_a_conditioner_without_order_has_no_mask():
    net = MaskedMLP(torch.zeros(3, dtype=torch.int64), torch.ones(2, dtype=torch.int64), 2, (4,), context=1)
    assert all(layer.mask is None for layer in net.layers)


def test_scales_stay_finite_whatever_the_weights():
    assert soft_clip(torch.tensor(1e30), 7.0) <= 7
    for transform in (MaskedAffine(4, hidden=(8,)), AffineCoupling(4, hidden=(8,))):
        with torch.no_grad():
            for p in transform.parameters():
                p.normal_().mul_(1e4)
        for f in (transform.forward, transform.inverse):
            y, ladj = f(torch.randn(50, 4))
            assert torch.isfinite(y).all()
            assert (ladj.abs() <= 4 * 7).all()


def test_an_iaf_is_the_inverse_of_a_maf():
    maf = qf.models.maf(features=3, blocks=1, hidden=(8,), actnorm=False).double()
    iaf = qf.models.iaf(features=3, blocks=1, hidden=(8,), actnorm=False).double()
    iaf.transform.transforms[1].transform.load_state_dict(maf.transform.transforms[1].state_dict())
    x = torch.randn(4, 3, dtype=torch.float64)
    z, ladj = maf.transform(x)
    assert torch.allclose(iaf.transform(z)[0], x)
    assert torch.allclose(iaf.transform(z)[1], -ladj)


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_a_planar_step_is_invertible_where_the_weights_ask_for_a_fold(size):
    step = Planar(2).double()
    with torch.no_grad():
        w = torch.tensor([3.0, -4.0], dtype=torch.float64)
        step.parameters_at.theta.copy_(torch.cat([w, -size * w, torch.zeros(1, dtype=torch.float64)]))
    x = torch.randn(1000, 2, dtype=torch.float64) / 5
    z, ladj = step(x)
    slopes = ladj.exp()
    assert LEAST_SLOPE * (1 - 1e-9) <= slopes.min() < 0.1
    assert close(step.inverse(z)[0], x, 1e-9)


def test_a_radial_step_at_its_centre():
    step = far(Radial(3), 1.0)
    x = step.parameters_at.theta[:3].detach()[None].clone().requires_grad_()
    z, ladj = step(x)
    assert torch.allclose(z, x)
    back, _ = step.inverse(z)
    assert torch.allclose(back, x)
    (z.sum() + back.sum() + ladj.sum()).backward()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in step.parameters())


def test_directions_of_a_sylvester_step_are_orthonormal():
    step = far(Sylvester(6, context=2, rank=4), 2.0)
    q, left, right, product, _ = step._constrained(torch.randn(7, 2, dtype=torch.float64))
    assert torch.allclose(q.mT @ q, torch.eye(4, dtype=torch.float64))
    assert torch.equal(left, left.tril())
    assert torch.equal(right, right.tril())
    diagonals = left.diagonal(dim1=1, dim2=2) * right.diagonal(dim1=1, dim2=2)
    assert torch.allclose(diagonals, product)
    assert (1 + product >= LEAST_SLOPE * (1 - 1e-9)).all()


def test_block_weights_are_positive_triangular_and_of_the_stated_norm():
    layer = far(PositiveBlockLinear(3, 2, 4), 2.0)
    weight, log_blocks = layer.matrices()
    assert torch.allclose(weight.norm(dim=1, keepdim=True), layer.log_norm.exp())
    grid = weight.unflatten(0, (3, 4)).unflatten(2, (3, 2))
    for i in range(3):
        assert torch.allclose(grid[i, :, i], log_blocks[i].exp())
        assert (grid[i, :, i] > 0).all()
        for j in range(i + 1, 3):
            assert (grid[i, :, j] == 0).all()


@pytest.mark.parametrize("gate", [-3.0, 6.0])
def test_a_bnaf_step_is_onto(gate):
    step = far(BNAF(2, hidden=(8, 8)), 1.0)
    with torch.no_grad():
        step.gate.fill_(gate)
    z = torch.tensor([[-40.0, 40.0], [0.0, 0.0], [1e3, -1e3]], dtype=torch.float64)
    x, ladj = step.inverse(z)
    forward, forward_ladj = step(x)
    assert close(forward, z, 1e-10)
    assert close(forward_ladj, -ladj, 1e-6)


def test_products_of_logarithms():
    a, b = (30 * torch.randn(shape, dtype=torch.float64) for shape in ((3, 4, 5), (3, 5, 2)))
    expected = torch.logsumexp(a[..., None] + b[:, None], 2)
    assert torch.allclose(log_matmul_exp(a, b), expected)
    far_apart = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    product = log_matmul_exp(far_apart, torch.tensor([[-1000.0], [0.0]]))
    product.sum().backward()
    assert torch.isfinite(product).all()
    assert torch.isfinite(far_apart.grad).all()


def test_saturated_units_leave_a_finite_log_det():
    step = BNAF(2, hidden=(8, 8))
    x = torch.tensor([[1e4, -1e4], [1e4, 1e4]], requires_grad=True)
    z, ladj = step(x)
    assert torch.isfinite(z).all()
    assert torch.allclose(ladj, 2 * torch.log1p(-torch.sigmoid(step.gate)))
    (z.sum() + ladj.sum()).backward()
    assert all(torch.isfinite(t.grad).all() for t in (x, *step.parameters()))


# The solver.


@pytest.mark.parametrize("slope", [1e-6, 1.0, 1e6])
def test_roots_of_steep_and_flat_maps(slope):
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        # The second coordinate waits for the first; each bends sharply at its root.
        first = torch.cat([torch.zeros_like(x[:, :1]), 100 * x[:, :1]], 1)
        return slope * x + torch.tanh(50 * x) + first, slope + 50 / torch.cosh(50 * x).square()

    x = torch.randn(200, 2, dtype=torch.float64) * torch.logspace(-6, 1, 200, dtype=torch.float64)[:, None]
    z = f(x)[0]
    calls = 0

    def counted(x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return f(x)

    reach = 200 + 100 * x[:, :1].abs()
    found = solve_increasing(counted, z, x - reach, x + reach, "a test map")
    value, slopes = f(found)
    scale = torch.maximum(torch.maximum(value.abs(), z.abs()), slopes * found.abs().clamp_min(1)).clamp_min(1)
    assert ((value - z).abs() <= 1e-14 * scale).all()
    assert calls < 200


def test_roots_where_newton_would_creep():
    calls = 0

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return x + 5, torch.full_like(x, 1000.0)  # as steep as that wherever it is looked at

    z = torch.rand(100, 3, dtype=torch.float64)
    x = solve_increasing(f, z, torch.full_like(z, -9.0), torch.full_like(z, 9.0), "a test map")
    assert close(x + 5, z, 1e-10)
    assert 3 * 20 < calls < 3 * 140


@pytest.mark.parametrize(
    ("z", "high", "message"),
    [
        (float("nan"), 9.0, "NaN or inf"),
        (float("inf"), 9.0, "NaN or inf"),
        (100.0, 9.0, "did not reach its tolerance.*in 1 of 2 rows.*float64"),
    ],
)
def test_a_root_that_is_not_there_is_an_error(z, high, message):
    targets = torch.tensor([[2.0], [z]])
    with pytest.raises(NotConverged, match=message) as error:
        solve_increasing(
            lambda x: (x, torch.ones_like(x)), targets, torch.zeros(2, 1), torch.full((2, 1), high), "a map"
        )
    assert error.value.solution.converged.tolist() == [True, False]


# torch.compile, and the fast transforms of torch.func.


@pytest.mark.parametrize("name", ["MaskedAffine", "AffineCoupling"])
def test_compiles_without_a_break(name):
    transform, x, c = case(name, 5, 3, 0.5)
    for f in (transform.forward, transform.inverse):
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        for a, b in zip(compiled(x, c), f(x, c), strict=True):
            assert torch.allclose(a, b)


@pytest.mark.parametrize("name", ["Planar", "Sylvester", "BNAF"])
def test_vmap_is_the_batch(name):
    transform, x, _ = case(name, 5, 0, 0.5)
    z = torch.func.vmap(lambda x: transform(x[None])[0][0])(x)
    assert torch.allclose(z, transform(x)[0])
