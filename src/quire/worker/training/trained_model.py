"""A model that learns with the kernels that serve it: whole sequences forward, derivatives backward, weights in place.

The log-probabilities that it gives are those of an engine with the same options, bit for bit, because both compute the
same operators, and no bit depends on how tokens are cut into steps. So an importance ratio begins at exactly 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.config import EngineOptions, ModelFacts, WorkerConfig, checked, resolve
from quire.errors import ModelError, OptionError
from quire.worker import kernels
from quire.worker.adapter_slots import attach
from quire.worker.checkpoint_files import CheckpointFiles
from quire.worker.forward_context import forward_context
from quire.worker.layers.parameter import Part, pick_piece
from quire.worker.layers.ranks import Ranks, among
from quire.worker.model_loader import load_model, plan_of_model
from quire.worker.models.causal_lm import CausalLM
from quire.worker.platforms import current_platform
from quire.worker.training import derivatives
from quire.worker.training.adapter import LoRA, TrainedAdapter
from quire.worker.training.masters import Masters
from quire.worker.training.whole_sequences import PartsOneByOne, WholeSequences
from quire.worker.weight_loading import BACKBONE, Holders


class TrainedModel:
    """`parameters` for an optimizer, `logprobs` for a loss, `update` after the optimizer's step."""

    def __init__(self, config: WorkerConfig, model: CausalLM, weights: Masters | TrainedAdapter) -> None:
        self.config = config
        self.model = model
        self._weights = weights
        self._steps = WholeSequences(model, config.slots_per_block)

    @property
    def adapter(self) -> TrainedAdapter:
        """What is trained, where it is an adapter."""
        if not isinstance(self._weights, TrainedAdapter):
            raise ModelError("adapter: the model itself is trained. Load it with lora=LoRA(...) to train an adapter.")
        return self._weights

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._weights.named()

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._weights.named()]

    def logprobs(self, sequences: Sequence[Sequence[int]], *, with_adapter: bool = True) -> list[Tensor]:
        """Of each sequence those of its tokens from the second on, each given all before it; float32.

        `with_adapter`: without it an adapter adds nothing, so that the model itself speaks, as a reference.
        """
        hidden_TE = self._hidden(sequences, with_adapter)
        lengths = [len(sequence) for sequence in sequences]
        told = torch.ones(len(hidden_TE), dtype=torch.bool)
        told[torch.tensor(lengths).cumsum(0) - 1] = False
        tokens_n = torch.tensor([token for sequence in sequences for token in sequence[1:]], device=hidden_TE.device)
        logits_nV = self.model.compute_logits(hidden_TE[told])
        values_n, *_ = kernels.token_logprobs(logits_nV, None, tokens_n, 1)
        return list(values_n.split([length - 1 for length in lengths]))

    def logits(self, sequences: Sequence[Sequence[int]], *, with_adapter: bool = True) -> list[Tensor]:
        """Of each sequence [tokens, vocab_size]."""
        logits_TV = self.model.compute_logits(self._hidden(sequences, with_adapter))
        return list(logits_TV.split([len(sequence) for sequence in sequences]))

    def update(self) -> int:
        """What an optimizer has changed comes into the model, in place; how many weights that were."""
        return self._weights.pack()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """The masters by the names of the checkpoint: for `LLM.update_weights`, or to be saved."""
        if isinstance(self._weights, TrainedAdapter):
            raise ModelError("state_dict: an adapter is trained, and the model stays as it is. Take adapter.save.")
        with among(Ranks.of(self.config)):
            plan = plan_of_model(self.config)
        assert plan is not None, "load_for_training takes Quire's own models"
        first = Holders(plan).first_name
        planned = dict(plan.named_parameters(remove_duplicate=False))
        masters = dict(self.named_parameters())
        stored: dict[str, Tensor] = {}
        for source, tensor in CheckpointFiles(Path(self.config.model_path)).tensors():
            numbers = torch.zeros_like(tensor, dtype=torch.float32)
            for name, part, piece in self.model.checkpoint_map.place(source, numbers):
                full = name if name in planned else f"{BACKBONE}.{name}"
                master = masters.get(full, masters.get(first[full]))
                # a head that is tied has the embedding's master, or it is the other way round
                master = masters["lm_head.weight"] if master is None else master
                _write_back(source, numbers, piece, master.detach(), planned[full], part)
            stored[source] = numbers
        return stored

    def _hidden(self, sequences: Sequence[Sequence[int]], with_adapter: bool) -> Tensor:
        for number, sequence in enumerate(sequences):
            if not 2 <= len(sequence) <= self.config.max_model_len:
                raise ModelError(
                    f"sequence {number}: {len(sequence)} tokens: must be 2 to max_model_len="
                    f"{self.config.max_model_len}. Cut it, or load with a greater max_model_len."
                )
        slots = [0] * len(sequences) if with_adapter and isinstance(self._weights, TrainedAdapter) else None
        step = self._steps.step(sequences, adapter_slots=slots)
        with forward_context(step.context), PartsOneByOne():
            hidden_TE: Tensor = self.model(step.input_ids_T, step.positions_T)
        return hidden_TE


def _write_back(source: str, numbers: Tensor, piece: Any, master: Tensor, planned: Tensor, part: Part) -> None:
    """Into `numbers`, of which `piece` is a view, what of a master belongs there."""
    whole = nn.Parameter(master, requires_grad=False)
    whole.quire_pick = getattr(planned, "quire_pick", None)
    place, own = pick_piece(whole, piece, part)
    if own.untyped_storage().data_ptr() == numbers.untyped_storage().data_ptr():
        own.copy_(place)
    elif piece is numbers and own.shape == numbers.shape:
        # something is added to what the checkpoint holds, and `numbers` are zeros
        numbers.copy_(place - own)
    else:
        raise ModelError(
            f"{source}: is turned when it is loaded, and no way back is built. Train an adapter (lora=...)."
        )


def load_for_training(
    model: str, *, lora: LoRA | None = None, master_dtype: torch.dtype = torch.float32, **options: Any
) -> TrainedModel:
    """Loads a model to train all of it, or with `lora` an adapter over it. `options` are those of an engine
    (docs/options.md); one with the same dtype, quantization and rank_invariant has the same bits."""
    derivatives.register()
    given = checked(EngineOptions, {"model": model, **options})
    config, _ = resolve(EngineOptions(**given))
    worker = config.worker
    if worker.grid.size > 1:
        raise OptionError(
            f"{worker.grid.size} workers: a model is trained in one. Give rank_invariant=True here and to the engine, "
            "then the bits of an engine with several are the same."
        )
    platform = current_platform(worker.device)
    platform.set_threads(worker.num_threads, worker.processors)
    with among(Ranks.of(worker)):
        loaded = load_model(worker)
    if not isinstance(loaded, CausalLM):
        raise ModelError(
            f"{model}: runs through the Transformers library ({type(loaded).__name__}), and derivatives are built for "
            "Quire's own models. Train it with Transformers."
        )
    if lora is None:
        return TrainedModel(worker, loaded, Masters(loaded, master_dtype))
    dtype = platform.dtype(worker.dtype)
    attach(loaded, 1, lora.rank, dtype)
    names = CheckpointFiles(ModelFacts.read(Path(worker.model_path)).path).names
    return TrainedModel(worker, loaded, TrainedAdapter(loaded, lora, iter(names), dtype))
