"""Beams and samples of one prompt, side by side in one batch: what is most probable, and what is merely likely.

python examples/beam_search.py "The capital of France is" --width 4
"""

import argparse

from quire import LLM, BeamSearchParams, SamplingParams


def compare(llm: LLM, prompt: str, width: int, max_tokens: int) -> None:
    beams = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0)
    drawn = SamplingParams(n=width, seed=1, max_tokens=max_tokens, logprobs=0)
    outputs = llm.generate([prompt] * 3, [beams, greedy, drawn], use_tqdm=False)
    for name, output in zip(("beams", "greedy", "drawn"), outputs, strict=True):
        print(f"{name}: log-probability per token, output")
        for one in output.outputs:
            # the score of a beam, and by the same rule that of a sample
            score = beams.score(one.cumulative_logprob, len(one.token_ids))
            print(f"  {score:8.3f}  {one.text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=12)
    arguments = parser.parse_args()
    with LLM(arguments.model) as llm:
        compare(llm, arguments.prompt, arguments.width, arguments.max_tokens)
