"""A man in the middle: a TLS server with a certificate of his own, who writes down what he is told."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

#: For tests alone: a key that anybody can read proves nothing.
_KEY = """-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQghXK3LRAL5NtCpsMc
NUwZN6z11Tp/xy37e4FjU8RnM/6hRANCAARicyKpRFjUMIUMqEZlpeXGqlt8VIpJ
vgMnR29MK+VNRjJBunoOB3YeBK+zQRTPqLxiXKuTMOFrGzYe23CQmQib
-----END PRIVATE KEY-----
"""
_CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBejCCAR+gAwIBAgIUClf5ZX12PJh2J8xTQoQyxzMJA8wwCgYIKoZIzj0EAwIw
ETEPMA0GA1UEAwwGbWlkZGxlMCAXDTI2MTEyMzEzMTEzNVoYDzIxMjYxMDMwMTMx
MTM1WjARMQ8wDQYDVQQDDAZtaWRkbGUwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNC
AARicyKpRFjUMIUMqEZlpeXGqlt8VIpJvgMnR29MK+VNRjJBunoOB3YeBK+zQRTP
qLxiXKuTMOFrGzYe23CQmQibo1MwUTAdBgNVHQ4EFgQUtcKGiU29D+AiEJShcfXt
B6nk8nowHwYDVR0jBBgwFoAUtcKGiU29D+AiEJShcfXtB6nk8nowDwYDVR0TAQH/
BAUwAwEB/zAKBggqhkjOPQQDAgNJADBGAiEA048V+7yFTxCNdpB3foFWZF8FTb9M
47/5o9+q/5z/I30CIQDSVRHE9+04NlMPblw0m60xC8zT/g2BYLtGyeSFzS3VGQ==
-----END CERTIFICATE-----
"""


class ManInTheMiddle:
    """Takes every connection, completes each handshake that a client goes along with, and reads what the client says.

    Attributes:
        connections: how many connections came
        told: what was said to him inside of TLS; empty as long as every client has looked at his certificate
        clear: what was said to him without TLS, after the first bytes of a handshake or instead of it
    """

    def __init__(self, folder: Path) -> None:
        (folder / "key.pem").write_text(_KEY)
        (folder / "certificate.pem").write_text(_CERTIFICATE)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.connections, self.told, self.clear = 0, b"", b""
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def instead_of(self, metadata: str) -> str:
        """Returns metadata with his address in place of the source's, and all else as it was."""
        url = urlsplit(metadata)
        return url._replace(netloc=f"{url.username}@127.0.0.1:{self._listener.getsockname()[1]}").geturl()

    def _listen(self) -> None:
        while True:
            try:
                taken, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with taken, contextlib.suppress(OSError):
                taken.settimeout(5)
                # A handshake begins with this byte.
                if taken.recv(1, socket.MSG_PEEK) != b"\x16":
                    self.clear += taken.recv(1 << 16)
                    continue
                with self._context.wrap_socket(taken, server_side=True) as secured:
                    self.told += secured.recv(1 << 16)
                    secured.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\ntensorferry_allowed 1\n")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Closing alone does not wake the thread that accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)
