"""The models that tests/bench/models.py trains: one or more of each family, from timm, torchvision, transformers,
torch_geometric, diffusers and plain torch, at sizes whose step takes 50 ms to 1 s on two cores.

Widths, depths and dropouts are the library's own, except where a full model is too large for that; weights are random.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

CLASSES = 100
Batch = tuple[Any, ...]


class Model(NamedTuple):
    module: nn.Module
    batch: Callable[[], Batch]  # draws another one at each call
    loss: Callable[..., Tensor]  # (module, *batch)
    outputs: str = ""  # which of the module's results it reads, as ORTMODULE_OUTPUTS has it; all


MODELS: dict[str, Callable[[], Model]] = {}


def add(name: str, maker: Callable[..., Model], *arguments: Any, **options: Any) -> None:
    MODELS[name] = functools.partial(maker, *arguments, **options)


# ---- images ----


@functools.cache
def vision() -> tuple[ModuleType, ModuleType]:
    """timm and torchvision, which tests/setup.sh puts in a folder that other libraries must not search."""
    sys.path.append(str(pathlib.Path(sys.prefix) / "vision"))
    try:
        import torchvision
    except RuntimeError:  # PyPI's package has operators for a torch with CUDA; declared, they are not missed
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}",
                                 "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        import timm
        import torchvision
    finally:
        sys.path.pop()
    return timm, torchvision


def images(module: nn.Module, batch: int, size: int, classes: int = CLASSES) -> Model:
    """A classifier of color images."""
    return Model(module, lambda: (torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))),
                 lambda m, x, y: F.cross_entropy(m(x), y))


def torchvision_model(name: str, batch: int, size: int, **options: Any) -> Model:
    return images(getattr(vision()[1].models, name)(num_classes=CLASSES, **options), batch, size)


def timm_model(name: str, batch: int, size: int, **options: Any) -> Model:
    return images(vision()[0].create_model(name, num_classes=CLASSES, **options), batch, size)


def pixel_labels(module: nn.Module, batch: int, size: int, classes: int, key: str | None = None) -> Model:
    """A model that labels every pixel."""
    return Model(module, lambda: (torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch, size, size))),
                 lambda m, x, y: F.cross_entropy(m(x) if key is None else m(x)[key], y))


def deeplab(batch: int, size: int) -> Model:
    make = vision()[1].models.segmentation.deeplabv3_resnet50
    return pixel_labels(make(weights=None, weights_backbone=None, num_classes=21), batch, size, 21, "out")


def two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
                         nn.ReLU(inplace=True), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
                         nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Ronneberger et al., 2015, with padding and BatchNorm, half as wide."""

    def __init__(self, classes: int = 2, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.enter = two_convolutions(3, width)
        self.down = nn.ModuleList(two_convolutions(width << i, width << i + 1) for i in range(depth))
        self.up = nn.ModuleList(nn.ConvTranspose2d(width << i + 1, width << i, 2, 2) for i in reversed(range(depth)))
        self.merge = nn.ModuleList(two_convolutions(width << i + 1, width << i) for i in reversed(range(depth)))
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.enter(x)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat((levels.pop(), up(x)), 1))
        return self.out(x)


def video(batch: int, frames: int, size: int) -> Model:
    """torchvision's ResNet-18 of 3 x 3 x 3 convolutions."""
    return Model(vision()[1].models.video.r3d_18(num_classes=CLASSES),
                 lambda: (torch.randn(batch, 3, frames, size, size), torch.randint(0, CLASSES, (batch,))),
                 lambda m, x, y: F.cross_entropy(m(x), y))


class Autoencoder(nn.Module):
    """Strided convolutions down to a vector and transposed ones back."""

    def __init__(self, size: int, width: int = 32, latent: int = 128) -> None:
        super().__init__()
        self.low = size // 8
        flat = 4 * width * self.low**2
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2), nn.Conv2d(2 * width, 4 * width, 4, 2, 1),
            nn.BatchNorm2d(4 * width), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(flat, latent))
        self.decoder = nn.Sequential(
            nn.Linear(latent, flat), nn.Unflatten(1, (4 * width, self.low, self.low)),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def autoencoder(batch: int, size: int) -> Model:
    return Model(Autoencoder(size), lambda: (torch.rand(batch, 3, size, size),), lambda m, x: F.mse_loss(m(x), x))


def diffusion(batch: int, size: int) -> Model:
    """diffusers' U-Net that predicts the noise in an image: GroupNorm, SiLU, attention at the lower levels."""
    from diffusers import UNet2DModel
    module = UNet2DModel(sample_size=size, block_out_channels=(32, 64, 64), layers_per_block=1, norm_num_groups=8,
                         down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
                         up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"), attention_head_dim=16)
    return Model(module, lambda: (torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,)),
                                  torch.randn(batch, 3, size, size)),
                 lambda m, x, time, noise: F.mse_loss(m(x, time, return_dict=False)[0], noise))


