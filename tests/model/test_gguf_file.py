"""Headers are read as the library reads them, every type that it can dequantise too, and broken files are one line."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.audit import CheckpointError
from model.gguf_file import is_gguf, open_gguf
from tests.model import tiny_gguf as tiny

DEQUANTISED = [
    kind for kind in gguf.GGMLQuantizationType if kind in (0, 1) or kind in gguf.quants._type_traits  # F32, F16
]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = tiny.metadata() | {"x.floats": [1.5, 2.5], "x.nested": ["a", "ü"], "x.small": 1e-5, "x.no": False}
    return tiny.write(tmp_path_factory.mktemp("gguf") / "m.gguf", tiny.hub_tensors(), keys)


def test_metadata_and_tensors_are_the_librarys(path: Path) -> None:
    file, problems = open_gguf(path)
    reader = gguf.GGUFReader(path)
    assert problems == []
    assert is_gguf(path)
    want = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata.keys() == want.keys()
    for key, value in file.metadata.items():
        assert value == want[key] or np.float32(value) == np.float32(want[key]), key
    assert file.metadata["x.small"] == 1e-5  # the shortest decimal of the float32
    for tensor in reader.tensors:
        np.testing.assert_array_equal(file.tensors[tensor.name].read(), tensor.data)


@pytest.mark.parametrize("kind", DEQUANTISED, ids=lambda kind: kind.name)
def test_every_type_that_the_library_dequantises(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = -(-256 // block)
    raw = np.random.default_rng(0).integers(0, 64, (3, blocks * size), np.uint8)  # below 64: no NaN in any half float
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, problems = open_gguf(tmp_path / "m.gguf")
    assert problems == []
    assert file.tensors["t"].shape == (3, blocks * block)
    np.testing.assert_array_equal(file.tensors["t"].read(), gguf.dequantize(raw, kind))


def header(tensors: list[tuple[str, tuple[int, ...], int, int]], data: bytes = b"", version: int = 3) -> bytes:
    raw = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 0)
    for name, shape, kind, offset in tensors:
        raw += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        raw += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, offset)
    return raw + b"\0" * (-len(raw) % 32) + data


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([("t", (2, 4), 0, 0)], "its data ends at byte"),
        ([("t", (1 << 40, 1 << 40), 0, 0)], "its data ends at byte"),
        ([("t", (2, 30), 8, 0)], "rows of 30 are not whole blocks of 32, as Q8_0 needs"),
        ([("t", (1,), 200, 0)], "type 200 is unknown to gguf"),
        ([("t", (1,), 26, 0)], "type I32 cannot be dequantised"),
        ([("t", (1,), 0, 0), ("t", (1,), 0, 0)], "occurs twice"),
    ],
)
def test_faults_of_tensors_are_problems(tmp_path: Path, tensors: list[Any], said: str) -> None:
    (tmp_path / "m.gguf").write_bytes(header(tensors, b"\0" * 8))
    _, problems = open_gguf(tmp_path / "m.gguf")
    assert len(problems) == 1
    assert problems[0].startswith("m.gguf: tensor t: ")
    assert said in problems[0]


@pytest.mark.parametrize(
    "raw",
    [
        b"GGUF",
        b"GGML" + bytes(40),
        header([], version=1),
        header([], version=3 << 24),
        header([("t", (1,) * 5, 0, 0)]),
        header([("a\nb", (1,), 0, 0)], bytes(8)),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 0, 1 << 60),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 60),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1) * 9,
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 17) + b"general.alignment" + struct.pack("<II", 4, 3),
    ],
)
def test_a_broken_header_is_one_line(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match="is not a GGUF file that can be read") as caught:
        open_gguf(tmp_path / "m.gguf")
    assert len(caught.value.problems) == 1


@settings(max_examples=60)
@given(st.data())
def test_any_cut_or_changed_byte_is_told_or_harmless(path: Path, data: st.DataObject) -> None:
    raw = bytearray(path.read_bytes()[: data.draw(st.integers(0, 12_000))])
    for at in data.draw(st.lists(st.integers(0, max(0, len(raw) - 1)), max_size=3)) if raw else ():
        raw[at] = data.draw(st.integers(0, 255))
    (path.parent / "broken.gguf").write_bytes(raw)
    try:
        file, problems = open_gguf(path.parent / "broken.gguf")
    except CheckpointError:
        return
    assert problems or file.tensors == {}


def test_one_of_several_parts_is_a_problem(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", {}, {"split.count": 3})
    assert "is one of 3 parts" in open_gguf(path)[1][0]
