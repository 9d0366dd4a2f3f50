"""The report of a model of a table: its figures, what counts as held out, and the page, also in a browser."""

import json
import math
import shutil
import signal
import subprocess
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import quarflow as qf
from quarflow.cli import app
from quarflow.table_files import draw, writing
from quarflow.table_flow import fit_table
from quarflow.tables import Schema, as_table

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")
stats = pytest.importorskip("scipy.stats")

from quarflow import report  # noqa: E402
from quarflow.peers import peers  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<script>alert('x')</script>"
QUICK = {"max_steps": 30, "model_options": {"blocks": 2, "hidden": (8,)}}


def rows(n, seed=0):
    """Numbers, whole numbers, categories, bounds, a context column, and names that are no good HTML."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(["flat", "house & garden", "</svg><img src=http://x.example>"], n, p=[0.5, 0.3, 0.2])
    size = rng.normal(5, 1, n) + 3 * (kind == "flat")
    return {
        "kind": kind.astype(object),
        EVIL: size,
        "rooms": rng.poisson(2, n).astype(float),
        "price": np.exp(0.3 * size + 0.1 * rng.normal(size=n)),
        "year": rng.integers(2000, 2010, n).astype(float),
    }


def put(path, table):
    with writing(path) as write:
        write(table)
    return path


def command(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def said(done):
    """Everything printed, without the frame of an error."""
    return " ".join("".join(c for c in done.output if c not in "│╭╮╰╯─").split())


def figures(flow, table, tmp_path, **options):
    """What a report says of a table, and its page."""
    data = put(tmp_path / "t.csv", table)
    found = report.write(flow, str(data), tmp_path / "r.html", **options)
    return found, (tmp_path / "r.html").read_text()


@pytest.fixture(scope="module", name="fitted")
def _fitted(tmp_path_factory):
    """A model of 300 rows from the command line, the report of these, and its page."""
    folder = tmp_path_factory.mktemp("report")
    data, model, out = put(folder / "t.csv", rows(300)), folder / "m.qf", folder / "r.html"
    fit = command("fit", data, "-o", model, "--context", "year", "--bounds", "price=0:", "--max-steps", 60)
    assert fit.exit_code == 0, fit.output
    done = command("report", model, data, "-o", out, "--json")
    assert done.exit_code == 0, done.output
    return model, json.loads(done.stdout), out


class Page(HTMLParser):
    """Tags, attributes and text of a page; an error where tags do not close in order."""

    VOID = ("meta", "path", "rect", "circle", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


def test_the_page_is_whole_and_refers_to_nothing_outside(fitted):
    text = fitted[2].read_text()
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "img", "iframe", "object", "embed", "a", "image", "use"} & {*page.tags}
    for tag, name, value in page.attributes:
        assert name not in ("src", "href", "xlink:href", "srcset", "data", "action"), (tag, name, value)
        assert not name.startswith("on"), (tag, name, value)
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert not any(word in style for word in ("url(", "@import", "@font-face", "http"))
    assert "prefers-color-scheme: dark" in style
    assert ("meta", "content", "width=device-width, initial-scale=1") in page.attributes
    sections = [value for _, name, value in page.attributes if name == "id"]
    assert sections == ["warnings", "fit", "likelihood", "calibration", "columns", "pairs", "surprising"]
    # Training, ranking, four of calibration, four columns, and the pairs.
    assert page.tags.count("svg") >= 11
    assert EVIL in page.text
    assert "</svg><img src=http://x.example>" in page.text
    assert "nan" not in page.text.lower().split()
    assert not any(word in value for _, _, value in page.attributes for word in ("nan", "inf "))
    for words in ("20% of them held out, in", "given year", "whole numbers", "numbers from 0", "Gaussian mixture"):
        assert words in page.text, words


def test_the_figures_are_of_the_rows_held_out(fitted):
    model, found, _ = fitted
    flow = qf.load(model)
    assert (found["kind"], found["judged"], found["rows"], found["rows_in_file"]) == ("held out", 60, 300, 300)
    # What training saw of them then, in float32.
    assert found["nats"] == pytest.approx(flow.notes["history"]["best_validation"], abs=1e-4)
    scores = flow.score(rows(300))
    total = 60 * found["nats"] + 240 * found["training_nats"]
    assert total == pytest.approx(scores.sum(), abs=1e-6)
    for peer in found["peers"]:
        assert peer["ahead"] == pytest.approx(found["nats"] - peer["nats"], abs=1e-9)
    assert [peer["name"] for peer in found["peers"]] == ["Gaussian", "Gaussian mixture", "kernel density"]
    lowest = np.argsort(scores)[:10] + 1
    assert [entry["row"] for entry in found["surprising"]] == lowest.tolist()


def test_rows_are_recognised_in_any_order(fitted, tmp_path):
    model, found, _ = fitted
    order = np.random.default_rng(1).permutation(300)
    other, _ = figures(qf.load(model), {name: values[order] for name, values in rows(300).items()}, tmp_path)
    assert other["kind"] == "held out"
    assert other["nats"] == pytest.approx(found["nats"], abs=1e-9)


def test_new_rows_and_rows_that_are_not_all_new(fitted, tmp_path):
    flow, new = qf.load(fitted[0]), rows(200, seed=1)
    found, page = figures(flow, new, tmp_path)
    assert (found["kind"], found["judged"], found["compared"]) == ("new", 200, 200)
    assert found["nats"] == pytest.approx(flow.score(new).mean(), abs=1e-9)
    assert found["training_nats"] is None
    assert "learn from one half of the rows" in page
    mixed = {name: np.concatenate([rows(300)[name][:100], new[name]]) for name in new}
    found, page = figures(flow, mixed, tmp_path)
    assert found["kind"] == "mixed"
    assert "About 33% of the rows of this file were in the table of the fit" in found["warnings"][0]
    assert "<h2>Log-likelihood</h2>" in page
    flow.notes = {}
    assert figures(flow, new, tmp_path)[0]["kind"] == "unknown"


def test_other_densities_learn_from_a_file_that_is_given(fitted, tmp_path):
    model, _, out = fitted
    new = put(tmp_path / "new.csv", rows(50, seed=2))
    words = ["report", model, new, "--train", out.parent / "t.csv", "-o", tmp_path / "r.html", "--json"]
    found = json.loads(command(*words).stdout)
    assert (found["kind"], found["compared"]) == ("new", 50)
    assert "learnt from 300 rows of" in (tmp_path / "r.html").read_text()
    assert found["training_nats"] == pytest.approx(qf.load(model).score(rows(300)).mean(), abs=1e-9)


def test_a_file_of_more_rows_than_the_fit_took(tmp_path):
    table = {"a": np.random.default_rng(0).normal(size=2000)}
    data, model = put(tmp_path / "t.csv", table), tmp_path / "m.qf"
    assert command("fit", data, "-o", model, "--rows", 100, "--max-steps", 5, "--seed", 3).exit_code == 0
    words = ["report", model, data, "-o", tmp_path / "r.html", "--rows", 500, "--json"]
    found = json.loads(command(*words).stdout)
    assert (found["kind"], found["judged"], found["rows_in_file"]) == ("new", 500, 2000)
    assert found["rows"] == 580  # and those learnt from
    page = (tmp_path / "r.html").read_text()
    assert "drawn at random from 2,000" in page
    assert "fitted to 100 rows drawn at random from this file" in page
    # A draw of fewer rows is a part of one of more.
    few, many = draw(data, 50, 3), draw(data, 300, 3)
    assert set(few.numbers) == set(many.numbers[np.argsort(many.keys)[:50]])
    assert np.array(few.rows["a"].to_pylist(), dtype=float) == pytest.approx(table["a"][few.numbers - 1])


@pytest.mark.parametrize("mixing", ["reverse", None])
def test_a_strange_row_comes_first_with_its_column(tmp_path, mixing):
    table = rows(150)
    table["price"][77] *= 9
    options = {**QUICK, "model_options": {**QUICK["model_options"], "mixing": mixing}}
    flow, _ = fit_table(table, context=["year"], **options)
    found, page = figures(flow, table, tmp_path)
    assert found["surprising"][0]["row"] == 78
    assert found["surprising"][0]["columns"][0][0] == "price"
    assert found["surprising"][0]["columns"][0][1] == pytest.approx(table["price"][77])
    assert ("takes the columns in one order" in page) == (mixing is None)


def test_terms_are_those_of_the_marginals():
    """Terms of a mixed table against sums over all that follows."""
    rng = np.random.default_rng(0)
    table = {"n": rng.poisson(1, 60).astype(float), "m": rng.poisson(2, 60).astype(float)}
    table |= {"on": rng.choice([True, False], 60).astype(object)}
    flow, _ = fit_table(table, max_steps=5, model_options={"blocks": 2, "hidden": (4,), "mixing": None})
    x = torch.cartesian_prod(torch.arange(-40.0, 60), torch.arange(-40.0, 60), torch.tensor([0.0, 1])).double()
    for i in (0, 1):
        x[:, i] = (x[:, i] - flow.schema.numbers[i].location) / flow.schema.numbers[i].scale
    with torch.no_grad():
        joint, terms = flow.log_prob(x).view(100, 100, 2), flow.terms(x).view(100, 100, 2, 3)
    assert terms.sum(-1) == pytest.approx(joint, abs=1e-9)
    first = joint.logsumexp(1)  # over m
    label = first.logsumexp(0)
    near = (slice(35, 50), slice(35, 50))
    assert terms[..., 2][near] == pytest.approx(label.expand(15, 15, 2), abs=2e-3)
    expected = (first - label)[35:50, None].expand(15, 15, 2)
    assert terms[..., 0][near] == pytest.approx(expected, abs=2e-2)


def test_draws_of_the_model_are_calibrated_and_other_rows_are_not(tmp_path):
    rng = np.random.default_rng(0)
    table = {"a": rng.normal(size=200), "b": rng.gamma(2, size=200), "n": rng.poisson(3, 200).astype(float)}
    flow, _ = fit_table(table, **QUICK)
    draws = flow.draw(1500, generator=torch.Generator().manual_seed(1))
    found, _ = figures(flow, draws, tmp_path)
    for entry in found["coverage"]:
        assert abs(entry["density"] - entry["level"]) < 4 * entry["density_error"], entry
        # Whole numbers are where the noise in a cell is uniform only nearly.
        assert abs(entry["latents"] - entry["level"]) < 4 * entry["latents_error"] + 0.02, entry
    assert max(found["columns"].values()) < 1.95 * math.sqrt(1 / 1500 + 1 / 2000)
    assert not any(word in text for text in found["warnings"] for word in ("Calibration", "Draws differ"))
    draws["a"] = 2 * draws["a"]
    warned = " ".join(figures(flow, draws, tmp_path)[0]["warnings"])
    assert "too narrow" in warned
    assert "Draws differ from the rows in 'a'" in warned


@pytest.mark.parametrize("base", ["normal", "location-scale", "student"])
def test_latents_of_every_base_are_normal(base):
    flow, _ = fit_table({"a": np.random.default_rng(0).normal(size=50)}, max_steps=3, model_options={"base": base})
    x = torch.tensor(flow.schema.encode(as_table(flow.draw(4000, generator=torch.Generator().manual_seed(0)))).x)
    with torch.no_grad():
        z = flow.latents(x)[:, 0]
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3


def test_densities_of_peers_sum_to_one():
    rng = np.random.default_rng(0)
    table = {"n": rng.poisson(3, 80).astype(float), "on": rng.choice(["u", "v", "w"], 80).astype(object)}
    table |= {"share": rng.beta(2, 3, 80), "year": rng.normal(size=80)}
    schema = Schema.of(as_table(table), context=["year"], bounds={"share": (0, 1), "n": (0, None)})
    flow = qf.models.table(schema, hidden=(4,)).double().eval()
    learn = schema.encode(as_table(table))
    share = (np.arange(80) + 0.5) / 80
    n, on, share = (part.ravel() for part in np.meshgrid(np.arange(40.0), ["u", "v", "w"], share, indexing="ij"))
    grid = schema.encode({"n": n, "on": on.astype(object), "share": share, "year": np.full(len(n), 0.3)})
    for peer in peers(flow, *((torch.tensor(r.x), torch.tensor(r.context)) for r in (learn, grid))):
        assert peer.log_prob.exp().sum() / 80 == pytest.approx(1, abs=0.03), peer.name


def test_the_gaussian_is_that_of_the_rows(monkeypatch):
    monkeypatch.setattr("quarflow.peers.RIDGES", (1e-9,))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)) @ rng.normal(size=(3, 3)) + 5
    table = as_table(x)
    schema = Schema.of(table, context=["x2"], tails=False)
    flow = qf.models.table(schema, hidden=(4,)).double()
    encoded = schema.encode(table)
    part = (torch.tensor(encoded.x), torch.tensor(encoded.context))
    found = {peer.name: peer.log_prob for peer in peers(flow, part, part)}
    mean, covariance = x.mean(0), np.cov(x.T, ddof=0)
    expected = stats.multivariate_normal(mean, covariance).logpdf(x)
    expected -= stats.norm(mean[2], covariance[2, 2] ** 0.5).logpdf(x[:, 2])
    assert found["Gaussian"].numpy() == pytest.approx(expected, abs=1e-4)


def test_dependence():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 8, (2, 20_000))
    assert report._dependence(a, a) == pytest.approx(math.log(8), abs=2e-3)
    assert report._dependence(a, b) < 1e-3


def test_tables_of_every_kind(tmp_path):
    rng = np.random.default_rng(0)
    labels = {"x": rng.choice(["a", "b"], 60).astype(object), "y": rng.choice(["p", "q"], 60).astype(object)}
    wide = {f"c{i}": rng.normal(size=60) for i in range(40)}
    atom = {"a": np.where(rng.random(60) < 0.4, 0, rng.normal(size=60))}
    huge = {"a": 1e9 * rng.standard_cauchy(60), "b": 1e-12 * rng.normal(size=60) + 5}
    few = {"a": np.arange(8) * 1.3}
    expected = {
        "labels": "Few rows to judge by: 12",
        "wide": "few for 40 columns",
        "atom": "where numbers have no density",
        "huge": "Few rows",
        "few": "Nothing was held out",
    }
    for name, table in {"labels": labels, "wide": wide, "atom": atom, "huge": huge, "few": few}.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the atom
            flow, _ = fit_table(table, max_steps=5, model_options={"blocks": 1, "hidden": (4,)})
        found, page = figures(flow, table, tmp_path)
        Page(page)
        assert expected[name] in " ".join(found["warnings"]), name
        assert json.dumps(found, allow_nan=False)
        one, page = figures(flow, {k: v[:1] for k, v in table.items()}, tmp_path)
        Page(page)
        assert (one["judged"], one["standard_error"], one["peers"]) == (1, None, [])
    assert "Of 40 columns, the 24 with the largest distances" in figures(
        *_fit(wide, blocks=1, hidden=(4,)), wide, tmp_path
    )[1]


def _fit(table, **options):
    return (fit_table(table, max_steps=2, model_options=options)[0],)


def test_impossible_rows(fitted, tmp_path):
    flow, table = qf.load(fitted[0]), rows(100, seed=3)
    table["price"][4] = -1.0
    found, page = figures(flow, table, tmp_path)
    assert (found["impossible"], found["judged"]) == (1, 100)
    assert found["surprising"][0] | {"columns": None} == {"row": 5, "nats": None, "columns": None}
    assert found["surprising"][0]["columns"] == [["price", -1.0, None]]
    assert any("Impossible under the model: 1 of 100 rows" in text for text in found["warnings"])
    assert any("outside 0 to inf" in text for text in found["warnings"])
    table["kind"][:] = "castle"
    found, page = figures(flow, table, tmp_path)
    assert (found["nats"], found["impossible"]) == (None, 100)
    assert "No row is possible under the model" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MODEL", "none.csv"], "none.csv: there is no such file"),
        (["IMAGES", "t.csv"], "expected a model of a table"),
        (["MODEL", "t.csv", "-o", "none/r.html"], "does not exist"),
        (["MODEL", "t.csv", "--train", "t.csv"], "is the table of the fit"),
        (["MODEL", "short.csv"], "expected the columns"),
    ],
)
def test_errors(fitted, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    put("t.csv", rows(300))
    put("short.csv", {"rooms": np.arange(5.0)})
    qf.save(qf.models.quar_image((1, 4, 4), blocks=(1,), hidden=4), "images.qf")
    done = command("report", *[{"MODEL": fitted[0], "IMAGES": "images.qf"}.get(word, word) for word in words])
    assert done.exit_code == 2, done.output
    assert message in said(done)
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    "damage",
    [
        {"history": 1},
        {"history": {"steps": [1]}},
        {"history": {"stopped": [1]}},
        {"history": {"seconds": "long"}},
        {"seed": -1},
        {"rows": "12"},
        {"sketch": ["x"]},
        {"held_out": 2.0},
    ],
)
def test_notes_that_are_damaged(fitted, tmp_path, damage):
    flow = qf.load(fitted[0])
    flow.notes = {**flow.notes, **damage}
    qf.save(flow, tmp_path / "m.qf")
    done = command("report", tmp_path / "m.qf", fitted[2].parent / "t.csv", "-o", tmp_path / "r.html")
    assert done.exit_code == 2, done.output
    assert "notes of the training are damaged" in said(done)


def test_notes_are_saved_and_another_fit_clears_them(fitted, tmp_path):
    flow = qf.load(fitted[0])
    assert flow.notes["rows"] == 300
    assert flow.notes["history"]["stopped"]
    qf.save(flow, tmp_path / "m.qf")
    assert qf.load(tmp_path / "m.qf").notes == flow.notes
    encoded = flow.schema.encode(as_table(rows(300)))
    qf.fit(flow, encoded.x, encoded.context, max_steps=1, progress=False)
    assert flow.notes == {}


def test_an_interrupt(fitted, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "look", lambda *rest: signal.raise_signal(signal.SIGTERM))
    done = command("report", fitted[0], fitted[2].parent / "t.csv", "-o", tmp_path / "r.html")
    assert done.exit_code == 130, done.output
    assert not list(tmp_path.iterdir())


LOOK = """<!DOCTYPE html><meta charset=utf-8>
<iframe id=f src=r.html style="width:WIDTHpx;height:900px;border:0"></iframe>
<script>
onload = () => {
  const page = document.getElementById("f").contentDocument, seen = e => e.getBoundingClientRect()
  const pictures = [...page.querySelectorAll("svg")].map(seen)
  const found = {
    width: page.documentElement.scrollWidth,
    pictures: pictures.filter(box => box.width > 200 && box.height > 50 && box.right <= WIDTH).length,
    all: pictures.length,
    paper: getComputedStyle(page.body).backgroundColor,
    ink: getComputedStyle(page.body).color,
    fetched: page.defaultView.performance.getEntriesByType("resource").length,
  }
  document.body.textContent = "FOUND" + JSON.stringify(found) + "END"
}
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser(fitted, tmp_path, dark):
    for width in (1280, 390):
        (tmp_path / "r.html").write_bytes(fitted[2].read_bytes())
        (tmp_path / "look.html").write_text(LOOK.replace("WIDTH", str(width)))
        words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
        words += [f"--blink-settings=preferredColorScheme={int(not dark)}", f"--user-data-dir={tmp_path / 'profile'}"]
        words += ["--virtual-time-budget=5000", "--dump-dom", (tmp_path / "look.html").as_uri()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        found = json.loads(done.stdout.partition("FOUND")[2].partition("END")[0].replace("&amp;", "&"))
        assert found["width"] <= width, "scrolls sideways"
        assert found["pictures"] == found["all"] >= 11
        assert found["fetched"] == 0
        brightness = [sum(map(int, found[k][4:-1].split(","))) for k in ("paper", "ink")]
        assert (brightness[0] < brightness[1]) == dark


def test_the_same_page_twice(fitted, tmp_path):
    again = command("report", fitted[0], fitted[2].parent / "t.csv", "-o", tmp_path / "r.html")
    assert again.exit_code == 0, again.output
    assert "60 rows, held out: " in again.stdout
    names = [fitted[2].read_text(), Path(tmp_path / "r.html").read_text()]
    assert names[0] == names[1]


def test_rows_with_gaps_are_left_out_and_said_to_be(tmp_path):
    rng = np.random.default_rng(0)
    table = {"a": rng.normal(size=120), "b": rng.normal(size=120)}
    table["b"][::4] = np.nan
    flow, _ = fit_table(table, missing="marginal", max_steps=20)
    found, text = figures(flow, table, tmp_path)
    assert found["kind"] == "held out"
    assert found["rows"] == 90
    assert "30 rows with some were left out" in Page(text).text
    table["b"][:] = np.nan
    with pytest.raises(ValueError, match="expected rows without missing values"):
        figures(flow, table, tmp_path)
