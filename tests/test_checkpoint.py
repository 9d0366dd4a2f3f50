"""`save` and `load`: the same bits back; and whatever else is in a file, a reason and a remedy."""

import errno
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quarflow.checkpoint import CheckpointError, load, read_tensors, save, write_tensors
from quarflow.flow import Flow
from quarflow.models import REGISTRY, quar


def scrambled(flow: Flow) -> Flow:
    """A flow whose tensors are all away from what a constructor gives them."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for t in flow.state_dict().values():
            if t.is_floating_point():
                t.add_(0.3 * torch.rand(t.shape, generator=generator, dtype=t.dtype))
    return flow


def small(**options: object) -> Flow:
    return scrambled(quar(**{"features": 2, "blocks": 2, "hidden": (4,), **options}))


def saved(path: Path, flow: Flow | None = None) -> Path:
    save(small() if flow is None else flow, path)
    return path


def contents(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], object]) -> Path:
    """The file with its tensors and metadata changed in place by ``change``."""
    tensors, metadata = contents(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    return path


# There and back.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"features": 5, "mixing": "permute"},
        {"context": 3, "hidden": (4, 6), "lipschitz": "network", "mixing": "lu"},
        {"activation": "elu", "trick": False, "mixing": None, "actnorm": False, "base": "student"},
    ],
)
def test_the_same_bits_come_back(tmp_path, options, dtype):
    flow = small(**options).to(dtype).eval()
    x = torch.randn(20, *flow.event_shape, dtype=dtype)
    context = torch.randn(20, flow.context_features, dtype=dtype) if flow.context_features else None
    state = torch.get_rng_state()
    loaded = load(saved(tmp_path / "m.qf", flow))
    assert torch.equal(torch.get_rng_state(), state)
    assert loaded.config == flow.config
    assert not loaded.training
    assert {name: t.dtype for name, t in loaded.state_dict().items()} == {
        name: t.dtype for name, t in flow.state_dict().items()
    }
    assert torch.equal(loaded.log_prob(x, context), flow.log_prob(x, context))


def test_another_default_dtype_does_not_matter(tmp_path):
    flow = small()
    save(flow, tmp_path / "m.qf")
    x = torch.randn(20, 2)
    torch.set_default_dtype(torch.float64)
    try:
        loaded = load(tmp_path / "m.qf")
        saved(tmp_path / "again.qf", flow)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(loaded.log_prob(x), flow.log_prob(x))
    assert contents(tmp_path / "again.qf")[1] == contents(tmp_path / "m.qf")[1]


def test_what_is_in_a_file(tmp_path):
    flow = small().double()
    tensors, metadata = contents(saved(tmp_path / "m.qf", flow))
    assert tensors.keys() == flow.state_dict().keys()
    assert metadata["format"] == "quarflow"
    assert metadata["format_version"] == "1"
    assert metadata["kind"] == "flow"
    assert metadata["dtype"] == "float64"
    assert json.loads(metadata["config"]) == json.loads(json.dumps(flow.config.to_dict()))
    assert {"quarflow_version", "torch_version"} <= metadata.keys()


def test_a_compiled_flow_is_saved_as_itself(tmp_path):
    flow = small()
    loaded = load(saved(tmp_path / "m.qf", torch.compile(flow, backend="eager")))
    assert loaded.state_dict().keys() == flow.state_dict().keys()


def test_tensors_that_share_memory(tmp_path):
    whole = torch.arange(6.0).reshape(2, 3)
    written = {"a": whole, "b": whole, "c": whole.T, "d": whole[1], "e": torch.zeros(0)}
    write_tensors(tmp_path / "t", written, {"kind": "k"})
    tensors, metadata = read_tensors(tmp_path / "t", "k")
    assert metadata["kind"] == "k"
    for name, expected in written.items():
        assert torch.equal(tensors[name], expected)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "m.qf"
    link.symlink_to(tmp_path / "real" / "m.qf")
    saved(link)
    assert link.is_symlink()
    assert load(tmp_path / "real" / "m.qf").config == small().config


# In pieces.


def pieces(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix == ".safetensors")


def test_a_flow_in_pieces(tmp_path):
    flow, path = small(hidden=(32, 32)), tmp_path / "m.qf"
    save(flow, path, shard_size="20KiB")
    files = pieces(tmp_path)
    assert len(files) > 1
    assert max(map(os.path.getsize, files)) <= 20 * 1024
    index = json.loads(path.read_text())
    assert index["weight_map"].keys() == flow.state_dict().keys()
    assert set(index["weight_map"].values()) == {p.name for p in files}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for p in (*files, path):
        p.rename(elsewhere / p.name)
    loaded = load(elsewhere / "m.qf")
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in flow.state_dict().items())
    # What is written next takes the place of all of it.
    save(small(), elsewhere / "m.qf", shard_size="1MiB")
    assert len(pieces(elsewhere)) == 1
    save(small(), elsewhere / "m.qf")
    assert pieces(elsewhere) == []


def test_a_failed_write_leaves_the_old_pieces(tmp_path, monkeypatch):
    path = tmp_path / "m.qf"
    save(small(), path, shard_size=2048)
    before, calls, fsync = {p: p.read_bytes() for p in tmp_path.iterdir()}, [], os.fsync

    def fills_up(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fills_up)
    with pytest.raises(OSError, match=r"could not write .*; the file that was there before is intact"):
        save(small(hidden=(32, 32)), path, shard_size=2048)
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_pieces_that_do_not_fit(tmp_path):
    path = tmp_path / "m.qf"
    save(small(hidden=(32, 32)), path, shard_size="6KiB")
    first, index = pieces(tmp_path)[0], path.read_text()
    whole = first.read_bytes()
    first.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match=rf"{first.name}: truncated or damaged"):
        load(path)
    first.unlink()
    with pytest.raises(CheckpointError, match=rf"1 of its \d+ files are missing: {first.name}. Put them"):
        load(path)
    first.write_bytes(pieces(tmp_path)[-1].read_bytes())
    with pytest.raises(CheckpointError, match="do not hold the tensors that it names"):
        load(path)
    first.write_bytes(whole)
    for damaged in (
        "{",
        "{}",
        "[" * 10,
        index.replace(first.name, f"../{first.name}"),
        index.replace('"weight_map": {', '"weight_map": {"x": 3,'),
        '{"metadata": [], "weight_map": {}}',
    ):
        path.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"no index of a quarflow file|not safetensors|truncated"):
            load(path)
    path.write_text(index)
    load(path)
    for size in (0, "16 apples", "12", -1, True, 1.5):
        with pytest.raises(ValueError, match="shard_size: expected a size of 1KiB or more"):
            save(small(), path, shard_size=size)


# What cannot be saved.


def test_flows_that_a_configuration_does_not_build(tmp_path):
    flow = small()
    by_hand = Flow(flow.transform, flow.base)
    with pytest.raises(ValueError, match=r"flow: expected a flow from quarflow.models.*Use safetensors"):
        save(by_hand, tmp_path / "m.qf")
    flow.register_buffer("extra", torch.zeros(1))
    with pytest.raises(ValueError, match="not those that its configuration builds: extra is not known"):
        save(flow, tmp_path / "m.qf")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere does not exist. Create it"):
        save(small(), tmp_path / "nowhere" / "m.qf")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = saved(tmp_path / "m.qf")
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"could not write .*: No space left.*; the file .* is intact"
    ) as caught:
        save(small(features=3), path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    with pytest.raises(OSError, match="no part of it was left behind"):
        save(small(), tmp_path / "new.qf")

    def stop(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        save(small(features=3), path)
    assert [p.name for p in tmp_path.iterdir()] == ["m.qf"]
    assert path.read_bytes() == before


FULL = """
import resource, sys
from quarflow.checkpoint import save
from quarflow.models import quar
small, large = quar(features=2, blocks=1, hidden=(4,)), quar(features=2, blocks=1, hidden=(256, 256))
save(small, sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save(large, sys.argv[1])
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits on the size of files are POSIX")
def test_a_file_that_really_cannot_grow(tmp_path):
    path = tmp_path / "m.qf"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True)
    assert "File too large; the file that was there before is intact" in done.stdout
    assert load(path).config == quar(features=2, blocks=1, hidden=(4,)).config
    assert [p.name for p in tmp_path.iterdir()] == ["m.qf"]


