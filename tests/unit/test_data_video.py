"""Frames of video files: which are taken, their pixels, and files that are refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from rlcore.config import DataConfig, ModelConfig
from rlcore.data.prepare.folder import dataset_key
from rlcore.data.prepare.video import chosen_frames, frames_of
from rlcore.data.rejects import Unusable, read_rejects
from rlcore.data.table import load_problems
from rlcore.jobs.prepare import prepare
from rlcore.specs import PrepareSpec

GREYS = range(0, 250, 25)


def film(
    container: str = "matroska", codec: str = "ffv1", rate: int = 5, greys: range = GREYS, side: int = 64
) -> bytes:
    """A frame of one grey after the other, without loss for ffv1."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.width = stream.height = side
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        for grey in greys:
            frame = av.VideoFrame.from_image(Image.new("RGB", (side, side), (grey, grey, grey)))
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def greys(frames: list[bytes]) -> list[int]:
    return [round(float(np.asarray(Image.open(io.BytesIO(frame)).convert("L")).mean())) for frame in frames]


def test_frames_come_from_the_middle_of_equal_parts() -> None:
    """Ten frames of 0.2 s each: the middles of four parts are at 0.25, 0.75, 1.25 and 1.75 s."""
    times = [0.2 * index for index in range(10)]
    assert chosen_frames(times, 2.0, 8) == [1, 3, 6, 8]
    assert chosen_frames(times, 2.0, 2) == [2, 7]  # at 0.5 and 1.5 s
    assert chosen_frames(times, 0.01, 8) == [5]  # at least one, at 1 s
    assert chosen_frames(times, 1000.0, 1000) == list(range(10))
    assert chosen_frames([3.0], 2.0, 8) == [0]


def test_a_frame_that_is_shown_for_long_is_taken_once() -> None:
    """The last frame is shown as long as the others on average, 3 s. Of three parts of 3 s the middles are at 1.5, 4.5
    and 7.5 s."""
    assert chosen_frames([0.0, 1.0, 6.0], 1 / 3, 8) == [1, 2]


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
    keys = {dataset_key(spec_for(tmp_path, **more)) for more in ({}, {"video_fps": 1.0}, {"video_frames": 2})}
    assert len(keys) == 3
