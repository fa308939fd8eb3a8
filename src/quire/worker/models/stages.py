"""A model of which this worker has some layers: the stages of a pipeline (4.3.1).

    stage 0     embedding, layers 0 ... 13                     what a layer returns, side by side: [T, 2 * hidden_size]
       |          intermediate_tensors [T, widths]             of layers that return (hidden, residual)
    stage 1     layers 14 ... 27, norm, head

A model is built as a whole, without memory being touched, and lets go of what other stages have before weights are
read. Two hooks carry the tensors over the boundary: one puts them in the place of the first layer's arguments, whatever
the model made of its embedding, one keeps what the last layer returns. The author of a model mentions none of this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.worker.attention import Attention
from quire.worker.layers.embedding import LMHead, VocabEmbedding
from quire.worker.layers.ranks import StageGroup
from quire.worker.models.causal_lm import CausalLM
from quire.worker.state_cache import StatefulLayer

_HIDDEN = "hidden"
_RESIDUAL = "residual"


def keep_stage(model: Any, stages: StageGroup) -> None:
    """Lets go of what other stages have; `model.absent_modules` names what is not read."""
    if stages.size == 1:
        return
    layers = _decoder_layers(model, stages)
    before = dict(model.named_modules())
    kept = stages.share_of(len(layers))
    for index in range(len(layers)):
        if index not in kept:
            del layers[str(index)]
    is_tied = any(module.weight is model.lm_head.weight for module in model.modules() if _is_embedding(module, model))
    if not stages.is_first and not (stages.is_last and is_tied):
        _replace_embedding(model)
    if not stages.is_first:
        for name in model.image_modules:
            delattr(model, name)
    if not stages.is_last:
        model.lm_head = AbsentHead(model.lm_head.vocab_size)
    after = dict(model.named_modules())
    model.absent_modules = frozenset(path for path, module in before.items() if after.get(path) is not module)
    model.forward = StagedForward(model.forward, list(layers.values()), stages)


class StagedForward:
    """Stands in the place of a model's `forward`, and takes what it takes. What is not for the last stage comes out as
    one tensor, the `intermediate_tensors` of the next; without any a stage computes nothing of worth, to be measured.
    """

    def __init__(self, forward: Callable[..., Tensor], layers: list[nn.Module], stages: StageGroup) -> None:
        self._forward = forward
        self._stages = stages
        names = list(inspect.signature(layers[0].forward).parameters)
        # where the first layer expects what the one before it returns
        self._places = [names.index(name) for name in (_HIDDEN, _RESIDUAL) if name in names]
        self._received: Tensor | None = None
        self._made: tuple[Tensor, ...] = ()
        if not stages.is_first:
            layers[0].register_forward_pre_hook(self._take)
        layers[-1].register_forward_hook(self._keep)

    @property
    def intermediate(self) -> tuple[int, torch.dtype] | None:
        """Width and type of what it takes, as it makes it, too; None: it takes none, or has not run yet."""
        if self._stages.is_first or not self._made:
            return None
        return sum(part.shape[1] for part in self._made), self._made[0].dtype

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        input_embeds: Tensor | None = None,
        intermediate_tensors: Tensor | None = None,
    ) -> Tensor:
        self._received = intermediate_tensors
        hidden = self._forward(input_ids, positions, input_embeds)
        if self._stages.is_last:
            return hidden
        return self._made[0] if len(self._made) == 1 else torch.cat(self._made, dim=-1)

    def _take(self, layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._received is None:
            return None
        parts = self._received.chunk(len(self._places), dim=-1)
        replaced = list(arguments)
        for place, part in zip(self._places, parts, strict=True):
            replaced[place] = part.contiguous()
        return tuple(replaced)

    def _keep(self, layer: nn.Module, arguments: tuple[Any, ...], returned: Tensor | tuple[Tensor, ...]) -> None:
        self._made = returned if isinstance(returned, tuple) else (returned,)


class AbsentHead(LMHead):
    """Of a stage that is not the last: nobody reads these logits."""

    def __init__(self, vocab_size: int) -> None:
        nn.Module.__init__(self)
        self.vocab_size = vocab_size

    def pack_weights(self) -> None:
        """There is nothing to pack."""

    def forward(self, hidden_NE: Tensor) -> Tensor:
        return hidden_NE.new_empty((hidden_NE.shape[0], self.vocab_size))


class AbsentEmbedding(nn.Module):
    """Of a stage that is not the first: any content, in the place of which comes what the stage before has made."""

    def __init__(self, like: VocabEmbedding) -> None:
        super().__init__()
        self._size = like.size
        self.register_buffer("like", like.weight.new_empty(0), persistent=False)
        self.like: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        return self.like.new_empty((ids.shape[0], self._size))


def _decoder_layers(model: Any, stages: StageGroup) -> nn.ModuleDict | Any:
    """The layers by number, as their list holds them: what is left of it keeps its names, and is gone through in
    order."""
    reason = _reason_to_refuse(model)
    lists = _outermost([one for one in model.modules() if isinstance(one, nn.ModuleList) and _is_of_layers(one)])
    if reason is None and len(lists) != 1:
        reason = "they are no single list"
    if reason is None and len(lists[0]) < stages.size:
        reason = f"there are {len(lists[0])}"
    if reason is None and 0 < len(lists[0]) // stages.size <= model.num_image_layers:
        reason = f"images enter at the first {model.num_image_layers} of {len(lists[0])}, which one stage must have"
    if reason is not None:
        raise ModelError(
            f"pipeline_parallel_size={stages.size}: the layers of {type(model).__name__} cannot be divided over so "
            f"many stages: {reason}. Use tensor_parallel_size, or fewer stages."
        )
    return lists[0]._modules


def _reason_to_refuse(model: Any) -> str | None:
    if not isinstance(model, CausalLM):
        return "it is no decoder of Quire's"
    return model.reason_not_to_divide


def _outermost(lists: list[nn.ModuleList]) -> list[nn.ModuleList]:
    """A layer may have several attentions in a list of its own."""
    return [one for one in lists if not any(one in other.modules() for other in lists if other is not one)]


def _is_of_layers(modules: Iterable[nn.Module]) -> bool:
    """Each of them keeps something of a sequence."""
    kept = (Attention, StatefulLayer)
    found = [any(isinstance(part, kept) for part in module.modules()) for module in modules]
    return bool(found) and all(found)


def _is_embedding(module: nn.Module, model: Any) -> bool:
    return isinstance(module, VocabEmbedding) and module.num_rows == model.lm_head.vocab_size


def _replace_embedding(model: Any) -> None:
    for path, module in list(model.named_modules()):
        if _is_embedding(module, model):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, AbsentEmbedding(module))
