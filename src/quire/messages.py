"""Everything that crosses a boundary between processes, as typed structs. No pickle, no objects with behaviour.

client -> core     EngineRequest, ExtendRequest, PermitTokens, AbortRequests, ControlCall
core   -> client   EngineOutputs, ControlReply, CacheChanged
core   -> worker   SchedulerOutput
worker -> core     StepOutput

Bulk data travels as columns: one-dimensional or two-dimensional int64 arrays (message_encoding.py).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from quire.sampling_params import SamplingParams
from quire.thought_marks import ThoughtMarks

IntArray: TypeAlias = npt.NDArray[np.int64]
# In SchedulerOutput.step_data: how many tokens to propose behind each row of the step, if it samples.
NUM_DRAFTS = "num_drafts"


def no_columns(width: int) -> IntArray:
    """A table of so many rows, and nothing in it."""
    return np.empty((width, 0), dtype=np.int64)


# Nobody can change what has no entries, so all share them.
NO_INTS: IntArray = np.empty(0, dtype=np.int64)
NO_PAIRS = no_columns(2)

# A request and the index of its sequence fit into one number, so that a step's output is two columns.
MOST_SEQUENCES = 1 << 10


def sequence_id_of(request_id: int, index: int) -> int:
    """The number that names sequence `index` of a request everywhere."""
    return request_id * MOST_SEQUENCES + index


def split_sequence_id(sequence_id: int) -> tuple[int, int]:
    """(request_id, index) of a sequence."""
    return divmod(sequence_id, MOST_SEQUENCES)


# Where a core has several clients, the number of each stands in the high bits of its ids (further_clients.py).
_COUNT_BITS = 44
MOST_CLIENTS = 512


def first_request_id_of(client: int) -> int:
    """From which on a client counts its requests."""
    return client << _COUNT_BITS


def client_of(request_id: int) -> int:
    return request_id >> _COUNT_BITS


def split_sequence_ids(sequence_ids: IntArray) -> tuple[list[int], list[int]]:
    """The same for many at once."""
    return (sequence_ids // MOST_SEQUENCES).tolist(), (sequence_ids & (MOST_SEQUENCES - 1)).tolist()


def int_array(values: Any) -> IntArray:
    return np.asarray(values, dtype=np.int64)


class Message(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """Root of what is sent over a socket; the class name travels as the tag."""


# ---------------------------------------------------------------------------------------------- client and core


class DecodingSpec(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a request is decoded, if not by sampling: a file of engine_core/decoding/ and its parameters."""

    method: str
    args: dict[str, Any] = {}


class KVTransfer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """KV that another engine takes over, or has left for this one, by way of the engine's connector (4.4.4)."""

    # where the KV of the prompt is put once it has been computed
    store: str | None = None
    # where the KV of the first num_fetch_tokens tokens lies; what is lost is computed
    fetch: str | None = None
    num_fetch_tokens: int = 0
    # of the tokens that are sent, so many at the end are no prompt, but output that was sampled elsewhere
    num_output_tokens: int = 0


