"""What a flow with all columns in one order can do: terms, prefixes, conditionals, draws given the first columns."""

from __future__ import annotations

import pytest
import torch
from registry import data, far
from torch import Tensor
from torch.distributions import MultivariateNormal

import quarflow as qf
from quarflow import transforms as t
from quarflow.nn.triangular import TriangularNet
from quarflow.solvers import Newton

D = 4
MODELS = {
    "quar": {"blocks": 3, "hidden": (6, 6), "activation": "sine"},
    "conditioned": {"block": "conditioned", "blocks": 2, "hidden": (6,), "conditioner": (8,), "activation": "sine"},
    "maf": {"blocks": 2, "hidden": (8,), "activation": "tanh", "base": "location-scale"},
    "bnaf": {"blocks": 1, "hidden": (4,)},
    "iaf": {"blocks": 1, "hidden": (4,), "activation": "tanh"},
}
STUDENTS = [("maf", "student"), ("quar", "joint-student")]


def model(name: str, context: int = 0, features: int = D, **options: object) -> qf.Flow:
    """In one order, with random weights, in float64."""
    torch.manual_seed(0)
    make = getattr(qf.models, name, qf.models.quar)
    flow = make(features, context, mixing=None, **MODELS[name] | options)
    return far(flow, scale=0.3).eval()


def gaussian(features: int = D) -> tuple[qf.Flow, MultivariateNormal]:
    """A flow of every triangular kind that is affine in ``x``, and its density by linear algebra."""
    torch.manual_seed(0)
    net = TriangularNet(features, hidden=(5,), activation="elu")
    masked = [t.MaskedAffine(features, hidden=()) for _ in range(2)]
    block = t.Residual(net, solver=Newton(tolerance=1e-11))
    steps = [t.Standardise(features), block, masked[0], t.ActNorm(features), t.Inverse(masked[1]), t.Affine(features)]
    flow = far(qf.Flow(t.Chain(steps), qf.bases.Normal((features,)))).eval()
    with torch.no_grad():
        net.layers[0].bias.fill_(1e2)  # where ELU is the identity
        net.layers[1].bias.sub_(net(torch.zeros(1, features, dtype=torch.float64))[0].T)
        for step in masked:
            step.net.layers[0].weight[1::2] = 0  # the scales are constant, the shifts linear
        zero = torch.zeros(1, features, dtype=torch.float64)
        shift = flow.transform(zero)[0][0]
        a = torch.stack([flow.transform(zero + e)[0][0] - shift for e in torch.eye(features).double()], 1)
        covariance = torch.linalg.inv(a.mT @ a)
        return flow, MultivariateNormal(torch.linalg.solve(a, -shift), 0.5 * (covariance + covariance.mT))


def test_a_gaussian_is_known() -> None:
    flow, truth = gaussian()
    mean, covariance = truth.mean, truth.covariance_matrix
    x = truth.sample((20,))
    assert torch.allclose(flow.log_prob(x), truth.log_prob(x), rtol=1e-9)
    for k in range(1, D + 1):
        prefix = MultivariateNormal(mean[:k], covariance[:k, :k])
        assert torch.allclose(flow.prefix_log_prob(x[:, :k]), prefix.log_prob(x[:, :k]), rtol=1e-9)
    for k in range(1, D):
        for end in range(k + 1, D + 1):
            gain = torch.linalg.solve(covariance[:k, :k], covariance[:k, k:end]).mT
            rest = MultivariateNormal(mean[k:end], covariance[k:end, k:end] - gain @ covariance[:k, k:end])
            centred = x[:, k:end] - (x[:, :k] - mean[:k]) @ gain.mT
            found = flow.conditional_log_prob(x[:, k:end], x[:, :k])
            assert torch.allclose(found, rest.log_prob(centred), rtol=1e-9, atol=1e-9)
    torch.manual_seed(1)
    gain = torch.linalg.solve(covariance[:2, :2], covariance[:2, 2:]).mT
    rest = covariance[2:, 2:] - gain @ covariance[:2, 2:]
    n = 20_000
    draws = flow.sample_given(n, x[0, :2])
    assert (draws[:, :2] == x[0, :2]).all()
    error = draws[:, 2:].mean(0) - (mean[2:] + gain @ (x[0, :2] - mean[:2]))
    assert (error.abs() < 4 * (rest.diagonal() / n).sqrt()).all()
    scale = rest.diagonal().sqrt()
    assert ((draws[:, 2:].mT.cov() - rest).abs() < 4 * 2**0.5 * scale * scale[:, None] / n**0.5).all()


