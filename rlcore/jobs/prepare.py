"""``python -m rlcore.jobs.prepare spec.json``: from a data source to a prepared dataset with original images.

Every row becomes a ``Problem`` or a line in ``rejects.jsonl``. Only the headers of images are read: they determine the
size after resizing, so prompts that are too long are found before any image is decoded.
"""

from __future__ import annotations

import hashlib
import math
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlcore.artifacts import DatasetRef
from rlcore.data.pixels import MAX_SOURCE_PIXELS, load_rgb, read_header, resized, video_file
from rlcore.data.prepare.folder import ORIGINALS, existing_dataset, finish_folder, prepared_folder, progress
from rlcore.data.prepare.sources import (
    ImageCell,
    SourceRow,
    conversation,
    open_source,
    place_images,
    plain_text,
    template_arguments,
)
from rlcore.data.prepare.video import Film, film_of, frames_of
from rlcore.data.processor import load_processor
from rlcore.data.prompts import PromptBuilder, opens_thought
from rlcore.data.rejects import Reason, Reject, Unusable, nothing_usable
from rlcore.data.table import PreparedRow
from rlcore.files import building
from rlcore.jobs import job_main
from rlcore.specs import PrepareSpec
from rlcore.types import ImageRef, Message, Problem

_TICKS = 256  # times are multiples of 1 / 256 s, which float32 holds exactly: everyone computes the same positions
_MAX_IMAGE_BYTES = 4 * MAX_SOURCE_PIXELS  # an uncompressed RGBA image of as many pixels as may be decoded


def prepare(spec: PrepareSpec) -> DatasetRef:
    """Prepare a dataset, or return the one that is there already for the same source and settings.

    Writes ``raw-DIGEST`` under ``spec.datasets_dir``: problems.parquet, raw_images/, rejects.jsonl and
    report.json.

    Raises:
        DataError: the source cannot be read, lacks a column, or has no usable row.
        ConfigError, ModelError: the prompt template, or the model's tokenizer or chat template, is unusable.
        ServerError: the hub cannot be reached.
        StorageError: no space, no permission, or an existing folder with parts missing.
    """
    final = prepared_folder(spec)
    if found := existing_dataset(final):
        return found
    prompts = PromptBuilder(load_processor(spec.model), spec.data)
    with tempfile.TemporaryDirectory() as scratch, building(final) as aside:
        source = open_source(spec, Path(scratch))
        images = ImageReader(source.folders)
        intake = _Intake(prompts, images, spec, aside / ORIGINALS)
        for row in progress(source.rows, f"preparing {spec.source}", source.num_rows):
            intake.add(row)
        if not intake.rows:
            raise nothing_usable(spec.source, intake.rejects, source.columns)
        return finish_folder(
            aside,
            final,
            source=spec.source,
            columns=source.columns,
            data=spec.data,
            rows=intake.rows,
            rejects=intake.rejects,
        )


