"""Pictures from generated files of every form: the same bytes come back, and what is broken is named."""

import functools
import gzip
import hashlib
import http.server
import io
import lzma
import re
import struct
import sys
import tarfile
import threading
import urllib.error
import urllib.request
import zlib
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import datasets

from quarflow.data import images
from quarflow.data.images import Images, load_images, save_grid

RNG = np.random.default_rng(0)
N = 12  # pictures in each generated batch of CIFAR-10


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    """No file of the machine is seen, no address is opened, and a batch of CIFAR-10 is short."""

    def closed(url, timeout=None):
        raise urllib.error.URLError("no network in the tests")

    monkeypatch.setenv("QUARFLOW_DATA", str(tmp_path / "environment"))
    monkeypatch.setattr(urllib.request, "urlopen", closed)
    monkeypatch.setattr(images, "_RECORDS", N)


def short(value):
    return f"{len(value)} bytes" if isinstance(value, bytes) else None


def draw(*shape, high=256):
    return RNG.integers(0, high, shape, dtype=np.uint8)


def idx(x):
    return struct.pack(f">BBBB{x.ndim}I", 0, 0, 8, x.ndim, *x.shape) + x.tobytes()


def mnist_arrays(n=7, m=3):
    return [draw(n, 5, 4), draw(n, high=10), draw(m, 5, 4), draw(m, high=10)]


def write_mnist(folder, arrays, suffix=".gz"):
    folder.mkdir(parents=True, exist_ok=True)
    for name, x in zip(images._IDX, arrays, strict=True):
        raw = idx(x)
        (folder / (name.removesuffix(".gz") + suffix)).write_bytes(gzip.compress(raw) if suffix else raw)


def check_mnist(got, arrays):
    for x, wanted in zip((got.train, got.test), arrays[::2], strict=True):
        assert x.dtype == torch.uint8
        assert torch.equal(x, torch.from_numpy(wanted)[:, None])
    for labels, wanted in zip((got.train_labels, got.test_labels), arrays[1::2], strict=True):
        assert labels.dtype == torch.int64
        assert labels.tolist() == wanted.tolist()


def cifar_arrays():
    """Six batches of (labels, pixels), the pixels smooth as well as noisy, so that every prediction occurs."""
    ramp = np.add.outer(np.arange(32), np.arange(32)).astype(np.uint8)
    return [
        (draw(N, high=10), np.where(draw(N, 1, 1, 1) < 128, ramp + draw(N, 3, 1, 1), draw(N, 3, 32, 32)))
        for _ in range(6)
    ]


def records(labels, x):
    return np.concatenate([labels[:, None], x.reshape(len(x), -1)], 1).tobytes()


def write_batches(folder, arrays):
    folder.mkdir(parents=True, exist_ok=True)
    for name, batch in zip(images._BATCHES, arrays, strict=True):
        (folder / name).write_bytes(records(*batch))


def tar_bytes(members, mode="w:gz"):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return out.getvalue()


def members(arrays):
    return {name: records(*batch) for name, batch in zip(images._MEMBERS, arrays, strict=True)}


def encode(labels, x):
    """A part, pixel by pixel from the definition, as `shared/data/get_data.py` writes it."""
    r, g, b = x.astype(np.int16).transpose(1, 0, 2, 3)
    e = np.empty((3, len(x), 32, 32), np.uint8)
    for k, p in enumerate((g, r - g, b - g)):
        for n, i, j in np.ndindex(p.shape):
            if i and j:
                west, north, corner = p[n, i, j - 1], p[n, i - 1, j], p[n, i - 1, j - 1]
                low, high = sorted((west, north))
                q = low if corner >= high else high if corner <= low else west + north - corner
            else:
                q = p[n, i, j - 1] if j else p[n, i - 1, j] if i else 0
            e[k, n, i, j] = (p[n, i, j] - q) & 255
    return lzma.compress(e.tobytes() + labels.tobytes())


def write_parts(folder, arrays):
    folder.mkdir(parents=True, exist_ok=True)
    for name, three in zip(images._PARTS, (arrays[:3], arrays[3:]), strict=True):
        (folder / name).write_bytes(encode(*(np.concatenate(x) for x in zip(*three, strict=True))))


