"""/v1/rerank, /v1/score, /v1/classify and /pooling on real engines of tiny models that make no tokens."""

import asyncio
import json

import httpx2 as httpx
import numpy as np
import pytest
import torch

from quire import AsyncLLM
from quire.config.model_facts import ModelFacts
from quire.interfaces.gateway.welcome import example_for
from quire.interfaces.server.app import create_app
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.testing.tiny_encoders import make_encoder, write_pair_tokenizer

QUERY = "red fruit"
DOCUMENTS = ["the train to bern", "a green apple", "apples, red ones"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def reranker(folder):
    return write_pair_tokenizer(make_encoder(folder / "reranker", "bert", is_classifier=True, num_labels=1))


@pytest.fixture(scope="module")
def classifier(folder):
    return make_encoder(folder / "classifier", "modernbert", is_classifier=True, id2label={0: "no", 1: "yes"})


@pytest.fixture(scope="module")
def embedder(folder):
    return make_encoder(folder / "embedder", "roberta")


@pytest.fixture(scope="module")
def judge(folder):
    """As Qwen3-Reranker comes: a decoder that says yes or no, and a template for two texts."""
    path = make_checkpoint(folder / "judge", "qwen3_tied")
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.LogitScore", "path": "1_LogitScore"}]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_LogitScore").mkdir()
    (path / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 121, "false_token_id": 110}))
    template = "{% for m in messages %}{% if m['role'] in ('query', 'document') %}<{{ m['content'] }}>{% endif %}"
    (path / "chat_template.jinja").write_text(template + "{% endfor %}?")
    return path


def with_engine(path, work, **options):
    """`work` with something that posts and gives (status, body)."""

    async def main():
        async with AsyncLLM(
            str(path), device="cpu", dtype="float32", num_threads=1, engine_process=False, **options
        ) as engine:
            transport = httpx.ASGITransport(create_app(engine))
            async with httpx.AsyncClient(transport=transport, base_url="http://quire") as http:

                async def post(url, **body):
                    answer = await http.post(url, json=body)
                    return answer.status_code, answer.json()

                return await work(post)

    return asyncio.run(asyncio.wait_for(main(), 60))


def scores_of_transformers(path) -> list[float]:
    from transformers import AutoModelForSequenceClassification, BertTokenizerFast

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = BertTokenizerFast.from_pretrained(path)
    with torch.inference_mode():
        logits = [model(**tokenizer(QUERY, one, return_tensors="pt")).logits[0, 0] for one in DOCUMENTS]
    return torch.stack(logits).tolist()


