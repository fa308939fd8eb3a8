"""Each processor on its own, on logits that can be read."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from quire.messages import AdmittedSequence, ForkedSequence, int_array
from quire.sampling_params import SamplingParams
from quire.thought_marks import ThoughtMarks
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors import built_in_processors

VOCAB = 10
ROWS = int_array([5, 2, 7])


ALLOWED, BAD_WORDS, MIN_TOKENS, LOGIT_BIAS, PENALTIES, _OWN, THOUGHTS = range(7)


class Bench:
    """A processor over a row table; row 5 of the batch uses it, 2 and 7 do not."""

    def __init__(self, number):
        self.table = RowTable(8, 64)
        self.processor = built_in_processors(self.table)[number]
        for row in ROWS.tolist():
            self.admit(row, [1])

    def admit(self, row, tokens, *, num_prompt=1, eos=(), bad_words=(), marks=None, **sampling):
        sequence = AdmittedSequence(
            row=row,
            sequence_id=row,
            token_ids=int_array(tokens),
            num_prompt_tokens=num_prompt,
            num_computed_tokens=0,
            sampling=SamplingParams(**sampling),
            seed=0,
            eos_token_ids=list(eos),
            bad_words_token_ids=list(bad_words),
            thought_marks=marks,
        )
        self.table.admit(sequence)
        self.processor.admit(sequence)

    def fork(self, parent, row, num_total):
        fork = ForkedSequence(
            parent_row=parent, row=row, sequence_id=0, num_total_tokens=num_total, num_computed_tokens=0, seed=0
        )
        self.table.fork(fork)
        self.processor.fork(fork)

    def append(self, row, token):
        self.table.append(int_array([row]), self.table.num_total[[row]], int_array([token]))

    def apply_to(self, row, logits):
        """What the processor makes of this row's logits, alone in a batch."""
        batch = torch.tensor([logits])
        self.processor.apply(batch, int_array([row]), self.table.num_total[[row]])
        return batch[0]

    def apply(self, logits=None, rows=ROWS):
        """Logits of row 5; those of the others must be untouched."""
        logits = torch.zeros(VOCAB) if logits is None else torch.tensor(logits)
        batch = logits.repeat(len(rows), 1)
        if self.processor.is_active(rows):
            self.processor.apply(batch, rows, self.table.num_total[rows])
        for position, row in enumerate(rows.tolist()):
            if row in (2, 7):
                assert torch.equal(batch[position], logits)
        return batch[rows.tolist().index(5)] if 5 in rows else None

    def excluded(self):
        return (self.apply() == -torch.inf).nonzero()[:, 0].tolist()


def test_allowed_token_ids_keep_their_logits():
    bench = Bench(ALLOWED)
    bench.admit(5, [1], allowed_token_ids=[3, 8, 1000])
    logits = bench.apply([float(token) for token in range(VOCAB)])

    assert logits[[3, 8]].tolist() == [3.0, 8.0]
    assert (logits == -torch.inf).sum() == VOCAB - 2


def test_logit_bias_is_added():
    bench = Bench(LOGIT_BIAS)
    bench.admit(5, [1], logit_bias={3: 1.5, 8: -100.0, 5000: 1.0})

    assert bench.apply().tolist() == [0, 0, 0, 1.5, 0, 0, 0, 0, -100, 0]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1], [4]),
        ([1, 2], [3, 4]),
        # the prompt ends in 2, but words count in the output only
        ([2], [4]),
        ([1, 6, 2], [3, 4]),
        ([1, 6, 2, 3], [4, 9]),
        ([1, 2, 3], [4, 9]),
        ([1, 3], [4]),
    ],
)
def test_bad_words_exclude_the_last_token_of_a_word(tokens, expected):
    bench = Bench(BAD_WORDS)
    bench.admit(5, tokens, num_prompt=1, bad_words=[[4], [2, 3], [2, 3, 9], []])

    assert bench.excluded() == expected


def test_min_tokens_excludes_stop_tokens_while_the_output_is_short():
    bench = Bench(MIN_TOKENS)
    bench.admit(5, [1], min_tokens=2, stop_token_ids=[7], eos=[3])
    assert bench.excluded() == [3, 7]
    bench.append(5, 4)
    assert bench.excluded() == [3, 7]
    bench.append(5, 4)
    assert bench.excluded() == []


def test_an_end_token_that_is_no_token_changes_no_other_row():
    """Some configurations say -1 where there is none."""
    bench = Bench(MIN_TOKENS)
    bench.admit(5, [1], min_tokens=2, eos=[-1, 3])
    assert bench.excluded() == [3]
    bench.apply(rows=int_array([2, 5, 7]))


