"""Options declared once, their resolution into one frozen configuration, and the facts of a model's config.json."""

from quire.config.engine_config import BurstTimes, EngineConfig, KVConnectorConfig, WorkerConfig
from quire.config.engine_options import EMBEDDED, EngineOptions
from quire.config.kv_store import shared_key
from quire.config.model_facts import ModelFacts
from quire.config.option import Option, checked, num_bytes_of, options_of, parse_bytes
from quire.config.rank_grid import RankGrid, RankPlace
from quire.config.resolve import Reasons, resolve
from quire.config.speculation import SpeculationConfig

__all__ = [
    "EMBEDDED",
    "BurstTimes",
    "EngineConfig",
    "EngineOptions",
    "KVConnectorConfig",
    "ModelFacts",
    "Option",
    "RankGrid",
    "RankPlace",
    "Reasons",
    "SpeculationConfig",
    "WorkerConfig",
    "checked",
    "num_bytes_of",
    "options_of",
    "parse_bytes",
    "resolve",
    "shared_key",
]
