"""/v1/audio/transcriptions and /v1/audio/translations through the official client, on a tiny model that listens."""

import asyncio
import io
import wave

import httpx2 as httpx
import numpy as np
import openai
import pytest

from quire import AsyncLLM
from quire.config.model_facts import ModelFacts
from quire.interfaces.gateway.welcome import example_for, try_line
from quire.interfaces.server.app import create_app
from quire.interfaces.transcription import TranscriptionParams
from quire.outputs import Segment, Transcript
from quire.testing.speech_checkpoints import make_speech_checkpoint, speech_like

SPEECH = speech_like(0.9, 3)
LONG = speech_like(2.5, 4)


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((samples * 32_000).astype("<i2").tobytes())
    return file.getvalue()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_speech_checkpoint(tmp_path_factory.mktemp("models") / "whisper")


def with_engine(path, work, **options):
    """`work` with the engine and the official client of its server."""

    async def main():
        async with AsyncLLM(
            str(path), device="cpu", dtype="float32", num_threads=1, engine_process=False, **options
        ) as engine:
            transport = httpx.ASGITransport(create_app(engine))
            async with httpx.AsyncClient(transport=transport, base_url="http://quire") as http:
                client = openai.AsyncOpenAI(api_key="none", base_url="http://quire/v1", http_client=http, max_retries=0)
                return await work(engine, client)

    return asyncio.run(main())


def test_every_form_says_the_same(checkpoint):
    async def work(engine, client):
        create = client.audio.transcriptions.create
        file = ("speech.wav", wav(SPEECH))
        expected = await engine.transcribe(wav(SPEECH), TranscriptionParams(language="en"))
        asked = {"file": file, "model": engine.config.served_model_name, "language": "en"}
        found = await create(**asked)
        assert found.text == expected.text
        assert (found.usage.type, found.usage.seconds) == ("duration", 0.9)
        assert await create(**asked, response_format="text") == f"{expected.text}\n"
        deltas = [event async for event in await create(**asked, stream=True)]
        assert "".join(event.delta for event in deltas[:-1]).strip() == expected.text == deltas[-1].text
        timed = await engine.transcribe(wav(SPEECH), TranscriptionParams(language="english", timestamps=True))
        verbose = await create(**asked, response_format="verbose_json", timestamp_granularities=["segment"])
        assert (verbose.text, verbose.language, verbose.duration) == (timed.text, "english", 0.9)
        pieces = [[(piece.start, piece.end, piece.text) for piece in one.segments] for one in (verbose, timed)]
        assert pieces[0] == pieces[1]
        assert (await create(**asked, response_format="srt")).startswith("1\n00:00:00,")
        assert (await create(**asked, response_format="vtt")).startswith("WEBVTT\n\n00:00:00.")

    with_engine(checkpoint, work)


def test_what_is_asked_changes_the_answer(checkpoint):
    async def work(engine, client):
        file = ("speech.wav", wav(SPEECH))

        name = engine.config.served_model_name

        async def asked(**fields) -> str:
            return (await client.audio.transcriptions.create(file=file, model=name, **fields)).text

        plain = await asked(language="en")
        translated = await client.audio.translations.create(file=file, model=name)
        drawn = await asked(language="en", temperature=1.0, extra_body={"seed": 1})
        assert drawn == await asked(language="en", temperature=1.0, extra_body={"seed": 1})
        others = [
            await asked(language="de"), await asked(language="en", prompt="as before"), translated.text, drawn,
            await asked(language="en", temperature=1.0, extra_body={"seed": 2}),
        ]  # fmt: skip
        assert len({plain, *others}) == 6
        # several at once, and one of several windows
        texts = await asyncio.gather(*(asked(language="en") for _ in range(3)))
        assert set(texts) == {plain}
        long = await client.audio.transcriptions.create(file=("long.wav", wav(LONG, 44_100)[:200_000]), model=name)
        assert long.usage.seconds == pytest.approx(LONG.size / 44_100, abs=0.01)

    with_engine(checkpoint, work)


