"""Trains the draft of the embedded model: one layer that says what the target would say next.

    python -m training.draft --work-dir build/draft --tokens 14000000 --deadline-minutes 90

The text is the target's own mixture. What is learned at each token of an answer is the target's distribution, half of
it, and the token that the target likes best, the other half: sampled drafts need the first, greedy ones the second,
also where two tokens are almost as likely. Every token counts the same, because every one that is accepted saves the same.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from training.export import export
from training.model import Llama, Shape
from training.stream import Batch
from training.train import add_arguments, fit

BEST_SHARE = 0.5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, work_dir="build/draft", log="training/draft_log.jsonl", tokens=14_000_000)
    parser.add_argument("--target", type=Path, default=Path("src/quire/embedded"), help="the model to imitate")
    parser.add_argument("--intermediate-size", type=int, default=448)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--matrix-rate", type=float, default=0.006, help="learning rate of Muon")
    parser.add_argument("--rate", type=float, default=0.004, help="learning rate of AdamW: embedding and norms")
    return parser.parse_args()


def read_target(folder: Path, vocab_size: int) -> Llama:
    target = Llama(Shape(vocab_size=vocab_size))
    target.load_state_dict({name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()})
    return target.requires_grad_(False)


def wanted(logits_NV: Tensor) -> Tensor:
    """The distribution to learn: the target's, drawn towards its best token."""
    spread = functional.softmax(logits_NV.float(), dim=-1) * (1 - BEST_SHARE)
    best = logits_NV.argmax(-1, keepdim=True)
    return spread.scatter_add_(1, best, torch.full_like(best, BEST_SHARE, dtype=spread.dtype))


def loss_of(draft: Llama, draft_body: Any, target: Llama, target_body: Any, data: Batch) -> Tensor:
    picked, mask = data.targets_BT >= 0, data.mask()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            goal = wanted(target.logits(target_body(data.tokens_BT, mask)[picked]))
        guess = draft.logits(draft_body(data.tokens_BT, mask)[picked])
    return functional.cross_entropy(guess.float(), goal)


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    vocab_size = Tokenizer.from_file(str(args.tokenizer)).get_vocab_size()
    target = read_target(args.target, vocab_size)
    draft = Llama(Shape(vocab_size, intermediate_size=args.intermediate_size, num_layers=args.layers))
    # The same width, so that what the target knows about words need not be learned again.
    draft.model.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
    bodies = [
        model.model if args.no_compile else torch.compile(model.model, dynamic=False) for model in (draft, target)
    ]
    fit(
        draft,
        lambda data: loss_of(draft, bodies[0], target, bodies[1], data),
        lambda: export(args.work_dir / "export", draft.shape, draft.state_dict()),
        args,
    )


if __name__ == "__main__":
    main()
