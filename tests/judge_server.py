"""A judge over HTTP: an OpenAI-compatible server whose scores nobody can foresee."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "judge"
Answer = Callable[[dict[str, Any]], tuple[int, Any]]  # request -> status, and the tree of the reply


def verdict(content: str, finish_reason: str = "stop") -> tuple[int, Any]:
    usage = {"prompt_tokens": 90, "completion_tokens": 10}
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return 200, {"choices": [choice], "usage": usage}


def at_random(_request: dict[str, Any]) -> tuple[int, Any]:
    score = random.Random(time.time_ns()).randrange(1_000_001) / 1_000_000
    return verdict(json.dumps({"reason": f"felt like {score}", "score": score}))


class Judge:
    """What a test sees of the server, and may change while it runs."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.answer: Answer = at_random
        self.seconds = 0.0  # of one answer
        self.away = threading.Event()  # answers nothing but 503 while it is set
        self.holds = threading.Event()  # answers nothing at all while it is set
        self.keys: set[str | None] = set()
        self.most_at_once = 0
        self.asked: Counter[str] = Counter()  # calls that were answered with 200, by their text
        self.requests: list[dict[str, Any]] = []
        self._at_once = 0
        self._lock = threading.Lock()

    def wait(self) -> None:
        while self.holds.is_set():
            time.sleep(0.02)

    def reply(self, request: dict[str, Any], key: str | None) -> tuple[int, Any]:
        with self._lock:
            self.keys.add(key)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            time.sleep(self.seconds)
            self.wait()
            if self.away.is_set():
                return 503, {"error": "starting"}
            status, tree = self.answer(request)
            with self._lock:
                self.requests.append(request)
                if status == 200:
                    self.asked[json.dumps(request["messages"])] += 1
            return status, tree
        finally:
            with self._lock:
                self._at_once -= 1


@contextmanager
def judge_server(port: int = 0) -> Iterator[Judge]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            judge.wait()
            if judge.away.is_set():
                self._send(503, {"error": "starting"})
            else:
                self._send(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*judge.reply(request, self.headers.get("Authorization")))

        def _send(self, status: int, tree: Any) -> None:
            body = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            return  # a client that was killed

    server = Server(("127.0.0.1", port), Handler)
    judge = Judge(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