BAD = [
    ({"response_format": "diarized_json"}, "response_format='diarized_json': must be one of json, text"),
    ({"timestamp_granularities": ["word"], "response_format": "verbose_json"}, "words have no times here"),
    ({"timestamp_granularities": ["segment"]}, "only with response_format=verbose_json"),
    ({"stream": True, "response_format": "srt"}, "stream: not with response_format=srt"),
    ({"language": "klingon"}, "language='klingon': must be one that the model knows"),
    ({"temperature": 101}, "temperature"),
    ({"include": ["logprobs"]}, "include: not supported"),
    ({"chunking_strategy": {"type": "server_vad"}}, "chunking_strategy"),
    ({"extra_body": {"seed": "x"}}, "seed='x': is not what this field holds"),
    ({"model": "another"}, "does not exist"),
    ({"file": ("a.wav", b"RIFF")}, "file: the sound is refused"),
    ({"file": ("a.wav", b"")}, "file: this field is required"),
    ({"file": ("a.wav", wav(SPEECH)[:60])}, None),
    ({"file": ("a.wav", wav(np.zeros(0)))}, "it has no samples"),
    ({"file": ("a.wav", wav(SPEECH, 500))}, "500 samples a second"),
]


def test_what_is_refused(checkpoint):
    async def work(engine, client):
        name = engine.config.served_model_name
        for fields, words in BAD:
            asked = {"file": ("speech.wav", wav(SPEECH)), "model": name, **fields}
            if words is None:
                await client.audio.transcriptions.create(**asked)
                continue
            with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
                await client.audio.transcriptions.create(**asked)
            assert words in str(caught.value), (fields, str(caught.value))
        with pytest.raises(openai.BadRequestError, match="it belongs to /v1/audio/transcriptions"):
            await client.audio.translations.create(
                file=("a.wav", wav(SPEECH)), model=name, extra_body={"language": "en"}
            )
        with pytest.raises(openai.BadRequestError, match="there is nothing to hear"):
            await client.completions.create(model=name, prompt="text")
        with pytest.raises(openai.BadRequestError, match="there is nothing to hear"):
            await client.embeddings.create(model=name, input="text")
        with pytest.raises(openai.BadRequestError, match="messages: this model writes down what it hears"):
            await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "text"}])
        with pytest.raises(openai.APIStatusError) as caught:
            await client.audio.transcriptions.create(file=("a.wav", bytes(26 << 20)), model=name)
        assert caught.value.status_code == 413

    with_engine(checkpoint, work)


def test_a_model_that_does_not_listen():
    async def work(engine, client):
        with pytest.raises(openai.BadRequestError, match="does not listen"):
            await client.audio.transcriptions.create(file=("a.wav", wav(SPEECH)), model=engine.config.served_model_name)

    with_engine("embedded", work)


def test_subtitles():
    from quire.interfaces.server.openai.transcript_formats import as_text

    numbers = {"tokens": [], "temperature": 0.0, "avg_logprob": -1.0, "compression_ratio": 1.0, "no_speech_prob": 0.0}
    pieces = [
        Segment(id=0, seek=0, start=0.0, end=2.5, text=" one --> two", **numbers),
        Segment(id=1, seek=0, start=3661.25, end=3662.0, text=" three\n\n four", **numbers),
    ]
    transcript = Transcript(" one", "en", 3662.0, pieces)
    assert as_text(transcript, "srt") == (
        "1\n00:00:00,000 --> 00:00:02,500\none -> two\n\n2\n01:01:01,250 --> 01:01:02,000\nthree four\n"
    )
    assert as_text(transcript, "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\none -> two\n\n01:01:01.250 --> 01:01:02.000\nthree four\n"
    )


def test_a_start_suggests_a_file(checkpoint):
    example = example_for(ModelFacts.read(checkpoint), has_chat_template=False)
    line = try_line("http://127.0.0.1:8000", "w", example, has_key=False)
    assert line == "curl http://127.0.0.1:8000/v1/audio/transcriptions -F model=w -F file=@speech.wav"
