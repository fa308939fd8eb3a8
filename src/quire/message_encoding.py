"""Messages between client and core as bytes on a socket, and back: MessagePack, with arrays packed as they are."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from quire.messages import Message, ToClient, ToCore


def encode_array(value: Any) -> Any:
    """What MessagePack has no type for, as it asks for it."""
    if isinstance(value, np.ndarray):
        columns = value.shape[0] if value.ndim == 2 else 0
        return (columns, np.ascontiguousarray(value, dtype=np.int64).tobytes())
    raise TypeError(f"{type(value).__name__} does not cross a socket")


def decode_array(kind: type, value: Any) -> Any:
    """The way back."""
    if kind is np.ndarray:
        columns, data = value
        flat = np.frombuffer(data, dtype=np.int64)
        return flat.reshape(columns, -1) if columns else flat
    raise TypeError(f"{kind.__name__} does not cross a socket")


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
_to_core = msgspec.msgpack.Decoder(ToCore, dec_hook=decode_array)
_to_client = msgspec.msgpack.Decoder(ToClient, dec_hook=decode_array)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_core(data: bytes) -> ToCore:
    """Strict: an unknown tag, field or type raises msgspec.DecodeError or ValidationError."""
    message: ToCore = _to_core.decode(data)
    return message


def decode_to_client(data: bytes) -> ToClient:
    message: ToClient = _to_client.decode(data)
    return message
