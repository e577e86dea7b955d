"""A proxy in front of the real S3 server that misbehaves on request: throttles, fails, hangs up, damages answers."""

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"
INTERNAL = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>We had a problem.</Message></Error>"

# A fault is decided for (method, path): 'throttle', 'fail', 'hang up', 'stall' (no answer for `stall_seconds`, then
# hang up), 'lose the answer' (what was asked for is done), 'cut short' and 'corrupt' (a good answer to a GET, of which
# half comes, or all with one bit flipped), 'answer as before' (what was answered to the same GET the last time,
# where it was something else: storage that is consistent only eventually), or None for good behaviour.
Fault = Callable[[str, str], str | None]


class _Server(ThreadingHTTPServer):
    """A thread for each connection; clients may die at any time, which is nothing to tell about."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing."""


class FaultyProxy:
    """Forwards to `endpoint` unless `fault` says otherwise.

    `seen` lists requests as (method, what `fault` said), `happened` counts what was really done to one.
    """

    def __init__(self, endpoint: str, fault: Fault, address: str = "127.0.0.1") -> None:
        self.fault, self.seen, self.stall_seconds = fault, [], 8.0
        self.happened: Counter[str] = Counter()
        self._answers: dict[tuple[str, str], tuple[int, dict[str, str], bytes]] = {}  # the last one to each GET
        self._target = urlsplit(endpoint).netloc
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

            def log_message(self, *args: object) -> None:
                """Keep the tests' output clean."""

        self._server = _Server((address, 0), Handler)
        self.endpoint = f"http://{address}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        if request.headers.get("Expect", "").lower() == "100-continue":
            request.send_response_only(100)
            request.end_headers()
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        what = self.fault(request.command, request.path)
        self.seen.append((request.command, what))
        if what in ("hang up", "stall"):
            self.happened[what] += 1
            time.sleep(self.stall_seconds if what == "stall" else 0)
            request.close_connection = True
            return
        if what in ("throttle", "fail"):
            self.happened[what] += 1
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
        except (OSError, http.client.HTTPException):  # the server is down: so are we
            request.close_connection = True
            return
        finally:
            upstream.close()
        if what == "lose the answer":
            self.happened[what] += 1
            request.close_connection = True
            return
        if request.command == "GET":
            key = (request.path, request.headers.get("Range", ""))
            before, self._answers[key] = self._answers.get(key), (answer.status, dict(answer.headers.items()), data)
            if what == "answer as before" and before is not None and before[2] != data:
                self.happened[what] += 1
                _answer(request, *before)
                return
        cut_at = None
        if what in ("corrupt", "cut short") and request.command == "GET" and answer.status in (200, 206) and data:
            self.happened[what] += 1
            middle = len(data) // 2
            if what == "cut short":
                cut_at = middle
            else:
                data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        _answer(request, answer.status, dict(answer.headers.items()), data, cut_at)

    def forget(self) -> None:
        """Drop the requests and answers so far, which a long campaign would fill the memory with."""
        self.seen.clear()
        self._answers.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answer(
    request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, cut_at: int | None = None
) -> None:
    request.send_response_only(status)
    is_head = request.command == "HEAD"
    for name, value in headers.items():
        if name.lower() not in ("connection", "transfer-encoding") and (is_head or name.lower() != "content-length"):
            request.send_header(name, value)
    if not is_head:
        request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if not is_head:
        request.wfile.write(body[:cut_at])
    if cut_at is not None:
        request.close_connection = True
