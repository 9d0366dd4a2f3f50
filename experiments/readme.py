"""The numbers of README.md and of docs/which_flow.md, from the results that are committed.

Everything behind the mark is written by ``python -m experiments.readme``, so that no number or verdict in it can be
older than its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import figure2, figure3, figures4_6, stability, table1
from experiments.synthetic import read_json

FOLDER = Path(__file__).resolve().parent
MARK = "<!-- results: written by `python -m experiments.readme` -->"
MODULES = (figure2, figure3, figures4_6)
IMAGES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
BENCHMARKS = FOLDER.parent / "benchmarks" / "results"
WHICH = FOLDER.parent / "docs" / "which_flow.md"
COSTS = ("QuAR", "zuko MAF", "zuko NSF", "normflows residual")  # of benchmarks/results/vectors_cpu.json
AS_IT_IS = "as it is"  # the choice that changes nothing


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def with_error(model: dict[str, Any], key: str, digits: int) -> str:
    """A mean over seeds with its standard error, if there is one.

    >>> with_error({"kl": 0.1234, "kl_se": 0.01}, "kl", 3), with_error({"kl": 0.1, "kl_se": None}, "kl", 2)
    ('0.123 ± 0.010', '0.10')
    """
    error = model.get(f"{key}_se")
    return f"{model[key]:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def better(one: dict[str, Any], other: dict[str, Any], key: str, sign: int) -> bool | None:
    """Whether ``one`` has more (``sign`` 1) or less (-1) by two standard errors; None where they are too close.

    >>> a, b = {"kl": 1.0, "kl_se": 0.1}, {"kl": 2.0, "kl_se": 0.1}
    >>> better(a, b, "kl", -1), better(a, b, "kl", 1), better(a, a, "kl", 1)
    (True, False, None)
    """
    gap = sign * (one[key] - other[key])
    error = ((one.get(f"{key}_se") or 0.0) ** 2 + (other.get(f"{key}_se") or 0.0) ** 2) ** 0.5
    return None if abs(gap) <= 2 * error else gap > 0


def verdict(found: Mapping[str, bool | None]) -> str:
    """In a word whether a claim holds, and by which measures.

    >>> verdict({"mass": True, "rank": None})
    'Holds in part: by mass; undecided by rank.'
    """
    words = {True: "by {}", False: "not by {}", None: "undecided by {}"}
    parts = [
        words[answer].format(", ".join(names))
        for answer in words
        if (names := [name for name, each in found.items() if each is answer])
    ]
    answers = set(found.values())
    head = "Holds" if answers == {True} else "Does not hold" if answers == {False} else "Holds in part"
    head = "Undecided" if answers == {None} else "Does not hold" if True not in answers else head
    return f"{head}: {'; '.join(parts)}."


def of_figure2(result: dict[str, Any]) -> str:
    """Table and verdict of figure 2."""
    models, trick = result["models"], result["trick"]
    head = ["block", "parameters", "test nats", "below the true density", "mass where there is none", "step, ms"]
    rows = [
        [
            model["label"],
            f"{model['parameters']:,}",
            with_error(model, "test_nats", 4),
            with_error(model, "kl_nats", 4),
            with_error(model, "mass_outside", 3),
            f"{model['step_ms']:.1f}",
        ]
        for model in models.values()
    ]
    rows.append(["the true density", "", f"{result['true_nats']:.4f}", "", "", ""])
    error = "" if trick["gap_nats_se"] is None else f" ± {trick['gap_nats_se']:.4f}"
    won, size = sum(gap > 0 for gap in trick["gaps"]), models["trick"]["parameters"]
    verdicts = [
        f"*{figure2.CLAIM}* {'Holds' if won == len(trick['gaps']) else 'Does not hold in every seed'}: with the trick "
        f"the test log-likelihood is {trick['gap_nats']:.4f}{error} nats higher, and higher in {won} of "
        f"{len(trick['gaps'])} seeds, for {trick['parameters_added']} parameter more.",
        f"*One block of \"more than 100K parameters\".* {'Holds' if size > 100_000 else 'Does not hold'}: the sizes "
        f"1-128-128-128-1 that the appendix lists, with the affine transforms, make {size:,}.",
    ]
    return paragraphs(table(head, rows), bullets(verdicts))


def of_figure3(result: dict[str, Any]) -> str:
    """Tables and verdicts of figure 3."""
    models = result["models"]
    head = ["model", "parameters (live)", "test nats", "KL to the truth", "step, ms"]
    rows = [
        [
            model["label"],
            f"{model['parameters']:,} ({model['live_parameters']:,})",
            with_error(model, "test_nats", 4),
            with_error(model, "kl_nats", 4),
            f"{model['step_ms']:.0f}",
        ]
        for model in models.values()
    ]
    rows.append(["the true density", "", f"{result['true_nats']:.4f}", "0", ""])
    keys = {
        "sparse_kl": ("KL(p, q) there", -1, 4),
        "sparse_reverse_kl": ("KL(q, p) there", -1, 4),
        "sparse_mass": ("mass there", 0, 4),
        "sparse_log_error": ("median error of log q there", -1, 2),
        "sparse_rank": ("rank correlation there", 1, 3),
    }
    sparse_head = ["model", *(text for text, _, _ in keys.values())]
    sparse_rows = [
        [model["label"], *(with_error(model, key, digits) for key, (_, _, digits) in keys.items())]
        for model in models.values()
    ]
    verdicts = [within(model) for name, model in models.items() if name.startswith("quar")]
    if "maf" in models:
        for name in ("residual", "quar"):
            if name in models:
                found = {
                    text: better(models[name], models["maf"], key, sign)
                    for key, (text, sign, _) in keys.items()
                    if sign
                }
                verdicts.append(f"*{figure3.CLAIM} ({models[name]['label']})* {verdict(found)}")
    note = f"The sparse region holds {100 * models[next(iter(models))]['sparse_true_mass']:.1f}% of the data:"
    return paragraphs(table(head, rows), note, table(sparse_head, sparse_rows), bullets(verdicts))


def within(model: dict[str, Any], limit: float = 0.02) -> str:
    """Whether a model is as near to the true density as we ask for."""
    answer = "Yes" if model["kl_nats"] <= limit else "No"
    return f"Is {model['label']} within {limit} nats of the true density? {answer}: {with_error(model, 'kl_nats', 4)}."


def of_figures4_6(result: dict[str, Any]) -> str:
    """Table and verdicts of figures 4 to 6."""
    models = result["models"]
    head = ["model", "path", "detour", "largest move", "log stretch", "volume share"]
    rows = [
        [
            model["label"],
            f"{model['path']:.2f}",
            f"{model['detour']:.2f}",
            f"{model['largest_move']:.2f}",
            f"{model['log_stretch']:.2f}",
            f"{model['volume_share']:.2f}",
        ]
        for model in models.values()
    ]
    verdicts = []
    if {"maf", "quar", "residual"} <= set(models):
        maf, others = models["maf"], [models["quar"], models["residual"]]
        smooth = {
            text: all(other[key] < maf[key] for other in others)
            for key, text in (
                ("path", "path"),
                ("detour", "detour"),
                ("largest_move", "largest move"),
                ("log_stretch", "log stretch"),
            )
        }
        volume = {"volume share": all(other["volume_share"] > maf["volume_share"] for other in others)}
        verdicts = [
            f"*{claim}* {verdict(found)}"
            for claim, found in zip(figures4_6.CLAIMS, (smooth, volume), strict=True)
        ]
    return paragraphs(table(head, rows), bullets(verdicts))


SHOW = {figure2.NAME: of_figure2, figure3.NAME: of_figure3, figures4_6.NAME: of_figures4_6}


def paragraphs(*parts: str) -> str:
    """Apart by empty lines."""
    return "\n\n".join(part for part in parts if part)


def bullets(lines: Iterable[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"* {line}" for line in lines)


def pictures(result: dict[str, Any]) -> str:
    """Those of a figure, one below the other."""
    if result["figure"] != figures4_6.NAME:
        return f"![{result['figure']}](results/{result['figure']}.png)"
    each = result["models"].values()
    return "\n\n".join(f"![Modes, {model['label']}](results/{model['picture']})" for model in each)


def section(result: dict[str, Any]) -> str:
    """What is known of a figure: command, claims and numbers, picture, and where they are from."""
    settings, title = result["settings"], result["figure"].replace("figures", "Figures ").replace("figure", "Figure ")
    seeds = "seed 0" if settings["seeds"] == 1 else f"seeds 0 to {settings['seeds'] - 1}"
    where = (
        f"{settings['steps']:,} updates of {settings['batch_size']} points, {seeds}, learning rate "
        f"{settings['learning_rate']}; {settings['test_points']:,} test points. {origin(result)}"
    )
    if "step_ms_hardware" in result:
        where += f" Steps timed in turns on {result['step_ms_hardware']}."
    return paragraphs(
        f"## {title}", f"`{result['command']}`", SHOW[result["figure"]](result), pictures(result), where
    )


def of_table1(folder: Path) -> str:
    """Table 1: who has the lowest bits/dim, how they came down, and samples."""
    result = read_json(folder / f"{table1.NAME}.json")
    if not result:
        return ""
    found = dict(table1.rows(result))
    lines = [
        f"*Lowest on {IMAGES.get(data, data)}, {settings} settings:* {lowest(own)}"
        for data in result
        for settings in table1.SETTINGS
        if len(own := {n[1]: row for n, row in found.items() if n[::2] == (data, settings) and row["test_bpd"]}) > 1
    ]
    drawn = [f"{table1.NAME}.png", *(path.name for path in sorted(folder.glob(f"{table1.NAME}_*_samples.png")))]
    shown = [f"![Table 1](results/{name})" for name in drawn]
    commands = dict.fromkeys(f"`{row['command']}`" for row in found.values())
    where = dict.fromkeys(origin(row) for row in found.values())
    of_samples = "A column for each of " + ", ".join(system.label for system in table1.SYSTEMS.values())
    of_samples += ", a row for the published settings and one for the engine's, as far as they are finished."
    return paragraphs(
        "## Results of table 1",
        "; ".join(commands),
        table1.markdown(result),
        bullets(lines),
        shown[0],
        *([of_samples, *shown[1:]] if shown[1:] else []),
        " ".join(where),
    )


def of_stability(folder: Path) -> str:
    """Who trains at which rates and batch sizes, for each data set."""
    parts = []
    for path in sorted(folder.glob(f"{stability.NAME}_*.json")):
        result = read_json(path) or {}
        steps, data = result["settings"]["steps"], result["settings"]["data"]
        where = dict.fromkeys(origin(row) for row in result["runs"])
        parts += [
            f"## Stability on {IMAGES.get(data, data)}",
            "; ".join(dict.fromkeys(f"`{row['command']}`" for row in result["runs"])),
            f"Bits/dim of held-out images after {steps} steps. A cross is a run that diverged, or ended worse than it "
            "began.",
            f"![Stability on {data}](results/{path.stem}.png)",
            bullets(stability.verdicts(result)),
            " ".join(where),
        ]
    return paragraphs(*parts)


def lowest(found: Mapping[str, dict[str, Any]]) -> str:
    """Who has the lowest bits/dim, and whether by more than two standard errors.

    >>> found = {"glow": {"test_bpd": 1.2, "test_bpd_se": 0.01}, "quar": {"test_bpd": 1.0, "test_bpd_se": 0.01}}
    >>> lowest(found)
    'QuAR, 1.000 ± 0.010; then Glow, 1.200 ± 0.010.'
    """
    names = sorted(found, key=lambda name: found[name]["test_bpd"])
    said = [f"{table1.SYSTEMS[name].label}, {with_error(found[name], 'test_bpd', 3)}" for name in names]
    close = better(found[names[0]], found[names[1]], "test_bpd", -1) is None
    return f"{said[0]}; {'within two standard errors' if close else 'then'} {'; '.join(said[1:])}."


def of_images(name: str, folder: Path) -> str:
    """What is known of a data set of images: the result from scratch, pictures, and which choices helped."""
    result, choices = read_json(folder / f"{name}.json"), read_json(folder / f"{name}_choices.json")
    if not (result or choices):
        return ""
    parts = [f"## {IMAGES[name]}"]
    if result:
        sampled, faster = result["sampling"], result["bits_from_full"]
        head = ["test bits/dim", "the paper's, 300 epochs", "parameters", "steps", "minutes to train", "with the test"]
        row = [
            with_error(result, "test_bpd", 4),
            f"{table1.SYSTEMS['quar'].bpd[name]:.3f}",
            f"{result['parameters']:,}",
            f"{result['steps']:,}",
            f"{result['training_minutes']:.1f}",
            f"{result['gpu_minutes']:.1f}",
        ]
        noise = result["test_bpd_noise_se"]
        lines = [
            "The error is over images" + ("." if noise is None else f"; over draws of the noise it is {noise:.5f}."),
            f"On validation images, which chose the weights: {result['validation_bpd']:.4f}.",
            f"{sampled['images']} draws take {sampled['seconds']:.2f} s: {sampled['sweeps_per_block']:.1f} sweeps in a "
            f"block on average, {sampled['most_sweeps']} at most. The way back to their noise is off by at most "
            f"{sampled['error_in_noise']:.1e}; test images come back to {sampled['error_in_images']:.1e}.",
            "Faster products move the bits/dim of the same images and noise by "
            + ", ".join(f"{bits:+.5f} ({kind})" for kind, bits in faster.items())
            + ".",
        ]
        drawn = [f"![{IMAGES[name]}, {what}](results/{name}_{what}.png)" for what in ("curve", "samples")]
        parts += [f"`{result['command']}`", table(head, [row]), bullets(lines), *drawn, origin(result)]
    return paragraphs(*parts, of_choices(choices) if choices else "")


def of_choices(result: dict[str, Any]) -> str:
    """What each change of the configuration does to bits/dim on validation images."""
    base = next((row["validation_bpd"] for row in result["rows"] if row["choice"] == AS_IT_IS), None)
    rows = [
        [row["choice"], "diverged", "", ""]
        if row["validation_bpd"] is None
        else [
            row["choice"],
            f"{row['validation_bpd']:.4f}",
            f"{row['validation_bpd'] - base:+.4f}" if base is not None and row["choice"] != AS_IT_IS else "",
            f"{row['steps']:,}",
        ]
        for row in result["rows"]
    ]
    head = ["one change", "validation bits/dim", "change of it", "steps"]
    said = f"What helps, in {result['seconds']:.0f} s of training for each: `{result['command']}`"
    return paragraphs(said, table(head, rows), origin(result))


def origin(result: dict[str, Any]) -> str:
    """Where a result is from."""
    return f"Run on {result['hardware']}; {result['versions']}; {result['date']}; commit `{result['commit']}`."


def with_results(text: str, folder: Path = FOLDER / "results") -> str:
    """The text of the README, with the results of ``folder`` behind the mark."""
    found = [read_json(folder / f"{module.NAME}.json") for module in MODULES]
    parts = [section(result) for result in found if result]
    parts += [of_table1(folder), of_stability(folder), *(of_images(name, folder) for name in IMAGES)]
    return paragraphs(text.partition(MARK)[0] + MARK, *parts) + "\n"


def which_flow(text: str, results: Path = FOLDER / "results", benchmarks: Path = BENCHMARKS) -> str:
    """The text of docs/which_flow.md, with figures of results behind the mark."""
    parts = [of_densities(results), of_costs(benchmarks), of_tables(benchmarks), of_outliers(benchmarks)]
    parts.append(of_pictures(results))
    return paragraphs(text.partition(MARK)[0] + MARK, *parts) + "\n"


def of_densities(folder: Path) -> str:
    """Who comes nearest to a density that is known: figure 3."""
    result = read_json(folder / f"{figure3.NAME}.json")
    if not result:
        return ""
    models = sorted(result["models"].values(), key=lambda model: model["kl_nats"])
    rows = [
        [
            model["label"],
            with_error(model, "kl_nats", 4),
            with_error(model, "sparse_log_error", 2),
            f"{model['step_ms']:.0f}",
        ]
        for model in models
    ]
    head = ["model", "nats below the true density", "median error of log q in sparse places", "step, ms"]
    said = (
        f"Nearest is {models[0]['label']}. All have about as many parameters and the same number of steps: "
        "[experiments](../experiments/README.md#figure-3)."
    )
    return paragraphs("## How near to a density that is known", table(head, rows), said, origin(result))


def of_costs(folder: Path) -> str:
    """Milliseconds of a step, of densities, of draws: benchmarks.vectors_cpu."""
    result = read_json(folder / "vectors_cpu.json")
    if not result:
        return ""
    own = [row for row in result["rows"] if row["model"] in COSTS]
    of = {(row["d"], row["model"]): row for row in own}
    kinds = {"train": "training step", "log_prob": "`log_prob`", "sample": "draws"}
    rows = [
        [str(row["d"]), row["model"], *(f"{row[kind]['median']:.1f}" for kind in kinds), f"{row['round_trip']:.0e}"]
        for row in own
    ]
    counts = list(dict.fromkeys(row["d"] for row in own))
    said = [
        f"Least time of {text} with {', '.join(map(str, counts))} columns: "
        + ", ".join(min(COSTS, key=lambda name: float(of[d, name][kind]["median"])) for d in counts)
        + "."
        for kind, text in kinds.items()
    ]
    settings = result["settings"]
    head = ["columns", "model", *(f"{text}, ms" for text in kinds.values()), "error there and back"]
    note = (
        f"Equal numbers of parameters; a step has {settings['batch']} rows, the rest {settings['rows']}; one thread: "
        "[benchmarks](../benchmarks/README.md#vectors_cpu)."
    )
    return paragraphs("## What it costs", table(head, rows), bullets(said), note, benchmarked(result))


def of_tables(folder: Path) -> str:
    """Held-out likelihood of real tables: benchmarks.tabular, as far as it is there."""
    parts = []
    result = read_json(folder / "tabular.json") or {}
    if rows := result.get("rows"):
        names, models = (list(dict.fromkeys(row[key] for row in rows)) for key in ("data", "model"))
        of = {(row["data"], row["model"]): row for row in rows}
        best = {row["data"]: row["model"] for row in sorted(rows, key=lambda row: float(row["test_nats"]))}
        cells = [[with_error(of[n, m], "test_nats", 2) if (n, m) in of else "" for m in models] for n in names]
        wins = [f"{model} on {count}" for model in models if (count := list(best.values()).count(model))]
        said = f"Highest of {len(names)} tables: {', '.join(wins)}."
        parts += [table(["held-out nats", *models], [[n, *each] for n, each in zip(names, cells, strict=True)]), said]
    if variants := result.get("power_gpu"):
        top = max(variants, key=lambda row: row["test_nats"])
        plain = max((r for r in variants if r["model"].startswith("plain")), key=lambda r: r["test_nats"], default=None)
        said = f"All of POWER on a GPU: {with_error(top, 'test_nats', 3)} nats with QuAR's variant *{top['model']}*"
        said += f", {with_error(plain, 'test_nats', 3)} with *{plain['model']}*" if plain else ""
        parts.append(f"{said}: [benchmarks](../benchmarks/README.md#tabular).")
    return paragraphs("## Tables", *parts, benchmarked(result)) if parts else ""


def of_outliers(folder: Path) -> str:
    """Outliers found by a fit to inliers: benchmarks.outliers."""
    result = read_json(folder / "outliers.json")
    if not result:
        return ""
    of: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        of.setdefault(row["model"], []).append(row)
    keys = ("auc", "average_precision", "seconds")
    means = {model: [sum(row[key] for row in own) / len(own) for key in keys] for model, own in of.items()}
    rows = [
        [model, f"{auc:.3f}", f"{precision:.3f}", f"{seconds:.1f}"]
        for model, (auc, precision, seconds) in sorted(means.items(), key=lambda item: -item[1][0])
    ]
    sets = len({row["data"] for row in result["rows"]})
    said = f"Means over {sets} sets and all seeds; set by set in [benchmarks](../benchmarks/README.md#outliers)."
    head = ["model", "ROC AUC", "average precision", "seconds to fit"]
    return paragraphs("## Outliers", table(head, rows), said, benchmarked(result))


def of_pictures(folder: Path) -> str:
    """Images: table 1 and stability, as far as they are there."""
    result, parts = read_json(folder / f"{table1.NAME}.json"), list[str]()
    if result:
        rows = [
            [
                IMAGES.get(data, data),
                result[data][system]["label"],
                with_error(row, "test_bpd", 3) if row["test_bpd"] else "diverged",
                f"{row['parameters']:,}",
                f"{row['minutes']:.1f}",
                f"{row['step_ms']:.0f}",
                "" if row["sample_ms"] is None else f"{row['sample_ms']:.1f}",
            ]
            for (data, system, settings), row in table1.rows(result)
            if settings == table1.SETTINGS[0]
        ]
        head = ["data", "model", "bits/dim", "parameters", "minutes", "step, ms", "a draw, ms"]
        parts += [table(head, rows), "All of it: [experiments](../experiments/README.md#results-of-table-1)."]
    for path in sorted(folder.glob(f"{stability.NAME}_*.json")):
        found = read_json(path) or {}
        data = found["settings"]["data"]
        parts += [f"Which rates and batches train, on {IMAGES.get(data, data)}:", bullets(stability.verdicts(found))]
    return paragraphs("## Images", *parts) if parts else ""


def benchmarked(result: Mapping[str, Any]) -> str:
    """Where a benchmark's result is from."""
    on = f"{result['gpu']}; {result['cpu']}" if result.get("gpu") else result["cpu"]
    return f"Run on {on}; torch {result['torch']}; {result['date'][:10]}; commit `{result['commit']}`."


def main() -> None:
    """Writes them."""
    for path, written in ((FOLDER / "README.md", with_results), (WHICH, which_flow)):
        path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main()
