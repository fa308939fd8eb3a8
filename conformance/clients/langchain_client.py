"""LangChain's ChatOpenAI and OpenAI: answers, streams, tools, structured output, scores."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from reporting import KEY, MODEL, URL, run

QUESTION = "What is seven plus five?"


def model(**options):
    return ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, temperature=0, max_retries=0, **options)


def an_answer():
    answer = model(max_completion_tokens=12).invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 12
    assert answer.response_metadata["finish_reason"] in {"stop", "length"}


def a_stream():
    chunks = list(model(max_completion_tokens=12, stream_usage=True).stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == model(max_completion_tokens=12).invoke(QUESTION).content
    assert any(chunk.usage_metadata for chunk in chunks)


def several_at_once():
    answers = model(max_completion_tokens=4).batch([QUESTION, "Hello"])
    assert len(answers) == 2


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def a_call():
    bound = model(max_completion_tokens=100).bind_tools([get_weather], tool_choice="required")
    (call, *_) = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "get_weather"
    assert "city" in call["args"]


class Answer(BaseModel):
    """An answer."""

    number: int = Field(ge=0, le=99)


def a_form():
    for method in ("json_schema", "function_calling"):
        found = model(max_completion_tokens=100).with_structured_output(Answer, method=method).invoke(QUESTION)
        assert isinstance(found, Answer), (method, found)


def scores():
    answer = model(max_completion_tokens=3, logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def a_completion():
    llm = OpenAI(base_url=URL, api_key=KEY, model=MODEL, max_tokens=8, temperature=0, max_retries=0)
    assert llm.invoke("Once upon a time")
    assert "".join(llm.stream("Once upon a time")) == llm.invoke("Once upon a time")


raise SystemExit(run(an_answer, a_stream, several_at_once, a_call, a_form, scores, a_completion))
