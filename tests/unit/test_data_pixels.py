"""Sizes on the patch grid, and decoding of every kind of image a dataset may hold."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rlcore.data.pixels import Header, load_rgb, read_header, stable_target_size
from rlcore.data.rejects import Reason, Unusable
from rlcore.data.tiny import build_processor
from rlcore.families.gemma3 import SquareResizing
from rlcore.families.glm4v import EnlargingGridResizing
from rlcore.families.idefics3 import NamedTileResizing
from rlcore.families.idefics3 import tile_grid as named_tile_grid
from rlcore.families.internvl import TileResizing, tile_grid
from rlcore.families.qwen2_vl import GridResizing, target_size

SIDES = st.integers(1, 6000)


def grid(factor: int) -> GridResizing:
    settings = SimpleNamespace(patch_size=factor // 2, merge_size=2)
    return GridResizing(SimpleNamespace(image_processor=settings))


def tiles(most: int = 12) -> TileResizing:
    processor = SimpleNamespace(size={"height": 448, "width": 448}, min_patches=1, max_patches=most)
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda tokens: range(len(tokens)))
    loaded = {"image_processor": processor, "image_seq_length": 256, "image_token_id": 9, "tokenizer": tokenizer}
    return TileResizing(SimpleNamespace(**loaded))


def named_tiles(longest: int = 4 * 364) -> NamedTileResizing:
    sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": 364}}
    return NamedTileResizing(SimpleNamespace(image_processor=SimpleNamespace(**sizes)))


def encode(image: Image.Image, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format=format, **options)
    return file.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, with next to no pixels behind it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def reason_of(function, *arguments) -> Reason:
    with pytest.raises(Unusable) as caught:
        function(*arguments)
    return caught.value.reason


def test_target_size_worked_out_by_hand():
    assert target_size(487, 427, 28, 56 * 56, 1024 * 1024) == (476, 420)  # 17.39 and 15.25 squares
    assert target_size(42, 40, 28, 1, 10**6) == (56, 28)  # 1.5 rounds to 2, 1.43 to 1
    assert target_size(70, 14, 28, 1, 10**6) == (
        28,
        28,
    )  # 0.5 rounds to 0: no area, so the smallest one grows
    assert target_size(2800, 2800, 28, 56 * 56, 28 * 28 * 100) == (280, 280)
    assert target_size(10, 10, 28, 56 * 56, 1024 * 1024) == (56, 56)


@settings(max_examples=400)
@given(SIDES, SIDES, st.sampled_from([28, 32]), st.integers(1, 10**6), st.integers(1, 10**7))
def test_target_size_is_the_rule_of_the_model_s_processor(width, height, factor, low, high):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    low, high = min(low, high), max(low, high)
    try:
        expected = smart_resize(height, width, factor, low, high)
    except ValueError:
        with pytest.raises(ValueError, match="aspect ratio"):
            target_size(width, height, factor, low, high)
    else:
        assert target_size(width, height, factor, low, high) == expected[::-1]


@settings(max_examples=400)
@given(SIDES, SIDES, st.sampled_from([28, 32]))
def test_every_ordinary_image_has_a_size_that_a_second_pass_leaves_alone(width, height, factor):
    if max(width, height) / min(width, height) > 50:
        return
    size = stable_target_size(width, height, grid(factor), 56 * 56, 1024 * 1024)
    assert target_size(*size, factor, 56 * 56, 1024 * 1024) == size
    assert 56 * 56 <= size[0] * size[1] <= 1024 * 1024


@pytest.mark.parametrize(
    ("width", "height", "low", "high"),
    [
        (
            5600,
            28,
            1,
            56 * 56,
        ),  # the short side cannot shrink below one square, so a second pass shrinks the long
        (41, 41 * 199, 1, 10**7),  # 28 x 8148 is longer than the rule allows
        (1, 201, 1, 10**6),
        (1000, 1000, 100_000, 100_000),  # no multiple of 28 x 28 has this area
    ],
)
def test_a_size_that_a_second_pass_would_change_is_refused(width, height, low, high):
    assert reason_of(stable_target_size, width, height, grid(28), low, high) == Reason.IMAGE_SHAPE


@settings(max_examples=400)
@given(SIDES, SIDES, st.sampled_from([28, 32]))
def test_the_size_of_an_enlarged_grid_is_that_of_the_model_s_processor(width, height, factor):
    from transformers.models.glm4v.image_processing_glm4v import smart_resize

    rule = EnlargingGridResizing(grid(factor).processor)
    low, high = 56 * 56, 1024 * 1024
    try:  # the processor counts the pixels of two frames
        rows, columns = smart_resize(2, height, width, 2, factor, 2 * low, 2 * high)
    except ValueError:
        with pytest.raises(ValueError, match="aspect ratio"):
            rule.target_size(width, height, low, high)
        return
    assert rule.target_size(width, height, low, high) == (columns, rows)


def test_a_grid_of_tiles_worked_out_by_hand():
    assert tile_grid(800, 500, 448, 1, 12) == (3, 2)  # 1.6: 3/2 is nearer than 4/3 and 2/1; 5/3 has too many
    assert tile_grid(800, 800, 448, 1, 12) == (2, 2)  # 640,000 is more than half of 4 tiles, less than half of 9
    assert tile_grid(100, 100, 448, 1, 12) == (1, 1)
    assert tile_grid(100, 100, 448, 2, 12) == (2, 2)  # one tile is not enough
    assert tile_grid(1, 9000, 448, 1, 6) == (1, 6)
    with pytest.raises(ValueError, match="at least 1 and at most 0 tiles of 448x448"):
        tile_grid(100, 100, 448, 1, 0)


@settings(max_examples=400)
@given(SIDES, SIDES, st.sampled_from([56, 448]), st.integers(1, 4), st.integers(4, 40))
def test_the_grid_of_tiles_is_that_of_the_model_s_processor(width, height, side, fewest, most):
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    expected = get_optimal_tiled_canvas((height, width), (side, side), fewest, most)
    assert tile_grid(width, height, side, fewest, most) == expected


def test_bounds_on_pixels_are_bounds_on_tiles():
    """A tile has 200,704 pixels, so a million holds five."""
    assert tiles().target_size(2000, 1000, 1, 10**6) == (896, 448)
    assert tiles().target_size(2000, 1000, 1, 10**7) == (4 * 448, 2 * 448)
    assert tiles(most=4).target_size(2000, 1000, 1, 10**7) == (896, 448)  # the processor's own bound
    assert tiles().target_size(100, 100, 200_705, 10**7) == (896, 896)  # at least two tiles
    counts = [len(tiles().expansion(448 * columns, 448)) for columns in (1, 2)]
    assert counts == [2 + 256, 2 + 3 * 256]  # around, and with the whole image
    assert reason_of(stable_target_size, 100, 100, tiles(), 1, 200_703) == Reason.IMAGE_SHAPE


@settings(max_examples=200)
@given(SIDES, SIDES, st.integers(1, 12))
def test_every_image_has_tiles_that_a_second_pass_leaves_alone(width, height, most):
    size = stable_target_size(width, height, tiles(most), 1, 10**7)
    assert tiles(most).target_size(*size, 1, 10**7) == size


@pytest.mark.parametrize("size", [(1, 1), (56, 56), (1000, 20), (30, 3000)])
def test_every_image_becomes_the_same_square_as_by_the_model_s_processor(size):
    processor = build_processor("gemma3")
    rule = SquareResizing(processor)
    target = rule.target_size(*size, 1, 84 * 84)
    assert target == rule.target_size(*target, 1, 84 * 84) == (84, 84)
    pixels = processor.image_processor(images=[Image.new("RGB", size)], return_tensors="np")["pixel_values"]
    assert pixels.shape == (1, 3, 84, 84)


def test_a_square_above_the_largest_number_of_pixels_is_refused():
    rule = SquareResizing(build_processor("gemma3"))
    with pytest.raises(ValueError, match="at most 7055 pixels are allowed, and every image has 84x84"):
        rule.target_size(100, 100, 1, 84 * 84 - 1)


def test_named_tiles_worked_out_by_hand():
    assert named_tile_grid(800, 500, 364, 1456) == (1456, 1092)  # 910 pixels high, in three rows
    assert named_tile_grid(500, 800, 364, 1456) == (1092, 1456)
    assert named_tile_grid(10, 10, 364, 1456) == (1456, 1456)
    assert named_tile_grid(9000, 1, 364, 1456) == (1456, 364)
    with pytest.raises(ValueError, match="0x5 has a side below 1"):
        named_tile_grid(0, 5, 364, 1456)


@settings(max_examples=300)
@given(SIDES, SIDES, st.sampled_from([364, 512]), st.integers(1, 4))
def test_the_grid_of_named_tiles_is_that_of_the_model_s_processor(width, height, side, most):
    from transformers import Idefics3ImageProcessor

    sizes = {"size": {"longest_edge": most * side}, "max_image_size": {"longest_edge": side}}
    _, rows, columns = Idefics3ImageProcessor(**sizes).get_number_of_image_patches(height, width)
    found = named_tile_grid(width, height, side, most * side)
    assert found == (max(1, columns) * side, max(1, rows) * side)


def test_the_largest_number_of_pixels_bounds_the_longer_side_of_named_tiles():
    assert named_tiles().target_size(2000, 1000, 1, 10**7) == (1456, 728)  # the processor's own bound
    assert named_tiles().target_size(2000, 1000, 1, 10**6) == (728, 364)  # a side of 1,000 has two tiles
    assert named_tiles().target_size(2000, 1000, 1, 364**2) == (364, 364)
    assert reason_of(stable_target_size, 100, 100, named_tiles(), 1, 364**2 - 1) == Reason.IMAGE_SHAPE


@settings(max_examples=200)
@given(SIDES, SIDES, st.integers(1, 4))
def test_every_image_has_named_tiles_that_a_second_pass_leaves_alone(width, height, most):
    size = stable_target_size(width, height, named_tiles(most * 364), 1, 10**7)
    assert named_tiles(most * 364).target_size(*size, 1, 10**7) == size


RED, HALF_BLACK = (255, 0, 0), (0, 0, 0, 128)


def palette_with_transparency() -> bytes:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    return encode(image, transparency=0)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (encode(Image.new("RGB", (4, 4), RED)), RED),
        (encode(Image.new("RGBA", (4, 4), (*RED, 255))), RED),
        (encode(Image.new("RGBA", (4, 4), HALF_BLACK)), (127, 127, 127)),  # on white
        (encode(Image.new("RGBA", (4, 4), (0, 0, 0, 0))), (255, 255, 255)),
        (encode(Image.new("LA", (4, 4), (0, 128))), (127, 127, 127)),
        (encode(Image.new("L", (4, 4), 90)), (90, 90, 90)),
        (encode(Image.new("1", (4, 4), 1)), (255, 255, 255)),
        (palette_with_transparency(), (255, 255, 255)),
        (encode(Image.new("RGB", (4, 4), RED), transparency=RED), (255, 255, 255)),
        (encode(Image.new("P", (4, 4), 0)), (0, 0, 0)),
        (encode(Image.fromarray(np.full((4, 4), 32896, np.uint16))), (128, 128, 128)),  # 32896 = 128 * 257
        (encode(Image.new("CMYK", (8, 8), (0, 0, 0, 255)), "JPEG"), (0, 0, 0)),
        (encode(Image.new("RGB", (4, 4), RED), "WEBP", lossless=True), RED),
        (encode(Image.new("RGB", (4, 4), RED), "BMP"), RED),
        (encode(Image.new("P", (4, 4), 0), "GIF"), (0, 0, 0)),
    ],
)
def test_every_mode_becomes_rgb(content, expected):
    image = load_rgb(content)
    assert image.mode == "RGB"
    assert np.abs(np.asarray(image).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    from PIL import ImageOps

    picture = Image.fromarray(np.arange(6 * 10 * 3, dtype=np.uint8).reshape(6, 10, 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encode(picture, exif=exif)
    header = read_header(content)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert (header.width, header.height) == upright.size == load_rgb(content).size
    assert np.array_equal(np.asarray(load_rgb(content)), np.asarray(upright))


def test_only_an_upright_rgb_png_counts_as_ready():
    exif = Image.Exif()
    exif[0x0112] = 3
    picture = Image.new("RGB", (5, 7))
    assert read_header(encode(picture)) == Header(5, 7, 1, ready=True)
    assert not read_header(encode(picture, exif=exif)).ready
    assert not read_header(encode(picture, transparency=(0, 0, 0))).ready
    assert not read_header(encode(picture, "JPEG")).ready
    assert not read_header(encode(picture.convert("L"))).ready


@pytest.mark.parametrize("side", [8400, 9700, 60_000])  # below, at and above the sizes Pillow itself warns about
def test_a_decompression_bomb_is_refused_by_its_header_and_without_a_warning(side):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reason_of(read_header, png_claiming(side, side)) == Reason.IMAGE_TOO_LARGE
        assert reason_of(load_rgb, png_claiming(side, side)) == Reason.IMAGE_TOO_LARGE


def test_unusable_files_say_why():
    noise = Image.effect_noise((64, 64), 100)
    assert reason_of(load_rgb, encode(noise)[:1000]) == Reason.IMAGE_DAMAGED
    assert reason_of(load_rgb, encode(noise, "JPEG")[:1000]) == Reason.IMAGE_DAMAGED
    assert read_header(encode(noise)[:1000]).width == 64  # the header alone is whole
    assert reason_of(read_header, b"") == Reason.IMAGE_FORMAT
    assert reason_of(read_header, b"<svg></svg>") == Reason.IMAGE_FORMAT
    assert reason_of(load_rgb, png_claiming(500, 500)) == Reason.IMAGE_DAMAGED
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    for format in ("GIF", "PNG", "WEBP"):
        film = encode(frames[0], format, save_all=True, append_images=frames[1:])
        assert reason_of(read_header, film) == Reason.IMAGE_ANIMATED
    assert reason_of(read_header, encode(noise, "TIFF")) == Reason.IMAGE_FORMAT


def test_a_phone_s_multi_picture_jpeg_is_its_first_picture():
    pictures = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    content = encode(pictures[0], "MPO", save_all=True, append_images=pictures[1:])
    assert np.abs(np.asarray(load_rgb(content)).astype(int) - RED).max() <= 2


SAMPLES = [
    encode(Image.effect_noise((20, 20), 50).convert(mode), format)
    for mode, format in [
        ("RGBA", "PNG"),
        ("P", "PNG"),
        ("RGB", "JPEG"),
        ("P", "GIF"),
        ("RGB", "WEBP"),
        ("L", "BMP"),
    ]
]


@settings(max_examples=300)
@given(st.sampled_from(SAMPLES), st.data())
def test_damaged_bytes_give_an_image_or_a_reason_and_never_a_warning(content, data):
    broken = bytearray(content)
    for _ in range(data.draw(st.integers(1, 6))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    broken = broken[: data.draw(st.integers(0, len(broken)))] if data.draw(st.booleans()) else broken
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            mode = load_rgb(bytes(broken)).mode
        except Unusable:
            return
    assert mode == "RGB"
