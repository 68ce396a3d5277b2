"""Small versions of the vision and sequence models that people train, written with torch.nn.
Imported by test_models.py.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

# ---- image classification ------------------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.down = None
        if stride != 1 or c_in != c_out:
            self.down = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        return F.relu(y + (x if self.down is None else self.down(x)))


class ResNet18(nn.Module):
    """The block counts of ResNet-18 at an eighth of its width."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width),
                                  nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        blocks, c_in = [], width
        for stage in range(4):
            c_out = width << stage
            for i in range(2):
                blocks.append(ResidualBlock(c_in, c_out, 2 if stage and not i else 1))
                c_in = c_out
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(c_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class Bottleneck(nn.Module):
    def __init__(self, c_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.down = None
        if stride != 1 or c_in != 4 * width:
            self.down = nn.Sequential(nn.Conv2d(c_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(y)) + (x if self.down is None else self.down(x)))


class ResNet50(nn.Module):
    """The block counts of ResNet-50, 3 4 6 3, at a sixteenth of its width."""

    def __init__(self, width: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width),
                                  nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        blocks, c_in = [], width
        for stage, count in enumerate((3, 4, 6, 3)):
            for i in range(count):
                blocks.append(Bottleneck(c_in, width << stage, 2 if stage and not i else 1))
                c_in = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(c_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class SqueezeExcite(nn.Module):
    """Its hard sigmoid is written out: that of torch has a gradient with float32's sixth in it, in float64 as well."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, channels // 4, 1)
        self.widen = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.relu6(self.widen(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))) + 3) / 6


class InvertedResidual(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int, kernel: int, activation: type[nn.Module]) -> None:
        super().__init__()
        wide = c_in * 4
        self.body = nn.Sequential(
            nn.Conv2d(c_in, wide, 1, bias=False), nn.BatchNorm2d(wide), activation(),
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False), nn.BatchNorm2d(wide),
            activation(), SqueezeExcite(wide), nn.Conv2d(wide, c_out, 1, bias=False), nn.BatchNorm2d(c_out))
        self.skip = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skip else self.body(x)


class MobileNet(nn.Module):
    """Depthwise convolutions, squeeze and excitation, ReLU6 and hard swish."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(),
            InvertedResidual(8, 8, 1, 3, nn.ReLU6), InvertedResidual(8, 12, 2, 5, nn.Hardswish),
            InvertedResidual(12, 12, 1, 3, nn.Hardswish),
            nn.Conv2d(12, 32, 1, bias=False), nn.BatchNorm2d(32, momentum=0.03), nn.Hardswish())
        self.head = nn.Sequential(nn.Linear(32, 24), nn.SiLU(), nn.Linear(24, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class VGG(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        c_in = 3
        for c in (8, "pool", 12, "pool", 16, 16, "pool"):
            if c == "pool":
                layers.append(nn.MaxPool2d(2, 2))
            else:
                layers += [nn.Conv2d(c_in, int(c), 3, padding=1), nn.ReLU(inplace=True)]
                c_in = int(c)
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Linear(64, 32), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(32, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


class GroupNormCNN(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2),
            nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=4), nn.GroupNorm(3, 12), nn.GELU(),
            nn.Conv2d(12, 12, 3, dilation=2, padding=2),
            nn.GroupNorm(1, 12), nn.Mish())
        self.fc = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_max_pool2d(self.body(x), 1).flatten(1))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Depthwise 7x7, channels-last linear layers, layer scale."""

    def __init__(self, width: int = 12, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 4, 4), LayerNorm2d(width, eps=1e-6))
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        x = x + (self.scale * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)
        return self.head(x.mean((-2, -1)))


class ViT(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 32, dropout=0.0, activation="gelu", batch_first=True,
                                           norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


# ---- images to images ----------------------------------------------------------------------------------------------


def double_conv(c_in: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True),
                         nn.Conv2d(c_out, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out),
                         nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Up by transposed convolution, or by bilinear interpolation and padding to the skip's size."""

    def __init__(self, bilinear: bool = False) -> None:
        super().__init__()
        self.enter, self.down1, self.down2 = double_conv(3, 6), double_conv(6, 8), double_conv(8, 12)
        self.bilinear = bilinear
        if bilinear:
            self.up1 = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
                                     nn.Conv2d(12, 8, 1))
            self.up2 = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
                                     nn.Conv2d(8, 6, 1))
        else:
            self.up1, self.up2 = nn.ConvTranspose2d(12, 8, 2, 2), nn.ConvTranspose2d(8, 6, 2, 2)
        self.merge1, self.merge2 = double_conv(16, 8), double_conv(12, 6)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.enter(x)
        b = self.down1(F.max_pool2d(a, 2))
        c = self.down2(F.max_pool2d(b, 2))
        y = self.merge1(torch.cat([b, self.up1(c)], 1))
        y = self.merge2(torch.cat([a, self.up2(y)], 1))
        return self.out(y)


class Generator(nn.Module):
    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ConvTranspose2d(latent, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
            nn.ConvTranspose2d(4, 3, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, z: Tensor) -> Tensor:
        return self.body(z)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 12, 4, 2, 1, bias=False), nn.BatchNorm2d(12), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(12, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).view(-1)


class VAE(nn.Module):
    """The noise is an input, so that two runs can be compared."""

    def __init__(self, latent: int = 6) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.ELU(), nn.Conv2d(6, 8, 3, 2, 1), nn.Softplus())
        self.mean, self.logvar = nn.Linear(8 * 16, latent), nn.Linear(8 * 16, latent)
        self.enter = nn.Linear(latent, 8 * 16)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(8, 6, 3, 2, 1, output_padding=1), nn.SELU(),
                                     nn.ConvTranspose2d(6, 1, 3, 2, 1, output_padding=1), nn.Sigmoid())

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x).flatten(1)
        mean, logvar = self.mean(h), self.logvar(h)
        z = mean + noise * torch.exp(0.5 * logvar)
        return self.decoder(self.enter(z).view(-1, 8, 4, 4)), mean, logvar


