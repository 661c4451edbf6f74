import contextlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from onecopy.runtime.store.safetensors import BF16, DTYPES, BadImage, Image, decode, encode

arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: npst.arrays(DTYPES[name].str, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)).map(
        lambda a: np.asarray(a).view(DTYPES[name])
    )
)
images = st.dictionaries(st.text(max_size=12).filter(lambda n: n != "__metadata__"), arrays, max_size=5)


def crafted(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@given(images, st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_what_is_encoded_decodes_to_the_same_bits(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    back = decode(encode(Image(tensors, metadata)))
    assert back.metadata == metadata
    assert list(back.tensors) == list(tensors)
    for name, array in tensors.items():
        got = back.tensors[name]
        assert (got.shape, got.dtype, got.dtype.metadata) == (array.shape, array.dtype, array.dtype.metadata)
        assert got.tobytes() == array.tobytes()


@given(st.binary(max_size=300))
def test_any_bytes_either_decode_or_are_a_bad_image(raw: bytes) -> None:
    with contextlib.suppress(BadImage):
        decode(raw)


@given(st.data())
def test_a_damaged_header_either_decodes_or_is_a_bad_image(data: st.DataObject) -> None:
    raw = bytearray(encode(Image({"0.keys": np.arange(12, dtype="f4").reshape(3, 4)}, {"a": "b"})))
    raw[data.draw(st.integers(0, len(raw) - 49))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadImage):
        decode(bytes(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 64,
        struct.pack("<Q", 2**63) + b"{}",
        crafted(b"[" * 100_000),
        crafted(b'{"a":' * 100_000),
        crafted({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        crafted({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, b"1234"),
        crafted({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        crafted({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345"),
        crafted({"a": {"dtype": "U8", "shape": [2**62, 0], "data_offsets": [0, 0]}, "b": 1}),
        crafted({"a": {"dtype": "U8", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}),
        crafted({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, b"1234"),
        crafted({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"),
        crafted({"__metadata__": {"a": 1}}),
    ],
)
def test_hostile_images_are_refused(raw: bytes) -> None:
    with pytest.raises(BadImage):
        decode(raw)


def test_a_foreign_dtype_is_refused_when_written() -> None:
    with pytest.raises(BadImage):
        encode(Image({"a": np.zeros(1, "c16")}))


def test_strided_views_are_written_as_what_they_show() -> None:
    buffer = np.arange(2 * 8 * 3, dtype="u2").reshape(2, 8, 3).view(BF16)
    got = decode(encode(Image({"x": buffer[:, 2:5]}))).tensors["x"]
    assert (got == buffer[:, 2:5]).all()
    assert got.dtype.metadata == {"safetensors": "BF16"}


def test_decoded_arrays_are_read_only_views() -> None:
    assert not decode(encode(Image({"x": np.zeros(4, "f4")}))).tensors["x"].flags.writeable
