"""LoRA fine-tuning of language models of true shapes and random weights: tokens/s and memory, beside eager.

    python tests/bench/llm.py [--size 1.2] [--base bfloat16] [--peers eager,checkpointing,0,1] [--length 512] [--batch 1]
                              [--rank 16] [--rounds 3] [--threads N] [--folder build/llm] [--markdown]

A peer is a process of its own that loads the model from a folder of safetensors, puts peft's LoRA on all its linear
layers, and steps: `eager`; `checkpointing`, eager with gradient_checkpointing_enable(); `0`, `1`, `2`, onnxtrain at a
memory level; `50%`, onnxtrain with a budget. Peers take turns, one step each a round; the median of the rounds counts.
Losses of the first step and of the last one stand beside, since all peers have the same data and adapters.

    peak      most memory of the process, MiB: from its start, with imports and load; and from its second step on
    planned   the engine's block of activations, MiB
    limit     tokens/s if the frozen products alone ran, at the rate of torch's square product of the base's dtype, taken
              between the rounds: 4 operations a token and weight of a linear layer, 2 there and 2 back
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from step_table import Peak, resident

from onnxtrain.finetune import load

LLAMA: dict[str, Any] = {"vocab_size": 128256, "tie_word_embeddings": True, "rope_theta": 500000.0}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {  # of Qwen2.5, Llama 3.2 and Mistral
    "tiny": ("Llama", {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "0.5": ("Qwen2", {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                      "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "1.2": ("Llama", {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                      "num_attention_heads": 32, "num_key_value_heads": 8}),
    "3": ("Llama", {**LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                    "num_attention_heads": 24, "num_key_value_heads": 8}),
    "7": ("Mistral", {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                      "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None}),
}
SHARD = 2**30  # bytes


# ---- a folder of random weights ----


def write(size: str, folder: Path) -> None:
    """Weights in shards of safetensors, one after the other, with the config and the index of transformers."""
    import transformers
    from safetensors.torch import save_file

    kind, sizes = SIZES[size]
    config = getattr(transformers, f"{kind}Config")(**sizes, use_cache=False, dtype="bfloat16")
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    folder.mkdir(parents=True)
    generator, index, shard, held = torch.Generator().manual_seed(0), {}, {}, 0
    wanted = [(name, tuple(p.shape)) for name, p in model.named_parameters()]  # a tied one once
    for place, (name, shape) in enumerate(wanted):
        tensor = torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) > 1:
            tensor.normal_(std=0.02, generator=generator)
        shard[name], held = tensor, held + 2 * tensor.numel()
        if held > SHARD or place == len(wanted) - 1:
            file = f"model-{len(set(index.values())) + 1:05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(shard, file)
            shard, held = {}, 0
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(folder)


# ---- a peer's process ----


def loaded(folder: str, base: str, rank: int) -> torch.nn.Module:
    """The model with its adapters, which alone are trained."""
    import peft

    model = load(folder, base)
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters, autocast_adapter_dtype=False).train()


def serve(peer: str, args: argparse.Namespace) -> None:
    """Answers each line of the input with a line of JSON: one step."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    model = loaded(args.serve_folder, args.base, args.rank)
    imports = resident("VmRSS")
    words, frozen, head = counts(model)
    if peer == "checkpointing":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    parameters = [p for p in model.parameters() if p.requires_grad]
    if ours := peer not in ("eager", "checkpointing"):
        import onnxtrain
        from onnxtrain.optim import AdamWMode, FusedAdam
        from onnxtrain.ortmodule import ORTModule

        model = ORTModule(model, outputs="loss")
        if peer.endswith("%"):
            model._runtime.memory_budget = int(peer[:-1]) / 100
        else:
            model._runtime.memory_optimization_level = int(peer)
        optimizer: torch.optim.Optimizer = FusedAdam(parameters, lr=1e-4, eps=1e-8, weight_decay=0.0,
                                                     adam_w_mode=AdamWMode.ADAMW_TORCH)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0, fused=True)
    draws = torch.Generator().manual_seed(1)
    print(json.dumps({"frozen": frozen, "head": head, "loaded": imports}), file=answers, flush=True)
    for done, _ in enumerate(sys.stdin):
        ids = torch.randint(0, words, (args.batch, args.length), generator=draws)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        answer = {"seconds": time.perf_counter() - start, "loss": loss.item(), "peak": resident("VmHWM")}
        if done == 0:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        if ours:
            found = onnxtrain.stats(model)
            answer |= {"planned": found["slab_bytes"] / 2**20, "reasons": found["reasons"]}
        print(json.dumps(answer), file=answers, flush=True)


