"""Models that listen against Transformers, in every way of scheduling."""

from pathlib import Path

import numpy as np
import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import RequestError, UserError
from quire.testing.speech_checkpoints import (
    EN,
    FIRST_TIMESTAMP,
    GENERATION,
    NO_TIMESTAMPS,
    START,
    TRANSCRIBE,
    VOCAB_SIZE,
    make_speech_checkpoint,
    make_speech_model,
    speech_like,
)

NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=1)
TASK = [START, EN, TRANSCRIBE, NO_TIMESTAMPS]
SOUNDS = [speech_like(seconds, seed) for seed, seconds in enumerate((1.0, 0.6, 0.85, 1.0))]
PROMPTS = [
    {"prompt_token_ids": [*TASK, *range(65, 65 + number)], "multi_modal_data": {"audio": sound}}
    for number, sound in enumerate(SOUNDS)
]
WAYS = {
    "at once": {},
    "chunks of 7 end within sounds": {"max_num_batched_tokens": 7, "block_size": 4, "max_num_seqs": 4},
    "operator by operator": {"enforce_eager": True, "block_size": 4, "max_num_batched_tokens": 60, "max_num_seqs": 4},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "a sound a step": {"max_num_encoder_tokens": 8},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_speech_checkpoint(tmp_path_factory.mktemp("speech") / "whisper")


@pytest.fixture(scope="module")
def extract(checkpoint: Path):
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(checkpoint)
    return lambda sound: extractor(sound, sampling_rate=16_000, return_tensors="pt").input_features


@pytest.fixture(scope="module")
def expected(extract) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities; each from the whole sequence, as no cache can be wrong then."""
    model = make_speech_model()
    return [continued(model, extract(p["multi_modal_data"]["audio"]), p["prompt_token_ids"]) for p in PROMPTS]


@torch.inference_mode()
def continued(model, features, prompt: list[int]) -> tuple[list[int], list[float]]:
    token_ids = list(prompt)
    logprobs = []
    for number in range(NUM_TOKENS):
        logits = model(input_features=features, decoder_input_ids=torch.tensor([token_ids])).logits[0, -1]
        allowed = logits.clone()
        allowed[[*GENERATION["suppress_tokens"], *(GENERATION["begin_suppress_tokens"] if number == 0 else ())]] = -1e9
        token_ids.append(int(allowed.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[token_ids[-1]]))
    return token_ids[-NUM_TOKENS:], logprobs


def options_of(way: str) -> dict:
    return {"dtype": "float32", "device": "cpu", "num_threads": 1, "check_invariants": True, **WAYS[way]}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_those_of_transformers(way: str, checkpoint: Path, expected):
    with LLM(str(checkpoint), **options_of(way)) as llm:
        for _ in range(2):  # the second time from a warm prefix cache
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            check(outputs, expected)


def test_tokens_after_preemption(checkpoint: Path, expected):
    scarce = {"block_size": 1, "max_model_len": 80, "enable_prefix_caching": False, "preemption_mode": "recompute"}
    for num_blocks in range(170, 260, 10):
        with LLM(str(checkpoint), num_gpu_blocks_override=num_blocks, **scarce, **options_of("at once")) as llm:
            check(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)
            if llm.statistics()["recomputed_tokens_total"]:
                return
    raise AssertionError("nobody had to give way")


def test_blocks_of_a_sound_do_not_grow(checkpoint: Path):
    """50 tokens of sound and 24 of text, in blocks of 4: 13 of the sound, and 6 full ones of the text."""
    with LLM(str(checkpoint), block_size=4, **options_of("at once")) as llm:
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        assert llm.statistics()["num_blocks_cached"] == 13 + 6


def check(outputs, expected) -> None:
    for output, (token_ids, logprobs) in zip(outputs, expected, strict=True):
        [found] = output.outputs
        assert found.token_ids == token_ids
        ours = [step[token].logprob for step, token in zip(found.logprobs, found.token_ids, strict=True)]
        np.testing.assert_allclose(ours, logprobs, atol=2e-4)


@pytest.mark.parametrize("way", ["at once", "chunks of 7 end within sounds"])
def test_beams_equal_those_of_transformers(way: str, checkpoint: Path, extract):
    """Tokens that are never written are none of a beam's, either."""
    with LLM(str(checkpoint), **options_of(way)) as llm:
        found = llm.generate(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=8), use_tqdm=False)
    model = library(checkpoint)
    for prompt, output in zip(PROMPTS, found, strict=True):
        expected = beams_of(model, extract(prompt["multi_modal_data"]["audio"]), prompt["prompt_token_ids"])
        assert [one.token_ids for one in output.outputs] == [token_ids for token_ids, _ in expected]
        scores = [one.cumulative_logprob / len(one.token_ids) for one in output.outputs]
        np.testing.assert_allclose(scores, [score for _, score in expected], atol=2e-4)


