"""A flow as the density estimator of sbi: its shapes, and a posterior whose answer is known."""

import pickle
import sys

import pytest
import torch
from torch.distributions import MultivariateNormal

from quarflow.interop import _sbi_estimator, to_sbi

inference = pytest.importorskip("sbi.inference")

A = torch.tensor([[1.0, 0.5], [0.0, 1.0], [-1.0, 0.5]])
PRIOR = MultivariateNormal(torch.zeros(2), torch.eye(2))


def simulate(theta):
    return theta @ A.T + 0.5 * torch.randn(len(theta), 3)


def test_the_posterior_of_a_linear_gaussian_simulator(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where sbi writes its log
    torch.manual_seed(0)
    theta = PRIOR.sample((3000,))
    npe = inference.NPE(PRIOR, density_estimator=to_sbi(blocks=2, hidden=(8, 8)), show_progress_bars=False)
    npe.append_simulations(theta, simulate(theta))
    npe.train(learning_rate=3e-3, training_batch_size=256, stop_after_epochs=10, max_num_epochs=40)
    posterior = npe.build_posterior()
    precision = torch.eye(2) + A.T @ A / 0.25
    for x in (torch.zeros(3), torch.tensor([1.0, -0.5, 0.2])):
        truth = MultivariateNormal(torch.linalg.solve(precision, A.T @ x / 0.25), precision_matrix=precision)
        draws = posterior.sample((4000,), x=x[None], show_progress_bars=False)
        assert torch.allclose(draws.mean(0), truth.mean, atol=0.1)
        assert torch.allclose(draws.T.cov(), truth.covariance_matrix, atol=0.03)
        # KL(q | p): in nats, of the flow from the truth.
        assert (posterior.log_prob(draws, x=x[None]) - truth.log_prob(draws)).mean() < 0.05
        # The density that sbi gives is the flow's own, which integrates to one.
        axis = torch.linspace(-4, 4, 161)
        density = posterior.log_prob(torch.cartesian_prod(axis, axis), x=x[None], norm_posterior=False).exp()
        assert density.sum() * (axis[1] - axis[0]) ** 2 == pytest.approx(1, abs=1e-2)


def test_shapes_are_those_of_sbi():
    torch.manual_seed(0)
    theta = PRIOR.sample((50,))
    x = simulate(theta)
    estimator = to_sbi("maf", blocks=1, hidden=(8,))(theta, x).eval()
    assert (estimator.input_shape, estimator.condition_shape) == ((2,), (3,))
    assert estimator.loss(theta, x).shape == (50,)
    rows = torch.stack([estimator.log_prob(theta[i][None, None], x[i][None])[0, 0] for i in range(50)])
    assert torch.allclose(estimator.log_prob(theta, x)[0], rows, atol=1e-5)
    assert torch.allclose(estimator.log_prob(theta[:, None], x[:1])[:1, 0], rows[:1], atol=1e-5)
    both = estimator.log_prob(theta.view(5, 10, 2), x.view(5, 10, 3))
    assert torch.allclose(both.view(-1), rows, atol=1e-5)
    samples, log_prob = estimator.sample_and_log_prob((4, 3), x[:7])
    assert (samples.shape, log_prob.shape) == ((4, 3, 7, 2), (4, 3, 7))
    again = estimator.log_prob(samples.view(12, 7, 2), x[:7])
    assert torch.allclose(again, log_prob.view(12, 7), atol=1e-4)
    same = pickle.loads(pickle.dumps(estimator))  # noqa: S301 (our own)
    assert torch.equal(same.log_prob(theta, x), estimator.log_prob(theta, x))


def test_simulations_that_are_no_vectors_are_embedded():
    theta, x = torch.randn(20, 2), torch.randn(20, 4, 3)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    estimator = to_sbi(blocks=1, hidden=(4,), embedding=network)(theta, x)
    estimator.loss(theta, x).mean().backward()
    assert (network[1].weight.grad != 0).any()
    assert estimator.sample((3,), x[:2]).shape == (3, 2, 2)
    with pytest.raises(ValueError, match=r"expected vectors.*\(20, 4, 3\).*embedding"):
        to_sbi()(theta, x)
    with pytest.raises(ValueError, match=r"embedding: expected a torch\.nn\.Module; got str"):
        to_sbi(embedding="mean")
    with pytest.raises(ValueError, match="model: expected one of"):
        to_sbi("nsf")


def test_without_sbi(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("sbi")]:
        monkeypatch.setitem(sys.modules, name, None)
    _sbi_estimator.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'quarflow\[sbi\]'"):
        to_sbi()(torch.zeros(2, 2), torch.zeros(2, 3))