class ImageReader:
    """Reads the image files that rows name. A row may come from a stranger, so it names nothing outside the source."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folder.resolve() for folder in folders)

    def read(self, image: ImageCell) -> bytes:
        """
        Raises:
            Unusable: no file, not below the source's folders (links count by what they lead to), not a regular file, or
                larger than any image may be.
        """
        if image is None:
            raise Unusable(Reason.IMAGE_MISSING, "an image has neither bytes nor a path")
        if isinstance(image, bytes):
            return image
        try:
            path = image.resolve(strict=True)
            if not any(path.is_relative_to(folder) for folder in self._folders):
                allowed = " or ".join(map(str, self._folders))
                raise Unusable(Reason.IMAGE_OUTSIDE, f"{image} is {path}, which lies outside {allowed}")
            facts = path.stat()
            if not stat.S_ISREG(facts.st_mode):
                raise Unusable(Reason.IMAGE_MISSING, f"{image}: no regular file ({stat.filemode(facts.st_mode)})")
            if facts.st_size > _MAX_IMAGE_BYTES:
                raise Unusable(Reason.IMAGE_TOO_LARGE, f"{image}: {facts.st_size} bytes above {_MAX_IMAGE_BYTES}")
            return path.read_bytes()
        except (OSError, ValueError, RuntimeError) as error:  # a null byte in the path; a loop of links
            raise Unusable(Reason.IMAGE_MISSING, f"{image}: {error}") from None


@dataclass(frozen=True, slots=True)
class _Stored:
    """An image or a video, and the file that is kept of it: the original of an image, the resized frames of a video."""

    ref: ImageRef
    content: bytes


@dataclass(slots=True)
class _Intake:
    """Sorts rows into kept and rejected, and stores the originals of kept ones, each distinct one once."""

    prompts: PromptBuilder
    images: ImageReader
    spec: PrepareSpec
    originals: Path
    rows: list[PreparedRow] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    sizes: dict[str, ImageRef | Unusable] = field(default_factory=dict)  # by hash: one diagram serves many questions
    stored: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.originals.mkdir()

    def add(self, row: SourceRow) -> None:
        problem_id = self._unique_id(row)
        try:
            prepared, originals = self._examine(row, problem_id)
        except Unusable as unusable:
            self.rejects.append(Reject(problem_id, row.index, unusable.reason, unusable.detail))
            return
        self.rows.append(prepared)
        for sha256, content in originals.items():
            if sha256 not in self.stored:
                (self.originals / sha256).write_bytes(content)
                self.stored.add(sha256)

    def _examine(self, row: SourceRow, problem_id: str) -> tuple[PreparedRow, dict[str, bytes]]:
        own = self.spec.data.video_input == "native"
        if (given := len(row.images) + len(row.videos) if own else row.num_images) > self.spec.data.max_images:
            raise Unusable(Reason.TOO_MANY_IMAGES, f"{given} images above {self.spec.data.max_images}")
        messages = conversation(row.problem)
        arguments = template_arguments(row.template_arguments)
        if unknown := self.prompts.unmentioned(arguments):
            detail = f"the model's chat template does not mention {', '.join(unknown)}"
            raise Unusable(Reason.TEMPLATE_ARGUMENTS, detail)
        answer = plain_text(row.answer, "answer", Reason.EMPTY_ANSWER).strip()
        if special := [token for m in messages for token in self.prompts.special_tokens_in(m.text)]:
            raise Unusable(Reason.SPECIAL_TOKEN, f"the problem spells out {', '.join(special)}")
        cells: tuple[ImageCell | _Stored, ...] = row.images
        videos = [self._own_video(video) if own else self._frames(video) for video in row.videos]
        (*before, question), images = place_images([m.text for m in messages], cells, videos)
        if len(images) > self.spec.data.max_images:
            detail = f"{len(images)} images, with the frames of videos, above {self.spec.data.max_images}"
            raise Unusable(Reason.TOO_MANY_IMAGES, detail)
        context = tuple(Message(m.role, text) for m, text in zip(messages[:-1], before, strict=True))
        if images and self.prompts.placeholders.image_token_id is None:
            raise Unusable(Reason.MODEL_WITHOUT_IMAGES, f"{len(images)} image(s), and the model takes none")
        read = [image if isinstance(image, _Stored) else self._image(image) for image in images]
        refs = tuple(image.ref for image in read)
        problem = Problem(
            *(problem_id, question, refs, answer, self.spec.source, row.extra, context),
            chat_template_arguments=arguments,
        )
        if arguments:
            problem = replace(problem, opens_thought=opens_thought(self.prompts.text(problem)))
        prompt_tokens = len(self.prompts.tokens(problem))
        image_tokens = sum(self.prompts.placeholders.num_tokens(ref) for ref in refs)
        if prompt_tokens > self.spec.data.max_prompt_tokens:
            detail = f"{prompt_tokens} tokens ({image_tokens} of images) above {self.spec.data.max_prompt_tokens}"
            raise Unusable(Reason.PROMPT_TOO_LONG, detail)
        originals = {image.ref.sha256: image.content for image in read}
        return PreparedRow(problem, row.index, prompt_tokens, image_tokens), originals

    def _frames(self, video: tuple[ImageCell, ...] | ImageCell) -> tuple[ImageCell, ...]:
        _require_video(video)
        if isinstance(video, tuple):
            return video
        return tuple(frames_of(self.images.read(video), self.spec.data.video_fps, self.spec.data.video_frames))

    def _own_video(self, video: tuple[ImageCell, ...] | ImageCell) -> _Stored:
        _require_video(video)
        data = self.spec.data
        if isinstance(video, tuple):
            film = Film([self.images.read(frame) for frame in video], 1 / data.video_fps)
        else:
            film = film_of(self.images.read(video), data.video_fps, data.video_frames)
        frames = [load_rgb(frame) for frame in film.frames]
        if len(sizes := {frame.size for frame in frames}) > 1:
            raise Unusable(Reason.VIDEO_FORMAT, f"the frames of a video have {len(sizes)} different sizes")
        size = self.prompts.target_size(*frames[0].size)
        if (pixels := len(frames) * math.prod(size)) > MAX_SOURCE_PIXELS:
            detail = f"the {len(frames)} resized frames of a video have {pixels} pixels, above {MAX_SOURCE_PIXELS}"
            raise Unusable(Reason.IMAGE_TOO_LARGE, detail)
        seconds = max(1, round((film.seconds_per_frame or 1 / data.video_fps) * _TICKS)) / _TICKS
        content = video_file([resized(frame, size) for frame in frames], seconds)
        sha256 = hashlib.sha256(content).hexdigest()
        return _Stored(ImageRef(sha256, *size, frames=len(frames), seconds_per_frame=seconds), content)

    def _image(self, image: ImageCell) -> _Stored:
        content = self.images.read(image)
        return _Stored(self._image_ref(content), content)

    def _image_ref(self, content: bytes) -> ImageRef:
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 not in self.sizes:
            try:
                header = read_header(content)
                self.sizes[sha256] = ImageRef(sha256, *self.prompts.target_size(header.width, header.height))
            except Unusable as unusable:
                self.sizes[sha256] = unusable
        found = self.sizes[sha256]
        if isinstance(found, Unusable):
            raise Unusable(found.reason, found.detail)
        return found

    def _unique_id(self, row: SourceRow) -> str:
        wanted = row.row_id if row.row_id is not None else f"row-{row.index}"
        wanted = wanted.encode("utf-8", "replace").decode()
        problem_id, count = wanted, 1
        while problem_id in self.ids:
            count += 1
            problem_id = f"{wanted}-{count}"
        self.ids.add(problem_id)
        return problem_id


def _require_video(video: tuple[ImageCell, ...] | ImageCell) -> None:
    if video is None or video == ():
        found = "is neither a file nor a list of frames" if video is None else "holds no frame"
        raise Unusable(Reason.VIDEO_FORMAT, f"a video {found}")


if __name__ == "__main__":
    job_main(prepare, PrepareSpec)
