"""Geometry3K, GSM8K and MATH for tests: files of our own with the same columns, image formats and oddities, and the
real ones where the folder RLFLOW_DATA (or ../shared/data) has them."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import ExifTags, Image, ImageCms, ImageDraw, PngImagePlugin

from tests.made_rows import (
    GEOMETRY3K_TRAIN,
    GEOMETRY3K_VALIDATION,
    GSM8K_TEST,
    GSM8K_TRAIN,
    MATH12K_TRAIN,
    MATH500_TEST,
    Diagram,
    Worked,
)

DEFAULT = Path(__file__).parents[2] / "shared" / "data"


@dataclass(frozen=True, slots=True)
class Counts:
    rows: int
    too_long: int = 0  # rows above 2048 tokens for a tokenizer of bytes
    images: int = 0  # distinct ones
    rewritable: int = 0  # at least so many answers can be written another way (test_rewards_gold.py)


@dataclass(frozen=True, slots=True)
class DataSets:
    kind: str
    folder: Path
    counts: Mapping[str, Counts]

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.parquet"


NAMES = ("geometry3k/train", "geometry3k/validation", "gsm8k/train", "gsm8k/test", "math12k/train", "math500/test")
REAL = dict(
    zip(
        NAMES,
        (
            Counts(2101, images=1712),
            Counts(300, images=289, rewritable=30),
            Counts(7473),
            Counts(1119),
            Counts(11998, too_long=22),
            Counts(500, rewritable=30),
        ),
        strict=True,
    )
)
# Counted by hand in tests/made_rows.py; PLAIN more rows, each with a diagram of its own, come to Geometry3K and GSM8K.
PLAIN = 40
MADE = dict(
    zip(
        NAMES,
        (
            Counts(28 + PLAIN, images=25 + PLAIN),
            Counts(18 + PLAIN, images=17 + PLAIN, rewritable=15),
            Counts(8 + PLAIN),
            Counts(4 + PLAIN),
            Counts(65, too_long=2),
            Counts(28, rewritable=16),
        ),
        strict=True,
    )
)


def real_folder() -> Path | None:
    """The folder with the real data sets, or None.

    Raises:
        FileNotFoundError: RLFLOW_DATA names a folder that lacks one of them.
    """
    named = os.environ.get("RLFLOW_DATA")
    folder = Path(named) if named else DEFAULT
    missing = [name for name in NAMES if not (folder / f"{name}.parquet").is_file()]
    if named and missing:
        raise FileNotFoundError(
            f"RLFLOW_DATA is {named}, which has no {missing[0]}.parquet. Put the data sets there, or unset it: "
            "the tests then use small files of their own."
        )
    return None if missing else folder


def kinds() -> tuple[str, ...]:
    return ("made",) if real_folder() is None else ("made", "real")


def open_data_sets(kind: str, folder: Path) -> DataSets:
    """The real ones, or those made here, written to ``folder``."""
    real = real_folder()
    if kind == "real" and real is not None:
        return DataSets(kind, real, REAL)
    _write_diagrams(folder, "train", GEOMETRY3K_TRAIN)
    _write_diagrams(folder, "validation", GEOMETRY3K_VALIDATION)
    _write_worked(folder, "math12k/train", MATH12K_TRAIN)
    _write_worked(folder, "math500/test", MATH500_TEST)
    for split, odd in (("train", GSM8K_TRAIN), ("test", GSM8K_TEST)):
        plain = [
            (f"Kim has {n} pens and buys {2 * n + 1} more. How many pens has Kim?", str(3 * n + 1))
            for n in range(PLAIN)
        ]
        rows = [
            {"problem": problem, "answer": answer, "id": f"gsm8k_{split}_{index}"}
            for index, (problem, answer) in enumerate([*odd, *plain])
        ]
        _write(folder / "gsm8k" / f"{split}.parquet", rows, ("problem", "answer", "id"))
    return DataSets("made", folder, MADE)


def _write_diagrams(folder: Path, split: str, odd: Sequence[Diagram]) -> None:
    first = 1 + max(row.picture for row in odd)
    plain = [
        Diagram(first + n, f"Two angles of the triangle measure {30 + n} and 70. Find the third.", str(80 - n))
        for n in range(PLAIN)
    ]
    rows = [
        {
            "images": [{"bytes": picture(f"{split} {row.picture}", row.picture), "path": f"geometry3k_{index}.png"}],
            "problem": f"<image>{row.problem}",
            "answer": row.answer,
            "id": f"geometry3k_{index}",
        }
        for index, row in enumerate([*odd, *plain])
    ]
    _write(folder / "geometry3k" / f"{split}.parquet", rows, ("images", "problem", "answer", "id"))


def _write_worked(folder: Path, name: str, worked: Sequence[Worked]) -> None:
    label = name.partition("/")[0]
    rows = [{**row._asdict(), "id": f"{label}_{index}"} for index, row in enumerate(worked)]
    _write(folder / f"{name}.parquet", rows, ("problem", "answer", "level", "subject", "id"))


def _write(path: Path, rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """As published: Hugging Face's features in the schema, zstd, several row groups."""
    image = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    features = {
        name: {"feature": {"_type": "Image"}, "_type": "Sequence"}
        if name == "images"
        else {"dtype": "string", "_type": "Value"}
        for name in columns
    }
    schema = pa.schema(
        [(name, image if name == "images" else pa.string()) for name in columns],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path, compression="zstd", row_group_size=25)


# Widest, narrowest and lowest of the real ones; the others are as large as most.
_SIZES = {0: (1604, 430), 1: (139, 286), 2: (369, 99), 3: (935, 803)}


@cache
def _srgb_profile() -> bytes:
    """Made once: it holds the time, and the same picture made a second later would have other bytes."""
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def picture(text: str, number: int) -> bytes:
    """A PNG file: opaque RGBA, but number 5 (a palette with a transparent colour) and 6 (RGB)."""
    size = _SIZES.get(number, (280 + 7 * (number % 20), 240 + 5 * (number % 20)))
    image = Image.new("RGBA", size, "white")
    draw = ImageDraw.Draw(image)
    draw.polygon([(9, size[1] - 9), (size[0] - 9, size[1] - 9), (size[0] * (number % 7) // 7 + 9, 9)], outline="black")
    draw.text((size[0] // 3, size[1] // 2), text, fill="black")
    known: dict[str, object] = {}
    if number % 3 == 0:  # as a Mac's screenshot
        known["icc_profile"] = _srgb_profile()
        known["exif"] = exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 1
        known["pnginfo"] = PngImagePlugin.PngInfo()
        known["pnginfo"].add_itxt("XML:com.adobe.xmp", "<x:xmpmeta xmlns:x='adobe:ns:meta/'/>")
    if number % 3 == 1:
        known["dpi"] = (96, 96)
    if number == 5:
        image = image.convert("RGB").quantize(16)
        known["transparency"] = 0
    if number == 6:
        image = image.convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG", **known)
    return file.getvalue()