add("resnet50 8x128", torchvision_model, "resnet50", 8, 128)
add("resnet50 2x224", torchvision_model, "resnet50", 2, 224)
add("resnext50 4x128", torchvision_model, "resnext50_32x4d", 4, 128)
add("mobilenetv3 16x128", torchvision_model, "mobilenet_v3_large", 16, 128)
add("mobilenetv3 4x224", torchvision_model, "mobilenet_v3_large", 4, 224)
add("efficientnet_b0 8x128", torchvision_model, "efficientnet_b0", 8, 128)
add("efficientnet_b0 2x224", torchvision_model, "efficientnet_b0", 2, 224)
add("densenet121 4x128", torchvision_model, "densenet121", 4, 128)
add("vgg16_bn 4x96", torchvision_model, "vgg16_bn", 4, 96)
add("convnext_tiny 4x128", torchvision_model, "convnext_tiny", 4, 128)
add("regnet_y_400mf 16x128", torchvision_model, "regnet_y_400mf", 16, 128)
add("shufflenet_v2 16x160", torchvision_model, "shufflenet_v2_x1_0", 16, 160)
add("unet 2x128", lambda: pixel_labels(UNet(), 2, 128, 2))
add("deeplabv3 2x97", deeplab, 2, 97)
add("vit_small 4x224", timm_model, "vit_small_patch16_224", 4, 224)
add("swin_tiny 2x224", timm_model, "swin_tiny_patch4_window7_224", 2, 224)
add("poolformer_s12 4x160", timm_model, "poolformer_s12", 4, 160)
add("mixer_s16 4x224", timm_model, "mixer_s16_224", 4, 224)
add("levit_128s 16x224", timm_model, "levit_128s", 16, 224)
add("r3d_18 2x8x48", video, 2, 8, 48)
add("autoencoder 64x64", autoencoder, 64, 64)
add("diffusion_unet 8x32", diffusion, 8, 32)


# ---- text and sound: transformers, which compute the loss inside ----


def labelled(config: str, model: str, batch: int, length: int, **settings: Any) -> Model:
    """A language model of transformers whose labels are its words."""
    import transformers
    module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    words = settings["vocab_size"]

    def draw() -> Batch:
        return torch.randint(3, words, (batch, length)), torch.randint(3, words, (batch, length))
    return Model(module, draw, lambda m, x, y: m(input_ids=x, labels=y).loss, "loss")


