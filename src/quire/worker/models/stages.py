"""A model of which this worker has some layers: the stages of a pipeline (4.3.1).

    stage 0     embedding, layers 0 ... 13                     what a layer returns, side by side: [T, 2 * hidden_size]
       |          intermediate_tensors [T, widths]             of layers that return (hidden, residual)
    stage 1     layers 14 ... 27, norm, head

A model is built as a whole, without memory being touched, and lets go of what other stages have before weights are
read. Two hooks carry the tensors over the boundary: one puts them in the place of the first layer's arguments, whatever
the model made of its embedding, one keeps what the last layer returns. The author of a model mentions none of this.

Longer than most: what a stage lets go of, what stands in its place and what it hands on are one contract, for every
family.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
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


def keep_stage(model: Any, stages: StageGroup, *, has_embedding_at_end: bool = False) -> None:
    """Lets go of what other stages have; `model.absent_modules` names what is not read. `has_embedding_at_end`: the
    last stage has the embedding of tokens, too."""
    if stages.size == 1:
        return
    layers = _decoder_layers(model, stages)
    num_layers = len(layers)
    before = dict(model.named_modules())
    kept = stages.share_of(len(layers))
    for index in range(len(layers)):
        if index not in kept:
            del layers[str(index)]
    embeddings = [module for module in model.modules() if _is_embedding(module, model)]
    has_embedding_at_end |= any(module.weight is model.lm_head.weight for module in embeddings)
    if not stages.is_first and not (stages.is_last and has_embedding_at_end):
        _replace_embedding(model)
    if not stages.is_first:
        for name in model.image_modules:
            delattr(model, name)
    if not stages.is_last:
        model.lm_head = AbsentHead(model.lm_head.vocab_size)
    after = dict(model.named_modules())
    model.absent_modules = frozenset(path for path, module in before.items() if after.get(path) is not module)
    model.forward = StagedForward(model.forward, layers, num_layers, stages)


def hands_on_inner_states(model: Any) -> bool:
    """A recorded program would not."""
    return isinstance(model.forward, StagedForward) and model.forward.has_taps


class StagedForward:
    """Stands in the place of a model's `forward`, and takes what it takes. What is not for the last stage comes out as
    one tensor, the `intermediate_tensors` of the next; without any a stage computes nothing of worth, to be measured.
    """

    def __init__(
        self, forward: Callable[..., Tensor], layers: Mapping[str, nn.Module], num_layers: int, stages: StageGroup
    ) -> None:
        """`layers`: of this stage, by number; `num_layers`: of all stages."""
        self.num_layers = num_layers
        self._forward = forward
        self._stages = stages
        self._layers = {int(name): layer for name, layer in layers.items()}
        own = list(self._layers.values())
        names = list(inspect.signature(own[0].forward).parameters)
        # where the first layer expects what the one before it returns
        self._places = [names.index(name) for name in (_HIDDEN, _RESIDUAL) if name in names]
        self._received: list[Tensor] = []
        self._made: tuple[Tensor, ...] = ()
        # layers whose inputs the last stage wants to see: of earlier stages, and of this one
        self._taps_before: list[int] = []
        self._own_taps: list[int] = []
        # these inputs in the last forward, by layer
        self.tapped: dict[int, Tensor] = {}
        if not stages.is_first:
            own[0].register_forward_pre_hook(self._take)
        own[-1].register_forward_hook(self._keep)

    @property
    def has_taps(self) -> bool:
        return bool(self._taps_before or self._own_taps)

    def tap(self, indices: Iterable[int]) -> None:
        """What goes into these layers comes along to the last stage. All stages are told the same, once."""
        wanted = sorted(set(indices))
        self._taps_before = [index for index in wanted if index < min(self._layers)]
        self._own_taps = [index for index in wanted if index in self._layers]
        for index in self._own_taps:
            self._layers[index].register_forward_pre_hook(functools.partial(self._tap, index))

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
        self.tapped = {}
        self._received = []
        if intermediate_tensors is not None:
            num_parts = len(self._places)
            parts = intermediate_tensors.chunk(num_parts + len(self._taps_before), dim=-1)
            self._received = list(parts[:num_parts])
            self.tapped = dict(zip(self._taps_before, parts[num_parts:], strict=True))
        hidden = self._forward(input_ids, positions, input_embeds)
        if self._stages.is_last:
            return hidden
        made = [*self._made, *self.tapped.values()]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)

    def _take(self, layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self._received:
            return None
        replaced = list(arguments)
        for place, part in zip(self._places, self._received, strict=True):
            replaced[place] = part.contiguous()
        return tuple(replaced)

    def _tap(self, index: int, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        parts = [arguments[place] for place in self._places]
        self.tapped[index] = sum_of_branches(*parts)

    def _keep(self, layer: nn.Module, arguments: tuple[Any, ...], returned: Tensor | tuple[Tensor, ...]) -> None:
        self._made = returned if isinstance(returned, tuple) else (returned,)


def sum_of_branches(hidden: Tensor, residual: Tensor | None = None) -> Tensor:
    """What goes into a layer, of layers that leave the last branch to be added by the next one."""
    return hidden if residual is None else hidden + residual


class AbsentHead(LMHead):
    """Of a stage that is not the last: nobody reads these logits."""

    def __init__(self, vocab_size: int) -> None:
        nn.Module.__init__(self)
        self.vocab_size = vocab_size

    @property
    def is_tied(self) -> bool:
        return False

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
