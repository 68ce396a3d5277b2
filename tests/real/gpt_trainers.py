"""The best-known small trainers of GPTs, with small sizes."""

import os
import sys

import torch
from scripts import OneProcess, Run, definitions, script, tokens, without_compile
from torch.nn.utils import clip_grad_norm_

STEPS_A_BATCH, LENGTH, WORDS = 4, 64, 65


def words(batch=STEPS_A_BATCH, length=LENGTH):
    """Inputs and targets, one word apart, as these trainers cut them out of a text."""
    text = tokens(WORDS, batch, length + 1)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@script("karpathy/nanoGPT@3adf61e154c3fe3fca428ad6bc3818b27a3b8291", replaced="data")
def nanogpt(run: Run):
    """train.py, with the sizes that its README gives for a CPU."""
    sys.path.insert(0, str(run.folder))
    from model import GPT, GPTConfig

    model = GPT(GPTConfig(block_size=LENGTH, vocab_size=WORDS, n_layer=4, n_head=4, n_embd=128, dropout=0.0, bias=False))
    optimizer = model.configure_optimizers(1e-1, 1e-3, (0.9, 0.99), "cpu")
    model = run.wrap(model)
    for _ in range(run.steps):
        x, y = words()
        logits, loss = model(x, y)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.step(loss)


@script("karpathy/minGPT@37baab71b9abea1b76ab957409a1cc2fbfba8a26", line="trainer.model = ORTModule(trainer.model)",
        replaced="data")
def mingpt(run: Run):
    """projects/chargpt by mingpt's own Trainer: its loop, its loader, its optimizer."""
    sys.path.insert(0, str(run.folder))
    from mingpt.model import GPT
    from mingpt.trainer import Trainer

    class Text(torch.utils.data.Dataset):
        text = tokens(WORDS, 2000)

        def __len__(self):
            return len(self.text) - LENGTH

        def __getitem__(self, at):
            return self.text[at:at + LENGTH], self.text[at + 1:at + LENGTH + 1]

    config = GPT.get_default_config()
    config.model_type, config.vocab_size, config.block_size = "gpt-nano", WORDS, LENGTH
    settings = Trainer.get_default_config()
    settings.device, settings.num_workers, settings.batch_size, settings.max_iters = "cpu", 0, 8, run.steps
    trainer = Trainer(settings, GPT(config), Text())
    trainer.model = run.wrap(trainer.model)
    trainer.set_callback("on_batch_end", lambda trainer: run.step(trainer.loss))
    trainer.run()


def train_gpt2(run: Run, flash, micro_steps):
    """llm.c's train_gpt2.py, by its definitions."""
    script = definitions(run.folder / "train_gpt2.py", FLASH=flash, print0=print)
    raw_model = script.GPT(script.GPTConfig(block_size=LENGTH, vocab_size=WORDS, n_layer=3, n_head=4, n_embd=64))
    optimizer = raw_model.configure_optimizers(0.1, 3e-4, (0.9, 0.95), "cpu", 0)
    model = run.wrap(raw_model)
    for _ in range(run.steps):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(micro_steps):
            x, y = words()
            _, loss = model(x, y, return_logits=False)
            loss = loss / micro_steps
            loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.step(loss)


LLMC = "karpathy/llm.c@f1e2ace651495b74ae22d45d1723443fd00ecd3a"


@script(LLMC, replaced="data")
def llmc(run: Run):
    """As it trains with --flash=0 and two micro-batches a step."""
    train_gpt2(run, 0, 2)


@script(LLMC, replaced="data")
def llmc_flash(run: Run):
    """As it trains with --flash=1."""
    train_gpt2(run, 1, 1)


@script("karpathy/nanochat@92d63d4e8bb4df75c3b71618f31ddde2378b2bcd", replaced="data, torch.compile of the optimizer",
        requires=("filelock",))
