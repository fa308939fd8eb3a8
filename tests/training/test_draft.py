"""The draft of the embedded model: small, readable by anyone, and mostly right."""

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from training import acceptance, draft  # noqa: E402 - torch may be absent, and then this file is skipped
from training.export import export  # noqa: E402
from training.model import Llama, Shape  # noqa: E402

PACKAGE = Path(__file__).parents[2] / "src" / "quire"
TARGET, DRAFT = PACKAGE / "embedded", PACKAGE / "embedded_draft"
QUESTIONS = [
    "What is a block?", "What is the prefix cache?", "Which port does the server use?", "Hello!", "Who are you?",
    "Tell me a story about a fox.", "Count from 3 to 9.", "What is 3 + 4?",
]  # fmt: skip


def test_it_is_small_and_shares_the_tokenizer_of_its_target() -> None:
    files = {path.name for path in DRAFT.iterdir()}
    assert files == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) < 1_500_000
    ours, theirs = (transformers.AutoConfig.from_pretrained(folder) for folder in (DRAFT, TARGET))
    assert ours.vocab_size == theirs.vocab_size
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    # the same keys and values in a layer, so that both share groups of blocks without padding
    assert (ours.num_key_value_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert ours.num_hidden_layers == 1


def test_it_says_mostly_what_its_target_says() -> None:
    prompts = [f"<|user|>{question}<|end|><|assistant|>" for question in QUESTIONS]
    model = transformers.AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32).eval()
    answers = [acceptance.hits(model, answer) for answer in acceptance.greedy_answers(TARGET, prompts)]
    tokens = sum(len(hit) for hit in answers)
    assert sum(sum(hit) for hit in answers) / tokens > 0.8
    assert tokens / sum(acceptance.num_steps(hit, 4) for hit in answers) > 2


@pytest.mark.parametrize(
    ("hit", "num_drafts", "steps"),
    [
        ([True], 4, 1),  # the first token comes from the prompt
        ([False, True, True], 4, 2),
        ([True] * 6, 4, 2),
        ([True] * 7, 4, 3),
        ([True, False, False, False], 4, 4),
        ([True, True, False, True, True], 2, 3),
    ],
)
def test_steps_are_counted_from_hits(hit: list[bool], num_drafts: int, steps: int) -> None:
    assert acceptance.num_steps(hit, num_drafts) == steps


def test_what_is_learned_is_a_distribution_with_the_same_best_token() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    wanted = draft.wanted(logits)
    assert torch.allclose(wanted.sum(-1), torch.ones(5))
    assert torch.equal(wanted.argmax(-1), logits.argmax(-1))
    assert (wanted.max(-1).values > draft.BEST_SHARE).all()


def test_without_a_tokenizer_none_is_written(tmp_path: Path) -> None:
    shape = Shape(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
    )
    export(tmp_path, shape, Llama(shape).state_dict())
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