class Tenancy(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """On whose behalf, where several share an engine."""

    name: str
    # its share of the tokens, relative to that of the others
    weight: float = 1.0
    # mixed into the names of blocks behind pinned prefixes, so that nobody else finds them; "": shared with all
    cache_scope: str = ""


class Media(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """An image, or the few frames of a video that an encoder sees together, cut as it takes them, and the tokens that
    stand for them: prompt[start : start + length].

    Or a source, with which a sequence begins: the features of a sound, 32-bit numbers of the given shape, or the ids of
    a text, [length]. All of its tokens are one row of cells. Or vectors that stand in the place of these tokens as they
    are: 32-bit numbers of the shape [length, width].
    """

    start: int
    length: int
    # bytes of levels from 0 to 255, patch by patch and colour by colour: the worker makes numbers of them
    pixels: bytes
    # [patches, colours, pixels]
    shape: list[int]
    # of levels between 0 and 1, for each colour
    mean: list[float]
    std: list[float]
    # so many equal frames are shown to the encoder
    num_frames: int = 1
    # patches in time, height and width; merge_size x merge_size of them are one token
    grid: list[int]
    merge_size: int
    # Behind each row of cells stand so many tokens, which are counted in `length`. They are text, if an encoder makes
    # nothing of them.
    line_ends: int = 0
    # of a grid that reaches beyond its image: so many cells above and below, and left and right, are no tokens
    margin: list[int] = []
    # names the content: over bytes, type and shape
    content_hash: bytes
    # its tokens see each other, so they are computed in one step
    is_whole: bool = False
    is_vectors: bool = False
    # Of frames of a video that follow others of it without a token between them, where time is a matter of positions:
    # by how many positions they stand behind its first ones.
    time: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def cells(self) -> tuple[int, int]:
        """Tokens in height and width."""
        above, left = self.margin or (0, 0)
        return self.grid[1] // self.merge_size - 2 * above, self.grid[2] // self.merge_size - 2 * left


class EngineRequest(Message):
    """Tokens in. `seed` is always set by the client, so that the core draws no randomness of its own."""

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int = 0
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    # of a request with a budget of thoughts
    thought_marks: ThoughtMarks | None = None
    priority: int = 0
    cache_salt: str = ""
    media: list[Media] = []
    # number of the adapter that it is computed with (core operation load_adapter); 0: the model alone
    adapter: int = 0
    # False: more of the prompt follows by ExtendRequest (streaming prefill, 4.4.4)
    is_final: bool = True
    # None: sampling.n sequences are sampled. Otherwise sampling.n says how many outputs there are.
    decoding: DecodingSpec | None = None
    # the tokens and blocks of sequence 0 are kept under this handle, unless the request as a whole fails or is aborted
    keep: str | None = None
    # the prompt follows the tokens kept under this handle, which itself does not change
    continues: str | None = None
    # what of its KV comes from elsewhere or goes there
    transfer: KVTransfer | None = None
    # "last", "mean" or "cls": nothing is sampled, and the prompt becomes a vector, which ends the request
    pooling: str = ""
    # the vector is what the model's head of labels makes of the pooled state
    is_classified: bool = False
    # or what its head of tokens says of these
    label_token_ids: list[int] = []
    # position from which on the prompt is the second of two texts; 0: it is one text
    second_start: int = 0
    # None: there is nobody to be told apart from
    tenant: Tenancy | None = None
    # so many tokens each sequence may sample before somebody outside has looked at them (PermitTokens); None: all
    permitted: int | None = None
    # nobody looks at an answer before it is whole: several tokens may take longer until they come, together
    in_bursts: bool = False


class ExtendRequest(Message):
    """More prompt tokens of a request that was added with is_final=False."""

    request_id: int
    token_ids: list[int]
    is_final: bool = False


class TokenMask(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is not to be sampled, and what alone may be; None: everything else."""

    banned: list[int] = []
    allowed: list[int] | None = None


class PermitTokens(Message):
    """Somebody outside has looked at the tokens of a sequence, which may have so many in all before the next look."""

    request_id: int
    index: int
    num_tokens: int
    # These come next, and not what would be sampled: of a sequence that waits.
    token_ids: list[int] = []
    # holds until the next of these messages
    mask: TokenMask | None = None


class AbortRequests(Message):
    """Sequences of these requests end with finish reason "abort"; unknown ids are ignored."""

    request_ids: list[int] = []
    # single sequences, for a stop string that one of several sequences has met
    sequence_ids: list[int] = []


class ControlCall(Message):
    """A management operation: a name and arguments. `call_id` pairs the reply."""

    call_id: int
    name: str
    args: dict[str, Any] = {}


class ControlReply(Message):
    call_id: int
    result: Any = None
    error: str | None = None


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities at one position: the chosen token first, then the best ones in falling order."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class SequenceLogprobs(msgspec.Struct, array_like=True):
    """One entry a token of this message, in order."""

    sequence_id: int
    positions: list[TokenLogprobs]


class SequenceStart(msgspec.Struct, array_like=True):
    """A sequence computes for the first time; so many of its tokens came from the prefix cache or a connector.

    `first_miss` says why the next block was not there too: `new` (not computed before, as far as is remembered),
    `evicted`, `cleared` (the cache was emptied meanwhile), `no_state` (its tokens are there, but no state of the
    recurrent layers behind them), `whole_range` (it would end inside of an image), `every_position` (the request needs
    all positions computed), `off`. Empty where nothing more can be cached of such a prompt.
    """

    sequence_id: int
    num_cached_tokens: int
    first_miss: str = ""


class FirstToken(msgspec.Struct, array_like=True):
    """Comes with a sequence's first token: of all tokens that steps have computed since its first step, the part that
    was others'. Not of beams."""

    sequence_id: int
    share_of_others: float


class SequenceEnd(msgspec.Struct, array_like=True):
    """finish_reason is stop, length, abort or error. stop_reason is the stop token id, if one was asked for."""

    sequence_id: int
    finish_reason: str
    stop_reason: int | None = None
    error: str | None = None
    # of speculation: drafts that were verified for this sequence, and how many of them were right
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    is_refused: bool = False  # what was asked for cannot be done: an error of the client
    is_lost: bool = False  # its engine died, and others go on


class SequenceVector(msgspec.Struct, array_like=True):
    """What a prompt has become that is pooled: float32 numbers, as bytes."""

    sequence_id: int
    values: bytes


class EngineOutputs(Message):
    """What one step brought: token_ids[i] belongs to sequence_ids[i]; a sequence may occur more than once, in order."""

    step: int
    sequence_ids: np.ndarray = NO_INTS
    token_ids: np.ndarray = NO_INTS
    starts: list[SequenceStart] = []
    firsts: list[FirstToken] = []
    ends: list[SequenceEnd] = []
    logprobs: list[SequenceLogprobs] = []
    prompt_logprobs: list[SequenceLogprobs] = []
    # each with the end of its sequence
    vectors: list[SequenceVector] = []

    @property
    def is_empty(self) -> bool:
        return not (len(self.sequence_ids) or self.starts or self.ends or self.prompt_logprobs)


class EngineReady(Message):
    """First message of a core: the resolved configuration as a client needs it."""

    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    report: list[str] = []
    # what computing a token took when the model was measured: how long a step may take before somebody worries
    seconds_per_token: float = 0.0
    # and a step of one token
    seconds_per_step: float = 0.0
    # from which on this client is to count its requests
    first_request_id: int = 0


class CacheChanged(Message):
    """What a step has changed in the prefix cache, by the public names of blocks (chain_hashes.py): for a client that
    chooses between several cores. `is_cleared` comes before the others."""

    stored: list[int] = []
    removed: list[int] = []
    is_cleared: bool = False


class EngineFailed(Message):
    """Last message of a core that gives up. kind is the class name in quire.errors."""

    kind: str
    error: str


ToCore: TypeAlias = EngineRequest | ExtendRequest | PermitTokens | AbortRequests | ControlCall
ToClient: TypeAlias = EngineOutputs | ControlReply | EngineReady | EngineFailed | CacheChanged


# ---------------------------------------------------------------------------------------------- core and worker


class AdmittedSequence(msgspec.Struct, kw_only=True):
    """A sequence gets its row, for life. The worker samples from it whenever all its tokens are computed."""

    row: int
    sequence_id: int
    token_ids: np.ndarray
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    thought_marks: ThoughtMarks | None = None
    # Above 0 the core chooses the next token (beam search): the worker answers with so many candidates.
    num_candidates: int = 0
    # False: the prompt is still arriving, so nothing is sampled until an AppendedTokens with is_final=True
    is_final: bool = True
    # prompt positions whose log-probabilities were reported: a sequence that had lost its row is admitted again
    num_reported_positions: int = 0
    # in the order of their places
    media: list[Media] = []
    adapter: int = 0
    mask: TokenMask | None = None
    # "last", "mean" or "cls": the row samples nothing; when all it has is computed, the worker answers with a vector
    pooling: str = ""
    is_classified: bool = False
    label_token_ids: list[int] = []
    second_start: int = 0
    in_bursts: bool = False


class ForkedSequence(msgspec.Struct, kw_only=True):
    """A child gets a row: tokens [0, num_total_tokens), block tables and sampling state of its parent, its own seed.

    Forks apply in order. The row may have belonged to a sequence that was freed since the last step: no release tells
    of that one, so a fork overwrites whatever the row held.
    """

    parent_row: int
    row: int
    sequence_id: int
    num_total_tokens: int
    num_computed_tokens: int
    seed: int


class AppendedTokens(msgspec.Struct, kw_only=True):
    """Tokens that the core chose: streamed input, a beam's choice, a forced token."""

    row: int
    token_ids: list[int]
    is_final: bool = True


class SchedulerOutput(msgspec.Struct, kw_only=True):
    """One step: who computes how many tokens, and what changed since the last one. Nothing else.

    The worker applies it in the order of the fields. rows[i] computes num_tokens[i] tokens from its own
    num_computed_tokens on; if that reaches its num_total_tokens (and its input is final) it samples.
    """

    step: int
    # first: a parent may be released in the same step, and a released row may be admitted again
    forked: list[ForkedSequence] = []
    released: list[int] = []
    admitted: list[AdmittedSequence] = []
    # (row, num_computed_tokens): resumed after a preemption, at 0 or at a prefix hit
    progress: list[tuple[int, int]] = []
    appended: list[AppendedTokens] = []
    # by row: what holds for its choices from now on, in place of what was said before
    masked: dict[int, TokenMask | None] = {}
    # columns (group, row, index in the block table, block id), shape [4, n]
    block_writes: np.ndarray = no_columns(4)
    # columns (block, host block): written to swap space before anything else touches the cache in this step
    swapped_out: np.ndarray = NO_PAIRS
    # columns (host block, block): brought back, before the copies
    swapped_in: np.ndarray = NO_PAIRS
    # columns (source block, destination block), shape [2, n]: all copied before any write of this step
    block_copies: np.ndarray = NO_PAIRS
    rows: np.ndarray = NO_INTS
    num_tokens: np.ndarray = NO_INTS
    # Tokens that each row may get: above 1 where all of them sample and run on. How many come is up to the worker,
    # within the blocks that the rows have. Those behind the first stand in the answer's `speculated` as drafts that
    # were looked at and accepted.
    most_tokens: int = 1
    step_data: dict[str, Any] = {}

    @property
    def num_scheduled_tokens(self) -> int:
        return int(self.num_tokens.sum())

    @property
    def num_column_bytes(self) -> int:
        """What its columns hold, tokens of those that are admitted included: nearly all of it."""
        columns = self.rows.nbytes + self.num_tokens.nbytes + self.block_writes.nbytes + self.block_copies.nbytes
        moves = self.swapped_out.nbytes + self.swapped_in.nbytes
        return columns + moves + sum(one.token_ids.nbytes for one in self.admitted)


class Candidates(msgspec.Struct, array_like=True):
    """The most probable next tokens of a row, best first (equal ones by token id), with their log-probabilities."""

    token_ids: list[int]
    # after penalties, which may move them all
    logprobs: list[float]
    # logarithm of the sum of the probabilities of all tokens, after penalties
    log_total: float = 0.0


# What a worker counts in a step and the core adds up: rows whose logits were not finite, rows that got no token yet,
# steps that failed as a whole and were divided, those short of memory, prompts that a connector could not store, and
# images that were encoded.
STEP_COUNTS = (
    "num_nan_rows",
    "num_late_rows",
    "num_divided_steps",
    "num_out_of_memory",
    "num_failed_stores",
    "num_images_encoded",
)


class StepOutput(msgspec.Struct, kw_only=True):
    """token_ids[i] was sampled for rows[i]; a row may occur more than once, in order (speculation)."""

    step: int
    rows: np.ndarray = NO_INTS
    token_ids: np.ndarray = NO_INTS
    logprobs: dict[int, list[TokenLogprobs]] = {}
    # of the prompt positions computed in this step; the first prompt token has none
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    # of the rows whose next token the core chooses
    candidates: dict[int, Candidates] = {}
    vectors: dict[int, bytes] = {}  # float32 numbers, of rows that pool and have computed all they have
    # rows that failed alone, with the reason
    failures: dict[int, str] = {}
    blamed: list[int] = []  # those of them that failed by what their requests asked for
    # columns (row, num_computed_tokens, num_total_tokens, num_verified, num_accepted), shape [5, n]: exact numbers
    # after the step, new drafts included, of rows that had drafts before it, were asked for some, get a token later, or
    # have got several
    speculated: np.ndarray = no_columns(5)
    # columns (row, token) of the drafts that stand behind these rows now, for stages of a pipeline that draft nothing
    drafts: np.ndarray = no_columns(2)
    # rows that have computed all they had and get their token in a later step
    late: np.ndarray = NO_INTS
    # of a stage of a pipeline: its part of blocks that are kept elsewhere, by name
    spilled: dict[bytes, bytes] = {}
    counts: dict[str, int] = {}  # of STEP_COUNTS, what was not 0


# Names of the layers of a model that drafts begin with this.
DRAFT_PREFIX = "draft."
# where an encoder reads what a sequence begins with: that, and what follows
SOURCE = "source"
TEXT = "text"


class LayerSpec(msgspec.Struct, kw_only=True, frozen=True):
    """What one layer keeps: keys and values of every token, or a state of the whole sequence.

    Attention layers with equal specs form a group; those of a draft join it.
    """

    name: str
    num_kv_heads: int
    key_dim: int
    # 0: a value is a part of its key
    value_dim: int
    bytes_per_element: int
    # of a key and its value, where their elements are codes
    scale_bytes: int = 0
    # tokens that a token sees at most, itself included; 0: all
    sliding_window: int = 0
    # they begin at multiples of the window, which does not slide then
    is_chunked: bool = False
    # SOURCE: of a sequence only the tokens of its source are kept; TEXT: only those behind them
    part: str = ""
    # of a recurrent layer, whatever the sequence's length, header included (state_layout.py); the numbers above are 0
    state_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        # 2.1.2: 2 x heads x dimension x size, per layer
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * self.bytes_per_element + self.scale_bytes)

    @property
    def is_draft(self) -> bool:
        return self.name.startswith(DRAFT_PREFIX)


class WorkerCapacity(msgspec.Struct, kw_only=True):
    """What a worker measured after loading: layers that keep a cache, and the bytes left for it."""

    layers: list[LayerSpec]
    available_bytes: int
    explanation: str
    # of the same memory, all that could be had now: for a size that was asked for
    free_bytes: int = 0
    # what the largest step takes, and what is set aside
    step_bytes: int = 0
    # bytes of host memory that swap space may take, and what computing a token took in the step that was measured
    host_bytes: int = 0
    seconds_per_token: float = 0.0
    # a step of one token
    seconds_per_step: float = 0.0
    # what a token takes longer, in all layers together, for each token before it that it sees
    seconds_per_pair: float = 0.0
    # where workers have some layers each, how many of `layers` belong to the first, the second ...
    num_layers_of_stages: list[int] = []