def axes(draws: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """A grid over where the draws (rows, m) are and well beyond, and the size of its cells."""
    low, high = draws.amin(0), draws.amax(0)
    reach = 1.5 * (high - low)
    axis = [torch.linspace(a - r, b + r, n, dtype=a.dtype) for a, b, r in zip(low, high, reach, strict=True)]
    cell = torch.stack([a[1] - a[0] for a in axis]).prod()
    return torch.cartesian_prod(*axis).view(-1, draws.shape[1]), cell


@pytest.mark.parametrize("context", [0, 2])
def test_prefixes_and_conditionals_are_integrals(context: int) -> None:
    flow = model("quar", context)
    x, c = data(3, D, context)
    x = flow.sample(3, c)
    with torch.no_grad():
        for i in range(3):
            here = None if c is None else c[i]
            grid, cell = axes(flow.sample_given(500, x[i, :2], here)[:, 2:], 301)
            joint = flow.log_prob(torch.cat([x[i, :2].expand(len(grid), 2), grid], 1), here)
            prefix = flow.prefix_log_prob(x[i : i + 1, :2], here)
            assert torch.allclose(joint.exp().sum() * cell, prefix.exp(), rtol=1e-6)
            given = flow.conditional_log_prob(grid, x[i, :2], here)
            assert torch.allclose(given, joint - prefix, rtol=1e-9, atol=1e-9)
            assert abs(given.exp().sum() * cell - 1) < 1e-6
            # Columns between what is asked for and the end are integrated out too.
            grid, cell = axes(flow.sample_given(500, x[i, :2], here)[:, 2:3], 2001)
            between = torch.cat([x[i, :2].expand(len(grid), 2), grid], 1)
            total = flow.prefix_log_prob(between, here).exp().sum() * cell
            assert torch.allclose(total, prefix.exp(), rtol=1e-6)


@pytest.mark.parametrize("context", [0, 2])
@pytest.mark.parametrize(("name", "base"), [*((name, "normal") for name in MODELS), *STUDENTS])
def test_terms_add_up_and_are_conditionals(name: str, base: str, context: int) -> None:
    flow = model(name, context, base=base)
    x, c = data(6, D, context)
    terms = flow.log_prob_terms(x, c)
    assert torch.allclose(terms.sum(1), flow.log_prob(x, c), rtol=1e-9)
    for k in range(1, D):
        assert torch.allclose(flow.log_prob_terms(x[:, :k], c), terms[:, :k], rtol=1e-9, atol=1e-9)
        found = flow.conditional_log_prob(x[:, k : k + 1], x[:, :k], c)
        assert torch.allclose(found, terms[:, k], rtol=1e-9, atol=1e-9)
    # What comes later has no part in a term, to the last bit.
    other = torch.cat([x[:, :2], x[:, 2:].flip(0)], 1)
    assert torch.equal(flow.log_prob_terms(other, c)[:, :2], terms[:, :2])
    shaped = flow.log_prob_terms(x.view(2, 3, D), None if c is None else c.view(2, 3, -1))
    assert torch.equal(shaped.view(6, D), terms)
    single = flow.float()
    x, c = x.float(), None if c is None else c.float()
    assert single.log_prob_terms(x, c).dtype == torch.float32
    assert torch.allclose(single.log_prob_terms(x, c).double(), terms, atol=1e-4)


def test_joint_student_is_the_multivariate_t() -> None:
    multivariate_t = pytest.importorskip("scipy.stats").multivariate_t
    base = qf.bases.JointStudentT((3,), freedom=4.0).double()
    z = 3 * torch.randn(50, 3, dtype=torch.float64)
    nu = base.freedom.item()
    known = torch.from_numpy(multivariate_t(df=nu, shape=torch.eye(3).numpy()).logpdf(z.numpy()))
    assert torch.allclose(base.log_prob(z), known, rtol=1e-9)
    # Scores of draws are independent normals, and increase at the rate that the densities say.
    draws = base.sample(20_000, torch.Generator().manual_seed(1)).detach()
    scores = base.normal_scores(draws)
    assert statistic(torch.special.ndtr(scores[:, 2])) < 1.95
    assert (scores.square().T.corrcoef() - torch.eye(3)).abs().max() < 0.04
    step = torch.tensor([0.0, 0.0, 1e-5], dtype=torch.float64)
    slope = (base.normal_scores(z + step) - base.normal_scores(z - step))[:, 2] / 2e-5
    normal = qf.bases.Normal((3,)).log_terms(base.normal_scores(z))
    assert torch.allclose((normal[:, 2].exp() * slope).log(), base.log_terms(z)[:, 2], atol=1e-6)
    # The square of a draw's length over 3 is Fisher's F, whose median is that of the formula.
    draws = base.sample(20_000, torch.Generator().manual_seed(0))
    below = pytest.importorskip("scipy.stats").f(3, nu).cdf((draws.square().sum(1) / 3).detach().numpy())
    assert statistic(torch.from_numpy(below)) < 1.95


def statistic(u: Tensor) -> Tensor:
    """Of Kolmogorov and Smirnov for uniform numbers, times the root of their number: above 1.95 once in 1000."""
    n, u = len(u), u.sort().values
    steps = torch.arange(n + 1, dtype=u.dtype) / n
    return torch.maximum((u - steps[:-1]).max(), (steps[1:] - u).max()) * n**0.5


@pytest.mark.parametrize("context", [0, 2])
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in MODELS), ("quar", {"base": "joint-student"})])
def test_draws_given_a_prefix_follow_the_conditional_density(name: str, options: dict, context: int) -> None:
    flow = model(name, context, features=3, **options)
    x, c = data(1, 3, context)
    torch.manual_seed(2)
    draws = flow.sample_given(300, x[:, :1], c)
    assert (draws[:, 0] == x[0, 0]).all()
    with torch.no_grad():
        for column in (1, 2):
            axis = axes(draws[:, column : column + 1], 1001)[0][:, 0]
            before = draws[:, :column] if column == 2 else draws[:1, :column]
            points = axis.expand(len(before), -1)[..., None]
            given = before[:, None].expand(-1, len(axis), -1)
            density = flow.conditional_log_prob(points, given.reshape(-1, column), c).exp()
            cdf = torch.cumulative_trapezoid(density, axis)
            assert (cdf[:, -1] - 1).abs().max() < 2e-2  # tails of Student's t reach beyond any grid
            at = torch.searchsorted(axis[1:-1].contiguous(), draws[:, column].contiguous())
            u = cdf[torch.arange(300) if column == 2 else torch.zeros(300, dtype=torch.int64), at]
            assert statistic(u) < 1.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_given_columns_come_back_and_rows_go_with_rows(dtype: torch.dtype) -> None:
    for name in MODELS:
        flow = model(name, 2).to(dtype)
        given, c = (part.to(dtype) for part in data(5, 2, 2))
        draws = flow.sample_given(5, given, c, generator=torch.Generator().manual_seed(0))
        assert draws.dtype == dtype
        assert torch.equal(draws[:, :2], given)
        again = flow.sample_given(5, given, c, generator=torch.Generator().manual_seed(0))
        assert torch.equal(draws, again)
        # The same noise as a draw of all columns would use, behind the first.
        z = flow.base.sample(5, torch.Generator().manual_seed(0))
        error = (flow.transform(draws, c)[0] - z)[:, 2:].abs().max()
        assert error < (1e-4 if dtype == torch.float32 else 1e-9)


