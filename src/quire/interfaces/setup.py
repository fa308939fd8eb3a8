"""What LLM and AsyncLLM do alike before their first request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig, EngineOptions, checked, resolve
from quire.config.generation_config import NAMES
from quire.errors import ModelError, RequestError
from quire.interfaces.prefix_file import read_prefix_file
from quire.interfaces.requests import Limits, RequestMaker
from quire.messages import EngineReady
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.renderer import Renderer

logger = logging.getLogger(__name__)


def configured(options: Mapping[str, Any]) -> EngineConfig:
    """One frozen configuration from keywords; an unknown or impossible one is an OptionError."""
    config, reasons = resolve(EngineOptions(**checked(EngineOptions, options)))
    logger.debug("options:\n%s", reasons.table())
    if config.pinned_prefixes is not None:
        # read again when they are pinned: here a mistake shows before minutes of loading
        read_prefix_file(config.pinned_prefixes)
    return config


def request_maker(config: EngineConfig, ready: EngineReady, renderer: Renderer) -> RequestMaker:
    return RequestMaker(
        limits_of(config, ready),
        eos_token_ids=renderer.eos_token_ids,
        seed=config.seed,
        bad_words_token_ids=renderer.bad_words_token_ids,
        thought_marks=lambda: renderer.thought_marks,
        first_id=ready.first_request_id,
    )


def limits_of(config: EngineConfig, ready: EngineReady) -> Limits:
    return Limits(
        vocab_size=config.facts.vocab_size,
        max_model_len=ready.max_model_len,
        max_logprobs=config.max_logprobs,
        max_num_seqs=ready.max_num_seqs,
        has_head=config.facts.has_head,
        listens=config.facts.listens,
        decoder_start_token_id=config.facts.decoder_start_token_id,
        has_watermark=config.worker.watermark is not None,
    )


def default_sampling_params(config: EngineConfig) -> SamplingParams:
    """What the authors of the model recommend in its generation_config.json, unless generation_config="none"."""
    if not config.use_generation_config:
        return SamplingParams()
    given = config.facts.generation_config
    values = {ours: given[theirs] for theirs, ours in NAMES.items() if given.get(theirs) is not None}
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise ModelError(
            f"{config.facts.path / 'generation_config.json'}: {error} Mend the file, or set generation_config to none "
            "or to an object with another value."
        ) from error


def log_report(ready: EngineReady) -> None:
    for line in ready.report:
        logger.info("%s", line)
