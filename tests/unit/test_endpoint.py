"""The sampler of an endpoint, against a small HTTP server."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlcore.artifacts import EndpointRef
from rlcore.config import build_experiment
from rlcore.data.pixels import ImageStore
from rlcore.errors import ModelError, ServerError
from rlcore.sampler.endpoint import EndpointSampler
from rlcore.types import Decoding, ImageRef, Message, Problem, SampleRequest

KEY = "sk-not-to-be-shown"


@dataclass
class Server:
    """Answers each request with the next of ``answers``, or the last of them."""

    url: str = ""
    answers: list[tuple[int, object]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    at_once: int = 0
    most_at_once: int = 0
    hold: Callable[[], object] = lambda: None


def completion(text: str | None, tokens: int = 3, reason: str = "stop") -> tuple[int, object]:
    message = {"role": "assistant", "content": text}
    return 200, {"choices": [{"message": message, "finish_reason": reason}], "usage": {"completion_tokens": tokens}}


@pytest.fixture
def server() -> Iterator[Server]:
    state, lock = Server(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.requests.append(body | {"path": self.path})
                state.keys.add(self.headers.get("Authorization"))
                state.at_once += 1
                state.most_at_once = max(state.most_at_once, state.at_once)
                status, answer = state.answers.pop(0) if len(state.answers) > 1 else state.answers[0]
            state.hold()
            with lock:
                state.at_once -= 1
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        state.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        yield state
        http.shutdown()


def sampler(server: Server, images: Path, concurrency: int = 2, **data: object) -> EndpointSampler:
    endpoint = EndpointRef(url=server.url, model="m", key_variable="SUITE_KEY", concurrency=concurrency)
    config = build_experiment(
        {"name": "x", "data": {"template": "r1v", **data}, "rollout": {"max_completion_tokens": 7}}, []
    )
    return EndpointSampler(endpoint, config, ImageStore(images), delays=(0.0, 0.0))


def request(question: str = "1 + 1?", images: tuple[ImageRef, ...] = (), seed: int = 5, **more: Any) -> SampleRequest:
    problem = Problem("p", question, images, "2", "source", **more)
    return SampleRequest(problem, 1, seed, decoding=Decoding(0.6, 0.95))


def test_what_is_asked_and_what_comes_back(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUITE_KEY", KEY)
    (tmp_path / "images").mkdir()
    Image.new("RGB", (56, 28), "red").save(tmp_path / "images" / "abc.png")
    server.answers = [completion("<answer>2</answer>", tokens=4, reason="length")]
    asked = request("<image>How many?", (ImageRef("abc", 56, 28),), context=(Message("system", "Count."),))
    ((groups),) = sampler(server, tmp_path).generate([asked])
    (done,) = groups[0].completions
    assert (done.text, done.finish_reason, len(done.token_ids)) == ("<answer>2</answer>", "length", 4)
    (sent,) = server.requests
    assert sent["path"] == "/v1/chat/completions"
    assert {name: sent[name] for name in ("model", "max_tokens", "seed", "temperature", "top_p")} == {
        "model": "m", "max_tokens": 7, "seed": 5, "temperature": 0.6, "top_p": 0.95,
    }  # fmt: skip
    system, user = sent["messages"]
    assert system == {"role": "system", "content": "Count."}
    picture, text = user["content"]
    assert text["text"].startswith("How many?\n\nThink first")
    encoded = picture["image_url"]["url"].removeprefix("data:image/png;base64,")
    assert Image.open(io.BytesIO(base64.b64decode(encoded))).size == (56, 28)
    assert server.keys == {f"Bearer {KEY}"}


def test_each_answer_belongs_to_its_request_and_few_run_at_once(server: Server, tmp_path: Path) -> None:
    barrier = threading.Barrier(2, timeout=10)
    server.hold = barrier.wait  # lets two requests through together
    server.answers = [completion(None, tokens=0)]
    requests = [request(seed=seed) for seed in range(8)]
    groups: dict[int, Any] = {}
    for group in sampler(server, tmp_path, concurrency=2).generate(requests):
        groups |= group
    assert sorted(groups) == list(range(8))
    assert sorted(body["seed"] for body in server.requests) == list(range(8))
    assert server.most_at_once == 2
    assert {group.completions[0].text for group in groups.values()} == {""}
    assert server.keys == {None}


def test_an_overloaded_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.answers = [(429, {}), (503, {}), completion("yes")]
    ((group),) = sampler(server, tmp_path).generate([request()])
    assert group[0].completions[0].text == "yes"
    assert len(server.requests) == 3


def test_errors_say_what_to_check_and_never_the_key(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SUITE_KEY", KEY)
    caplog.set_level("DEBUG")
    messages = []
    for answers, kind, asked in (
        ([(500, {"error": "busy"})], ServerError, 3),
        ([(401, {"error": f"who? {KEY}"})], ModelError, 1),
        ([(200, {"choices": [], "sent": KEY})], ModelError, 1),
    ):
        server.answers, server.requests = answers, []
        with pytest.raises(kind) as error:
            list(sampler(server, tmp_path).generate([request()]))
        assert len(server.requests) == asked
        messages.append(str(error.value))
    assert "busy" in messages[0]
    assert "who?" in messages[1]
    assert "$SUITE_KEY" in messages[1]
    assert "no chat completion" in messages[2]
    assert KEY not in caplog.text + "".join(messages)


def test_nobody_listens(server: Server, tmp_path: Path, refusing_port: int) -> None:
    server.url = f"http://127.0.0.1:{refusing_port}/v1"
    with pytest.raises(ServerError, match="ConnectError"):
        list(sampler(server, tmp_path).generate([request()]))
