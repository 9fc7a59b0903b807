"""``rlflow chat`` up to the engine: pictures as characters, messages, and an answer that comes in pieces."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlcore.errors import DataError
from tasks import chat
from tasks.chat import Chat, content_of, half_blocks, open_picture, pieces
from tasks.cli import app, terminal

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def picture(folder: Path, name: str = "a.png", size: tuple[int, int] = (4, 2)) -> Path:
    Image.new("RGB", size, RED).save(folder / name)
    return folder / name


def test_a_character_shows_two_pixels_the_upper_as_its_colour() -> None:
    image = Image.new("RGB", (2, 2))
    for place, colour in (((0, 0), RED), ((1, 0), BLUE), ((0, 1), BLUE), ((1, 1), WHITE)):
        image.putpixel(place, colour)
    first, second = "\x1b[38;2;255;0;0m\x1b[48;2;0;0;255m▀", "\x1b[38;2;0;0;255m\x1b[48;2;255;255;255m▀"
    assert half_blocks(image, 80, 40) == f"{first}{second}\x1b[0m"


@pytest.mark.parametrize(
    ("size", "columns", "rows", "shown"),
    [
        ((4, 4), 80, 40, (4, 2)),  # never larger than it is
        ((400, 200), 80, 40, (80, 20)),
        ((200, 400), 80, 40, (40, 40)),
        ((1000, 2), 80, 40, (80, 1)),
    ],
)
def test_a_picture_keeps_its_shape_and_fits(
    size: tuple[int, int], columns: int, rows: int, shown: tuple[int, int]
) -> None:
    lines = half_blocks(Image.new("RGB", size), columns, rows).splitlines()
    assert (lines[0].count("▀"), len(lines)) == shown


def test_pictures_stand_where_the_question_has_them_else_first(tmp_path: Path) -> None:
    one, two = picture(tmp_path, "a.png"), picture(tmp_path, "b.png", (6, 3))
    parts = content_of("Left <image> right <image>?", [one, two])
    assert [part.get("text") or sized(part) for part in parts] == ["Left ", (4, 2), " right ", (6, 3), "?"]
    assert [part.get("text") or sized(part) for part in content_of("Sides?", [two])] == [(6, 3), "Sides?"]
    assert content_of("Sides?", []) == [{"type": "text", "text": "Sides?"}]
    with pytest.raises(DataError, match="has 2 times <image>, and there are 1 pictures"):
        content_of("<image><image>", [one])


def sized(part: dict[str, Any]) -> tuple[int, int]:
    url = part["image_url"]["url"]
    return Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))).size


def test_a_file_that_is_no_picture_is_named_before_a_model_loads(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no picture")
    for name in ("a.txt", "none.png"):
        with pytest.raises(DataError, match=f"the picture .*{name} cannot be used"):
            open_picture(tmp_path / name)


def line(text: str | None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n"


def test_an_answer_is_the_pieces_of_its_stream() -> None:
    usage = b'data: {"choices": []}\n'
    stream = [line(None), b"\n", line("<think>"), b": a comment\n", line(" 4"), usage, b"data: [DONE]\n"]
    assert list(pieces(iter(stream))) == ["<think>", " 4"]


@contextmanager
def serving(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers 4 in two pieces."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append({"path": self.path, "key": self.headers["Authorization"], **body})
            self.send_response(status)
            self.end_headers()
            self.wfile.write(line("It is ") + line("4.") + b"data: [DONE]\n" if status == 200 else b"too long")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", got
    finally:
        server.shutdown()


def test_a_question_goes_to_the_model_with_its_key() -> None:
    with serving() as (address, got):
        assert "".join(Chat(address, "toy", "sesame", 0.5).ask("Sides?")) == "It is 4."
    content = [{"type": "text", "text": "Sides?"}]
    assert got == [
        {
            "path": "/v1/chat/completions", "key": "Bearer sesame", "model": "toy", "temperature": 0.5, "stream": True,
            "messages": [{"role": "user", "content": content}],
        }
    ]  # fmt: skip


def test_a_refusal_of_the_server_is_said() -> None:
    with serving(400) as (address, _), pytest.raises(DataError, match="refuses the question: too long"):
        list(Chat(address, "toy", "k").ask("Sides?"))


def test_the_command_asks_line_by_line_until_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as (address, got):

        @contextmanager
        def chatting(model: str, *_: object, temperature: float, further: list[str]) -> Iterator[Chat]:
            assert (model, temperature, further) == ("RUN", 0.0, ["--max-num-seqs", "1"])
            yield Chat(address, "toy", "k", temperature)

        monkeypatch.setattr(chat, "chatting", chatting)
        monkeypatch.setattr(terminal.sys, "stdin", io.StringIO("Sides?\nAngles?\n\nnever asked\n"))
        words = ["chat", "RUN", "--picture", str(picture(tmp_path)), "--", "--max-num-seqs", "1"]
        app(words, standalone_mode=False)
    out = capsys.readouterr()
    assert out.out == "It is 4.\nIt is 4.\n"
    assert out.err.endswith("a.png, 4 x 2\n")
    asked = [[part["type"] for part in item["messages"][0]["content"]] for item in got]
    assert asked == [["image_url", "text"]] * 2
    assert [item["messages"][0]["content"][1]["text"] for item in got] == ["Sides?", "Angles?"]
