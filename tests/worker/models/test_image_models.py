"""Models that see images, by files of their own, against Transformers: logits with no, one and two images, cut and
mixed in any way."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.image_processors import noise
from torch.utils._python_dispatch import TorchDispatchMode

from quire.config import EngineOptions, resolve
from quire.engine_core.whole_ranges import WholeRanges
from quire.errors import ModelError
from quire.messages import AdmittedSequence, Media
from quire.renderer.image_processor import ImageProcessor
from quire.renderer.tokenizer import Tokenizer
from quire.sampling_params import SamplingParams
from quire.testing.image_checkpoints import (
    GEMMA,
    GEMMA4,
    GEMMA4_AHEAD,
    IMAGE_TOKEN_ID,
    JOINED,
    make_image_checkpoint,
    reference_inputs,
)
from quire.testing.model_harness import ModelHarness, worker_config
from quire.worker.attention import attention_layers
from quire.worker.checkpoint_files import CheckpointFiles
from quire.worker.image_rows import ImageRows
from quire.worker.input_batch import InputBatch
from quire.worker.model_loader import load_model
from quire.worker.models.gemma3 import Gemma3ForConditionalGeneration
from quire.worker.models.gemma4 import Gemma4ForConditionalGeneration
from quire.worker.models.internvl import InternVLForConditionalGeneration
from quire.worker.models.llava import LlavaForConditionalGeneration
from quire.worker.models.llava_next import LlavaNextForConditionalGeneration
from quire.worker.models.mistral3 import Mistral3ForConditionalGeneration
from quire.worker.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from quire.worker.models.qwen3_vl import Qwen3VLForConditionalGeneration
from quire.worker.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration, as_kept

_ATOL = 2e-4
CLASSES = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": Qwen3VLMoeForConditionalGeneration,
    GEMMA: Gemma3ForConditionalGeneration,
    GEMMA4: Gemma4ForConditionalGeneration,
    GEMMA4_AHEAD: Gemma4ForConditionalGeneration,
    "internvl": InternVLForConditionalGeneration,
    "internvl_norms": InternVLForConditionalGeneration,
    "llava": LlavaForConditionalGeneration,
    "llava_siglip": LlavaForConditionalGeneration,
    "llava_next": LlavaNextForConditionalGeneration,
    "pixtral": LlavaForConditionalGeneration,
    "mistral3": Mistral3ForConditionalGeneration,
}
_IMAGE = IMAGE_TOKEN_ID
PROMPTS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "none": (list(range(30, 70)), []),
    "one": ([*range(40, 52), _IMAGE, *range(60, 75)], [(150, 120)]),
    "two": ([_IMAGE, 70, 71, _IMAGE, *range(90, 99)], [(60, 200), (112, 112)]),
    "close together": ([5, _IMAGE, 8, _IMAGE], [(90, 56), (300, 100)]),
}


@pytest.fixture(scope="module", params=CLASSES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("vl") / family, family)


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return load_model(worker_config(path))


def rendered(path: Path, name: str, seed: int = 0) -> tuple[list[int], list[Media]]:
    tokens, sizes = PROMPTS[name]
    config = json.loads((path / "config.json").read_text())
    processor = ImageProcessor.find(path, config, tokenizer=Tokenizer.from_folder(path))
    assert processor is not None
    sources = [(noise(*size, seed + number), "image") for number, size in enumerate(sizes)]
    return processor.expand(tokens, sources, None)


def transformers_logits(reference: Any, tokens: list[int], media: list[Media]) -> torch.Tensor:
    ids = torch.tensor([tokens])
    inputs = reference_inputs(reference.config.model_type, media, ids)
    with torch.no_grad():
        return reference(ids, use_cache=False, **inputs).logits[0]


def chunks_of(tokens: list[int], media: list[Media], size: int) -> list[list[int]]:
    """About so many tokens each. What must be whole is."""
    ranges = WholeRanges([(image.start, image.end) for image in media if image.is_whole])
    chunks = []
    start = 0
    while start < len(tokens):
        end = ranges.taken_back(min(start + size, len(tokens)))
        end = end if end > start else start + ranges.length_at(start)
        chunks.append(tokens[start:end])
        start = end
    return chunks


class ImageHarness(ModelHarness):
    """The same with the images of each sequence."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.images = ImageRows(model, torch.device("cpu"), layers=attention_layers(model).values())
        self.forward = model.forward

    def admit(self, row: int, media: list[Media]) -> None:
        sequence = AdmittedSequence(
            row=row, sequence_id=row, token_ids=np.zeros(1, dtype=np.int64), num_prompt_tokens=1,
            num_computed_tokens=0, sampling=SamplingParams(), seed=0, media=media,
        )  # fmt: skip
        self.images.admit(sequence)

    def step(self, chunks: dict[int, Any]) -> dict[int, torch.Tensor]:
        first = np.array([len(self.tokens[sequence]) for sequence in chunks])
        counts = np.array([len(chunk) for chunk in chunks.values()])
        position = np.concatenate([np.arange(start, start + count) for start, count in zip(first, counts, strict=True)])
        ids = torch.tensor([token for chunk in chunks.values() for token in chunk])
        self.batch = step_batch(list(chunks), counts, first, ids, torch.from_numpy(position))
        self.model.forward = lambda *_: self.forward(*self.images.of(self.batch))
        try:
            return super().step(chunks)
        finally:
            self.model.forward = self.forward

    def _metadata(self, group: int, sequences: list[int], starts: list[int]) -> Any:
        plain = super()._metadata(group, sequences, starts)
        return self.images.seen(replace(self.batch, attention=(plain,) * (group + 1))).attention[group]