# What cannot be loaded.


def test_missing_and_foreign_files(tmp_path):
    path = tmp_path / "m.qf"
    with pytest.raises(FileNotFoundError, match=r"m.qf: there is no such file"):
        load(path)
    with pytest.raises(CheckpointError, match="expected a file; got a folder"):
        load(tmp_path)
    for foreign in (b"a line of text, and another one", b"\x89PNG\r\n\x1a\n" + bytes(100)):
        path.write_bytes(foreign)
        with pytest.raises(CheckpointError, match=r"not safetensors, so not a quarflow file.*quarflow.save"):
            load(path)
    torch.save(small().state_dict(), path)
    with pytest.raises(CheckpointError, match="not safetensors"):
        load(path)
    for metadata in (
        None,
        {"format": "pt"},
        {"format": "quarflow"},
        {"format": "quarflow", "format_version": "x"},
    ):
        save_file({"a": torch.zeros(2)}, path, metadata)
        with pytest.raises(CheckpointError, match="a safetensors file, but not a quarflow file"):
            load(path)


def test_truncated_files(tmp_path):
    path = saved(tmp_path / "m.qf")
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for length in {0, 1, 8, 9, 50, header - 1, header, header + 1, len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"truncated or damaged.*Use another copy"):
            load(path)


def test_damaged_headers(tmp_path):
    """Any byte of the header may change: the file loads, or the reason is a `CheckpointError`."""
    path = saved(tmp_path / "m.qf")
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for place in torch.randint(header, (150,), generator=generator).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(torch.randint(8, (), generator=generator))
        path.write_bytes(damaged)
        try:
            load(path)
        except CheckpointError:
            refused += 1
    assert refused > 75


