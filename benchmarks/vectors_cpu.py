"""QuAR flows against zuko's MAF and NSF and normflows' residual flow: training step, log-density, sampling.

One CPU thread, one run, equal numbers of parameters (within 5%), three transforms each. QuAR has its default
activation, or sine; and once two wider blocks, the fewest in which the order of the coordinates changes. All are
trained for a while on a mixture of eight Gaussians before anything is timed: a fresh residual flow may be an
identity, which inverts for free.

A training step is ``zero_grad``, loss, ``backward`` and ``Adam(fused=True)``. normflows is set up as in its
documentation: ``LipschitzMLP`` with constant 0.9 and zeros at the start, actnorm, ``reduce_memory=True``,
which is also its default; and with False. Its 50 power iterations after each step are timed apart. Its
log-density is an estimate, in evaluation from at least 20 terms; for two coordinates exact, by brute force.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import quarflow as qf
from benchmarks.harness import Spread, interleave, load, ratio, save, start, table, timed
from quarflow.data.toy import mixture_of_gaussians
from quarflow.transforms import Residual

TRANSFORMS = 3
REFERENCE = "zuko MAF"
# Coordinates, and the layers of QuAR's blocks: the others get as many parameters.
HIDDEN = ((2, (42, 42)), (20, (4, 4)), (64, (4, 4)))
TOLERANCE = 0.05


@dataclass(frozen=True)
class Contestant:
    """A model of one library behind one face: log-density, draws, and data to noise and back."""

    module: nn.Module
    transforms: int
    hidden: tuple[int, ...]
    log_prob: Callable[[Tensor], Tensor]
    sample: Callable[[int], object]
    round_trip: Callable[[Tensor], Tensor]
    after_step: Callable[[], object] | None = None


def ours(flow: qf.Flow, hidden: tuple[int, ...]) -> Contestant:
    """A flow of quarflow, with ``hidden`` as it was asked for."""

    def round_trip(x: Tensor) -> Tensor:
        with qf.solvers.unchecked():  # the error is reported, not judged
            return flow.transform.inverse(flow.transform(x)[0])[0]

    return Contestant(
        flow,
        sum(isinstance(m, Residual) for m in flow.modules()),
        hidden,
        # `forward` is what a training loop calls; without gradients users call `log_prob`, with its checks.
        lambda x: flow(x) if torch.is_grad_enabled() else flow.log_prob(x),
        flow.sample,
        round_trip,
    )


def quar(d: int, blocks: int, hidden: tuple[int, ...], **options: Any) -> Contestant:
    """quarflow's model, with its default options but for ``options``."""
    return ours(qf.models.quar(d, blocks=blocks, hidden=hidden, **options), hidden)


def zuko_flow(kind: str, d: int, width: int, transforms: int = TRANSFORMS) -> Contestant:
    """``zuko.flows.MAF`` or ``NSF`` with two hidden layers and their default options."""
    import zuko

    flow = getattr(zuko.flows, kind)(d, transforms=transforms, hidden_features=(width, width))

    def round_trip(x: Tensor) -> Tensor:
        transform = flow().transform
        return transform.inv(transform(x))

    return Contestant(
        flow,
        transforms,
        (width, width),
        lambda x: flow().log_prob(x),
        lambda n: flow().sample((n,)),
        round_trip,
    )


def normflows_residual(d: int, reduce_memory: bool, width: int) -> Contestant:
    """normflows' residual flow as its documentation sets it up."""
    import normflows

    flows: list[nn.Module] = []
    for _ in range(TRANSFORMS):
        net = normflows.nets.LipschitzMLP([d, width, width, d], init_zeros=True, lipschitz_const=0.9)
        flows += [normflows.flows.Residual(net, reduce_memory=reduce_memory), normflows.flows.ActNorm(d)]
    flow = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(d, trainable=False), flows)
    return Contestant(
        flow,
        TRANSFORMS,
        (width, width),
        flow.log_prob,
        flow.sample,
        lambda x: flow.forward(flow.inverse(x)),
        partial(normflows.utils.update_lipschitz, flow, 50),
    )


def parameters(module: nn.Module) -> tuple[int, int]:
    """All parameters, and those that no mask holds at zero.

    >>> parameters(nn.Linear(3, 2))
    (8, 8)
    """
    masked = 0
    for part in module.modules():
        mask = getattr(part, "mask", None)
        if isinstance(mask, Tensor) and mask.shape == getattr(part, "weight", mask[:0]).shape:
            masked += int((mask == 0).sum())
    total = sum(p.numel() for p in module.parameters())
    return total, total - masked


def matched(make: Callable[[int], Contestant], target: int) -> Contestant:
    """The contestant whose width gives it the number of parameters nearest to ``target``."""

    def size(width: int) -> int:
        return parameters(make(width).module)[0]

    top = 1
    while size(top) < target:
        top *= 2
    above = 1 + bisect_left(range(1, top), target, key=size)
    width = min((max(1, above - 1), above), key=lambda w: abs(size(w) - target))
    found = make(width)
    if abs(parameters(found.module)[0] - target) > TOLERANCE * target:
        raise ValueError(f"target: no width comes within {TOLERANCE:.0%} of {target}; the nearest is {width}.")
    return found


