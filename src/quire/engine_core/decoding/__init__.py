"""Decoding methods out of three verbs (3.5.2): fork, append, free. One file each.

Others come through the entry point group `quire.decoding_methods`: a callable (message, **args) -> DecodingMethod.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from quire.engine_core.decoding.beam_search import BeamSearch
from quire.engine_core.decoding.diverse_beam_search import diverse_beam_search
from quire.engine_core.decoding.method import DecodingMethod
from quire.engine_core.decoding.parallel_sampling import ParallelSampling
from quire.errors import RequestError, one_line, suggestion
from quire.messages import MOST_SEQUENCES, EngineRequest

MethodMaker = Callable[..., DecodingMethod]

_BUILT_IN: dict[str, MethodMaker] = {"beam_search": BeamSearch, "diverse_beam_search": diverse_beam_search}
# by far the most requests: one object for all of them
_ONE_SAMPLE = ParallelSampling(1)


def make_method(message: EngineRequest) -> DecodingMethod:
    """The method that a request asks for; RequestError if there is none, or not with these parameters."""
    if message.decoding is None:
        return _ONE_SAMPLE if message.sampling.n == 1 else ParallelSampling(message.sampling.n)
    name, args = message.decoding.method, message.decoding.args
    try:
        method = _maker(name)(message, **args)
    except RequestError:
        raise
    except (TypeError, ValueError) as error:
        raise RequestError(f"decoding method {name!r}: {error}.", param="decoding") from error
    most = max(method.num_sequences, method.num_outputs)
    if most > MOST_SEQUENCES:
        raise RequestError(
            f"decoding method {name!r}: with {most} sequences; a request has at most {MOST_SEQUENCES}, because there "
            "are no more numbers for them. Ask for fewer, or send several requests.",
            param="decoding",
        )
    return method


def _maker(name: str) -> MethodMaker:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    installed = {entry.name: entry for entry in entry_points(group="quire.decoding_methods")}
    if name not in installed:
        known = sorted({*_BUILT_IN, *installed})
        hint = suggestion(name, known) or " One of your own comes by an entry point (docs/decoding.md)."
        raise RequestError(f"decoding method {name!r}: must be one of {', '.join(known)}.{hint}", param="decoding")
    try:
        maker: MethodMaker = installed[name].load()
    except Exception as error:
        # Somebody else's code: whatever it raises, the request chose it.
        raise RequestError(
            f"decoding method {name!r}: its entry point {installed[name].value!r} cannot be loaded "
            f"({one_line(error)}). Mend or uninstall the package that brings it, or choose another method.",
            param="decoding",
        ) from error
    return maker
