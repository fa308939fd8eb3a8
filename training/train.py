"""Trains the embedded model on one core, can be stopped and resumed at any time, and ends decayed at a deadline.

    python -m training.train --work-dir build/embedded --tokens 31300000 --deadline-minutes 120

Progress is the larger of tokens spent and time spent, so that a slow machine ends with a cooled-down model as well.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from training.export import export
from training.model import Llama, Shape
from training.stream import Batch, batch

WARMUP_STEPS = 40
COOLDOWN = 0.45
CHECKPOINT = "checkpoint.pt"
LOG_EVERY = 40


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, work_dir="build/embedded", log="training/log.jsonl", tokens=33_000_000)
    parser.add_argument("--matrix-rate", type=float, default=0.0045, help="learning rate of Muon")
    parser.add_argument("--rate", type=float, default=0.003, help="learning rate of AdamW: embedding and norms")
    return parser.parse_args()


def add_arguments(parser: argparse.ArgumentParser, *, work_dir: str, log: str, tokens: int) -> None:
    parser.add_argument("--work-dir", type=Path, default=Path(work_dir), help="checkpoint and export")
    parser.add_argument("--tokenizer", type=Path, default=Path("src/quire/embedded/tokenizer.json"))
    parser.add_argument("--log", type=Path, default=Path(log))
    parser.add_argument("--tokens", type=int, default=tokens, help="token budget")
    parser.add_argument(
        "--deadline-minutes", type=float, default=120.0, help="from the first start, or from now with --reset-deadline"
    )
    parser.add_argument("--reset-deadline", action="store_true", help="count the deadline from now")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-minutes", type=float, default=2.5)
    parser.add_argument("--max-steps", type=int, default=None, help="stop early, for a trial")
    parser.add_argument("--no-compile", action="store_true")


def optimizers(model: Llama, matrix_rate: float, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=matrix_rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adamw]


def multiplier(step: int, progress: float) -> float:
    """Warm-up, a plateau, then a straight line to zero."""
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.0, 1.0 - progress) / COOLDOWN)


def loss_of(model: Llama, body: Any, data: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = body(data.tokens_BT, data.mask())
        picked = data.targets_BT >= 0
        logits = model.logits(hidden[picked])
    losses = functional.cross_entropy(logits.float(), data.targets_BT[picked], reduction="none")
    weights = data.weights_BT[picked]
    return (losses * weights).sum() / weights.sum()


def save(path: Path, state: dict[str, Any]) -> None:
    scratch = path.with_suffix(".tmp")
    torch.save(state, scratch)
    os.replace(scratch, path)


def fit(
    model: Llama, loss_of: Callable[[Batch], torch.Tensor], keep: Callable[[], None], args: argparse.Namespace
) -> None:
    """Steps until the tokens or the time are spent; `keep` exports the weights whenever the checkpoint is saved."""
    opts = optimizers(model, args.matrix_rate, args.rate)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    checkpoint = args.work_dir / CHECKPOINT
    state = resumed(checkpoint, model, opts, args)

    def save_all() -> None:
        save(checkpoint, {"model": model.state_dict(), "optimizers": [o.state_dict() for o in opts], "state": state})
        keep()

    last_saved, last_logged, shown = time.time(), time.time(), math.nan
    while True:
        now, step = time.time(), state["step"]
        spent = (now - state["began"]) / max(1.0, state["deadline"] - state["began"])
        progress = max(state["tokens"] / args.tokens, spent)
        if progress >= 1.0 or step == args.max_steps:
            break
        scale = multiplier(step, progress)
        for optimizer in opts:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * scale
        data = batch(tokenizer, args.seed, step)
        loss = loss_of(data)
        loss.backward()
        for optimizer in opts:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state["step"] += 1
        state["tokens"] += data.tokens_BT.numel()
        shown = loss.item() if math.isnan(shown) else 0.9 * shown + 0.1 * loss.item()
        if state["step"] % LOG_EVERY == 0:
            rate = LOG_EVERY * data.tokens_BT.numel() / (time.time() - last_logged)
            last_logged = time.time()
            line = {"step": state["step"], "tokens": state["tokens"], "loss": round(shown, 4), "scale": round(scale, 4),
                    "tokens_per_s": round(rate)}  # fmt: skip
            with args.log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
            print(line, flush=True)
        if time.time() - last_saved > 60 * args.save_minutes:
            save_all()
            last_saved = time.time()
    save_all()


def resumed(
    checkpoint: Path, model: Llama, opts: list[torch.optim.Optimizer], args: argparse.Namespace
) -> dict[str, Any]:
    """Where to go on: the beginning, or what the checkpoint says."""
    state: dict[str, Any] = {
        "step": 0,
        "tokens": 0,
        "deadline": time.time() + 60 * args.deadline_minutes,
        "began": time.time(),
    }
    if not checkpoint.exists():
        return state
    saved = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(saved["model"])
    for optimizer, content in zip(opts, saved["optimizers"], strict=True):
        optimizer.load_state_dict(content)
    # The rates of the command line win over those of the checkpoint, so that a resumed run can change them.
    for optimizer, peak in zip(opts, (args.matrix_rate, args.rate), strict=True):
        for group in optimizer.param_groups:
            group["peak"] = peak
    # The time between the two runs was not spent on training.
    clock = {name: state[name] for name in ("began", "deadline")}
    return dict(saved["state"] | (clock if args.reset_deadline else {}))


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    model = Llama(Shape(vocab_size=tokenizer.get_vocab_size()))
    body = model.model if args.no_compile else torch.compile(model.model, dynamic=False)
    fit(
        model,
        lambda data: loss_of(model, body, data),
        lambda: export(args.work_dir / "export", model.shape, model.state_dict(), tokenizer),
        args,
    )


if __name__ == "__main__":
    main()
