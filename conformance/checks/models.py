"""The list of models."""

from __future__ import annotations

import openai

from conformance.registry import check
from conformance.target import Target


@check
def the_list(target: Target) -> None:
    """object, and id, object, created and owned_by of each model."""
    body = target.get("/v1/models").json
    assert body["object"] == "list"
    for model in body["data"]:
        assert model["object"] == "model"
        assert type(model["created"]) is int
        assert isinstance(model["owned_by"], str)
    assert target.model in {model["id"] for model in body["data"]}


@check
def one_model(target: Target) -> None:
    """A model by its id."""
    assert target.client.models.retrieve(target.model).id == target.model


@check
def one_that_is_not_there(target: Target) -> None:
    """404 model_not_found for another id, also one with slashes."""
    for name in ("none", "org/none"):
        try:
            target.client.models.retrieve(name)
        except openai.NotFoundError as error:
            assert error.code == "model_not_found", error.code
        else:
            raise AssertionError(name)


@check
def an_answer_names_its_model(target: Target) -> None:
    """The model of an answer is the one that was asked for."""
    assert target.chat(max_completion_tokens=1).model == target.model