def test_documents_are_ranked_as_transformers_would(reranker):
    expected = scores_of_transformers(reranker)
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])

    async def work(post):
        status, body = await post("/v1/rerank", query=QUERY, documents=DOCUMENTS, use_activation=False)
        assert status == 200
        assert [one["index"] for one in body["results"]] == order
        assert [one["document"]["text"] for one in body["results"]] == [DOCUMENTS[index] for index in order]
        found = [one["relevance_score"] for one in body["results"]]
        assert found == pytest.approx([expected[index] for index in order], abs=1e-5)
        assert body["usage"]["total_tokens"] > 0
        status, best = await post(
            "/v2/rerank", query=QUERY, documents=[{"text": one} for one in DOCUMENTS], top_n=1, return_documents=False
        )
        assert list(best["results"][0]) == ["index", "relevance_score"]
        assert best["results"][0]["index"] == order[0]
        sigmoid = 1 / (1 + np.exp(-expected[order[0]]))
        assert best["results"][0]["relevance_score"] == pytest.approx(sigmoid, abs=1e-5)
        status, scores = await post("/score", text_1=QUERY, text_2=DOCUMENTS, priority=3, cache_salt="mine")
        assert [one["score"] for one in scores["data"]] == pytest.approx(
            [1 / (1 + np.exp(-x)) for x in expected], abs=1e-5
        )
        for url, body, param in (
            ("/v1/embeddings", {"input": "a"}, "model"),
            ("/v1/completions", {"prompt": "a", "max_tokens": 1}, "model"),
            ("/v1/rerank", {"query": QUERY, "documents": ["a"], "model": "x"}, None),
            ("/v1/score", {"text_1": "a", "text_2": "b", "model": "x"}, None),
            ("/v1/rerank", {"query": QUERY, "documents": []}, "documents"),
            ("/v1/rerank", {"query": QUERY, "documents": ["a", 3]}, "documents[1]"),
            ("/v1/rerank", {"query": QUERY, "documents": ["a"] * 2049}, "documents"),
            ("/v1/rerank", {"query": QUERY, "documents": ["a", "b " * 200]}, "documents[1]"),
            ("/v1/rerank", {"query": QUERY, "documents": ["a", "b " * 90_000]}, "documents[1]"),
            ("/v1/score", {"text_1": "b " * 90_000, "text_2": "a"}, "text_1"),
            ("/v1/rerank", {"query": QUERY, "documents": ["a"], "top_n": 0}, "top_n"),
            ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
            ("/v1/rerank", {"query": QUERY, "documents": ["a"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ):
            status, answer = await post(url, **body)
            assert status == (400 if param else 404), answer
            assert answer["error"]["param"] == (param or "model"), answer
        # a small body by which one text would be read two thousand times
        status, answer = await post("/v1/rerank", query="a" * 5000, documents=["a"] * 2048)
        assert (answer["error"]["param"], "fewer documents" in answer["error"]["message"]) == ("query", True)

    with_engine(reranker, work)


def test_labels_and_their_probabilities(classifier):
    async def work(post):
        status, body = await post("/v1/classify", input=["a", "bcd"])
        assert status == 200
        for one in body["data"]:
            assert sum(one["probs"]) == pytest.approx(1)
            assert one["label"] == ("no", "yes")[int(np.argmax(one["probs"]))]
            assert one["num_classes"] == 2
        _, raw = await post("/classify", input=[[97], [98, 99, 100]], use_activation=False)
        logits = np.array([one["probs"] for one in raw["data"]])
        softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        assert np.allclose(softmax, [one["probs"] for one in body["data"]], atol=1e-6)
        _, numbers = await post("/pooling", input="a")
        assert numbers["data"][0]["data"] == body["data"][0]["probs"]
        _, numbers = await post("/pooling", input=[97], use_activation=False, add_special_tokens=False)
        assert numbers["data"][0]["data"] == raw["data"][0]["probs"]
        assert (await post("/classify", input="a", model="x"))[0] == 404
        for url, fields in (("/v1/rerank", {"query": "a", "documents": ["b"]}), ("/v1/embeddings", {"input": "a"})):
            status, answer = await post(url, **fields)
            assert (status, answer["error"]["param"]) == (400, "model")
            assert "labels" in answer["error"]["message"]

    with_engine(classifier, work)


def test_a_model_of_embeddings_compares_vectors(embedder):
    async def work(post):
        _, scores = await post("/v1/score", text_1=QUERY, text_2=DOCUMENTS)
        _, vectors = await post("/pooling", input=[QUERY, *DOCUMENTS], task="embed", normalize=False)
        query, *others = (np.array(one["data"]) for one in vectors["data"])
        cosines = [one @ query / np.linalg.norm(one) / np.linalg.norm(query) for one in others]
        assert [one["score"] for one in scores["data"]] == pytest.approx(cosines, abs=1e-5)
        _, ranking = await post("/rerank", query=QUERY, documents=DOCUMENTS)
        assert [one["relevance_score"] for one in ranking["results"]] == pytest.approx(sorted(cosines)[::-1], abs=1e-5)
        status, answer = await post("/classify", input="a")
        assert (status, answer["error"]["param"]) == (400, "model")
        for task in ("classify", "token_embed", "plugin", "nothing"):
            status, answer = await post("/pooling", input="a", task=task)
            assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, "task", "BadRequestError")
            words = "No IOProcessor plugin" if task == "plugin" else f"Unsupported task: {task!r}"
            assert answer["error"]["message"].startswith(words)
        status, answer = await post("/v1/embeddings", input=[[97] * 60], pooling="cls")
        assert status == 400
        assert "max_num_batched_tokens=50" in answer["error"]["message"]

    with_engine(embedder, work, max_num_batched_tokens=50)


def test_texts_of_one_length(embedder):
    async def work(post):
        for padding, num_tokens in ((None, 1), ("do_not_pad", 1), ("max_length", 40)):
            _, answer = await post("/v1/embeddings", input=[97], padding=padding)
            assert answer["usage"]["prompt_tokens"] == num_tokens
        # what fills a text of this model up
        _, filled = await post("/v1/embeddings", input=[97, *[1] * 39])
        assert filled["data"] == answer["data"]
        status, answer = await post("/v1/embeddings", input=[97], padding="longest")
        assert (status, answer["error"]["param"]) == (400, "padding")
        assert answer["error"]["message"].endswith("(literal_error).")

    with_engine(embedder, work, max_model_len=40)


def test_a_decoder_that_says_yes_or_no(judge):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32).eval()
    prompts = [list(f"<{QUERY}><{one}>?".encode()) for one in DOCUMENTS]
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    expected = [float(one[121] - one[110]) for one in logits]

    async def work(post):
        status, raw = await post("/v1/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False)
        assert status == 200, raw
        assert [one["score"] for one in raw["data"]] == pytest.approx(expected, abs=1e-3)
        _, scores = await post("/v1/score", text_1=QUERY, text_2=DOCUMENTS)
        assert [one["score"] for one in scores["data"]] == pytest.approx(
            1 / (1 + np.exp(-np.array(expected))), abs=1e-4
        )

    with_engine(judge, work, max_model_len=128)


def judges(num_labels: int) -> dict:
    """What config.json says of a head of labels."""
    labels = {str(number): f"label {number}" for number in range(num_labels)}
    return {"architectures": ["LlamaForSequenceClassification"], "id2label": labels}


@pytest.mark.parametrize(
    ("path", "body", "num_labels"),
    [
        ("/v1/rerank", {"query": "ab", "documents": ["c", "de"]}, 1),
        ("/v1/score", {"text_1": "ab", "text_2": ["c", "de"]}, 1),
        ("/v1/classify", {"input": ["abc", "abde"]}, 4),
        ("/pooling", {"input": ["abc", "abde"]}, 4),
    ],
)
def test_what_reaches_the_engine(run, served, path, body, num_labels):
    """Priorities, salts and counts are those of requests for vectors."""

    async def main():
        async with served(config=judges(num_labels)) as server:
            answer = await server.post(path, {**body, "priority": 4, "cache_salt": "mine"})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
            first, second = server.requests()
            assert [first.prompt_token_ids, second.prompt_token_ids] == [[97, 98, 99], [97, 98, 100, 101]]
            for one in (first, second):
                assert (one.priority, one.cache_salt, one.is_classified, one.pooling) == (4, "mine", True, "last")

    run(main())


def test_a_model_that_generates_ranks_nothing(folder):
    async def work(post):
        for url, fields in (("/v1/score", {"text_1": "a", "text_2": "b"}), ("/v1/classify", {"input": "a"})):
            status, answer = await post(url, **fields)
            assert (status, answer["error"]["param"]) == (400, "model")

    with_engine(make_checkpoint(folder / "llama", "llama"), work, max_model_len=64)


@pytest.mark.parametrize("kind", ["reranker", "classifier", "embedder"])
def test_what_a_start_up_says_to_try_is_answered(kind, request):
    path = request.getfixturevalue(kind)
    example = example_for(ModelFacts.read(path), has_chat_template=False)

    async def work(post):
        status, _ = await post(example.path, **example.body)
        assert status == 200

    with_engine(path, work)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_that_is_cut_keeps_the_tokens_around_it(folder, side):
    path = write_pair_tokenizer(make_encoder(folder / f"cut_{side}", "bert"))
    kept = {"left": "d e f", "right": "a b c"}[side]

    async def work(post):
        whole = await post("/v1/embeddings", input=kept)
        cut = await post("/v1/embeddings", input="a b c d e f", truncate_prompt_tokens=5, truncation_side=side)
        assert whole[1]["usage"]["prompt_tokens"] == 5
        assert cut[1]["data"] == whole[1]["data"]
        # no room for a text between them
        status, one = await post("/v1/embeddings", input="a b c d e f", truncate_prompt_tokens=1)
        assert (status, one["usage"]["prompt_tokens"]) == (200, 1)

    with_engine(path, work)
