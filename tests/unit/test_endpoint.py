"""The sampler of an endpoint, against a small HTTP server."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlcore import endpoint
from rlcore.artifacts import EndpointRef
from rlcore.config import EvaluationConfig, build_experiment
from rlcore.data.pixels import ImageStore, video_file
from rlcore.errors import ModelError, ServerError
from rlcore.evaluation.report import summarise
from rlcore.evaluation.rows import evaluate, read_rows, write_rows
from rlcore.sampler.endpoint import EndpointSampler
from rlcore.types import Completion, Decoding, ImageRef, Message, Problem, SampleRequest, Score
from tests.unit.toy_run import Grader

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
    models_status: int = 503
    hold: Callable[[], object] = lambda: None


def completion(text: str | None, tokens: int = 3, reason: str = "stop") -> tuple[int, object]:
    message = {"role": "assistant", "content": text}
    return 200, {"choices": [{"message": message, "finish_reason": reason}], "usage": {"completion_tokens": tokens}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(endpoint, "FIRST_DELAY", 0.0)
    state, lock = Server(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(state.models_status)
            self.send_header("Content-Length", "0")
            self.end_headers()

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
    ref = EndpointRef(url=server.url, model="m", key_variable="SUITE_KEY", concurrency=concurrency)
    config = build_experiment(
        {"name": "x", "data": {"template": "r1v", **data}, "rollout": {"max_completion_tokens": 7}}, []
    )
    return EndpointSampler(ref, config, ImageStore(images), retries=2)


def request(question: str = "1 + 1?", images: tuple[ImageRef, ...] = (), seed: int = 5, **more: Any) -> SampleRequest:
    problem = Problem("p", question, images, "2", "source", **more)
    return SampleRequest(problem, 1, seed, decoding=Decoding(0.6, 0.95))


class Right(Grader):
    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        future.set_result([Score(1.0, {"accuracy": 1.0}, graded=True) for _ in problems])
        return future


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


def test_a_video_is_sent_as_one_picture_per_frame(server: Server, tmp_path: Path) -> None:
    """No server would take our choice of frames."""
    (tmp_path / "images").mkdir()
    frames = [Image.new("RGB", (28, 56), colour) for colour in ("red", "blue")]
    (tmp_path / "images" / "abc.png").write_bytes(video_file(frames, 0.5))
    server.answers = [completion("2")]
    asked = request("Look: <video>How many?", (ImageRef("abc", 28, 56, frames=2, seconds_per_frame=0.5),))
    list(sampler(server, tmp_path).generate([asked]))
    *_, user = server.requests[0]["messages"]
    kinds = [part["type"] for part in user["content"]]
    assert kinds == ["text", "image_url", "image_url", "text"]
    urls = [part["image_url"]["url"].partition(",")[2] for part in user["content"][1:3]]
    sent = [Image.open(io.BytesIO(base64.b64decode(url))) for url in urls]
    assert [(image.size, image.getpixel((0, 0))) for image in sent] == [
        ((28, 56), (255, 0, 0)),
        ((28, 56), (0, 0, 255)),
    ]


def test_a_row_s_own_arguments_of_the_chat_template_are_sent_with_it(server: Server, tmp_path: Path) -> None:
    server.answers = [completion("2")]
    ask = sampler(server, tmp_path)
    list(ask.generate([request(), request(chat_template_arguments={"enable_thinking": False})]))
    sent = sorted((body.get("chat_template_kwargs") for body in server.requests), key=str)
    assert sent == [None, {"enable_thinking": False}]
    assert all("chat_template_kwargs" not in body or body["chat_template_kwargs"] for body in server.requests)


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


def test_a_refused_request_is_a_failure_of_its_problem_alone(server: Server, tmp_path: Path) -> None:
    """Refused at once, or failed each time by a server that is up. The rest is answered."""
    server.models_status = 404  # such a server is up as well
    for answers, asked in ([(400, {"error": "too long"})], 1), ([(500, {"error": "too long"})] * 3, 3):
        server.answers, server.requests = [*answers, completion("yes")], []
        groups: dict[int, Any] = {}
        for group in sampler(server, tmp_path, concurrency=1).generate([request(seed=seed) for seed in range(4)]):
            groups |= group
        assert [len(groups[index].completions) for index in range(4)] == [0, 1, 1, 1]
        assert "too long" in groups[0].failure
        assert not any(groups[index].failure for index in (1, 2, 3))
        assert len(server.requests) == asked + 3


def test_too_many_refused_requests_end_the_evaluation(server: Server, tmp_path: Path) -> None:
    server.answers = [(400, {"error": "no such option"})]
    asking = sampler(server, tmp_path, concurrency=1).generate([request(seed=seed) for seed in range(40)])
    with pytest.raises(ModelError, match=r"(?s)failed 21 of 40 requests.*share of 0\.5.*no such option"):
        list(asking)
    assert len(server.requests) < 40


def test_rows_tell_which_requests_failed_and_why(server: Server, tmp_path: Path) -> None:
    server.answers = [(400, {"error": "too long"}), completion("<answer>2</answer>")]
    problems = [Problem(f"p{number}", "1 + 1?", (), "2", "source") for number in range(3)]
    rows = evaluate(sampler(server, tmp_path, concurrency=1), Right({}), problems, EvaluationConfig(samples=1))
    assert [row.graded for row in rows] == [False, True, True]
    assert [row.failure is not None and "too long" in row.failure for row in rows] == [True, False, False]
    write_rows(rows, tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet") == rows
    report = summarise(rows, policy="p", step=0, dataset_digest="d", table="t", seconds=1.0, at=0.0)
    assert (report.accuracy, report.ungraded) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