def step_batch(rows: list[int], counts: Any, first: Any, ids: torch.Tensor, positions: torch.Tensor) -> InputBatch:
    none = np.zeros(0, dtype=np.int64)
    return InputBatch(
        rows_S=np.array(rows), num_tokens_S=counts, num_computed_S=first,
        query_starts_S1=np.cumsum([0, *counts]).astype(np.int32), num_drafts_S=none, has_drafts=False,
        sampling_rows_N=none, lengths_N=none, input_ids_T=ids, positions_T=positions,
        logits_indices_N=torch.zeros(0), attention=(), states=None, adapter_slots_T=None,
    )  # fmt: skip


def test_it_is_the_file_that_runs(model: Any, family: str) -> None:
    assert type(model) is CLASSES[family]


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_logits_are_those_of_transformers(
    name: str, chunk_size: int | None, path: Path, reference: Any, model: Any
) -> None:
    tokens, media = rendered(path, name)
    harness = ImageHarness(model)
    harness.admit(0, media)
    chunks = chunks_of(tokens, media, chunk_size or len(tokens))
    logits = torch.cat([harness.step({0: chunk})[0] for chunk in chunks])
    torch.testing.assert_close(logits, transformers_logits(reference, tokens, media), atol=_ATOL, rtol=0)


def test_all_in_one_step(path: Path, reference: Any, model: Any) -> None:
    harness = ImageHarness(model)
    chunks, expected = {}, {}
    for row, name in enumerate(PROMPTS):
        chunks[row], media = rendered(path, name, seed=row)
        harness.admit(row, media)
        expected[row] = transformers_logits(reference, chunks[row], media)
    for row, logits in harness.step(chunks).items():
        torch.testing.assert_close(logits, expected[row], atol=_ATOL, rtol=0)


def test_text_beside_an_image_keeps_its_bits(path: Path, model: Any) -> None:
    text = list(range(30, 60))
    alone = ImageHarness(model).run(0, text)
    tokens, media = rendered(path, "one")
    harness = ImageHarness(model)
    harness.admit(1, media)
    assert torch.equal(harness.step({0: text, 1: tokens})[0], alone)


def test_another_image_gives_other_logits(path: Path, model: Any) -> None:
    last = []
    for seed in (1, 2):
        tokens, media = rendered(path, "one", seed)
        harness = ImageHarness(model)
        harness.admit(0, media)
        last.append(harness.run(0, tokens)[-1])
    assert (last[0] - last[1]).abs().max() > 0.01