class SamplingVAE(VAE):
    """The noise is torch's, drawn in forward."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x, torch.randn(x.shape[0], self.mean.out_features, dtype=x.dtype))


class GAN(nn.Module):
    """Both halves in one module: the loss of the generator through the discriminator, and that of the discriminator,
    whose fakes
    are detached."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Generator(), Discriminator()

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fake = self.generator(noise)
        return self.discriminator(real), self.discriminator(fake.detach()), self.discriminator(fake)


class StyleNet(nn.Module):
    """Reflection padding, instance normalisation, nearest upsampling: as style transfer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReflectionPad2d(2), nn.Conv2d(3, 6, 5), nn.InstanceNorm2d(6, affine=True), nn.ReLU(),
            nn.ReflectionPad2d(1), nn.Conv2d(6, 8, 3, 2), nn.InstanceNorm2d(8), nn.ReLU(),
            nn.Upsample(scale_factor=2, mode="nearest"), nn.ReplicationPad2d(1), nn.Conv2d(8, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class SuperResolution(nn.Module):
    """Sub-pixel convolution over a bicubic base."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 5, padding=2), nn.Conv2d(8, 12, 3, padding=1)
        self.shuffle, self.prelu = nn.PixelShuffle(2), nn.PReLU(8)

    def forward(self, x: Tensor) -> Tensor:
        base = F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)
        return base + self.shuffle(self.conv2(self.prelu(self.conv1(x))))


class SpatialTransformer(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.locate = nn.Sequential(nn.Conv2d(1, 4, 5, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 6))
        self.register_buffer("identity", torch.tensor([1.0, 0, 0, 0, 1, 0]))
        self.conv, self.fc = nn.Conv2d(1, 6, 3), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        theta = (self.identity + 0.3 * self.locate(x)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        return self.fc(F.relu(self.conv(x)).amax((2, 3)))


# ---- sequences and volumes -----------------------------------------------------------------------------------------


class RecurrentLM(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, words: int = 30, width: int = 12, layers: int = 2,
                 bidirectional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.rnn = kind(width, width, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(width * (2 if bidirectional else 1), words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


class PackedLM(RecurrentLM):
    """Sequences of different lengths, packed."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=tokens.shape[1])
        return self.head(y)


class GraphNet(nn.Module):
    """Messages along edges, summed at their targets by scatter_add and divided by the degree;
    then by index_add with gates.
    """

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.enter, self.message, self.gate = nn.Linear(5, width), nn.Linear(2 * width, width), nn.Linear(width, width)
        self.update, self.norm, self.head = nn.GRUCell(width, width), nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        source, target = edges
        h = torch.relu(self.enter(nodes))
        sent = torch.tanh(self.message(torch.cat([h[source], h[target]], 1)))
        total = torch.zeros_like(h).scatter_add(0, target[:, None].expand_as(sent), sent)
        degree = torch.zeros(h.shape[0], dtype=h.dtype).index_add(0, target, torch.ones_like(target, dtype=h.dtype))
        h = self.update(total / degree.clamp(min=1)[:, None], h)
        gated = torch.sigmoid(self.gate(h))[source] * h[source]
        h = self.norm(h + torch.zeros_like(h).index_add(0, target, gated))
        pooled = torch.zeros(4, h.shape[1], dtype=h.dtype).index_add(0, graph, h)
        return self.head(pooled)


class CheckpointedTransformer(nn.Module):
    """Every block under torch.utils.checkpoint, with or without reentrance."""

    def __init__(self, reentrant: bool = False, dropout: float = 0.0, words: int = 30, width: int = 16) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(words, width), nn.Parameter(torch.randn(1, 7, width) * 0.1)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 32, dropout, batch_first=True,
                                                               norm_first=i > 0) for i in range(3))
        self.head, self.reentrant = nn.Linear(width, words), reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        causal = nn.Transformer.generate_square_subsequent_mask(7).to(x.dtype)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, causal, use_reentrant=self.reentrant)
        return self.head(x)


class WaveNet(nn.Module):
    """Causal dilated convolutions with gates, and weight normalisation."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, channels, 1)
        self.filters = nn.ModuleList(nn.Conv1d(channels, channels, 2, dilation=2**i) for i in range(3))
        self.gates = nn.ModuleList(nn.utils.parametrizations.weight_norm(nn.Conv1d(channels, channels, 2,
                                                                                   dilation=2**i)) for i in range(3))
        self.mixes = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(3))
        self.out = nn.Conv1d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.enter(x), 0
        for i, (f, g, mix) in enumerate(zip(self.filters, self.gates, self.mixes)):
            padded = F.pad(x, (2**i, 0))
            y = mix(torch.tanh(f(padded)) * torch.sigmoid(g(padded)))
            x, total = x + y, total + y
        return self.out(F.relu(total))


class VideoNet(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(2, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU(), nn.MaxPool3d((1, 2, 2)),
                                  nn.Conv3d(6, 8, (3, 1, 1), groups=2), nn.AvgPool3d(2, ceil_mode=True), nn.Hardtanh())
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool3d(self.body(x), 1).flatten(1))


class PatchNet(nn.Module):
    """Unfold, a linear map of the patches, fold."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3 * 9, 2 * 9)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 3, padding=1, stride=2)
        return F.fold(self.map(patches.transpose(1, 2)).transpose(1, 2), (12, 12), 3, padding=1, stride=2)
