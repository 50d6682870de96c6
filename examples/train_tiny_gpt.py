"""A small character-level GPT, trained on this repository's own documents; it survives whatever Everstep does to it.

It runs alone (`python examples/train_tiny_gpt.py --steps 200`), under torchrun (`torchrun --nproc-per-node 2
examples/train_tiny_gpt.py`) and as an Everstep job, unchanged. On CUDA it uses NCCL, else gloo.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; deterministic matmuls need it

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import everstep

SEED = 20
BLOCK = 48
"""Characters that the model sees at once."""
STRIDE = 16
"""Characters from the start of one sample to the next."""
WIDTH, LAYERS, HEADS, DROPOUT = 48, 2, 4, 0.1
PEAK_LEARNING_RATE = 3e-3
WARM_UP_STEPS = 20
CORPUS_TARGET = 60_000
"""Characters of text that are enough; source files fill up what the documents leave."""


class Attention(nn.Module):
    """Causal self-attention in plain matrix products, which are deterministic on each device."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.register_buffer("future", torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = split[0], split[1], split[2]
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        future: Tensor = self.future  # type: ignore[assignment]
        weights = scores.masked_fill(future[:length, :length], float("-inf")).softmax(-1)
        mixed = self.drop(weights) @ v
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH), Attention(), nn.Dropout(DROPOUT))
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(DROPOUT),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result: Tensor = x + self.feed(x)
        return result


class TinyGPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Embedding(BLOCK, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.blocks(self.drop(self.tokens(tokens) + self.places(places))))
        return logits


def gather_corpus() -> str:
    """The repository's documents, then its Python sources until there is enough to train on."""
    root = Path(__file__).resolve().parent.parent
    documents = [*sorted(root.glob("*.md")), *sorted(root.glob("docs/**/*.md"))]
    sources = [*sorted(root.glob("examples/*.py")), *sorted(root.glob("everstep/**/*.py"))]
    text = "\n".join(path.read_text(errors="replace") for path in documents)
    for path in sources:
        if len(text) >= CORPUS_TARGET:
            break
        text += "\n" + path.read_text(errors="replace")
    while len(text) < CORPUS_TARGET:  # a copy of this file alone must train too
        text += text
    return text.encode("ascii", "replace").decode()


def frozen_corpus(directory: Path, *, leads: bool) -> str:
    """The job's text, copied beside its checkpoints once: an edited document must not change a resumed run's data."""
    path = directory / "corpus.txt"
    if leads and not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(gather_corpus())
        aside.rename(path)
    if dist.is_initialized():
        dist.barrier()
    return path.read_text()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.1)


def build_scheduler(optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
    def factor(step: int) -> float:
        if step < WARM_UP_STEPS:
            return (step + 1) / WARM_UP_STEPS
        done = min(1.0, (step - WARM_UP_STEPS) / max(1, total_steps - WARM_UP_STEPS))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


def choose_device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def leave_child(run: everstep.Run) -> None:
    """Start a process that outlives this one: forked twice, in a session of its own, asleep for ten minutes."""
    code = (
        "import os, sys, time\n"
        "pid = os.fork()\n"
        "if pid: print(pid, flush=True); os._exit(0)\n"
        "os.setsid()\n"
        "null = os.open(os.devnull, os.O_RDWR)\n"
        "for fd in range(3): os.dup2(null, fd)\n"
        "time.sleep(600)\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    run.note("child", pid=int(done.stdout))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps in all (default 200)")
    parser.add_argument("--save-every", type=int, default=25, help="steps between checkpoints (default 25)")
    parser.add_argument("--step-time", type=float, default=0.05, help="seconds that a step takes at least")
    parser.add_argument("--batch", type=int, default=16, help="global batch size in samples (default 16)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--checkpoints", default=".everstep/tiny-gpt", help="folder, when no runner names one")
    parser.add_argument(
        "--forget",
        choices=["optimizer", "scheduler", "sampler"],
        help="lose this part after a resume, as a careless script would: Everstep must notice",
    )
    parser.add_argument("--leave-child", action="store_true", help="start a process that outlives this rank")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.use_deterministic_algorithms(True)
    device = choose_device(arguments.device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    run = everstep.Run(
        total_steps=arguments.steps,
        save_every=arguments.save_every,
        seed=SEED,
        checkpoint_directory=arguments.checkpoints,
    )
    train(run, arguments, device)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(run: everstep.Run, arguments: argparse.Namespace, device: torch.device) -> None:
    text = frozen_corpus(run.checkpoint_directory, leads=run.rank == 0)
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    data = torch.tensor([alphabet[character] for character in text])
    samples = (len(data) - BLOCK - 1) // STRIDE

    def new_sampler() -> everstep.ReplayableSampler:
        return everstep.ReplayableSampler(samples, global_batch_size=arguments.batch, seed=SEED)

    network = TinyGPT(len(alphabet)).to(device)
    model = DistributedDataParallel(network) if dist.is_initialized() else network
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer, arguments.steps)
    sampler = new_sampler()
    loss_of = loss_function(model, data, device)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    run.warm_up(lambda: backward(loss_of(next(iter(sampler)))))
    if run.resume() and arguments.forget:
        if arguments.forget == "optimizer":
            optimizer.state.clear()
        elif arguments.forget == "scheduler":
            scheduler = build_scheduler(optimizer, arguments.steps)
            run.track(scheduler=scheduler)
        else:
            sampler = new_sampler()
            run.track(sampler=sampler)
    if arguments.leave_child:
        leave_child(run)
    say(run, f"generation {run.generation}, {run.step} of {run.total_steps} steps done, text {digest(text)}")

    for step, batch in zip(run.steps(), run.batches(sampler.stream()), strict=False):
        started = time.monotonic()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(batch)
        backward(loss)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        learning_rate = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        run.report(loss=loss, learning_rate=learning_rate, grad_norm=grad_norm, span=batch.span)
        if step % 10 == 0 or step == run.total_steps:
            say(run, f"step {step}: loss {loss.item():.4f}, learning rate {learning_rate:.2e}")
        time.sleep(max(0.0, arguments.step_time - (time.monotonic() - started)))


def loss_function(model: nn.Module, data: Tensor, device: torch.device) -> Callable[[list[int]], Tensor]:
    def loss_of(batch: list[int]) -> Tensor:
        windows = torch.stack([data[i * STRIDE : i * STRIDE + BLOCK + 1] for i in batch]).to(device)
        logits: Tensor = model(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    return loss_of


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def say(run: everstep.Run, *words: Any) -> None:
    if run.rank == 0:
        print(*words, flush=True)


if __name__ == "__main__":
    main()