def test_a_config_in_the_older_spelling(path: Path, tmp_path: Path, model: Any, family: str) -> None:
    """Keys of the text beside those of the model, and M-RoPE by its old name: as it is published."""
    if family.startswith("gemma") or family in JOINED:
        pytest.skip("another spelling, if any, which a test below has")
    folder = tmp_path / family
    shutil.copytree(path, folder)
    config = json.loads((path / "config.json").read_text())
    text = config.pop("text_config")
    sections = text.pop("rope_parameters")["mrope_section"]
    text |= {"rope_theta": 10_000.0, "rope_scaling": {"type": "mrope", "mrope_section": sections}}
    (folder / "config.json").write_text(json.dumps({**text, **config}))
    tokens, media = rendered(path, "two")
    logits = []
    for one in (model, load_model(worker_config(folder))):
        harness = ImageHarness(one)
        harness.admit(0, media)
        logits.append(harness.run(0, tokens))
    assert torch.equal(*logits)


# of each way to say of what parts a model is; all have the same head
TIED = [
    name if name in ("qwen2_5_vl", GEMMA, "internvl", "mistral3") else pytest.param(name, marks=pytest.mark.nightly)
    for name in CLASSES
]


@pytest.mark.parametrize("name", TIED)
def test_a_tied_head_as_transformers_saves_it(name: str, tmp_path: Path) -> None:
    """The file has none."""
    from transformers import AutoModelForImageTextToText

    path = make_image_checkpoint(tmp_path / name, name, is_tied=True)
    assert not [tensor for tensor in CheckpointFiles(path).names if "lm_head" in tensor]
    reference = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model = load_model(worker_config(path))
    assert model.lm_head.is_tied
    tokens, media = rendered(path, "one")
    harness = ImageHarness(model)
    harness.admit(0, media)
    expected = transformers_logits(reference.eval(), tokens, media)
    torch.testing.assert_close(harness.run(0, tokens), expected, atol=_ATOL, rtol=0)


@pytest.mark.parametrize("name", TIED)
def test_a_head_of_its_own_is_taken_whatever_is_said(name: str, tmp_path: Path) -> None:
    """Also where config.json leaves it to the family's default, which Transformers does if it is that."""
    path = make_image_checkpoint(tmp_path / name, name, is_tied=False)
    tokens, media = rendered(path, "one")
    config = json.loads((path / "config.json").read_text())
    logits = []
    for said in ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}):
        (path / "config.json").write_text(json.dumps({**config, **said}))
        model = load_model(worker_config(path))
        assert not model.lm_head.is_tied
        harness = ImageHarness(model)
        harness.admit(0, media)
        logits.append(harness.run(0, tokens))
    assert torch.equal(*logits)


_NUMBERS = frozenset(
    "depth hidden_size intermediate_size num_heads num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "patch_size image_size in_channels num_channels spatial_merge_size temporal_patch_size window_size out_hidden_size "
    "num_position_embeddings position_embedding_size pooling_kernel_size layer_norm_eps rms_norm_eps".split()
)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -3, 10**15], ids=str)
def test_a_number_of_a_tower_that_is_none_is_named(bad: Any, family: str, path: Path, tmp_path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    vision = config["vision_config"]
    for key in sorted(_NUMBERS & vision.keys()):
        config["vision_config"] = {**vision, key: bad}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError) as caught:
            resolve(EngineOptions(model=str(tmp_path)))
        assert f"vision_config.{key}={bad} must be" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava"])
