"""Which contents come into the prefix cache and go from it, for those outside who send prompts where their beginnings
are (routing/).

A name that comes and goes within a step is not told of. Told of are full blocks of one group of layers: the first whose
window never passes a block. Bounded by the pool: a block has one name. Called by pool and prefix cache; `take` is
called when a step is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.chain_hashes import public_name
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

if TYPE_CHECKING:
    from quire.engine_core.request import Sequence

# (group of layers, chain hash): the same tokens have other content in another group
BlockKey = tuple[int, bytes]


@dataclass(slots=True)
class _Content:
    """What a name stands for."""

    parent: bytes | None
    token_ids: list[int]
    adapter: int
    # "" or what tells it from the same tokens of others, without saying what that is
    other: str


class CacheChangeLog:
    """Keeps what has changed since the last time it was taken."""

    def __init__(
        self,
        group: int,
        block_size: int,
        digest: Callable[[bytes], bytes],
        name_of_adapter: Callable[[int], str | None] = lambda _: None,
        *,
        tells_contents: bool = True,
    ) -> None:
        """`group`: whose blocks are told of. `digest`: keyed, for what nobody outside may read. `tells_contents`: not
        where names are enough for those outside."""
        self._group = group
        self._name_of_adapter = name_of_adapter
        self._block_size = block_size
        self._digest = digest
        self._tells_contents = tells_contents
        # names of which they know outside: nearly as many as blocks, and a dict takes half of what a set does
        self._told: dict[bytes, None] = {}
        # since then, in the order in which they changed: whether a block is found under the name now
        self._changed: dict[bytes, bool] = {}
        # of those that are not told of yet
        self._contents: dict[bytes, _Content] = {}
        self._is_cleared = False

    @staticmethod
    def group_of(groups: list[KVGroup]) -> int:
        """The group that says most about who can serve a prefix."""
        whole = [number for number, group in enumerate(groups) if not group.sliding_window]
        return whole[0] if whole else 0

    def stored(self, group: int, sequence: Sequence, index: int, hashes: list[bytes]) -> None:
        """Block `index` of this sequence has got the name hashes[index]."""
        name = hashes[index]
        if group != self._group or name in self._told or name in self._changed:
            return
        self._changed[name] = True
        if self._tells_contents:
            self._contents[name] = self._content_of(sequence, index, hashes[index - 1] if index else None)

    def _content_of(self, sequence: Sequence, index: int, parent: bytes | None) -> _Content:
        size = self._block_size
        request = sequence.request
        end = (index + 1) * size
        secrets = [request.message.cache_salt.encode(), request.scope]
        media = request.message.media
        secrets += [image.content_hash for image in media if image.start < end and image.end > index * size]
        return _Content(
            parent=parent,
            token_ids=sequence.token_ids(index * size, end).tolist(),
            adapter=request.message.adapter,
            other=self._digest(b"".join(secrets)).hex() if any(secrets) else "",
        )

    def named(self, key: BlockKey) -> None:
        """A block is found under this key from now on. What is not known yet is told with its content: `stored`."""
        self._change(key, is_there=True)

    def unnamed(self, key: BlockKey) -> None:
        """No block is."""
        self._change(key, is_there=False)

    def cleared(self) -> None:
        """No block is found under any key."""
        self._told.clear()
        self._changed.clear()
        self._contents.clear()
        self._is_cleared = True

    def _change(self, key: BlockKey, *, is_there: bool) -> None:
        group, name = key
        # a checkpoint of a state, and the end of an answer, are no part of a chain
        if group != self._group:
            return
        if name in self._changed or name in self._told:
            self._changed[name] = is_there

    def told(self) -> list[int]:
        """Public names of all that was taken and is still there."""
        return [public_name(name) for name in self._told]

    def take(self) -> list[KVEvent]:
        """What has changed, earliest first; a chain of new blocks is one event."""
        events: list[KVEvent] = []
        if self._is_cleared:
            self._is_cleared = False
            events.append(AllBlocksCleared())
        changed = self._changed
        contents = self._contents
        self._changed, self._contents = {}, {}
        told = self._told
        if not self._tells_contents:
            return events + self._names_alone(changed)
        last = b""
        for name, is_there in changed.items():
            if is_there and name not in told:
                last = self._tell_stored(events, name, contents[name], last)
                told[name] = None
            elif not is_there and name in told:
                self._tell_removed(events, name)
                del told[name]
        return events

    def _names_alone(self, changed: dict[bytes, bool]) -> list[KVEvent]:
        """All that came as one event, and all that went."""
        told = self._told
        came = [name for name, is_there in changed.items() if is_there and name not in told]
        went = [name for name, is_there in changed.items() if not is_there and name in told]
        told.update(dict.fromkeys(came))
        for name in went:
            del told[name]
        events: list[KVEvent] = []
        if came:
            names = list(map(public_name, came))
            events.append(BlockStored(names, None, [], self._block_size, None))
        if went:
            events.append(BlockRemoved(list(map(public_name, went))))
        return events

    def _tell_stored(self, events: list[KVEvent], name: bytes, content: _Content, last: bytes) -> bytes:
        event = events[-1] if events else None
        keys = (content.other,) if content.other else None
        if isinstance(event, BlockStored) and content.parent == last and event.lora_id == (content.adapter or None):
            event.block_hashes.append(public_name(name))
            event.token_ids.extend(content.token_ids)
            event.extra_keys.append(keys)
        else:
            events.append(
                BlockStored(
                    block_hashes=[public_name(name)],
                    parent_block_hash=None if content.parent is None else public_name(content.parent),
                    token_ids=list(content.token_ids),
                    block_size=self._block_size,
                    lora_id=content.adapter or None,
                    lora_name=self._name_of_adapter(content.adapter),
                    extra_keys=[keys],
                )
            )
        return name

    @staticmethod
    def _tell_removed(events: list[KVEvent], name: bytes) -> None:
        event = events[-1] if events else None
        if isinstance(event, BlockRemoved):
            event.block_hashes.append(public_name(name))
        else:
            events.append(BlockRemoved(block_hashes=[public_name(name)]))
