"""HTTP servers on this machine, as tests need them: each runs on a thread, and logs nothing."""

from __future__ import annotations

import http.server
import threading


class LocalServer(http.server.ThreadingHTTPServer):
    """Serves on a free port until it is closed."""

    daemon_threads = True

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """Answers by ``reply``, whatever the method, without a log."""

    def reply(self) -> None:
        """Send an answer."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self.reply()

    do_HEAD = do_POST = do_GET  # noqa: N815 - the names that http.server looks for

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """Send a whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silence."""
