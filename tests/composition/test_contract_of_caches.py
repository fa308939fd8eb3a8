"""docs/kv-cache.md says of every cache what a hit needs and what empties it; here is the test of each line."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from quire import StructuredOutputsParams
from quire.config import EngineOptions, resolve
from quire.interfaces.structured_outputs import StructuredOutputs
from quire.renderer import Renderer
from quire.sampling_params import SamplingParams
from quire.testing.tiny_checkpoints import write_tokenizer

ROOT = Path(__file__).parents[2]
HERE = "tests/composition/test_contract_of_caches.py"
CONTRACT = {
    "prefix cache": (
        "tests/interfaces/test_update_weights.py::test_the_engine_becomes_the_other_model_and_back_again",
        "tests/differential/test_adapters.py::test_the_prefix_cache_is_used_within_an_adapter_and_not_between",
        "tests/engine_core/test_first_miss.py::test_cleared",
        "tests/engine_core/test_kv_events.py::test_clearing_is_one_event",
    ),
    "kept sequences, pinned prefixes": (
        "tests/interfaces/test_update_weights.py::test_a_pinned_prefix_must_go_first",
        "tests/differential/test_adapters.py::test_beams_vectors_and_turns_of_a_session",
        "tests/interfaces/test_restart.py::test_a_session_goes_on_and_computes_its_past_again",
    ),
    "swapped blocks": ("tests/interfaces/test_update_weights.py::test_requests_that_run_go_on_with_the_new_weights",),
    "tiers and stores": (
        "tests/kv_connectors/test_tiered.py::test_a_name_says_layout_format_and_secret",
        "tests/engine_core/test_shared_blocks.py::test_nobody_finds_what_other_weights_have_computed",
        "tests/differential/test_kv_tiers.py::test_other_weights_find_nothing",
        "tests/differential/test_kv_tiers.py::test_adapters_are_told_by_what_is_in_them",
        "tests/differential/test_kv_tiers.py::test_a_flipped_byte_and_a_missing_block_are_computed",
    ),
    "`kv_connector=memory`": (
        "tests/kv_connectors/test_connectors.py::test_a_layout_says_in_what_another_differs",
        "tests/interfaces/test_update_weights.py::test_keys_that_know_nothing_of_weights_are_refused",
    ),
    "adapters in memory": (
        "tests/differential/test_adapters.py::test_another_version_finds_no_old_blocks",
        "tests/differential/test_adapters.py::test_a_rollback_gives_the_old_bits_back_and_others_keep_their_blocks",
        "tests/engine_core/test_adapters.py::test_what_cannot_be_read_again_fails_its_requests_alone",
    ),
    "encoded images": (
        "tests/worker/test_image_rows.py::test_other_weights_encode_anew",
        "tests/worker/test_image_rows.py::test_the_least_recently_used_go_when_its_bytes_are_full",
        "tests/engine_core/test_encoder_budget.py::test_equal_images_of_those_who_share_no_cache_are_others",
    ),
    "packed weights on disk": (
        "tests/worker/test_packed_store.py::test_a_changed_checkpoint_is_packed_anew",
        "tests/worker/test_packed_store.py::test_each_form_has_a_file_of_its_own",
        "tests/worker/test_packed_store.py::test_a_damaged_file_is_written_anew",
        "tests/worker/test_packed_store.py::test_the_limit",
    ),
    "recorded programs": (
        "tests/interfaces/test_update_weights.py::test_the_engine_becomes_the_other_model_and_back_again",
        "tests/interfaces/test_update_weights.py::test_the_unit_of_scales_is_recorded",
    ),
    "compiled grammars": (
        "tests/structured_output/test_walk.py::test_compiled_grammars_are_kept_within_a_bound",
        f"{HERE}::test_a_new_engine_is_told_the_vocabulary_and_every_form_again",
    ),
    "chat template, tokenizer": (f"{HERE}::test_a_renderer_has_what_its_files_said_when_it_was_made",),
    "lost names": ("tests/engine_core/test_first_miss.py::test_a_great_pool_does_not_remember_without_bound",),
    "a router's view": (
        "tests/routing/test_router.py::test_a_replica_that_is_gone_is_not_chosen_and_comes_back_empty",
    ),
    "stored responses": ("tests/interfaces/server/test_openai_responses.py::test_a_response_is_kept_and_deleted",),
}


def test_the_page_has_a_line_for_every_test_and_a_test_for_every_line() -> None:
    text = (ROOT / "docs" / "kv-cache.md").read_text(encoding="utf-8")
    section = text.partition("## What every cache promises\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", section, flags=re.MULTILINE)
    head, _, *caches = lines
    assert head == "cache"
    assert caches == list(CONTRACT)


@pytest.mark.parametrize("name", sorted({name for names in CONTRACT.values() for name in names}))
def test_the_test_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert function in names


class Told:
    """An engine that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def control(self, name: str, args: dict[str, Any] | None = None) -> Any:
        self.calls.append(name)
        return True

    async def in_form_thread(self, function: Any, *args: Any) -> Any:
        return function(*args)


def checkpoint(folder: Path, template: str) -> Path:
    """A tokenizer and a template."""
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def renderer_of(folder: Path) -> Renderer:
    config, _ = resolve(EngineOptions(tokenizer=str(folder)))
    return Renderer.from_config(config)


def test_a_new_engine_is_told_the_vocabulary_and_every_form_again(tmp_path: Path) -> None:
    structured = StructuredOutputs(renderer_of(checkpoint(tmp_path, "x")), 320)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]"))

    async def main() -> None:
        for _ in range(2):
            engine: Any = Told()
            await structured.check(engine, params)
            await structured.check(engine, params)
            assert engine.calls == ["worker.open_vocabulary", "worker.prepare_form"]
            structured.engine_was_replaced()

    asyncio.run(main())


def test_a_renderer_has_what_its_files_said_when_it_was_made(tmp_path: Path) -> None:
    """The same folder, one after the other: nothing is remembered by its name."""
    chat = [{"role": "user", "content": "hello"}]
    first = renderer_of(checkpoint(tmp_path, "one {{ messages[0]['content'] }}"))
    second = renderer_of(checkpoint(tmp_path, "two {{ messages[0]['content'] }}"))
    assert first.decode(first.render_prompt(chat).token_ids) == "one hello"
    assert second.decode(second.render_prompt(chat).token_ids) == "two hello"