def config(**changes: object) -> Callable[[dict[str, torch.Tensor], dict[str, str]], object]:
    def change(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        metadata["config"] = json.dumps({**json.loads(metadata["config"]), **changes})

    return change


FIRST = "transform.transforms.1.log_scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t, m: m.update(format_version="2", quarflow_version="9.1"),
            "<= 1; got 2, written by .* 9.1.*Update",
        ),
        (lambda t, m: m.update(kind="training"), "expected the kind 'flow'; got 'training'. Continue"),
        (lambda t, m: m.pop("config"), "header is damaged.*config"),
        (lambda t, m: m.update(config="{"), "header is damaged"),
        (lambda t, m: m.update(config="[" * 100_000), "header is damaged"),
        (lambda t, m: m.update(config="[1, 2]"), "cannot be built.*expected a JSON object; got list"),
        (lambda t, m: m.update(config="{}"), "cannot be built"),
        (lambda t, m: m.update(dtype="int8"), "header is damaged.*int8"),
        (config(model="nonesuch"), "cannot be built here: model: expected one of .*'nonesuch'"),
        (config(widths=[4]), "cannot be built here: .*widths"),
        (config(features="2"), "cannot be built here: features"),
        (config(features=10**9), "a size of 1,000,000,000, more than"),
        (config(blocks=10**9), "a size of 1,000,000,000, more than"),
        (config(hidden=[10**12]), "a size of 1,000,000,000,000, more than"),
        (config(blocks=3), "do not fit its configuration: .* is missing"),
        (config(blocks=1), "do not fit its configuration: .* is not known"),
        (config(features=3), r"do not fit .*\(2,\), expected torch.float32 \(3,\).* and .* more"),
        (lambda t, m: t.pop(FIRST), f"{FIRST} is missing. Use another copy"),
        (lambda t, m: t.update(more=torch.zeros(1)), "more is not known. Use another copy"),
        (lambda t, m: t.update({FIRST: torch.zeros(3)}), rf"{FIRST} is .* \(3,\), expected .* \(2,\)"),
        (
            lambda t, m: t.update({FIRST: torch.zeros(2).double()}),
            f"{FIRST} is torch.float64 .* torch.float32",
        ),
        (lambda t, m: t.update({FIRST: torch.zeros(2).int()}), f"{FIRST} is torch.int32"),
        (lambda t, m: m.update(dtype="float64"), "is torch.float32 .*, expected torch.float64"),
    ],
)
def test_files_that_do_not_fit(tmp_path, change, message):
    path = rewritten(saved(tmp_path / "m.qf"), change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path)
    assert isinstance(caught.value, ValueError)
    assert str(path) in str(caught.value)


def test_nothing_is_executed(tmp_path):
    """A file is data: one that names a class or a path to import is refused like any unknown model."""
    path = rewritten(saved(tmp_path / "m.qf"), config(model="os.system"))
    with pytest.raises(CheckpointError, match="model: expected one of"):
        load(path)
    assert "os.system" not in REGISTRY
    assert b"pickle" not in saved(path).read_bytes()
