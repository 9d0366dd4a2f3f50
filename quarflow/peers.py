"""What people use for the density of a table where they have no flow: a Gaussian, a mixture of them, kernels.

They get what helps a flow, too: bounds and heavy tails are taken to the line first, whole numbers are averaged over
their steps, and all that is given, context and categories ``w``, is given to them as well: a density of both gives
``q(u | w) = q(u, w) / q(w)``. Categories themselves get their frequencies, each column by itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from quarflow.table_flow import TableFlow

COMPONENTS = (2, 3, 5, 8, 12)
RIDGES = (1e-4, 1e-2, 0.3)  # on the diagonal of a covariance, for few rows of many columns
BANDWIDTHS = (0.05, 0.08, 0.12, 0.18, 0.27, 0.4, 0.6, 0.9)  # of standardised columns
KNOWN = 32  # columns of what is given: with more of them, peers go without
LEAST = 10  # rows to learn from

Density = Callable[[Tensor], Tensor]  # log q(u, w) - log q(w) of rows (n, columns)


@dataclass(frozen=True)
class Peer:
    """``log_prob`` of the rows judged, (n,), in the units of the table, and what was chosen by a part of the others."""

    name: str
    log_prob: Tensor
    choice: str = ""


def peers(flow: TableFlow, learn: tuple[Tensor, Tensor | None], judge: tuple[Tensor, Tensor | None]) -> list[Peer]:
    """Densities that learn from encoded rows and their context, judged on others; `flow` says what the columns are.

    >>> from quarflow.models import table
    >>> from quarflow.tables import Schema, as_table
    >>> flow = table(Schema.of(as_table({"a": torch.randn(50).numpy(), "b": ["u", "v"] * 25})), hidden=(4,))
    >>> x = torch.stack([torch.randn(50), torch.randint(2, (50,)).float()], 1)
    >>> [(peer.name, peer.log_prob.shape) for peer in peers(flow, (x, None), (x, None))][:2]
    [('Gaussian', torch.Size([50])), ('Gaussian mixture', torch.Size([50]))]
    """
    numbers = len(flow.schema.numbers)
    labels = _frequencies(flow, learn[0][:, numbers:].long(), judge[0][:, numbers:].long())
    if not numbers:
        return [Peer("frequencies", labels)]
    u, _, w = flow.on_the_line(*learn, torch.Generator().manual_seed(0))
    cells, ladj, given = flow.on_the_line(*judge)
    if w is not None and given is not None and w.shape[1] <= KNOWN:
        varying = w.std(0) > 0
        u, cells = torch.cat([u, w[:, varying]], 1), torch.cat([cells, given[:, varying]], 1)
    mean, scale = u.mean(0), u.std(0).clamp_min(1e-12)
    u, cells = ((rows - mean) / scale for rows in (u.double(), cells.double()))
    ladj = ladj - scale[:numbers].log().sum()

    def judged(density: Density) -> Tensor:
        places = len(cells) // len(judge[0])
        return (density(cells) + ladj).view(places, -1).logsumexp(0) - math.log(places) + labels

    ridge = _best(lambda r: lambda rows: _mixture(rows, 1, numbers, r), RIDGES, u)
    counts = [k for k in COMPONENTS if 4 * k <= len(u)]
    count = _best(lambda k: lambda rows: _mixture(rows, k, numbers, ridge), counts, u)
    width = _best(lambda h: lambda rows: _kernels(rows, h, numbers), BANDWIDTHS, u)
    found = [Peer("Gaussian", judged(_mixture(u, 1, numbers, ridge)))]
    if count:
        found.append(Peer("Gaussian mixture", judged(_mixture(u, count, numbers, ridge)), f"{count} components"))
    return [*found, Peer("kernel density", judged(_kernels(u, width, numbers)), f"bandwidth {width:g}")]


def _best(make: Callable[[Any], Callable[[Tensor], Density]], options: Any, rows: Tensor) -> Any:
    """The option that makes a fifth of the rows most likely after the others; None if there are none."""
    part = len(rows) // 5
    worth = {option: float(make(option)(rows[part:])(rows[:part]).mean()) for option in options}
    return max(worth, key=worth.__getitem__, default=None)


def _mixture(rows: Tensor, components: int, numbers: int, ridge: float) -> Density:
    try:
        from sklearn.mixture import GaussianMixture
    except ImportError as error:
        raise ImportError("Gaussian mixtures need scikit-learn: pip install 'quarflow[tables]'") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged: as good as it is then
        found = GaussianMixture(components, reg_covar=ridge, random_state=0).fit(rows.numpy())
    weights, means, covariances = map(torch.as_tensor, (found.weights_, found.means_, found.covariances_))

    def of(first: int) -> Density:
        parts = MultivariateNormal(means[:, first:], covariances[:, first:, first:])
        density = MixtureSameFamily(Categorical(weights), parts)
        return lambda x: density.log_prob(x[:, first:])

    return _given(of, rows, numbers)


def _kernels(rows: Tensor, width: float, numbers: int) -> Density:
    def of(first: int) -> Density:
        centres = rows[:, first:]
        constant = math.log(len(rows)) + centres.shape[1] * math.log(width * math.sqrt(2 * math.pi))

        def density(x: Tensor) -> Tensor:
            parts = x[:, first:].split(max(1, 2**22 // len(rows)))
            distances = (torch.cdist(part, centres) / width for part in parts)
            return torch.cat([(-0.5 * d.square()).logsumexp(1) for d in distances]) - constant

        return density

    return _given(of, rows, numbers)


def _given(of: Callable[[int], Density], rows: Tensor, numbers: int) -> Density:
    """``log q(u, w) - log q(w)``; ``of(first)`` is the density of the columns from ``first`` on."""
    if rows.shape[1] == numbers:
        return of(0)
    joint, known = of(0), of(numbers)
    return lambda x: joint(x) - known(x)


def _frequencies(flow: TableFlow, learn: Tensor, judge: Tensor) -> Tensor:
    """``log P`` of labels (n, m), each column by itself, with one more row of each category: (n,)."""
    total = torch.zeros(len(judge), dtype=torch.float64)
    for j, column in enumerate(flow.schema.labels):
        counts = torch.bincount(learn[:, j], minlength=len(column.values)).double() + 1
        total += (counts / counts.sum()).log()[judge[:, j]]
    return total