def beams_of(model, features, prompt: list[int]) -> list[tuple[list[int], float]]:
    """Tokens and scores, by the search for all models: Whisper's own one knows other prompts."""
    from transformers import GenerationConfig
    from transformers.generation import GenerationMixin

    names = ("suppress_tokens", "begin_suppress_tokens", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    config = GenerationConfig(
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=8,
        max_length=None,
        return_dict_in_generate=True,
        output_scores=True,
        **{name: GENERATION[name] for name in names},
    )
    found = GenerationMixin.generate(
        model, input_features=features, decoder_input_ids=torch.tensor([prompt]), generation_config=config
    )
    sequences = [token_ids[len(prompt) :] for token_ids in found.sequences.tolist()]
    return list(zip(sequences, found.sequences_scores.tolist(), strict=True))


def test_several_outputs_of_a_sound(checkpoint: Path):
    """The same seed draws the same, however the sound is scheduled."""
    drawn = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=8, ignore_eos=True)
    found = []
    for way in ("at once", "chunks of 7 end within sounds"):
        with LLM(str(checkpoint), **options_of(way)) as llm:
            outputs = llm.generate(PROMPTS, drawn, use_tqdm=False)
            found.append([[tuple(one.token_ids) for one in output.outputs] for output in outputs])
    assert found[0] == found[1]
    assert all(len(set(several)) == 3 for several in found[0])
    assert not {token for several in found[0] for one in several for token in one} & {*GENERATION["suppress_tokens"]}


def test_prompt_logprobs_of_a_sound_are_refused(checkpoint: Path):
    with LLM(str(checkpoint), **options_of("operator by operator")) as llm:
        with pytest.raises(RequestError, match="prompt_logprobs: not compatible with a sound"):
            llm.generate(PROMPTS[0], SamplingParams(prompt_logprobs=1), use_tqdm=False)
        with pytest.raises(RequestError, match="nothing to hear"):
            llm.generate("text", SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_lora": True}, "enable_lora: WhisperForConditionalGeneration has an encoder"),
        (
            {"speculative_config": {"method": "draft_model", "model": "embedded", "num_speculative_tokens": 2}},
            "a draft would not know what the encoder of WhisperForConditionalGeneration has read",
        ),
        ({"kv_store": "host"}, "kv_store: of this model's sources"),
        ({"pipeline_parallel_size": 2}, "each looks at what its encoder made"),
        ({"context_parallel_size": 2}, "workers cannot share the keys of what an encoder made"),
    ],
)
def test_what_does_not_go_with_sounds(options: dict, words: str, checkpoint: Path):
    with pytest.raises(UserError, match=words):
        LLM(str(checkpoint), **options_of("operator by operator"), **options)


