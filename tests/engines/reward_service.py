"""A real HTTP service on this machine that scores, misbehaves on request, and counts what it is asked.

python reward_service.py    prints its address, and serves until its standard input is closed
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service:
    """`answer(path, body, headers)` gives (status, text to send), or None to drop the connection."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any, dict[str, str]]] = []
        self.connections = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.failures_left = 0
        self.lock = threading.Lock()
        self.url = ""

    def answer(self, path: str, body: Any) -> tuple[int, str] | None:
        items = body.get("items", [])
        right = [{"id": item["id"], "score": float(item["response"])} for item in items]
        match path.strip("/").split("/"):
            case ["score"]:
                return 200, json.dumps({"results": right[::-1]})  # in another order
            case ["slow", seconds]:
                time.sleep(float(seconds))
                return 200, json.dumps({"results": right})
            case ["flaky"]:
                with self.lock:
                    self.failures_left -= 1
                    failing = self.failures_left >= 0
                return (503, "busy") if failing else (200, json.dumps({"results": right}))
            case ["status", status]:
                return int(status), "no such luck"
            case ["counts"]:
                return 200, json.dumps({"connections": self.connections, "most_in_flight": self.most_in_flight})
            case ["deep"]:
                return 200, "[" * 100_000
            case ["drop"]:
                return None
            case ["say", text]:
                return 200, bytes.fromhex(text).decode()
            case ["echo-key"]:
                return 400, f"bad key {self.requests[-1][2].get('Authorization')}"
            case ["openrlhf"]:
                rewards = [
                    len(query) - len(prompt) for query, prompt in zip(body["query"], body["prompts"], strict=True)
                ]
                return 200, json.dumps({"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}})
            case ["trl"]:
                return 200, json.dumps([None if a is None else a * 1.0 for a in body["answer"]])
            case ["v1", "chat", "completions"]:
                text = body["messages"][-1]["content"]
                reply = {"empty": None, "bad": "I would rather not."}.get(text, f"Hm. Score: 1? Score: {text[-1]}")
                return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]})
        return 404, "nothing here"


@contextmanager
def service() -> Iterator[Service]:
    """Listens on a free port until the block ends."""
    one = Service()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else the second packet of an answer waits 40 ms for the first one's receipt

        def setup(self) -> None:
            super().setup()
            one.connections += 1

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with one.lock:
                one.requests.append((self.path, body, dict(self.headers)))
                one.in_flight += 1
                one.most_in_flight = max(one.most_in_flight, one.in_flight)
            answered = one.answer(self.path, body)
            with one.lock:
                one.in_flight -= 1
            if answered is None:
                self.close_connection = True
                return
            status, text = answered
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    one.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield one
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    with service() as running:
        print(running.url, flush=True)
        sys.stdin.read()
