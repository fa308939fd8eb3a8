"""Tiny checkpoints of models that take images: a decoder, an encoder and a processor's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from quire.messages import Media
from quire.testing.tiny_checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, make_config, widen, write_tokenizer
from quire.worker.image_rows import pixels_of

_CPU = torch.device("cpu")
MARKS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
VIDEO_MARK = "<|video_pad|>"
IMAGE_TOKEN_ID = 259
VIDEO_TOKEN_ID = IMAGE_TOKEN_ID + 3
_KINDS = {
    IMAGE_TOKEN_ID: ("pixel_values", "image_grid_thw"),
    VIDEO_TOKEN_ID: ("pixel_values_videos", "video_grid_thw"),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
    "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
        "fullatt_block_indexes": [1], "window_size": 56,
    },
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    "qwen3_vl": {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2],
    },
}  # fmt: skip
_VISION["qwen3_vl_moe"] = _VISION["qwen3_vl"]
_MORE_TEXT: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"head_dim": 16, "num_hidden_layers": 6},
    "qwen3_vl_moe": {
        "head_dim": 16, "num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
}  # fmt: skip
# This model's processor opens an image where the others stand for it.
GEMMA = "gemma3"
_GEMMA_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16, "tie_word_embeddings": False, "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}  # fmt: skip
_GEMMA_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 7, "vision_use_head": False,
}  # fmt: skip
# Of Gemma 4 tokens of an image see what stands before them alone, or each other.
GEMMA4, GEMMA4_AHEAD = "gemma4", "gemma4_ahead"
_GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 32,
}  # fmt: skip
_GEMMA4_MORE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    GEMMA4: ("gemma4", {}, {"use_clipped_linears": True}),
    GEMMA4_AHEAD: (
        "gemma4_moe",
        # a window is narrower than the largest image
        {
            "use_bidirectional_attention": "vision",
            "sliding_window": 12,
            "num_hidden_layers": 4,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {"standardize": True, "num_key_value_heads": 1},
    ),
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 14,
}  # fmt: skip
# Towers that were joined to text models, by what is told apart here: its model_type, the architecture of its text, its
# tower, and what else its config.json says.
JOINED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llava": ("llava", "llama", {**_TOWER, "model_type": "clip_vision_model", "image_size": 56}, {}),
    "llava_siglip": (
        "llava",
        "qwen2",
        # a part of a patch is left over
        {**_TOWER, "model_type": "siglip_vision_model", "image_size": 60},
        {"vision_feature_layer": [1, -1], "vision_feature_select_strategy": "full"},
    ),
    "pixtral": (
        "llava",
        "mistral",
        {**_TOWER, "model_type": "pixtral", "image_size": 84},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "llava_next": (
        "llava_next",
        "llama",
        {**_TOWER, "model_type": "clip_vision_model", "image_size": 56},
        {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
    ),
    "mistral3": (
        "mistral3",
        "mistral",
        {**_TOWER, "num_hidden_layers": 2, "model_type": "pixtral", "image_size": 140},
        {},
    ),
}
_INTERN: dict[str, Any] = {
    **_TOWER, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7],
}  # fmt: skip
JOINED |= {
    "internvl": ("internvl", "qwen2", _INTERN, {"image_token_id": IMAGE_TOKEN_ID}),
    "internvl_norms": (
        "internvl",
        "qwen3_moe",
        {
            **_INTERN, "norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True, "use_mean_pooling": False,
            "use_mask_token": True,
        },
        {"image_token_id": IMAGE_TOKEN_ID},
    ),
}  # fmt: skip
ROW_ENDS = ("[IMG_BREAK]", "[IMG_END]")
TILES = ("<img>", "</img>")
_NUMBERS: dict[str, dict[str, Any]] = {
    "llava": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}, "crop_size": 56},
    "llava_next": {
        "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 56}, "crop_size": 56,
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
    },
    "llava_siglip": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 60, "width": 60}},
    "pixtral": {"size": {"longest_edge": 84}},
    "mistral3": {"size": {"longest_edge": 140}},
    "internvl": {"size": {"height": 28, "width": 28}, "max_patches": 4},
    "internvl_norms": {"size": {"height": 28, "width": 28}, "max_patches": 4},
    "qwen3_vl": {
        "patch_size": 16, "min_pixels": 64 * 64, "max_pixels": 32 * 32 * 64, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
}  # fmt: skip
_NUMBERS["qwen3_vl_moe"] = _NUMBERS["qwen3_vl"]
for _name in _GEMMA4_MORE:
    _NUMBERS[_name] = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 16, "do_normalize": False}


def make_image_checkpoint(
    path: Path, model_type: str = "qwen2_5_vl", *, seed: int = 0, is_tied: bool | None = None
) -> Path:
    """A checkpoint directory with tokenizer and preprocessor_config.json; returns its path. `is_tied`: whether its head
    is its embedding; None: as most of its family are."""
    model = make_image_model(model_type, seed=seed, is_tied=is_tied)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    marks = "".join((MARKS[1], MARKS[0], MARKS[2]))
    # These templates write one mark, and processors do the rest.
    is_one_mark = model_type.startswith("gemma") or model_type in JOINED
    template = CHAT_TEMPLATE.replace(marks, MARKS[0]) if is_one_mark else CHAT_TEMPLATE
    write_tokenizer(path, chat_template=template, more_special=(*MARKS, VIDEO_MARK, *ROW_ENDS, *TILES))
    numbers = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 64, "patch_size": 14, "merge_size": 2}
    numbers |= _NUMBERS.get(model_type, {})
    (path / "preprocessor_config.json").write_text(json.dumps(numbers), encoding="utf-8")
    if model_type in ("qwen3_vl", "qwen3_vl_moe"):
        video = {"size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 64}}
        (path / "video_preprocessor_config.json").write_text(json.dumps(video), encoding="utf-8")
    return path


def make_image_model(model_type: str = "qwen2_5_vl", *, seed: int = 0, is_tied: bool | None = None) -> Any:
    """The Transformers model itself, with wide random weights."""
    from transformers import AutoModelForImageTextToText

    if model_type == GEMMA:
        config = _gemma_config()
    elif model_type in _GEMMA4_MORE:
        config = _gemma4_config(model_type)
    elif model_type in JOINED:
        config = _joined_config(model_type)
    else:
        config = _qwen_config(model_type)
    if is_tied is not None:
        config.tie_word_embeddings = is_tied
    # some weights are drawn when a model is made
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    widen(model, seed)
    _bound(model)
    return model.eval()


def _bound(model: Any) -> None:
    """Bounds of linear layers, which what goes through them meets; new ones are infinite."""
    for name, buffer in model.named_buffers():
        if name.endswith(("put_min", "put_max")):
            buffer.fill_(2.0 if name.endswith("max") else -1.5)
        elif name.endswith((".std_bias", ".std_scale")):
            buffer.copy_(torch.linspace(0.5, 1.5, len(buffer)))


def _gemma4_config(model_type: str) -> Any:
    from transformers import AutoConfig

    from quire.testing.tiny_checkpoints import make_config

    text, more_text, more_vision = _GEMMA4_MORE[model_type]
    return AutoConfig.for_model(
        GEMMA4,
        text_config=make_config(text, pad_token_id=0, **more_text).to_dict(),
        vision_config={**_GEMMA4_VISION, **more_vision},
        audio_config=None,
        tie_word_embeddings=more_text.get("tie_word_embeddings", True),
        image_token_id=IMAGE_TOKEN_ID,
        boi_token_id=IMAGE_TOKEN_ID + 1,
        eoi_token_id=IMAGE_TOKEN_ID + 2,
        video_token_id=VIDEO_TOKEN_ID,
        audio_token_id=VIDEO_TOKEN_ID + 1,
    )


def _gemma_config() -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        GEMMA,
        text_config=_GEMMA_TEXT,
        vision_config=_GEMMA_VISION,
        mm_tokens_per_image=16,
        boi_token_index=IMAGE_TOKEN_ID,
        image_token_index=IMAGE_TOKEN_ID + 1,
        eoi_token_index=IMAGE_TOKEN_ID + 2,
        tie_word_embeddings=False,
        eos_token_id=EOS_TOKEN_ID,
    )


def _joined_config(name: str) -> Any:
    from transformers import AutoConfig

    model_type, text, vision, more = JOINED[name]
    more_text = {"sliding_window": None} if model_type == "mistral3" else {}
    return AutoConfig.for_model(
        model_type,
        text_config=make_config(text, **more_text).to_dict(),
        vision_config=vision,
        image_token_index=IMAGE_TOKEN_ID,
        tie_word_embeddings=False,
        **more,
    )


def _qwen_config(model_type: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        model_type,
        text_config=_TEXT | _MORE_TEXT.get(model_type, {}),
        vision_config=_VISION[model_type],
        image_token_id=IMAGE_TOKEN_ID,
        vision_start_token_id=IMAGE_TOKEN_ID + 1,
        vision_end_token_id=IMAGE_TOKEN_ID + 2,
        video_token_id=VIDEO_TOKEN_ID,
        tie_word_embeddings=False,
        eos_token_id=EOS_TOKEN_ID,
    )


def reference_inputs(model_type: str, media: list[Media], token_ids: torch.Tensor) -> dict[str, Any]:
    """What Transformers' model is called with beside these tokens, [1, T]."""
    if model_type == GEMMA4:
        return _gemma4_inputs(media, token_ids)
    if model_type == "llava_next":
        return _tiled_inputs(media)
    if model_type in ("internvl", "llava", "mistral3"):
        return _joined_inputs(media)
    if model_type != GEMMA:
        is_video = token_ids == VIDEO_TOKEN_ID
        inputs: dict[str, Any] = {"mm_token_type_ids": (token_ids == IMAGE_TOKEN_ID).int() + 2 * is_video.int()}
        for kind, names in _KINDS.items():
            if of_kind := [one for one in media if token_ids[0, one.start] == kind]:
                inputs[names[0]] = torch.cat([pixels_of(one, _CPU) for one in of_kind])
                inputs[names[1]] = torch.tensor(_grids(of_kind))
        return inputs
    is_image = torch.zeros_like(token_ids)
    for image in media:
        is_image[:, image.start : image.end] = 1
    inputs = {"token_type_ids": is_image}
    if media:
        inputs["pixel_values"] = torch.stack([_whole_image(image) for image in media])
    return inputs


