"""NumPy's random generators, whose states numpy itself does not check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .kinds import Globals, Kind, Pending, all_are, as_value, register, require

if TYPE_CHECKING:
    from ..unpickler import Unpickler


def _words(value: Any, dtype: str, *count: int) -> bool:
    import numpy as np

    return type(value) is np.ndarray and value.dtype == np.dtype(dtype) and value.shape == count


def _bit_state(name: str, state: Any) -> Any:
    """Checks the state of numpy's bit generator ``name`` and returns it.

    With a wrong position in it, numpy would read beyond its arrays.
    """
    require(
        type(state) is dict and all_are(str, *state) and state.get("bit_generator") == name,
        "a random generator of an unexpected kind",
    )
    inner = state.get("state")
    require(type(inner) is dict and all_are(str, *inner), "a random generator without a state")

    def number(of: dict[str, Any], key: str, end: int) -> bool:
        return type(of.get(key)) is int and 0 <= of[key] < end

    if name == "MT19937":
        require(
            _words(inner.get("key"), "uint32", 624) and number(inner, "pos", 625), "an MT19937 with an invalid state"
        )
        return state
    require(
        number(state, "has_uint32", 2) and number(state, "uinteger", 1 << 32),
        "a random generator with an invalid state",
    )
    if name in ("PCG64", "PCG64DXSM"):
        require(number(inner, "state", 1 << 128) and number(inner, "inc", 1 << 128), "a PCG64 with an invalid state")
    elif name == "Philox":
        require(
            _words(inner.get("counter"), "uint64", 4) and _words(inner.get("key"), "uint64", 2),
            "a Philox with an invalid state",
        )
        require(
            _words(state.get("buffer"), "uint64", 4) and number(state, "buffer_pos", 5),
            "a Philox with an invalid state",
        )
    else:
        require(_words(inner.get("state"), "uint64", 4), "an SFC64 with an invalid state")
    return state


_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def _bit_generator(cls: Any) -> Kind:
    def restore_bit_generator(_: Unpickler, instance: Any, state: Any) -> Any:
        import numpy as np

        if type(state) is dict:
            instance.state = _bit_state(cls.__name__, state)
            return instance
        require(type(state) is tuple and len(state) == 2, "a random generator without a state")
        inner, seed = state
        require(
            seed is None or type(seed) is np.random.SeedSequence, "a random generator whose seed is not a SeedSequence"
        )
        _bit_state(cls.__name__, inner)
        instance.__setstate__((inner, seed))
        return instance

    return Kind(cls, build=restore_bit_generator)


def _new_bit_generator(_: Unpickler, name: Any = "MT19937") -> Any:
    """Creates one of numpy's bit generators, by its name or its class, which gets its state later."""
    import numpy as np

    generators = {generator: getattr(np.random, generator) for generator in _GENERATORS}
    cls: Any = generators.get(name) if type(name) is str else name
    require(any([cls is generator for generator in generators.values()]), "a random generator of an unexpected kind")
    register(cls, _bit_generator)
    return cls(0)


def _ready_bit_generator(unpickler: Unpickler, given: Any) -> Any:
    """Returns the bit generator ``given``, or a new one of that name."""
    import numpy as np

    if type(given) is str:
        return _new_bit_generator(unpickler, given)
    require(type(given) in [getattr(np.random, one) for one in _GENERATORS], "a random generator of an unexpected kind")
    return given


def _new_generator(unpickler: Unpickler, given: Any = "MT19937", *_: Any) -> Any:
    import numpy as np

    register(np.random.Generator, _generator_state)
    return np.random.Generator(_ready_bit_generator(unpickler, given))


def _new_random_state(unpickler: Unpickler, given: Any = "MT19937", *_: Any) -> Any:
    """Creates a ``RandomState`` over a bit generator, which may be given by its name."""
    import numpy as np

    ready = _ready_bit_generator(unpickler, given)
    require(type(ready).__name__ == "MT19937", "a RandomState over a generator other than MT19937")
    register(np.random.RandomState, _generator_state)
    return np.random.RandomState(ready)


def _generator_state(cls: Any) -> Kind:
    """For ``numpy.random.Generator`` and ``RandomState``, whose state numpy before version 2 pickles separately."""

    def restore_generator_state(_: Unpickler, instance: Any, state: Any) -> Any:
        if state is None:
            return instance
        require(type(state) is dict, "a random generator without a state")
        if cls.__name__ == "Generator":
            instance.bit_generator.state = _bit_state(type(instance.bit_generator).__name__, state)
            return instance
        _bit_state("MT19937", state)
        require(
            type(state.get("has_gauss", 0)) is int and type(state.get("gauss", 0.0)) is float,
            "a RandomState with an invalid state",
        )
        instance.set_state(state)
        return instance

    return Kind(cls, build=restore_generator_state)


def _new_seed_sequence(_: Unpickler, cls: Any, checksum: Any, state: Any) -> Any:
    """Stands for numpy's function that Cython pickles a SeedSequence by: it is created when its state comes."""
    import numpy as np

    require(
        cls is np.random.SeedSequence and type(checksum) is int and state is None,
        "a SeedSequence of an unexpected kind",
    )
    return Pending(_make_seed_sequence)


def _make_seed_sequence(unpickler: Unpickler, state: Any) -> Any:
    """Creates a SeedSequence from its numbers; numpy computes the pool from them."""
    import numpy as np

    require(type(state) is tuple and len(state) in (5, 6), "a SeedSequence with an invalid state")
    entropy, spawned, pool, size, key = state[:5]

    def numbers(values: Any) -> bool:
        kind = type(values)
        if kind is int:
            return bool(0 <= values < 1 << 4096)
        if kind is np.ndarray:
            return bool(values.ndim == 1 and values.dtype.kind in "ui" and len(values) <= 4096)
        return kind in (list, tuple) and len(values) <= 1024 and all([type(n) is int and numbers(n) for n in values])

    require(entropy is None or numbers(entropy), "a SeedSequence whose entropy is not numbers")
    require(
        type(key) is tuple and numbers(key) and type(spawned) is int and 0 <= spawned < 1 << 32,
        "a SeedSequence with an invalid spawn key",
    )
    require(
        type(size) is int and 4 <= size <= 1024 and _words(pool, "uint32", size), "a SeedSequence with an invalid pool"
    )
    unpickler.count_checks(size * size)
    return np.random.SeedSequence(entropy, spawn_key=key, pool_size=size, n_children_spawned=spawned)


#: The classes: module, name, and the function that creates the ``Kind`` of the class.
CLASSES: Globals = {
    "numpy.random": {
        **dict.fromkeys(_GENERATORS, _bit_generator),
        **dict.fromkeys(("Generator", "RandomState"), _generator_state),
        "SeedSequence": as_value,
    },
}

#: The functions: module, name, and the checked function that runs in place of the named one.
FUNCTIONS: Globals = {
    "numpy.random._pickle": {
        "__bit_generator_ctor": _new_bit_generator,
        "__generator_ctor": _new_generator,
        "__randomstate_ctor": _new_random_state,
    },
    "numpy.random.bit_generator": {"__pyx_unpickle_SeedSequence": _new_seed_sequence},
}
