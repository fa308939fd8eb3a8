"""Instructor: objects of pydantic by tools, by JSON and by schema."""

import instructor
import openai
from pydantic import BaseModel, Field
from reporting import KEY, MODEL, URL, run

FIELDS = {"model": MODEL, "max_tokens": 200, "temperature": 0}


class Answer(BaseModel):
    """An answer."""

    number: int = Field(ge=0, le=99)


def ask(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "What is seven plus five?"}]
    answer = client.chat.completions.create(messages=messages, response_model=Answer, **FIELDS)
    assert isinstance(answer, Answer)


def by_tools():
    ask(instructor.Mode.TOOLS)


def by_schema():
    ask(instructor.Mode.JSON_SCHEMA)


raise SystemExit(run(by_tools, by_schema))
