"""Batches: only answers are learned, documents do not see each other, and a step always gives the same batch."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

from training.mixture import Document  # noqa: E402 - torch may be absent, and then this file is skipped
from training.model import Llama, Shape  # noqa: E402
from training.stream import batch, encode  # noqa: E402

MODEL = Path(__file__).parents[2] / "src" / "quire" / "embedded"


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def test_only_the_answer_is_learned(tokenizer) -> None:
    chat = [{"role": "user", "content": "Spell cat."}, {"role": "assistant", "content": "c-a-t"}]
    tokens, weights = encode(tokenizer, Document(chat))
    learned = [token for token, weight in zip(tokens, weights, strict=True) if weight > 0]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "c-a-t<|end|>"
    assert len({weight for weight in weights if weight > 0}) == 1


def test_a_batch_depends_on_seed_and_step_alone(tokenizer) -> None:
    first, second, other = batch(tokenizer, 1, 5), batch(tokenizer, 1, 5), batch(tokenizer, 1, 6)
    assert torch.equal(first.tokens_BT, second.tokens_BT)
    assert not torch.equal(first.tokens_BT, other.tokens_BT)
    assert batch(tokenizer, 1, 19).tokens_BT.numel() == first.tokens_BT.numel()


def test_a_document_sees_itself_alone(tokenizer) -> None:
    data = batch(tokenizer, 1, 0)
    mask = data.mask()[0, 0]
    row = data.segments_BT[0]
    assert mask.diagonal().all()
    assert not mask.triu(1).any()
    assert not mask[row[:, None] != row[None, :]].any()


def test_targets_are_the_following_tokens(tokenizer) -> None:
    data = batch(tokenizer, 1, 0)
    known = data.targets_BT[:, :-1] >= 0
    assert torch.equal(data.targets_BT[:, :-1][known], data.tokens_BT[:, 1:][known])
    assert 0.3 < known.float().mean() < 0.6


def test_the_network_agrees_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ours = Llama(Shape(vocab_size=theirs.config.vocab_size))
    weights = {name: weight for name, weight in theirs.state_dict().items() if name != "lm_head.weight"}
    ours.load_state_dict(weights)
    tokens = torch.arange(40)[None] % theirs.config.vocab_size
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    with torch.inference_mode():
        difference = ours.logits(ours.model(tokens, mask)) - theirs(tokens).logits
    assert difference.abs().max() < 1e-3
