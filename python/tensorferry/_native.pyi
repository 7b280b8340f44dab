import sys
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, final

__all__ = [
    "Arena",
    "Pool",
    "Remote",
    "Rows",
    "Secret",
    "Server",
    "_fetch_slices",
    "_file_entries",
    "_interfaces",
    "_read_file",
    "_shutdown_runtime",
    "_write_file",
]

_Part = tuple[str, str, int, int, int, int, list[tuple[int, int, int]]]

@final
class Arena:
    @property
    def address(self) -> int: ...
    def __len__(self) -> int: ...
    def tensors(self, tensor: type, numbers: list[int]) -> list[Any]: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Pool:
    def __new__(cls, limit: int) -> Pool: ...
    @property
    def held(self) -> int: ...

@final
class Secret:
    def __new__(cls, secret: bytes) -> Secret: ...

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
        secret: Secret | None = None,
        tls: bool = False,
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
        rows: Rows,
        control: list[tuple[str, bytes]],
        metadata: list[tuple[str, str]],
        owner: Any,
        private: bool,
        alternate: Callable[[str], list[Any] | str | None] | None = None,
    ) -> None: ...
    def check_process(self) -> None: ...
    def note_receive(self, report: dict[str, Any] | None, took: float) -> None: ...
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
        secret: Secret | None = None,
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

@final
class Rows:
    def __new__(cls, tensor: type, parameter: type, dtypes: dict[Any, str], *, native: bool = True) -> Rows: ...
    def __len__(self) -> int: ...
    @property
    def memory(self) -> list[Any]: ...
    @property
    def flags(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def dtypes(self) -> list[str]: ...
    @property
    def shapes(self) -> list[tuple[int, ...]]: ...
    @property
    def sizes(self) -> list[int]: ...
    def members(
        self,
        keys: list[Any],
        values: list[Any],
        below: str,
        depth: int,
        node: Callable[[Any, str, int], str],
        other: Callable[[Any, str], int],
    ) -> str | None: ...
    def elements(
        self,
        values: list[Any],
        names: tuple[str, ...] | None,
        below: str,
        depth: int,
        node: Callable[[Any, str, int], str],
        other: Callable[[Any, str], int],
    ) -> str: ...
    def leaf(self, value: Any, path: str, other: Callable[[Any, str], int]) -> int: ...
    def number_of(self, value: Any) -> int | None: ...
    def forget(self) -> None: ...
    def append(
        self, memory: Any, name: str, dtype: str, shape: Sequence[int], address: int, nbytes: int, flag: int
    ) -> int: ...
    def place(self, row: int, address: int) -> None: ...
    def names_are_regular(self) -> bool: ...
    def rename(self, names: list[str]) -> None: ...

def _write_file(
    path: str | PathLike[str],
    *,
    rows: Rows,
    control: list[tuple[str, bytes]],
    metadata: list[tuple[str, str]],
    threads: int | None = None,
    cached: bool = False,
) -> tuple[int, int]: ...
def _file_entries(path: str | PathLike[str]) -> list[tuple[str, str, int]]: ...
def _read_file(path: str | PathLike[str], parts: list[_Part], *, threads: int | None = None) -> dict[str, int]: ...
def _fetch_slices(
    orders: list[tuple[list[str], int, list[_Part]]],
    *,
    timeout: float,
    lanes: int | None = None,
    same_host: bool = False,
    ahead: int | None = None,
    secret: Secret | None = None,
) -> dict[str, Any]: ...
def _interfaces() -> list[tuple[str, str]]: ...
def _shutdown_runtime() -> None: ...