def check_cifar(got, arrays):
    labels, x = (np.concatenate(parts) for parts in zip(*arrays, strict=True))
    assert got.shape == (3, 32, 32)
    assert torch.equal(got.train, torch.from_numpy(x[: 5 * N]))
    assert torch.equal(got.test, torch.from_numpy(x[5 * N :]))
    assert got.train_labels.dtype == got.test_labels.dtype == torch.int64
    assert torch.cat([got.train_labels, got.test_labels]).tolist() == labels.tolist()


def write_png(path, x, mode=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(x)
    (image.convert(mode) if mode else image).save(path, format="PNG", **options)


def raw_png(depth, colour, row, size=2):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, depth, colour, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress((b"\0" + row) * size))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


# MNIST and Fashion-MNIST


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("below", ["", "{source}"])
@pytest.mark.parametrize("source", ["mnist", "fashion-mnist"])
def test_idx(tmp_path, source, below, suffix):
    arrays = mnist_arrays()
    write_mnist(tmp_path / below.format(source=source), arrays, suffix)
    got = load_images(source, tmp_path)
    check_mnist(got, arrays)
    assert got.shape == (1, 5, 4)
    assert got.name == source


def test_gzip_is_told_by_its_content(tmp_path):
    arrays = mnist_arrays()
    write_mnist(tmp_path, arrays)
    (tmp_path / images._IDX[0]).write_bytes(idx(arrays[0]))
    (tmp_path / images._IDX[1]).unlink()
    (tmp_path / images._IDX[1].removesuffix(".gz")).write_bytes(gzip.compress(idx(arrays[1])))
    check_mnist(load_images("mnist", tmp_path), arrays)


def test_the_default_folder(tmp_path, monkeypatch):
    arrays = mnist_arrays()
    write_mnist(tmp_path / "environment" / "mnist", arrays)
    check_mnist(load_images("mnist"), arrays)
    monkeypatch.delenv("QUARFLOW_DATA")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write_mnist(tmp_path / "home" / ".cache" / "quarflow", arrays)
    check_mnist(load_images("mnist"), arrays)


def test_the_subfolder_comes_first(tmp_path):
    ours, others = mnist_arrays(), mnist_arrays()
    write_mnist(tmp_path, others)
    write_mnist(tmp_path / "mnist", ours)
    check_mnist(load_images("mnist", tmp_path), ours)
    check_mnist(load_images("fashion-mnist", tmp_path), others)


def test_the_two_mnists_are_told_apart(tmp_path):
    arrays = mnist_arrays(n=10)
    arrays[1] = np.array(images._FIRST_LABELS["mnist"], np.uint8)
    write_mnist(tmp_path, arrays)
    check_mnist(load_images("mnist", tmp_path), arrays)
    with pytest.raises(ValueError, match="expected the files of fashion-mnist; got those of mnist"):
        load_images("fashion-mnist", tmp_path)


GOOD = idx(np.zeros((7, 5, 4), np.uint8))


@pytest.mark.parametrize(
    ("i", "raw", "message"),
    [
        (0, b"", "begins with 00 00 08 03; got an empty file"),
        (0, GOOD[:2], "begins with 00 00 08 03; got 00 00"),
        (0, b"\x89PNG" + GOOD[4:], "got 89 50 4e 47"),
        (0, idx(np.zeros(7, np.uint8)), "got 00 00 08 01"),
        (1, GOOD, "IDX file of 1 dimensions, which begins with 00 00 08 01; got 00 00 08 03"),
        (0, GOOD[:9], "got 9 bytes in all"),
        (0, GOOD[:-1], "expected 16 bytes and then 7 x 5 x 4.*got 155 bytes"),
        (0, GOOD + b"\0", "got 157 bytes"),
        (0, GOOD[:4] + b"\xff" * 12, "4294967295 x 4294967295 x 4294967295"),
        (0, idx(np.zeros((0, 5, 4), np.uint8)), "0 x 5 x 4.*none of them 0"),
        (0, gzip.compress(GOOD)[:-9], "expected a whole gzip file"),
        (0, gzip.compress(GOOD)[:-8] + b"\0" * 8, "expected a whole gzip file; got CRC check failed"),
        (0, b"\x1f\x8b" + b"\xff" * 30, "expected a whole gzip file"),
        (0, gzip.compress(GOOD)[:10] + b"\xff" * 30, "expected a whole gzip file"),
        (0, idx(np.zeros((6, 5, 4), np.uint8)), "labels-idx1-ubyte.gz: expected 6 labels.*train-images.*got 7"),
        (2, idx(np.zeros((3, 4, 4), np.uint8)), r"test: expected pictures of shape \(1, 5, 4\).*got \(1, 4, 4\)"),
        (1, idx(np.full(7, 10, np.uint8)), "expected labels of 0 to 9 for mnist; got 10"),
    ],
    ids=short,
)
def test_broken_idx(tmp_path, i, raw, message):
    write_mnist(tmp_path, mnist_arrays())
    (tmp_path / images._IDX[i]).write_bytes(raw)
    with pytest.raises(ValueError, match=message) as error:
        load_images("mnist", tmp_path)
    assert str(tmp_path) in str(error.value) or i == 2


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing: train-images") as error:
        load_images("mnist", tmp_path)
    for part in (*images._IDX, str(tmp_path), str(tmp_path / "mnist"), "QUARFLOW_DATA", "download=True"):
        assert part in str(error.value)
    write_mnist(tmp_path, mnist_arrays())
    (tmp_path / images._IDX[3]).unlink()
    with pytest.raises(FileNotFoundError, match=r"missing: t10k-labels-idx1-ubyte\.gz\. Say"):
        load_images("mnist", tmp_path)


