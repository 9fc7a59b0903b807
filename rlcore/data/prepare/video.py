"""Frames of a video file, decoded by FFmpeg through PyAV.

The bytes are not trusted. Only three container formats are read. None of them can refer to another file or URL, as a
playlist does. Every failure is an ``Unusable`` with a reason.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Mapping
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
    import av

    try:
        times = _times(content)
        chosen = chosen_frames(times, per_second, most)
        return _decoded(content, {times[index] for index in chosen})
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise Unusable(Reason.VIDEO_DAMAGED, f"{type(error).__name__}: {str(error)[:200]}") from None


def chosen_frames(times: list[float], per_second: float, most: int) -> list[int]:
    """Indices of the frames that are taken.

    Args:
        times: when each frame appears, in seconds, ascending. The last is shown as long as the others on average.
    """
    last = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    seconds = times[-1] - times[0] + last
    count = max(1, min(most, len(times), round(seconds * per_second)))
    wanted = [times[0] + (part + 0.5) * seconds / count for part in range(count)]
    return sorted({bisect_right(times, moment) - 1 for moment in wanted})


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
