"""The block with context from the coordinates before: what the laws of test_laws.py leave to say."""

from __future__ import annotations

import copy

import pytest
import torch
from registry import FEATURES, TRANSFORMS, data, far

import quarflow as qf
from quarflow.nn.conditioned import ConditionedNet
from quarflow.nn.masked import MADE
from quarflow.solvers import Newton
from quarflow.transforms import ConditionedResidual


def quar(features: int, **options: object) -> qf.Flow:
    usual = {"block": "conditioned", "blocks": 2, "hidden": (6,), "conditioner": (8,)}
    return qf.models.quar(features, **usual | options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_round_trip_with_large_weights_or_an_error(dtype: torch.dtype) -> None:
    returned = 0
    for features in FEATURES:
        for scale in (1, 3, 10, 100):
            torch.manual_seed(features)
            flow = quar(features, blocks=3, hidden=(8, 8)).to(dtype)
            with torch.no_grad():
                for name, p in flow.named_parameters():
                    if name.endswith("weight"):
                        p.mul_(scale)
            x = torch.randn(100, features, dtype=dtype)
            z = flow.transform(x)[0]
            try:
                back = flow.transform.inverse(z)[0]
            except qf.NotConverged:
                continue
            returned += 1
            assert ((back - x).abs() / x.abs().clamp_min(1)).max() <= (1e-10 if dtype == torch.float64 else 1e-5)
    assert returned >= 6  # an error every time would be no inverse


def test_the_bound_is_one_wherever_the_units_bend() -> None:
    largest = []
    for name in [n for n in TRANSFORMS if n.startswith("conditioned")]:
        for seed in range(3):
            net = far(TRANSFORMS[name](2, 3), scale=2.0, seed=seed).eval().net
            x, c = data(5000, 2, 3, seed)
            d = net(3 * x, 10 * c)[1]
            assert (d.abs() <= net.sigma).all(), name
            largest.append(d.abs().max() / net.sigma)
    assert max(largest) > 0.5  # and not empty


def test_reported_residual_is_that_of_its_equation() -> None:
    for name in [n for n in TRANSFORMS if n.startswith("conditioned")]:
        f = far(TRANSFORMS[name](5, 3), scale=0.4).eval()
        z, c = data(4, 5, 3)
        solution = f.solve(z, c)
        value, _, a, t = f.net(solution.x, c)
        truth = (solution.x + value - (z - t) * (-a).exp()).abs().amax(1)
        assert torch.allclose(solution.residual, truth, rtol=0, atol=1e-13), name
        assert solution.converged.all()


def test_what_is_given_costs_no_steps() -> None:
    f = far(ConditionedResidual(ConditionedNet(9, (4,), (8,))), scale=0.4)
    x, _ = data(4, 9, 0)
    z = f(x)[0].detach()
    known = torch.ones(1, 9, dtype=torch.bool)
    assert f.solve(z, None, x, known).steps == 1
    known[:, -1] = False
    assert f.solve(z, None, x, known).steps < f.solve(z).steps
    assert torch.allclose(f.inverse_given(z, x, known), x, atol=1e-10)


def test_a_tolerance_that_is_out_of_reach_is_an_error() -> None:
    f = far(ConditionedResidual(ConditionedNet(3, (4,), (8,)), Newton(tolerance=1e-30, max_steps=5)))
    with pytest.raises(qf.NotConverged, match="did not reach its tolerance"):
        f.inverse(data(4, 3, 0)[0])


@pytest.mark.parametrize("context", [0, 2])
def test_implicit_gradients_against_finite_differences(context: int) -> None:
    torch.manual_seed(0)
    f = far(ConditionedResidual(ConditionedNet(3, (4,), (6,), context, activation="sine")), scale=0.5)
    z, c = data(2, 3, context)
    inputs = [z.requires_grad_(), *([] if c is None else [c.requires_grad_()])]
    assert torch.autograd.gradcheck(lambda *i: f.inverse(*i), inputs, eps=1e-6, rtol=1e-5, check_undefined_grad=False)
    parameters = list(f.parameters())
    x, ladj = f.inverse(z.detach(), None if c is None else c.detach())
    weight = torch.linspace(1, 2, x.numel(), dtype=x.dtype).view_as(x)
    found = torch.autograd.grad((x * weight).sum() + ladj.sum(), parameters)
    step = 1e-6
    for p, gradient in zip(parameters, found, strict=True):
        direction = torch.randn_like(p)
        values = []
        for sign in (1, -1):
            moved = copy.deepcopy(f)
            with torch.no_grad():
                dict(moved.named_parameters())[next(n for n, q in f.named_parameters() if q is p)].add_(
                    sign * step * direction
                )
                x, ladj = moved.inverse(z, c)
                values.append((x * weight).sum() + ladj.sum())
        assert torch.allclose((values[0] - values[1]) / (2 * step), (gradient * direction).sum(), rtol=1e-4, atol=1e-7)


def test_columns_are_the_transposed_outputs() -> None:
    for context in (0, 3):
        net = MADE(4, 5, (7,), context).double()
        x, c = data(6, 4, context)
        found = net.columns(x, c)
        assert found.is_contiguous()
        assert torch.allclose(found.permute(2, 0, 1), net(x, c), rtol=1e-12)


def test_saved_and_loaded_to_the_last_bit(tmp_path: object) -> None:
    flow = quar(3, context=2, activation="sine", mixing="lu")
    qf.save(flow, tmp_path / "m.qf")
    same = qf.load(tmp_path / "m.qf")
    x, c = (part.float() for part in data(5, 3, 2))
    assert torch.equal(same.log_prob(x, c), flow.log_prob(x, c))
    assert same.config == flow.config
    assert flow.config.block == "conditioned"


def test_it_learns_what_one_plain_block_cannot() -> None:
    """The first column tells where the second is, and how narrow: by more than a slope of ``1 + sigma``."""
    torch.manual_seed(0)
    x = torch.randn(2000, 1)
    y = torch.cat([x, x.sin() + (0.02 + 0.1 * x.square()) * torch.randn(2000, 1)], 1)
    nats = {}
    for block in qf.models.BLOCKS:
        torch.manual_seed(0)
        flow = qf.models.quar(2, block=block, blocks=1, hidden=(16,), mixing=None)
        qf.fit(flow, y[:1500], max_steps=300, seed=0, progress=False, learning_rate=1e-2)
        nats[block] = qf.evaluate(flow, y[1500:]).nats
    assert nats["conditioned"] > nats["plain"] + 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": "conditional"}, "block: expected one of 'plain', 'conditioned'; got 'conditional'"),
        ({"lipschitz": "network"}, "lipschitz: expected one of 'coordinate', 'diagonal'; got 'network'"),
        ({"hidden": ()}, r"hidden: expected units of each hidden layer, such as \(16, 16\)"),
        ({"hidden": (4, 0)}, "hidden: expected an integer >= 1; got 0"),
        ({"conditioner": 8}, "conditioner: expected units of each hidden layer, such as"),
        ({"conditioner": (0,)}, "conditioner: expected an integer >= 1; got 0"),
        ({"activation": "relu"}, "activation: expected one of"),
        ({"sigma": 1.0}, "sigma: expected a number in"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quar(3, **options)


@pytest.mark.parametrize("block", ["plain", "conditioned"])
def test_a_small_start_is_nearly_the_standardisation(block: str) -> None:
    x, away = 3 * torch.randn(50, 3) + 1, {}
    for start in (1.0, 0.1, 1e-4):
        torch.manual_seed(0)
        flow = qf.models.quar(3, block=block, blocks=3, start=start)
        flow.initialise(x)
        z = flow.transform(x)[0].detach()
        away[start] = float((z - (x - x.mean(0)) / x.std(0)).abs().max())
    assert away[1.0] > away[0.1] > away[1e-4]
    assert away[1e-4] < 1e-2
    with pytest.raises(ValueError, match="start: expected 1 without the trick"):
        qf.models.quar(3, block=block, start=0.1, trick=False)