def nanochat(run: Run):
    """scripts/base_train.py: its model with sliding windows, its optimizer MuonAdamW, its 40 steps of warm-up."""
    os.environ["NANOCHAT_DTYPE"] = "float32"
    sys.path.insert(0, str(run.folder))
    with without_compile():
        from nanochat.gpt import GPT, GPTConfig

    with torch.device("meta"):
        model = GPT(GPTConfig(sequence_len=160, vocab_size=WORDS, n_layer=4, n_head=2, n_kv_head=1, n_embd=64))
    model.to_empty(device="cpu")
    model.init_weights()
    optimizer = model.setup_optimizer()
    model = run.wrap(model)
    for step in range(run.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (step + 1) / 40
        for _ in range(2):
            x, y = words(2, 160)
            loss = model(x, y)
            train_loss = loss.detach()
            (loss / 2).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        run.step(train_loss)


@script("KellerJordan/modded-nanogpt@f411b3d346aa52d3504324ca93c230fd84c6c07f",
        replaced="data, device, process group, torch.compile of the optimizer")
def modded_nanogpt(run: Run):
    """records/track_3_optimization/train_gpt_simple.py: its model, whose embedding is bfloat16, AdamW and Muon."""
    with without_compile():
        simple = definitions(run.folder / "records" / "track_3_optimization" / "train_gpt_simple.py")
    simple.dist = OneProcess
    model = simple.GPT(vocab_size=WORDS, num_layers=2, model_dim=256)
    for name, p in model.named_parameters():
        if name.endswith("weight"):
            w = p.data
            if "proj" in name:
                w.zero_()
            elif "embed" in name:
                w.normal_()
            else:
                w.normal_(std=0.33**0.5 / w.size(-1)**0.5)
        elif name.endswith("bias"):
            p.data.zero_()
    optimizers = [torch.optim.AdamW([dict(params=[model.embed.weight], lr=0.7), dict(params=[model.proj.weight], lr=0.004),
                                     dict(params=[p for p in model.parameters() if p.ndim < 2], lr=0.015)],
                                    betas=(0.8, 0.95), eps=1e-10, weight_decay=0.001, fused=True),
                  simple.Muon([p for p in model.blocks.parameters() if p.ndim >= 2], lr=0.025, weight_decay=0.05)]
    model = run.wrap(model)
    for _ in range(run.steps):
        loss = model(*words())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        run.step(loss)


@script("karpathy/ng-video-lecture@52201428ed7b46804849dea0b3ccf0de9df1a5c3", replaced="data")
def ng_video_lecture(run: Run):
    """gpt.py of the lecture "Let's build GPT"."""
    gpt = definitions(run.folder / "gpt.py", vocab_size=WORDS, n_embd=64, n_head=4, n_layer=3, block_size=LENGTH,
                      dropout=0.0, device="cpu")
    model = run.wrap(gpt.GPTLanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(run.steps):
        logits, loss = model(*words(8))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        run.step(loss)


def makemore(run: Run, kind, **options):
    """One of makemore's models on names of changing lengths, padded with -1 in the targets."""
    makemore = definitions(run.folder / "makemore.py", SummaryWriter=None)
    config = makemore.ModelConfig(vocab_size=27, block_size=16, n_layer=4, n_head=4, n_embd=64, n_embd2=64)
    model = run.wrap(getattr(makemore, kind)(config, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8)
    for _ in range(run.steps):
        x, y = tokens(27, 32, 16), tokens(27, 32, 16)
        y[torch.arange(16) > torch.randint(3, 16, (32, 1))] = -1
        logits, loss = model(x, y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        run.step(loss)


MAKEMORE = "karpathy/makemore@988aa59e4d8fefa526d06f3b453ad116258398d4"


@script(MAKEMORE, requires=("tensorboard",))
def makemore_transformer(run: Run):
    makemore(run, "Transformer")


@script(MAKEMORE, requires=("tensorboard",))
def makemore_gru(run: Run):
    makemore(run, "RNN", cell_type="gru")


@script(MAKEMORE, requires=("tensorboard",))
def makemore_bow(run: Run):
    makemore(run, "BoW")


@script(MAKEMORE, requires=("tensorboard",))
def makemore_mlp(run: Run):
    makemore(run, "MLP")
