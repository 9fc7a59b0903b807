"""Frames of a video file, decoded by FFmpeg through PyAV.

The bytes are not trusted. Only three container formats are read. None of them can refer to another file or URL, as a
playlist does. Every failure is an ``Unusable`` with a reason.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.data.pixels import MAX_SOURCE_PIXELS
from rlcore.data.rejects import Reason, Unusable

# (offset, the bytes there) -> FFmpeg's name of the format. It is passed on, so that FFmpeg does not guess another one.
_CONTAINERS: Mapping[tuple[int, bytes], str] = {
    (4, b"ftyp"): "mov",  # MP4 and QuickTime
    (0, b"\x1a\x45\xdf\xa3"): "matroska",  # and WebM
    (0, b"RIFF"): "avi",
}


def frames_of(content: bytes, per_second: float, most: int) -> list[bytes]:
    """Frames as PNG, evenly spread over the video.

    Their number is the video's length times ``per_second``, rounded, at least 1 and at most ``most``. A frame is taken
    from the middle of each of so many equal parts of the video.

    Raises:
        Unusable: not an MP4, QuickTime, Matroska, WebM or AVI file; no frame; larger than an image may be; damaged.
    """
    film = film_of(content, per_second, most)
    return [frame for number, frame in enumerate(film.frames) if number == 0 or frame is not film.frames[number - 1]]


@dataclass(frozen=True, slots=True)
class Film:
    """What a video shows at the middles of equal parts of it."""

    frames: list[bytes]  # PNG; one that is shown for long may come several times, as the same object
    seconds_per_frame: float  # length of a part; 0: the video has a single frame


def film_of(content: bytes, per_second: float, most: int) -> Film:
    """As ``frames_of``, but with as many frames as parts.

    Raises:
        Unusable: as ``frames_of``.
    """
    import av

    try:
        times = _times(content)
        chosen, seconds = chosen_frames(times, per_second, most)
        wanted = sorted(set(chosen))
        frames = dict(zip(wanted, _decoded(content, {times[index] for index in wanted}), strict=True))
        return Film([frames[index] for index in chosen], seconds)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise Unusable(Reason.VIDEO_DAMAGED, f"{type(error).__name__}: {str(error)[:200]}") from None


def chosen_frames(times: list[float], per_second: float, most: int) -> tuple[list[int], float]:
    """The index of the frame that is shown at the middle of each part, and the length of a part in seconds.

    Args:
        times: when each frame appears, in seconds, ascending. The last is shown as long as the others on average.
    """
    last = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    seconds = times[-1] - times[0] + last
    count = max(1, min(most, len(times), round(seconds * per_second)))
    wanted = [times[0] + (part + 0.5) * seconds / count for part in range(count)]
    return [bisect_right(times, moment) - 1 for moment in wanted], seconds / count


def _opened(content: bytes) -> Any:
    import av

    for (offset, magic), name in _CONTAINERS.items():
        if content[offset : offset + len(magic)] == magic:
            return av.open(io.BytesIO(content), format=name, metadata_errors="replace")
    detail = f"{len(content)} bytes starting with {content[:12]!r} are no MP4, QuickTime, Matroska, WebM or AVI file"
    raise Unusable(Reason.VIDEO_FORMAT, detail)


def _stream(container: Any) -> Any:
    if not container.streams.video:
        raise Unusable(Reason.VIDEO_FORMAT, "the file has no pictures")
    stream = container.streams.video[0]
    if (pixels := stream.codec_context.width * stream.codec_context.height) > MAX_SOURCE_PIXELS:
        raise Unusable(Reason.IMAGE_TOO_LARGE, f"a frame has {pixels} pixels, above {MAX_SOURCE_PIXELS}")
    return stream


def _times(content: bytes) -> list[float]:
    """When each frame appears, in seconds, ascending; read without decoding."""
    with _opened(content) as container:
        stream = _stream(container)
        found = {float(packet.pts * stream.time_base) for packet in container.demux(stream) if packet.pts is not None}
    if not found:
        raise Unusable(Reason.VIDEO_FORMAT, "the file has no frame")
    return sorted(found)


def _decoded(content: bytes, times: set[float]) -> list[bytes]:
    """The frames at these times, in their order.

    Raises:
        ValueError: not all of them can be decoded.
    """
    frames: list[bytes] = []
    with _opened(content) as container:
        stream = _stream(container)
        for frame in container.decode(stream):
            if frame.pts is not None and float(frame.pts * stream.time_base) in times:
                out = io.BytesIO()
                frame.to_image().save(out, "PNG", compress_level=1)
                frames.append(out.getvalue())
                if len(frames) == len(times):
                    return frames
    raise ValueError(f"{len(frames)} of {len(times)} frames can be decoded")