def contestants(d: int, hidden: tuple[int, ...]) -> dict[str, Contestant]:
    """All of them, with as many parameters as QuAR with ``hidden``."""
    reference = quar(d, TRANSFORMS, hidden)
    target, _ = parameters(reference.module)
    return {
        "QuAR": reference,
        "QuAR, sine": quar(d, TRANSFORMS, hidden, activation="sine"),
        "QuAR, 2 blocks": matched(lambda width: quar(d, 2, (width, width)), target),
        REFERENCE: matched(partial(zuko_flow, "MAF", d), target),
        "zuko NSF": matched(partial(zuko_flow, "NSF", d), target),
        "normflows residual": matched(partial(normflows_residual, d, True), target),
        "normflows residual, more memory": matched(partial(normflows_residual, d, False), target),
    }


def training_step(
    contestant: Contestant, batches: Sequence[Tensor], capturable: bool = False
) -> Callable[[], None]:
    """A step of maximum likelihood, on one batch after the other."""
    optimizer = torch.optim.Adam(contestant.module.parameters(), lr=1e-3, fused=True, capturable=capturable)
    position = 0

    def step() -> None:
        nonlocal position
        position += 1
        optimizer.zero_grad()
        loss = -contestant.log_prob(batches[position % len(batches)]).mean()
        loss.backward()
        optimizer.step()

    return step


@dataclass(frozen=True)
class Settings:
    """Sizes of the run."""

    hidden: tuple[tuple[int, tuple[int, ...]], ...]
    batch: int = 512
    rows: int = 1000
    steps: int = 100  # of training, before anything is timed
    rounds: int = 100
    sampling_rounds: int = 9


def measure(d: int, models: Mapping[str, Contestant], reference: str, settings: Settings) -> list[dict[str, Any]]:
    """A row of results for each contestant at ``d`` coordinates, with ratios to the one named ``reference``."""
    data = mixture_of_gaussians(d).sample(20 * settings.batch + settings.rows)
    data = ((data - data.mean(0)) / data.std(0)).float()
    x, *batches = data.split([settings.rows, *[settings.batch] * 20])
    steps = {}
    for name, model in models.items():
        model.module.train()
        if isinstance(model.module, qf.Flow):
            model.module.initialise(data)
        steps[name] = training_step(model, batches)
        for _ in range(settings.steps):
            steps[name]()
            if model.after_step is not None:
                model.after_step()

    def without_gradients(call: Callable[..., object], *arguments: object) -> Callable[[], float]:
        return timed(torch.no_grad()(lambda: call(*arguments)))

    seconds = {"train": interleave({k: timed(step) for k, step in steps.items()}, settings.rounds)}
    after = {k: timed(m.after_step) for k, m in models.items() if m.after_step is not None}
    between_steps = interleave(after, settings.sampling_rounds)  # and made up for after the timed steps
    for model in models.values():
        model.module.eval()
    log_prob = {k: without_gradients(m.log_prob, x) for k, m in models.items()}
    sample = {k: without_gradients(m.sample, settings.rows) for k, m in models.items()}
    seconds["log_prob"] = interleave(log_prob, settings.rounds)
    seconds["sample"] = interleave(sample, settings.sampling_rounds, warmup=1)

    rows = []
    for name, model in models.items():
        total, live = parameters(model.module)
        with torch.no_grad():
            error = (model.round_trip(x) - x).abs().max().item()
        row = {"d": d, "model": name, "transforms": model.transforms, "hidden": model.hidden}
        row |= {"parameters": total, "live": live, "round_trip": error}
        for kind, found in seconds.items():
            row[kind] = Spread.of([1e3 * s for s in found[name]])
            row[f"{kind}_ratio"] = ratio(found[name], found[reference])
        if name in between_steps:
            row["power_iterations"] = Spread.of([1e3 * s for s in between_steps[name]])
        rows.append(row)
    return rows


def show(result: dict[str, Any], reference: str = "MAF") -> str:
    """The tables of a result, in Markdown."""
    s, rows = result["settings"], result["rows"]
    ratios = f"/ {reference}"
    head = ["model", "parameters (live)", f"training step, batch {s['batch']}: ms", ratios]
    head += [f"`log_prob` of {s['rows']}: ms", ratios, f"{s['rows']} samples: ms", ratios, "round trip"]
    parts = []
    for d in dict.fromkeys(row["d"] for row in rows):
        here = [row for row in rows if row["d"] == d]
        body = [
            [
                f"{r['model']}, {r['transforms']} x {tuple(r['hidden'])}",
                f"{r['parameters']} ({r['live']})",
                *(f for k in ("train", "log_prob", "sample") for f in (r[k].median, r[f"{k}_ratio"])),
                f"{r['round_trip']:.0e}",
            ]
            for r in here
        ]
        extra = [r["power_iterations"].median for r in here if "power_iterations" in r]
        note = f"normflows' power iterations after each step: {min(extra):.1f} ms more, not in the table."
        parts += [f"d = {d}", table(head, body), note]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, saves and prints."""
    options = start(__doc__, arguments)
    settings = Settings(HIDDEN)
    if options.quick:
        settings = Settings(((2, (16, 16)),), batch=16, rows=8, steps=3, rounds=3, sampling_rounds=2)
    found = [measure(d, contestants(d, hidden), REFERENCE, settings) for d, hidden in settings.hidden]
    rows = [row for each in found for row in each]
    path = save(options, "vectors_cpu", vars(settings), rows, ["zuko", "normflows"])
    print(show(load(path)))


if __name__ == "__main__":
    main()
