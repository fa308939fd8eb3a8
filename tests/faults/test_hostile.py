"""Requests that were made to hurt: each follows from its seed, they differ, and they keep to the limits of size."""

import json

import msgspec
import pytest
from tests.support.faults import hostile_bodies, hostile_forms, hostile_images, hostile_sockets
from tests.support.template_bombs import BOMBS as TEMPLATES
from tests.support.tokenizer_bombs import BOMBS as TOKENIZERS

from quire.structured_outputs_params import StructuredOutputsParams

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/files/x/anything")
GENERATORS = {
    "forms": hostile_forms.request_of,
    "bodies": lambda seed: hostile_bodies.body_of(seed, PATHS),
    "connections": hostile_sockets.parts_of,
    "images": hostile_images.request_of,
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_request_follows_from_its_seed_alone(name):
    make = GENERATORS[name]
    made = [make(seed) for seed in range(24)]
    assert made == [make(seed) for seed in range(24)]
    assert sum(request not in made[:number] for number, request in enumerate(made)) > 18


def test_forms_are_of_every_kind_and_stay_forms():
    """An ordinary request beside it differs in nothing but the form."""
    kinds = set()
    for seed in range(200):
        form = hostile_forms.form_of(seed)
        [kind] = form
        kinds.add(kind)
        assert {**hostile_forms.request_of(seed, is_bound=False), **form} == hostile_forms.request_of(seed)
        if kind == "guided_json":
            StructuredOutputsParams(json=form[kind])
    assert kinds == {"guided_grammar", "guided_regex", "guided_json", "guided_choice", "response_format"}
    assert max(hostile_forms.request_of(seed)["n"] for seed in range(400)) == 128


def test_bodies_reach_the_limit_and_many_are_json():
    sizes, num_read = [], 0
    for seed in range(50):
        path, body = hostile_bodies.body_of(seed, PATHS)
        assert path in PATHS
        sizes.append(len(body))
        try:
            msgspec.json.decode(body)
            num_read += 1
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            pass
    assert max(sizes) <= 8 << 20
    assert sum(size > 1 << 20 for size in sizes) > 3
    assert num_read > 16


def test_connections_have_more_than_sixty_forms():
    sent = [hostile_sockets.parts_of(seed) for seed in range(500)]
    assert len({parts[0].partition(b"\r\n")[0][:40] for parts in sent}) > 60
    assert any(len(parts) == 3 for parts in sent)


def test_there_are_forty_bombs_of_each_kind():
    assert len(TEMPLATES) > 60
    assert len(TOKENIZERS) >= 40
    assert len({json.dumps(bomb) for bomb in TOKENIZERS.values()}) == len(TOKENIZERS)