def test_bounded_columns_need_no_filler_of_the_user() -> None:
    torch.manual_seed(0)
    steps = [t.Logit(), t.MaskedAffine(3, hidden=(4,)), t.Residual(TriangularNet(3, (4,)))]
    flow = far(qf.Flow(t.Chain(steps), qf.bases.Normal((3,))))
    x = torch.rand(4, 3, dtype=torch.float64)
    assert torch.allclose(flow.prefix_log_prob(x[:, :2]), flow.log_prob_terms(x)[:, :2].sum(1))
    assert flow.sample_given(10, x[:1, :2])[:, 2].clamp(0, 1).unique().numel() == 10


def test_prefixes_can_be_learnt_from() -> None:
    flow = model("quar")
    x = data(5, 2, 0)[0].requires_grad_()
    flow.prefix_log_prob(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad != 0).all()


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (lambda: qf.models.quar(3, blocks=2, hidden=(4,)), r"transform 3 \(Reverse\) mixes them.*mixing=None"),
        (lambda: qf.models.maf(3, blocks=2, hidden=(4,), mixing="lu"), r"transform 3 \(LULinear\)"),
        (lambda: qf.models.quar(3, blocks=2, hidden=(4,), mixing="permute"), r"transform 3 \(Permutation\)"),
        (lambda: qf.models.realnvp(3, blocks=1, hidden=(4,)), r"transform 2 \(AffineCoupling\)"),
        (lambda: qf.models.residual(3, blocks=1, hidden=(4,)), r"transform 2 \(Residual\)"),
        (lambda: qf.models.quar_image((1, 4, 4), blocks=(1,), hidden=4), r"images. See quarflow\.pixels\.complete"),
    ],
)
def test_other_orders_are_refused(flow: object, message: str) -> None:
    flow = flow()
    assert not flow.triangular
    for call in (
        flow.log_prob_terms,
        flow.prefix_log_prob,
        lambda x: flow.conditional_log_prob(x, x),
        lambda x: flow.sample_given(3, x),
    ):
        with pytest.raises(ValueError, match=message):
            call(torch.zeros(2, 1))


