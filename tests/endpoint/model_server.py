"""A server that speaks the part of vLLM's HTTP interface that `VllmBackend` uses. Its responses are a hash of prompt and seed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lightning_core.backends.scripted import ByteTokenizer

SIZE = 12
"""Tokens of a response, with the stop token."""
END = ByteTokenizer().convert_tokens_to_ids("<|im_end|>")
INFO = {
    "vllm_config": {
        "model_config": {"logprobs_mode": "processed_logprobs"},
        "device_config": {"device": "cuda"},
        "scheduler_config": {"enable_chunked_prefill": True},
        "structured_outputs_config": {"backend": "guidance"},
    }
}


class ModelServer(ThreadingHTTPServer):
    """``let_answer``: while it is not set, requests for responses wait, until it is or the server is paused."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.let_answer = threading.Event()
        self.let_answer.set()
        self.paused = threading.Event()
        self.asked = 0
        """Number of requests for responses so far."""
        self.loaded: list[str] = []
        """The folders of the weights so far."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is killed is expected."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ModelServer

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "served", "max_model_len": 4096}]},
            "/is_paused": {"is_paused": self.server.paused.is_set()},
            "/server_info": INFO,
        }
        self._answer(answers[self.path.partition("?")[0]])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = self.path.partition("?")[0]
        if path == "/v1/completions":
            self._complete(json.loads(body))
            return
        if path == "/pause":
            self.server.paused.set()
        elif path == "/resume":
            self.server.paused.clear()
        elif path == "/collective_rpc":
            self.server.loaded.append(json.loads(body)["kwargs"]["weights_path"])
        self._answer({"success": True})

    def _complete(self, asked: dict[str, Any]) -> None:
        self.server.asked += 1
        while not self.server.let_answer.wait(0.01) and not self.server.paused.is_set():
            pass
        digest = hashlib.sha256(json.dumps([asked["prompt"], asked["seed"], len(self.server.loaded)]).encode()).digest()
        ids = [97 + byte % 26 for byte in digest[: SIZE - 1]] + [END]
        choice = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-byte / 256 for byte in digest[:SIZE]]},
            "finish_reason": "stop",
        }
        if self.server.paused.is_set():
            choice = {"token_ids": ids[:3], "logprobs": {"token_logprobs": [-0.5] * 3}, "finish_reason": "abort"}
        self._answer({"choices": [choice]})

    def _answer(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serve_model() -> Generator[ModelServer]:
    with ModelServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.let_answer.set()
            server.shutdown()
            thread.join()