def classifier(batch: int, length: int) -> Model:
    """DistilBERT, three of its layers, over texts of different lengths, with the loss outside."""
    import transformers
    config = transformers.DistilBertConfig(n_layers=3, num_labels=5)

    def draw() -> Batch:
        lengths = torch.randint(length // 4, length + 1, (batch, 1))
        mask = (torch.arange(length) < lengths).long()
        return torch.randint(3, 30522, (batch, length)) * mask, mask, torch.randint(0, 5, (batch,))
    return Model(transformers.DistilBertForSequenceClassification(config), draw,
                 lambda m, x, mask, y: F.cross_entropy(m(input_ids=x, attention_mask=mask).logits, y))


def whisper(batch: int, frames: int, length: int) -> Model:
    """Whisper tiny over shorter sounds."""
    import transformers
    config = transformers.WhisperConfig(
        d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6, decoder_attention_heads=6,
        encoder_ffn_dim=1536, decoder_ffn_dim=1536, max_source_positions=frames // 2, dropout=0.1, use_cache=False)
    return Model(transformers.WhisperForConditionalGeneration(config),
                 lambda: (torch.randn(batch, 80, frames), torch.randint(3, 50000, (batch, length))),
                 lambda m, x, y: m(input_features=x, labels=y).loss, "loss")


HEADS = dict(num_attention_heads=8, num_key_value_heads=4)

add("bert 4x128", labelled, "BertConfig", "BertForMaskedLM", 4, 128, vocab_size=30522, hidden_size=512,
    num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048)
add("distilbert 8x128", classifier, 8, 128)
add("gpt2 4x128", labelled, "GPT2Config", "GPT2LMHeadModel", 4, 128, vocab_size=50257, n_embd=384, n_layer=6, n_head=6,
    use_cache=False)
add("gpt2 1x512", labelled, "GPT2Config", "GPT2LMHeadModel", 1, 512, vocab_size=50257, n_embd=384, n_layer=6, n_head=6,
    use_cache=False)
add("llama 4x128", labelled, "LlamaConfig", "LlamaForCausalLM", 4, 128, vocab_size=32000, hidden_size=512,
    num_hidden_layers=4, intermediate_size=1376, use_cache=False, **HEADS)
add("mixtral 4x64", labelled, "MixtralConfig", "MixtralForCausalLM", 4, 64, vocab_size=8000, hidden_size=256,
    num_hidden_layers=4, intermediate_size=512, num_local_experts=8, use_cache=False, **HEADS)
add("t5_small 4x64", labelled, "T5Config", "T5ForConditionalGeneration", 4, 64, vocab_size=32128, use_cache=False,
    pad_token_id=0, decoder_start_token_id=0)
add("whisper_tiny 2x400", whisper, 2, 400, 48)
add("mamba 4x32", labelled, "MambaConfig", "MambaForCausalLM", 4, 32, vocab_size=8000, hidden_size=256,
    num_hidden_layers=2, use_cache=False)


# ---- sequences, tables, graphs and functions: plain torch ----


class RecurrentLM(nn.Module):
    """Words to words by LSTM, with dropout between its layers."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(words, width), nn.Dropout(0.2)
        self.rnn = nn.LSTM(width, width, layers, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.rnn(self.drop(self.embed(x)))[0]))


def lstm(batch: int, length: int, words: int = 5000, width: int = 256) -> Model:
    return Model(RecurrentLM(words, width, 2), lambda: (torch.randint(0, words, (batch, length)),
                                                        torch.randint(0, words, (batch * length,))),
                 lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y))


class PackedTagger(nn.Module):
    """A class for each text from a bidirectional GRU over packed sequences."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        _, last = self.rnn(packed)
        return self.head(torch.cat((last[0], last[1]), 1))


def gru(batch: int, length: int, words: int = 10000, width: int = 192) -> Model:
    def draw() -> Batch:
        lengths = torch.randint(length // 2, length + 1, (batch,))
        lengths[0] = length
        return torch.randint(0, words, (batch, length)), lengths, torch.randint(0, 10, (batch,))
    return Model(PackedTagger(words, width), draw, lambda m, x, lengths, y: F.cross_entropy(m(x, lengths), y))


class Causal(nn.Module):
    """A dilated convolution over time that reads no later step, with its weight normalized as TCN's."""

    def __init__(self, inputs: int, outputs: int, dilation: int, normalized: bool = False) -> None:
        super().__init__()
        convolution = nn.Conv1d(inputs, outputs, 3, dilation=dilation)
        self.convolution = nn.utils.parametrizations.weight_norm(convolution) if normalized else convolution
        self.padding = 2 * dilation

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(F.pad(x, (self.padding, 0)))


class TCN(nn.Module):
    """Bai et al., 2018."""

    def __init__(self, inputs: int, width: int, levels: int) -> None:
        super().__init__()
        self.enter = nn.Conv1d(inputs, width, 1)
        self.blocks = nn.ModuleList(nn.Sequential(
            Causal(width, width, 1 << level, True), nn.ReLU(), nn.Dropout(0.1),
            Causal(width, width, 1 << level, True), nn.ReLU(), nn.Dropout(0.1)) for level in range(levels))
        self.head = nn.Conv1d(width, inputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x)


class WaveNet(nn.Module):
    """Gated causal convolutions with skips (van den Oord et al., 2016)."""

    def __init__(self, levels: int, width: int = 64, skips: int = 128, values: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(values, width)
        self.gates = nn.ModuleList(Causal(width, 2 * width, 1 << level) for level in range(levels))
        self.residual = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(levels))
        self.skip = nn.ModuleList(nn.Conv1d(width, skips, 1) for _ in range(levels))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(skips, skips, 1), nn.ReLU(), nn.Conv1d(skips, values, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.embed(x).transpose(1, 2), 0
        for gates, residual, skip in zip(self.gates, self.residual, self.skip):
            a, b = gates(x).chunk(2, 1)
            y = torch.tanh(a) * torch.sigmoid(b)
            x, total = x + residual(y), total + skip(y)
        return self.head(total)


def tcn(batch: int, length: int) -> Model:
    return Model(TCN(16, 96, 6), lambda: (torch.randn(batch, 16, length), torch.randn(batch, 16, length)),
                 lambda m, x, y: F.mse_loss(m(x), y))


def wavenet(batch: int, length: int) -> Model:
    return Model(WaveNet(9), lambda: (torch.randint(0, 256, (batch, length)), torch.randint(0, 256, (batch, length))),
                 lambda m, x, y: F.cross_entropy(m(x), y))


class DLRM(nn.Module):
    """Naumov et al., 2019: bags of categories and dense features, and the products of their vectors."""

    def __init__(self, tables: int, rows: int, width: int, dense: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
                                 nn.Linear(128, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: Tensor, bags: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(bag(rows) for bag, rows in zip(self.bags, bags))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top(torch.cat((x, products[:, self.pairs[0], self.pairs[1]]), 1)).squeeze(1)


def dlrm(batch: int, tables: int = 16, rows: int = 10000, width: int = 32, dense: int = 13) -> Model:
    return Model(DLRM(tables, rows, width, dense),
                 lambda: (torch.randn(batch, dense), torch.randint(0, rows, (tables, batch, 4)),
                          torch.randint(0, 2, (batch,)).float()),
                 lambda m, x, bags, y: F.binary_cross_entropy_with_logits(m(x, bags), y))


def graph_network(kind: str, nodes: int, edges: int) -> Model:
    """torch_geometric's network of three layers that labels every node of a graph."""
    import torch_geometric.nn
    module = getattr(torch_geometric.nn, kind)(64, 128, 3, 16, dropout=0.1)
    return Model(module, lambda: (torch.randn(nodes, 64), torch.randint(0, nodes, (2, edges)),
                                  torch.randint(0, 16, (nodes,))),
                 lambda m, x, edges, y: F.cross_entropy(m(x, edges), y))


class NarrowMLP(nn.Sequential):
    """Tanh layers as networks for differential equations have them."""

    def __init__(self, width: int, layers: int) -> None:
        sizes = (2, *[width] * layers)
        hidden = [part for i, o in zip(sizes, sizes[1:]) for part in (nn.Linear(i, o), nn.Tanh())]
        super().__init__(*hidden, nn.Linear(width, 1))


def narrow_mlp(batch: int) -> Model:
    return Model(NarrowMLP(64, 8), lambda: (torch.rand(batch, 2), torch.rand(batch, 1)),
                 lambda m, x, y: F.mse_loss(m(x), y))


def translator(batch: int, length: int, words: int = 8000, width: int = 256) -> Model:
    """nn.Transformer between two texts."""
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(words, width)
            self.body = nn.Transformer(width, 8, 3, 3, 4 * width, 0.1, batch_first=True)
            self.head = nn.Linear(width, words)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
            return self.head(self.body(self.embed(x), self.embed(y), tgt_mask=mask, tgt_is_causal=True))
    return Model(Translator(), lambda: tuple(torch.randint(0, words, (batch, length)) for _ in range(3)),
                 lambda m, x, y, z: F.cross_entropy(m(x, y).flatten(0, 1), z.flatten()))


add("transformer 8x64", translator, 8, 64)
add("lstm 16x64", lstm, 16, 64)
add("gru_packed 32x64", gru, 32, 64)
add("tcn 16x512", tcn, 16, 512)
add("wavenet 4x1024", wavenet, 4, 1024)
add("dlrm 8192", dlrm, 8192)
add("gcn 10000", graph_network, "GCN", 10000, 100000)
add("gat 10000", graph_network, "GAT", 10000, 100000)
add("narrow_mlp 32768", narrow_mlp, 32768)

