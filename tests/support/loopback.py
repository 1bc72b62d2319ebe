"""A server on loopback that answers as a test wants it."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Serves the files of a folder below ``/files``, takes every POST; `status`, `delay_s` and `gates` go by path.

    The status of ``*`` applies to all paths without one. A request to a path with a gate is half answered, and the rest
    comes once the gate is open.
    """

    def __init__(self, folder):
        self.folder = folder
        self.status, self.delay_s, self.answers, self.posts, self.headers = {}, {}, {}, [], []
        self.gates, self.at_gate = {}, []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                path = self.path.partition("?")[0]
                time.sleep(server.delay_s.get(path, 0))
                server.headers.append((path, dict(self.headers)))
                file = server.folder / path.removeprefix("/files/")
                found = path.startswith("/files/") and file.is_file()
                code = server.status.get(path, server.status.get("*", 200 if found else 404))
                self._answer(code, file.read_bytes() if found else b"")

            def do_POST(self):
                path = self.path.partition("?")[0]
                text = self.rfile.read(int(self.headers["Content-Length"])) or b"null"
                is_lines = "ndjson" in self.headers.get("Content-Type", "")
                body = [json.loads(line) for line in text.splitlines()] if is_lines else json.loads(text)
                server.headers.append((path, dict(self.headers)))
                time.sleep(server.delay_s.get(path, 0))
                code = server.status.get(path, server.status.get("*", 200))
                if code == 200:
                    server.posts.append((path, body))
                self._answer(code, json.dumps(server.answers.get(path, {"ok": True})).encode())

            def _answer(self, code, body):
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"1"')
                self.end_headers()
                path = self.path.partition("?")[0]
                half = len(body) // 2 if path in server.gates else 0
                with contextlib.suppress(ConnectionError):  # nobody may wait for it any more
                    self.wfile.write(body[:half])
                    if path in server.gates:
                        server.at_gate.append(path)
                        server.gates[path].wait(120)
                    self.wfile.write(body[half:])

            def log_message(self, *_): ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.http.server_port}"

    def posted(self, path):
        return [body for posted_to, body in self.posts if posted_to == path]

    def close(self):
        for gate in self.gates.values():
            gate.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@contextlib.contextmanager
def serving(folder):
    """A server of the files in `folder`, for as long as the block runs."""
    server = Server(folder)
    try:
        yield server
    finally:
        server.close()
