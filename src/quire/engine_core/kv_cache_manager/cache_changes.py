"""Which contents come into the prefix cache and go from it, for those outside who send prompts where their beginnings
are (routing/).

A name that comes and goes within a step is not told of. Told of are full blocks of one group of layers: the first whose
window never passes a block. Bounded by the pool: a block has one name. Called by pool and prefix cache; `take` is
called when a step is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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


class NamedBlocks(Protocol):
    """The pool, as far as it is asked for names."""

    def find(self, key: BlockKey) -> int | None: ...
    def key_of(self, block: int) -> BlockKey | None: ...


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
        # how a name is known outside; within a process it may be what it is
        self.public_name: Callable[[bytes], int] = public_name
        self._group = group
        self._name_of_adapter = name_of_adapter
        self._block_size = block_size
        self._digest = digest
        self._tells_contents = tells_contents
        # by block: they know outside of the name that it has. A set of these names would take as much as the names.
        self._is_told = bytearray()
        # since then, in the order in which they changed: whether they know of the name outside, and whether a block is
        # found under it now
        self._changed: dict[bytes, tuple[bool, bool]] = {}
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
        if group != self._group or name in self._changed:
            return
        self._changed[name] = (False, True)
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
        group, name = key
        change = self._changed.get(name) if group == self._group else None
        if change is not None:
            self._changed[name] = (change[0], True)

    def unnamed(self, key: BlockKey, block: int) -> None:
        """No block is; it was this one."""
        group, name = key
        # a checkpoint of a state, and the end of an answer, are no part of a chain
        if group != self._group:
            return
        change = self._changed.get(name)
        if change is not None:
            self._changed[name] = (change[0], False)
        elif block < len(self._is_told) and self._is_told[block]:
            self._changed[name] = (True, False)
        if block < len(self._is_told):
            self._is_told[block] = False

    def cleared(self) -> None:
        """No block is found under any key."""
        self._is_told = bytearray()
        self._changed.clear()
        self._contents.clear()
        self._is_cleared = True

    def attach(self, pool: NamedBlocks) -> None:
        """Whose names they are."""
        self._pool = pool

    def told(self) -> list[int]:
        """Public names of all that was taken and is still there."""
        keys = [self._pool.key_of(block) for block, is_told in enumerate(self._is_told) if is_told]
        return [self.public_name(key[1]) for key in keys if key is not None]

    def take(self) -> list[KVEvent]:
        """What has changed, earliest first; a chain of new blocks is one event."""
        events: list[KVEvent] = []
        if self._is_cleared:
            self._is_cleared = False
            events.append(AllBlocksCleared())
        changed = self._changed
        contents = self._contents
        self._changed, self._contents = {}, {}
        for name, (_, is_there) in changed.items():
            if is_there:
                self._mark(self._pool.find((self._group, name)))
        if not self._tells_contents:
            return events + self._names_alone(changed)
        last = b""
        for name, (was_told, is_there) in changed.items():
            if is_there and not was_told:
                last = self._tell_stored(events, name, contents[name], last)
            elif was_told and not is_there:
                self._tell_removed(events, name)
        return events

    def _mark(self, block: int | None) -> None:
        assert block is not None, "a name has no block"
        if block >= len(self._is_told):
            self._is_told.extend(bytes(block + 1 - len(self._is_told)))
        self._is_told[block] = True

    def _names_alone(self, changed: dict[bytes, tuple[bool, bool]]) -> list[KVEvent]:
        """All that came as one event, and all that went."""
        came = [name for name, (was_told, is_there) in changed.items() if is_there and not was_told]
        went = [name for name, (was_told, is_there) in changed.items() if was_told and not is_there]
        events: list[KVEvent] = []
        if came:
            names = list(map(self.public_name, came))
            events.append(BlockStored(names, None, [], self._block_size, None))
        if went:
            events.append(BlockRemoved(list(map(self.public_name, went))))
        return events

    def _tell_stored(self, events: list[KVEvent], name: bytes, content: _Content, last: bytes) -> bytes:
        event = events[-1] if events else None
        keys = (content.other,) if content.other else None
        if isinstance(event, BlockStored) and content.parent == last and event.lora_id == (content.adapter or None):
            event.block_hashes.append(self.public_name(name))
            event.token_ids.extend(content.token_ids)
            event.extra_keys.append(keys)
        else:
            events.append(
                BlockStored(
                    block_hashes=[self.public_name(name)],
                    parent_block_hash=None if content.parent is None else self.public_name(content.parent),
                    token_ids=list(content.token_ids),
                    block_size=self._block_size,
                    lora_id=content.adapter or None,
                    lora_name=self._name_of_adapter(content.adapter),
                    extra_keys=[keys],
                )
            )
        return name

    def _tell_removed(self, events: list[KVEvent], name: bytes) -> None:
        event = events[-1] if events else None
        if isinstance(event, BlockRemoved):
            event.block_hashes.append(self.public_name(name))
        else:
            events.append(BlockRemoved(block_hashes=[self.public_name(name)]))