def test_wrong_columns_are_named() -> None:
    flow = qf.models.quar(3, blocks=1, hidden=(4,), mixing=None)
    x = torch.zeros(2, 3)
    for call, message in (
        (lambda: flow.log_prob_terms(torch.zeros(2, 4)), r"x: expected from 1 to 3 columns.*got shape \(2, 4\)"),
        (lambda: flow.prefix_log_prob(torch.zeros(2, 0)), r"x: expected from 1 to 3 columns"),
        (lambda: flow.prefix_log_prob(x[0]), r"x: expected shape \(\.\.\., 3\).*x\[None\]"),
        (lambda: flow.prefix_log_prob([1.0]), r"x: expected a tensor; got list"),
        (lambda: flow.prefix_log_prob(x.double()), r"x: expected torch.float32"),
        (lambda: flow.prefix_log_prob(x * torch.nan), r"x: expected finite values"),
        (lambda: flow.conditional_log_prob(x, x[:, :1]), r"x: expected from 1 to 2 columns"),
        (lambda: flow.conditional_log_prob(x[:, :1], x), r"given: expected from 1 to 2 columns"),
        (lambda: flow.conditional_log_prob(x[:, :1], torch.zeros(5, 1)), r"given: expected 1 row or 2.*got 5"),
        (lambda: flow.sample_given(3, x[:, :1]), r"given: expected 1 row or 3.*got 2"),
        (lambda: flow.sample_given(0, x[:1, :1]), r"n: expected an integer >= 1"),
        (lambda: flow.sample_given(3, None), r"given: expected a tensor; got NoneType"),
        (lambda: flow.sample_given(3, torch.tensor(1.0)), r"given: expected from 1 to 2 columns.*got shape \(\)"),
        (lambda: flow.sample_given(3, x[:1, :1], x[:1]), r"context: this flow has no context"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