@pytest.mark.nightly
def test_tokens_of_two_workers(checkpoint: Path, expected):
    with LLM(str(checkpoint), tensor_parallel_size=2, **options_of("chunks of 7 end within sounds")) as llm:
        check(llm.generate(PROMPTS, GREEDY, use_tqdm=False), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_fewer_bits_give_the_same_tokens_in_every_way(options: dict, checkpoint: Path, expected):
    found = []
    for way in ("at once", "chunks of 7 end within sounds"):
        with LLM(str(checkpoint), **options_of(way), **options) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    # numbers of 8 bits leave some of such a model's choices as they were
    pairs = [(ours, theirs) for ours, (theirs, _) in zip(found[0], expected, strict=True)]
    assert sum(ours[0] == theirs[0] for ours, theirs in pairs) >= len(pairs) // 2


def test_features_equal_those_of_transformers(checkpoint: Path, extract):
    from quire.renderer.log_mel import log_mel

    for sound in SOUNDS:
        padded = np.pad(sound, (0, 16_000 - len(sound)))
        np.testing.assert_allclose(log_mel(padded, 80), extract(sound)[0].numpy(), atol=2e-5)


@pytest.fixture(scope="module")
def without_times(tmp_path_factory) -> Path:
    """Transformers would take what this model draws by chance for the times of pieces."""
    suppressed = [*GENERATION["suppress_tokens"], *range(FIRST_TIMESTAMP, VOCAB_SIZE)]
    return make_speech_checkpoint(tmp_path_factory.mktemp("speech") / "plain", suppress_tokens=suppressed)


def library(checkpoint: Path):
    """Transformers' own way from features to tokens."""
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


LONG = speech_like(3.3, 7)


@pytest.mark.parametrize("way", ["at once", "chunks of 7 end within sounds", "operator by operator"])
def test_transcripts_equal_those_of_transformers(way: str, without_times: Path, extract):
    model = library(without_times)
    with LLM(str(without_times), **options_of(way)) as llm:
        tokenizer = llm.renderer
        for task in ("transcribe", "translate"):
            found = llm.transcribe(SOUNDS, language="de", task=task)
            for sound, transcript in zip(SOUNDS, found, strict=True):
                ids = model.generate(extract(sound), language="de", task=task)[0].tolist()
                assert transcript.text == text_of(tokenizer, ids)
                assert transcript.language == "de"
        # the language is found out
        ids = model.generate(extract(SOUNDS[1]), task="transcribe")[0].tolist()
        assert llm.transcribe(SOUNDS[1])[0].text == text_of(tokenizer, ids)


def text_of(renderer, token_ids: list[int]) -> str:
    return renderer.decode([token for token in token_ids if token < 256]).strip()


@pytest.mark.parametrize("number", range(4))
def test_times_equal_those_of_transformers(number: int, checkpoint: Path, extract):
    """Sounds of one window that they fill, and one of several."""
    sound = [SOUNDS[0], SOUNDS[3], LONG, speech_like(2.0, 9)][number]
    features = extract(sound) if len(sound) <= 16_000 else of_whole(checkpoint, sound)
    theirs = library(checkpoint).generate(features, language="en", return_timestamps=True, return_segments=True)[
        "segments"
    ][0]
    with LLM(str(checkpoint), **options_of("at once")) as llm:
        [transcript] = llm.transcribe(sound, language="en", timestamps=True)
    assert [(round(float(s["start"]), 2), round(float(s["end"]), 2)) for s in theirs] == [
        (segment.start, segment.end) for segment in transcript.segments
    ]
    for segment, other in zip(transcript.segments, theirs, strict=True):
        # theirs end with the time at which the next one begins
        assert segment.tokens == other["tokens"].tolist()[: len(segment.tokens)]
    assert all(0 <= segment.no_speech_prob <= 1 and segment.avg_logprob < 0 for segment in transcript.segments)


def of_whole(checkpoint: Path, sound: np.ndarray) -> torch.Tensor:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(checkpoint)
    return extractor(
        sound, sampling_rate=16_000, return_tensors="pt", truncation=False, padding="longest"
    ).input_features
