"""Libraries that bring the training loop: the model that they are given is wrapped, or the one that they hold."""

import tempfile

import torch
import torch.nn.functional as F
from scripts import Run, script, tokens
from torch import nn, optim


def small_gpt2():
    """Of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
                                      embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))


class Lines(torch.utils.data.Dataset):
    """Input ids and labels."""

    def __init__(self, lines, length=16):
        self.ids = tokens(64, lines, length)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, at):
        return {"input_ids": self.ids[at], "labels": self.ids[at]}


@script("transformers==5.24.0", line="trainer = Trainer(ORTModule(model), ...)", requires=("accelerate",))
def transformers_trainer(run: Run):
    """The Trainer, with its own optimizer, schedule and clipping; the last batch is smaller."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                run.step(logs["loss"])

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, per_device_train_batch_size=4, num_train_epochs=1, logging_steps=1,
                                      report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
        Trainer(run.wrap(small_gpt2()), arguments, train_dataset=Lines(4 * run.steps - 1), callbacks=[Watch()]).train()


@script("accelerate==1.15.0", line="model = accelerator.prepare(ORTModule(model))", requires=("transformers",))
def accelerate_loop(run: Run):
    """The loop of the library's examples, with gradient accumulation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = small_gpt2()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Lines(4 * run.steps - 1), batch_size=4)
    model, optimizer, loader = accelerator.prepare(run.wrap(model), optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        run.step(loss)


@script("lightning==2.6.6", line="self.model = ORTModule(self.model)")
def lightning_autoencoder(run: Run):
    """The autoencoder of the library's first page."""
    import lightning

    class LitAutoEncoder(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.encoder = run.wrap(nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3)))
            self.decoder = run.wrap(nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28)))

        def training_step(self, batch, batch_idx):
            x = batch.view(batch.size(0), -1)
            return F.mse_loss(self.decoder(self.encoder(x)), x)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            run.step(outputs["loss"])

        def configure_optimizers(self):
            return optim.Adam(self.parameters(), lr=1e-3)

    loader = torch.utils.data.DataLoader(torch.rand(8 * run.steps - 3, 1, 28, 28), batch_size=8)
    lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False).fit(LitAutoEncoder(), loader)


@script("fastai==2.8.12", line="learn = Learner(dls, ORTModule(model), ...)", requires=("torchvision",))
def fastai_learner(run: Run):
    """fit_one_cycle of the library's model for tables."""
    from fastai.callback import progress, schedule  # noqa: F401
    from fastai.callback.core import Callback
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.tabular.model import TabularModel

    class Watch(Callback):
        def after_batch(self):
            if self.learn.training:
                run.step(self.learn.loss)

    rows = 16 * run.steps - 5
    data = torch.utils.data.TensorDataset(torch.randint(0, 9, (rows, 2)), torch.randn(rows, 3), torch.randint(0, 2, (rows,)))
    dls = DataLoaders.from_dsets(data, data, bs=16, device="cpu", shuffle=False, drop_last=False, num_workers=0)
    model = run.wrap(TabularModel([(9, 4), (9, 4)], 3, 2, [32, 16]))
    learn = Learner(dls, model, loss_func=nn.CrossEntropyLoss(), cbs=[Watch()])
    with learn.no_bar():
        learn.fit_one_cycle(1, 1e-3)


@script("skorch==1.4.0", line="net = NeuralNetClassifier(ORTModule(module), ...)", requires=("scikit-learn",))
def skorch_classifier(run: Run):
    """NeuralNetClassifier.fit, which trains one epoch; the last batch is smaller."""
    from skorch import NeuralNetClassifier
    from skorch.callbacks import Callback

    class Watch(Callback):
        def on_batch_end(self, net, batch=None, training=False, **kwargs):
            if training:
                run.step(net.history[-1, "batches", -1, "train_loss"])

    module = run.wrap(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2), nn.Softmax(dim=-1)))
    net = NeuralNetClassifier(module, max_epochs=1, lr=0.1, batch_size=16, train_split=None, callbacks=[Watch()], verbose=0)
    count = 16 * run.steps - 5
    net.fit(torch.randn(count, 20).numpy(), torch.randint(0, 2, (count,)).numpy())


@script("peft==0.21.2", line="model = ORTModule(get_peft_model(model, config))", requires=("transformers",))
def peft_lora(run: Run):
    """Adapters of low rank on GPT-2's attention."""
    from peft import LoraConfig, get_peft_model

    model = run.wrap(get_peft_model(small_gpt2(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True,
                                                             lora_dropout=0.0)))
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for n in run.sizes(4, 3):
        ids = tokens(64, n, 16)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)


@script("sentence-transformers==6.2.0", line="model[0].model = ORTModule(model[0].model)")
def sentence_transformers(run: Run):
    """MultipleNegativesRankingLoss over a small BERT, sentences padded to changing lengths."""
    from sentence_transformers import SentenceTransformer, losses
    from sentence_transformers.models import Pooling
    from transformers import BertConfig, BertModel

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = run.wrap(BertModel(BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2,
                                                       num_attention_heads=2, intermediate_size=64,
                                                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)))

        def forward(self, features):
            features["token_embeddings"] = self.model(features["input_ids"], features["attention_mask"]).last_hidden_state
            return features

    model = SentenceTransformer(modules=[Words(), Pooling(32)], device="cpu")
    criterion, optimizer = losses.MultipleNegativesRankingLoss(model), optim.AdamW(model.parameters(), lr=1e-3)
    for i, n in enumerate(run.sizes(6, 4)):
        sides = []
        for length in (8 + i % 3, 10 + i % 2):
            mask = torch.ones(n, length, dtype=torch.int64)
            mask[0, -2:] = 0
            sides.append(dict(input_ids=tokens(64, n, length), attention_mask=mask))
        loss = criterion(sides, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)
