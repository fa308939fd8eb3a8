"""A tower that sees, and a text model that has a file of its own, joined by a projector: LLaVA and its relatives.

Owns: which text model and which tower a config.json names, and where the tensors of all three lie in a checkpoint. What
a family adds is its projector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from quire.config.image_sizes import INTERN, JOINED, JOINED_TEXTS, PIXTRAL, TOWERS, joined_tower
from quire.errors import ModelError
from quire.worker.layers.intern_tower import InternTower
from quire.worker.layers.pixtral_tower import PixtralTower
from quire.worker.layers.vision_tower import ChoosingTower, tower_activation
from quire.worker.model_config import read_model_config
from quire.worker.models.causal_lm import CausalLM
from quire.worker.models.checkpoint_map import CheckpointMap
from quire.worker.models.qwen2_5_vl import check_heads
from quire.worker.models.registry import native_class
from quire.worker.models.text_tower import TowerMap, name_in_tower

# As published, and as Transformers saves them; the first that fits.
_EYES = {
    "model.vision_tower.vision_model.": "vision_tower.",
    "vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "multi_modal_projector.": "multi_modal_projector.",
    "model.image_newline": "image_newline.weight",
    "image_newline": "image_newline.weight",
}
_VISION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "patch_size": 32},
    "siglip_vision_model": {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "patch_size": 16},
    "internvl_vision": {
        "hidden_act": "gelu", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "image_size": 448, "patch_size": 14, "layer_norm_eps": 1e-6,
        "norm_type": "layer_norm", "attention_bias": False, "use_qk_norm": False, "use_mean_pooling": True,
        "use_absolute_position_embeddings": True,
    },
    "pixtral": {
        "hidden_act": "gelu", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "image_size": 1024, "patch_size": 16,
    },
}  # fmt: skip
_OF_ALL_TOWERS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
}


class JoinedMap(TowerMap):
    """What belongs to the eyes has its own names here; the rest is that of the text model."""

    def ignores(self, name: str) -> bool:
        if _name_of_eyes(name) is not None:
            return name.startswith(self.ignored_modules) or name.endswith(".position_ids")
        # what belongs to neither is no weight of this model
        return name_in_tower(name) is not None and super().ignores(name)

    def rename(self, name: str) -> str:
        return _name_of_eyes(name) or super().rename(name)


def _name_of_eyes(name: str) -> str | None:
    for prefix, own in _EYES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None


def complete_joined(config: Any) -> None:
    """`text` and `vision` with attributes, what they leave out included."""
    config.tower = joined_tower(vars(config))
    if config.tower is None:
        raise ModelError(
            f"config.json: text_config.model_type must be one of {', '.join(JOINED_TEXTS)} and "
            f"vision_config.model_type one of {', '.join(JOINED[config.model_type])}: others are not built. Take a "
            "checkpoint of such."
        )
    values = {name: value for name, value in config.text_config.items() if name != "architectures"}
    is_tied = config.tie_word_embeddings
    if not native_class(config.model_type, []).config_defaults["tie_word_embeddings"]:
        # said of the whole, or of the text, as older versions of Transformers did
        is_tied = is_tied or bool(values.get("tie_word_embeddings"))
    values["tie_word_embeddings"] = is_tied
    config.text_class = native_class(values["model_type"], [])
    config.text = read_model_config(config._file, values, config.text_class)
    config.vision = SimpleNamespace(**{**_OF_ALL_TOWERS, **_VISION_DEFAULTS[config.tower], **config.vision_config})
    check_heads(config, config.vision.hidden_size, config.vision.num_attention_heads)
    strategy = TOWERS[config.tower]
    if config.vision_feature_select_strategy not in (None, strategy):
        raise ModelError(
            f"config.json: vision_feature_select_strategy={str(config.vision_feature_select_strategy)[:40]!r}: must be "
            f"{strategy!r} with a tower of the kind {config.tower}. Take the config.json that belongs to the weights."
        )


def complete_with_one_layer(config: Any) -> None:
    """The same, where one layer of the tower is taken; the last, if nothing is said."""
    if config.vision_feature_layer is None:
        config.vision_feature_layer = -1
    if not isinstance(config.vision_feature_layer, int):
        raise ModelError(
            f"config.json: vision_feature_layer={str(config.vision_feature_layer)[:40]}: must be the number of one "
            "layer for this model. Take the config.json that belongs to the weights."
        )
    complete_joined(config)


def _chosen_layers(config: Any) -> list[int]:
    """Their numbers: 0 is what the first layer is given."""
    given = config.vision_feature_layer
    wanted = given if isinstance(given, list) else [given]
    num_states = config.vision.num_hidden_layers + 1
    if not wanted or not all(type(layer) is int and -num_states <= layer < num_states for layer in wanted):
        raise ModelError(
            f"config.json: vision_feature_layer={str(given)[:40]}: must be numbers of layers, from {-num_states} to "
            f"{num_states - 1}. Take the config.json that belongs to the weights."
        )
    return [layer % num_states for layer in wanted]


class Projector(nn.Module):
    """From the tower's dimensions to those of the text."""

    def __init__(self, config: Any, inputs: int) -> None:
        super().__init__()
        size = config.text.hidden_size
        self.activation = tower_activation(config.projector_hidden_act, "projector_hidden_act")
        self.linear_1 = nn.Linear(inputs, size, bias=config.multimodal_projector_bias)
        self.linear_2 = nn.Linear(size, size, bias=config.multimodal_projector_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.activation(self.linear_1(x)))


def _map_of(of_text: CheckpointMap, unused: Sequence[str]) -> JoinedMap:
    """`unused`: modules of the tower behind what is taken from it."""
    fields = {field.name: getattr(of_text, field.name) for field in dataclasses.fields(of_text)}
    beginnings = [prefix for prefix, own in _EYES.items() if own == "vision_tower."]
    fields["ignored_modules"] = (*of_text.ignored_modules, *(prefix + name for prefix in beginnings for name in unused))
    fields["apart"] = tuple(dict.fromkeys(_EYES.values()))
    return JoinedMap(**fields)


class JoinedModel(CausalLM):
    config_defaults: Mapping[str, Any] = {
        "text_config": None,
        "vision_config": None,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": None,
        "vision_feature_select_strategy": None,
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
    }
    takes_images = True
    image_modules: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    multi_modal_projector: nn.Module

    def __init__(self, config: Any, max_model_len: int, merge_size: int = 1) -> None:
        text = config.text_class(config.text, max_model_len)
        super().__init__(text.model, text.lm_head)
        layers = _chosen_layers(config)
        self.vision_tower: InternTower | PixtralTower | ChoosingTower
        if config.tower == INTERN:
            is_end = config.vision_feature_layer == -1
            self.vision_tower = InternTower(config.vision, layers[0], merge_size, is_end=is_end)
        elif config.tower == PIXTRAL:
            self.vision_tower = PixtralTower(config.vision, layers, merge_size)
        else:
            self.vision_tower = ChoosingTower(config.vision, layers, is_clip=config.tower == "clip_vision_model")
        self.tower_width = config.vision.hidden_size * len(layers)
        self.checkpoint_map = _map_of(getattr(text, "checkpoint_map", CheckpointMap()), self.vision_tower.unused)

    def encode_image(self, pixels: Tensor, grid: list[int]) -> Tensor:
        """One embedding for each placeholder, out of patches that stand square by square."""
        _, height, width = grid
        embedded: Tensor = self.multi_modal_projector(self.vision_tower(pixels, height, width))
        return embedded
