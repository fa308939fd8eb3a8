"""What a frame that is no message is answered with: if it says whom it is for, nobody waits for ever."""

from __future__ import annotations

import msgspec

from quire.messages import ControlReply, EngineOutputs, SequenceEnd, sequence_id_of
from quire.sampling_params import MAX_N

# the greatest whose sequences have numbers of 64 bits
_MOST_REQUEST_ID = 2**53 - 1


def answer_to_no_message(frame: bytes, error: Exception) -> EngineOutputs | ControlReply | None:
    """The end of the request or of the call that the frame names, or None."""
    try:
        content = msgspec.msgpack.decode(frame)
    except Exception:
        return None
    if not isinstance(content, dict):
        return None
    text = f"The engine core cannot read this message: {error}."
    request_id = content.get("request_id")
    call_id = content.get("call_id")
    if type(call_id) is int:
        return ControlReply(call_id=call_id, error=text)
    if type(request_id) is not int or not 0 <= request_id <= _MOST_REQUEST_ID:
        return None
    ids = (sequence_id_of(request_id, index) for index in range(_num_outputs(content.get("sampling"))))
    return EngineOutputs(step=0, ends=[SequenceEnd(number, "error", error=text) for number in ids])


def _num_outputs(sampling: object) -> int:
    """Of a request that cannot be read; the default is left out on the wire. Where it is not said, as many as any
    request may have: a client drops what it does not wait for."""
    count = sampling.get("n", 1) if isinstance(sampling, dict) else MAX_N
    return count if type(count) is int and 1 <= count <= MAX_N else MAX_N
