"""What a model says of a whole text, or of two: labels and their probabilities, for LLM, AsyncLLM and the server.

The engine gives the numbers of a head; what they mean is known here, from config.json and from what the authors wrote
down for sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.config import ModelFacts
from quire.errors import RequestError
from quire.interfaces.own_pooling import modules_of, own_label_tokens
from quire.pooling_params import CLS, LAST, MEAN

EMBED = "embed"
CLASSIFY = "classify"
SCORE = "score"
TASKS = (EMBED, CLASSIFY, SCORE)
_MOST_LABELS = 2**16


class ClassLabels:
    """Of one model."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts

    @cached_property
    def token_ids(self) -> list[int]:
        """(no, yes), where the probability of one token against another compares two texts."""
        return [] if self._facts.classifies else own_label_tokens(self._facts.path, self._facts.vocab_size) or []

    @cached_property
    def names(self) -> list[str]:
        """Of the labels, by their numbers; none: the model has no head of labels."""
        if not self._facts.classifies:
            return []
        config = self._facts.hf_config
        given = config.get("id2label")
        count = len(given) if isinstance(given, dict) and given else config.get("num_labels", 2)
        if type(count) is not int or not 1 <= count <= _MOST_LABELS:
            count = 2
        names = given if isinstance(given, dict) else {}
        return [str(names.get(str(number), f"LABEL_{number}")) for number in range(count)]

    @property
    def scores_pairs(self) -> bool:
        """It was trained to read two texts at once, and says one number of them."""
        return bool(self.token_ids) or len(self.names) == 1

    @property
    def pooling(self) -> str:
        """What the head of labels is given."""
        if not self._facts.sees_all:
            return LAST
        return MEAN if self._facts.hf_config.get("classifier_pooling") == MEAN else CLS

    def check(self, task: str) -> None:
        """RequestError, where the model was not made for it."""
        facts = self._facts
        reason = None
        if task == EMBED and (facts.classifies or self.token_ids):
            what = "compares two texts" if self.scores_pairs else "tells labels of texts"
            reason = (
                f"This model {what} and makes no vectors. Use {'rerank or score' if self.scores_pairs else CLASSIFY}."
            )
        elif task == CLASSIFY and not self.names:
            reason = f"This model has no head of labels ({facts.architecture}), so it cannot classify."
        elif task == SCORE and not self.scores_pairs and self.names:
            reason = f"This model tells {len(self.names)} labels of a text, and a score is one number. Use {CLASSIFY}."
        elif task == SCORE and not self.scores_pairs and facts.has_head and not self._makes_vectors:
            reason = (
                "This model generates text and was not trained to compare texts, so that scores of it would mean "
                "nothing. Start the engine with a reranker or a model of embeddings."
            )
        if reason is not None:
            raise RequestError(reason, param="model")

    @cached_property
    def _makes_vectors(self) -> bool:
        """A decoder whose authors say how vectors are made of it."""
        path = self._facts.path
        return not path.is_file() and bool(modules_of(path) or (path / "1_Pooling" / "config.json").is_file())

    def finished(self, numbers: NDArray[np.float32], *, use_activation: bool = True) -> NDArray[np.float32]:
        """Probabilities of the numbers of a head; of two tokens, that of the second."""
        values = numbers.astype(np.float64)
        if self.token_ids:
            values = values[1:] - values[:1]
        if not use_activation or self._is_plain:
            return values.astype(np.float32)
        if len(values) == 1 or self._facts.hf_config.get("problem_type") == "multi_label_classification":
            probabilities = 0.5 * (1.0 + np.tanh(0.5 * values))
        else:
            exponentials = np.exp(values - values.max())
            probabilities = exponentials / exponentials.sum()
        return np.asarray(probabilities, dtype=np.float32)

    @property
    def _is_plain(self) -> bool:
        """The authors of a model with one label may want its number as it is."""
        config = self._facts.hf_config
        own: Any = config.get("sentence_transformers")
        named = own.get("activation_fn") if isinstance(own, dict) else None
        named = named or config.get("sbert_ce_default_activation_function") or ""
        is_plain = str(named).endswith("Identity") or config.get("problem_type") == "regression"
        return len(self.names) == 1 and is_plain


def checked_task(asked: str | None, labels: ClassLabels) -> str:
    """What is to become of a prompt that is encoded: by default what the model is for."""
    if asked is None:
        return CLASSIFY if labels.names else EMBED
    if asked not in (EMBED, CLASSIFY):
        raise RequestError(
            f"task={asked!r}: must be {EMBED} or {CLASSIFY}. Numbers of each token are not given.", param="task"
        )
    return asked


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Of two vectors; 0 where one of them is nothing."""
    first = one.astype(np.float64)
    second = other.astype(np.float64)
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / lengths if lengths else 0.0


def paired(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """One with each of several, or one by one."""
    if len(first) == 1:
        return [(first[0], one) for one in second]
    if len(first) != len(second):
        raise RequestError(
            f"text_1, text_2: {len(first)} and {len(second)} texts; give one and several, or as many of each.",
            param="text_1",
        )
    return list(zip(first, second, strict=True))
