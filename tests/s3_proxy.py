"""A proxy in front of the real S3 server that misbehaves on request: throttles, fails, hangs up, loses answers."""

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"
INTERNAL = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>We had a problem.</Message></Error>"

# A fault is decided for (method, path): 'throttle', 'fail', 'hang up', 'lose the answer', or None for good behaviour.
Fault = Callable[[str, str], str | None]


class FaultyProxy:
    """Forwards to `endpoint` unless `fault` says otherwise; `seen` counts requests by (method, what was done)."""

    def __init__(self, endpoint: str, fault: Fault) -> None:
        self.fault, self.seen = fault, []
        self._target = urlsplit(endpoint).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

            def log_message(self, *args: object) -> None:
                """Keep the tests' output clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        if request.headers.get("Expect", "").lower() == "100-continue":
            request.send_response_only(100)
            request.end_headers()
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        what = self.fault(request.command, request.path)
        self.seen.append((request.command, what))
        if what == "hang up":
            request.close_connection = True
            return
        if what in ("throttle", "fail"):
            _answer(request, 503 if what == "throttle" else 500, {}, SLOW_DOWN if what == "throttle" else INTERNAL)
            return
        upstream = http.client.HTTPConnection(self._target, timeout=60)
        try:
            upstream.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() != "expect":
                    upstream.putheader(name, value)  # the Host too: it is signed
            upstream.endheaders(body)
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        if what == "lose the answer":
            request.close_connection = True
            return
        _answer(request, answer.status, dict(answer.headers.items()), data)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answer(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
    request.send_response_only(status)
    is_head = request.command == "HEAD"
    for name, value in headers.items():
        if name.lower() not in ("connection", "transfer-encoding") and (is_head or name.lower() != "content-length"):
            request.send_header(name, value)
    if not is_head:
        request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if not is_head:
        request.wfile.write(body)