def _gemma4_inputs(media: list[Media], token_ids: torch.Tensor) -> dict[str, Any]:
    inputs: dict[str, Any] = {"mm_token_type_ids": (token_ids == IMAGE_TOKEN_ID).int()}
    if not media:
        return inputs
    num_patches = _NUMBERS[GEMMA4]["max_soft_tokens"] * media[0].merge_size ** 2
    patches, places = [], []
    for image in media:
        whole = _whole_image(image)
        _, height, width = image.grid
        side = whole.shape[1] // height
        by_row = whole.reshape(3, height, side, width, side).permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)
        index = torch.arange(len(by_row))
        place = torch.stack([index % width, index // width], dim=1)
        patches.append(torch.nn.functional.pad(by_row, (0, 0, 0, num_patches - len(by_row))))
        places.append(torch.nn.functional.pad(place, (0, 0, 0, num_patches - len(by_row)), value=-1))
    return {**inputs, "pixel_values": torch.stack(patches), "image_position_ids": torch.stack(places)}


def _tiled_inputs(media: list[Media]) -> dict[str, Any]:
    """Of each image the whole, then its tiles."""
    if not media:
        return {}
    pixels, sizes = [], []
    for whole, larger in zip(media[::2], media[1::2], strict=True):
        seen = _whole_image(larger)
        side = _whole_image(whole).shape[1]
        rows, columns = seen.shape[1] // side, seen.shape[2] // side
        tiles = seen.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).flatten(0, 1)
        pixels.append(torch.cat((_whole_image(whole)[None], tiles)))
        sizes.append(_size_of(larger, (rows * side, columns * side)))
    most = max(map(len, pixels))
    padded = [torch.nn.functional.pad(one, (0, 0) * 3 + (0, most - len(one))) for one in pixels]
    return {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor(sizes)}


def _size_of(larger: Media, resolution: tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image of which so many cells are left: not of the image itself, which nobody kept."""
    from transformers.image_processing_utils import select_best_resolution

    pinpoints = JOINED["llava_next"][3]["image_grid_pinpoints"]
    rows, columns = larger.cells
    (above, left), (_, height, width) = larger.margin, larger.grid
    for size in ((rows * k + r, columns * k + c) for k in range(4, 60) for r in range(0, k, 2) for c in range(0, k, 2)):
        if select_best_resolution(size, pinpoints) == resolution:
            by_width = size[1] / size[0] > width / height
            kept_rows = int(round(size[0] * (width / size[1]), 7)) if by_width else height
            kept_columns = width if by_width else int(round(size[1] * (height / size[0]), 7))
            if [(height - kept_rows) // 2, (width - kept_columns) // 2] == [above, left]:
                return size
    raise AssertionError("no image has these margins")


def _joined_inputs(media: list[Media]) -> dict[str, Any]:
    if not media:
        return {}
    images = [_whole_image(image) for image in media]
    if not media[0].line_ends:
        return {"pixel_values": torch.stack(images)}
    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = sizes.amax(0).tolist()
    padded = [
        torch.nn.functional.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images
    ]
    return {"pixel_values": torch.stack(padded), "image_sizes": sizes}


def _grids(media: list[Media]) -> list[list[int]]:
    """Media that continue a video are counted with its first one."""
    grids: list[list[int]] = []
    for one in media:
        if one.time is None:
            grids.append(list(one.grid))
        else:
            grids[-1][0] += 1
    return grids


def _whole_image(image: Media) -> torch.Tensor:
    """[3, height, width] of patches that stand square by square."""
    rows, columns = image.grid[1] // image.merge_size, image.grid[2] // image.merge_size
    patches = pixels_of(image, _CPU)
    side = round((patches.shape[1] // 3) ** 0.5)
    squares = patches.view(rows, columns, image.merge_size, image.merge_size, 3, side, side)
    pixels = squares.permute(4, 0, 2, 5, 1, 3, 6)
    return pixels.reshape(3, rows * image.merge_size * side, columns * image.merge_size * side)
