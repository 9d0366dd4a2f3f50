"""Hostile input is normal input: an error that names the argument, what was expected, what came, and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import quarflow as qf
from quarflow.transforms import ActNorm, Logit, Permutation, Standardise

x = torch.randn(20, 3)
c = torch.randn(20, 2)
NAN = torch.where(torch.arange(60).view(20, 3) == 7, torch.nan, x)


def plain() -> qf.Flow:
    return qf.models.quar(3, blocks=1, hidden=(4,))


def conditional() -> qf.Flow:
    return qf.models.quar(3, 2, blocks=1, hidden=(4,))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.randn(20, 4), r"x: expected shape \(\.\.\., 3\); got \(20, 4\)"),
        (torch.randn(3), r"x: expected shape \(\.\.\., 3\); got \(3,\)\. Use x\[None\]"),
        (torch.randn(()), r"x: expected shape"),
        (torch.ones(20, 3, dtype=torch.int64), r"x: expected a floating dtype; got torch\.int64\. Use x\.to"),
        (torch.ones(20, 3, dtype=torch.complex64), r"x: expected a floating dtype; got torch\.complex64"),
        (torch.randn(20, 3, dtype=torch.float64), r"x: expected torch\.float32.*flow\.to\(torch\.float64\)"),
        (NAN, r"x: expected finite values; got NaN or inf in 1 of 20 rows, columns \[1\]\. Drop or fill"),
        (x / 0, r"x: expected finite values"),
        (x[:0], r"x: expected at least one row; got an empty batch"),
        ([[1.0, 2.0, 3.0]], r"x: expected a tensor; got list\. Use torch\.as_tensor"),
    ],
)
def test_data(bad: Any, words: str) -> None:
    for call in (plain().log_prob, plain().initialise):
        with pytest.raises(ValueError, match=words):
            call(bad)


@pytest.mark.parametrize(
    ("flow", "context", "words"),
    [
        (conditional, None, r"context: this flow is conditional on 2 features; got none\. Pass context"),
        (plain, c, r"context: this flow has no context \(context=0\); got some\. Leave it out"),
        (conditional, c[:, :1], r"context: expected shape \(\.\.\., 2\); got \(20, 1\)"),
        (conditional, c[:7], r"context: expected 1 row or 20, one for each data point; got 7"),
        (conditional, c / 0, r"context: expected finite values; got NaN or inf in 20 of 20 rows"),
        (conditional, c.long(), r"context: expected a floating dtype"),
    ],
)
def test_context(flow: Any, context: Tensor | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        flow().log_prob(x, context)
    with pytest.raises(ValueError, match=words):
        flow().sample(20, context)
    if "rows" not in words and "row" not in words:
        with pytest.raises(ValueError, match=words):
            flow().distribution(context)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": 0}, r"features: expected an integer >= 1; got 0"),
        ({"features": 2.0}, r"features: expected an integer >= 1; got 2\.0"),
        ({"context": -1}, r"context: expected an integer >= 0; got -1"),
        ({"blocks": 0}, r"blocks: expected an integer >= 1; got 0"),
        ({"hidden": (0,)}, r"hidden: expected an integer >= 1; got 0"),
        ({"hidden": (8, -2)}, r"hidden: expected an integer >= 1; got -2"),
        ({"hidden": ()}, r"hidden: expected units of each hidden layer, such as \(64, 64\)"),
        ({"hidden": 64}, r"hidden: expected units of each hidden layer"),
        ({"sigma": 1.0}, r"sigma: expected a number in \[0, 1\).*got 1\.0"),
        ({"sigma": -0.1}, r"sigma: expected a number in \[0, 1\)"),
        ({"sigma": float("nan")}, r"sigma: expected a number in \[0, 1\)"),
        ({"lipschitz": "global"}, r"lipschitz: expected one of 'network', 'diagonal', 'coordinate'; got 'global'"),
        ({"activation": "relu"}, r"activation: expected one of clipswish, elu"),
        ({"mixing": "random"}, r"mixing: expected one of 'reverse', 'lu', 'permute', None; got 'random'"),
        ({"bound": "loose"}, r"bound: expected one of"),
        ({"bound": "paths", "lipschitz": "network"}, r"bound: lipschitz='network' needs spectral norms"),
        ({"base": "cauchy"}, r"base: expected one of 'normal', .*, 'joint-student'; got 'cauchy'"),
        ({"solver": "bisect"}, r"solver: expected one of"),
        ({"width": 3}, r"configuration: model 'quar' has no option 'width'; it has activation"),
    ],
)
def test_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        qf.models.quar(**({"features": 2} | options))


def test_number_of_samples() -> None:
    for n in (0, -3, 2.5, True):
        with pytest.raises(ValueError, match="n: expected an integer >= 1"):
            plain().sample(n)


@pytest.mark.parametrize("kind", [ActNorm, Standardise])
def test_initialise(kind: Any) -> None:
    with pytest.raises(ValueError, match=rf"at least 2 rows to initialise {kind.__name__} from; got 1"):
        kind(3).initialise(x[:1])
    constant = x.clone()
    constant[:, 1] = 1234.5678
    with pytest.raises(ValueError, match=r"columns \[1\] are constant in these 20 rows"):
        kind(3).initialise(constant)
    with pytest.raises(ValueError, match="constant"):
        plain().initialise(constant)


def test_other_arguments() -> None:
    with pytest.raises(ValueError, match=r"alpha: expected a number in \[0, 0.5\)"):
        Logit(0.5)
    with pytest.raises(ValueError, match="order: expected a permutation"):
        Permutation(torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match="transforms: expected Transform objects; got Linear at position 0"):
        qf.transforms.Chain([torch.nn.Linear(2, 2)])  # type: ignore[list-item]


def test_huge_scales_are_right_or_an_error() -> None:
    torch.manual_seed(0)
    scales = torch.tensor([1e-12, 1e12, 1.0], dtype=torch.float64)
    data = (torch.randn(500, 3, dtype=torch.float64) * scales).float()
    flow = plain().initialise(data)
    # Log-densities of independent normals at these scales.
    truth = torch.distributions.Normal(0.0, scales.float()).log_prob(data).sum(1).mean()
    assert abs(flow.log_prob(data).mean() - truth) < 1.5
    with pytest.raises(ValueError, match="overflow"):
        plain().initialise(torch.randn(500, 3) * 1e38)


def test_nan_names_its_cause() -> None:
    flow = plain()
    with torch.no_grad():
        flow.transform.steps[2].net.layers[0].weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"NaN in 20 rows: transform\.transforms\.2\.net.*weight holds"):
        flow.log_prob(x)
    logit = qf.Flow(Logit(), qf.bases.Normal((3,)))
    with pytest.raises(FloatingPointError, match=r"transform 0 \(Logit\).*domain"):
        logit.log_prob(x - 5)


def test_any_leading_batch_shape() -> None:
    for flow, context in ((plain(), None), (conditional(), c)):
        flat = flow.log_prob(x, context)
        grid = flow.log_prob(x.view(4, 5, 3), None if context is None else context.view(4, 5, 2))
        assert grid.shape == (4, 5)
        assert torch.equal(grid.flatten(), flat)
    one = conditional().eval()
    assert torch.equal(one.log_prob(x, c[0]), one.log_prob(x, c[:1].expand(20, 2)))


def test_distribution_broadcasts_and_agrees() -> None:
    flow = conditional()
    d = flow.distribution(c[:4])
    assert d.batch_shape == (4,)
    assert d.event_shape == (3,)
    draws = d.rsample((5,))
    assert draws.shape == (5, 4, 3)
    assert draws.requires_grad
    assert d.log_prob(draws).shape == (5, 4)
    assert torch.allclose(d.log_prob(x[0])[2], flow.log_prob(x[:1], c[2:3])[0])
    assert d.expand((7, 4)).sample().shape == (7, 4, 3)
    single = plain().distribution()
    assert single.log_prob(single.sample()).shape == ()


def test_samples_follow_the_density() -> None:
    torch.manual_seed(0)
    flow = plain().double()
    draws, log_prob = flow.sample_and_log_prob(4000)
    assert torch.allclose(log_prob, flow.log_prob(draws), rtol=1e-9, atol=1e-9)
    again = flow.sample(50, generator=torch.Generator().manual_seed(3))
    assert torch.equal(again, flow.sample(50, generator=torch.Generator().manual_seed(3)))


def test_importing_changes_nothing_and_brings_torch_alone() -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch; before = set(sys.modules), torch.get_default_dtype(); import quarflow; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before[0]}; "
        "heavy = new & {'numpy', 'scipy', 'sklearn', 'matplotlib', 'safetensors', 'rich', 'typer', 'zuko', 'pandas'}; "
        "assert not heavy, heavy; assert torch.get_default_dtype() == before[1]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