def test_min_tokens_with_ignore_eos_excludes_stop_tokens_alone():
    bench = Bench(MIN_TOKENS)
    bench.admit(5, [1], min_tokens=2, stop_token_ids=[7], eos=[3], ignore_eos=True)

    assert bench.excluded() == [7]


def test_a_shorter_child_is_below_min_tokens_again():
    bench = Bench(MIN_TOKENS)
    bench.admit(0, [1, 4, 4, 4], min_tokens=2, eos=[3])
    bench.fork(0, 5, num_total=2)

    assert bench.excluded() == [3]


def test_penalties_by_their_definitions():
    bench = Bench(PENALTIES)
    output = [4, 4, 5]
    bench.admit(5, [1, 2, *output], num_prompt=2, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    logits = bench.apply([1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0])

    assert logits[1] == 0.5
    assert logits[2] == -2.0
    assert logits[4] == 0.5 - 2 * 0.5 - 0.25
    assert logits[5] == -2.0 - 0.5 - 0.25
    assert logits[[0, 3, 6]].tolist() == [1.0, 1.0, 1.0]


def test_repetition_is_that_of_transformers():
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (1, 12))
    logits = torch.randn(1, VOCAB)
    bench = Bench(PENALTIES)
    bench.admit(5, tokens[0].tolist(), num_prompt=5, repetition_penalty=1.3)

    expected = RepetitionPenaltyLogitsProcessor(1.3)(tokens, logits.clone())
    assert torch.equal(bench.apply(logits[0].tolist()), expected[0])


@pytest.mark.parametrize("repetition", [1.0, 1.3])
@pytest.mark.parametrize("num_tokens", [5, 60])
def test_counts_that_follow_equal_counts_from_the_start(repetition, num_tokens):
    """Row 5 counts token by token, row 0 in two leaps, row 1 all at once."""
    tokens = torch.randint(0, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    parameters = {"repetition_penalty": repetition, "frequency_penalty": 0.3, "presence_penalty": 0.1}
    bench = Bench(PENALTIES)
    bench.admit(5, tokens[:2], num_prompt=2, **parameters)
    bench.admit(0, tokens[:2], num_prompt=2, **parameters)
    bench.admit(1, tokens, num_prompt=2, **parameters)
    logits = torch.linspace(-1, 1, VOCAB).tolist()
    for length in range(3, num_tokens + 1):
        for row in (5, 0):
            bench.append(row, tokens[length - 1])
        step_by_step = bench.apply(logits)
        if length == num_tokens // 2 or length == num_tokens:
            in_leaps = bench.apply_to(0, logits)
    all_at_once = bench.apply_to(1, logits)

    assert torch.equal(step_by_step, all_at_once)
    assert torch.equal(in_leaps, all_at_once)


def test_a_child_counts_its_own_tokens():
    bench = Bench(PENALTIES)
    bench.admit(0, [1, 4, 4, 4], frequency_penalty=0.5)
    assert bench.apply_to(0, [0.0] * VOCAB)[4] == -1.5
    bench.fork(0, 5, num_total=2)
    bench.append(5, 6)

    assert bench.apply()[[4, 6]].tolist() == [-0.5, -0.5]


OPEN, CLOSE = 8, 9
MARKS = ThoughtMarks(opening=OPEN, closing=CLOSE)
OTHERS = [token for token in range(VOCAB) if token != CLOSE]


@pytest.mark.parametrize(
    ("tokens", "num_prompt", "is_over"),
    [
        ([1, 2, 3, 4], 1, False),
        ([1, OPEN, 2], 1, False),
        ([1, OPEN, 2, 3], 1, True),
        ([1, OPEN, 2, 3, 4, 5], 1, True),
        ([1, OPEN, 2, 3, CLOSE, 4, 5], 1, False),
        # the thought began in the prompt; what is written there does not count
        ([1, OPEN, 5, 5, 5], 5, False),
        ([1, OPEN, 5, 2, 3], 3, True),
        ([1, OPEN, 5, CLOSE, 2, 3], 4, False),
        # two thoughts of one token each, then a third
        ([1, OPEN, 2, CLOSE, OPEN, 3], 1, True),
        ([1, OPEN, 2, CLOSE, OPEN, 3, CLOSE, OPEN], 1, True),
        # a mark within a thought is a token like any other
        ([1, OPEN, OPEN], 1, False),
        ([1, OPEN, OPEN, 2], 1, True),
    ],
)
def test_thoughts_end_when_their_tokens_are_used_up(tokens, num_prompt, is_over):
    bench = Bench(THOUGHTS)
    bench.admit(5, tokens, num_prompt=num_prompt, thinking_token_budget=2, marks=MARKS)

    assert bench.excluded() == (OTHERS if is_over else [])


def test_a_budget_of_no_thoughts_ends_them_where_they_begin():
    bench = Bench(THOUGHTS)
    bench.admit(5, [1], thinking_token_budget=0, marks=MARKS)
    assert bench.excluded() == []
    bench.append(5, OPEN)
    assert bench.excluded() == OTHERS


def test_answers_may_always_begin_inside_a_thought():
    bench = Bench(THOUGHTS)
    marks = ThoughtMarks(opening=OPEN, closing=CLOSE, is_always_open=True)
    # a thought of the conversation has nothing to do with it
    bench.admit(5, [CLOSE, 2, 3], num_prompt=1, thinking_token_budget=2, marks=marks)
    assert bench.excluded() == OTHERS
    bench.append(5, CLOSE)
    assert bench.excluded() == []


def test_the_end_of_thoughts_is_written_even_if_it_was_excluded():
    bench = Bench(THOUGHTS)
    bench.admit(5, [1, OPEN], thinking_token_budget=0, marks=MARKS)
    logits = bench.apply([-torch.inf] * VOCAB)
    assert logits.argmax() == CLOSE


def test_a_form_has_no_thoughts_in_it():
    bench = Bench(THOUGHTS)
    bench.admit(5, [1, OPEN, 2], thinking_token_budget=0, marks=MARKS, structured_outputs={"regex": "a"})
    assert not bench.processor.is_active(ROWS)


PARAMETERS = (
    {"allowed_token_ids": [1, 2, 3, 4]},
    {"bad_words": [[2, 3], [4]]},
    {"min_tokens": 3, "stop_token_ids": [7]},
    {"logit_bias": {3: 1.5}},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.25},
    {"thinking_token_budget": 2, "marks": ThoughtMarks(opening=6, closing=3)},
)


