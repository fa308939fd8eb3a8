"""What quantising costs on the embedded model stays near what docs/quantization.md states."""

import pytest
from benchmarks.quantization_accuracy import VARIANTS, divergence, log_probabilities, task_accuracy, task_texts

from quire.config.model_source import embedded_path

# Mean KL to float32 in nats, and share of positions with the same best token. Measured: docs/quantization.md.
BOUNDS = {
    "bfloat16": (1e-3, 0.98),
    "int8_weight_only": (2e-3, 0.96),
    "int8": (3e-3, 0.96),
    "int4_weight_only": (7e-2, 0.88),
    "int4": (7e-2, 0.88),
}
# Points of a hundred that a variant may lose on the tasks.
POINTS = {"int8": 1.0, "int4": 3.0}
PROMPTS_PER_TASK = 12


@pytest.fixture(scope="module")
def texts():
    return task_texts(48)


@pytest.fixture(scope="module")
def expected(texts):
    return log_probabilities(embedded_path(), texts, VARIANTS["float32"])


@pytest.fixture(scope="module")
def float_accuracy():
    right, total = task_accuracy(VARIANTS["float32"], PROMPTS_PER_TASK)
    assert right / total > 0.95, "the model itself must know its tasks"
    return right / total


@pytest.mark.parametrize("name", BOUNDS)
def test_probabilities_stay_near(name, texts, expected):
    most, least = BOUNDS[name]
    found = divergence(log_probabilities(embedded_path(), texts, VARIANTS[name]), expected)
    assert 0 < found.kl < most
    assert found.agreement > least


def test_fewer_bits_and_rounded_inputs_cost_more(texts, expected):
    """If they did not, something else than asked for would have been measured."""
    names = ("int8_weight_only", "int8", "int4")
    kl = [divergence(log_probabilities(embedded_path(), texts, VARIANTS[name]), expected).kl for name in names]
    assert kl[0] < kl[1] < kl[2]


@pytest.mark.parametrize("name", POINTS)
def test_tasks_are_still_solved(name, float_accuracy):
    right, total = task_accuracy(VARIANTS[name], PROMPTS_PER_TASK)
    assert 100 * right / total >= 100 * float_accuracy - POINTS[name]
