"""Resizing a prepared dataset, and reading its images back."""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlcore.artifacts import DatasetRef
from rlcore.config import DataConfig, ModelConfig
from rlcore.data.pixels import ImageStore
from rlcore.data.prepare.folder import PREPARE_VERSION, RESIZE_VERSION, load_report
from rlcore.data.rejects import read_rejects
from rlcore.data.table import load_problems, load_rows
from rlcore.errors import ConfigError, DataError, StorageError
from rlcore.jobs.prepare import prepare
from rlcore.jobs.resize import resize
from rlcore.specs import PrepareSpec, ResizeSpec
from rlcore.types import ImageRef


def encode(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format=format, **options)
    return file.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def prepared(tmp_path: Path, images: list[list[bytes]]) -> DatasetRef:
    rows = [
        {"id": f"p{i}", "problem": "<image>" * len(cell) + "Find x.", "answer": "1", "images": cell}
        for i, cell in enumerate(images)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return prepare(
        PrepareSpec(
            result=tmp_path / "result.json",
            source="rows",
            source_path=tmp_path / "rows.parquet",
            split="train",
            data=DataConfig(),
            model=ModelConfig(),
            datasets_dir=tmp_path / "datasets",
        )
    )


def spec_for(raw: DatasetRef, processes: int = 1, **data: object) -> ResizeSpec:
    return ResizeSpec(
        result=Path("unused"),
        dataset=raw,
        data=DataConfig(**data),
        model=ModelConfig(),
        datasets_dir=Path(raw.path).parent,
        processes=processes,
    )


def test_each_distinct_image_is_resized_once_to_the_size_in_the_table(tmp_path):
    big, small = encode(noise(300, 200)), encode(noise(30, 30))
    raw = prepared(tmp_path, [[big], [small, big], []])
    ref = resize(spec_for(raw))
    folder = Path(ref.path)
    assert folder.name == ref.digest != raw.digest
    assert (ref.num_problems, ref.num_rejected, ref.num_images) == (3, 0, 2)
    assert ref.max_prompt_tokens == raw.max_prompt_tokens
    assert load_problems(folder) == load_problems(Path(raw.path))
    assert len(list((folder / "images").iterdir())) == 2
    assert load_report(folder).image_sizes == {"308x196": 1, "56x56": 1}
    store = ImageStore(folder)
    for problem in load_problems(folder):
        for image in problem.images:
            assert (store.read(image).mode, store.read(image).size) == ("RGB", (image.width, image.height))


def test_resizing_is_bicubic_and_an_image_on_the_grid_is_kept_byte_for_byte(tmp_path):
    ready, off_grid, grey = noise(56, 84), noise(100, 90, 1), noise(56, 56, 2).convert("L")
    raw = prepared(tmp_path, [[encode(ready)], [encode(off_grid)], [encode(grey)]])
    folder = Path(resize(spec_for(raw)).path)
    refs = [problem.images[0] for problem in load_problems(folder)]
    assert (folder / "images" / f"{refs[0].sha256}.png").read_bytes() == encode(ready)
    expected = off_grid.resize((112, 84), Image.Resampling.BICUBIC)
    store = ImageStore(folder)
    assert np.array_equal(np.asarray(store.read(refs[1])), np.asarray(expected))
    assert np.array_equal(np.asarray(store.read(refs[2])), np.asarray(grey.convert("RGB")))


def test_the_processor_leaves_a_resized_image_unchanged(tmp_path):
    from rlcore.data.processor import load_processor

    raw = prepared(tmp_path, [[encode(noise(width, height))] for width, height in ((300, 200), (31, 500), (70, 70))])
    folder = Path(resize(spec_for(raw)).path)
    processor = load_processor(ModelConfig()).image_processor
    data = DataConfig()
    for problem in load_problems(folder):
        image = problem.images[0]
        picture = ImageStore(folder).read(image)
        size = {"shortest_edge": data.min_pixels, "longest_edge": data.max_pixels}
        out = processor(images=[picture], size=size, return_tensors="pt")
        kept = processor(images=[picture], do_resize=False, return_tensors="pt")
        assert out["image_grid_thw"][0].tolist() == [1, image.height // 14, image.width // 14]
        assert out["pixel_values"].equal(kept["pixel_values"])


def test_orientation_is_applied_before_the_size_is_taken(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = prepared(tmp_path, [[encode(noise(112, 56), "JPEG", exif=exif)]])
    folder = Path(resize(spec_for(raw)).path)
    image = load_problems(folder)[0].images[0]
    assert (image.width, image.height) == (56, 112)
    assert ImageStore(folder).read(image).size == (56, 112)


def test_an_image_that_does_not_decode_takes_its_problems_along(tmp_path):
    good, broken = encode(noise(60, 60)), encode(noise(90, 90))[:2000]
    raw = prepared(tmp_path, [[good], [broken], [good, broken], [encode(noise(56, 56, 3)), broken]])
    assert raw.num_problems == 4
    ref = resize(spec_for(raw))
    assert (ref.num_problems, ref.num_rejected, ref.num_images) == (1, 3, 1)
    rejects = read_rejects(Path(ref.path) / "rejects.jsonl")
    assert [(r.problem_id, r.row, r.reason) for r in rejects] == [(f"p{i}", i, "image_damaged") for i in (1, 2, 3)]
    assert len(list((Path(ref.path) / "images").iterdir())) == 1
    assert ref.max_prompt_tokens < raw.max_prompt_tokens
    with pytest.raises(DataError, match="image_damaged 1.*fetch the source again"):
        resize(spec_for(prepared(tmp_path, [[broken]])))


def test_processes_give_the_same_dataset_as_one(tmp_path):
    raw = prepared(tmp_path, [[encode(noise(60 + i, 60, i))] for i in range(20)])
    one = resize(spec_for(raw))
    other = resize(spec_for(raw, processes=2).model_copy(update={"datasets_dir": tmp_path / "other"}))
    assert other == one.model_copy(update={"path": other.path})
    for path in (Path(one.path) / "images").iterdir():
        assert path.read_bytes() == (Path(other.path) / "images" / path.name).read_bytes()


def test_a_finished_dataset_is_returned_without_touching_the_originals(tmp_path):
    raw = prepared(tmp_path, [[encode(noise(60, 60))]])
    ref = resize(spec_for(raw))
    for path in (Path(raw.path) / "raw_images").iterdir():
        path.unlink()
    assert resize(spec_for(raw)) == ref


def test_what_does_not_fit_together_is_refused(tmp_path):
    content = encode(noise(60, 60))
    raw = prepared(tmp_path, [[content]])
    with pytest.raises(ConfigError, match="prepared for 3136 to 1048576 pixels"):
        resize(spec_for(raw, max_pixels=10**5))
    (Path(raw.path) / "raw_images" / hashlib.sha256(content).hexdigest()).write_bytes(b"changed")
    with pytest.raises(StorageError, match="missing or changed"):
        resize(spec_for(raw))
    assert [path.name for path in Path(raw.path).parent.iterdir()] == [Path(raw.path).name]


def test_the_store_keeps_a_number_of_bytes(tmp_path):
    raw = prepared(tmp_path, [[encode(noise(56, 56, seed))] for seed in range(3)])
    folder = Path(resize(spec_for(raw)).path)
    first, second, third = (p.images[0] for p in load_problems(folder))
    store = ImageStore(folder, kept_bytes=2 * 56 * 56 * 3)
    picture = store.read(first)
    store.read(second)
    assert store.read(first) is picture
    kept = store.read(third)  # in the place of the second
    assert store.read(first) is picture
    assert store.read(third) is kept
    small = ImageStore(folder, kept_bytes=100)
    assert small.read(first) is not small.read(first)


def test_a_store_reads_the_images_of_every_dataset_that_it_is_given(tmp_path):
    folders = [tmp_path / "train", tmp_path / "validation"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        folders[seed] = Path(resize(spec_for(prepared(folder, [[encode(noise(60, 60, seed))]]))).path)
    first, second = folders
    refs = [load_problems(folder)[0].images[0] for folder in (first, second)]
    store = ImageStore(first)
    with pytest.raises(StorageError, match="missing"):
        store.read(refs[1])
    store.add(second)
    for both in (store, pickle.loads(pickle.dumps(store))):
        for folder, ref in zip((first, second), refs, strict=True):
            assert both.read(ref).tobytes() == ImageStore(folder).read(ref).tobytes()


def test_the_store_checks_what_it_reads(tmp_path):
    raw = prepared(tmp_path, [[encode(noise(60, 60))]])
    folder = Path(resize(spec_for(raw)).path)
    ref = load_problems(folder)[0].images[0]
    store = pickle.loads(pickle.dumps(ImageStore(folder)))
    assert store.read(ref) is store.read(ref)
    with pytest.raises(StorageError, match="is 56x56, not 84x56"):
        store.read(ImageRef(ref.sha256, 84, 56))
    with pytest.raises(StorageError, match="missing"):
        store.read(ImageRef("0" * 64, 56, 56))
    path = folder / "images" / f"{ref.sha256}.png"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(StorageError, match="does not decode"):
        ImageStore(folder).read(ref)


def test_the_rules_are_those_of_the_current_versions(tmp_path):
    """A change of this hash changes what datasets hold: raise PREPARE_VERSION or RESIZE_VERSION with it."""
    pictures = [encode(Image.new("RGBA", (100 * i, 60), (20 * i, 0, 0, 255))) for i in range(1, 5)]
    folder = Path(resize(spec_for(prepared(tmp_path, [[picture] for picture in pictures]))).path)
    rows = [
        (
            row.problem.problem_id,
            row.problem.question,
            row.problem.answer,
            row.image_tokens,
        )
        + tuple((image.width, image.height) for image in row.problem.images)
        for row in load_rows(folder)
    ]
    pixels = [ImageStore(folder).read(image).tobytes() for p in load_problems(folder) for image in p.images]
    content = repr(rows).encode() + b"".join(pixels)
    found = hashlib.sha256(content).hexdigest()[:16]
    assert (PREPARE_VERSION, RESIZE_VERSION, found) == (3, 1, "7e53005f97228237")
