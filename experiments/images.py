"""MNIST and CIFAR-10, from scratch on one card: ``python -m experiments.images mnist``.

A command that was cut (``timeout 9m``, Ctrl-C) has written its state; the same command again goes on from there. When a
run is finished its numbers are in ``results/NAME.json``, beside ``NAME_samples.png`` and ``NAME_curve.png``.
``--choose`` trains a variant of the configuration for each choice, one changed at a time, all for the same short time,
and writes their bits/dim on validation images to ``results/NAME_choices.json``: the test images have no part in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

import quarflow as qf
from experiments.drawing import COLOURS, canvas, plain, save_png
from experiments.synthetic import provenance, read_json, write_json
from quarflow import runs
from quarflow.cli import terminable
from quarflow.data.images import Images
from quarflow.graph_training import WARM_UP
from quarflow.pixels import bits_per_dim, reconstruction_error
from quarflow.solvers import unchecked
from quarflow.training import fit
from quarflow.transforms import Chain, Residual

RESULTS = Path(__file__).resolve().parent / "results"

# What differs from the presets of `quarflow train`. The limit is on time: the learning rate has decayed when it is
# over, and what is left of 25 minutes is for the test. "digits" is the twin that runs anywhere.
CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "mnist": {
        "training": {
            "max_steps": None,
            "max_seconds": 22 * 60,
            "batch_size": 128,
            "precision": "bf16",
            "patience": None,
            "evaluate_every": 500,
        },
        "run": {"validation": 1 / 12, "checkpoint_minutes": 2.0, "draws": 3},
    },
    "cifar10": {
        "training": {
            "max_steps": None,
            "max_seconds": 22 * 60,
            "batch_size": 96,
            "precision": "bf16",
            "patience": None,
            "evaluate_every": 500,
        },
        "run": {"validation": 0.05, "checkpoint_minutes": 2.0, "draws": 3},
    },
    "digits": {
        "model": {"blocks": (1, 1), "hidden": 8},
        "training": {"max_steps": 20, "precision": "bf16"},
        "run": {"draws": 2},
    },
}

# Each is the configuration with this changed.
CHOICES: dict[str, list[str]] = {
    "as it is": [],
    "learning rate 2e-3": ["training.learning_rate=2e-3"],
    "learning rate 4e-3": ["training.learning_rate=4e-3"],
    "activation: wave": ["model.activation=wave"],
    "activation: sine": ["model.activation=sine"],
    "order: channel": ["model.order=channel"],
    "no reversal": ["model.mixing=none"],
    "bound: norms": ["model.bound=gram"],
    "bound: diagonal, norms (the paper)": ["model.lipschitz=diagonal", "model.bound=gram"],
    "sigma 0.99": ["model.sigma=0.99"],
    "576 units": ["model.hidden=576"],
    "batch 64": ["training.batch_size=64"],
    "batch 256": ["training.batch_size=256"],
}


def configuration(name: str, folder: str | None, settings: Sequence[str] = ()) -> runs.Run:
    """The run of a data set.

    >>> configuration("mnist", None, ["model.order=channel"]).model["order"]
    'channel'
    """
    return runs.Run.of(name, CONFIGS[name] | {"data": {} if folder is None else {"folder": folder}}, list(settings))


def sampling(flow: qf.Flow, n: int, tests: torch.Tensor) -> dict[str, Any]:
    """``n`` draws: seconds, sweeps of the solver in each block, and how far back from where they came."""
    z = flow.base.sample(n, torch.Generator(flow.base.anchor.device).manual_seed(0))
    logit, *steps = cast("Chain", flow.transform).steps  # as `quarflow.models` makes it
    if z.is_cuda:
        torch.cuda.synchronize()
    begun, x, sweeps = time.perf_counter(), z, list[int]()
    with torch.no_grad(), unchecked():
        for step in reversed(steps):
            if isinstance(step, Residual):
                solution = step.solve(x)
                sweeps.append(int(solution.steps))
                x = solution.check(step.solver.advice).x
            else:
                x = step.inverse(x)[0]
        logit.inverse(x)
        if z.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        for step in steps:  # not from the images: in float32 a sigmoid may be 0 or 1, which has no way back
            x = step(x)[0]
    return {
        "images": n,
        "seconds": seconds,
        "sweeps_per_block": sum(sweeps) / len(sweeps),
        "most_sweeps": max(sweeps),
        "error_in_noise": (x - z).abs().max().item(),
        "error_in_images": reconstruction_error(flow, tests[:n]),
    }


def curve(log: Path) -> list[list[float]]:
    """Minutes and bits/dim on validation images, from the log of a run."""
    entries = [entry for entry in runs.read_log(log) if "validation_bpd" in entry]
    return [[round(entry["seconds"] / 60, 2), round(entry["validation_bpd"], 4)] for entry in entries]


def draw(result: dict[str, Any], path: Path) -> None:
    """The learning curve: bits/dim on validation images against minutes, and the test set's at the end."""
    figure = canvas(5.0, 3.0)
    axes = figure.subplots()
    minutes, bits = zip(*result["curve"], strict=True)
    axes.plot(minutes, bits, color=COLOURS[0], linewidth=1.2, label="validation images, averaged weights")
    test = result["test_bpd"]
    axes.axhline(test, color=COLOURS[1], linewidth=1, linestyle=":", label=f"test images: {test:.4f}")
    # The first steps are off the scale.
    axes.set_ylim(min(*bits, test) - 0.05, min(*bits, test) + max(0.5, 0.1 * min(bits)))
    axes.set_xlabel("minutes of training", fontsize=8)
    axes.set_ylabel("bits/dim", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(loc="upper right", fontsize=7, frameon=False)
    plain(axes)
    save_png(figure, path)


def final(name: str, options: argparse.Namespace) -> None:
    """The whole run, and its numbers."""
    out = options.out / name
    run = configuration(name, options.folder, options.set)
    found = runs.train(run, out, options.device, resume=(out / "state").exists(), say=print)
    if not found:  # another process writes it
        return
    flow = qf.load(out / "model.qf").to(options.device)
    images = runs.images_of(name, run.data)
    begun = time.monotonic()
    sampled = sampling(flow, min(64, len(images.test)), images.test)
    rounding = differences(flow, images)
    extra = time.monotonic() - begun
    result = {
        "test_bpd": found["test_bpd"],
        "test_bpd_se": found["test_bpd_se"],
        "test_bpd_noise_se": found["test_bpd_noise_se"],
        "validation_bpd": found["validation_bpd"],
        "gpu_minutes": found["minutes"] + (found["test_seconds"] + extra) / 60,
        "training_minutes": found["minutes"],
        "parameters": found["parameters"],
        "steps": found["steps"],
        "command": f"python -m experiments.images {name}" + "".join(f" --set {text}" for text in options.set),
        "sampling": sampled,
        "bits_from_full": rounding,
        "curve": curve(out / "log.jsonl"),
        "config": configuration(name, None, options.set).to_toml(),  # where the files lay is nobody's concern
        **provenance(options.device),
    }
    options.results.mkdir(parents=True, exist_ok=True)
    write_json(options.results / f"{name}.json", result)
    shutil.copy(out / "samples.png", options.results / f"{name}_samples.png")
    draw(result, options.results / f"{name}_curve.png")
    print(f"{name}: {found['test_bpd']:.4f} ± {found['test_bpd_se']:.4f} bits/dim; {options.results / name}.json")


def differences(flow: qf.Flow, images: Images, n: int = 2048) -> dict[str, float]:
    """What faster products cost in bits/dim, on the same test images and noise."""
    test = images.test[:n]
    full = bits_per_dim(flow, test).bpd
    return {kind: bits_per_dim(flow, test, precision=kind).bpd - full for kind in ("tf32", "bf16")}


def choose(name: str, options: argparse.Namespace) -> None:
    """A short run of each variant; those that are finished are kept."""
    path = options.results / f"{name}_choices.json"
    options.results.mkdir(parents=True, exist_ok=True)
    done = {row["choice"]: row for row in (read_json(path) or {"rows": []})["rows"]}
    for choice, settings in CHOICES.items():
        if choice in done:
            continue
        gc.collect()  # the graphs of the variant before hold its memory
        limit = ["training.max_steps=none", f"training.max_seconds={options.seconds}"]
        run = configuration(name, options.folder, [*options.set, *limit, *settings])
        images = runs.images_of(name, run.data)
        flow = run.build(images.shape).to(options.device)
        found: dict[str, Any]
        how: dict[str, Any] = {"recompute": run.recompute, "graph": run.graph and options.device == "cuda"}
        how |= {"progress": False, **dataclasses.asdict(run.training)}
        try:
            # Kernels are compiled at their first use, which shall not count.
            few = how | {"max_steps": WARM_UP, "max_seconds": None}
            fit(run.build(images.shape).to(options.device), images.train[:2000], validation=0.5, **few)
            history = fit(flow, images.train, validation=run.validation, **how)
            nats = history.best_validation or float("nan")
            found = {"validation_bpd": runs.bits(flow, nats), "steps": history.steps[-1] if history.steps else 0}
            if history.stopped == "interrupted":
                raise KeyboardInterrupt
        except ArithmeticError as error:  # a variant that diverges is a result, too
            found = {"validation_bpd": None, "steps": None, "failed": str(error)}
        done[choice] = {"choice": choice, "settings": settings, **found}
        print(choice, found, flush=True)
        rows, command = list(done.values()), f"python -m experiments.images {name} --choose --seconds {options.seconds}"
        command += "".join(f" --set {text}" for text in options.set)
        write_json(path, {"seconds": options.seconds, "rows": rows, "command": command, **provenance(options.device)})


def main(arguments: Sequence[str] | None = None) -> None:
    """One data set: the whole run, or the choices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=list(CONFIGS))
    parser.add_argument("--choose", action="store_true", help="short runs of variants, on validation images")
    parser.add_argument("--seconds", type=float, default=100.0, help="of each of these")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="an option of the run")
    parser.add_argument("--folder", help="where the original files are")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    options = parser.parse_args(arguments)
    try:
        with terminable():
            (choose if options.choose else final)(options.name, options)
    except KeyboardInterrupt:
        print("Interrupted: the same command goes on from here.", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
