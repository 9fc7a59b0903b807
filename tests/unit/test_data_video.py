"""Frames of video files: which are taken, their pixels, and files that are refused."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from rlcore.config import DataConfig, ModelConfig
from rlcore.data.pixels import ImageStore, frames_in
from rlcore.data.prepare.folder import dataset_key
from rlcore.data.prepare.video import chosen_frames, film_of, frames_of
from rlcore.data.rejects import Unusable, read_rejects
from rlcore.data.table import load_problems, load_rows
from rlcore.errors import ModelError
from rlcore.jobs.prepare import prepare
from rlcore.jobs.resize import resize
from rlcore.specs import PrepareSpec, ResizeSpec

GREYS = range(0, 250, 25)


def film(
    container: str = "matroska",
    codec: str = "ffv1",
    rate: int = 5,
    greys: range = GREYS,
    side: int = 64,
    times: Sequence[int] | None = None,
) -> bytes:
    """A frame of one grey after the other, without loss for ffv1.

    Args:
        times: when each frame appears, in frames. None: one after the other, all of ``greys``.
    """
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.width = stream.height = side
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        for number, grey in zip(range(len(greys)) if times is None else times, greys, strict=False):
            frame = av.VideoFrame.from_image(Image.new("RGB", (side, side), (grey, grey, grey)))
            frame.pts, frame.time_base = number, Fraction(1, rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def greys(frames: list[bytes]) -> list[int]:
    return [round(float(np.asarray(Image.open(io.BytesIO(frame)).convert("L")).mean())) for frame in frames]


def test_frames_come_from_the_middle_of_equal_parts() -> None:
    """Ten frames of 0.2 s each: the middles of four parts are at 0.25, 0.75, 1.25 and 1.75 s."""
    times = [0.2 * index for index in range(10)]
    assert chosen_frames(times, 2.0, 8) == ([1, 3, 6, 8], pytest.approx(0.5))
    assert chosen_frames(times, 2.0, 2) == ([2, 7], pytest.approx(1.0))  # at 0.5 and 1.5 s
    assert chosen_frames(times, 0.01, 8) == ([5], pytest.approx(2.0))  # at least one, at 1 s
    assert chosen_frames(times, 1000.0, 1000) == (list(range(10)), pytest.approx(0.2))
    assert chosen_frames([3.0], 2.0, 8) == ([0], 0.0)


def test_a_frame_that_is_shown_for_long_is_taken_for_several_parts() -> None:
    """The last frame is shown as long as the others on average, 3 s. Of three parts of 3 s the middles are at 1.5, 4.5
    and 7.5 s."""
    assert chosen_frames([0.0, 1.0, 6.0], 1 / 3, 8) == ([1, 1, 2], pytest.approx(3.0))


def test_as_a_picture_such_a_frame_is_taken_once() -> None:
    still = film(rate=5, times=[0, 1, 30])  # the second is shown from 0.2 to 6 s
    assert greys(film_of(still, 0.5, 8).frames) == [25, 25, 50]
    assert greys(frames_of(still, 0.5, 8)) == [25, 50]


@pytest.mark.parametrize(
    ("container", "codec"),
    [("matroska", "ffv1"), ("mp4", "mpeg4"), ("avi", "mpeg4"), ("mov", "mpeg4"), ("webm", "libvpx-vp9")],
)
def test_frames_are_those_of_the_file(container: str, codec: str) -> None:
    frames = frames_of(film(container, codec), 2.0, 8)
    exact = codec == "ffv1"
    assert greys(frames) == pytest.approx([25, 75, 150, 200], abs=0 if exact else 4)
    assert frames == frames_of(film(container, codec), 2.0, 8)


def refused(content: bytes) -> str:
    with pytest.raises(Unusable) as caught:
        frames_of(content, 2.0, 8)
    return str(caught.value.reason)


def test_files_that_are_no_video_are_refused() -> None:
    whole = film()
    assert refused(b"") == "video_format"
    assert refused(b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1/secret.ts\n") == "video_format"
    assert refused(b"ffconcat version 1.0\nfile /etc/passwd\n") == "video_format"
    assert refused(b"RIFF\x00\x00\x00\x00WEBPVP8 ") == "video_damaged"
    assert refused(film("mp4", "mpeg4")[:-200]) == "video_format"  # what describes its frames is at its end
    assert refused(whole[:40]) == "video_damaged"
    assert refused(sound()) == "video_format"


def sound() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        stream = file.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def spec_for(folder: Path, **data: object) -> PrepareSpec:
    return PrepareSpec(
        result=folder / "result.json",
        source=str(folder / "rows.jsonl"),
        source_path=folder / "rows.jsonl",
        split="train",
        model=ModelConfig(),
        data=DataConfig(**{"template": "tiny", "max_prompt_tokens": 2048, **data}),
        datasets_dir=folder / "datasets",
    )


def test_rows_name_files_next_to_them(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.mkv").write_bytes(film())
    (tmp_path / "broken.mp4").write_bytes(film("mp4", "mpeg4")[:100])
    (tmp_path.parent / "outside.mkv").write_bytes(film())
    rows = [
        {"problem": "<video>Does it brighten?", "videos": ["clips/a.mkv"], "id": "good"},
        {"problem": "<video>Does it?", "videos": ["broken.mp4"], "id": "video_damaged"},
        {"problem": "<video>Does it?", "videos": ["../outside.mkv"], "id": "image_outside"},
        {"problem": "<video><video>Both?", "videos": ["clips/a.mkv", "clips/a.mkv"], "id": "too_many_images"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({**row, "answer": "yes"}) for row in rows))
    ref = prepare(spec_for(tmp_path, max_images=7))
    (problem,) = load_problems(Path(ref.path))
    assert problem.question == "<image>" * 4 + "Does it brighten?"
    stored = [(Path(ref.path) / "raw_images" / image.sha256).read_bytes() for image in problem.images]
    assert greys(stored) == [25, 75, 150, 200]
    rejects = read_rejects(Path(ref.path) / "rejects.jsonl")
    assert [reject.reason for reject in rejects] == [reject.problem_id for reject in rejects]


def test_the_number_of_frames_is_part_of_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "<video>?", "answer": "1", "videos": ["a.mkv"]}))
    keys = {
        dataset_key(spec_for(tmp_path, **more))
        for more in ({}, {"video_fps": 1.0}, {"video_frames": 2}, {"video_input": "native"})
    }
    assert len(keys) == 4


NATIVE = {"video_input": "native", "min_pixels": 28 * 28, "max_pixels": 56 * 56}


def test_a_video_in_the_model_s_own_input_is_one_file_with_its_times(tmp_path: Path) -> None:
    """Two seconds: four frames of half a second, of 64 x 64 pixels, which become 56 x 56. Two pairs of 2 x 2 tokens."""
    (tmp_path / "a.mkv").write_bytes(film())
    Image.new("RGB", (28, 28)).save(tmp_path / "p.png")
    for grey in (10, 20, 30):
        Image.new("RGB", (56, 56), (grey,) * 3).save(tmp_path / f"{grey}.png")
    listed = ["10.png", "20.png", "30.png"]
    rows = [
        {"problem": "<video>Does it brighten?", "videos": ["a.mkv"], "id": "file"},
        {
            "problem": "<image> or <video>?",
            "images": ["p.png"],
            "videos": [listed],
            "id": "list",
        },
        {"problem": "1 + 1?", "id": "text"},
        {"problem": "<video>?", "videos": [["10.png", "p.png"]], "id": "video_format"},
        {"problem": "<video><video><video>?", "videos": ["a.mkv"] * 3, "id": "too_many_images"},
        {"problem": "No marker", "videos": ["a.mkv"], "id": "video_marker_count"},
        {"problem": "<video>" + 400 * "?", "videos": ["a.mkv"], "id": "prompt_too_long"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({**row, "answer": "yes"}) for row in rows))
    data = {**NATIVE, "max_images": 2, "max_prompt_tokens": 300}
    raw = prepare(spec_for(tmp_path, **data))
    rejects = read_rejects(Path(raw.path) / "rejects.jsonl")
    assert [reject.reason for reject in rejects] == [reject.problem_id for reject in rejects]

    settings = spec_for(tmp_path, **data).data
    ready = resize(
        ResizeSpec(
            result=tmp_path / "r.json",
            dataset=raw,
            data=settings,
            model=ModelConfig(),
            datasets_dir=tmp_path,
            processes=1,
        )
    )
    of_file, of_list, text = load_rows(Path(ready.path))
    (video,) = of_file.problem.images
    assert of_file.problem.question == "<video>Does it brighten?"
    assert (video.width, video.height, video.frames, video.seconds_per_frame) == (56, 56, 4, 0.5)
    assert (video.is_video, video.file_size, video.moments) == (True, (224, 56), (0.25, 0.75, 1.25, 1.75))
    assert [of_file.image_tokens, of_list.image_tokens, text.image_tokens] == [2 * 4, 1 + 2 * 4, 0]
    picture, still = of_list.problem.images
    assert (picture.is_video, picture.width, still.frames, still.seconds_per_frame) == (False, 28, 3, 0.5)
    shown = frames_in(ImageStore(Path(ready.path)).read(video), video)
    assert [frame.size for frame in shown] == [(56, 56)] * 4
    assert [int(np.asarray(frame).mean()) for frame in shown] == [25, 75, 150, 200]
    assert json.loads((Path(ready.path) / "report.json").read_text())["image_sizes"]["56x56, 4 frames"] == 1
    assert video.file is not None
    assert Image.open(video.file).size == (224, 56)


def test_two_speeds_of_the_same_frames_are_two_videos(tmp_path: Path) -> None:
    """Everything that is kept by the hash of a picture, such as a shared prompt, tells them apart."""
    names = set()
    for rate in (5, 10):
        folder = tmp_path / str(rate)
        folder.mkdir()
        (folder / "a.mkv").write_bytes(film(rate=rate))
        (folder / "rows.jsonl").write_text(json.dumps({"problem": "<video>?", "answer": "1", "videos": ["a.mkv"]}))
        ref = prepare(spec_for(folder, **NATIVE, video_fps=rate * 0.4))
        ((video,),) = [problem.images for problem in load_problems(Path(ref.path))]
        assert (video.frames, video.seconds_per_frame) == (4, 2.5 / rate)
        names.add(video.sha256)
    assert len(names) == 2


def test_a_family_without_an_own_input_is_refused_before_the_rows_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "<video>?", "answer": "1", "videos": ["gone.mkv"]}))
    spec = spec_for(tmp_path, video_input="native").model_copy(update={"model": ModelConfig(tiny={"task": "sums"})})
    with pytest.raises(ModelError, match=r"TextProcessor .*Supported are qwen2_vl, "):
        prepare(spec)
    assert not list(tmp_path.glob("datasets/*"))
