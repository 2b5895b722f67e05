"""Shows a run while it runs: a page, its state as JSON, and metrics for Prometheus, over HTTP.

Read-only. It answers programs and its own page, and no web page from elsewhere: those cannot read a
page of this host through a browser that can.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from hetero.errors import UserError
from hetero.observe.collect import Collector, Seen
from hetero.observe.exposition import CONTENT_TYPE, exposition
from hetero.observe.state import History, Rates, RunDescription, build_state
from hetero.startup.liveness import silent_after
from hetero.startup.process import close_in_children

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
"""Between two looks of the history at rank 0's own record, and the age at which a state is old."""
_MOST_REQUESTS = 16
"""That are answered at a time."""
_REQUEST_SECONDS = 10.0
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
}


@dataclass(frozen=True)
class _View:
    """A state and the records it was made of."""

    state: dict[str, Any]
    seen: Mapping[int, Seen]
    until: float


class MetricsServer:
    """Serves until it is closed, in threads of its own. Any thread may call any method.

    Records are parsed when somebody asks, at most once a second. What fails here is told once and
    never ends a run.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        describe: Callable[[], RunDescription],
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Listen. Raises UserError if the address or port cannot be had.

        Args:
            collector: the records of all ranks.
            describe: returns what is known of the run by now; called for each state.
            address: of this host, by which it is reached; "0.0.0.0" or "::" for any.
            port: 0 for any free one.
        """
        self._collector = collector
        self._describe = describe
        self._rates, self._history = Rates(), History()
        self._incidents: Counter[str] = Counter()
        self._view: _View | None = None
        self._looking, self._lock = threading.Lock(), threading.Lock()
        self._is_told = False
        self._closed = threading.Event()
        self._server = _listen(address, port, self)
        self._address = address
        self.port: int = self._server.server_address[1]
        """The one it listens on."""
        for incident in collector.incidents():
            self._count(incident)
        collector.on_incident(self._count)
        serve = partial(self._server.serve_forever, poll_interval=0.5)
        for name, target in (("live view", serve), ("live view history", self._keep_history)):
            threading.Thread(target=target, name=name, daemon=True).start()

    @property
    def url(self) -> str:
        """Where the page is, for a browser on this host, or on another if it listens for those."""
        host = self._address
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host).is_unspecified:
                host = socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def state(self) -> dict[str, Any]:
        """The state of now, at most a second old. Raises ValueError for a record that is not."""
        return self._look().state

    def metrics(self) -> bytes:
        """The same for Prometheus."""
        view = self._look()
        with self._lock:
            incidents = Counter(self._incidents)
        return exposition(view.state, view.seen, incidents)

    def close(self) -> None:
        """Stop listening, and answer no more."""
        if not self._closed.is_set():
            self._closed.set()
            self._server.shutdown()
            self._server.server_close()

    def tell(self, what: str) -> None:
        """Log a failure of the live view, the first only."""
        if not self._is_told:
            self._is_told = True
            _log.warning("the live view failed and goes on: %s", what)

    def _count(self, incident: Mapping[str, Any]) -> None:
        with self._lock:
            self._incidents[str(incident.get("kind", "other"))] += 1

    def _look(self) -> _View:
        with self._looking:
            now = time.monotonic()
            if self._view is None or now >= self._view.until:
                began = time.thread_time()
                seen = self._collector.seen()
                self._rates.look(seen, time.monotonic())
                description = self._describe()
                self._history.look(self._collector.recorder)
                state = build_state(
                    description,
                    seen,
                    rates=self._rates,
                    incidents=self._collector.incidents(),
                    history=self._history,
                    silent_after=silent_after(description.world_size),
                )
                # However many ask, a look at thousands of records takes a tenth of a core at most.
                took = time.thread_time() - began
                self._view = _View(state, seen, now + max(_LOOK_SECONDS, 10 * took))
            return self._view

    def _keep_history(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                with self._looking:
                    self._history.look(self._collector.recorder)
            except Exception as error:  # a curve is a convenience
                self.tell(f"{type(error).__name__}: {error}")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    # Python's own list of these would grow by one for each request.
    block_on_close = False

    def __init__(self, family: socket.AddressFamily, address: Any, metrics: MetricsServer) -> None:
        self.address_family = family
        self.metrics = metrics
        self.names = _own_names(address[0])
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)
        super().__init__(address, _Handler)
        # A worker of the data loader must not hold the port after this process.
        close_in_children(self.socket)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service for this host's name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or sent nonsense, is no matter for the log."""


def _listen(address: str, port: int, metrics: MetricsServer) -> _Server:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        family, _, _, _, where = found[0]
        return _Server(family, where, metrics)
    except OSError as error:
        raise UserError(
            f"the live view cannot listen on {address}, port {port} ({error.strerror or error}); "
            "name another --hetero-metrics-port (in a script HETERO_METRICS_PORT), 0 for any free "
            "one, or another --hetero-metrics-address (HETERO_METRICS_ADDRESS)"
        ) from error
    except OverflowError as error:
        raise UserError(f"port {port} is none: ports are 0 to 65535") from error


def _own_names(address: str) -> frozenset[str]:
    names = {"localhost", socket.gethostname().lower(), address.lower()}
    return frozenset(names | {name.partition(".")[0] for name in names if not _is_number(name)})


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "hetero", ""
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        if (refusal := self._refusal()) is not None:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", refusal.encode())
            return
        path = urlsplit(self.path).path
        answers: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": ("text/html; charset=utf-8", _page),
            "/state": ("application/json", self._state),
            "/metrics": (CONTENT_TYPE, self.server.metrics.metrics),
        }
        if path not in answers:
            text = f"there is nothing here; see {', '.join(answers)}\n"
            self._send(HTTPStatus.NOT_FOUND, "text/plain", text.encode())
            return
        kind, answer = answers[path]
        try:
            content = answer()
        except Exception as error:
            what = f"{path}: {type(error).__name__}: {error}"
            self.server.metrics.tell(what)
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{what}\n".encode())
            return
        self._send(HTTPStatus.OK, kind, content)

    do_HEAD = do_GET

    def _refuse(self) -> None:
        text = b"the live view is read-only: GET and HEAD\n"
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", text, Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _state(self) -> bytes:
        return json.dumps(
            _finite(self.server.metrics.state()), separators=(",", ":"), allow_nan=False
        ).encode()

    def _refusal(self) -> str | None:
        """Why this request is not answered.

        A page elsewhere may have its own name lead to this host (DNS rebinding): then the name
        is neither a number nor this host's. Or it may ask for this address as it is: then a browser
        says where the page is from.
        """
        host = self.headers.get("Host", "")
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            name = ""
        if not name or not (_is_number(name) or name in self.server.names):
            return f"the live view is not known as {host!r}; use localhost or the IP address\n"
        origin = self.headers.get("Origin")
        if origin is not None and origin.lower() != f"http://{host}".lower():
            return "the live view answers no pages of other sites\n"
        # A page's request for an image or a script has no Origin. A link to here may be followed.
        site = self.headers.get("Sec-Fetch-Site", "none")
        is_link = (
            self.headers.get("Sec-Fetch-Mode") == "navigate"
            and self.headers.get("Sec-Fetch-Dest") == "document"
        )
        if site not in ("none", "same-origin") and not is_link:
            return "the live view answers no pages of other sites\n"
        return None

    def _send(self, status: HTTPStatus, kind: str, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in (_HEADERS | headers).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the console is for training."""


def _page() -> bytes:
    return files("hetero.observe").joinpath("page/index.html").read_bytes()


def _finite(value: Any) -> Any:
    """With None for floats that JSON cannot hold."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