def counts(model: torch.nn.Module) -> tuple[int, int, int]:
    """Of the base: words, weights of linear layers, and those of the head."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    heads = config.hidden_size // config.num_attention_heads
    attention = config.hidden_size * heads * 2 * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return config.vocab_size, layer * config.num_hidden_layers, head


class Peer:
    """A process of serve()."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace) -> None:
        self.name, self.errors = name, tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--serve", name, "--serve-folder", str(folder),
             *[f"--{key}={getattr(args, key)}" for key in ("base", "length", "batch", "rank")]],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(args.threads), "ORTMODULE_CACHE_DIR": ""})
        self.times: list[float] = []
        self.about = self._answer()
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"{self.name}: {(self.errors.read().strip().splitlines() or ['no answer'])[-1]}")
        return dict(json.loads(line))

    def step(self) -> float:
        assert self.process.stdin
        print("step", file=self.process.stdin, flush=True)
        self.last = self._answer()
        self.first = self.first or self.last
        return float(self.last["seconds"])

    def close(self) -> None:
        self.process.communicate()
        self.errors.close()


# ---- the table ----


def print_row(name: str, peer: Peer, tokens: int, eager: float | None, limit: float, markdown: bool) -> None:
    rate = tokens / statistics.median(peer.times)
    cells = [name, f"{rate:.1f}", f"{rate / eager:.2f}" if eager else "-", f"{rate / limit:.2f}",
             f"{peer.first['peak']:.0f}", f"{peer.last['peak']:.0f}",
             f"{peer.last['planned']:.0f}" if "planned" in peer.last else "-", f"{peer.first['seconds']:.1f}",
             f"{peer.first['loss']:.4f}", f"{peer.last['loss']:.4f}"]
    print("| " + " | ".join(cells) + " |" if markdown else f"{cells[0]:<15}"
          + "".join(f"{cell:>14}" for cell in cells[1:]), flush=True)
    if peer.last.get("reasons"):
        print(f"{name}: PyTorch ran {peer.last['reasons']}", flush=True)


HEAD = ("peer", "tokens/s", "over eager", "of the limit", "peak, start", "peak, steps", "planned", "first step, s",
        "first loss", "last loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.2")
    parser.add_argument("--base", choices=("bfloat16", "nf4", "float32"), default="bfloat16")
    parser.add_argument("--peers", default="eager,checkpointing,0,1")
    for name, default in (("length", 512), ("batch", 1), ("rank", 16), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, default=Path("build/llm"))
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--serve-folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.serve:
        serve(args.serve, args)
        return
    folder = args.folder / args.size
    if not (folder / "config.json").exists():
        write(args.size, folder)
    torch.set_num_threads(args.threads)
    peers = [Peer(name, folder, args) for name in args.peers.split(",")]
    rate = Peak(torch.float32 if args.base == "float32" else torch.bfloat16)
    for peer in peers:
        peer.step()
        peer.step()
    for turn in range(args.rounds):
        for i in range(len(peers)):
            peer = peers[(turn + i) % len(peers)]
            peer.times.append(peer.step())
        rate.sample()
    about = peers[0].about
    limit = 1e9 * rate.rate / (4 * about["frozen"] + 4 * about["head"])
    tokens = args.batch * args.length
    medians = {peer.name: tokens / statistics.median(peer.times) for peer in peers}
    print(f"{args.size} B, {args.base}, {args.batch} x {args.length}, rank {args.rank}, {args.threads} threads, torch "
          f"{torch.__version__}, {args.rounds} rounds; square products at {rate.rate:.0f} GFLOP/s: limit {limit:.0f} "
          "tokens/s; MiB")
    print("| " + " | ".join(HEAD) + " |\n|" + " --- |" * len(HEAD) if args.markdown else
          f"{HEAD[0]:<15}" + "".join(f"{name:>14}" for name in HEAD[1:]))
    for peer in peers:
        print_row(peer.name, peer, tokens, medians.get("eager"), limit, args.markdown)
        peer.close()
    worst = max((abs(peer.last["loss"] / peers[0].last["loss"] - 1) for peer in peers), default=math.nan)
    print(f"last losses differ by at most {worst:.1e} of {peers[0].name}'s")


if __name__ == "__main__":
    main()
