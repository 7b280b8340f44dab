import sys
from collections.abc import Callable
from typing import Any, final

__all__ = ["Arena", "Pool", "Remote", "Server", "_interfaces", "_shutdown_runtime"]

@final
class Arena:
    @property
    def address(self) -> int: ...
    def __len__(self) -> int: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Pool:
    def __new__(cls, limit: int) -> Pool: ...
    @property
    def held(self) -> int: ...

@final
class Server:
    def __new__(
        cls,
        *,
        patience: float,
        bind: str | None = None,
        capability: bool = True,
        same_host: bool = True,
        max_bandwidth: int | None = None,
    ) -> Server: ...
    @property
    def port(self) -> int: ...
    @property
    def step(self) -> int | None: ...
    @property
    def allowed(self) -> bool: ...
    @property
    def active(self) -> int: ...
    @property
    def bytes_served(self) -> int: ...
    def url(self, host: str) -> str: ...
    def publish(
        self,
        step: int,
        *,
        names: bytes,
        dtypes: bytes,
        dtype_names: list[str],
        ranks: bytes,
        dims: bytes,
        addresses: bytes,
        sizes: bytes,
        control: list[tuple[str, bytes]],
        metadata: list[tuple[str, str]],
        owner: Any,
        private: bool,
        alternate: Callable[[str], list[Any] | None] | None = None,
    ) -> None: ...
    def check_process(self) -> None: ...
    def allow(self, step: int) -> None: ...
    def withdraw(self, patience: float) -> int: ...
    def shutdown(self, patience: float) -> None: ...

@final
class Remote:
    @staticmethod
    def open(
        urls: list[str],
        step: int,
        *,
        timeout: float,
        lanes: int | None = None,
        same_host: bool = True,
        pool: Pool | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Remote: ...
    @property
    def manifest(self) -> bytes | None: ...
    @property
    def pickle(self) -> bytes | None: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def dtypes(self) -> list[str]: ...
    @property
    def shapes(self) -> list[tuple[int, ...]]: ...
    @property
    def sizes(self) -> list[int]: ...
    def fetch(self, addresses: list[int | None] | None = None) -> tuple[Arena, list[int | None], dict[str, Any]]: ...

def _interfaces() -> list[tuple[str, str]]: ...
def _shutdown_runtime() -> None: ...
