"""Pictures as bytes: MNIST, Fashion-MNIST, CIFAR-10, scikit-learn's digits, or a folder of PNG files.

Original files are read by hand: nothing is unpickled, and no archive is unpacked to disk.
"""

import gzip
import hashlib
import itertools
import math
import os
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from quarflow.checks import check_count
from quarflow.data.tabular import load_table, split

SOURCES = ("mnist", "fashion-mnist", "cifar10", "digits")

_IDX = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_MEMBERS = tuple(f"cifar-10-batches-bin/{name}" for name in _BATCHES)
_PARTS = ("cifar10_part1.xz", "cifar10_part2.xz")
_PICKLED = ("cifar-10-python.tar.gz", "cifar-10-batches-py", "data_batch_1")
_RECORDS = 10_000  # in each batch of CIFAR-10

# The files in each form they may come in; an archive stands last, as the slowest to read.
_FORMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "mnist": (_IDX,),
    "fashion-mnist": (_IDX,),
    "cifar10": (_MEMBERS, _BATCHES, _PARTS, ("cifar-10-binary.tar.gz",)),
}
_HOMES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "cifar10": "https://www.cs.toronto.edu/~kriz/",
}
# Published by TensorFlow Datasets (url_checksums); one of the homes is plain http, where MD5 would not do.
_SHA256 = {
    "mnist": {
        _IDX[0]: "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        _IDX[1]: "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        _IDX[2]: "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        _IDX[3]: "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    "fashion-mnist": {
        _IDX[0]: "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        _IDX[1]: "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        _IDX[2]: "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        _IDX[3]: "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
    "cifar10": {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
}
# The two share their file names; their first training labels tell them apart.
_FIRST_LABELS = {"mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], "fashion-mnist": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]}
_AGAIN = "Get the original file again, or remove this one and load with download=True."


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures ``train`` ``(n, C, H, W)`` and ``test`` ``(m, C, H, W)``, uint8 on the CPU, and where they have labels
    ``train_labels`` ``(n,)`` and ``test_labels`` ``(m,)``, int64.

    >>> x = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    >>> Images(x[:3], x[3:], None, None, "black").shape
    (3, 2, 2)
    """

    train: Tensor
    test: Tensor
    train_labels: Tensor | None
    test_labels: Tensor | None
    name: str

    def __post_init__(self) -> None:
        for part, x, labels in (
            ("train", self.train, self.train_labels),
            ("test", self.test, self.test_labels),
        ):
            _check_pictures(part, x)
            if x.shape[1:] != self.train.shape[1:]:
                raise ValueError(
                    f"{part}: expected pictures of shape {self.shape}, as in train; got {tuple(x.shape[1:])}. "
                    "Bring all pictures to one shape."
                )
            if labels is not None and (labels.dtype, labels.shape) != (torch.int64, x.shape[:1]):
                raise ValueError(
                    f"{part}_labels: expected int64 of shape ({len(x)},), one for each picture; "
                    f"got {labels.dtype} of shape {tuple(labels.shape)}. Use None where there are no labels."
                )

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(C, H, W)`` of one picture.

        >>> load_images("digits").shape
        (1, 8, 8)
        """
        channels, height, width = self.train.shape[1:]
        return channels, height, width


def load_images(
    source: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None, download: bool = False
) -> Images:
    """Pictures and their split into train and test, from ``source``:

    * ``"mnist"``, ``"fashion-mnist"``: 60,000 and 10,000 of ``(1, 28, 28)``, from the four IDX files, gzipped or not.
    * ``"cifar10"``: 50,000 and 10,000 of ``(3, 32, 32)``, from the binary version: ``cifar-10-binary.tar.gz`` or its
      six files, or the two lossless parts ``cifar10_part1.xz`` and ``cifar10_part2.xz``. The Python version is a
      pickle and is refused.
    * ``"digits"``: 1,437 and 360 of ``(1, 8, 8)``, from scikit-learn. Its levels ``x`` of 0 to 16 become
      ``round(x * 255 / 16)``: 17 of the 256 values occur.
    * a folder (one of the names above in the working directory: ``"./mnist"``): every PNG file below it, in the order
      of their names, all grey or all RGB, of one size, without labels. Subfolders ``train`` and ``test`` are the split
      if both are there; if not, every tenth picture is for the test, or of fewer than ten the last.

    The files of the first three lie in ``folder``, or in a subfolder of it named as the source. ``folder`` is by
    default the environment variable ``QUARFLOW_DATA``, else ``~/.cache/quarflow``. With ``download`` they are fetched
    from their public homes into that subfolder where they are missing, and kept only if their SHA-256 is as published.
    The other sources use neither.

    >>> images = load_images("digits")
    >>> images.train.shape, images.test.shape, images.train.max()
    (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]), tensor(255, dtype=torch.uint8))
    """
    if source == "digits":
        return _digits()
    if source not in SOURCES:
        return _pictures(source)
    name = str(source)
    root = Path(folder if folder is not None else os.environ.get("QUARFLOW_DATA") or "~/.cache/quarflow").expanduser()
    files = _locate(name, root)
    if files is None and download:
        files = _download(name, root / name)
    if files is None:
        raise _not_found(name, root)
    train, train_labels, test, test_labels = _read_cifar10(files) if name == "cifar10" else _read_mnist(name, files)
    largest = int(max(train_labels.max(), test_labels.max()))
    if largest > 9:
        raise ValueError(f"{files[0].parent}: expected labels of 0 to 9 for {name}; got {largest}. {_AGAIN}")
    return Images(train, test, train_labels, test_labels, name)


def save_grid(images: Tensor, path: str | os.PathLike[str], columns: int | None = None) -> None:
    """Writes ``images``, uint8 ``(n, C, H, W)`` with ``C`` 1 or 3, row by row into one PNG file.

    ``columns`` is by default ``ceil(sqrt(n))``. A margin of one white pixel is around every picture: the grid of ``r``
    rows has ``r (H + 1) + 1`` by ``columns (W + 1) + 1`` pixels. Needs Pillow: ``pip install pillow``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_grid(load_images("digits").test[:16], f"{folder}/digits.png")
    """
    _check_pictures("images", images)
    n, channels, height, width = images.shape
    if channels not in (1, 3):
        raise ValueError(f"images: expected 1 channel (grey) or 3 (RGB); got {channels}. Save them one by one.")
    columns = math.ceil(math.sqrt(n)) if columns is None else columns
    check_count("columns", columns)
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"path: expected a name that ends in .png; got {os.fspath(path)!r}. Give it that ending.")
    rows = math.ceil(n / columns)
    grid = torch.full((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), 255, dtype=torch.uint8)
    for i, picture in enumerate(images.cpu()):
        top, left = i // columns * (height + 1) + 1, i % columns * (width + 1) + 1
        grid[top : top + height, left : left + width] = picture.permute(1, 2, 0)
    mode = "L" if channels == 1 else "RGB"
    _pillow().frombytes(mode, (grid.shape[1], grid.shape[0]), grid.numpy().tobytes()).save(path, format="PNG")


def _check_pictures(name: str, x: object) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.uint8 or x.ndim != 4 or not x.numel():
        came = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"{name}: expected a uint8 tensor (n, C, H, W) of at least one picture; got {came}. "
            "Scale to 0..255, round, and use .to(torch.uint8)."
        )


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("PNG files need Pillow: pip install pillow") from error
    return Image


def _digits() -> Images:
    table = load_table("digits", torch.float64)
    x = (table.x * 255 / 16).round().to(torch.uint8).reshape(-1, 1, 8, 8)
    train, _, test = split(x, validation=0, test=360 / len(x))
    train_labels, _, test_labels = split(table.target, validation=0, test=360 / len(x))
    return Images(train, test, train_labels, test_labels, "digits")


def _file(place: Path, name: str) -> Path | None:
    return next(filter(Path.is_file, (place / name, place / name.removesuffix(".gz"))), None)


def _locate(source: str, root: Path) -> list[Path] | None:
    """The files of the first form that is complete in one place."""
    for place, form in itertools.product((root / source, root), _FORMS[source]):
        files = [path for name in form if (path := _file(place, name))]
        if len(files) == len(form):
            return files
    return None


def _not_found(source: str, root: Path) -> ValueError | FileNotFoundError:
    places = (root / source, root)
    if source == "cifar10":
        for path in (place / name for place in places for name in _PICKLED):
            if path.exists():
                return ValueError(
                    f"{path}: this is the Python version of CIFAR-10, and quarflow never unpickles: that runs code. "
                    f"Get {_HOMES[source]}cifar-10-binary.tar.gz instead, or load with download=True."
                )
    # The fullest place is the one that was meant: there, the names of the missing files help most.
    place, form = max(
        itertools.product(places, reversed(_FORMS[source])),
        key=lambda at: sum(_file(at[0], name) is not None for name in at[1]),
    )
    missing = [name for name in form if not _file(place, name)]
    return FileNotFoundError(
        f"folder: the files of {source} must be together in {places[0]} or in {places[1]}; missing: "
        f"{', '.join(missing)}. Say where they are with folder= or the environment variable QUARFLOW_DATA, "
        "or load with download=True."
    )


def _download(source: str, folder: Path) -> list[Path]:
    """The files of ``source`` in ``folder``: those that are missing come from their home, whole and checked."""
    import urllib.request
    from http.client import HTTPException

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, wanted in _SHA256[source].items():
        path = _file(folder, name) or folder / name
        files.append(path)
        if path.exists():
            continue
        url = _HOMES[source] + name
        # Two processes may fetch the same file: each writes its own, and the last rename wins.
        part = folder / f"{name}.{os.getpid()}.part"
        digest = hashlib.sha256()
        try:
            with part.open("wb") as out, urllib.request.urlopen(url, timeout=60) as reply:
                while piece := reply.read(1 << 20):
                    digest.update(piece)
                    out.write(piece)
            if digest.hexdigest() != wanted:
                raise ValueError(
                    f"download: expected {url} to have SHA-256 {wanted}; got {digest.hexdigest()}. Nothing was kept. "
                    f"Try again later, or put the original file into {folder} yourself."
                )
            part.replace(path)
        except (OSError, HTTPException) as error:
            raise OSError(
                f"download: {url} could not be fetched into {folder}: {error}. Nothing was kept. "
                "Try again later, or put the original file there yourself."
            ) from error
        finally:
            part.unlink(missing_ok=True)
    return files


def _bytes(raw: bytes) -> Tensor:
    # A copy, as tensors of read-only memory are not safe.
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _read_idx(path: Path, ndim: int) -> Tensor:
    """An IDX file of bytes: 0, 0, 8, ``ndim``, then ``ndim`` big-endian uint32, the shape, then the values."""
    raw = path.read_bytes()
    # By content, not by name: browsers unpack downloads and keep the name.
    if raw.startswith(b"\x1f\x8b"):
        try:
            raw = gzip.decompress(raw)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: expected a whole gzip file; got {error}. {_AGAIN}") from error
    magic, start = bytes((0, 0, 8, ndim)), 4 + 4 * ndim
    if raw[:4] != magic:
        raise ValueError(
            f"{path}: expected an IDX file of {ndim} dimensions, which begins with {magic.hex(' ')}; "
            f"got {raw[:4].hex(' ') or 'an empty file'}. {_AGAIN}"
        )
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    if len(raw) != start + math.prod(shape) or 0 in shape:
        raise ValueError(
            f"{path}: expected {start} bytes and then {' x '.join(map(str, shape))}, as its header says, none of them "
            f"0; got {len(raw)} bytes in all. {_AGAIN}"
        )
    return _bytes(raw)[start:].reshape(shape)


def _read_mnist(source: str, files: list[Path]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    train, train_labels, test, test_labels = map(_read_idx, files, (3, 1, 3, 1))
    for i, x, labels in ((0, train, train_labels), (2, test, test_labels)):
        if len(x) != len(labels):
            raise ValueError(
                f"{files[i + 1]}: expected {len(x)} labels, one for each picture of {files[i]}; got {len(labels)}. "
                f"{_AGAIN}"
            )
    for other, first in _FIRST_LABELS.items():
        if other != source and train_labels[: len(first)].tolist() == first:
            raise ValueError(
                f"{files[0].parent}: expected the files of {source}; got those of {other}, which have the same names. "
                f"Put each into a subfolder, {source} and {other}."
            )
    return train[:, None], train_labels.long(), test[:, None], test_labels.long()


def _records(where: object, raw: bytes, batches: int = 1) -> Tensor:
    n = batches * _RECORDS
    if len(raw) != n * 3073:
        raise ValueError(f"{where}: expected {n} records of 3073 bytes, {n * 3073} in all; got {len(raw)}. {_AGAIN}")
    return _bytes(raw).reshape(n, 3073)


def _read_cifar10(files: list[Path]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Six batches of records, each a byte for the label, then the bytes of a picture ``(3, 32, 32)``."""
    if len(files) == 1:
        batches = _read_tar(files[0])
    elif len(files) == 2:
        batches = [batch for path in files for batch in _read_part(path).split(_RECORDS)]
    else:
        batches = [_records(path, path.read_bytes()) for path in files]
    train, test = (
        (
            torch.cat([batch[:, 1:] for batch in some]).reshape(-1, 3, 32, 32),
            torch.cat([batch[:, 0] for batch in some]).long(),
        )
        for some in (batches[:5], batches[5:])
    )
    return *train, *test


def _read_tar(path: Path) -> list[Tensor]:
    found: dict[str, Tensor] = {}
    try:
        # In the order of the archive: to go back in it is to decompress it again.
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() and member.name in _MEMBERS else None
                if content is not None:
                    found[member.name] = _records(f"{path}: {member.name}", content.read(_RECORDS * 3073 + 1))
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: expected a whole tar archive; got {error}. {_AGAIN}") from error
    if missing := [name for name in _MEMBERS if name not in found]:
        raise ValueError(f"{path}: expected the members {', '.join(missing)} in it; got none of them. {_AGAIN}")
    return [found[name] for name in _MEMBERS]


def _read_part(path: Path) -> Tensor:
    """Records of half of CIFAR-10, kept as the errors of a prediction.

    Under xz are ``e = p - q mod 256``, bytes ``(3, n, 32, 32)``, then ``n`` labels, where ``p = (g, r - g, b - g)`` and
    ``q`` is the median edge predictor: ``west + north - northwest`` clamped between west and north. The first row and
    column have one neighbour, which is ``q``, and the first pixel has none: ``q = 0``.
    """
    import lzma

    try:
        raw = _records(path, lzma.decompress(path.read_bytes()), batches=3)
    except lzma.LZMAError as error:
        raise ValueError(f"{path}: expected a whole xz file; got {error}. Get this part again.") from error
    n = len(raw)
    flat = raw.flatten()
    # Pictures last, so that each step of the loop runs along memory.
    e = flat[: n * 3072].reshape(3, n, 32, 32).permute(0, 2, 3, 1).to(torch.int16).contiguous()
    p = torch.zeros_like(e)
    for i, j in itertools.product(range(32), range(32)):
        if i and j:
            west, north = p[:, i, j - 1], p[:, i - 1, j]
            low, high = torch.minimum(west, north), torch.maximum(west, north)
            predicted = (west + north - p[:, i - 1, j - 1]).clamp(low, high)
        else:
            predicted = p[:, max(i - 1, 0), max(j - 1, 0)]
        total = predicted + e[:, i, j]
        g = total[0] & 255
        p[0, i, j] = g
        p[1:, i, j] = ((total[1:] + g) & 255) - g
    rgb = torch.stack([p[1] + p[0], p[0], p[2] + p[0]]).permute(3, 0, 1, 2).to(torch.uint8)
    return torch.cat([flat[n * 3072 :, None], rgb.reshape(n, 3072)], 1)


def _pictures(source: str | os.PathLike[str]) -> Images:
    root = Path(source).expanduser() if isinstance(source, str | os.PathLike) else None
    if root is None or not root.is_dir():
        raise ValueError(
            f"source: expected one of {', '.join(map(repr, SOURCES))}, or a folder of PNG files; "
            f"got {source!r}, and no such folder is there."
        )
    if (root / "train").is_dir() and (root / "test").is_dir():
        train = _png_files(root / "train")
        paths = [*train, *_png_files(root / "test")]
        is_test = torch.arange(len(paths)) >= len(train)
    else:
        paths = _png_files(root)
        if len(paths) < 2:
            raise ValueError(f"{root}: expected at least 2 pictures, one of them for the test; got 1. Add pictures.")
        every = min(10, len(paths))
        is_test = torch.arange(len(paths)) % every == every - 1
    x = _read_pngs(paths)
    return Images(x[~is_test], x[is_test], None, None, root.resolve().name)


def _png_files(folder: Path) -> list[Path]:
    paths = [path for path in folder.rglob("*") if path.suffix.lower() == ".png" and path.is_file()]
    if not paths:
        raise ValueError(f"{folder}: expected PNG files in it or below it; got none. Convert other pictures to PNG.")
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def _read_pngs(paths: list[Path]) -> Tensor:
    pictures = []
    for path in paths:
        pictures.append(_read_png(path))
        if pictures[-1].shape != pictures[0].shape:
            raise ValueError(
                f"{path}: expected (C, H, W) = {tuple(pictures[0].shape)}, as {paths[0]} has; "
                f"got {tuple(pictures[-1].shape)}. Make all pictures grey or all RGB, and of one size."
            )
    return torch.stack(pictures)


def _read_png(path: Path) -> Tensor:
    """One picture, ``(1, H, W)`` if it is grey and ``(3, H, W)`` if it is in colour."""
    pillow = _pillow()
    try:
        with path.open("rb") as stream:
            depth = stream.read(25)[24:]
            # `load` checks no checksum of the pixels, and `verify` loads none of them.
            pillow.open(stream, formats=["PNG"]).verify()
            image = pillow.open(stream, formats=["PNG"])
            image.load()
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise ValueError(f"{path}: expected a PNG file; this one cannot be read: {error}. Replace it.") from error
    if depth == b"\x10":
        raise ValueError(f"{path}: expected 8 bits a channel; got 16. Scale it to 0..255 and save it with 8.")
    if "A" in image.mode or "transparency" in image.info:
        raise ValueError(
            f"{path}: expected a picture without transparency; got mode {image.mode} with it. "
            "Put it on a background and save it as grey or RGB."
        )
    image = image.convert({"1": "L", "P": "RGB"}.get(image.mode, image.mode))
    return _bytes(image.tobytes()).reshape(image.height, image.width, -1).permute(2, 0, 1)
