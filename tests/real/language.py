"""Models of language and speech, from repositories and libraries."""

import sys

import torch
import torch.nn.functional as F
from scripts import Run, definitions, script, tokens
from torch import nn, optim


@script("jadore801120/attention-is-all-you-need-pytorch@132907dd272e2cc92e3c10e6c4e783a87ff8893d")
def attention_is_all_you_need(run: Run):
    """train.py: label smoothing, a learning rate of its own, padded sentences of changing lengths."""
    sys.path.insert(0, str(run.folder))
    from transformer import Constants
    from transformer.Models import Transformer
    from transformer.Optim import ScheduledOptim

    model = run.wrap(Transformer(60, 60, src_pad_idx=1, trg_pad_idx=1, d_word_vec=32, d_model=32, d_inner=64, n_layers=2,
                                 n_head=2, d_k=16, d_v=16, dropout=0.0))
    optimizer = ScheduledOptim(optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-09), 2.0, 32, 4000)
    train = definitions(run.folder / "train.py", only=("cal_loss", "cal_performance"), F=F, torch=torch, Constants=Constants)
    for i, n in enumerate(run.sizes(8, 5)):
        src_seq, trg = tokens(60, n, 9 + i % 3), tokens(60, n, 8 + i % 4)
        src_seq[0, -3:], trg[1, -2:] = 1, 1
        trg_seq, gold = trg[:, :-1], trg[:, 1:].contiguous().view(-1)
        optimizer.zero_grad()
        loss, _, _ = train.cal_performance(model(src_seq, trg_seq), gold, 1, smoothing=True)
        loss.backward()
        optimizer.step_and_update_lr()
        run.step(loss)


@script("johnma2006/mamba-minimal@03de542a36d873f6e6c4057ad687278cc6ae944d", requires=("einops",))
def mamba_minimal(run: Run):
    """The selective scan is a Python loop over the sequence."""
    sys.path.insert(0, str(run.folder))
    from model import Mamba, ModelArgs

    model = run.wrap(Mamba(ModelArgs(d_model=32, n_layer=2, vocab_size=64)))
    language(run, model, 64, 24)


def language(run: Run, model, words, length):
    """Next-word prediction by AdamW."""
    optimizer = optim.AdamW(model.parameters(), lr=3e-4)
    for n in run.sizes(4, 3):
        text = tokens(words, n, length + 1)
        optimizer.zero_grad()
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), text[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("mambapy==1.2.0")
def mambapy_mamba(run: Run):
    """The scan in parallel, a torch.autograd.Function, between an embedding and a head."""
    from mambapy.mamba import Mamba, MambaConfig

    model = nn.Sequential(nn.Embedding(64, 32), Mamba(MambaConfig(d_model=32, n_layers=2)), nn.Linear(32, 64))
    language(run, run.wrap(model), 64, 24)


@script("BlinkDL/RWKV-LM@524481d5099b38d9bc8ef1e89209161b86c8011b")
def rwkv_v1(run: Run):
    """RWKV-v1/train.py: the version in PyTorch alone, its initialization and its groups of parameters."""
    from types import SimpleNamespace

    rwkv = definitions(run.folder / "RWKV-v1" / "src" / "model.py", logger=SimpleNamespace(info=print))
    config = rwkv.GPTConfig(64, 32, model_type="RWKV", rwkv_emb_scale=0.4, rwkv_tiny_attn=0, rwkv_tiny_head=1, n_layer=2,
                            n_head=2, n_embd=32, n_attn=32, n_ffn=32)
    raw = rwkv.GPT(config)
    optimizer = raw.configure_optimizers(SimpleNamespace(weight_decay=0.01, learning_rate=6e-4, betas=(0.9, 0.99), eps=1e-8))
    model = run.wrap(raw)
    for n in run.sizes(8, 5):
        _, loss = model(tokens(64, n, 32), tokens(64, n, 32))
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.step(loss)


@script("locuslab/TCN@2f8c2b817050206397458dfd1f5a25ce8a32fe65")
def tcn_char_cnn(run: Run):
    """TCN/char_cnn: dilated causal convolutions with weight normalization, the loss of the last positions."""
    sys.path.insert(0, str(run.folder))
    from TCN.char_cnn.model import TCN

    model = run.wrap(TCN(16, 60, [24, 16], kernel_size=3, dropout=0.0, emb_dropout=0.0))
    optimizer, criterion = optim.SGD(model.parameters(), lr=1.0), nn.CrossEntropyLoss()
    for n in run.sizes(8, 5):
        inp, target = tokens(60, n, 40), tokens(60, n, 40)
        optimizer.zero_grad()
        output = model(inp)
        loss = criterion(output[:, 8:].contiguous().view(-1, 60), target[:, 8:].contiguous().view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.15)
        optimizer.step()
        run.step(loss)


X_TRANSFORMERS = "x-transformers==2.31.10"


def x_transformer(run: Run, **options):
    """train_enwik8.py: an AutoregressiveWrapper gives the loss; gradients of two batches are summed."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    model = run.wrap(AutoregressiveWrapper(TransformerWrapper(
        num_tokens=64, max_seq_len=32, attn_layers=Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **options))))
    optimizer = optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(run.steps):
        for _ in range(2):
            loss = model(tokens(64, 4, 32))
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)


@script(X_TRANSFORMERS, requires=("einops", "einx", "loguru"))
def x_transformers_rotary(run: Run):
    x_transformer(run, rotary_pos_emb=True)


@script(X_TRANSFORMERS, requires=("einops", "einx", "loguru"))
def x_transformers_alibi(run: Run):
    x_transformer(run, alibi_pos_bias=True, use_rmsnorm=True, ff_glu=True)


@script(X_TRANSFORMERS, line="model = ORTModule(model)", requires=("einops", "einx", "loguru"))
def x_transformers_vit(run: Run):
    """ViTransformerWrapper around an Encoder."""
    from x_transformers import Encoder, ViTransformerWrapper

    model = run.wrap(ViTransformerWrapper(image_size=16, patch_size=4, num_classes=5,
                                          attn_layers=Encoder(dim=32, depth=2, heads=2)))
    optimizer = optim.Adam(model.parameters(), lr=1e-4)
    for n in run.sizes(8, 5):
        loss = F.cross_entropy(model(torch.randn(n, 3, 16, 16)), torch.randint(0, 5, (n,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("conformer==0.3.2", requires=("einops",))
def conformer_block(run: Run):
    """A block of the library with a head for CTC, as a recognizer of speech has it; lengths change."""
    from conformer import ConformerBlock

    model = run.wrap(nn.Sequential(ConformerBlock(dim=32, dim_head=16, heads=2), nn.Linear(32, 11), nn.LogSoftmax(-1)))
    optimizer, criterion = optim.Adam(model.parameters(), lr=1e-3), nn.CTCLoss()
    for i, n in enumerate(run.sizes(4, 3)):
        log_probs = model(torch.randn(n, 40 + 4 * (i % 3), 32)).transpose(0, 1)
        loss = criterion(log_probs, torch.randint(1, 11, (n, 8)), torch.full((n,), len(log_probs)), torch.full((n,), 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)
