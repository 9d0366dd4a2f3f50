"""At which learning rates and batch sizes the flows of table 1 train.

The paper says that QuAR trains at a learning rate of 1e-3 and 64 images a batch, with Adam, where Glow needs 2e-5 and
512. Here the models of `table1` take the same few steps of Adam at each of several rates and both batch sizes, with
nothing that would hide an instability: no clipping, no warm-up, no average of the weights. The rate falls to zero as a
cosine. Each step's loss is looked at; what counts is bits/dim on held-out images with the weights of the end.

Runs are short. They are written to ``OUT/stability_DATA.json`` one by one; the same command goes on with the rest.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.drawing import COLOURS, canvas, plain, save_png
from experiments.jobs import Mismatch
from experiments.synthetic import provenance, read_json, write_json
from experiments.table1 import SYSTEMS, Table, command
from quarflow.checks import check_positive
from quarflow.data.images import Images
from quarflow.runs import bits, images_of
from quarflow.training import TrainingDiverged, fit

NAME = "stability"
RATES = (2e-5, 2e-4, 1e-3, 1e-2, 1e-1)
BATCHES = (64, 512)
CLAIMED = {"quar": (1e-3, 64), "glow": (2e-5, 512)}  # by the paper: the rate and batch size of each
CLAIM = "QuAR trains at learning rate 1e-3, batch 64, with Adam, where Glow needs 2e-5 and 512."
NEAR = 0.1  # bits/dim from a system's best that still count as trained


@dataclass(frozen=True)
class Stability:
    """What to try.

    >>> Stability(rates=(1e-3,)).command()
    'quarflow reproduce stability --rates 0.001'
    """

    data: str = "digits"
    models: tuple[str, ...] = ("quar", "glow", "flowpp")
    steps: int = 200
    rates: tuple[float, ...] = RATES
    precision: str = "full"
    graph: bool = True  # on a GPU
    device: str = "cpu"
    folder: str | None = None
    download: bool = False

    def __post_init__(self) -> None:
        Table((self.data,), self.models, steps=self.steps, precision=self.precision)  # has these checks
        for name in ("models", "rates"):
            if not getattr(self, name):
                raise ValueError(f"{name}: expected one or more; got none.")
        for rate in self.rates:
            check_positive("rates", rate)

    def command(self) -> str:
        """The command that makes it."""
        return command(NAME, self)


def reproduce(
    what: Stability, out: Path, fresh: bool = False, say: Callable[[str], object] = lambda text: None
) -> list[Path]:
    """Trains what is not there; writes ``stability_DATA.json`` and ``.png``."""
    path = out / f"{NAME}_{what.data}.json"
    out.mkdir(parents=True, exist_ok=True)
    settings = {"data": what.data, "steps": what.steps, "precision": what.precision}
    result = (None if fresh else read_json(path)) or {"figure": NAME, "settings": settings, "runs": []}
    if result["settings"] != settings:
        raise Mismatch(f"{path}: runs with {result['settings']} are there. Give these, another --out, or --fresh.")
    images: Images | None = None
    for system in what.models:
        for batch in BATCHES:
            for rate in what.rates:
                if found(result, system, rate, batch) is not None:
                    continue
                images = images or images_of(what.data, {"folder": what.folder, "download": what.download})
                row = trained(what, images, system, rate, batch)
                say(", ".join(f"{name} {value}" for name, value in row.items()))
                result["runs"].append(row | {"command": what.command(), **provenance(what.device)})
                write_json(path, result)
    draw(result, path.with_suffix(".png"))
    return [path, path.with_suffix(".png")]


def found(result: Mapping[str, Any], system: str, rate: float, batch: int) -> dict[str, Any] | None:
    """The run of a system at a rate and a batch size, if it is there."""
    wanted = (system, rate, batch)
    return next((row for row in result["runs"] if (row["system"], row["rate"], row["batch"]) == wanted), None)


def trained(what: Stability, images: Images, system: str, rate: float, batch: int) -> dict[str, Any]:
    """One run: bits/dim of held-out images before and after, and the highest of a batch in between."""
    run = Table((what.data,), steps=what.steps).run(what.data, system, "published")
    gc.collect()  # the graph of the run before holds its memory
    flow = run.build(images.shape).to(what.device)
    begun, diverged = time.monotonic(), None
    try:
        history = fit(
            flow,
            images.train,
            validation=run.validation,
            max_steps=what.steps,
            batch_size=batch,
            learning_rate=rate,
            warmup=0.0,
            clip=None,
            ema=0.0,
            patience=None,
            evaluate_every=what.steps,
            precision=what.precision,
            graph=what.graph and what.device == "cuda",
            progress=lambda trainer: trainer.log(),
        )
    except TrainingDiverged as error:
        history, diverged = error.history, str(error).partition("\n")[0]
    if diverged is None and not math.isfinite(history.validation[-1]):
        diverged = "held-out images have no finite density"
    if history.stopped == "interrupted":
        raise KeyboardInterrupt
    losses = [bits(flow, -loss) for loss in history.loss]
    last = losses[-max(1, len(losses) // 10) :]
    return {
        "system": system,
        "rate": rate,
        "batch": batch,
        "validation_bpd": None if diverged else bits(flow, history.validation[-1]),
        "before_bpd": bits(flow, history.validation[0]),
        "train_bpd": math.fsum(last) / len(last) if last and not diverged else None,
        "highest_bpd": max(losses, default=None),
        "steps": history.steps[-1] if history.steps else 0,
        "diverged": diverged,
        "seconds": time.monotonic() - begun,
    }


def worse(row: Mapping[str, Any]) -> bool:
    """Whether a run diverged, or ended with more bits/dim than it began with."""
    return row["validation_bpd"] is None or row["validation_bpd"] >= row["before_bpd"]


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """What the runs say about the claim, in words that follow from the numbers."""
    said = []
    for system in dict.fromkeys(row["system"] for row in result["runs"]):
        own = [row for row in result["runs"] if row["system"] == system]
        kept = [row for row in own if not worse(row)]
        bad = len(own) - len(kept)
        text = f"*{SYSTEMS[system].label}*: {bad} of {len(own)} runs diverge, or end worse than they begin"
        if wild := [row for row in kept if row["highest_bpd"] > 2 * row["before_bpd"]]:
            text += f"; in {len(wild)} of the others a step is above twice the bits/dim of the beginning"
        if kept:
            best = min(kept, key=lambda row: row["validation_bpd"])
            text += f"; the best ends at {best['validation_bpd']:.2f} bits/dim ({_at(best)})"
            for batch in dict.fromkeys(row["batch"] for row in own):
                limit = best["validation_bpd"] + NEAR
                near = [f"{r['rate']:g}" for r in kept if r["batch"] == batch and r["validation_bpd"] <= limit]
                text += f"; within {NEAR} of that at batch {batch}: {', '.join(near) or 'none'}"
        if system in CLAIMED and (row := found(result, system, *CLAIMED[system])):
            text += f"; the paper's, {_at(row)}: {_end(row)}"
        said.append(text + ".")
    quar, glow = (found(result, system, *CLAIMED["quar"]) for system in ("quar", "glow"))
    slow = found(result, "glow", *CLAIMED["glow"])
    if quar and glow and slow:
        holds = not worse(quar), worse(glow) or (not worse(slow) and slow["validation_bpd"] < glow["validation_bpd"])
        first, second = ("holds" if each else "does not hold" for each in holds)
        said.append(
            f'*"{CLAIM}"* That QuAR trains there {first}. That Glow needs the other {second}: in as many steps it ends '
            f"at {_end(glow)} with QuAR's rate and batch, at {_end(slow)} with its own."
        )
    return said


def _at(row: Mapping[str, Any]) -> str:
    return f"{row['rate']:g}, batch {row['batch']}"


def _end(row: Mapping[str, Any]) -> str:
    return "divergence" if row["validation_bpd"] is None else f"{row['validation_bpd']:.2f} bits/dim"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Bits/dim of held-out images after training against the learning rate: a panel for each system."""
    systems = list(dict.fromkeys(row["system"] for row in result["runs"]))
    figure = canvas(2.6 * len(systems), 2.8)
    kept = [row["validation_bpd"] for row in result["runs"] if not worse(row)]
    low, high = (min(kept), max(kept)) if kept else (0.0, 8.0)
    top = high + 0.15 * (high - low + 0.1)  # what diverged, or ended worse than it began, is here
    for panel, system in zip(figure.subplots(1, len(systems), squeeze=False, sharey=True)[0], systems, strict=True):
        for batch, colour in zip(BATCHES, COLOURS, strict=False):
            own = sorted((r for r in result["runs"] if (r["system"], r["batch"]) == (system, batch)), key=_rate)
            good, bad = [r for r in own if not worse(r)], [r for r in own if worse(r)]
            panel.plot(
                [r["rate"] for r in good],
                [r["validation_bpd"] for r in good],
                "o-",
                color=colour,
                markersize=3,
                linewidth=1.2,
                label=f"batch {batch}",
            )
            shift = 1.15 if batch == BATCHES[0] else 1 / 1.15  # beside each other
            panel.plot([shift * r["rate"] for r in bad], [top] * len(bad), "x", color=colour, markersize=5)
        claimed = found(result, system, *CLAIMED[system]) if system in CLAIMED else None
        if claimed is not None:
            height = top if worse(claimed) else claimed["validation_bpd"]
            at = [claimed["rate"]], [height]
            panel.plot(*at, "s", color="black", fillstyle="none", markersize=9, label="the paper's")
        panel.set_xscale("log")
        panel.set_title(SYSTEMS[system].label, fontsize=9)
        panel.set_xlabel("learning rate", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.set_ylim(low - 0.1 * (high - low + 0.1), top + 0.08 * (high - low + 0.1))
        panel.legend(fontsize=6, frameon=False)
        plain(panel)
    figure.axes[0].set_ylabel(f"bits/dim after {result['settings']['steps']} steps", fontsize=8)
    save_png(figure, path)


def _rate(row: Mapping[str, Any]) -> float:
    return float(row["rate"])
