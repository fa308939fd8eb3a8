"""Models whose every layer is computed and whose answer is known: the next token is a function of the last one.

Attention and feed-forward parts have random weights but for their last matrices, which are zero, so what comes out is
the embedding that went in; the head has the embedding of `previous(token)` in the place of `token`. A step costs what
it costs any model of that shape. Two models with functions that agree on 80 % of the tokens are a target and a draft
that is right in 80 % of the cases.
"""

from __future__ import annotations

from pathlib import Path

import torch


def cycle(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Tokens in the order in which the model says them; after the last it begins again."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:length].tolist()


def next_tokens(tokens: list[int], vocab_size: int) -> torch.Tensor:
    """Of each token the next in the cycle; those outside of it follow themselves."""
    following = torch.arange(vocab_size)
    following[torch.tensor(tokens)] = torch.tensor([*tokens[1:], tokens[0]])
    return following


def partly_right(following: torch.Tensor, share: float, seed: int = 1) -> torch.Tensor:
    """The same function but for 1 - share of the tokens, whose answers change places among themselves."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.nonzero(torch.rand(len(following), generator=generator) >= share).flatten()
    changed = following.clone()
    changed[wrong] = following[wrong.roll(1)]
    return changed


def write_chain_model(path: Path, following: torch.Tensor, *, num_layers: int, hidden_size: int) -> Path:
    """A Llama in bfloat16 that says following[token] after `token`, which must be a permutation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size = len(following)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 128,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        # The head is as long as its neighbours' embeddings are orthogonal: nearly, in so many dimensions.
        embedding = torch.randn(vocab_size, hidden_size, generator=torch.Generator().manual_seed(2))
        model.model.embed_tokens.weight.copy_(embedding)
        head = torch.empty_like(embedding)
        head[following] = embedding
        model.lm_head.weight.copy_(head)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(path)
    return path