@pytest.mark.parametrize("processor", range(6))
@pytest.mark.parametrize("outcome", [[2, 3, 2], [2, 9], [8]])
def test_drafts_are_judged_as_if_they_stood_there_and_leave_no_trace(processor, outcome):
    """Row 5 has drafts 2, 3, 2, row by row the same as one that has these tokens; then some of them are taken back."""
    logits = torch.linspace(-1, 1, VOCAB).tolist()
    bench = Bench(processor)
    bench.admit(5, [1, 6, 6], **PARAMETERS[processor])
    before = bench.apply_to(5, logits)
    bench.table.num_computed[5] = 2
    bench.table.add_drafts(int_array([5]), int_array([[2, 3, 2, -1]]))
    rows, lengths = int_array([5, 5, 5, 5, 2]), int_array([3, 4, 5, 6, 1])
    batch = torch.tensor([logits] * 5)
    bench.processor.apply(batch, rows, lengths)

    assert torch.equal(batch[0], before)
    assert torch.equal(batch[4], torch.tensor(logits))
    for length in (4, 5, 6):
        other = Bench(processor)
        other.admit(5, [1, 6, 6, 2, 3, 2][:length], **PARAMETERS[processor])
        assert torch.equal(batch[length - 3], other.apply_to(5, logits))

    said = int_array(outcome)
    bench.table.append(int_array([5] * len(said)), 3 + int_array(range(len(said))), said)
    bench.table.drop_drafts(int_array([5]))
    other = Bench(processor)
    other.admit(5, [1, 6, 6, *outcome], **PARAMETERS[processor])
    assert torch.equal(bench.apply_to(5, logits), other.apply_to(5, logits))


@pytest.mark.parametrize("processor", range(6))
def test_rows_that_ask_for_nothing_cost_nothing(processor):
    bench = Bench(processor)

    assert not bench.processor.is_active(ROWS)
    for row in ROWS.tolist():
        bench.processor.release(row)
        bench.processor.release(row)


def test_nothing_is_left_of_a_row_that_was_released() -> None:
    """The next sequence in it may ask for no penalties, and stand in a batch beside one that does."""
    bench = Bench(PENALTIES)
    bench.admit(5, [1, 2], repetition_penalty=2.0, frequency_penalty=1.0)
    logits = [float(token) for token in range(VOCAB)]
    assert bench.apply_to(5, logits).tolist() != logits
    bench.processor.release(5)
    assert bench.apply_to(5, logits).tolist() == logits