# CIFAR-10


@pytest.mark.parametrize("below", ["", "cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_cifar_batches(tmp_path, below):
    arrays = cifar_arrays()
    write_batches(tmp_path / below, arrays)
    got = load_images("cifar10", tmp_path)
    check_cifar(got, arrays)
    assert got.name == "cifar10"


@pytest.mark.parametrize(("name", "mode"), [("cifar-10-binary.tar.gz", "w:gz"), ("cifar-10-binary.tar", "w")])
def test_cifar_archive(tmp_path, name, mode):
    arrays = cifar_arrays()
    # The archive has other files too, and does not keep the batches in order.
    content = {"cifar-10-batches-bin/readme.html": b"...", **dict(reversed(members(arrays).items()))}
    (tmp_path / name).write_bytes(tar_bytes(content, mode))
    check_cifar(load_images("cifar10", tmp_path), arrays)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_cifar_parts(tmp_path):
    arrays = cifar_arrays()
    write_parts(tmp_path, arrays)
    check_cifar(load_images("cifar10", tmp_path), arrays)


@pytest.mark.parametrize("change", [-1, 1, -3073, 3073])
def test_cifar_batch_of_another_size(tmp_path, change):
    arrays = cifar_arrays()
    write_batches(tmp_path, arrays)
    raw = (tmp_path / "data_batch_3.bin").read_bytes()
    (tmp_path / "data_batch_3.bin").write_bytes(raw[:change] if change < 0 else raw + raw[:change])
    with pytest.raises(ValueError, match=f"data_batch_3.bin: expected {N} records.* got {len(raw) + change}"):
        load_images("cifar10", tmp_path)


def test_cifar_of_other_labels(tmp_path):
    arrays = cifar_arrays()
    arrays[5][0][0] = 77
    write_batches(tmp_path, arrays)
    with pytest.raises(ValueError, match="expected labels of 0 to 9 for cifar10; got 77"):
        load_images("cifar10", tmp_path)


def test_broken_cifar_archive(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    content = members(cifar_arrays())
    whole = tar_bytes(content)
    for raw in (b"", b"no archive", whole[: len(whole) // 2], whole[:100] + bytes(100) + whole[200:]):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=f"{path}: expected a whole tar archive"):
            load_images("cifar10", tmp_path)
    path.write_bytes(tar_bytes(content | {images._MEMBERS[1]: b"short"}))
    with pytest.raises(ValueError, match=f"data_batch_2.bin: expected {N} records.* got 5"):
        load_images("cifar10", tmp_path)


@pytest.mark.parametrize("name", ["../cifar-10-batches-bin/test_batch.bin", "test_batch.bin", "/etc/passwd"])
def test_only_the_members_by_their_names_count(tmp_path, name):
    content = members(cifar_arrays())
    content[name] = content.pop(images._MEMBERS[5])
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(tar_bytes(content))
    with pytest.raises(ValueError, match=r"expected the members cifar-10-batches-bin/test_batch\.bin in it"):
        load_images("cifar10", tmp_path)


def test_a_link_is_no_member(tmp_path):
    content = members(cifar_arrays())
    del content[images._MEMBERS[5]]
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for name, raw in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
        link = tarfile.TarInfo(images._MEMBERS[5])
        link.type, link.linkname = tarfile.SYMTYPE, "data_batch_1.bin"
        tar.addfile(link)
    with pytest.raises(ValueError, match=r"expected the members cifar-10-batches-bin/test_batch\.bin in it"):
        load_images("cifar10", tmp_path)


def test_broken_cifar_part(tmp_path):
    write_parts(tmp_path, cifar_arrays())
    path = tmp_path / "cifar10_part2.xz"
    raw = path.read_bytes()
    path.write_bytes(raw[:-50])
    with pytest.raises(ValueError, match=f"{path}: expected a whole xz file"):
        load_images("cifar10", tmp_path)
    path.write_bytes(lzma.compress(bytes(3073)))
    with pytest.raises(ValueError, match=f"{path}: expected {3 * N} records"):
        load_images("cifar10", tmp_path)


@pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "cifar-10-batches-py/data_batch_1", "data_batch_1"])
def test_the_pickled_cifar_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\x80\x02.")
    with pytest.raises(ValueError, match=r"never unpickles: .* Get https://\S+/cifar-10-binary.tar.gz"):
        load_images("cifar10", tmp_path)
    arrays = cifar_arrays()
    write_batches(tmp_path, arrays)
    check_cifar(load_images("cifar10", tmp_path), arrays)


def test_missing_cifar(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing: cifar-10-binary\.tar\.gz\. Say"):
        load_images("cifar10", tmp_path)
    write_batches(tmp_path / "cifar10", cifar_arrays())
    (tmp_path / "cifar10" / "data_batch_4.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"missing: data_batch_4\.bin\. Say"):
        load_images("cifar10", tmp_path)


# Downloads


@pytest.fixture
def home(monkeypatch):
    """Addresses and what they answer; a checksum of the table is that of the first answer put there."""
    answers: dict[str, bytes | Exception] = {}

    def put(source, content):
        for name, raw in content.items():
            answers[images._HOMES[source] + name] = raw
        monkeypatch.setitem(
            images._SHA256, source, {name: hashlib.sha256(raw).hexdigest() for name, raw in content.items()}
        )
        return answers

    def urlopen(url, timeout):
        assert timeout > 0
        answer = answers[url]
        if isinstance(answer, Exception):
            raise answer
        return io.BytesIO(answer)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return put


def mnist_content(arrays):
    return {name: gzip.compress(idx(x)) for name, x in zip(images._IDX, arrays, strict=True)}


def test_the_table_of_downloads():
    for source, forms in images._FORMS.items():
        assert re.match(r"https?://.*/$", images._HOMES[source])
        assert tuple(images._SHA256[source]) == forms[-1]
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in images._SHA256[source].values())


@pytest.mark.parametrize("source", ["mnist", "fashion-mnist"])
def test_download_mnist(tmp_path, home, source):
    arrays = mnist_arrays()
    answers = home(source, mnist_content(arrays))
    check_mnist(load_images(source, tmp_path / "new", download=True), arrays)
    assert sorted(path.name for path in (tmp_path / "new" / source).iterdir()) == sorted(images._IDX)
    answers.clear()
    check_mnist(load_images(source, tmp_path / "new", download=True), arrays)


def test_download_what_is_missing(tmp_path, home):
    arrays = mnist_arrays()
    answers = home("mnist", mnist_content(arrays))
    write_mnist(tmp_path / "mnist", arrays, suffix="")
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte").unlink()
    for url in list(answers):
        if "t10k-images" not in url:
            del answers[url]
    check_mnist(load_images("mnist", tmp_path, download=True), arrays)


def test_download_cifar(tmp_path, home):
    arrays = cifar_arrays()
    home("cifar10", {"cifar-10-binary.tar.gz": tar_bytes(members(arrays))})
    (tmp_path / "cifar-10-batches-py").mkdir()
    check_cifar(load_images("cifar10", tmp_path, download=True), arrays)


def test_a_wrong_checksum_leaves_nothing(tmp_path, home):
    answers = home("mnist", mnist_content(mnist_arrays()))
    url = images._HOMES["mnist"] + images._IDX[0]
    answers[url] = answers[url][:-1]
    with pytest.raises(ValueError, match=f"expected {url} to have SHA-256 .* Nothing was kept"):
        load_images("mnist", tmp_path, download=True)
    assert not list((tmp_path / "mnist").iterdir())


def test_download_from_a_server(tmp_path, monkeypatch):
    """All of it but the home: a real server, which does not have the last file at first, and then a wrong one."""
    arrays = mnist_arrays()
    content, there, folder = mnist_content(arrays), tmp_path / "there", tmp_path / "here" / "mnist"
    digests = {name: hashlib.sha256(raw).hexdigest() for name, raw in content.items()}
    there.mkdir()
    last = images._IDX[-1]
    for name in images._IDX[:-1]:
        (there / name).write_bytes(content[name])

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(Quiet, directory=str(there))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setitem(images._HOMES, "mnist", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setitem(images._SHA256, "mnist", digests)
        with pytest.raises(OSError, match=f"{last} could not be fetched .*404"):
            load_images("mnist", tmp_path / "here", download=True)
        (there / last).write_bytes(content[last][:-1])
        with pytest.raises(ValueError, match=f"{last} to have SHA-256 {digests[last]}; got"):
            load_images("mnist", tmp_path / "here", download=True)
        assert sorted(path.name for path in folder.iterdir()) == sorted(images._IDX[:-1])
        (there / last).write_bytes(content[last])
        check_mnist(load_images("mnist", tmp_path / "here", download=True), arrays)
        server.shutdown()
    check_mnist(load_images("mnist", tmp_path / "here", download=True), arrays)  # the server is gone


@pytest.mark.parametrize("when", ["opening", "reading"])
def test_no_connection_leaves_nothing(tmp_path, home, monkeypatch, when):
    class Broken(io.BytesIO):
        def read(self, size=-1):
            raise TimeoutError("the read timed out")

    answers = home("mnist", mnist_content(mnist_arrays()))
    url = images._HOMES["mnist"] + images._IDX[0]
    answers[url] = urllib.error.URLError("the read timed out")
    if when == "reading":
        monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Broken())
    with pytest.raises(OSError, match=f"{url} could not be fetched into .*the read timed out.* Nothing was kept"):
        load_images("mnist", tmp_path, download=True)
    assert not list((tmp_path / "mnist").iterdir())


# The digits


def test_digits():
    got = load_images("digits")
    assert got.train.shape == (1437, 1, 8, 8)
    assert got.test.shape == (360, 1, 8, 8)
    assert got.train.dtype == got.test.dtype == torch.uint8
    table = datasets.load_digits()
    rows = {tuple(round(v * 255 / 16) for v in x): y for x, y in zip(table.data, table.target, strict=True)}
    x, labels = torch.cat([got.train, got.test]), torch.cat([got.train_labels, got.test_labels])
    assert len(rows) == len(x) == len({tuple(row) for row in x.flatten(1).tolist()})
    assert [rows[tuple(row)] for row in x.flatten(1).tolist()] == labels.tolist()
    assert labels.dtype == torch.int64
    torch.manual_seed(5)
    assert torch.equal(load_images("digits").test, got.test)


# Folders of pictures


@pytest.mark.parametrize(("n", "test"), [(2, [1]), (9, [8]), (10, [9]), (25, [9, 19])])
def test_grey_pictures(tmp_path, n, test):
    x = draw(n, 4, 6)
    for i in range(n):
        write_png(tmp_path / "some" / f"{i // 5}" / f"{i:02}.{'PNG' if i % 2 else 'png'}", x[i])
    (tmp_path / "some" / "notes.txt").write_text("not a picture")
    got = load_images(str(tmp_path / "some"), folder="nowhere")
    assert torch.equal(got.test, torch.from_numpy(x[test])[:, None])
    assert torch.equal(got.train, torch.from_numpy(np.delete(x, test, 0))[:, None])
    assert got.train_labels is got.test_labels is None
    assert got.name == "some"


def test_colour_pictures_in_train_and_test(tmp_path):
    x = draw(5, 4, 6, 3)
    for i, name in enumerate(("test/0", "train/a/1", "train/a/2", "train/b", "validation/4")):
        write_png(tmp_path / f"{name}.png", x[i])
    got = load_images(tmp_path)
    assert got.shape == (3, 4, 6)
    assert torch.equal(got.train, torch.from_numpy(x[1:4]).permute(0, 3, 1, 2))
    assert torch.equal(got.test, torch.from_numpy(x[:1]).permute(0, 3, 1, 2))


def test_a_folder_named_as_a_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(2):
        write_png(tmp_path / "digits" / f"{i}.png", draw(2, 2))
    assert load_images("./digits").shape == (1, 2, 2)
    assert load_images("digits").shape == (1, 8, 8)


def test_two_levels_and_palettes_are_converted(tmp_path):
    x = draw(2, 4, 6)
    for i in range(2):
        write_png(tmp_path / "bits" / f"{i}.png", x[i] // 128 * 255, mode="1")
        write_png(tmp_path / "palette" / f"{i}.png", x[i], mode="P")
    got = load_images(tmp_path / "bits")
    assert torch.equal(torch.cat([got.train, got.test]), torch.from_numpy(x // 128 * 255)[:, None])
    got = load_images(tmp_path / "palette")
    assert torch.equal(torch.cat([got.train, got.test]), torch.from_numpy(x)[:, None].expand(-1, 3, -1, -1))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (raw_png(16, 0, bytes(4)), "expected 8 bits a channel; got 16"),
        (raw_png(16, 2, bytes(12)), "expected 8 bits a channel; got 16"),
        (raw_png(16, 6, bytes(16)), "expected 8 bits a channel; got 16"),
        (raw_png(8, 6, bytes(8)), "without transparency; got mode RGBA"),
        (raw_png(8, 4, bytes(4)), "without transparency; got mode LA"),
        (raw_png(8, 2, bytes(6)), r"got \(3, 2, 2\). Make all pictures grey or all RGB"),
        (raw_png(8, 0, bytes(3), size=3), r"expected \(C, H, W\) = \(1, 2, 2\), as .*/0.png has; got \(1, 3, 3\)"),
        (raw_png(8, 0, b"ab")[:-12], "cannot be read"),
        (raw_png(8, 0, b"ab")[:50], "cannot be read"),
        (raw_png(8, 0, b"ab")[:20], "cannot be read"),
        (raw_png(8, 0, b"ab").replace(b"IDAT", b"IDAS"), "cannot be read"),
        (raw_png(8, 0, b"ab")[:-14] + b"\0\0" + raw_png(8, 0, b"ab")[-12:], "cannot be read"),
        (b"", "cannot be read"),
        (b"\xff\xd8\xff\xe0 a JPEG by another name", "cannot be read"),
    ],
    ids=short,
)
def test_a_picture_that_does_not_fit(tmp_path, raw, message):
    write_png(tmp_path / "0.png", draw(2, 2))
    (tmp_path / "1.png").write_bytes(raw)
    with pytest.raises(ValueError, match=f"{tmp_path / '1.png'}: .*{message}"):
        load_images(tmp_path)


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_one_transparent_colour_is_refused(tmp_path, mode):
    write_png(tmp_path / "0.png", draw(2, 2), mode, transparency=(0, 0, 0) if mode == "RGB" else 0)
    write_png(tmp_path / "1.png", draw(2, 2), mode)
    with pytest.raises(ValueError, match=rf"0.png: .*without transparency; got mode {mode}"):
        load_images(tmp_path)


def test_any_flipped_byte_is_seen(tmp_path):
    """Every chunk has a checksum: a changed byte is an error, or (in the last chunk) no byte of the picture."""
    x = draw(2, 3, 3)
    for i in range(2):
        write_png(tmp_path / f"{i}.png", x[i])
    raw = (tmp_path / "1.png").read_bytes()
    seen = 0
    for i in range(len(raw)):
        (tmp_path / "1.png").write_bytes(raw[:i] + bytes([raw[i] ^ 16]) + raw[i + 1 :])
        try:
            got = load_images(tmp_path).test[0, 0]
        except ValueError as error:
            seen += "1.png" in str(error)
        else:
            seen += torch.equal(got, torch.from_numpy(x[1]))
    assert seen == len(raw)


def test_too_few_pictures(tmp_path):
    with pytest.raises(ValueError, match=r"expected PNG files in it or below it; got none"):
        load_images(tmp_path)
    write_png(tmp_path / "train" / "0.png", draw(2, 2))
    with pytest.raises(ValueError, match=r"expected at least 2 pictures.*got 1"):
        load_images(tmp_path)
    (tmp_path / "test").mkdir()
    with pytest.raises(ValueError, match="test: expected PNG files"):
        load_images(tmp_path)


@pytest.mark.parametrize("source", ["imagenet", 3, None])
def test_unknown_source(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"expected one of 'mnist', .* got {source!r}"):
        load_images(source)


def test_without_pillow(tmp_path, monkeypatch):
    write_png(tmp_path / "0.png", draw(2, 2))
    write_png(tmp_path / "1.png", draw(2, 2))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        load_images(tmp_path)


# Images and grids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": torch.zeros(3, 1, 2, 2)}, "train: expected a uint8 tensor.* got torch.float32"),
        ({"train": None}, "train: expected a uint8 tensor.* got NoneType"),
        ({"test": torch.zeros(3, 2, 2, dtype=torch.uint8)}, r"test: expected .* of shape \(3, 2, 2\)"),
        ({"test": torch.zeros(0, 1, 2, 2, dtype=torch.uint8)}, "test: .*at least one picture"),
        ({"test": torch.zeros(2, 3, 2, 2, dtype=torch.uint8)}, r"test: .*\(1, 2, 2\), as in train; got \(3, 2, 2\)"),
        ({"train_labels": torch.zeros(3)}, r"train_labels: expected int64 of shape \(3,\).* got torch.float32"),
        ({"test_labels": torch.zeros(3).long()}, r"test_labels: expected int64 of shape \(2,\).* of shape \(3,\)"),
    ],
)
def test_images_that_do_not_fit(change, message):
    x = torch.zeros(5, 1, 2, 2, dtype=torch.uint8)
    fields = {"train": x[:3], "test": x[3:], "train_labels": None, "test_labels": None, "name": "x"}
    assert Images(**fields).shape == (1, 2, 2)
    with pytest.raises(ValueError, match=message):
        Images(**fields | change)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("n", "columns", "rows"), [(1, 1, 1), (5, None, 2), (9, None, 3), (7, 5, 2), (2, 4, 1)])
def test_grid(tmp_path, channels, n, columns, rows):
    x = torch.from_numpy(draw(n, channels, 4, 6))
    save_grid(x, tmp_path / "grid.png", columns)
    with Image.open(tmp_path / "grid.png") as image:
        grid = torch.from_numpy(np.array(image)).reshape(image.height, image.width, channels)
    columns = columns or 3
    assert grid.shape == (rows * 5 + 1, columns * 7 + 1, channels)
    assert (grid[::5] == 255).all()
    assert (grid[:, ::7] == 255).all()
    cells = grid[1:, 1:].reshape(rows, 5, columns, 7, channels)[:, :4, :, :6].permute(0, 2, 4, 1, 3).flatten(0, 1)
    assert torch.equal(cells[:n], x)
    assert (cells[n:] == 255).all()


@pytest.mark.parametrize(
    ("x", "name", "columns", "message"),
    [
        (torch.zeros(2, 1, 2, 2), "x.png", None, "images: expected a uint8 tensor.* got torch.float32"),
        (torch.zeros(1, 2, 2, dtype=torch.uint8), "x.png", None, r"images: .*of shape \(1, 2, 2\)"),
        (torch.zeros(0, 1, 2, 2, dtype=torch.uint8), "x.png", None, "images: .*at least one picture"),
        (torch.zeros(2, 2, 2, 2, dtype=torch.uint8), "x.png", None, r"images: expected 1 channel .* got 2"),
        (torch.zeros(2, 1, 2, 2, dtype=torch.uint8), "x.png", 0, "columns: expected an integer >= 1; got 0"),
        (torch.zeros(2, 1, 2, 2, dtype=torch.uint8), "x.jpg", None, r"path: .*ends in .png; got .*x.jpg"),
    ],
)
def test_bad_grids(tmp_path, x, name, columns, message):
    with pytest.raises(ValueError, match=message):
        save_grid(x, tmp_path / name, columns)
    assert not list(tmp_path.iterdir())