def test_weights_that_are_read_are_not_drawn_before(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_image_checkpoint(tmp_path / name, name)

    class Draws(TorchDispatchMode):
        """Refuses operations that draw numbers."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (torch.ops.aten.uniform_, torch.ops.aten.normal_):
                raise AssertionError(f"{func} was called")
            return func(*args, **(kwargs or {}))

    with Draws():
        load_model(worker_config(path))
        with pytest.raises(AssertionError, match="uniform_"):
            torch.nn.Linear(3, 3)


def test_experts_as_they_are_published(tmp_path: Path) -> None:
    """One tensor a layer, [experts, inputs, outputs]."""
    from safetensors.torch import load_file, save_file

    path = make_image_checkpoint(tmp_path / "new", "qwen3_vl_moe")
    folder = tmp_path / "old"
    shutil.copytree(path, folder)
    weights = load_file(path / "model.safetensors")
    assert sum(".experts." in name for name in weights) == 10
    turned = {
        name: weight.transpose(1, 2).contiguous() if ".experts." in name else weight for name, weight in weights.items()
    }
    save_file(turned, folder / "model.safetensors")
    tokens, media = rendered(path, "two")
    logits = []
    for one in (path, folder):
        harness = ImageHarness(load_model(worker_config(one)))
        harness.admit(0, media)
        logits.append(harness.run(0, tokens))
    assert torch.equal(*logits)


@pytest.mark.parametrize(("version", "is_turned"), [("4.57.0.dev0", True), ("5.0.0", False), ("10.1", False)])
def test_experts_with_as_many_inputs_as_outputs_go_by_the_version_that_wrote_them(version, is_turned) -> None:
    config = SimpleNamespace(hidden_size=6, moe_intermediate_size=3, transformers_version=version)
    weight = torch.arange(2 * 6 * 6.0).reshape(2, 6, 6)
    pieces = dict(as_kept(config)("layers.0.mlp.experts.gate_up_proj", weight))
    expected = weight.transpose(1, 2) if is_turned else weight
    assert torch.equal(pieces["layers.0.mlp.experts.1.up_proj.weight"], expected[1, 3:])
    # the other tensor of the layer is told by its shape, whatever wrote it
    down = torch.arange(2 * 3 * 6.0).reshape(2, 3, 6)
    for given in (down, down.transpose(1, 2)):
        pieces = dict(as_kept(config)("layers.0.mlp.experts.down_proj", given))
        assert torch.equal(pieces["layers.0.mlp.experts.1.down_proj.weight"], down[1].T)


def test_experts_of_which_nothing_tells_how_they_lie_are_refused() -> None:
    config = SimpleNamespace(hidden_size=6, moe_intermediate_size=3, transformers_version=None)
    with pytest.raises(ModelError, match=r"as many inputs as outputs \(6\).* Add transformers_version to config.json"):
        as_kept(config)("layers.0.mlp.experts.gate_up_proj", torch.zeros(2, 6, 6))
    with pytest.raises(ModelError, match=r"has 4 x 6 for each expert, .*moe_intermediate_size=3\) it is 6 x 3"):
        as_kept(config)("layers.0.mlp.experts.down_proj", torch.zeros(2, 4, 6))


def test_gemma_as_it_is_published(tmp_path: Path) -> None:
    """The older names of weights and of positions, and a head of the tower that pools for others."""
    from safetensors.torch import load_file, save_file

    path = make_image_checkpoint(tmp_path / "new", GEMMA)
    folder = tmp_path / "old"
    shutil.copytree(path, folder)
    config = json.loads((path / "config.json").read_text())
    rope = config["text_config"].pop("rope_parameters")
    config["text_config"] |= {
        "rope_theta": rope["full_attention"]["rope_theta"],
        "rope_local_base_freq": rope["sliding_attention"]["rope_theta"],
    }
    del config["text_config"]["layer_types"]
    config["text_config"]["sliding_window_pattern"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    older = {
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.language_model.": "language_model.model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }
    for new, old in older.items():
        weights = {name.replace(new, old): weight for name, weight in weights.items()}
    weights["vision_tower.vision_model.head.probe"] = torch.zeros(1, 1, 32)
    save_file(weights, folder / "model.safetensors")
    tokens, media = rendered(path, "two")
    logits = []
    for one in (path, folder):
        harness = ImageHarness(load_model(worker_config(one)))
        harness.admit(0, media)
        logits.append(harness.run(0, tokens))
    assert torch.equal(*logits)


def test_an_image_of_gemma_that_is_cut_is_an_error(tmp_path: Path) -> None:
    """Not other numbers: the core never does so."""
    path = make_image_checkpoint(tmp_path / GEMMA, GEMMA)
    tokens, media = rendered(path, "one")
    harness = ImageHarness(load_model(worker_config(path)))
    harness.admit(0, media)
    with pytest.raises(ModelError, match="within an image that is whole"):
        harness.step({0: tokens[: media[0].end - 1]})
