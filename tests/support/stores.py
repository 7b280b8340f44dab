"""Object stores for tests: servers on loopback, and a gateway before them that counts requests and does harm."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import logging
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret-of-20-chars", "AWS_REGION": "us-east-1"}
#: Answers of a store that is busy, and of one that does not permit a request.
SLOW_DOWN = 503, b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
FORBIDDEN = 403, b"<Error><Code>AccessDenied</Code><Message>Not now.</Message></Error>"
#: How often a server is started, each time at another port.
_STARTS = 5
ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Yields the address of moto's server, with an empty bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        client(url).create_bucket(Bucket=BUCKET)
        yield url
    finally:
        client(url).close()
        boto3.DEFAULT_SESSION = None
        server.stop()
        with contextlib.suppress(OSError):
            http.client.HTTPConnection(host, port, timeout=5).close()


def s3s_binary() -> str | None:
    """Returns the path of the server s3s-fs, which ``make object-stores`` builds; ``None`` without it."""
    built = ROOT / "build" / "object-stores" / "bin" / "s3s-fs"
    return str(built) if built.is_file() else shutil.which("s3s-fs")


@contextlib.contextmanager
def s3s(folder: Path) -> Iterator[str]:
    """Yields the address of s3s-fs, with an empty bucket, whose objects lie in ``folder``."""
    binary = s3s_binary()
    assert binary is not None
    (folder / BUCKET).mkdir(parents=True)
    for _ in range(_STARTS):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        keys = ["--access-key", KEYS["AWS_ACCESS_KEY_ID"], "--secret-key", KEYS["AWS_SECRET_ACCESS_KEY"]]
        process = subprocess.Popen(
            [binary, "--host", "127.0.0.1", "--port", str(port), *keys, str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            # Somebody else may have taken the port meanwhile: then the server has ended, and another port is tried.
            if _listens(process, port):
                yield f"http://127.0.0.1:{port}"
                return
        finally:
            process.kill()
            process.wait()
    raise AssertionError("s3s-fs does not start")


def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    """Waits until a server takes connections; returns whether it does, and has not ended."""
    end = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            # What has taken the port may be another one.
            time.sleep(0.2)
            return process.poll() is None
        time.sleep(0.05)
    return False


def client(url: str) -> Any:
    """Returns boto3's client for the server at ``url``."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        region_name=KEYS["AWS_REGION"],
    )


def objects(url: str, prefix: str = "") -> dict[str, bytes]:
    """Returns the objects of the bucket, by key."""
    s3 = client(url)
    keys = [one["Key"] for one in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])]
    return {key: s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


def uploads(url: str, prefix: str) -> list[str]:
    """Returns the keys of uploads below ``prefix`` that were begun and not ended."""
    begun = client(url).list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    return [one["Key"] for one in begun if one["Key"].startswith(f"{prefix}/")]


def put_folder(url: str, folder: Path, prefix: str) -> None:
    """Copies the files of a folder, and of those in it, into the bucket."""
    for path in filter(Path.is_file, folder.rglob("*")):
        client(url).put_object(Bucket=BUCKET, Key=f"{prefix}/{path.relative_to(folder)}", Body=path.read_bytes())


#: What a gateway does with a request: ``None`` passes it on; status, body and headers are the answer; ``"stall"`` never
#: answers, ``"break"`` closes the connection; ``"halve"`` passes on half of the body; a function changes the body of
#: the answer.
Action = None | str | tuple[int, bytes] | tuple[int, bytes, dict[str, str]] | Callable[[bytes], bytes]


class Gateway:
    """Passes requests on to a server, and asks ``act`` first: with the number of the request, its method and its path.

    Args:
        url: the server
        act: decides what is done; called in the thread of the request
    """

    def __init__(self, url: str, act: Callable[[int, str, str], Action] = lambda *_: None) -> None:
        self.act = act
        self.seen: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self._lock = threading.Lock()
        self._passed_on = 0
        host = url.removeprefix("http://")
        gateway = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    super().handle_one_request()

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                with gateway._lock:
                    number = len(gateway.seen)
                    gateway.seen.append((self.command, self.path))
                    gateway.headers.append({name.lower(): value for name, value in self.headers.items()})
                action = gateway.decide(number, self.command, self.path, body)
                if action == "stall":
                    gateway.over.wait(60)
                    self.close_connection = True
                    return
                if action == "break":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if isinstance(action, tuple):
                    status, data, *more = action
                    self._answer(status, {"content-length": str(len(data)), **dict(*more)}, data)
                    return
                if action == "halve":
                    body = body[: len(body) // 2]
                    del self.headers["content-length"]
                upstream = http.client.HTTPConnection(host, timeout=60)
                with gateway._passing(), contextlib.closing(upstream):
                    upstream.request(self.command, self.path, body, dict(self.headers.items()))
                    answer = upstream.getresponse()
                    data, headers = answer.read(), dict(answer.headers.items())
                if action == "lose":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self._answer(answer.status, headers, action(data) if callable(action) else data)

            def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
                self.send_response_only(status)
                lengths = ("content-length", "transfer-encoding", "connection")
                for name, value in headers.items():
                    if name.lower() not in lengths or (self.command == "HEAD" and name.lower() == "content-length"):
                        self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("content-length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.over = threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def decide(self, number: int, method: str, path: str, body: bytes) -> Action:
        """Returns what is done with a request."""
        del body
        return self.act(number, method, path)

    @contextlib.contextmanager
    def _passing(self) -> Iterator[None]:
        with self._lock:
            self._passed_on += 1
        try:
            yield
        finally:
            with self._lock:
                self._passed_on -= 1

    def settle(self) -> None:
        """Waits until the server has answered all requests, also those whose client has gone."""
        end = time.monotonic() + 60
        while self._passed_on:
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.01)

    def __enter__(self) -> Gateway:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


def environment(url: str) -> dict[str, str]:
    """Returns the variables by which clients find the server at ``url``."""
    return {**KEYS, "AWS_ENDPOINT_URL": url}


class LyingStore:
    """Decides for a :class:`Gateway`: says of PUTs of some objects that all is well, and keeps nothing, or a part.

    Args:
        url: the server
        name: how their keys end
        how: ``"lost"`` keeps what was there before; ``"short"`` keeps fewer bytes
    """

    def __init__(self, url: str, name: str, how: str) -> None:
        self._url, self._name, self._how = url, name, how

    def __call__(self, _: int, method: str, path: str) -> Action:
        key = path.removeprefix(f"/{BUCKET}/")
        if method != "PUT" or not key.endswith(self._name):
            return None
        before = objects(self._url, key).get(key)

        def forget(answer: bytes) -> bytes:
            s3 = client(self._url)
            if self._how == "lost" and before is None:
                s3.delete_object(Bucket=BUCKET, Key=key)
            else:
                kept = objects(self._url, key)[key][:-10] if self._how == "short" else before
                s3.put_object(Bucket=BUCKET, Key=key, Body=kept)
            return answer

        return forget
