"""Finds out, by running it, how a Transformers model uses attention, and whether Quire may stand underneath.

A model qualifies if its tokens meet in attention alone: then the paged cache of keys and values is all that must be
kept between steps. Code is not read for that; four forward passes over three tokens are watched instead:

1. as usual: which modules ask for attention, with which shapes, scales, windows, caps, sinks, and under which mask
2. with attention that lets each token see only itself: the last token's hidden state and everything that it hands to
   attention must not change when the tokens before it do (recurrent and convolutional layers fail here)
3. the same with another position of the last token: something must change now (ALiBi and the like fail here)

Longer than most: the passes, what is recorded in them and how a mask is read make sense only together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError

PROBE = "quire_probe"
# Arguments of attention that are known to say nothing about who sees whom.
_HARMLESS = {
    "position_ids", "position_embeddings", "cache_position", "use_cache", "dropout", "output_attentions",
    "output_hidden_states", "output_router_logits", "return_dict", "is_causal", "head_mask",
}  # fmt: skip
_USED = {"scaling", "sliding_window", "softcap", "s_aux"}


@dataclass
class AttentionCall:
    """What one module handed to attention."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    sliding_window: int
    soft_cap: float
    sinks: Tensor | None
    last_row: Tensor


@dataclass
class _Watch:
    calls: list[AttentionCall] = field(default_factory=list)
    reads_masks: bool = False


_watch: _Watch | None = None


def register_probe() -> None:
    """Make the watching attention known to Transformers, with masks that can be asked rather than read."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE, _watching_attention)
    AttentionMaskInterface.register(PROBE, _telling_mask)


@torch.inference_mode()
def probe(
    run: Callable[[Tensor, Tensor], Tensor], logits_of: Callable[[Tensor], Tensor], device: torch.device
) -> list[AttentionCall]:
    """The attention calls of a model in their order; `run(input_ids, positions)` returns hidden states."""
    calls, hidden = _record(run, [1, 2, 3], [0, 1, 2], device, reads_masks=True)
    if not calls:
        raise refusal("its layers do not call the attention interface of Transformers")
    modules = [id(call.module) for call in calls]
    if len(set(modules)) < len(modules):
        raise refusal("a module computes attention twice in a pass, so one cache for it is not enough")
    before, hidden = _record(run, [1, 2, 3], [0, 1, 5], device)
    other, other_hidden = _record(run, [4, 5, 3], [2, 9, 5], device)
    moved, moved_hidden = _record(run, [1, 2, 3], [0, 1, 6], device)
    if not _agree(before, hidden, other, other_hidden):
        raise refusal(
            "a token depends on the tokens before it outside of attention (recurrent state, convolution or "
            "linear attention), or its position is not taken from position_ids"
        )
    if not logits_of(hidden[None].to(before[0].last_row.dtype)).isfinite().all():
        raise refusal("its logits are not finite")
    if _agree(before, hidden, moved, moved_hidden):
        raise refusal("position_ids change nothing, so positions come from elsewhere (ALiBi, or counted inside)")
    return calls


def _record(
    run: Callable[[Tensor, Tensor], Tensor],
    tokens: list[int],
    positions: list[int],
    device: torch.device,
    *,
    reads_masks: bool = False,
) -> tuple[list[AttentionCall], Tensor]:
    global _watch
    _watch = _Watch(reads_masks=reads_masks)
    try:
        hidden = run(torch.tensor(tokens, device=device), torch.tensor(positions, device=device))
        return _watch.calls, hidden[-1].float().clone()
    finally:
        _watch = None


def _agree(calls: list[AttentionCall], hidden: Tensor, others: list[AttentionCall], other_hidden: Tensor) -> bool:
    if len(calls) != len(others):
        return False
    pairs = [(call.last_row, other.last_row) for call, other in zip(calls, others, strict=True)]
    pairs.append((hidden, other_hidden))
    # Float32 multiplications may round differently, 16-bit ones more so; a real dependence is far larger.
    tolerance = 1e-4 if calls[0].last_row.dtype == torch.float32 else 2e-2
    return all((a.float() - b.float()).abs().max() <= tolerance * a.float().abs().max() for a, b in pairs)


def _watching_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    """Records the call, and lets each token see only itself."""
    assert _watch is not None, "the probing attention runs only inside probe()"
    if key.shape[2] != query.shape[2]:
        raise refusal("it attends to something other than its own tokens (cross attention)")
    strange = [
        name
        for name, argument in arguments.items()
        if name not in _HARMLESS | _USED and isinstance(argument, Tensor) and not name.startswith(("cu_seq", "max_len"))
    ]
    if strange:
        raise refusal(f"its attention takes {', '.join(strange)}, which the paged cache has no place for")
    window = _window_of(module, attention_mask, arguments) if _watch.reads_masks else 0
    scale = arguments.get("scaling")
    rows = [tensor[0, :, -1].flatten().clone() for tensor in (query, key, value)]
    _watch.calls.append(
        AttentionCall(
            module=module,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=query.shape[3],
            value_dim=value.shape[3],
            scale=float(scale) if scale is not None else query.shape[3] ** -0.5,
            sliding_window=window,
            soft_cap=float(arguments.get("softcap") or 0.0),
            sinks=arguments.get("s_aux"),
            last_row=torch.cat([row.to(rows[0].dtype) for row in rows]),
        )
    )
    own = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return own.transpose(1, 2).contiguous(), None


def _telling_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any = None, **_: Any
) -> Tensor:
    """A mask that carries the function which would have filled it."""
    mask = torch.zeros((1, 1, q_length, kv_length), dtype=torch.bool, device=device)
    mask.quire_visible = mask_function
    return mask


def _window_of(module: nn.Module, mask: Any, arguments: dict[str, Any]) -> int:
    """0 for a causal mask, the width for a sliding window; anything else is refused."""
    if mask is None:
        is_causal = arguments.get("is_causal")
        if is_causal if is_causal is not None else getattr(module, "is_causal", False):
            return int(arguments.get("sliding_window") or 0)
        raise refusal("its attention has no causal mask")
    visible = getattr(mask, "quire_visible", None)
    if visible is None:
        raise refusal("it changes the attention mask by itself (ALiBi, or a pattern of its own)")
    widths = [0]
    config = getattr(module, "config", None)
    for source in (arguments, getattr(module, "__dict__", {}), getattr(config, "__dict__", {})):
        widths += [width for width in (source.get("sliding_window"),) if isinstance(width, int) and width > 0]
    for width in dict.fromkeys(widths):
        if _is_causal_window(visible, width):
            return width
    raise refusal("its attention is not causal, or a pattern other than a sliding window (chunked, bidirectional)")


def _is_causal_window(visible: Callable[..., Any], width: int) -> bool:
    """Asks the mask at the places where patterns differ: around the diagonal, the edges of windows and of chunks."""
    sizes = sorted({0, 1, 2, 7, 64, 1000, 100_000} | {max(0, k * width + d) for k in (1, 2, 3) for d in (-1, 0, 1)})
    for query in sizes:
        keys = {query + d for d in (-2, -1, 0, 1, 2)} | {query - width + d for d in (-1, 0, 1)} | set(sizes)
        for key in sorted(key for key in keys if key >= 0):
            expected = key <= query and (width == 0 or query - key < width)
            try:
                answer = visible(0, 0, torch.tensor(query), torch.tensor(key))
            except IndexError:
                # It looks places up in a table of this batch: nothing that holds for every token.
                return False
            if bool(answer) != expected:
                return False
    return True


def refusal(reason: str) -> ModelError:
    return ModelError(f"this model cannot run on Quire's paged attention: {reason}.")
